"""The reference: one client after the other, in this process.

Simple enough to be read as the definition of what every other engine must compute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fmol.data import Samples, as_samples
from fmol.engines.checks import check_reply, client_records, message_bytes, reply_bytes
from fmol.engines.lines import Lines
from fmol.engines.seam import (
    CONTROL,
    Ask,
    ClientRecord,
    ClientState,
    Fold,
    Receipt,
    Refusal,
    Reply,
    Site,
    Transform,
    Work,
)
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import Client, Federation
from fmol.layout import FlatModel
from fmol.local import local_work
from fmol.precision import Precision, check_precision, products, step_dtype

__all__ = ["DataCache", "SequentialEngine"]

RECORD_BYTES = 4096
"""What a cached client costs beside its tensors, as measured: many small ones must not add up."""


class SequentialEngine:
    """Clients compute one after the other, in the order of their ids, on one working model."""

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
        precision: Precision = "fp32",
    ) -> None:
        self.federation = federation
        self.device = torch.device(device)
        check_precision(precision, self.device)
        self.precision = precision
        self.seed = seed
        self.evaluation_batch = evaluation_batch
        self._objectives = {o.name: o for o in federation.objectives}
        self._model = FlatModel(federation.model, self.device, step_dtype(precision))
        self._data = DataCache(federation, self.device, cache_bytes)
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._pending: dict[str, dict[str, Tensor]] = {}

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        started = perf_counter()
        tally = Tally()
        asks = sorted(asks, key=lambda ask: ask.client)
        with products(self.precision, self.device):
            self._one_by_one(asks, fold, work, transforms, tally)
        result = None if fold is None else fold.result()
        return result, tally.receipt(perf_counter() - started)

    def _one_by_one(
        self,
        asks: Sequence[Ask],
        fold: Fold | None,
        work: Work | None,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> None:
        """Carries out the asks in their order, and adds up what happened."""
        work = work or local_work
        for ask in asks:
            try:
                site = self._site(ask.client)
                reply = work(ask, site)
                for transform in transforms:
                    reply = transform.client(reply, ask, site)
                bytes_up, bytes_down = reply_bytes(reply), message_bytes(ask)
                for transform in reversed(transforms):
                    reply = transform.server(reply, ask)
            except Exception as error:
                say_where(error, ask)
                raise
            client, limit = site.client, len(site.samples)
            reply, refusals = check_reply(reply, ask, client, self.federation.layout, limit)
            self._hold_back(site, reply, refusals)
            if fold is not None:
                fold.add(reply, ask)
            tally.add(reply, refusals, bytes_up, bytes_down)

    def _hold_back(self, site: Site, reply: Reply, refusals: Sequence[Refusal]) -> None:
        """Puts aside what a client wants to keep, until the round is committed."""
        id, kept = site.client.id, dict(site.state)
        if refusals:
            # What is refused leaves no trace at the client either. A control variate belongs to one
            # slot: the server has counted those that were let in, so the client keeps them as well.
            names = [CONTROL + slot for slot in reply.deltas if CONTROL + slot in kept]
            own = {name: kept[name] for name in names}
            kept = {**self._kept.get(id, {}), **own} if own else {}
        if refusals and not kept:
            self._pending.pop(id, None)
        else:
            self._pending[id] = kept

    def _site(self, id: str) -> Site:
        data = self._data.get(id)
        return Site(
            client=data.client,
            objectives=self._objectives,
            model=self._model,
            samples=data.samples,
            held_out=data.held_out,
            state=dict(self._pending.get(id, self._kept.get(id, {}))),
            counts=data.counts,
            seed=self.seed,
            evaluation_batch=self.evaluation_batch,
        )

    def commit(self) -> None:
        for client, state in self._pending.items():
            if state:
                self._kept[client] = state
            else:
                self._kept.pop(client, None)
        self._pending.clear()

    def discard(self) -> None:
        self._pending.clear()

    def client_state(self) -> ClientState:
        return {client: dict(state) for client, state in self._kept.items()}

    def load_client_state(self, state: ClientState) -> None:
        self._pending.clear()
        self._kept = {
            client: {name: tensor.to(self.device) for name, tensor in tensors.items()}
            for client, tensors in state.items()
        }

    def close(self) -> None:
        self._data.clear()


@dataclass
class Tally:
    """What happened so far while some asks were carried out."""

    records: list[ClientRecord] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    up: int = 0
    down: int = 0

    def add(
        self,
        reply: Reply,
        refusals: Sequence[Refusal],
        up: int,
        down: int,
        norms: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Counts one client's checked reply in; `norms` are its updates' lengths, if known, and
        `seconds` what it took, if not what the reply says."""
        self.records += client_records(
            reply, bytes_up=up, bytes_down=down, norms=norms, seconds=seconds
        )
        self.refused += refusals
        self.up, self.down = self.up + up, self.down + down

    def add_lines(self, lines: Lines, squares: Sequence[float], seconds: float) -> None:
        """Counts many clients in whose replies were let in as they are; `squares` are `‖Δ‖²` of their
        lanes, and `seconds` what each client took."""
        self.records += lines.records(squares, seconds)
        self.up, self.down = self.up + lines.bytes_up, self.down + lines.bytes_down

    def receipt(self, seconds: float) -> Receipt:
        return Receipt(
            clients=tuple(self.records),
            refused=tuple(self.refused),
            bytes_up=self.up,
            bytes_down=self.down,
            seconds=seconds,
            notes=tuple(dict.fromkeys(self.notes)),
        )


def say_where(error: BaseException, ask: Ask) -> None:
    """Adds to an error in whose work, and in which round, it happened."""
    error.add_note(f"This happened in round {ask.round} at client `{ask.client}`.")


class _ClientData:
    def __init__(self, client: Client, device: torch.device) -> None:
        self.client = client
        self.samples: Samples = as_samples(client.data, f"`data` of client `{client.id}`").to(
            device
        )
        self.held_out: Samples | None = None
        if client.held_out is not None:
            owner = f"`held_out` of client `{client.id}`"
            self.held_out = as_samples(client.held_out, owner).to(device)
        self.counts: dict[str, int] = {}
        self.nbytes = self.samples.nbytes + (self.held_out.nbytes if self.held_out else 0)
        self.size_known = self.nbytes > 0
        self.nbytes += RECORD_BYTES


class DataCache:
    """Clients' data on the device, the least recently used forgotten beyond `max_bytes`.

    Datasets whose size is not known count by number, `max_unknown` of them.
    """

    def __init__(
        self, federation: Federation, device: torch.device, max_bytes: int, max_unknown: int = 256
    ) -> None:
        self._federation, self._device = federation, device
        self._max_bytes, self._max_unknown = max_bytes, max_unknown
        self._items: OrderedDict[str, _ClientData] = OrderedDict()
        self._bytes = self._unknown = 0

    def get(self, id: str) -> _ClientData:
        if id in self._items:
            self._items.move_to_end(id)
            return self._items[id]
        data = _ClientData(self._federation.client(id), self._device)
        self._items[id] = data
        self._count(data, +1)
        while len(self._items) > 1 and (
            self._bytes > self._max_bytes or self._unknown > self._max_unknown
        ):
            self._count(self._items.popitem(last=False)[1], -1)
        return data

    def _count(self, data: _ClientData, sign: int) -> None:
        self._bytes += sign * data.nbytes
        self._unknown += sign * (not data.size_known)

    def clear(self) -> None:
        self._items.clear()
        self._bytes = self._unknown = 0
