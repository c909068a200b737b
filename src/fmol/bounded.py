"""The min-norm step with bounds on the weights: the shortest `d = Σ_s λ_s Δ_s` that a box allows.

    min ‖Σ_A λ_s Δ_s + Σ_C μ_c Δ_c‖²,   l ≤ λ ≤ u, Σ_A λ_s = 1, μ ≥ 0

with active objectives `A` and protected ones `C`. In the lengths `ν_s = λ_s‖Δ_s‖` the matrix is that of
the cosines, plus the ridge that `fmol.minnorm` explains, and `bᵀν = β` is the sum. Every row is free or
at one of its bounds; given which, one linear solve has ν and the multiplier θ of the sum, and it is
right where `w = θb − Hν` is at most zero at lower bounds and at least zero at upper ones.

As there, whole blocks of rows that are on the wrong side are exchanged first, which takes a handful of
solves and may cycle; then an active-set method goes from a feasible point to the solution, each step
shorter than the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fmol.blas import one_thread
from fmol.minnorm import (
    NOISE,
    RELATIVE,
    RIDGE,
    TOLERANCE,
    Array,
    Mask,
    read_gramian,
    read_protected,
)

__all__ = ["BoundedSolution", "min_norm_within"]

SLACK = 1e-9
"""How far bounds may be from allowing a sum of one."""

LOWER, FREE, UPPER = -1, 0, 1
Places = NDArray[np.int8]
"""For each row whether it is at its lower bound, free, or at its upper bound."""


@dataclass(frozen=True, eq=False)
class BoundedSolution:
    """The weights `[S]`, float64 on the CPU, and the proof that none within the bounds are better.

    - `norm_squared`: `‖d‖²`.
    - `gap`: the largest `(‖d‖² − ⟨d', d⟩)/‖d‖²` over all `d'` that the bounds allow, and
      `−⟨Δ_c, d⟩/‖d‖²` over protected objectives. 0 (to rounding) says that `d` is the shortest; it does
      not say that every objective falls, which bounds may forbid.
    - `stationary`: `‖d‖` is zero as far as a float64 Gramian can tell; then `gap` is 0.

    >>> solution = min_norm_within([[1.0, 0.0], [0.0, 4.0]], lower=0.0, upper=0.6)
    >>> round(solution.norm_squared, 9), abs(solution.gap) < 1e-12, solution.stationary
    (1.0, True, False)
    """

    weights: Tensor
    norm_squared: float
    gap: float
    stationary: bool


@dataclass(frozen=True)
class _Problem:
    """`min ½νᵀHν` with `lower ≤ ν ≤ upper` and `bᵀν = β`; `H` is positive definite."""

    H: Array
    b: Array
    beta: float
    lower: Array
    upper: Array


def min_norm_within(
    gramian: Tensor | ArrayLike,
    lower: Tensor | ArrayLike,
    upper: Tensor | ArrayLike,
    protected: Tensor | Sequence[bool] | Mask | None = None,
) -> BoundedSolution:
    """The weights of the shortest vector in the hull with `lower ≤ λ ≤ upper`, from the Gramian.

    The bounds `[S]` (or one number for all) are those of active objectives, whose weights sum to one.
    A protected objective has a multiplier of at least zero instead.

    >>> min_norm_within([[1.0, 0.0], [0.0, 4.0]], lower=0.0, upper=0.6).weights
    tensor([0.6000, 0.4000], dtype=torch.float64)
    """
    correlation, norms = read_gramian(gramian)
    S = len(norms)
    mask = read_protected(protected, S)
    guarded = np.zeros(S, dtype=bool) if mask is None else mask
    least, most = _read_bounds(lower, upper, guarded)
    with one_thread(S):
        weights = _solve(correlation, norms, least, most, guarded, 1.0)
        _put_on_the_sum(weights, norms, least, most, ~guarded)
        idle = (norms == 0) & ~guarded
        if idle.any():
            weights[idle] = _level(weights[idle], least[idle], most[idle])
        told = _certify(correlation, norms, weights, least, most, guarded)
    return BoundedSolution(torch.from_numpy(weights), *told)


def guard(correlation: Array, norms: Array, weights: Array, protected: Mask) -> Array:
    """`weights` `[S]` with the multipliers μ ≥ 0 of protected rows that bend `d` away from harm.

    The direction becomes the nearest one with `⟨Δ_c, d⟩ ≥ 0` for every protected `c`.
    """
    fixed = np.where(protected, 0.0, weights)
    most = np.where(protected, np.inf, fixed)
    with one_thread(len(norms)):
        found = _solve(correlation, norms, fixed, most, protected, float(fixed.sum()))
    return np.where(protected, found, weights)


def _read_bounds(
    lower: Tensor | ArrayLike, upper: Tensor | ArrayLike, guarded: Mask
) -> tuple[Array, Array]:
    """The bounds `[S]`, 0 and ∞ for protected rows; refused where no weights keep to them."""
    found = []
    for name, given in (("lower", lower), ("upper", upper)):
        if isinstance(given, Tensor):
            given = given.cpu().double().numpy(force=True)
        bound = np.asarray(given, dtype=np.float64)
        if bound.shape not in ((), guarded.shape) or np.isnan(bound).any():
            raise ValueError(
                f"`{name}` must be one number or {len(guarded)}, one per row of the Gramian, got "
                f"{bound.tolist()}. Give a bound for every weight."
            )
        found.append(np.broadcast_to(bound, guarded.shape).copy())
    least, most = found
    active = ~guarded
    total = least[active].sum(), most[active].sum()
    if not (
        (least <= most)[active].all() and least[active].min() >= 0 and total[0] <= 1 + SLACK
    ) or not (total[1] >= 1 - SLACK):
        raise ValueError(
            f"`lower` {least[active].tolist()} and `upper` {most[active].tolist()} leave no weights of "
            "at least zero that sum to one. Let the lower bounds sum to at most one and the upper "
            "ones to at least one."
        )
    least[guarded], most[guarded] = 0.0, np.inf
    return least, most


def _solve(
    correlation: Array, norms: Array, least: Array, most: Array, guarded: Mask, total: float
) -> Array:
    """λ on the active rows, μ on the protected ones, `[S]`; the active ones sum to `total`."""
    S = len(norms)
    # A row of length zero costs nothing whatever its weight: any length that is none of the others'
    # stands for it. Protected, it has nothing to lose.
    lengths = np.where(norms > 0, norms, norms[norms > 0].min() if norms.any() else 1.0)
    most = np.where(guarded & (norms == 0), 0.0, most)
    # A bound that the others' imply is none: two names for one corner would make solvers go in circles.
    implied = ~guarded & (least < most) & (most >= total - least[~guarded].sum() + least)
    most = np.where(implied, np.inf, most)
    # The bounds in lengths; the shortest active row sets the unit, so that b is at most one.
    unit = float(lengths[~guarded].min())
    b = np.where(guarded, 0.0, unit / lengths)
    H = correlation + b[:, None] * b
    diagonal = H.diagonal().copy()
    ridge = RIDGE * math.sqrt(S)
    while True:
        H.flat[:: S + 1] = diagonal + ridge
        problem = _Problem(H, b, total, least * (lengths / unit), most * (lengths / unit))
        try:
            nu = _exchange_blocks(problem)
            if nu is None:
                nu = _walk_down(problem)
        except np.linalg.LinAlgError:
            ridge *= 10  # The Gramian's noise is larger than that of float64.
        else:
            return nu * (unit / lengths)


def _on_the_face(problem: _Problem, places: Places) -> tuple[Array, float | None]:
    """ν `[S]` that is best with rows at bounds as `places` has them, and θ; None where no row that is
    free counts in the sum, which is then what the bounds make it."""
    H, b = problem.H, problem.b
    nu = np.where(places == UPPER, problem.upper, problem.lower)
    rows = np.flatnonzero(places == FREE)
    nu[rows] = 0.0
    if not len(rows):
        return nu, None
    pull = b[rows]
    answers = np.linalg.solve(
        H.take(rows, 0).take(rows, 1), np.stack([-H[rows].dot(nu), pull], axis=1)
    )
    if not pull.any():
        nu[rows] = answers[:, 0]
        return nu, None
    theta = (problem.beta - b.dot(nu) - pull.dot(answers[:, 0])) / pull.dot(answers[:, 1])
    nu[rows] = answers[:, 0] + theta * answers[:, 1]
    return nu, float(theta)


def _slopes(
    problem: _Problem, nu: Array, theta: float | None, places: Places
) -> tuple[Array, Array]:
    """`w = θb − Hν` `[S]` and how far from zero it may be on the wrong side.

    Where θ is open, it is the one that serves best the row that asks most of it.
    """
    H, b = problem.H, problem.b
    slope = H.dot(nu)
    if theta is None:
        movable = (b > 0) & (problem.lower < problem.upper)
        down, up = movable & (places == UPPER), movable & (places == LOWER)
        ratio = np.divide(slope, b, out=np.zeros_like(slope), where=b > 0)
        ceiling = ratio[up].min() if up.any() else None
        floor = ratio[down].max() if down.any() else None
        known = [each for each in (floor, ceiling) if each is not None]
        theta = float(sum(known) / len(known)) if known else 0.0
    noise = TOLERANCE * len(b) * math.sqrt(nu.dot(nu))
    # H has bbᵀ in it, and θ its share of that: what is left is ‖d‖² where no bound is met.
    return theta * b - slope, RELATIVE * abs(theta - problem.beta) * b + noise


def _wrong(problem: _Problem, nu: Array, w: Array, tolerance: Array, places: Places) -> Mask:
    """Which rows are out of their bounds, or at one that they should leave."""
    at_bound = ((places == LOWER) & (w > tolerance)) | ((places == UPPER) & (w < -tolerance))
    free = (places == FREE) & ((nu < problem.lower) | (nu > problem.upper))
    result: Mask = (at_bound & (problem.lower < problem.upper)) | free
    return result


def _exchange_blocks(problem: _Problem) -> Array | None:
    """ν `[S]` by exchanging all rows on the wrong side at once, None where that does not get there."""
    places = np.where(problem.lower < problem.upper, FREE, LOWER).astype(np.int8)
    fewest, patience = len(places) + 1, 3
    while True:
        nu, theta = _on_the_face(problem, places)
        if theta is None and (problem.b > 0)[problem.lower < problem.upper].any():
            return None  # All at bounds: their sum need not be right.
        w, tolerance = _slopes(problem, nu, theta, places)
        wrong = _wrong(problem, nu, w, tolerance, places)
        count = int(np.count_nonzero(wrong))
        if count == 0:
            return nu
        if count < fewest:
            fewest, patience = count, 3
        elif patience > 0:
            patience -= 1
        else:
            return None
        leaving = np.where(nu < problem.lower, LOWER, UPPER)
        places = np.where(wrong, np.where(places == FREE, leaving, FREE), places).astype(np.int8)


def _walk_down(problem: _Problem) -> Array:
    """ν `[S]` by an active-set method from a feasible point.

    Every step goes towards the best point of the face, and ends where a row reaches a bound; that row
    stays there. On the best point of a face, the row that is most on the wrong side leaves its bound.
    """
    lower, upper, b = problem.lower, problem.upper, problem.b
    S = len(b)
    nu = _feasible(problem)
    places = np.where(nu <= lower, LOWER, np.where(nu >= upper, UPPER, FREE)).astype(np.int8)
    best, least, stuck = nu, math.inf, 0
    for _ in range(20 * S + 100):
        goal, theta = _on_the_face(problem, places)
        if theta is None and not (places == FREE).any():
            goal = nu
        step = goal - nu
        limit = np.where(step < 0, lower, upper) - nu
        blocked = (places == FREE) & (step != 0)
        fraction = np.full(S, np.inf)
        np.divide(limit, step, out=fraction, where=blocked)
        first = float(fraction.min(initial=math.inf))
        if first < 1:
            nu = np.clip(nu + max(first, 0.0) * step, lower, upper)
            stopped = fraction <= first
            places[stopped] = np.where(step < 0, LOWER, UPPER)[stopped]
            nu[stopped] = np.where(step < 0, lower, upper)[stopped]
            continue
        nu = goal
        w, tolerance = _slopes(problem, nu, theta, places)
        value = float(nu.dot(problem.H.dot(nu)))
        if value < least:
            best, least, stuck = nu, value, 0
        else:
            stuck += 1
        wrong = _wrong(problem, nu, w, tolerance, places)
        if not wrong.any():
            return nu
        if stuck > S + 20:  # Rounding is all that still moves.
            return best
        # In a corner of many bounds a step may have no length; the first row that is wrong, in place of
        # the worst, then keeps the faces from coming round again (Bland's rule).
        excess = np.where(wrong, 1.0 if stuck else np.abs(w), -np.inf)
        if theta is None:
            # Nobody is there to take what another gives: a pair must move.
            for place in (LOWER, UPPER):
                side = np.where((places == place) & (b > 0), excess, -np.inf)
                if np.isfinite(side.max(initial=-np.inf)):
                    places[int(side.argmax())] = FREE
        places[int(excess.argmax())] = FREE
    return best


def _feasible(problem: _Problem) -> Array:
    """A point within the bounds whose sum is right: as far from the lower towards the upper bounds for
    every row, protected ones at their lower one."""
    b = problem.b
    inside = problem.beta - b.dot(problem.lower)
    room = np.where(b > 0, problem.upper - problem.lower, 0.0)
    room = np.minimum(room, np.divide(inside, b, out=np.zeros_like(b), where=b > 0))
    whole = b.dot(room)
    share = min(max(inside / whole, 0.0), 1.0) if whole > 0 else 0.0
    point: Array = problem.lower + share * room
    return point


def _put_on_the_sum(weights: Array, norms: Array, least: Array, most: Array, active: Mask) -> None:
    """Moves active weights, in place, into their bounds and to a sum of one: rounding's last word.

    The shortest rows move first: their weights bend the direction least.
    """
    np.clip(weights, least, most, out=weights)
    missing = 1.0 - float(weights[active].sum())
    for s in norms.argsort(kind="stable"):
        if active[s] and missing != 0:
            moved = min(max(weights[s] + missing, least[s]), most[s])
            missing -= moved - weights[s]
            weights[s] = moved


def _level(weights: Array, low: Array, high: Array) -> Array:
    """The same sum, as evenly as the bounds allow: what rows of length zero have among themselves."""
    total = weights.sum()
    below, above = low.min(initial=0.0), high.max(initial=0.0)
    for _ in range(60):
        middle = (below + above) / 2
        if np.clip(middle, low, high).sum() < total:
            below = middle
        else:
            above = middle
    level: Array = np.clip(above, low, high)
    between = (level > low) & (level < high)
    if between.any():
        level[between] = (total - level[~between].sum()) / np.count_nonzero(between)
    return level


def _certify(
    correlation: Array, norms: Array, weights: Array, least: Array, most: Array, guarded: Mask
) -> tuple[float, float, bool]:
    """The last three fields of the solution."""
    lengths = weights * norms
    along = correlation.dot(lengths)
    squared = float(lengths.dot(along))
    if not squared > NOISE * len(norms) * float(np.abs(lengths).sum()) ** 2:
        return max(squared, 0.0), 0.0, True
    falls = norms * along
    active = ~guarded
    gap = squared - _least_inner_product(falls[active], least[active], most[active])
    if guarded.any():
        gap = max(gap, -float(falls[guarded].min()))
    return squared, gap / squared, False


def _least_inner_product(falls: Array, least: Array, most: Array) -> float:
    """The smallest `⟨d', d⟩` over what the bounds allow: rows are filled up in the order of theirs."""
    order = falls.argsort()
    left = 1.0 - least.sum()
    filled = np.clip(
        left - np.concatenate([[0.0], np.cumsum((most - least)[order])[:-1]]), 0.0, None
    )
    extra = np.minimum(filled, (most - least)[order])
    return float(least.dot(falls) + extra.dot(falls[order]))
