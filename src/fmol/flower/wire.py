"""Asks and replies as bytes: one packed message each way, checked before anything is believed.

A message is a fixed prefix (what it is, the protocol's version, a checksum of all that follows), a
header in JSON, and every tensor in one stretch of bytes. Nothing in it is ever executed or unpickled.
`x` is packed by itself, once for all who are asked: the ask names it by its checksum.
With large models a copy costs ten times what reading does: one is made to pack, and none to unpack.
"""

from __future__ import annotations

import io
import json
import math
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmol.engines.seam import Ask, Lane, LocalConfig, Reply

__all__ = [
    "PROTOCOL",
    "Failure",
    "Introduction",
    "Received",
    "WireError",
    "join_parts",
    "pack_ask",
    "pack_failure",
    "pack_introduction",
    "pack_query",
    "pack_reply",
    "pack_tensors",
    "pack_x",
    "split_parts",
    "unpack_ask",
    "unpack_introduction",
    "unpack_query",
    "unpack_reply",
    "unpack_tensors",
]

PROTOCOL = 4
"""Rises whenever a message of before could be misread."""

MAGIC = b"fmolwire"
PREFIX = struct.Struct("<8sIIQ")
"""Magic, protocol, checksum of everything behind it, bytes of the header."""
CHECKED_FROM = 16
"""Where that is: at the bytes of the header."""
ALIGNMENT = 64
"""Tensors begin at multiples of this, so that they are used where they lie."""
BLOCK_WORDS = 512
"""How many words of eight bytes are summed up for the checksum."""
PART_BYTES = 2**28
"""How much goes into one array: protobuf, by which Flower sends, ends at 2 GiB."""
HALF_EXPONENT = 15
"""Halves are scaled so that the largest is just below 2^15; theirs ends at 65504."""
MOST_WHOLE = 2**53
"""Whole numbers beyond this are no counts of anything, and are not exact as floats either."""
MOST_EXPONENT = 1100
"""Float64 goes from 2^−1074 to 2^1024: further nothing is ever scaled, whatever a message says."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}
LOCAL_FIELDS = frozenset(each.name for each in fields(LocalConfig))

with warnings.catch_warnings():
    # Torch says once in a process that such a buffer is not to be written to. Nobody here does.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


class WireError(ValueError):
    """A message that cannot be packed, or cannot be taken for what it should be."""


@dataclass(frozen=True)
class Failure:
    """What a client sends where it could not answer: the error in words."""

    client: str
    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class Received:
    """A client's answer, with what its side noted beside it."""

    answer: Reply | Failure
    note: Mapping[str, Any] = field(default_factory=dict)
    saved: int = 0
    """Bytes by which its tensors were smaller on the wire than they are now."""


# ---- asks and replies ------------------------------------------------------------------------


def pack_x(x: Tensor, layout: str) -> bytes:
    """`x` `[d]` as one message, the same for all who are asked; `layout` is its model's digest."""
    return _encode({"kind": "x", "layout": layout, "note": {}}, [("x", "", x)])


def pack_ask(ask: Ask, layout: str, x: bytes, note: Mapping[str, Any] | None = None) -> bytes:
    """An ask as one message but for its `x`, which is in the packed `x`.

    `note` goes along: names, numbers and lists of them that are the engine's own affair.
    """
    header = {
        **_address("ask", layout, ask.client, ask.round, ask.phase),
        "lanes": [[lane.slot, _plain_map(lane.mixture, "a lane's mixture")] for lane in ask.lanes],
        "local": None if ask.local is None else _plain_map(asdict(ask.local), "`local`"),
        "evaluate": list(ask.evaluate),
        "held_out": bool(ask.held_out),
        "x": _checksum(x),
        "note": dict(note or {}),
    }
    return _encode(header, list(_section("payload", ask.payload)))


def unpack_ask(data: bytes, x: bytes, layout: str) -> tuple[Ask, Mapping[str, Any]]:
    """The ask in a message and its packed `x`, and its note; raises `WireError` for anything else.

    Its tensors are views into the two, and not to be written to.
    """
    header, tensors, _ = _decode(data)
    _agree(header, {"kind": "ask", "layout": layout})
    about, values, _ = _decode(x)
    _agree(about, {"kind": "x", "layout": layout})
    if header.get("x") != _checksum(x):
        raise WireError(
            f"the ask belongs to the x {header.get('x')!r}, and {_checksum(x)!r} came with it."
        )
    return _built(lambda: _ask_from(header, {**tensors, **values})), header["note"]


