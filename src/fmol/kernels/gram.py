"""The Gramian of a few long vectors on a GPU: one pass over them, in double precision."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fmol.kernels.fallbacks import or_fall_back
from fmol.kernels.nvrtc import CudaKernel, compile_kernel

__all__ = ["MOST_ROWS", "gram", "kernel_text"]

MOST_ROWS = 64
"""With more, the sums do not fit into a thread's registers."""
WARPS = 8
"""Of a block."""
MOST_BLOCKS = 1056
"""Of a device: each multiprocessor has several to go through."""
QUICK = {(8, 0), (9, 0), (10, 0)}
"""Devices whose tensor cores are quick in double precision: of Ampere, Hopper and Blackwell those for
data centres."""


def gram(rows: Tensor) -> Tensor | None:
    """`rows @ rows.T` `[S, S]` in float64, on the CPU, of `rows` `[S, d]` in float32 on a GPU.

    None where it is not the way to do it.
    """
    s, d = rows.shape
    if rows.dtype != torch.float32 or not 1 <= s <= MOST_ROWS or d >= 2**31:
        return None
    rows = rows.contiguous()
    kernel = _kernel(s, d % 4 == 0 and rows.data_ptr() % 16 == 0, rows.device)
    if kernel is None:
        return None
    parts = -(-d // (16 * WARPS * _runs(s)))
    turns = -(-parts // min(parts, MOST_BLOCKS))
    blocks = -(-parts // turns)
    sums = torch.empty(blocks * WARPS, _tiles(s), 16, 8, dtype=torch.float64, device=rows.device)
    kernel((blocks, 1), 32 * WARPS, [rows, sums, d, turns])
    return sums.sum(0).cpu().reshape(-1)[_places(s)]


def _runs(s: int) -> int:
    """How many times sixteen columns a warp asks for at a time: more of them where rows are few."""
    return max(1, 4 // -(-s // 8))


def _tiles(s: int) -> int:
    """
    >>> _tiles(8), _tiles(9), _tiles(40)
    (1, 2, 9)
    """
    groups = -(-s // 8)
    return sum(groups - 2 * a for a in range(-(-groups // 2)))


@cache
def _places(s: int) -> Tensor:
    """Where each product of two of `s` rows stands in what the kernel writes, `[S, S]`."""
    groups = -(-s // 8)
    places = torch.zeros(16 * -(-groups // 2), 8 * groups, dtype=torch.int64)
    tile = 0
    for a in range(-(-groups // 2)):
        for c in range(2 * a, groups):
            places[16 * a : 16 * a + 16, 8 * c : 8 * c + 8] = torch.arange(
                128 * tile, 128 * tile + 128
            ).reshape(16, 8)
            tile += 1
    upper = places[:s, :s].triu()
    return upper + upper.triu(1).T


def kernel_text(s: int, aligned: bool) -> str:
    """The text of the kernel for `s` vectors."""
    # As many blocks of a multiprocessor as have their sums in registers.
    blocks = 2 if s <= 40 else 1
    sizes = {"S": s, "WARPS": WARPS, "BLOCKS": blocks, "RUNS": _runs(s), "ALIGNED": int(aligned)}
    names = "".join(f"#define {key} {value}\n" for key, value in sizes.items())
    return names + files("fmol.kernels").joinpath("gram.cu").read_text()


@or_fall_back(lambda *_: "Gramians are computed as products of matrices, without gram.cu")
def _kernel(s: int, aligned: bool, device: torch.device) -> CudaKernel | None:
    if torch.cuda.get_device_capability(device) not in QUICK:
        return None
    return compile_kernel(kernel_text(s, aligned), "gram", device)
