"""The corollaries' step sizes and batches, for a given number of rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fmol.theory.checks import check_counts, check_positive

__all__ = [
    "Steps",
    "fmgda_nonconvex_steps",
    "fmgda_strongly_convex_steps",
    "fsmgda_nonconvex_steps",
    "fsmgda_strongly_convex_steps",
]


@dataclass(frozen=True)
class Steps:
    """What to run for `rounds` rounds with; all constant over the rounds, as in the theorems."""

    rounds: int
    server_lr: float
    local_lr: float
    batch_size: int | None = None
    """None is all data: FMGDA."""


def fmgda_nonconvex_steps(*, rounds: int, local_steps: int, L: float) -> Steps:
    """Corollary 1: `η` constant, `η_L = O(1/√T)`, for `O(1/T)`.

    >>> fmgda_nonconvex_steps(rounds=100, local_steps=5, L=1.0)
    Steps(rounds=100, server_lr=0.5, local_lr=0.02, batch_size=None)
    """
    check_counts(rounds=rounds, local_steps=local_steps)
    check_positive(L=L)
    return Steps(rounds, _largest(L), 1 / (local_steps * L * math.sqrt(rounds)))


def fmgda_strongly_convex_steps(*, rounds: int, local_steps: int, L: float, mu: float) -> Steps:
    """Corollary 2: `η ≤ 1/(2L + μ)`, and `η_L` so small that `δ = O(exp(−μηT/2))`.

    `η_L` falls exponentially with `T`, so that in the end local steps are steps on the spot.

    >>> fmgda_strongly_convex_steps(rounds=100, local_steps=5, L=1.0, mu=0.5).server_lr
    0.4
    """
    check_counts(rounds=rounds, local_steps=local_steps)
    check_positive(L=L, mu=mu)
    _check_convexity(L, mu)
    server_lr = min(_largest(L), 1 / (2 * L + mu))
    return Steps(rounds, server_lr, math.exp(-mu * server_lr * rounds / 4) / (local_steps * L))


def fsmgda_nonconvex_steps(
    *, rounds: int, local_steps: int, L: float, scale: float = 1.0, batch: float = 1.0
) -> Steps:
    """Corollary 3: `η = O(1/√T)`, `η_L = O(T^{−1/4})` and `β = O(η)`, for `O(1/√T)`.

    `η` is `scale/√T`, up to the largest step allowed; batches have `batch/η` samples, since `β` of
    a mean over `b` samples is that of one divided by `b`.

    >>> fsmgda_nonconvex_steps(rounds=400, local_steps=2, L=1.0, scale=4.0)
    Steps(rounds=400, server_lr=0.2, local_lr=0.11180339887498948, batch_size=5)
    """
    check_counts(rounds=rounds, local_steps=local_steps)
    check_positive(L=L, scale=scale, batch=batch)
    server_lr = min(_largest(L), scale / math.sqrt(rounds))
    local_lr = 1 / (local_steps * L * rounds**0.25)
    return Steps(rounds, server_lr, local_lr, _batch(batch, server_lr))


def fsmgda_strongly_convex_steps(
    *, rounds: int, local_steps: int, L: float, mu: float, scale: float = 2.0, batch: float = 1.0
) -> Steps:
    """Corollary 4: `η = scale·log(max(e, μ²T))/(μT)`, `η_L = O(1/√T)`, `β = O(η)`, for `Õ(1/T)`.

    Two departures from the paper. It has `max(1, ·)`, which is a step of zero for `μ²T ≤ 1`. And its
    `Θ` hides that `scale` must be 2 or more: `exp(−μηT/2)` is `(μ²T)^{−scale/2}`, so that with
    1 the rate is `1/√T`.

    >>> steps = fsmgda_strongly_convex_steps(rounds=400, local_steps=2, L=1.0, mu=0.5)
    >>> round(steps.server_lr, 4), steps.batch_size
    (0.0461, 22)
    """
    check_counts(rounds=rounds, local_steps=local_steps)
    check_positive(L=L, mu=mu, scale=scale, batch=batch)
    _check_convexity(L, mu)
    wanted = scale * math.log(max(math.e, mu**2 * rounds)) / (mu * rounds)
    server_lr = min(_largest(L), wanted)
    local_lr = 1 / (local_steps * L * math.sqrt(rounds))
    return Steps(rounds, server_lr, local_lr, _batch(batch, server_lr))


def _largest(L: float) -> float:
    """What all theorems allow, printed and repaired."""
    return min(1 / (2 * L), 3 / (2 * (1 + L)))


def _batch(batch: float, server_lr: float) -> int:
    # A little less before rounding up: 4/0.1 is 40, whatever the last bit says.
    return max(1, math.ceil(batch / server_lr - 1e-9))


def _check_convexity(L: float, mu: float) -> None:
    if mu > L:
        raise ValueError(
            f"`mu` is {mu!r} and `L` is {L!r}. No function curves more at the least than at the "
            "most: give the smallest curvature as `mu`."
        )
