"""Asks as messages.

`x` is packed by itself, once for all who are asked: the ask names it by its checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from fmol.engines.seam import Ask, Lane, LocalConfig
from fmol.flower.wire.header import (
    WireError,
    address,
    agree,
    built,
    numbers,
    plain_map,
    text,
    texts,
    whole,
)
from fmol.flower.wire.message import checksum_of, decode, encode
from fmol.flower.wire.tensors import in_section

__all__ = ["pack_ask", "pack_x", "unpack_ask"]

LOCAL_FIELDS = frozenset(each.name for each in fields(LocalConfig))


def pack_x(x: Tensor, layout: str) -> bytes:
    """`x` `[d]` as one message, the same for all who are asked; `layout` is its model's digest."""
    return encode({"kind": "x", "layout": layout, "note": {}}, [("x", "", x)])


def pack_ask(ask: Ask, layout: str, x: bytes, note: Mapping[str, Any] | None = None) -> bytes:
    """An ask as one message but for its `x`, which is in the packed `x`.

    `note` goes along: names, numbers and lists of them that are the engine's own affair.
    """
    header = {
        **address("ask", layout, ask.client, ask.round, ask.phase),
        "lanes": [[lane.slot, plain_map(lane.mixture, "a lane's mixture")] for lane in ask.lanes],
        "local": None if ask.local is None else plain_map(asdict(ask.local), "`local`"),
        "evaluate": list(ask.evaluate),
        "held_out": bool(ask.held_out),
        "x": checksum_of(x),
        "note": dict(note or {}),
    }
    return encode(header, in_section("payload", ask.payload))


def unpack_ask(data: bytes, x: bytes, layout: str) -> tuple[Ask, Mapping[str, Any]]:
    """The ask in a message and its packed `x`, and its note; raises `WireError` for anything else.

    Its tensors are views into the two, and not to be written to.
    """
    header, tensors, _ = decode(data)
    agree(header, {"kind": "ask", "layout": layout})
    about, values, _ = decode(x)
    agree(about, {"kind": "x", "layout": layout})
    if header.get("x") != checksum_of(x):
        raise WireError(
            f"the ask belongs to the x {header.get('x')!r}, and {checksum_of(x)!r} came with it."
        )
    return built(lambda: _ask_from(header, {**tensors, **values})), header["note"]


def _ask_from(header: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> Ask:
    local = header["local"]
    if local is not None and not local.keys() <= LOCAL_FIELDS:
        unknown = sorted(local.keys() - LOCAL_FIELDS)
        raise WireError(
            f"the ask sets {', '.join(f'`{name}`' for name in unknown)} for the local steps, which "
            "this side does not know. Run the same version of fmol on both sides."
        )
    return Ask(
        client=text(header["client"]),
        round=whole(header["round"]),
        phase=whole(header["phase"]),
        x=tensors["x"][""],
        lanes=tuple(Lane(text(slot), numbers(mix)) for slot, mix in header["lanes"]),
        local=None if local is None else LocalConfig(**local),
        evaluate=texts(header["evaluate"]),
        held_out=bool(header["held_out"]),
        payload=dict(tensors.get("payload", {})),
    )
