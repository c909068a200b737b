"""The client's side: a message in, a message out, and everything else stays where it is."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fmol.engines.seam import Ask, Reply, Site
from fmol.engines.sequential import DataCache
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import Federation
from fmol.flower.imports import find, make_transform
from fmol.flower.memory import Fate, Memory, Stored, settle
from fmol.flower.messages import RECORD, from_content, to_content
from fmol.flower.wire import pack_failure, pack_reply, unpack_ask
from fmol.layout import FlatModel
from fmol.precision import Precision, products, step_dtype

__all__ = ["Sites", "make_client_app"]


class Sites:
    """Clients of a federation that answer packed asks, one at a time, on one working model."""

    def __init__(
        self,
        federation: Federation,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        half: bool = False,
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
    ) -> None:
        self.federation, self.device = federation, device
        self.precision, self.half = precision, half
        self.evaluation_batch = evaluation_batch
        self._cache_bytes = cache_bytes
        self._objectives = {o.name: o for o in federation.objectives}
        self._model = FlatModel(federation.model, device, step_dtype(precision))
        self._data = DataCache(federation, device, cache_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # Flower may send an app to another process. A working model's parameters are views into one
        # vector, which pickle tears apart: so it is made anew there.
        make = partial(
            Sites,
            device=self.device,
            precision=self.precision,
            half=self.half,
            evaluation_batch=self.evaluation_batch,
            cache_bytes=self._cache_bytes,
        )
        return make, (self.federation,)

    def answer(self, data: bytes, memory: Memory) -> tuple[bytes, Memory]:
        """The reply to a packed ask, or the failure to give one, and what the client keeps then."""
        ask: Ask | None = None
        layout = self.federation.layout.digest
        try:
            ask, note = unpack_ask(data, layout)
            memory = settle(memory, Fate.from_note(note["fate"]))
            site = self._site(ask.client, note["seed"], memory)
            reply = self._work(self._placed(ask), site, note)
            state = {name: tensor.detach() for name, tensor in site.state.items()}
            keeps = bool(state) or bool(memory)
            packed = pack_reply(
                reply,
                ask,
                layout,
                half=self.half,
                note={"keeps": keeps, "samples": len(site.samples)},
            )
        except Exception as error:  # noqa: BLE001 - all of them are told to the server
            trace = traceback.format_exc()
            client = "" if ask is None else ask.client
            return pack_failure(error, trace, client, ask, layout), memory
        pending = Stored(note["answer"], state) if keeps else None
        return packed, Memory(memory.kept, memory.held, pending)

    def _work(self, ask: Ask, site: Site, note: Any) -> Reply:
        work = find(note["work"], "`work`")
        transforms = [make_transform(each) for each in note["transforms"]]
        with products(self.precision, self.device):
            reply: Reply = work(ask, site)
        for transform in transforms:
            reply = transform.client(reply, ask, site)
        return reply

    def _placed(self, ask: Ask) -> Ask:
        if self.device.type == "cpu":
            return ask
        payload = {name: tensor.to(self.device) for name, tensor in ask.payload.items()}
        return Ask(**{**vars(ask), "x": ask.x.to(self.device), "payload": payload})

    def _site(self, id: str, seed: int, memory: Memory) -> Site:
        data = self._data.get(id)
        state: dict[str, Tensor] = {n: t.to(self.device) for n, t in memory.state.items()}
        return Site(
            client=data.client,
            objectives=self._objectives,
            model=self._model,
            samples=data.samples,
            held_out=data.held_out,
            state=state,
            counts=data.counts,
            seed=seed,
            evaluation_batch=self.evaluation_batch,
        )


def make_client_app(sites: Sites) -> ClientApp:
    """A Flower client app that answers fmol's asks, to train and to evaluate alike."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        record = context.state.config_records.get(RECORD)
        memory = Memory() if record is None else Memory.from_record(record)
        data, memory = sites.answer(from_content(message.content), memory)
        if memory:
            context.state[RECORD] = ConfigRecord(memory.to_record())
        elif record is not None:
            del context.state[RECORD]
        return Message(to_content(data), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app
