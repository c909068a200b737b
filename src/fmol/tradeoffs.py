"""Sets of trade-offs: which of them are beaten, and how much all of them together cover.

A trade-off is one number per objective, a row of `[n, S]`: losses, of which less is better, or metrics
of which more is, as `maximise` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fmol import rng

__all__ = [
    "Hypervolume",
    "dominates",
    "exact_limit",
    "hypervolume",
    "load_moocore",
    "non_dominated",
]

Array = NDArray[np.float64]
Points = Tensor | ArrayLike
Maximise = bool | Sequence[bool]
"""Whether more is better, for all objectives or for each."""

BLOCK = 2**24
"""Comparisons at a time: what keeps the memory of `non_dominated` at some megabytes."""
EXACT_POINTS = {6: 2000, 7: 400, 8: 200, 9: 110, 10: 70, 11: 50, 12: 40}
"""Objectives → the most points whose hypervolume is exact within some ten seconds, as measured."""
FEWEST_EXACT = 12
"""What is exact with more objectives than that: so few points take no time."""
MOST_OBJECTIVES = 31
"""More are beyond what moocore computes."""
BATCHES, SAMPLES = 8, 2**15
"""An estimate is the mean of so many, each from so many directions."""


def dominates(one: Points, other: Points, maximise: Maximise = False) -> bool:
    """Whether `one` `[S]` is at least as good as `other` for every objective and better for some.

    >>> dominates([0.1, 0.5], [0.2, 0.5]), dominates([0.1, 0.6], [0.2, 0.5])
    (True, False)
    >>> dominates([0.1, 0.9], [0.2, 0.8], maximise=[False, True])  # a loss and an accuracy
    True
    """
    rows = [np.atleast_2d(_numbers(each)) for each in (one, other)]
    if rows[0].shape != rows[1].shape or len(rows[0]) != 1:
        raise ValueError(
            f"`one` and `other` must have a number for each of the same objectives, got shapes "
            f"{_numbers(one).shape} and {_numbers(other).shape}. Give two vectors of one length."
        )
    a, b = _as_losses(np.concatenate(rows), maximise)
    return bool((a <= b).all() and (a < b).any())


def non_dominated(points: Points, maximise: Maximise = False) -> NDArray[np.bool_]:
    """Which of `points` `[n, S]` no other one dominates, `[n]`.

    Copies do not dominate one another: either all of them are kept or none. Of two points that differ
    in one objective alone, the better one dominates.

    >>> non_dominated([[0.1, 0.9], [0.5, 0.5], [0.6, 0.6], [0.5, 0.5]])
    array([ True,  True, False,  True])
    """
    losses = _as_losses(_read(points), maximise)
    n = len(losses)
    kept = np.ones(n, dtype=bool)
    size = max(1, BLOCK // max(1, n * losses.shape[1]))
    for start in range(0, n, size):
        mine = losses[start : start + size, None, :]
        better = np.all(losses <= mine, axis=2) & np.any(losses < mine, axis=2)
        kept[start : start + size] = ~better.any(axis=1)
    return kept


@dataclass(frozen=True)
class Hypervolume:
    """How much of the space before a reference point some trade-offs dominate, in losses' units."""

    value: float
    error: float
    """The standard error of an estimate; 0 for an exact value."""
    exact: bool
    reference: tuple[float, ...]
    beyond: tuple[int, ...]
    """Points that are not better than the reference for every objective: they add nothing."""

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        about = "" if self.exact else f" ± {self.error:.2g} (an estimate)"
        words = f"hypervolume {self.value:.6g}{about}"
        if self.beyond:
            more = len(self.beyond) > 1
            words += (
                f"; {len(self.beyond)} {'points are' if more else 'point is'} beyond the reference "
                f"and {'add' if more else 'adds'} nothing"
            )
        return words


def exact_limit(objectives: int) -> int | None:
    """How many points' hypervolume is computed exactly with so many objectives; None is any number.

    >>> exact_limit(3), exact_limit(8)
    (None, 200)
    """
    if objectives < min(EXACT_POINTS):
        return None
    return EXACT_POINTS.get(objectives, FEWEST_EXACT)


