"""The engine that computes through Flower's simulation: every ask and every reply a Flower message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Literal
from uuid import uuid4

import torch
from flwr.app import Message, MessageType

from fmol.engines.checks import check_reply, message_bytes, reply_bytes
from fmol.engines.seam import (
    CONTROL,
    Ask,
    ClientState,
    Fold,
    Receipt,
    Refusal,
    Reply,
    Transform,
    Work,
)
from fmol.engines.sequential import Tally, say_where
from fmol.errors import FmolError
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import Federation
from fmol.flower.client import Sites
from fmol.flower.imports import describe_transform, path_of
from fmol.flower.memory import Fate, Memory, settle
from fmol.flower.messages import Silence, exchange
from fmol.flower.simulation import Processes, Simulation, Threads, Workers
from fmol.flower.wire import Failure, Received, WireError, pack_ask, unpack_reply
from fmol.local import local_work
from fmol.precision import Precision, check_precision

__all__ = ["ClientError", "FlowerBackend", "FlowerEngine"]

FlowerBackend = Literal["thread", "ray"]
"""Where Flower's client apps run: in this process, or in processes that Ray starts."""


class ClientError(FmolError):
    """A client's own computation failed. The message has its error, and a note its traceback."""


class FlowerEngine:
    """Clients are nodes of a Flower simulation, and what they are asked goes through its messages.

    The numbers are those of the sequential engine. `backend` says where client apps run; `half` sends
    updates in half precision; `patience` is how many seconds a client may take before it counts as
    silent; `in_flight` is how many asks are on their way at a time, and so how many replies may have
    to be held until their turn comes.

    >>> from fmol import Client, FSMGDA, Objective, fit
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> problem = Federation(
    ...     torch.nn.Linear(1, 1),
    ...     [Objective("slope", lambda out, y: ((out - y) ** 2)[:, 0])],
    ...     [Client("a", (x, x), "slope"), Client("b", (x, 2 * x), "slope")],
    ... )
    >>> ours = fit(problem, FSMGDA(local_steps=2), rounds=2, device="cpu", engine="flower")
    >>> same = fit(problem, FSMGDA(local_steps=2), rounds=2, device="cpu")
    >>> bool((ours.losses == same.losses).all())
    True
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        backend: FlowerBackend = "thread",
        precision: Precision = "fp32",
        half: bool = False,
        patience: float = 600.0,
        in_flight: int = 8,
        processes: int | None = None,
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
    ) -> None:
        self.federation = federation
        self.device = torch.device(device)
        check_precision(precision, self.device)
        _check_options(backend, self.device, patience, in_flight)
        self.seed, self.backend, self.in_flight = seed, backend, in_flight
        self.patience = patience
        sites = partial(
            Sites,
            federation,
            device=self.device,
            precision=precision,
            half=half,
            evaluation_batch=evaluation_batch,
            cache_bytes=cache_bytes,
        )

        def workers() -> Workers:
            if backend == "thread":
                return Threads(sites, patience)
            return Processes(sites, patience, processes)

        self._simulation = Simulation(workers)
        self._fates: dict[str, Fate] = {}
        # Of this engine alone, so that no answer to another is ever taken for one to it.
        self._name, self._asked = uuid4().hex, 0

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
        silent = []
        told = {
            "work": self._path(work or local_work),
            "transforms": [describe_transform(each) for each in transforms],
            "seed": int(self.seed),
        }
        first = self._asked
        self._asked += len(asks)
        answers = exchange(
            self._simulation,
            self._messages(asks, first, told),
            in_flight=self._window(asks),
            # A client's own bound is kept where it computes; this one is for a link that is broken.
            patience=2 * self.patience + 10,
            wait=self._simulation.wait,
        )
        for number, (ask, answer) in enumerate(zip(asks, answers, strict=True), first):
            if isinstance(answer, Silence):
                silent.append(ask.client)
                tally.notes.append(f"client `{ask.client}` was silent: {answer.reason}")
                continue
            self._take_in(ask, self._answer_name(number), answer, fold, transforms, tally)
        result = None if fold is None else fold.result()
        receipt = tally.receipt(perf_counter() - started)
        return result, replace(receipt, silent=tuple(silent))

    def _window(self, asks: Sequence[Ask]) -> int:
        """How many asks are on their way at a time."""
        if len({ask.client for ask in asks}) < len(asks):
            return 1  # A client that is asked twice must hear of the first before the second.
        return max(self.in_flight, self._simulation.count) if asks else 1

    def _messages(self, asks: Sequence[Ask], first: int, told: Any) -> Iterator[Message]:
        for number, ask in enumerate(asks, first):
            fate = self._fates.get(ask.client)
            note = {
                **told,
                "answer": self._answer_name(number),
                "fate": None if fate is None else fate.to_note(),
            }
            data = pack_ask(ask, self.federation.layout.digest, note)
            kind = MessageType.TRAIN if ask.lanes else MessageType.EVALUATE
            yield self._simulation.message(ask.client, data, kind)

    def _take_in(
        self,
        ask: Ask,
        answer: str,
        data: bytes,
        fold: Fold | None,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> None:
        """Checks one answer, folds what may be let in, and remembers what became of it."""
        client = self.federation.client(ask.client)
        try:
            received = unpack_reply(data, ask, self.federation.layout.digest)
        except WireError as error:
            reasons = [Refusal(ask.round, ask.client, n, str(error)) for n in client.objectives]
            self._settle_later(ask.client, answer, Reply(client=ask.client), reasons, keeps=True)
            tally.add(Reply(client=ask.client), reasons, len(data), message_bytes(ask))
            return
        reply = _reply_of(received, ask)
        up, down = reply_bytes(reply) - received.saved, message_bytes(ask)
        try:
            reply = self._placed(reply)
            for transform in reversed(transforms):
                reply = transform.server(reply, ask)
        except Exception as error:
            say_where(error, ask)
            raise
        note = received.note
        reply, refusals = check_reply(
            reply, ask, client, self.federation.layout, note.get("samples")
        )
        self._settle_later(ask.client, answer, reply, refusals, bool(note.get("keeps", True)))
        if fold is not None:
            fold.add(reply, ask)
        tally.add(reply, refusals, up, down)

    def _settle_later(
        self, client: str, answer: str, reply: Reply, refusals: Sequence[Refusal], keeps: bool
    ) -> None:
        """Notes what may be kept of this answer, for the client to hear with its next ask."""
        if keeps or client in self._fates:
            # A control variate belongs to one slot: those that were let in were counted.
            only = tuple(CONTROL + slot for slot in reply.deltas) if refusals else None
            self._fates[client] = Fate(answer, only)

    def _answer_name(self, number: int) -> str:
        return f"{self._name}.{number}"

    def _path(self, work: Work) -> str:
        path = path_of(work, "`work`")
        if self.backend == "ray" and path.startswith("__main__:"):
            raise ValueError(
                f"`work` is `{path}`, and in Ray's processes the main module is another. Define it at "
                "the top of a module that can be imported."
            )
        return path

    def _placed(self, reply: Reply) -> Reply:
        if self.device.type == "cpu":
            return reply
        return replace(
            reply,
            deltas={slot: delta.to(self.device) for slot, delta in reply.deltas.items()},
            extra={name: tensor.to(self.device) for name, tensor in reply.extra.items()},
        )

    def commit(self) -> None:
        self._settle("committed")

    def discard(self) -> None:
        self._settle("discarded")

    def _settle(self, how: Literal["committed", "discarded"]) -> None:
        for client, fate in self._fates.items():
            if fate.settled == "held":
                self._fates[client] = replace(fate, settled=how)

    def client_state(self) -> ClientState:
        settled = {
            client: settle(memory, self._fates.get(client)).kept
            for client, memory in self._simulation.memories().items()
        }
        return {
            client: {name: tensor.to(self.device) for name, tensor in kept.items()}
            for client, kept in settled.items()
            if kept
        }

    def load_client_state(self, state: ClientState) -> None:
        self._fates.clear()
        self._simulation.remember({client: Memory(kept) for client, kept in state.items()})

    def close(self) -> None:
        self._simulation.close()


def _reply_of(received: Received, ask: Ask) -> Reply:
    answer = received.answer
    if isinstance(answer, Failure):
        error = ClientError(
            f"client `{ask.client}` could not answer in round {ask.round}: "
            f"{answer.kind}: {answer.message}"
        )
        error.add_note(answer.trace)
        raise error
    return answer


def _check_options(backend: str, device: torch.device, patience: float, in_flight: int) -> None:
    if backend not in ("thread", "ray"):
        raise ValueError(f"`backend` must be 'thread' or 'ray', got {backend!r}.")
    if backend == "ray" and device.type != "cpu":
        raise ValueError(
            f"`backend` is 'ray', whose processes compute on the CPU, and `device` is {device}. Use "
            "'cpu', or the backend 'thread'."
        )
    if not patience > 0:
        raise ValueError(f"`patience` must be more than 0 seconds, got {patience!r}.")
    if in_flight < 1:
        raise ValueError(f"`in_flight` must be at least 1, got {in_flight!r}.")
