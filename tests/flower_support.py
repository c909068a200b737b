"""Works and transforms that a client finds by their import path, for the tests of Flower."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fmol.engines.seam import Ask, Reply, Site
from fmol.local import local_work


def first_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared error of the first output."""
    return (outputs[:, 0] - targets[:, 0]) ** 2


def count_visits(ask: Ask, site: Site) -> Reply:
    """The usual work, and how often the client was asked, kept there."""
    reply = local_work(ask, site)
    site.state["visits"] = site.state.get("visits", torch.zeros(1)) + 1
    return reply


def keep_phase(ask: Ask, site: Site) -> Reply:
    """Keeps the phase; what is answered in phase 1 cannot be let in."""
    site.state["phase"] = torch.tensor([float(ask.phase)])
    loss = float("nan") if ask.phase == 1 else 0.0
    return Reply(client=site.client.id, losses={site.client.objectives[0]: loss})


def sleep_at_c1(ask: Ask, site: Site) -> Reply:
    """The usual work, but for one client that does not answer in time."""
    if site.client.id == "c1":
        time.sleep(1.5)
    return local_work(ask, site)


def claim_too_much(ask: Ask, site: Site) -> Reply:
    """Says that it has more samples than there are."""
    reply = local_work(ask, site)
    return replace(reply, samples=dict.fromkeys(reply.samples, 10**6))


def fail(ask: Ask, site: Site) -> Reply:
    raise ZeroDivisionError(f"at {site.client.id}")


def two_phases(ask: Ask, site: Site) -> Reply:
    """Keeps what it would send in phase 0 and sends it in phase 1."""
    if ask.phase == 0:
        reply = local_work(ask, site)
        for slot, delta in reply.deltas.items():
            site.state[f"kept.{slot}"] = delta
        norms = {slot: delta.norm()[None] for slot, delta in reply.deltas.items()}
        return replace(reply, deltas={}, extra=norms)
    deltas = {lane.slot: site.state.pop(f"kept.{lane.slot}") for lane in ask.lanes}
    scaled = {slot: ask.payload["scale"] * delta for slot, delta in deltas.items()}
    return Reply(client=site.client.id, deltas=scaled)


@dataclass(frozen=True)
class Halved:
    """A part of what is sent at the client, and the rest of the factor at the server."""

    factor: float = 0.5

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        return replace(reply, deltas={k: self.factor * d for k, d in reply.deltas.items()})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return replace(reply, deltas={k: d / self.factor for k, d in reply.deltas.items()})


@dataclass(frozen=True)
class LargeOnly:
    """Sends large entries and keeps the rest at the client for the next round."""

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        sent = {}
        for slot, delta in reply.deltas.items():
            whole = delta + site.state.get(f"rest.{slot}", torch.zeros_like(delta))
            sent[slot] = torch.where(whole.abs() >= whole.abs().median(), whole, 0)
            site.state[f"rest.{slot}"] = whole - sent[slot]
        return replace(reply, deltas=sent)

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


def obey(ask: Ask, site: Site) -> Reply:
    """Does to its state what the payload says, and tells what it saw there before."""
    saw = {f"saw.{name}": tensor.clone() for name, tensor in site.state.items()}
    order = int(ask.payload["order"])
    if order == 0:
        site.state.clear()
    elif order > 1:
        site.state["own"] = torch.tensor([float(order)])
        for lane in ask.lanes:
            site.state[f"control.{lane.slot}"] = torch.tensor([10.0 + order])
    deltas = {lane.slot: torch.ones_like(ask.x) for lane in ask.lanes}
    if "broken" in ask.payload:
        deltas[ask.lanes[0].slot] = torch.full_like(ask.x, torch.nan)
    return Reply(client=site.client.id, deltas=deltas, extra=saw)