def hypervolume(
    points: Points,
    reference: Points,
    *,
    maximise: Maximise = False,
    estimate: bool = False,
    seed: int = 0,
) -> Hypervolume:
    """The volume that `points` `[n, S]` dominate up to `reference` `[S]`.

    The reference is always given: another one gives another number, and may order two sets of points
    the other way, so compare with one reference alone. Points beyond it add nothing, which the result
    says. Exact values take time that grows with about the power `S − 2` of the number of points; where
    that is more than some seconds (`exact_limit`) it is refused, and `estimate` takes a mean over
    random directions instead, with a standard error.

    >>> volume = hypervolume([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [5.0, 0.5]], reference=[4.0, 4.0])
    >>> print(volume)
    hypervolume 6; 1 point is beyond the reference and adds nothing
    """
    losses = _as_losses(_read(points), maximise)
    corner = _numbers(reference)
    if corner.shape != (losses.shape[1],) or not np.isfinite(corner).all():
        raise ValueError(
            f"`reference` must be {losses.shape[1]} finite numbers, one per objective, got "
            f"{corner.tolist()}. Give the worst value of each that still counts."
        )
    worst = _as_losses(corner[None, :], maximise)[0]
    inside = (losses < worst).all(axis=1)
    beyond = tuple(np.flatnonzero(~inside).tolist())
    counted = losses[inside]
    # Without those that are dominated, which cost time and change nothing.
    counted = np.unique(counted[non_dominated(counted)], axis=0) if len(counted) else counted
    given = tuple(corner.tolist())
    if not len(counted):
        return Hypervolume(0.0, 0.0, True, given, beyond)
    if not np.isfinite(counted).all():
        raise ValueError(
            "`points` has one that is infinitely good, whose volume has no end. Take it out."
        )
    moocore = load_moocore(losses.shape[1])
    if not estimate:
        _refuse_if_slow(len(counted), losses.shape[1])
        return Hypervolume(float(moocore.hypervolume(counted, ref=worst)), 0.0, True, given, beyond)
    batches = [
        float(
            moocore.hv_approx(counted, ref=worst, nsamples=SAMPLES, seed=each, method="DZ2019-MC")
        )
        for each in (int(rng.key(seed, "hypervolume", i)) % 2**32 for i in range(BATCHES))
    ]
    error = float(np.std(batches, ddof=1)) / math.sqrt(BATCHES)
    return Hypervolume(float(np.mean(batches)), error, False, given, beyond)


def _refuse_if_slow(count: int, objectives: int) -> None:
    limit = exact_limit(objectives)
    if limit is not None and count > limit:
        raise ValueError(
            f"the exact hypervolume of {count} points in {objectives} objectives could take minutes to "
            f"years: up to {limit} points it takes seconds. Pass `estimate=True`, or fewer points."
        )


def load_moocore(objectives: int) -> Any:
    """The package that computes hypervolumes; raises where it is not there, or not for so many."""
    if objectives > MOST_OBJECTIVES:
        raise ValueError(
            f"hypervolume is computed for at most {MOST_OBJECTIVES} objectives, got {objectives}. Take "
            "some of them; with so many nearly every point is on the front anyway."
        )
    try:
        import moocore
    except ImportError as error:
        raise ImportError(
            '`hypervolume` needs moocore. Install it with: pip install "fmol[moocore]".'
        ) from error
    return moocore


def _numbers(values: Points) -> Array:
    given = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    return np.asarray(given, dtype=np.float64)


def _read(points: Points) -> Array:
    """`points` `[n, S]`, checked."""
    values = _numbers(points)
    if values.ndim != 2 or values.shape[1] == 0:
        raise ValueError(
            f"`points` must be a table with a row per point and a column per objective, got shape "
            f"{values.shape}. Give `[n, S]`."
        )
    return values


def _as_losses(values: Array, maximise: Maximise) -> Array:
    """The same with signs turned where more is better; refuses what cannot be compared."""
    broken = np.argwhere(np.isnan(values))
    if len(broken):
        row, column = broken[0]
        raise ValueError(
            f"`points` has no number at [{row}, {column}] (NaN), which is neither better nor worse "
            "than another. Leave that point out, or measure it."
        )
    turned = np.asarray(maximise)
    if turned.dtype != np.bool_ or turned.shape not in ((), (values.shape[1],)):
        raise ValueError(
            f"`maximise` must be true or false, or that for each of {values.shape[1]} objectives, got "
            f"{maximise!r}."
        )
    return np.where(turned, -values, values)
