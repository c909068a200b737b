"""FedAvg on a fixed weighting of the objectives: the baseline without which no result counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from fmol.aggregate import MeanFold, Weighting
from fmol.algorithms.fmgda import step
from fmol.algorithms.missing import check_arrivals
from fmol.algorithms.options import LocalOptions, check_options
from fmol.engines.seam import Engine, Lane, Transform, Work
from fmol.federation import Federation
from fmol.local import local_work
from fmol.metrics import mean_losses
from fmol.rounds import NAN, Plan, RoundReport, State
from fmol.schedules import Schedule, at

__all__ = ["MIXTURE", "FedAvg", "objective_weights"]

MIXTURE = "mixture"
"""The slot of a lane that descends several objectives at once."""


@dataclass(frozen=True)
class FedAvg(LocalOptions):
    """Federated averaging: each client descends `Σ_{s∈S_i} w_s f_{s,i}` along one trajectory.

    The server moves `x` by `server_lr` times the mean of the clients' accumulated gradients, which
    for the default, the local step size, is plain averaging of the clients' models.
    """

    weights: Mapping[str, float] | None = None
    """Objective → w_s; equal weights that sum to one if left out."""
    batch_size: int | None = 64
    """Samples per local step; None is all of the client's data."""
    server_lr: Schedule | None = None
    """Step size at the server; None is the round's `local_lr`."""
    weighting: Weighting = "uniform"
    """Whether clients count alike or by their number of labelled samples."""
    transforms: tuple[Transform, ...] = ()
    """What is done to each reply on its way to the server."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def work(self) -> Work:
        return local_work

    @property
    def shares_model(self) -> bool:
        return True

    def init(self, federation: Federation, x: Tensor) -> State:
        objective_weights(self.weights, federation)
        return State(x)

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        federation, names = engine.federation, engine.federation.names
        weights = objective_weights(self.weights, federation)
        local = self.local(plan.round, self.batch_size)
        lr = local.lr if self.server_lr is None else at(self.server_lr, plan.round, "server_lr")
        # Each client descends its own mixture, along one trajectory.
        asks = []
        for client in map(federation.client, plan.cohort):
            mixture = {name: weights[name] for name in client.objectives if weights[name] > 0}
            lanes = [Lane(MIXTURE, mixture)] if mixture else []
            asks.append(plan.ask(client, state.x, lanes=lanes, local=local))
        pulled = {name for ask in asks for lane in ask.lanes for name in lane.mixture}
        # The mean over the clients that answered.
        fold = MeanFold([MIXTURE], state.x, self.weighting)
        means, receipt = engine.map(asks, fold, transforms=self.transforms)
        started = perf_counter()
        check_arrivals(means, receipt)
        x, square = state.x, NAN
        if means.slots:
            x = step(state.x, means.deltas[0], lr, plan.round)
            square = float(means.deltas[0].double().square().sum())
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


def objective_weights(
    weights: Mapping[str, float] | None, federation: Federation
) -> dict[str, float]:
    """`w_s` for every objective, checked; equal and summing to one for None."""
    names = federation.names
    if weights is None:
        return dict.fromkeys(names, 1.0 / len(names))
    unknown = sorted(set(weights) - set(names))
    absent = [name for name in names if name not in weights]
    if unknown or absent:
        raise ValueError(
            f"`weights` must name every objective once: {list(names)}, got {list(weights)}. "
            f"{f'Take out `{unknown[0]}`.' if unknown else f'Add `{absent[0]}`.'}"
        )
    if any(not 0 <= w < float("inf") for w in weights.values()) or not any(weights.values()):
        raise ValueError(
            f"`weights` must be finite, not negative and not all zero, got {dict(weights)}."
        )
    return {name: float(weights[name]) for name in names}
