"""The server's side: asks as messages, and what is let in of their answers, whoever carries them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from uuid import uuid4

import torch
from flwr.app import Array, Message, MessageType, RecordDict

from fmol.engines.checks import check_reply
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
from fmol.engines.sequential import Tally
from fmol.federation import Client, Federation
from fmol.flower.frames import BY_ITSELF, NOTE
from fmol.flower.imports import describe_transform, path_of
from fmol.flower.memory import Fate
from fmol.flower.messages import Silence, X, from_content, to_arrays, to_content
from fmol.flower.wire import Failure, Received, WireError, pack_ask, pack_x, unpack_reply
from fmol.local import local_work

__all__ = ["Call", "Kept", "MessageEngine"]


@dataclass
class Call:
    """One `map` of an engine while its messages are on their way."""

    asks: Sequence[Ask]
    fold: Fold | None
    transforms: Sequence[Transform]
    told: Mapping[str, Any]
    """What every ask says beside itself: works, transforms, seed."""
    tally: Tally = field(default_factory=Tally)
    silent: dict[str, str] = field(default_factory=dict)
    """Client → why it was not heard."""
    waiting: dict[int, deque[_Sent]] = field(default_factory=dict)
    """Node → what it was asked and has not answered."""
    let_in: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Client → the slots of its updates that were folded in."""


@dataclass(frozen=True)
class Kept:
    """What a client keeps, as the server knows it: of which answer, and under which names."""

    of: str = ""
    names: tuple[str, ...] = ()


NOTHING = Kept()
MOST_TEXT, MOST_LINES = 500, 1000
"""How long a client's own words may be, and how many, to get into metrics and checkpoints."""


@dataclass(frozen=True)
class _Sent:
    ask: Ask
    answer: str
    """What the answer is called."""
    bytes: int


