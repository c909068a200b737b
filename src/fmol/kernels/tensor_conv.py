"""How convolutions of few channels on tensor cores (`tensor_conv.cu`) share out their work.

Beside what divides it they say how many BLOCKS there should be room for on a multiprocessor, and how
numbers lie in shared memory: STRIDE from one row to the next, PLANE from one channel to the next, and
LINE from one filter to the next. Threads read four pixels at a time, eight threads at once: two runs or
lines of four channels or rows, in different banks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

__all__ = ["convolve_threads", "convolve_tiles", "correlate_threads", "correlate_tiles"]

SHARED = 48 * 1024
"""Bytes of shared memory that a block takes at most."""
MOST_SUMS = 20
"""Blocks of 16 × 8 sums that a warp keeps in registers."""
MOST_WARPS = 12
"""Of a block: small ones divide evenly among the processors of a device."""
IN_FLIGHT = 16
"""Warps of a multiprocessor at work at a time from which on none waits for another's memory."""
PRODUCT = 2.0
"""Cycles of a multiprocessor for a product of 16 × 8 by 8 × 8 numbers."""
STAGE = 0.1
"""Cycles for bringing a number into shared memory, or out of it."""
WAIT = 1000.0
"""Cycles until numbers that are asked for are there; other blocks are at work the while."""
MULTIPROCESSOR = 224 * 1024
"""Bytes of shared memory of a multiprocessor."""
REGISTERS = 64 * 1024
"""Of a multiprocessor."""
SPARE = 40
"""Registers of a thread beside those for sums and for what it multiplies."""

NAMES = ("C", "H", "W", "F", "OH", "OW", "KH", "KW")
Shape = Mapping[str, int]


def convolve_tiles(shape: Shape) -> dict[str, int] | None:
    """How a convolution is divided among warps and blocks; None where it does not fit."""
    C, H, W, F, OH, OW, KH, KW = (shape[name] for name in NAMES)
    rights, runs, window = _up(F, 8) // 8, -(-OW // 4), 4 + _up(KW - 1, 4)
    stride = 4 * runs + window - 4
    if runs % 2 and stride % 8 == 0:  # The last run of a row is beside the first of the next.
        stride += 4
    best: tuple[float, dict[str, int]] | None = None
    for rows, images, channels, each in itertools.product(
        _parts(OH), (1, 2, 4), _channels(C), range(1, MOST_SUMS // (2 * rights) + 1)
    ):
        tiles = {"YT": rows, "IMAGES": images, "CT": channels, "EACH": each, "STRIDE": stride}
        tiles["PLANE"] = plane = _next((rows + KH - 1) * stride, 8, 16)
        tiles["LINE"] = line = _next(channels * (KH * KW // 2 * 2 + 1) + KW, 4, 8)
        warps = convolve_threads(shape, tiles) // 32
        shared = 4 * (images * channels * plane + F * line) + 8 * _up(channels * KH, 8)
        if warps > MOST_WARPS or shared > SHARED:
            continue
        eights = C // channels * _up(channels * KH, 8) // 8 + _up(C % channels * KH, 8) // 8
        reads = 2 + 2 * each * window + 2 * rights * KW
        work = warps * eights * max(reads, PRODUCT * 2 * each * rights * KW)
        pixels = C * min(H, rows + KH - 1) * W + F * rows * OW
        work += STAGE * (images * pixels + F * C * KH * KW)
        waits = -(-C // channels)
        registers = SPARE + 8 * each * rights + 2 * each * window + 2 * rights
        tiles["BLOCKS"] = blocks = max(1, REGISTERS // (32 * warps * registers))
        cost = _cost(work, waits, warps, shared, blocks) * -(-OH // rows) / images
        if best is None or cost < best[0]:
            best = cost, tiles
    return None if best is None else best[1]


def correlate_tiles(shape: Shape) -> dict[str, int] | None:
    """How the gradient of the weights is divided; None where it does not fit."""
    C, H, W, F, OH, OW, KH, KW = (shape[name] for name in NAMES)
    rights, runs = _up(F, 8) // 8, -(-OW // 4)
    best: tuple[float, dict[str, int]] | None = None
    for rows, splits, taps in itertools.product(_parts(OH), (1, 2, 4, 8), (KW, *range(4, KW, 4))):
        window = 4 + _up(taps - 1, 4)
        stride = _next(4 * (runs - 1) + _up(KW, taps) - taps + window, 4, 8)
        tiles = {"YT": rows, "R": splits, "KT": taps, "STRIDE": stride}
        # Four rows of a line, and four of the next, which is one row below or in another channel.
        plane = (rows + KH - 1) * stride
        tiles["PLANE"] = plane = plane + (4 - rows) * stride % 32
        tiles["LINE"] = line = _next(_up(rows, 4) * 4 * (runs // 2 * 2 + 1), 16, 32)
        warps = correlate_threads(shape, tiles) // 32
        lines = C * plane + _up(rows, 4) * stride + F * line
        shared = 4 * max(lines, F * (C * KH * KW + 1))
        if warps > MOST_WARPS or shared > SHARED or taps * rights > MOST_SUMS:
            continue
        steps = splits * -(-_up(rows, 4) // 4 * runs // splits)
        reads = 2 * window + 4 * rights
        work = warps // splits * steps * max(reads, PRODUCT * 2 * taps * rights)
        work += STAGE * (C * min(H, rows + KH - 1) * W + F * rows * OW)
        registers = SPARE + 4 * taps * rights + 2 * window + 4 * rights
        tiles["BLOCKS"] = blocks = max(1, REGISTERS // (32 * warps * registers))
        cost = _cost(work, 1, warps, shared, blocks) * -(-OH // rows)
        if best is None or cost < best[0]:
            best = cost, tiles
    return None if best is None else best[1]


def convolve_threads(shape: Shape, tiles: Mapping[str, int]) -> int:
    """Of a block."""
    runs = tiles["IMAGES"] * tiles["YT"] * -(-shape["OW"] // 4)
    return 32 * -(-runs // (8 * tiles["EACH"]))


def correlate_threads(shape: Shape, tiles: Mapping[str, int]) -> int:
    """Of a block."""
    lines = -(-(shape["C"] * shape["KH"] + 1) // 16)
    return 32 * tiles["R"] * lines * -(-shape["KW"] // tiles["KT"])


def _cost(work: float, waits: int, warps: int, shared: int, blocks: int) -> float:
    """Cycles of a block, with as many others beside it as fit."""
    blocks = min(blocks, MULTIPROCESSOR // (shared + 1024))
    return (work + waits * WAIT / blocks) * max(1.0, IN_FLIGHT / (blocks * warps))


def _up(count: int, step: int) -> int:
    """
    >>> _up(0, 8), _up(8, 8), _up(9, 8)
    (0, 8, 16)
    """
    return -(-count // step) * step


def _next(least: int, rest: int, step: int) -> int:
    """The next number that leaves this rest.

    >>> _next(20, 4, 8), _next(21, 4, 8), _next(0, 4, 8)
    (20, 28, 4)
    """
    return least + (rest - least) % step


def _parts(whole: int) -> Sequence[int]:
    """What it can be divided into evenly, but for the last; from all of it down to one."""
    return sorted({-(-whole // parts) for parts in range(1, whole + 1)}, reverse=True)


def _channels(whole: int) -> Sequence[int]:
    """As above, and multiples of eight: their lines need no filling up."""
    return sorted({*_parts(whole), *range(8, whole, 8)}, reverse=True)
