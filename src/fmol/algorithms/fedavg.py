"""FedAvg on a fixed weighting of the objectives: the baseline without which no result counts."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

import torch

from fmol.aggregate import MeanFold
from fmol.algorithms.descent import step
from fmol.algorithms.missing import check_arrivals
from fmol.algorithms.mixture import MIXTURE, MixtureOptions, mixture_lanes, objective_weights
from fmol.algorithms.options import LocalOptions
from fmol.engines.seam import Engine, Transform, Work
from fmol.layout import squared_norm
from fmol.local import local_work
from fmol.metrics import mean_losses
from fmol.rounds import NAN, Plan, RoundReport, State

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(LocalOptions, MixtureOptions):
    """Federated averaging: each client descends `Σ_{s∈S_i} w_s f_{s,i}` along one trajectory.

    The server moves `x` by `server_lr` times the mean of the clients' accumulated gradients. By
    default that is the local step size, and so plain averaging of the clients' models (with
    `accumulate="sum"`). Targets of objectives are not used: a fixed weighting protects nobody.

    >>> FedAvg({"left": 0.5, "right": 0.5}, local_steps=10, local_lr=0.1).server_lr is None
    True
    """

    transforms: tuple[Transform, ...] = ()
    """What is done to each reply on its way to the server."""

    shares_model: ClassVar[bool] = True
    work: ClassVar[Work] = staticmethod(local_work)

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        federation, names = engine.federation, engine.federation.names
        weights = objective_weights(self.weights, federation)
        local = self.local(plan.round, self.batch_size)
        lr = self.step_size(plan.round, local.lr)
        # Each client descends its own mixture, along one trajectory.
        asks = [
            plan.ask(
                client,
                state.x,
                lanes=mixture_lanes(client, weights, sum_to_one=False),
                local=local,
            )
            for client in map(federation.client, plan.cohort)
        ]
        pulled = {name for ask in asks for lane in ask.lanes for name in lane.mixture}
        # The mean over the clients that answered.
        fold = MeanFold([MIXTURE], state.x, self.weighting)
        means, receipt = engine.map(asks, fold, transforms=self.transforms)
        started = perf_counter()
        check_arrivals(means, receipt)
        x, square = state.x, NAN
        if means.slots:
            x = step(state.x, means.deltas[0], lr, plan.round)
            square = squared_norm(means.deltas[0])
        total = sum(weights.values())
        size = len(names)
        return State(x, state.memory), RoundReport(
            round=plan.round,
            cohort=plan.cohort,
            losses=mean_losses(receipt.clients, names, self.weighting),
            delta_norms=dict.fromkeys(names, NAN),
            weights={name: weights[name] / total for name in names},
            scale=total,
            missing=tuple(name for name in names if name not in pulled),
            refused=receipt.refused,
            silent=receipt.silent,
            held=not means.slots,
            direction_norm_squared=square,
            cosines=torch.full((size, size), NAN),
            local_lr=local.lr,
            server_lr=lr,
            bytes_up=receipt.bytes_up,
            bytes_down=receipt.bytes_down,
            seconds={"clients": receipt.seconds, "server": perf_counter() - started},
            clients=receipt.clients,
            notes=receipt.notes,
        )
