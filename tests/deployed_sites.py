"""The sites of deployed tests: a client app as a site writes it, and one that can be told to misbehave.

The node's config says which site it is (`site="c0"`) and, for the faults, what it does in which round
(`faults="nan@1 shape@2"`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from flower_grid import site_of
from fmol import Client, Federation
from fmol.engines.seam import Ask, Reply
from fmol.flower import QUERY, answer, client, introduce
from fmol.flower.messages import X, from_content, to_content
from fmol.flower.wire import pack_reply, unpack_ask
from support import data, federation

HOLDINGS = (("a", "b"), ("b",), ("a", "c"))
"""What `c0`, `c1` and `c2` hold: `c` has one holder alone, the others have two."""


def make_problem() -> Federation:
    """The whole problem, which only the tests see: the server has its model, and a site its part."""
    problem = federation(HOLDINGS, sizes=[12, 9, 10])
    clients = [
        Client(own.id, own.data, own.objectives, held_out=data(6, seed=50 + i))
        for i, own in enumerate(map(problem.client, problem.population.ids()))
    ]
    return Federation(problem.model, problem.objectives, clients)


@cache
def make_site(name: str, foreign: bool = False) -> Federation:
    """A site's own part; with a `foreign` model its layout is another."""
    own = site_of(make_problem(), name)
    if not foreign:
        return own
    model = nn.Sequential(own.model, nn.Linear(3, 3).double())
    return Federation(model, own.objectives, [own.client(name)])


app = ClientApp()


@app.query(QUERY)
def query(message: Message, context: Context) -> Message:
    return introduce(message, context, _site)


@app.train()
def train(message: Message, context: Context) -> Message:
    fault = _fault(message, context)
    _log(context, f"train {fault or 'well'}")
    if fault is None:
        return answer(message, context, _site, device="cpu", engine="sequential")
    return _misbehave(fault, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return answer(message, context, _site, device="cpu", engine="sequential")


def _site(context: Context) -> Federation:
    return make_site(str(context.node_config["site"]), bool(context.node_config.get("foreign")))


def _fault(message: Message, context: Context) -> str | None:
    """What this site does wrong in the round that is asked for, if anything."""
    told = dict(
        each.split("@")[::-1] for each in str(context.node_config.get("faults", "")).split()
    )
    layout = _site(context).layout.digest
    ask, _ = unpack_ask(from_content(message.content), from_content(message.content, X), layout)
    return told.get(str(ask.round))


def _log(context: Context, text: str) -> None:
    """What happened here, where the tests can read it, and in which process."""
    if folder := context.node_config.get("log"):
        path = Path(str(folder)) / f"{context.node_config['site']}.txt"
        with path.open("a") as file:
            file.write(f"{time.time():.3f} {os.getpid()} {text}\n")


# ---- misbehaviour ----------------------------------------------------------------------------


def _misbehave(fault: str, message: Message, context: Context) -> Message:
    match fault:
        case "raise":
            raise ValueError("patient 4711 has no blood pressure")
        case "sleep":
            time.sleep(float(str(context.node_config.get("seconds", 60))))
        case "die":
            os._exit(9)
        case "garbage":
            return Message(to_content(b"\x80\x04" * 500), reply_to=message)
        case "stock":
            arrays, numbers = ArrayRecord([]), MetricRecord({"num-examples": 1})
            return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)
        case "replay":
            kept = Path(str(context.node_config["log"])) / "replayed"
            return Message(to_content(kept.read_bytes()), reply_to=message)
    with _packing(fault):
        reply = answer(message, context, _site, device="cpu", engine="sequential")
    if fault == "keep":
        kept = Path(str(context.node_config["log"])) / "replayed"
        kept.write_bytes(from_content(reply.content))
    return reply


class _packing:  # noqa: N801 - reads as a verb
    """While this goes on, replies are packed with a fault in them: the bytes are well-formed."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __enter__(self) -> None:
        vars(client)["pack_reply"] = self._pack

    def __exit__(self, *exc: object) -> None:
        vars(client)["pack_reply"] = pack_reply

    def _pack(self, reply: Reply, ask: Ask, layout: str, **options: Any) -> bytes:
        match self.fault:
            case "nan":
                reply = replace(reply, deltas=_each(reply.deltas, lambda d: d * torch.nan))
            case "shape":
                reply = replace(reply, deltas=_each(reply.deltas, lambda d: d[None]))
            case "short":
                reply = replace(reply, deltas=_each(reply.deltas, lambda d: d[:1]))
            case "loss":
                reply = replace(reply, losses=_each(reply.losses, lambda loss: -1e30))
            case "samples":
                reply = replace(reply, samples=_each(reply.samples, lambda n: 10**9))
            case "objective":
                reply = replace(reply, deltas={"c": next(iter(reply.deltas.values()))})
            case "stale":
                ask = replace(ask, round=ask.round - 1)
            case "layout":
                layout = "0" * len(layout)
        return pack_reply(reply, ask, layout, **options)


def _each(values: Mapping[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}
