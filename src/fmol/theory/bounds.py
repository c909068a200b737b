"""The right-hand sides of Theorems 1 to 4, as printed and as repaired.

Everywhere `Δ` is the mean over the local steps, as in the proofs: `accumulate="mean"`. `G` and `D`
bound gradients, and `L` curvatures, at all points that are visited, local iterates included. What the
proofs lack, and how it is repaired, is in `docs/theory.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fmol.theory.checks import check_at_most, check_counts, check_not_negative, check_positive

__all__ = [
    "Bound",
    "Version",
    "fmgda_nonconvex_bound",
    "fmgda_strongly_convex_bound",
    "fsmgda_nonconvex_bound",
    "fsmgda_strongly_convex_bound",
]

Version = Literal["repaired", "printed"]
"""`"repaired"` follows from the assumptions by an argument that holds; `"printed"` is the paper's."""


@dataclass(frozen=True)
class Bound:
    """A right-hand side in its two parts."""

    start: float
    """What is left of where training began; falls with the number of rounds."""
    delta: float
    """δ: what local steps and noise add; falls with the step sizes and the noise alone."""

    @property
    def total(self) -> float:
        return self.start + self.delta


def fmgda_nonconvex_bound(
    *,
    rounds: int,
    server_lr: float,
    local_lr: float,
    local_steps: int,
    objectives: int,
    L: float,
    G: float,
    initial_gap: float,
    version: Version = "repaired",
) -> Bound:
    """Theorem 1: bounds the mean over the rounds of `‖d̄_t‖²`, and so the least of them.

    `initial_gap` is `f_s(x_0) − f_s^min` of any one objective, so best of the one with the smallest.
    Repaired, `δ` has neither `S` nor `1/η`, and the step may be `1/(2L)`.

    >>> steps = dict(rounds=100, server_lr=0.5, local_lr=0.01, local_steps=4, objectives=2)
    >>> fmgda_nonconvex_bound(**steps, L=1.0, G=2.0, initial_gap=3.0)
    Bound(start=0.48, delta=0.0054)
    >>> fmgda_nonconvex_bound(**steps, L=1.0, G=2.0, initial_gap=3.0, version="printed")
    Bound(start=0.96, delta=1.024)
    """
    check_counts(rounds=rounds, local_steps=local_steps, objectives=objectives)
    check_positive(server_lr=server_lr, L=L)
    check_not_negative(local_lr=local_lr, G=G, initial_gap=initial_gap)
    if _is_printed(version):
        _check_printed_step(server_lr, L)
        drift = 4 * (local_lr * local_steps * L * G) ** 2
        delta = 4 * drift * (1 + objectives**2) / server_lr
        return Bound(16 * initial_gap / (rounds * server_lr), delta)
    _check_step(server_lr, L)
    return Bound(
        8 * initial_gap / (rounds * server_lr), 6 * _drift(local_lr, local_steps, L, G) ** 2
    )


def fmgda_strongly_convex_bound(
    *,
    rounds: int,
    server_lr: float,
    local_lr: float,
    local_steps: int,
    objectives: int,
    L: float,
    mu: float,
    G: float,
    initial_distance_squared: float,
    version: Version = "repaired",
) -> Bound:
    """Theorem 2: bounds the `w_t`-weighted mean of `Δ_Q`, the expectation over the output clock.

    `initial_distance_squared` is `‖x_0 − x*‖²` to the Pareto optimum `x*` that `Δ_Q` is taken from.
    Repaired, the first part has `μ/4 + ηL²` in place of `μ`: the rate is the same.

    >>> bound = fmgda_strongly_convex_bound(
    ...     rounds=100, server_lr=0.4, local_lr=1e-6, local_steps=5, objectives=2, L=1.0, mu=0.5,
    ...     G=2.0, initial_distance_squared=1.0)
    >>> round(bound.start, 8), bound.delta < 1e-9
    (1.395e-05, True)
    """
    check_counts(rounds=rounds, local_steps=local_steps, objectives=objectives)
    check_positive(server_lr=server_lr, L=L, mu=mu)
    check_not_negative(local_lr=local_lr, G=G, initial_distance_squared=initial_distance_squared)
    if _is_printed(version):
        _check_printed_step(server_lr, L)
        check_at_most(1 / (2 * L + mu), "`server_lr` ≤ 1/(2L + μ)", server_lr=server_lr)
        _check_long_enough(rounds, server_lr, mu)
        drift = 4 * (local_lr * local_steps * L * G) ** 2
        first = mu * math.exp(-server_lr * mu * rounds / 2)
        delta = 2 * drift * objectives**2 / mu + drift / 2
        return Bound(first * initial_distance_squared, delta)
    _check_step(server_lr, L)
    drift = _drift(local_lr, local_steps, L, G) ** 2
    constant = mu / 4 + server_lr * L**2
    return Bound(
        constant * initial_distance_squared * _forgetting(rounds, server_lr, mu),
        drift * (1 + 9 * server_lr * L + mu * server_lr) / mu,
    )


