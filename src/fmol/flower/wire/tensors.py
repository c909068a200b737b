"""Tensors as one stretch of bytes, with a row of the header for each, and back.

Neither way copies what lies on the CPU as it is to be sent: what is read are views. Halves are copied.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmol.flower.wire.halves import scaled, to_half
from fmol.flower.wire.header import WireError, text, whole

__all__ = ["ALIGNMENT", "DTYPES", "in_section", "lay_out", "read_tensors"]

ALIGNMENT = 64
"""Tensors begin at multiples of this, so that they are used where they lie."""
MOST_SIDES = 64
"""As many as tensors of any library have."""

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
NAMES = {dtype: name for name, dtype in DTYPES.items()}

with warnings.catch_warnings():
    # Torch says once in a process that such a buffer is not to be written to. Nobody here does.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def in_section(section: str, tensors: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    """The tensors of one section, each with the section and its name, as `lay_out` wants them."""
    for name in tensors:
        if not isinstance(name, str):
            raise WireError(f"`{section}` is keyed by {name!r}. Key it by names.")
    return [(section, name, tensor) for name, tensor in tensors.items()]


def lay_out(
    tensors: Sequence[tuple[str, str, Tensor]], halved: str | None = None
) -> tuple[list[list[Any]], list[bytes | memoryview], int]:
    """What the header says of each tensor, the bytes of all of them, and how many those are.

    A tensor is named by section and name; those of the section `halved` go in half precision.
    """
    rows: list[list[Any]] = []
    chunks: list[bytes | memoryview] = []  # Copied once, when they are written.
    offset = 0
    for section, name, tensor in tensors:
        values, exponent = _checked(tensor, f"`{name or section}`"), None
        if section == halved and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 2:
            values, exponent = to_half(values)
        data = values.reshape(-1).view(torch.uint8).numpy().data
        rows.append([section, name, NAMES[tensor.dtype], list(tensor.shape), offset, exponent])
        chunks += [data, bytes(-len(data) % ALIGNMENT)]
        offset += len(data) + len(chunks[-1])
    return rows, chunks, offset


def _checked(tensor: Tensor, owner: str) -> Tensor:
    """The tensor's values on the CPU and in one stretch; raises for what has no such."""
    if not isinstance(tensor, Tensor):
        raise WireError(f"{owner} is a {type(tensor).__name__}. Send a tensor.")
    if tensor.layout != torch.strided or tensor.dtype not in NAMES:
        raise WireError(
            f"{owner} is a tensor of {tensor.dtype} and {tensor.layout}, which cannot be sent. Make it "
            f"dense and of one of {', '.join(DTYPES)}."
        )
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def read_tensors(
    data: bytes | bytearray, header: Mapping[str, Any], begin: int
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """The tensors by section and name that lie in `data` from `begin` on, as `header` says, and the
    bytes that halves saved; raises where it speaks of what is not there."""
    if begin + whole(header["bytes"]) != len(data):
        raise WireError(
            f"the message's tensors should have {header['bytes']} bytes and have {len(data) - begin}."
        )
    found: dict[str, dict[str, Tensor]] = {}
    saved = end = 0
    for section, name, dtype_name, shape, offset, exponent in header["tensors"]:
        dtype = DTYPES[dtype_name]
        stored = dtype if exponent is None else torch.float16
        count = math.prod(map(whole, shape))
        # One behind the other: of a short message that named the same bytes again and again, widened
        # copies could fill any memory. And what has no numbers may still have too long sides.
        crooked = min(shape, default=0) < 0 or len(shape) > MOST_SIDES
        if crooked or whole(offset) < end or offset % ALIGNMENT:
            raise WireError(f"the message places `{name}` of shape {shape} at byte {offset}.")
        whole(math.prod(max(side, 1) for side in shape))
        if begin + offset + count * stored.itemsize > len(data):
            raise WireError(
                f"the message says that `{name}` has shape {shape}, which is not there."
            )
        values = (
            torch.frombuffer(data, dtype=stored, count=count, offset=begin + offset)
            if count
            else torch.empty(0, dtype=stored)
        )
        if dtype == torch.bool and bool((values.view(torch.uint8) > 1).any()):
            raise WireError(f"the message has truth values in `{name}` that are neither.")
        if exponent is not None:
            values = scaled(values, -whole(exponent)).to(dtype)
            saved += count * (dtype.itemsize - stored.itemsize)
        end = offset + count * stored.itemsize
        found.setdefault(text(section), {})[text(name)] = values.reshape(shape)
    return found, saved
