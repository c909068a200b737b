"""Replies as messages, and what is let in of what answers an ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmol.engines.seam import Ask, Reply
from fmol.flower.wire.failures import Failure, failure_from
from fmol.flower.wire.header import (
    address,
    agree,
    built,
    number,
    numbers,
    plain,
    plain_map,
    text,
    texts,
)
from fmol.flower.wire.message import decode, encode
from fmol.flower.wire.tensors import in_section

__all__ = ["Received", "pack_reply", "unpack_reply"]


@dataclass(frozen=True)
class Received:
    """A client's answer, with what its side noted beside it."""

    answer: Reply | Failure
    note: Mapping[str, Any] = field(default_factory=dict)
    saved: int = 0
    """Bytes by which its tensors were smaller on the wire than they are now."""


def pack_reply(
    reply: Reply,
    ask: Ask,
    layout: str,
    *,
    half: bool = False,
    note: Mapping[str, Any] | None = None,
) -> bytes:
    """The reply to `ask` as one message; with `half` its updates in half precision.

    Halves have eleven bits. They are scaled by a power of two to the largest value of each update, so
    that neither long nor short ones fall out of their range.
    """
    header = {
        **address("reply", layout, reply.client, ask.round, ask.phase),
        "steps": plain_map(reply.steps, "`steps`"),
        "first": list(reply.first),
        "losses": plain_map(reply.losses, "`losses`"),
        "samples": plain_map(reply.samples, "`samples`"),
        "held_out": {
            name: plain_map(row, f"`held_out` of `{name}`") for name, row in reply.held_out.items()
        },
        "seconds": plain(reply.seconds, "`seconds`"),
        "note": dict(note or {}),
    }
    tensors = [*in_section("deltas", reply.deltas), *in_section("extra", reply.extra)]
    return encode(header, tensors, halved="deltas" if half else None)


def unpack_reply(data: bytes, ask: Ask, layout: str) -> Received:
    """What a client answered to `ask`; raises `WireError` for anything that is no answer to it.

    Its tensors are views into the message.
    """
    header, tensors, saved = decode(data)
    if header.get("kind") == "failure":
        return Received(failure_from(header))
    expected = {"kind": "reply", "layout": layout, "round": ask.round, "phase": ask.phase}
    agree(header, expected)
    reply = built(
        lambda: Reply(
            client=text(header["client"]),
            deltas=dict(tensors.get("deltas", {})),
            steps=numbers(header["steps"]),
            first=texts(header["first"]),
            losses=numbers(header["losses"]),
            samples=numbers(header["samples"]),
            held_out={text(k): numbers(row) for k, row in header["held_out"].items()},
            extra=dict(tensors.get("extra", {})),
            seconds=number(header["seconds"]),
        )
    )
    return Received(reply, header["note"], saved)
