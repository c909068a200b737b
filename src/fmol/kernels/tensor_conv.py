"""How convolutions of few channels on tensor cores (`tensor_conv.cu`) share out their work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

__all__ = ["convolve_threads", "convolve_tiles", "correlate_threads", "correlate_tiles"]

SHARED = 46 * 1024
"""Bytes of shared memory that a block takes at most."""
MOST_SUMS = 16
"""Blocks of 16 × 8 sums that a warp keeps in registers."""
MOST_WARPS = 8
"""Of a block: small ones divide evenly among the processors of a device."""
IN_FLIGHT = 16
"""Warps of a multiprocessor at work at a time from which on none waits for another's memory."""
PRODUCT = 2.0
"""Cycles of a multiprocessor for a product of 16 × 8 by 8 × 8 numbers."""
STAGE = 0.15
"""Cycles for bringing a number into shared memory, or out of it."""
MULTIPROCESSOR = 224 * 1024
"""Bytes of shared memory of a multiprocessor."""
REGISTERS = 64 * 1024
"""Of a multiprocessor."""

Shape = Mapping[str, int]


def convolve_tiles(shape: Shape) -> dict[str, int] | None:
    """How a convolution is divided among warps and blocks; None where it does not fit."""
    C, F, OH, OW, KH, KW = (shape[name] for name in ("C", "F", "OH", "OW", "KH", "KW"))
    rights = _eights(F)
    wide = 8 if rights == 1 else 24 if rights <= 3 else 40
    best: tuple[float, dict[str, int]] | None = None
    for rows, images, channels, lefts in itertools.product(
        _parts(OH), (1, 2, 4), _parts(C), _lefts(rights)
    ):
        tiles = {"YT": rows, "IMAGES": images, "CT": channels, "LEFTS": lefts}
        warps = _convolve_warps(shape, tiles)
        depth = 8 * _eights(channels * KH * KW)
        plane = (rows + KH - 1) * (OW + KW - 1)
        shared = 4 * (images * channels * plane + depth * wide + depth)
        if warps > MOST_WARPS or shared > SHARED:
            continue
        chunks = -(-C // channels)
        work = chunks * depth / 8 * warps * _cycles(lefts, rights)
        staged = chunks * (images * channels * plane + F * channels * KH * KW)
        written = images * rows * OW * F
        cost = work + STAGE * (staged + written)
        cost *= _waiting(warps, shared, lefts * rights) / (images * OH / -(-OH // rows))
        if best is None or cost < best[0]:
            best = cost, tiles
    return None if best is None else best[1]


def correlate_tiles(shape: Shape) -> dict[str, int] | None:
    """How the gradient of the weights is divided; None where it does not fit."""
    C, F, OH, OW, KH, KW = (shape[name] for name in ("C", "F", "OH", "OW", "KH", "KW"))
    rights, taps = _eights(F), C * KH * KW + 1
    best: tuple[float, dict[str, int]] | None = None
    for rows, splits, lefts in itertools.product(_parts(OH), (1, 2, 4, 8), _lefts(rights)):
        tiles = {"YT": rows, "R": splits, "LEFTS": lefts}
        warps = correlate_threads(shape, tiles) // 32
        depth, stride = 8 * _eights(rows * OW), OW + KW - 1
        staged = C * (rows + KH - 1) * stride + 8 * rights * depth
        lines = C * (rows + KH - 1) * stride + rows * stride + 8 * rights * (depth + 4)
        shared = 4 * (max(lines, splits * F * taps) + depth)
        if warps > MOST_WARPS or shared > SHARED:
            continue
        work = warps * -(-depth // (8 * splits)) * _cycles(lefts, rights)
        cost = (work + STAGE * staged) * -(-OH // rows) * _waiting(warps, shared, lefts * rights)
        if best is None or cost < best[0]:
            best = cost, tiles
    return None if best is None else best[1]


def convolve_threads(shape: Shape, tiles: Mapping[str, int]) -> int:
    """Of a block."""
    return 32 * _convolve_warps(shape, tiles)


def correlate_threads(shape: Shape, tiles: Mapping[str, int]) -> int:
    """Of a block."""
    taps = shape["C"] * shape["KH"] * shape["KW"] + 1
    return 32 * tiles["R"] * -(-taps // (16 * tiles["LEFTS"]))


def _convolve_warps(shape: Shape, tiles: Mapping[str, int]) -> int:
    pixels = -(-(tiles["YT"] * shape["OW"]) // 16) * tiles["IMAGES"]
    return -(-pixels // tiles["LEFTS"])


def _cycles(lefts: int, rights: int) -> float:
    """Of a warp's eight columns: numbers that are read, or products."""
    return max(2 + 2 * rights + 4 * lefts, PRODUCT * lefts * rights)


def _waiting(warps: int, shared: int, sums: int) -> float:
    """How many times as long it takes where few warps fit beside one another."""
    registers = 60 + 6 * sums  # Of a thread, about, as the compiler says.
    blocks = min(MULTIPROCESSOR // (shared + 1024), REGISTERS // (32 * warps * registers))
    return max(1.0, IN_FLIGHT / (max(blocks, 1) * warps))


def _eights(count: int) -> int:
    return -(-count // 8)


def _parts(whole: int) -> Sequence[int]:
    """What it can be divided into evenly, but for the last; from all of it down to one."""
    return sorted({-(-whole // parts) for parts in range(1, whole + 1)}, reverse=True)


def _lefts(rights: int) -> range:
    return range(1, min(6, MOST_SUMS // rights) + 1)
