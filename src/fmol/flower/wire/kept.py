"""What a client keeps between rounds as a message to itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fmol.flower.wire.header import agree
from fmol.flower.wire.message import decode, encode
from fmol.flower.wire.tensors import in_section

__all__ = ["pack_tensors", "unpack_tensors"]


def pack_tensors(
    sections: Mapping[str, Mapping[str, Tensor]], note: Mapping[str, Any] | None = None
) -> bytes:
    """Named tensors in named sections as one message: what a client keeps between rounds."""
    tensors = [each for name, section in sections.items() for each in in_section(name, section)]
    return encode({"kind": "tensors", "note": dict(note or {})}, tensors)


def unpack_tensors(data: bytes) -> tuple[dict[str, dict[str, Tensor]], Mapping[str, Any]]:
    """The sections that `pack_tensors` was given, but for empty ones, and the note.

    Its tensors are copies: what a client keeps it may write to, and `data` are as before if it fails.
    """
    header, tensors, _ = decode(bytearray(data))
    agree(header, {"kind": "tensors"})
    return tensors, header["note"]