def fsmgda_nonconvex_bound(
    *,
    rounds: int,
    server_lr: float,
    local_lr: float,
    local_steps: int,
    objectives: int,
    L: float,
    D: float,
    alpha: float,
    beta: float,
    sigma_squared: float,
    initial_gap: float,
    version: Version = "repaired",
) -> Bound:
    """Theorem 3: bounds the mean over the rounds of `E‖d̄_t‖²`, and so the least of them.

    Repaired, it needs `η ≤ 1/(2L)`, without which the printed one does not follow; `δ` has `2S + 4`
    in place of `2S² + 4`, and no drift where there is one local step.

    >>> fsmgda_nonconvex_bound(
    ...     rounds=100, server_lr=0.1, local_lr=0.1, local_steps=1, objectives=2, L=1.0, D=2.0,
    ...     alpha=1.0, beta=0.125, sigma_squared=0.5, initial_gap=3.0)
    Bound(start=2.4, delta=0.5)
    """
    check_counts(rounds=rounds, local_steps=local_steps, objectives=objectives)
    check_positive(server_lr=server_lr, L=L)
    check_not_negative(
        local_lr=local_lr,
        D=D,
        alpha=alpha,
        beta=beta,
        sigma_squared=sigma_squared,
        initial_gap=initial_gap,
    )
    first = 8 * initial_gap / (rounds * server_lr)
    noise = beta * sigma_squared
    if _is_printed(version):
        _check_printed_step(server_lr, L)
        error = alpha * (local_lr * local_steps * D) ** 2 + noise
        return Bound(first, (2 * objectives**2 + 4) * error)
    _check_step(server_lr, L)
    error = alpha * _mean_square_drift(local_lr, local_steps, D) + noise
    return Bound(first, (2 * objectives + 4) * error)


def fsmgda_strongly_convex_bound(
    *,
    rounds: int,
    server_lr: float,
    local_lr: float,
    local_steps: int,
    objectives: int,
    mu: float,
    D: float,
    alpha: float,
    beta: float,
    sigma_squared: float,
    initial_distance_squared: float,
    version: Version = "repaired",
) -> Bound:
    """Theorem 4: bounds the expectation of the `w_t`-weighted mean of `Δ_Q`.

    Repaired, `S²` is `S` in the error and gone from `η D²/2`: the shortest vector of a hull is no
    longer than any of its corners.

    >>> bound = fsmgda_strongly_convex_bound(
    ...     rounds=100, server_lr=0.1, local_lr=0.1, local_steps=1, objectives=2, mu=1.0, D=2.0,
    ...     alpha=1.0, beta=0.125, sigma_squared=0.5, initial_distance_squared=1.0)
    >>> round(bound.start, 6), bound.delta
    (0.001489, 0.325)
    """
    check_counts(rounds=rounds, local_steps=local_steps, objectives=objectives)
    check_positive(server_lr=server_lr, mu=mu)
    check_not_negative(
        local_lr=local_lr,
        D=D,
        alpha=alpha,
        beta=beta,
        sigma_squared=sigma_squared,
        initial_distance_squared=initial_distance_squared,
    )
    check_at_most(1 / mu, "`server_lr` ≤ 1/μ", server_lr=server_lr)
    noise = beta * sigma_squared
    if _is_printed(version):
        _check_long_enough(rounds, server_lr, mu)
        error = alpha * (local_lr * local_steps * D) ** 2 + noise
        first = mu * math.exp(-server_lr * mu * rounds / 2)
        delta = objectives**2 * (error / mu + server_lr * D**2 / 2)
        return Bound(first * initial_distance_squared, delta)
    error = alpha * _mean_square_drift(local_lr, local_steps, D) + noise
    return Bound(
        mu / 4 * initial_distance_squared * _forgetting(rounds, server_lr, mu),
        objectives * error / mu + server_lr * D**2 / 2,
    )


def _is_printed(version: Version) -> bool:
    if version not in ("repaired", "printed"):
        raise ValueError(f"`version` must be 'repaired' or 'printed', got {version!r}.")
    return version == "printed"


def _check_printed_step(server_lr: float, L: float) -> None:
    check_at_most(3 / (2 * (1 + L)), "`server_lr` ≤ 3/(2(1 + L))", server_lr=server_lr)


def _check_step(server_lr: float, L: float) -> None:
    check_at_most(1 / (2 * L), "`server_lr` ≤ 1/(2L)", server_lr=server_lr)


def _check_long_enough(rounds: int, server_lr: float, mu: float) -> None:
    if server_lr * mu * rounds < 1 - 1e-12:
        raise ValueError(
            f"`rounds` is {rounds}, and the theorem as printed needs η ≥ 1/(μT), at least "
            f"{math.ceil(1 / (mu * server_lr))} rounds. Take more rounds or a larger step."
        )


def _drift(local_lr: float, local_steps: int, L: float, G: float) -> float:
    """`‖∇f_s(x_t) − Δ_s‖` at most: gradient `k = 0 … K−1` is taken `k η_L G` away from `x_t`."""
    return L * local_lr * G * (local_steps - 1) / 2


def _mean_square_drift(local_lr: float, local_steps: int, D: float) -> float:
    """The mean over `k = 0 … K−1` of `E‖x^{t,k} − x_t‖² ≤ (k η_L D)²`."""
    return (local_lr * D) ** 2 * (local_steps - 1) * (2 * local_steps - 1) / 6


def _forgetting(rounds: int, server_lr: float, mu: float) -> float:
    """`1/((1 − μη/2)^{−T} − 1)`: what the weights `w_t` leave of the start, without rounding."""
    grown = -rounds * math.log1p(-mu * server_lr / 2)
    return math.exp(-grown) / -math.expm1(-grown)
