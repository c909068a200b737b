"""Packed messages over a Flower grid: sent a few at a time, taken in one by one and in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from flwr.app import Array, ArrayRecord, Message, RecordDict

from fmol.flower.wire import PART_BYTES, WireError, join_parts, split_parts

__all__ = ["Link", "Silence", "exchange", "from_content", "to_arrays", "to_content"]

RECORD = "fmol"
STYPE = "fmol.wire"
TOGETHER = 2**26
"""Bytes of messages that are sent in one go, beside what they share."""
HEAD, X = "head", "x"
"""What an array holds a part of: the message itself, or the `x` that many messages share."""


class Link(Protocol):
    """The two things that are needed of a Flower grid."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Silence:
    """No answer of a node, and why."""

    node: int
    reason: str


def to_arrays(data: bytes, name: str, part_bytes: int = PART_BYTES) -> dict[str, Array]:
    """Packed bytes as Flower's arrays: one, or several where they are large.

    Every array is a request on every hop, so there is one of all tensors and not one of each.
    """
    return {
        f"{name}.{i:04d}": Array(dtype="uint8", shape=(len(part),), stype=STYPE, data=part)
        for i, part in enumerate(split_parts(data, part_bytes))
    }


def to_content(
    data: bytes, x: Mapping[str, Array] | None = None, part_bytes: int = PART_BYTES
) -> RecordDict:
    """A packed message as Flower's content; `x` are the arrays that it shares with others.

    Flower stores and sends an array that is in many messages once.
    """
    record = ArrayRecord(to_arrays(data, HEAD, part_bytes))
    for name, array in (x or {}).items():
        record[name] = array  # The same object in all messages: Flower hashes it once.
    return RecordDict({RECORD: record})


def from_content(content: RecordDict, name: str = HEAD) -> bytes:
    """The packed message in Flower's content, or what it shares with others."""
    record: Mapping[str, Array] = content.array_records.get(RECORD) or {}
    parts = [each for each in sorted(record) if each.startswith(f"{name}.")]
    if not parts or any(record[each].stype != STYPE for each in parts):
        raise WireError(
            f"the message has the records {sorted(content)} and no `{name}` of fmol's, which is in "
            f"`{RECORD}`."
        )
    return join_parts([record[each].data for each in parts])


def exchange(
    link: Link,
    messages: Iterable[Message],
    *,
    in_flight: int,
    wait: Callable[[float], object],
    patience: float = math.inf,
    deadline: float = math.inf,
) -> Iterator[Message | Silence]:
    """The answers to `messages`, in their order, each as soon as it and all before it are there.

    `in_flight` is how many are on their way at a time. An answer whose turn has not come waits where
    Flower keeps it, so that one at a time is here. Nobody is waited for after `patience` seconds in
    which no turn came, nor after the `deadline`, a time of the monotonic clock; what has arrived by
    then is heard all the same. `wait` returns when something may have arrived, or after so many
    seconds.
    """
    coming = iter(messages)
    sent: deque[tuple[int, str | None]] = deque()  # What was sent is let go of.
    heard = began = monotonic()
    while True:
        if len(sent) < in_flight:
            heard = heard if sent else monotonic()
            sent += _push(link, coming, in_flight - len(sent))
        if not sent:
            return
        node, id = sent[0]
        answers = [_read(each, node) for each in link.pull_messages([id])] if id else []
        now = monotonic()
        if answers:
            heard = now
        elif not id:
            answers = [Silence(node, "Flower did not take the message")]
        elif now - heard > patience:
            answers = [Silence(node, f"no answer within {patience:g} s")]
        elif now > deadline:
            answers = [Silence(node, f"no answer within {max(0.0, deadline - began):.3g} s")]
        else:
            wait(0.1)
            continue
        sent.popleft()
        yield from answers
        heard += monotonic() - now  # Whoever takes it in may take long: that is no silence.


def _push(link: Link, coming: Iterator[Message], most: int) -> Iterator[tuple[int, str | None]]:
    """Sends the next messages, together as far as they are small: node, and id where it was taken."""
    while most > 0:
        batch: list[Message] = []
        size = 0
        while len(batch) < most and size < TOGETHER and (message := next(coming, None)) is not None:
            batch.append(message)
            arrays = message.content.array_records[RECORD].items()
            size += sum(len(array.data) for name, array in arrays if name.startswith(HEAD))
        taken = set(link.push_messages(batch)) if batch else set()
        for message in batch:
            id = message.metadata.message_id
            yield message.metadata.dst_node_id, id if id in taken else None
        if size < TOGETHER:
            return
        most -= len(batch)


def _read(answer: Message, node: int) -> Message | Silence:
    if answer.has_error():
        return Silence(node, answer.error.reason or f"Flower's error {answer.error.code}")
    said = answer.metadata.src_node_id
    if said != node:  # Flower knows whom it asked; what the answer says of itself is no proof.
        return Silence(node, f"its answer says that it comes from node {said}")
    return answer
