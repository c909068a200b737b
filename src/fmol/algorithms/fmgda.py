"""FMGDA and FSMGDA (Algorithm 1 of the paper): one text for both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fmol.aggregate import MeanFold, Means
from fmol.algorithms.descent import Angles, Direction, find_direction, measure_angles, step
from fmol.algorithms.drift import (
    DriftOptions,
    control_payload,
    corrects,
    follow_controls,
    room_for_controls,
)
from fmol.algorithms.missing import Rows, fill_in
from fmol.algorithms.options import ServerOptions
from fmol.algorithms.steps import Pulls, apply_step, least_cosine, prepare, units_of
from fmol.algorithms.trouble import known_trouble
from fmol.engines.seam import Engine, Lane, LocalConfig
from fmol.federation import Federation
from fmol.layout import squared_norm
from fmol.metrics import mean_losses
from fmol.options import Count
from fmol.rounds import NAN, Plan, RoundReport, State
from fmol.rules import needs_losses
from fmol.schedules import Schedule, at

__all__ = ["FMGDA", "FSMGDA"]

RULE = "rule."
"""Before the names of what a rule keeps in the state's memory."""


@dataclass(frozen=True, kw_only=True)
class FSMGDA(DriftOptions, ServerOptions):
    """Federated stochastic multiple gradient descent averaging.

    Each client of the cohort takes `local_steps` minibatch steps on *each of its objectives
    separately*, all from `x_t`, and sends one Δ per objective; the server averages them per
    objective over the clients that hold it and steps along the shortest convex combination.

    >>> FSMGDA(local_steps=10, batch_size=64, local_lr=0.1, server_lr=0.1).local_steps
    10
    """

    batch_size: Count | None = 64
    """Samples per local step; None, or at least the client's number, is all of them (FMGDA)."""
    server_lr: Schedule = 0.1
    """η_t, a number or a callable of the round."""

    def init(self, federation: Federation, x: Tensor) -> State:
        """`x_0`, and room for what is kept of old updates, steps and drift."""
        state = super().init(federation, x)
        controls = room_for_controls(self.drift_correction, len(federation.names), x)
        return State(x, {**state.memory, **controls})

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        local = self.local(plan.round, self.batch_size)
        server_lr = at(self.server_lr, plan.round, "server_lr")
        return multiple_gradient_round(self, state, plan, engine, local, server_lr)


@dataclass(frozen=True, kw_only=True)
class FMGDA(FSMGDA):
    """Federated multiple gradient descent averaging: FSMGDA with all local data as the batch.

    >>> FMGDA(local_steps=5, local_lr=0.1, server_lr=0.1).batch_size is None
    True
    """

    batch_size: None = field(default=None, init=False, repr=False)


def multiple_gradient_round(
    options: ServerOptions,
    state: State,
    plan: Plan,
    engine: Engine,
    local: LocalConfig,
    server_lr: float,
) -> tuple[State, RoundReport]:
    """Algorithm 1; the numbers are those of its lines."""
    federation, names, x = engine.federation, engine.federation.names, state.x
    need_losses = (
        options.normalize in ("loss", "loss+")
        or needs_losses(options.rule)
        or any(o.target is not None for o in federation.objectives)
    )
    # 1–3. Each client descends each of its objectives by itself, every time from x_t.
    lanes = {name: Lane(name, {name: 1.0}) for name in names}

    @cache  # Clients that hold the same objectives are asked for the same.
    def asked(objectives: tuple[str, ...]) -> dict[str, Any]:
        payload = control_payload(state.memory, names, objectives)
        return {"lanes": tuple(lanes[name] for name in objectives), "payload": payload}

    asks = [
        plan.ask(client, x, local=local, need_losses=need_losses, **asked(client.objectives))
        for client in map(federation.client, plan.cohort)
    ]
    # 4–5. Δ_s: the mean over the clients that hold s and answered.
    layout = options.unit_layout(federation)
    fold = MeanFold(names, x, options.weighting, steps=corrects(state.memory), units=layout)
    means, receipt = engine.map(asks, fold, transforms=options.transforms)
    started = perf_counter()
    losses = mean_losses(receipt.clients, names, options.weighting)
    policy, max_age = options.on_missing_objective, options.reuse_rounds
    rows = fill_in(policy, max_age, state, losses, plan.round, means, receipt)
    protected = _at_target(federation, rows)
    memory = {**rows.memory, **follow_controls(rows.memory, means)}
    direction, angles, applied = None, None, {}
    spread: dict[str, float] = {}
    if rows.names:
        shared = _mask(options.shared, federation, x)
        angles = measure_angles(rows.deltas, shared)
        spread = _spread(means, angles if options.shared is None else None, rows.names)
        if not rows.hold and len(protected) < len(rows.names):
            # 6. λ of the shortest convex combination of the Δ_s, 7. which is the direction d_t.
            own = {k.removeprefix(RULE): v for k, v in memory.items() if k.startswith(RULE)}
            pulls = prepare(
                rows,
                angles,
                names,
                cap=options.cap,
                beta=options.objective_momentum,
                spread=spread,
                shared=shared,
                units=units_of(means, layout),
            )
            direction = find_direction(
                pulls.deltas,
                rows.names,
                rule=options.rule,
                normalize=options.normalize,
                shared=shared,
                angles=pulls.angles,
                losses=rows.losses if need_losses else None,
                protected=torch.tensor([n in protected for n in rows.names]) if protected else None,
                round=plan.round,
                memory=own,
            )
            memory |= {f"{RULE}{k}": v for k, v in own.items()}
            vector, kept = apply_step(options.server_step, direction.vector, memory)
            memory |= {**pulls.memory, **kept}
            x = step(x, vector, server_lr, plan.round)
            applied = _applied(vector, direction, rows.deltas, pulls, angles, shared)
    report = RoundReport(
        round=plan.round,
        cohort=plan.cohort,
        losses=losses,
        **_described(direction, angles, rows.names, names),
        **applied,
        missing=rows.missing,
        reused=rows.reused,
        protected=protected,
        refused=receipt.refused,
        silent=receipt.silent,
        spread=spread,
        local_lr=local.lr,
        server_lr=server_lr,
        bytes_up=receipt.bytes_up,
        bytes_down=receipt.bytes_down,
        seconds={"clients": receipt.seconds, "server": perf_counter() - started},
        clients=receipt.clients,
        notes=(*known_trouble(options), *receipt.notes) if plan.round == 0 else receipt.notes,
    )
    return State(x, memory), report


