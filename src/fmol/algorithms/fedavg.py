"""FedAvg on a fixed weighting of the objectives: the baseline without which no result counts."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

import torch
from torch import Tensor

from fmol.aggregate import MeanFold
from fmol.algorithms.descent import step
from fmol.algorithms.drift import (
    DriftOptions,
    control_payload,
    corrects,
    follow_controls,
    room_for_controls,
)
from fmol.algorithms.merging import Merging
from fmol.algorithms.missing import check_arrivals
from fmol.algorithms.mixture import MIXTURE, MixtureOptions, mixture_lanes, objective_weights
from fmol.algorithms.options import StepOptions
from fmol.algorithms.steps import apply_step, room_for_step, stretch, stretch_units, units_of
from fmol.algorithms.trouble import known_trouble, warn_of_trouble
from fmol.engines.seam import Engine, Transform, Work
from fmol.federation import Federation
from fmol.layout import squared_norm
from fmol.local import local_work
from fmol.metrics import mean_losses
from fmol.rounds import NAN, Plan, RoundReport, State

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(DriftOptions, MixtureOptions, StepOptions):
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

    def init(self, federation: Federation, x: Tensor) -> State:
        state = super().init(federation, x)
        warn_of_trouble(self)
        controls = room_for_controls(self.drift_correction, 1, x)
        return State(x, {**state.memory, **room_for_step(self.server_step, x), **controls})

    def merging(self, federation: Federation, round: int) -> Merging | None:
        """What is done in this round in place of a mean; None for a mean, which it always is here."""
        return None

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        federation, names = engine.federation, engine.federation.names
        weights = objective_weights(self.weights, federation)
        local = self.local(plan.round, self.batch_size)
        lr = self.step_size(plan.round, local.lr)
        merging = self.merging(federation, plan.round)
        local = local if merging is None else merging.local(local)
        # Each client descends its own mixture, along one trajectory.
        asks = [
            plan.ask(
                client,
                state.x,
                lanes=mixture_lanes(client, weights, sum_to_one=False),
                local=local,
                payload=control_payload(state.memory, [MIXTURE], [MIXTURE]),
            )
            for client in map(federation.client, plan.cohort)
        ]
        pulled = {name for ask in asks for lane in ask.lanes for name in lane.mixture}
        # The mean over the clients that answered.
        layout = self.unit_layout(federation)
        corrected = corrects(state.memory)
        if merging is None:
            fold = MeanFold([MIXTURE], state.x, self.weighting, steps=corrected, units=layout)
        else:
            fold = merging.fold([MIXTURE], state.x, self.weighting, units=layout)
        transforms = self.transforms if merging is None else (merging.transform,)
        means, receipt = engine.map(asks, fold, transforms=transforms)
        started = perf_counter()
        check_arrivals(means, receipt)
        x, square, applied, factor = state.x, NAN, NAN, 1.0
        memory = {**state.memory, **follow_controls(state.memory, means)}
        if means.slots:
            direction = means.deltas[0]
            units = units_of(means, layout)
            if self.cap is not None and units is not None:
                stretched, (factor,) = stretch_units(
                    means.deltas, units.squares, units.layout, self.cap
                )
                direction = stretched[0]
            elif self.cap is not None:
                factor = stretch(means.spread[MIXTURE], self.cap)
                direction = factor * direction
            vector, kept = apply_step(self.server_step, direction, memory)
            memory |= kept
            if merging is not None:  # Momentum would go on with what is held.
                vector = merging.held(vector)
            x = step(state.x, vector, lr, plan.round)
            square, applied = squared_norm(direction), squared_norm(vector)
        total = sum(weights.values())
        size = len(names)
        noted = (*known_trouble(self),) if plan.round == 0 else ()
        noted = noted if merging is None else (*noted, merging.note)
        return State(x, memory), RoundReport(
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
            step_norm_squared=applied,
            extrapolation=dict.fromkeys(sorted(pulled), factor) if self.extrapolate else {},
            cosines=torch.full((size, size), NAN),
            local_lr=local.lr,
            server_lr=lr,
            bytes_up=receipt.bytes_up,
            bytes_down=receipt.bytes_down,
            seconds={"clients": receipt.seconds, "server": perf_counter() - started},
            clients=receipt.clients,
            notes=(*noted, *fold.notes, *receipt.notes),
        )
