"""MGD and SMGD: the centralised methods that FMGDA and FSMGDA are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fmol.algorithms.fmgda import multiple_gradient_round
from fmol.algorithms.options import ServerOptions
from fmol.engines.seam import Engine, LocalConfig
from fmol.options import Count
from fmol.rounds import Plan, RoundReport, State, nothing_sent
from fmol.schedules import Schedule, at

__all__ = ["MGD", "SMGD"]


@dataclass(frozen=True)
class SMGD(ServerOptions):
    """Stochastic multiple gradient descent with all data in one place; one iteration is one round.

    The same `f_s` as in the federation: every client's data contribute their own mean, here of
    `batch_size` samples drawn from each. Nobody is left out, whatever the cohort, and nothing is
    sent. The paper compares after `K × T` iterations.

    >>> SMGD(batch_size=32, server_lr=0.1).batch_size
    32
    """

    batch_size: Count | None = 64
    """Samples drawn from each client's data in an iteration."""
    server_lr: Schedule = 0.1
    """The step size, a number or a callable of the round."""

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        ids = engine.federation.population.ids()
        everyone = replace(plan, cohort=tuple(sorted(ids[i] for i in range(len(ids)))))
        lr = at(self.server_lr, plan.round, "server_lr")
        gradient = LocalConfig(lr=lr, steps=1, batch_size=self.batch_size)
        state, report = multiple_gradient_round(self, state, everyone, engine, gradient, lr)
        return state, nothing_sent(report)


@dataclass(frozen=True)
class MGD(SMGD):
    """Multiple gradient descent with all data in one place: SMGD with exact gradients.

    >>> MGD(0.1).server_lr
    0.1
    """

    batch_size: None = field(default=None, init=False, repr=False)
