"""How convolutions of few channels in single precision (`direct_conv.cu`) share out their work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

__all__ = ["convolve_threads", "convolve_tiles", "correlate_threads", "correlate_tiles"]

SHARED = {"convolve": 24 * 1024, "correlate": 40 * 1024}
"""Bytes of shared memory that a block takes at most."""
MOST_RESULTS = 48
"""How many results a thread keeps in registers: with more, too few threads are in flight."""
THREADS = 128
"""Of a block, about: small ones divide evenly among the processors of a device."""
MOST_THREADS = 512
WRITE = 9.5
"""Cycles in which a multiprocessor's share of memory takes a number from every thread of a warp."""


def convolve_tiles(shape: Mapping[str, int]) -> dict[str, int] | None:
    """How a convolution is divided among threads and blocks; None where it does not fit."""
    C, F, OH, OW, KH, KW = (shape[name] for name in ("C", "F", "OH", "OW", "KH", "KW"))

    def cost(tile: tuple[int, int]) -> float:
        """Cycles of a result and a row of taps, by what takes longest."""
        filters, wide = tile
        done = -(-F // filters) * filters * -(-OW // wide) * wide / (F * OW)
        window = -(-(wide + KW - 1) // 4)
        reads = window + KW * (filters // 4 + filters % 4 // 2 + filters % 2)
        started = (filters * wide * KW + reads + 4) / 4
        brought = 4 * window + KW * filters
        # Threads that write more than four numbers beside each other leave gaps between them.
        written = filters * wide * WRITE * (1 if wide == 4 else 1.25) / (C * KH)
        return done * (max(started, brought) + written) / (filters * wide)

    def across_of(tile: tuple[int, int]) -> int:
        return -(-OW // tile[1]) * -(-F // tile[0])

    fit = [
        tile
        for tile in itertools.product(range(1, 17), (4, 8, 12, 16))
        if tile[0] * tile[1] <= MOST_RESULTS and across_of(tile) <= MOST_THREADS
    ]
    if not fit:
        return None
    filters, wide = min(fit, key=cost)
    across = across_of((filters, wide))
    rows = max(1, min(OH, THREADS // across))
    rows = -(-OH // -(-OH // rows))  # Strips of the same size.
    images = max(1, THREADS // (across * rows))
    for channels in sorted({-(-C // parts) for parts in range(1, C + 1)}, reverse=True):
        line = (-(-OW // wide) - 1) * wide + 4 * -(-(wide + KW - 1) // 4) + 4
        taps = KH * KW * -(-F // filters) * -(-filters // 4) * 4
        if 4 * channels * (images * (rows + KH - 1) * line + taps) <= SHARED["convolve"]:
            return {"FT": filters, "XT": wide, "YT": rows, "IMAGES": images, "CT": channels}
    return None


def correlate_tiles(shape: Mapping[str, int]) -> dict[str, int] | None:
    """How the gradient of the weights is divided; None where it does not fit."""
    C, F, OH, OW, KH, KW = (shape[name] for name in ("C", "F", "OH", "OW", "KH", "KW"))

    def cost(filters: int) -> float:
        """Cycles of a filter and four numbers, and a little for what it keeps from others."""
        done = -(-F // filters) * filters / F
        started, brought = (4 * filters * KW + filters + 3) / 4, 4 * (filters + 1)
        return done * (max(started, brought) / filters + 0.1 * filters)

    fit = [
        f for f in range(1, 17) if f * KW <= MOST_RESULTS and C * KH * -(-F // f) <= MOST_THREADS
    ]
    if not fit:
        return None
    filters = min(fit, key=cost)
    across = C * KH * -(-F // filters)
    for rows in sorted({-(-OH // parts) for parts in range(1, OH + 1)}, reverse=True):
        lines = C * (rows + KH) * (OW + KW + 10) + -(-F // filters) * filters * rows * (OW + 7)
        together = max(1, min(rows, 2 * THREADS // across))
        together = -(-rows // -(-rows // together))  # As many rows for each.
        sums = (across * KW + -(-F // filters)) * filters * together
        if 4 * max(lines, sums) <= SHARED["correlate"]:
            return {"FT": filters, "YT": rows, "R": together}
    return None


def convolve_threads(shape: Mapping[str, int], tiles: Mapping[str, int]) -> int:
    """Of a block."""
    across = -(-shape["OW"] // tiles["XT"]) * -(-shape["F"] // tiles["FT"])
    return tiles["IMAGES"] * across * tiles["YT"]


def correlate_threads(shape: Mapping[str, int], tiles: Mapping[str, int]) -> int:
    """Of a block."""
    return shape["C"] * shape["KH"] * tiles["R"] * -(-shape["F"] // tiles["FT"])
