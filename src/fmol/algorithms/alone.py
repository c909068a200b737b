"""Alone: each client trains by itself. What it gains over this is its reason to take part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fmol.algorithms.mixture import MIXTURE, MixtureOptions, mixture_lanes, objective_weights
from fmol.algorithms.options import LocalOptions
from fmol.engines.seam import OWN_MODEL, Ask, Engine, Reply, Site, Work
from fmol.local import local_work
from fmol.metrics import mean_losses
from fmol.rounds import NAN, Plan, RoundReport, State, nothing_sent

__all__ = ["Alone"]


def work_alone(ask: Ask, site: Site) -> Reply:
    """Local work from the client's own parameters, which move and stay at the client.

    They stand in the reply as well, for the engine's checks and not for the server: a client whose
    model would break keeps the one it had, and is named.
    """
    own = site.state.get(OWN_MODEL, ask.x)
    reply = local_work(replace(ask, x=own), site)
    if MIXTURE not in reply.deltas:
        return reply
    moved = own - float(ask.payload["lr"]) * reply.deltas[MIXTURE]
    site.state[OWN_MODEL] = moved
    return replace(reply, deltas={MIXTURE: moved})


@dataclass(frozen=True)
class Alone(LocalOptions, MixtureOptions):
    """Each client trains a model of its own on the mean of its own objectives; nothing is sent.

    `weights` are renormalised over what a client holds. All start from the federation's model.
    Losses are each client's at its *own* model, averaged over the holders as usual. `result.model`
    stays the model they started from; a client's own is `result.client_model(id)`. Keeps one model
    per client, so memory grows with their number.

    >>> Alone(local_steps=10, local_lr=0.1).shares_model
    False
    """

    shares_model: ClassVar[bool] = False
    work: ClassVar[Work] = staticmethod(work_alone)

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        federation, names = engine.federation, engine.federation.names
        weights = objective_weights(self.weights, federation)
        local = self.local(plan.round, self.batch_size)
        lr = self.step_size(plan.round, local.lr)
        asks = []
        for client in map(federation.client, plan.cohort):
            lanes = mixture_lanes(client, weights, sum_to_one=True)
            ask = plan.ask(client, state.x, lanes=lanes, local=local)
            asks.append(replace(ask, payload={"lr": torch.tensor(lr, dtype=torch.float64)}))
        _, receipt = engine.map(asks, work=work_alone)
        size = len(names)
        report = RoundReport(
            round=plan.round,
            cohort=plan.cohort,
            losses=mean_losses(receipt.clients, names, self.weighting),
            delta_norms=dict.fromkeys(names, NAN),
            weights={name: weights[name] / sum(weights.values()) for name in names},
            refused=receipt.refused,
            silent=receipt.silent,
            held=True,
            cosines=torch.full((size, size), NAN),
            local_lr=local.lr,
            server_lr=lr,
            seconds={"clients": receipt.seconds},
            clients=receipt.clients,
            notes=receipt.notes,
        )
        return state, nothing_sent(report)
