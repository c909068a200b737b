"""Convolutions of lanes with few channels: CUDA kernels that use each pixel many times.

With ten or twenty channels a product of matrices spends its time on gathering windows. These kernels
(`direct_conv.cu`) keep pixels and weights in shared memory and are compiled for the shape at hand.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fmol.kernels.nvrtc import CudaKernel, compile_kernel

__all__ = ["Shape", "convolve", "convolve_tiles", "correlate", "correlate_tiles", "kernel_text"]

logger = logging.getLogger("fmol")

MOST_CHANNELS = 32
"""With more, products of matrices are faster."""
FEWEST_TAPS = 16
"""With smaller kernels a number is used too seldom, and products are faster again."""
SHARED = {"convolve": 24 * 1024, "correlate": 40 * 1024}
"""Bytes of shared memory that a block takes at most."""
MOST_RESULTS = 48
"""How many results a thread keeps in registers: with more, too few threads are in flight."""
THREADS = 128
"""Of a block, about: small ones divide evenly among the processors of a device."""
MOST_THREADS = 512
SPLIT_BLOCKS = 600
"""How many blocks a sum over all images is divided into, at least, where there are as many images."""
REGISTERS = {"convolve": 128, "correlate": 96}
"""How many a thread may take: fewer let more threads be in flight, until some have to be put away."""
AHEAD = {"convolve": 4, "correlate": 2}
"""How often a thread asks for numbers from memory before it waits for the first."""
WRITE = 9.5
"""Cycles in which a multiprocessor's share of memory takes a number from every thread of a warp."""

Shape = Mapping[str, int]
"""Sizes by name: C, H, W of the images, F, OH, OW of the results, KH, KW, PH, PW."""


def convolve(
    x: Tensor, w: Tensor, b: Tensor | None, shape: Shape, *, turned: bool = False
) -> Tensor | None:
    """`[L, B, F, OH, OW]` from images `[L, B, C, H, W]`; None where this is not the way to do it."""
    tiles = convolve_tiles(shape) if _few(x, shape) else None
    if tiles is None:
        return None
    kernel = _kernel("convolve", _frozen(shape, tiles, BIAS=b is not None, TURNED=turned), x.device)
    if kernel is None:
        return None
    lanes, images = x.shape[:2]
    out = torch.empty(lanes, images, shape["F"], shape["OH"], shape["OW"], device=x.device)
    blocks = -(-images // tiles["IMAGES"]) * -(-shape["OH"] // tiles["YT"])
    bias = w if b is None else b.contiguous()
    threads = tiles["IMAGES"] * _threads_per_image(shape, tiles)
    kernel((blocks, lanes), threads, [_aligned(x), w.contiguous(), bias, out, images])
    return out


def correlate(x: Tensor, g: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
    """The gradients of weights `[L, F, C, KH, KW]` and biases `[L, F]`; None as above."""
    tiles = correlate_tiles(shape) if _few(x, shape) else None
    if tiles is None:
        return None
    kernel = _kernel("correlate", _frozen(shape, tiles), x.device)
    if kernel is None:
        return None
    lanes, images = x.shape[:2]
    per_split = _images_each(images, lanes)
    splits = -(-images // per_split)
    taps = shape["C"] * shape["KH"] * shape["KW"]
    parts = torch.empty(lanes, splits, shape["F"], taps + 1, device=x.device)
    threads = shape["C"] * shape["KH"] * tiles["R"] * -(-shape["F"] // tiles["FT"])
    kernel((splits, lanes), threads, [_aligned(x), _aligned(g), parts, images, per_split, splits])
    sizes = lanes, shape["F"], shape["C"], shape["KH"], shape["KW"]
    return parts[..., :taps].sum(1).reshape(sizes), parts[..., taps].sum(1)


# ---- what a kernel is compiled for -----------------------------------------------------------


def convolve_tiles(shape: Shape) -> dict[str, int] | None:
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


def correlate_tiles(shape: Shape) -> dict[str, int] | None:
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


def kernel_text(name: str, sizes: Mapping[str, int]) -> str:
    """The text of a kernel for these sizes."""
    given = {"CONVOLVE": 1} if name == "convolve" else {}
    given |= {"REGISTERS": REGISTERS[name], "AHEAD": AHEAD[name]}
    names = "".join(f"#define {key} {int(value)}\n" for key, value in {**sizes, **given}.items())
    return names + files("fmol.kernels").joinpath("direct_conv.cu").read_text()


def _threads_per_image(shape: Shape, tiles: Mapping[str, int]) -> int:
    across = -(-shape["OW"] // tiles["XT"]) * -(-shape["F"] // tiles["FT"])
    return across * tiles["YT"]


def _images_each(images: int, lanes: int) -> int:
    """Over how many images a block sums: as many as leave enough blocks, and best the same for all.

    >>> _images_each(16, 200), _images_each(64, 20), _images_each(7, 1000), _images_each(61, 200)
    (4, 2, 7, 16)
    """
    most = max(1, min(images, lanes * images // SPLIT_BLOCKS))
    even = next(n for n in range(most, 0, -1) if images % n == 0)
    return even if 2 * even > most else -(-images // -(-images // most))


def _aligned(tensor: Tensor) -> Tensor:
    """As kernels read it: four numbers at a time, where they begin at a multiple of as many bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _few(x: Tensor, shape: Shape) -> bool:
    few = max(shape["C"], shape["F"]) <= MOST_CHANNELS
    return x.dtype == torch.float32 and few and shape["KH"] * shape["KW"] >= FEWEST_TAPS


def _frozen(shape: Shape, tiles: Mapping[str, int], **more: int) -> tuple[tuple[str, int], ...]:
    return tuple({**shape, **tiles, **more}.items())


@cache
def _kernel(
    name: str, sizes: tuple[tuple[str, int], ...], device: torch.device
) -> CudaKernel | None:
    try:
        return compile_kernel(kernel_text(name, dict(sizes)), name, device)
    except (OSError, RuntimeError) as error:
        logger.warning("convolutions are computed as products of matrices: %s", error)
        return None
