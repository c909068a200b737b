"""What the strongly convex theorems speak of: a random iterate, drawn with weights that grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fmol import rng
from fmol.federation import Federation
from fmol.result import Snapshot
from fmol.rounds import RoundReport
from fmol.theory.checks import check_at_most, check_counts, check_positive

__all__ = ["OutputClock", "mean_gap", "output_weights"]


def output_weights(*, rounds: int, server_lr: float, mu: float) -> Tensor:
    """The probabilities of `x_0 … x_{T−1}` as the output, `[T]`: `w_t ∝ (1 − μη/2)^{−t}`.

    The paper counts rounds from 1 and writes `(1 − μη/2)^{1−t}`.

    >>> output_weights(rounds=3, server_lr=1.0, mu=1.0).tolist()
    [0.14285714285714285, 0.2857142857142857, 0.5714285714285714]
    """
    check_counts(rounds=rounds)
    check_positive(server_lr=server_lr, mu=mu)
    check_at_most(1 / mu, "`server_lr` ≤ 1/μ", server_lr=server_lr)
    # Relative to the last: they grow without bound, and a thousand rounds would overflow.
    back = torch.arange(rounds - 1, -1, -1, dtype=torch.float64)
    weights = torch.exp(back * math.log1p(-mu * server_lr / 2))
    return weights / weights.sum()


def mean_gap(reports: Sequence[RoundReport], *, server_lr: float, mu: float) -> float:
    """The `w_t`-weighted mean of `Δ_Q` over a run: what Theorems 2 and 4 bound.

    It is the expectation over the clock, without its noise. Train with `fit(optimum=…)`.
    """
    if not reports:
        raise ValueError("`reports` is empty. Give those of at least one round.")
    gaps = torch.tensor([report.optimality_gap for report in reports], dtype=torch.float64)
    unknown = [report.round for report in reports if math.isnan(report.optimality_gap)]
    if unknown:
        raise ValueError(
            f"`reports` has no `optimality_gap` in round {unknown[0]}. Train with `optimum=…`, and "
            "with losses in every round."
        )
    weights = output_weights(rounds=len(reports), server_lr=server_lr, mu=mu)
    return float(weights @ gaps)


class OutputClock:
    """A callback of `fit` that keeps the one iterate which the theorems put out.

    `round` is drawn before the run, `t` with probability `∝ (1 − μη/2)^{−t}`, from a stream of its
    own; when the run comes to `x_t` the clock keeps a copy, and so never more than one. To stop
    there instead, train with `rounds=clock.round`.

    >>> from fmol import FMGDA, fit
    >>> from fmol.problems.quadratic import Quadratic
    >>> problem = Quadratic().build()
    >>> clock = OutputClock(problem, rounds=20, server_lr=0.2, mu=1.0)
    >>> result = fit(problem, FMGDA(local_steps=1, server_lr=0.2), 20, callbacks=[clock])
    >>> 0 <= clock.round < 20, tuple(clock.x.shape)
    (True, (10,))
    """

    def __init__(
        self, federation: Federation, *, rounds: int, server_lr: float, mu: float, seed: int = 0
    ) -> None:
        weights = output_weights(rounds=rounds, server_lr=server_lr, mu=mu)
        drawn = rng.stream(seed, "output").random()
        # The last one stands for what rounding leaves of the sum.
        reached = int(torch.searchsorted(weights.cumsum(0), drawn, right=True))
        self.round = min(reached, rounds - 1)
        """Which `x_t` is the output."""
        self._x: Tensor | None = None
        if self.round == 0:  # Where training starts is seen by no callback.
            self._x = federation.layout.flatten(dict(federation.model.named_parameters()))

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        """Keeps `x` if the round led to the one that was drawn."""
        if report.round + 1 == self.round:
            self._x = snapshot.state.x.detach().clone()

    @property
    def x(self) -> Tensor:
        """The output, the parameters of the iterate that was drawn, `[d]`."""
        if self._x is None:
            raise ValueError(
                f"the clock is set for `x` after round {self.round - 1}, which it has not seen. Pass "
                "it to `fit` in `callbacks`, from the first round on."
            )
        return self._x
