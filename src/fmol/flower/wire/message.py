"""A message: a fixed prefix, a header in JSON, and every tensor in one stretch of bytes.

The prefix says what it is, the protocol's version, and a checksum of all that follows. Nothing in a
message is ever executed or unpickled. With large models a copy costs ten times what reading does: one
is made to pack, and none to unpack.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fmol.flower.wire.checksum import digest
from fmol.flower.wire.header import PROTOCOL, WireError, built
from fmol.flower.wire.tensors import ALIGNMENT, lay_out, read_tensors

__all__ = [
    "CHECKED_FROM",
    "MAGIC",
    "PART_BYTES",
    "PREFIX",
    "checksum_of",
    "decode",
    "encode",
    "join_parts",
    "split_parts",
]

MAGIC = b"fmolwire"
PREFIX = struct.Struct("<8sIIQ")
"""Magic, protocol, checksum of everything behind it, bytes of the header."""
CHECKED_FROM = 16
"""Where that is: at the bytes of the header."""
PART_BYTES = 2**28
"""How much goes into one array: protobuf, by which Flower sends, ends at 2 GiB."""


def encode(
    header: dict[str, Any], tensors: Sequence[tuple[str, str, Tensor]], halved: str | None = None
) -> bytes:
    """The message of a header and of tensors, each with its section and name; those of the section
    `halved` go in half precision. Raises `WireError` for what cannot be sent."""
    rows, chunks, size = lay_out(tensors, halved)
    header = {**header, "order": sys.byteorder, "tensors": rows, "bytes": size}
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise WireError(f"the message's header cannot be written: {error}.") from error
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    message = io.BytesIO()
    for chunk in (bytes(PREFIX.size), text, *chunks):
        message.write(chunk)
    with message.getbuffer() as whole:
        PREFIX.pack_into(whole, 0, MAGIC, PROTOCOL, 0, len(text))
        PREFIX.pack_into(whole, 0, MAGIC, PROTOCOL, digest(whole[CHECKED_FROM:]), len(text))
    return message.getvalue()  # No copy: it is what was written to.


def decode(
    data: bytes | bytearray,
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], int]:
    """Header, tensors by section and name, which are views into `data`, and the bytes that halves
    saved; raises `WireError` for what is no whole message of this protocol."""
    if len(data) < PREFIX.size:
        raise WireError(
            f"the message has {len(data)} bytes and cannot have less than {PREFIX.size}. It was "
            "cut off."
        )
    magic, protocol, checksum, size = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(
            f"the message begins with {magic!r} and fmol's with {MAGIC!r}. It is damaged, or none."
        )
    if protocol != PROTOCOL:
        raise WireError(
            f"the message is of protocol {protocol}, and this side speaks protocol {PROTOCOL}. Run the "
            "same version of fmol on both sides."
        )
    if digest(memoryview(data)[CHECKED_FROM:]) != checksum:
        raise WireError(
            f"the message of {len(data)} bytes does not match its checksum. It was cut off or damaged "
            "on its way."
        )
    header = built(lambda: _header(data, size))
    tensors, saved = built(lambda: read_tensors(data, header, PREFIX.size + size))
    return header, tensors, saved


def _header(data: bytes | bytearray, size: int) -> dict[str, Any]:
    if PREFIX.size + size > len(data):
        raise WireError(f"the message says that its header has {size} bytes, which are not there.")
    try:
        header = json.loads(data[PREFIX.size : PREFIX.size + size])
    except RecursionError as error:
        raise WireError("the message's header is nested too deeply.") from error
    if not isinstance(header, dict) or not isinstance(header.get("note"), dict):
        raise WireError("the message's header is not a table with a note.")
    if header["order"] != sys.byteorder:
        raise WireError(
            f"the message's numbers are {header['order']}-endian, and this machine's {sys.byteorder}."
        )
    return header


def checksum_of(data: bytes) -> str:
    """The checksum that a packed message carries, as text."""
    return "" if len(data) < PREFIX.size else f"{PREFIX.unpack_from(data)[2]:08x}"


def split_parts(data: bytes, most: int = PART_BYTES) -> list[bytes]:
    """A message in parts of at most `most` bytes: one, unless it is large."""
    if len(data) <= most:
        return [data]
    view = memoryview(data)
    return [bytes(view[first : first + most]) for first in range(0, len(data), most)]


def join_parts(parts: Sequence[bytes]) -> bytes:
    """The message that `split_parts` divided."""
    return parts[0] if len(parts) == 1 else b"".join(parts)