def _ask_from(header: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> Ask:
    local = header["local"]
    if local is not None and not local.keys() <= LOCAL_FIELDS:
        unknown = sorted(local.keys() - LOCAL_FIELDS)
        raise WireError(
            f"the ask sets {', '.join(f'`{name}`' for name in unknown)} for the local steps, which "
            "this side does not know. Run the same version of fmol on both sides."
        )
    return Ask(
        client=_text(header["client"]),
        round=_whole(header["round"]),
        phase=_whole(header["phase"]),
        x=tensors["x"][""],
        lanes=tuple(Lane(_text(slot), _numbers(mix)) for slot, mix in header["lanes"]),
        local=None if local is None else LocalConfig(**local),
        evaluate=_texts(header["evaluate"]),
        held_out=bool(header["held_out"]),
        payload=dict(tensors.get("payload", {})),
    )


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
        **_address("reply", layout, reply.client, ask.round, ask.phase),
        "steps": _plain_map(reply.steps, "`steps`"),
        "first": list(reply.first),
        "losses": _plain_map(reply.losses, "`losses`"),
        "samples": _plain_map(reply.samples, "`samples`"),
        "held_out": {
            name: _plain_map(row, f"`held_out` of `{name}`") for name, row in reply.held_out.items()
        },
        "seconds": _plain(reply.seconds, "`seconds`"),
        "note": dict(note or {}),
    }
    tensors = [*_section("deltas", reply.deltas), *_section("extra", reply.extra)]
    return _encode(header, tensors, halved="deltas" if half else None)


def pack_failure(
    kind: str, message: str, trace: str, client: str, ask: Ask | None, layout: str
) -> bytes:
    """An error at a client as one message, in words; `ask` is None where not even that was read."""
    round, phase = (-1, -1) if ask is None else (ask.round, ask.phase)
    header = {
        **_address("failure", layout, client, round, phase),
        "error": kind,
        "message": message,
        "trace": trace,
        "note": {},
    }
    return _encode(header, [])


def unpack_reply(data: bytes, ask: Ask, layout: str) -> Received:
    """What a client answered to `ask`; raises `WireError` for anything that is no answer to it.

    Its tensors are views into the message.
    """
    header, tensors, saved = _decode(data)
    if header.get("kind") == "failure":
        return Received(_failure_from(header))
    expected = {"kind": "reply", "layout": layout, "round": ask.round, "phase": ask.phase}
    _agree(header, expected)
    reply = _built(
        lambda: Reply(
            client=_text(header["client"]),
            deltas=dict(tensors.get("deltas", {})),
            steps=_numbers(header["steps"]),
            first=_texts(header["first"]),
            losses=_numbers(header["losses"]),
            samples=_numbers(header["samples"]),
            held_out={_text(k): _numbers(row) for k, row in header["held_out"].items()},
            extra=dict(tensors.get("extra", {})),
            seconds=_number(header["seconds"]),
        )
    )
    return Received(reply, header["note"], saved)


@dataclass(frozen=True)
class Introduction:
    """What a site says of itself before it takes part."""

    client: str
    """The name by which the server knows it, in every run and after every restart."""
    objectives: tuple[str, ...]
    samples: int
    held_out: int
    """Samples of its own that are held out; 0 without."""
    layout: str
    """The digest of its model's layout."""


def pack_query(layout: str) -> bytes:
    """The question who a site is, which names the layout of the server's model."""
    return _encode({"kind": "query", "layout": layout, "note": {}}, [])


def unpack_query(data: bytes) -> str:
    """The layout of the model of whoever asks."""
    header, _, _ = _decode(data)
    _agree(header, {"kind": "query"})
    return str(_built(lambda: _text(header["layout"])))


def pack_introduction(site: Introduction) -> bytes:
    """A site's answer to a query."""
    return _encode({"kind": "introduction", **asdict(site), "note": {}}, [])


def unpack_introduction(data: bytes) -> Introduction | Failure:
    """What a site says of itself, or why it could not; raises `WireError` for anything else."""
    header, _, _ = _decode(data)
    if header.get("kind") == "failure":
        return _failure_from(header)
    _agree(header, {"kind": "introduction"})
    site: Introduction = _built(
        lambda: Introduction(
            client=_text(header["client"]),
            objectives=_texts(header["objectives"]),
            samples=_whole(header["samples"]),
            held_out=_whole(header["held_out"]),
            layout=_text(header["layout"]),
        )
    )
    return site


def _failure_from(header: Mapping[str, Any]) -> Failure:
    failure: Failure = _built(
        lambda: Failure(
            _text(header["client"]),
            _text(header["error"]),
            _text(header["message"]),
            _text(header["trace"]),
        )
    )
    return failure