def _at_target(federation: Federation, rows: Rows) -> tuple[str, ...]:
    """The objectives among the rows whose loss is at or below their target."""
    targets = {o.name: o.target for o in federation.objectives if o.target is not None}
    losses = zip(rows.names, rows.losses.tolist(), strict=True)
    return tuple(name for name, loss in losses if name in targets and loss <= targets[name])


def _spread(means: Means, angles: Angles | None, names: tuple[str, ...]) -> dict[str, float]:
    """ρ of the means; from the Gramian's diagonal where that is of the same vectors."""
    if angles is None:
        return means.spread
    squares = angles.gramian.diagonal().clamp(min=0).tolist()
    return means.spread_of(dict(zip(names, squares, strict=True)))


def _applied(
    vector: Tensor,
    direction: Direction,
    deltas: Tensor,
    pulls: Pulls,
    angles: Angles,
    shared: Tensor | None,
) -> dict[str, Any]:
    """The report's fields on what was applied, beside the updates as they came in."""
    if vector is direction.vector and pulls.deltas is deltas and shared is None:
        # The paper's step: all of it is in the Gramian, and nothing long is looked at again.
        square = direction.norm_squared
        products = angles.gramian @ (direction.weights * direction.scale)
    else:
        square = squared_norm(vector)
        products = (deltas @ vector if shared is None else deltas[:, shared] @ vector[shared]).cpu()
    length = square if shared is None else squared_norm(vector[shared])
    return {
        "step_norm_squared": square,
        "step_min_cosine": least_cosine(products, angles.norms, length**0.5),
        "extrapolation": pulls.factors,
    }


def _mask(shared: Any, federation: Federation, x: Tensor) -> Tensor | None:
    return None if shared is None else federation.layout.matching(shared).to(x.device)


def _described(
    direction: Direction | None,
    angles: Angles | None,
    present: tuple[str, ...],
    names: tuple[str, ...],
) -> dict[str, Any]:
    """The report's fields on a direction, over all objectives: λ is 0 for those left out."""
    cosines = torch.full((len(names), len(names)), NAN)
    norms, weights = dict.fromkeys(names, NAN), dict.fromkeys(names, 0.0)
    if angles is not None:
        where = torch.tensor([names.index(name) for name in present])
        cosines[where[:, None], where] = angles.cosines.float()
        norms |= dict(zip(present, angles.norms.tolist(), strict=True))
    fields = {"weights": weights, "delta_norms": norms, "cosines": cosines}
    if direction is None:
        return {**fields, "held": True}
    weights |= dict(zip(present, direction.weights.tolist(), strict=True))
    return {
        **fields,
        "scale": direction.scale,
        "direction_norm_squared": direction.norm_squared,
        "gap": direction.gap,
        "min_cosine": direction.min_cosine,
        "stationary": direction.stationary,
    }