class MessageEngine(ABC):
    """What every engine does that asks by messages: packs, checks, folds, and tells clients what
    became of their last answer. Who carries the messages is another's affair."""

    def __init__(
        self, federation: Federation, *, seed: int, device: torch.device | str, half: bool
    ) -> None:
        self.federation = federation
        self.device = torch.device(device)
        self.seed, self.half = seed, half
        self._fates: dict[str, Fate] = {}
        """Client → what became of its last answer."""
        self._stores: dict[str, tuple[str, ...]] = {}
        """Client → what it would keep of that answer."""
        self._kept: dict[str, Kept] = {}
        """Client → what it keeps of committed rounds, by name."""
        self._packed: tuple[torch.Tensor, bytes, dict[str, Array]] | None = None

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        started = perf_counter()
        told = {
            "work": self._path(work or local_work),
            "transforms": [describe_transform(each) for each in transforms],
            "seed": int(self.seed),
            "half": self.half,
        }
        call = Call(sorted(asks, key=lambda ask: ask.client), fold, transforms, told)
        if asks:
            self._carry_out(call)
        for sent in (each for waiting in call.waiting.values() for each in waiting):
            call.silent.setdefault(sent.ask.client, "its answer was not handed on")
        self._packed = None
        result = None if fold is None else fold.result()
        result = self._settled(call, result)
        for client, reason in call.silent.items():
            call.tally.notes.append(f"client `{client}` was silent: {reason}")
        receipt = call.tally.receipt(perf_counter() - started)
        return result, replace(receipt, silent=tuple(sorted(call.silent)))

    # ---- for those who know how messages travel ----

    @abstractmethod
    def _carry_out(self, call: Call) -> None:
        """Sends `messages(call)` and gives their answers to `take_in`."""

    @abstractmethod
    def _message(self, client: str, content: RecordDict, kind: str) -> Message:
        """A message to a client, of Flower's kind `train` or `evaluate`."""

    @abstractmethod
    def _weigh(
        self, ask: Ask, sent: int, reply: Reply, received: int, saved: int
    ) -> tuple[int, int]:
        """Bytes up and down of one client: what went over the wire, or would have."""

    def _failed(self, ask: Ask, failure: Failure) -> str:
        """What is said of a client that could not answer; an engine may raise instead."""
        return f"it could not answer: {failure.kind}: {failure.message}"[:MOST_TEXT]

    def _transformed(self, transform: Transform, reply: Reply, ask: Ask) -> Reply:
        """The server's half of a transform; raises `WireError` where the reply is no good for it."""
        try:
            return transform.server(reply, ask)
        except Exception as error:
            raise WireError(
                f"{type(transform).__name__} cannot take it in: {type(error).__name__}: {error}"
            ) from error

    def _check(
        self, reply: Reply, ask: Ask, client: Client, note: Mapping[str, Any]
    ) -> tuple[Reply, tuple[Refusal, ...]]:
        """The reply without what may not be let in."""
        samples = note.get("samples")
        limit = samples if isinstance(samples, int) else None
        return check_reply(reply, ask, client, self.federation.layout, limit)

    def _settled(self, call: Call, result: Any) -> Any:
        """The fold's result, when all answers are in."""
        return result

    # ---- asks ----

    def messages(self, call: Call) -> Iterator[Message]:
        """The call's asks as messages, in the order of the clients' ids."""
        for ask in call.asks:
            answer = uuid4().hex  # Which nobody can guess: it is asked of one client, this once.
            fate = self._fates.get(ask.client)
            note = {
                **call.told,
                "answer": answer,
                "fate": None if fate is None else fate.to_note(),
                "kept": self._kept.get(ask.client, NOTHING).of,
            }
            packed, arrays = self.pack_x(ask.x)
            data = pack_ask(ask, self.federation.layout.digest, packed, note)
            kind = MessageType.TRAIN if ask.lanes else MessageType.EVALUATE
            message = self._message(ask.client, to_content(data, arrays), kind)
            sent = _Sent(ask, answer, len(data) + len(packed))
            call.waiting.setdefault(message.metadata.dst_node_id, deque()).append(sent)
            yield message

    def pack_x(self, x: torch.Tensor) -> tuple[bytes, dict[str, Array]]:
        """`x` packed, and as the arrays that all messages of a call share."""
        if self._packed is None or self._packed[0] is not x:
            data = pack_x(x, self.federation.layout.digest)
            self._packed = (x, data, to_arrays(data, X))
        return self._packed[1:]

    def _path(self, work: Work) -> str:
        return path_of(work, "`work`")

    # ---- answers ----

    def take_in(self, call: Call, answers: Iterable[Message | Silence]) -> None:
        """Checks answers one by one as they come, and folds what may be let in."""
        for answer in answers:
            node = answer.node if isinstance(answer, Silence) else answer.metadata.src_node_id
            waiting = call.waiting.get(node)
            if not waiting:
                call.tally.notes.append(
                    f"an answer of node {node} that nobody waits for was left out"
                )
            elif isinstance(answer, Silence):
                sent = waiting.popleft()
                call.silent[sent.ask.client] = answer.reason
                call.tally.down += sent.bytes
            else:
                self._take_in_one(call, waiting.popleft(), answer)

    def _take_in_one(self, call: Call, sent: _Sent, message: Message) -> None:
        ask, tally, size = sent.ask, call.tally, 0
        client = self.federation.client(ask.client)
        try:
            data = from_content(message.content)
            size = len(data)
            received = unpack_reply(data, ask, self.federation.layout.digest)
            reply = self._placed(self._reply_of(received, sent))
            up, down = self._weigh(ask, sent.bytes, reply, size, received.saved)
            for transform in reversed(call.transforms):
                reply = self._transformed(transform, reply, ask)
        except WireError as error:
            text = str(error)[:MOST_TEXT]
            reasons = [Refusal(ask.round, ask.client, name, text) for name in client.objectives]
            self._settle_later(sent, Reply(client=ask.client), reasons, {})
            tally.add(Reply(client=ask.client), reasons, size, sent.bytes)
            return
        note, reply = received.note, self._counted_once(reply)
        if note.get("lost"):
            tally.notes.append(_lost(ask.client))
        said = [*_texts(note, "notes"), *_why_not_warm(message)]
        tally.notes += [f"client `{ask.client}`: {text}" for text in said]
        reply, refusals = self._check(reply, ask, client, note)
        own = [
            Refusal(ask.round, ask.client, name, reason)
            for name, reason in _pairs(note, "refused")
            if name in client.objectives
        ]
        refusals = tuple(
            replace(each, objective=each.objective[:MOST_TEXT], reason=each.reason[:MOST_TEXT])
            for each in (*own, *refusals)[:MOST_LINES]
        )
        self._settle_later(sent, reply, refusals, note)
        if call.fold is not None:
            call.fold.add(reply, ask)
        call.let_in[ask.client] = tuple(reply.deltas)
        tally.add(reply, refusals, up, down)

    def _reply_of(self, received: Received, sent: _Sent) -> Reply:
        if isinstance(received.answer, Failure):
            raise WireError(self._failed(sent.ask, received.answer))
        given = received.note.get("answer")
        if given != sent.answer:
            raise WireError(
                f"the message is the answer {given!r}, and {sent.answer!r} was expected. It is of "
                "another ask, and is left out."
            )
        return received.answer

    def _placed(self, reply: Reply) -> Reply:
        if self.device.type == "cpu":
            return reply
        return replace(
            reply,
            deltas={slot: delta.to(self.device) for slot, delta in reply.deltas.items()},
            extra={name: tensor.to(self.device) for name, tensor in reply.extra.items()},
        )

    # ---- what clients keep ----

    def _settle_later(
        self, sent: _Sent, reply: Reply, refusals: Sequence[Refusal], note: Mapping[str, Any]
    ) -> None:
        """Notes what may be kept of this answer, for the client to hear with its next ask."""
        client = sent.ask.client
        if bool(note.get("keeps", True)) or client in self._fates:
            # A control variate belongs to one slot: those that were let in were counted.
            only = tuple(CONTROL + slot for slot in reply.deltas) if refusals else None
            self._fates[client] = Fate(sent.answer, only)
            self._stores[client] = tuple(_texts(note, "stores"))

    def _counted_once(self, reply: Reply) -> Reply:
        """The reply of a client that is not counted anew for what it has kept already, or has lost."""
        names = self._kept.get(reply.client, NOTHING).names
        first = tuple(slot for slot in reply.first if CONTROL + slot not in names)
        return replace(reply, first=first)

    def commit(self) -> None:
        for client, fate in self._fates.items():
            if fate.settled == "held":
                self._fates[client] = replace(fate, settled="committed")
                before, stores = self._kept.get(client, NOTHING), self._stores.get(client, ())
                own = tuple(name for name in fate.only or () if name in stores)
                if fate.only is None:
                    self._kept[client] = Kept(fate.answer if stores else "", stores)
                elif own:
                    names = tuple(dict.fromkeys((*before.names, *own)))
                    self._kept[client] = Kept(fate.answer, names)

    def discard(self) -> None:
        for client, fate in self._fates.items():
            if fate.settled == "held":
                self._fates[client] = replace(fate, settled="discarded")

    @abstractmethod
    def client_state(self) -> ClientState: ...

    @abstractmethod
    def load_client_state(self, state: ClientState) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def _lost(client: str) -> str:
    return (
        f"client `{client}` did not have what it should have kept from its last round (its site was "
        "started anew, or the server went back to an older checkpoint) and began without"
    )


def _why_not_warm(message: Message) -> list[str]:
    """Why a site that keeps a process did not answer in it, where it says so."""
    record: Mapping[str, Any] = message.content.config_records.get(NOTE) or {}
    why = str(record.get("why", BY_ITSELF))
    return [] if why == BY_ITSELF else [f"the warm process did not answer: {why}"[:MOST_TEXT]]


def _texts(note: Mapping[str, Any], name: str) -> list[str]:
    """A list of texts in a client's note; nothing where it is none."""
    values = note.get(name)
    if not isinstance(values, list):
        return []
    return [each[:MOST_TEXT] for each in values[:MOST_LINES] if isinstance(each, str)]


def _pairs(note: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    values = note.get(name)
    if not isinstance(values, list):
        return []
    pairs = [each for each in values if isinstance(each, list) and len(each) == 2]
    return [(str(one), str(other)) for one, other in pairs]
