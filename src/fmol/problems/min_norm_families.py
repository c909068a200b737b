"""Families of hard min-norm problems: sets of vectors `Δ` `[S, d]` that break careless solvers.

They imitate what federated training really produces: objectives that agree, conflict, are copies of
one another, are solved (a tiny `Δ_s`) or are measured in other units (row scales), at any gradient
scale, up to points that are stationary to rounding. Tests and benchmarks draw from the same ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Family", "families"]

Deltas = NDArray[np.float64]
Family = Callable[[np.random.Generator, int], Deltas]
"""`family(generator, S)`: one random problem of that kind, `Δ` `[S, d]` in float64."""


def families() -> dict[str, Family]:
    """Every family by name.

    >>> random = families()["random"]
    >>> random(np.random.default_rng(0), 5).shape[0]
    5
    """
    named: dict[str, Family] = {
        "random": _random,
        "wide": _wide,
        "half active": _half_active,
        "correlated": _correlated,
        "orthogonal": _orthogonal,
        "conflicting": _conflicting,
        "opposite pairs": _opposite_pairs,
        "ill-conditioned": _ill_conditioned,
        "rank deficient": _rank_deficient,
        "duplicated": _duplicated,
        "parallel": _parallel,
        "near-stationary": _near_stationary,
        "one tiny": _one_tiny,
        "cancelling giants": _cancelling_giants,
        "row scales": _row_scaled(_random),
        "row scales, conflicting": _row_scaled(_conflicting),
        "row scales, near-stationary": _row_scaled(_near_stationary),
        "row scales, rank deficient": _row_scaled(_rank_deficient),
        "row scales, near-duplicates": _row_scaled(_near_duplicates(1e-7)),
    }
    for distance in (1e-6, 1e-7, 1e-8, 1e-9):
        named[f"near-duplicates {distance:.0e}"] = _near_duplicates(distance)
    for scale in (1e-30, 1e-8, 1e8, 1e30):
        named[f"scale {scale:.0e}"] = _scaled(scale, _conflicting)
    named["scale 1e-30, row scales"] = _scaled(1e-30, _row_scaled(_conflicting))
    named["scale 1e+30, near-duplicates"] = _scaled(1e30, _near_duplicates(1e-7))
    return named


def _spread(generator: np.random.Generator, S: int, least: float, most: float) -> Deltas:
    """One factor per row `[S, 1]`, between 10^least and 10^most."""
    return np.power(10.0, generator.uniform(least, most, (S, 1)))


def _normal(generator: np.random.Generator, *shape: int) -> Deltas:
    return generator.standard_normal(shape)


def _shift(generator: np.random.Generator, deltas: Deltas, least: float, most: float) -> Deltas:
    """The rows plus one common vector, 10^least to 10^most times a Gaussian one."""
    return deltas + _spread(generator, 1, least, most) * _normal(generator, deltas.shape[1])


def _random(generator: np.random.Generator, S: int) -> Deltas:
    """Gaussian rows in a dimension around S: some active, some not, some stationary."""
    return _normal(generator, S, int(generator.integers(max(2, S // 2), 4 * S + 1)))


def _wide(generator: np.random.Generator, S: int) -> Deltas:
    """Gaussian rows in a dimension far above S, as gradients are: nearly orthogonal, all active."""
    return _normal(generator, S, 20 * S)


def _half_active(generator: np.random.Generator, S: int) -> Deltas:
    """Rows around a common vector, of which about half pull."""
    return _shift(generator, _normal(generator, S, 2 * S), -0.5, 0.5)


def _correlated(generator: np.random.Generator, S: int) -> Deltas:
    """Rows that nearly agree: one common vector and a little of their own."""
    return _shift(generator, _normal(generator, S, 2 * S), 1, 5)


def _orthogonal(generator: np.random.Generator, S: int) -> Deltas:
    """Orthogonal rows of very different lengths; λ_s ∝ 1/‖Δ_s‖² in closed form."""
    q, _ = np.linalg.qr(_normal(generator, S, S))
    return np.ascontiguousarray(q) * _spread(generator, S, -2, 2)


def _conflicting(generator: np.random.Generator, S: int) -> Deltas:
    """Rows that cancel but for a small common part, so nearly every pair conflicts."""
    deltas = _normal(generator, S, 2 * S)
    return _shift(generator, deltas - deltas.mean(0), -4, 0)


def _opposite_pairs(generator: np.random.Generator, S: int) -> Deltas:
    """Rows in nearly opposite pairs."""
    deltas = _normal(generator, S, S + 2)
    deltas[1::2] = -deltas[: 2 * (S // 2) : 2]
    return _shift(generator, deltas, -6, -1)


def _ill_conditioned(generator: np.random.Generator, S: int) -> Deltas:
    """Rows whose singular values spread over up to 12 decades, hull away from the origin."""
    d = S + 3
    left, _ = np.linalg.qr(_normal(generator, S, S))
    right, _ = np.linalg.qr(_normal(generator, d, d))
    values = 10.0 ** np.linspace(0, -generator.uniform(4, 12), S)
    return _shift(generator, (left * values) @ right[:S], -6, 0)


def _rank_deficient(generator: np.random.Generator, S: int) -> Deltas:
    """More rows than dimensions, shifted so that most hulls miss the origin."""
    rank = int(generator.integers(1, max(2, S // 2) + 1))
    basis = _normal(generator, rank, S + 1)
    deltas: Deltas = _shift(generator, _normal(generator, S, rank), -0.5, 1) @ basis
    return deltas


def _duplicated(generator: np.random.Generator, S: int) -> Deltas:
    """A few distinct rows, copied until there are S."""
    distinct = max(1, S // int(generator.integers(2, 5)))
    copies = generator.integers(0, distinct, S - distinct)
    deltas = _shift(generator, _normal(generator, distinct, 2 * S), -1, 1)
    return np.concatenate([deltas, deltas[copies]])


def _near_duplicates(distance: float) -> Family:
    """Copies that differ by `distance` relative to their length."""

    def family(generator: np.random.Generator, S: int) -> Deltas:
        deltas = _duplicated(generator, S)
        noise = _normal(generator, *deltas.shape)
        noise *= np.sqrt((deltas**2).sum(1) / (noise**2).sum(1))[:, None]
        return deltas + distance * noise

    return family


def _parallel(generator: np.random.Generator, S: int) -> Deltas:
    """Few directions, many lengths."""
    return _duplicated(generator, S) * _spread(generator, S, -3, 3)


def _near_stationary(generator: np.random.Generator, S: int) -> Deltas:
    """Rows with a convex combination of (almost) zero: ‖d‖ from 1e−2 down to 1e−12 of the rows'."""
    deltas = _normal(generator, S, 2 * S)
    weights = generator.dirichlet(np.ones(S))
    return _shift(generator, deltas - weights @ deltas, -12, -2)


