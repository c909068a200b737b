"""What went wrong at a client as a message, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmol.engines.seam import Ask
from fmol.flower.wire.header import address, built, text
from fmol.flower.wire.message import encode

__all__ = ["Failure", "failure_from", "pack_failure"]


@dataclass(frozen=True)
class Failure:
    """What a client sends where it could not answer: the error in words."""

    client: str
    kind: str
    message: str
    trace: str


def pack_failure(
    kind: str, message: str, trace: str, client: str, ask: Ask | None, layout: str
) -> bytes:
    """An error at a client as one message, in words; `ask` is None where not even that was read."""
    round, phase = (-1, -1) if ask is None else (ask.round, ask.phase)
    header = {
        **address("failure", layout, client, round, phase),
        "error": kind,
        "message": message,
        "trace": trace,
        "note": {},
    }
    return encode(header, [])


def failure_from(header: Mapping[str, Any]) -> Failure:
    """The failure that a message's header tells of."""
    return built(
        lambda: Failure(
            text(header["client"]),
            text(header["error"]),
            text(header["message"]),
            text(header["trace"]),
        )
    )