def pack_tensors(
    sections: Mapping[str, Mapping[str, Tensor]], note: Mapping[str, Any] | None = None
) -> bytes:
    """Named tensors in named sections as one message: what a client keeps between rounds."""
    tensors = [each for name, section in sections.items() for each in _section(name, section)]
    return _encode({"kind": "tensors", "note": dict(note or {})}, tensors)


def unpack_tensors(data: bytes) -> tuple[dict[str, dict[str, Tensor]], Mapping[str, Any]]:
    """The sections that `pack_tensors` was given, but for empty ones, and the note.

    Its tensors are copies: what a client keeps it may write to, and `data` are as before if it fails.
    """
    header, tensors, _ = _decode(bytearray(data))
    _agree(header, {"kind": "tensors"})
    return tensors, header["note"]


# ---- large messages --------------------------------------------------------------------------


def split_parts(data: bytes, most: int = PART_BYTES) -> list[bytes]:
    """A message in parts of at most `most` bytes: one, unless it is large."""
    if len(data) <= most:
        return [data]
    view = memoryview(data)
    return [bytes(view[first : first + most]) for first in range(0, len(data), most)]


def join_parts(parts: Sequence[bytes]) -> bytes:
    """The message that `split_parts` divided."""
    return parts[0] if len(parts) == 1 else b"".join(parts)


# ---- header ----------------------------------------------------------------------------------


def _address(kind: str, layout: str, client: str, round: int, phase: int) -> dict[str, Any]:
    return {"kind": kind, "layout": layout, "client": client, "round": round, "phase": phase}


def _agree(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises where a message is not of this kind, model, round and phase, with both sides' values."""
    words = {
        "kind": ("a message of the kind", "Answer asks with replies."),
        "layout": ("a model with layout", "Build the same model on both sides."),
        "round": ("round", "It is too late or too early, and is left out."),
        "phase": ("phase", "It is too late or too early, and is left out."),
    }
    for name, wanted in expected.items():
        got = header.get(name)
        if type(got) is not type(wanted) or got != wanted:
            what, advice = words[name]
            raise WireError(
                f"the message is of {what} {got!r}, and {wanted!r} was expected. {advice}"
            )


def _built(build: Callable[[], Any]) -> Any:
    """What `build` makes of a header; one sentence where the header is not as it should be."""
    try:
        return build()
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(
            f"the message's header is not one of protocol {PROTOCOL}: {error!r}. Run the same version "
            "of fmol on both sides."
        ) from error


def _plain(value: Any, owner: str) -> Any:
    """`value` as JSON has it, unchanged in value; raises for what is no number, text or nothing."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise WireError(f"{owner} holds a {type(value).__name__}. Give plain numbers.")


def _plain_map(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    for name in values:
        if not isinstance(name, str):
            raise WireError(f"{owner} is keyed by {name!r}. Key it by names.")
    return {name: _plain(value, owner) for name, value in values.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WireError(f"the message's header has {value!r} in place of a name.")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise WireError(f"the message's header has {values!r} in place of names.")
    return tuple(map(_text, values))


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise WireError(f"the message's header has {value!r} in place of a number.")
    return _bounded(value)


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise WireError(f"the message's header has {value!r} in place of a whole number.")
    return int(_bounded(value))


def _bounded(value: float) -> float:
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        raise WireError("the message's header has a whole number that is no count of anything.")
    return value


def _numbers(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise WireError(f"the message's header has {values!r} in place of numbers by name.")
    return {name: _number(value) for name, value in values.items()}


# ---- bytes -----------------------------------------------------------------------------------


def _section(section: str, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, str, Tensor]]:
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise WireError(f"`{section}` is keyed by {name!r}. Key it by names.")
        yield section, name, tensor


def _encode(
    header: dict[str, Any], tensors: Sequence[tuple[str, str, Tensor]], halved: str | None = None
) -> bytes:
    rows: list[list[Any]] = []
    chunks: list[bytes | memoryview] = []  # Copied once, when they are written.
    offset = 0
    for section, name, tensor in tensors:
        values, dtype = _checked(tensor, f"`{name or section}`"), str(tensor.dtype)
        exponent = None
        if section == halved and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 2:
            values, exponent = _to_half(values)
        data = values.reshape(-1).view(torch.uint8).numpy().data
        dtype = dtype.removeprefix("torch.")
        rows.append([section, name, dtype, list(tensor.shape), offset, exponent])
        chunks += [data, bytes(-len(data) % ALIGNMENT)]
        offset += len(data) + len(chunks[-1])
    header = {**header, "order": sys.byteorder, "tensors": rows, "bytes": offset}
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
        PREFIX.pack_into(whole, 0, MAGIC, PROTOCOL, _digest(whole[CHECKED_FROM:]), len(text))
    return message.getvalue()  # No copy: it is what was written to.


def _checked(tensor: Tensor, owner: str) -> Tensor:
    """The tensor's values on the CPU and in one stretch; raises for what has no such."""
    if not isinstance(tensor, Tensor):
        raise WireError(f"{owner} is a {type(tensor).__name__}. Send a tensor.")
    if tensor.layout != torch.strided or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise WireError(
            f"{owner} is a tensor of {tensor.dtype} and {tensor.layout}, which cannot be sent. Make it "
            f"dense and of one of {', '.join(DTYPES)}."
        )
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _to_half(values: Tensor) -> tuple[Tensor, int]:
    """The values times 2^e in half precision, and e."""
    wide = values.double()
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    exponent = HALF_EXPONENT - math.frexp(largest)[1] if largest else 0
    return _scaled(wide, exponent).half(), exponent


def _scaled(values: Tensor, exponent: int) -> Tensor:
    """The values `[…]` in float64 times 2^e, for any e that a float64 can need."""
    exponent = max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))
    # In two steps: for the smallest of numbers 2^e itself is beyond what a float64 holds.
    part = exponent // 2
    return values.double() * 2.0**part * 2.0 ** (exponent - part)