def _one_tiny(generator: np.random.Generator, S: int) -> Deltas:
    """One objective is solved: its row is 1e−1 … 1e−12 of the others'."""
    deltas = _half_active(generator, S)
    deltas[generator.integers(S)] *= _spread(generator, 1, -12, -1)[0]
    return deltas


def _cancelling_giants(generator: np.random.Generator, S: int) -> Deltas:
    """Pairs of long rows that cancel down to the length of a few short ones.

    Of ‖d‖², a sum of terms as large as the giants', only the last digits survive.
    """
    short = _shift(generator, _normal(generator, S, S + 2), -1, 0.5)
    pairs = int(generator.integers(1, max(1, (S - 1) // 2) + 1))
    giants = _spread(generator, pairs, 1, 6) * _normal(generator, pairs, S + 2)
    short[:pairs] += giants
    short[pairs : 2 * pairs] -= giants[: S - pairs]
    return short


def _row_scaled(family: Family) -> Family:
    """The family with each row in its own unit, 1e−4 to 1e4."""

    def scaled(generator: np.random.Generator, S: int) -> Deltas:
        return family(generator, S) * _spread(generator, S, -4, 4)

    return scaled


def _scaled(scale: float, family: Family) -> Family:
    """The family with all rows multiplied by `scale`."""
    return lambda generator, S: family(generator, S) * scale
