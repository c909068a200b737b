"""The Gramian of a few long vectors on a GPU: one pass over them, summed in double precision."""

from __future__ import annotations

import itertools
import logging
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fmol.kernels.nvrtc import CudaKernel, compile_kernel

__all__ = ["MOST_ROWS", "gram", "gram_tiles", "kernel_text"]

logger = logging.getLogger("fmol")

MOST_ROWS = 64
"""With more, products of matrices are as good."""
LONGEST = 512
"""How many products are added up in single precision."""
THREADS = 288
"""Of a block, at most."""
MOST_SIDE = 5
"""Rows of a group, at most: the sums of two groups are kept in a thread's registers."""
SHARED = 24 * 1024
"""Bytes of the vectors that a block has at a time."""
BLOCKS = 528


def gram(rows: Tensor) -> Tensor | None:
    """`rows @ rows.T` `[S, S]` in float64, on the CPU, of `rows` `[S, d]` in float32 on a GPU.

    None where it is not the way to do it.
    """
    s, d = rows.shape
    if rows.dtype != torch.float32 or not 1 <= s <= MOST_ROWS or d >= 2**31:
        return None
    rows = rows.contiguous()
    aligned = d % 4 == 0 and rows.data_ptr() % 16 == 0
    side, slices, turns = gram_tiles(s)
    kernel = _kernel(s, aligned, rows.device)
    if kernel is None:
        return None
    stages = -(-d // (4 * slices * turns))
    each = -(-stages // min(stages, BLOCKS))
    blocks = -(-stages // each)
    groups = -(-s // side)
    pairs = groups * (groups + 1) // 2
    parts = torch.empty(blocks, pairs, side, side, dtype=torch.float64, device=rows.device)
    kernel((blocks, 1), pairs * slices, [rows, parts, d, each])
    return parts.sum(0).cpu().reshape(-1)[_places(s)]


@cache
def _places(s: int) -> Tensor:
    """Where each product of two of `s` rows stands in what the kernel writes, `[S, S]`."""
    side, _, _ = gram_tiles(s)
    groups = -(-s // side)
    pairs = itertools.combinations_with_replacement(range(groups), 2)
    places = torch.empty(groups, side, groups, side, dtype=torch.int64)
    for number, (a, c) in enumerate(pairs):
        block = torch.arange(number * side**2, (number + 1) * side**2).reshape(side, side)
        places[c, :, a] = block.T
        places[a, :, c] = block
    return places.reshape(groups * side, groups * side)[:s, :s].clone()


@cache
def gram_tiles(s: int) -> tuple[int, int, int]:
    """Rows of a group, slices of the columns, and how often a thread goes on to the next slice."""
    # Each number that is read takes part in `side` products, and rows are filled up to whole groups.
    side = min(
        range(1, MOST_SIDE + 1), key=lambda side: (-(-s // side) * side) ** 2 * (1 + 2 / side)
    )
    groups = -(-s // side)
    pairs = groups * (groups + 1) // 2
    slices = max(1, min(32, THREADS // pairs))
    turns = max(1, min(4, SHARED // (16 * groups * side * slices)))
    return side, slices, turns


def kernel_text(s: int, aligned: bool) -> str:
    """The text of the kernel for `s` vectors."""
    side, slices, turns = gram_tiles(s)
    sizes = {
        "S": s, "SIDE": side, "SLICES": slices, "TURNS": turns, "LONGEST": LONGEST,
        "ALIGNED": int(aligned),
    }  # fmt: skip
    names = "".join(f"#define {key} {value}\n" for key, value in sizes.items())
    return names + files("fmol.kernels").joinpath("gram.cu").read_text()


@cache
def _kernel(s: int, aligned: bool, device: torch.device) -> CudaKernel | None:
    try:
        return compile_kernel(kernel_text(s, aligned), "gram", device)
    except (OSError, RuntimeError) as error:
        logger.warning("Gramians are computed as products of matrices: %s", error)
        return None