def _decode(
    data: bytes | bytearray,
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], int]:
    """Header, tensors by section and name, which are views into `data`, and the bytes that halves
    saved."""
    if len(data) < PREFIX.size:
        raise WireError(
            f"the message has {len(data)} bytes and cannot have less than {PREFIX.size}. It was "
            "cut off."
        )
    magic, protocol, digest, size = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise WireError(
            f"the message begins with {magic!r} and fmol's with {MAGIC!r}. It is damaged, or none."
        )
    if protocol != PROTOCOL:
        raise WireError(
            f"the message is of protocol {protocol}, and this side speaks protocol {PROTOCOL}. Run the "
            "same version of fmol on both sides."
        )
    if _digest(memoryview(data)[CHECKED_FROM:]) != digest:
        raise WireError(
            f"the message of {len(data)} bytes does not match its checksum. It was cut off or damaged "
            "on its way."
        )
    header = _built(lambda: _header(data, size))
    tensors, saved = _built(lambda: _tensors(data, header, PREFIX.size + size))
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


def _tensors(
    data: bytes | bytearray, header: Mapping[str, Any], begin: int
) -> tuple[dict[str, dict[str, Tensor]], int]:
    if begin + _whole(header["bytes"]) != len(data):
        raise WireError(
            f"the message's tensors should have {header['bytes']} bytes and have {len(data) - begin}."
        )
    found: dict[str, dict[str, Tensor]] = {}
    saved = 0
    for section, name, dtype_name, shape, offset, exponent in header["tensors"]:
        dtype = DTYPES[dtype_name]
        stored = dtype if exponent is None else torch.float16
        count = math.prod(map(_whole, shape))
        if min(shape, default=0) < 0 or _whole(offset) < 0 or offset % ALIGNMENT:
            raise WireError(f"the message places `{name}` of shape {shape} at byte {offset}.")
        if begin + offset + count * stored.itemsize > len(data):
            raise WireError(
                f"the message says that `{name}` has shape {shape}, which is not there."
            )
        values = (
            torch.frombuffer(data, dtype=stored, count=count, offset=begin + offset)
            if count
            else torch.empty(0, dtype=stored)
        )
        if exponent is not None:
            values = _scaled(values, -_whole(exponent)).to(dtype)
            saved += count * (dtype.itemsize - stored.itemsize)
        found.setdefault(_text(section), {})[_text(name)] = values.reshape(shape)
    return found, saved


def _checksum(data: bytes) -> str:
    """The checksum that a packed message carries, as text."""
    return "" if len(data) < PREFIX.size else f"{PREFIX.unpack_from(data)[2]:08x}"


def _digest(data: bytes | memoryview) -> int:
    """CRC-32 of sums of 64-bit words and of the length: three times as fast as of all bytes.

    Sums are taken of every block, and over all blocks of the words at the same place. So every change
    of a single word is in one of each, and whatever is swapped in one of them at least. It is against
    damage alone: against people there are TLS and the nodes' keys.
    """
    words = np.frombuffer(data, dtype="<u8", count=len(data) // 8)
    whole = len(words) // BLOCK_WORDS * BLOCK_WORDS
    blocks = words[:whole].reshape(-1, BLOCK_WORDS)
    found = zlib.crc32(struct.pack("<Q", len(data)))
    for sums in (blocks.sum(axis=1), blocks.sum(axis=0)):  # Wrapping around.
        found = zlib.crc32(sums.astype("<u8", copy=False), found)
    return zlib.crc32(data[8 * whole :], found)  # What is left is less than a block.
