"""Packed messages over a Flower grid: sent a few at a time, taken in one by one and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from flwr.app import Array, ArrayRecord, Message, RecordDict

from fmol.flower.wire import PART_BYTES, WireError, join_parts, split_parts

__all__ = ["Link", "Silence", "exchange", "from_content", "to_content"]

RECORD = "fmol"
STYPE = "fmol.wire"


class Link(Protocol):
    """The two things that are needed of a Flower grid."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Silence:
    """No answer, and why."""

    reason: str


def to_content(data: bytes, part_bytes: int = PART_BYTES) -> RecordDict:
    """A packed message as Flower's content: one array, or several where it is large.

    Every array is a request on every hop, so there is one of all tensors and not one of each.
    """
    parts = split_parts(data, part_bytes)
    arrays = {
        f"{i:04d}": Array(dtype="uint8", shape=(len(part),), stype=STYPE, data=part)
        for i, part in enumerate(parts)
    }
    return RecordDict({RECORD: ArrayRecord(arrays)})


def from_content(content: RecordDict) -> bytes:
    """The packed message in Flower's content."""
    record = content.array_records.get(RECORD)
    if not record or any(array.stype != STYPE for array in record.values()):
        raise WireError(
            f"the message has the records {sorted(content)} and none of fmol's, which is `{RECORD}`."
        )
    return join_parts([record[name].data for name in sorted(record)])


def exchange(
    link: Link,
    messages: Iterable[Message],
    *,
    in_flight: int,
    patience: float,
    wait: Callable[[float], object],
) -> Iterator[bytes | Silence]:
    """The answers to `messages`, in their order, each as soon as it and all before it are there.

    `in_flight` is how many are on their way at a time: so many answers may have to be held until
    their turn comes, and no more. After `patience` seconds in which nobody answered, all that are on
    their way are silent. `wait` returns when something may have arrived, or after so many seconds.
    """
    coming = iter(messages)
    sent: deque[str] = deque()
    answers: dict[str, bytes | Silence] = {}
    heard = monotonic()
    while True:
        while len(sent) < in_flight and (message := next(coming, None)) is not None:
            ids = list(link.push_messages([message]))
            sent.append(ids[0] if ids else f"not sent {id(message)}")
            if not ids:
                answers[sent[-1]] = Silence("Flower did not take the message")
            heard = monotonic() if len(sent) == 1 else heard
        if not sent:
            return
        open_ids = [id for id in sent if id not in answers]
        for reply in link.pull_messages(open_ids) if open_ids else ():
            answers[reply.metadata.reply_to_message_id] = _read(reply)
            heard = monotonic()
        if sent[0] not in answers:
            if monotonic() - heard > patience:
                reason = f"no answer within {patience:g} s"
                answers.update((id, Silence(reason)) for id in sent if id not in answers)
            else:
                wait(0.1)
        while sent and sent[0] in answers:
            given = monotonic()
            yield answers.pop(sent.popleft())
            heard += monotonic() - given  # Whoever takes it in may take long: that is no silence.


def _read(reply: Message) -> bytes | Silence:
    if reply.has_error():
        return Silence(reply.error.reason or f"Flower's error {reply.error.code}")
    try:
        return from_content(reply.content)
    except WireError as error:
        return Silence(str(error))
