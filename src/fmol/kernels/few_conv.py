"""Convolutions of lanes with few channels on a GPU, by CUDA kernels compiled for the shape at hand.

With ten or twenty channels a product of matrices spends its time on gathering windows. These kernels
keep pixels and weights in shared memory and use each many times: in single precision as it is
(`direct_conv.py`), and where products are rounded to TF32 on tensor cores (`tensor_conv.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

from fmol.kernels import direct_conv, tensor_conv
from fmol.kernels.fallbacks import or_fall_back
from fmol.kernels.nvrtc import CudaKernel, compile_kernel
from fmol.kernels.strides import aligned, at_once, in_lanes

__all__ = ["DIRECT", "TENSOR", "Shape", "Way", "adding_text", "convolve", "correlate"]

MOST_CHANNELS = 32
"""With more, products of matrices are faster."""
FEWEST_TAPS = 16
"""With smaller kernels a number is used too seldom, and products are faster again."""
SPLIT_BLOCKS = 600
"""How many blocks a sum over all images is divided into, at least, where there are as many images."""
FEWEST_ON_TENSOR_CORES = 64
"""Taps of all channels together: LeNet's first convolution, with 25, was slower on tensor cores."""
ADDING = 256
"""Threads of a block that sums up parts."""
AMPERE = 8
"""The first major version of devices whose tensor cores know TF32."""

Shape = Mapping[str, int]
"""Sizes by name: C, H, W of the images, F, OH, OW of the results, KH, KW, PH, PW."""
Tiles = Mapping[str, int]


@dataclass(frozen=True)
class Way:
    """How these convolutions are computed: a text with two kernels, and how they share out their work.

    What divides it, by name, stands before the text with the sizes; None where a shape does not fit.
    """

    file: str
    convolve_tiles: Callable[[Shape], Tiles | None]
    convolve_threads: Callable[[Shape, Tiles], int]
    correlate_tiles: Callable[[Shape], Tiles | None]
    correlate_threads: Callable[[Shape, Tiles], int]

    def text(self, name: str, sizes: Mapping[str, int]) -> str:
        """The text of the kernel `name` for these sizes."""
        given = {**sizes, "CONVOLVE": 1} if name == "convolve" else sizes
        names = "".join(f"#define {key} {int(value)}\n" for key, value in given.items())
        return names + files("fmol.kernels").joinpath(self.file).read_text()


DIRECT, TENSOR = (
    Way(
        file,
        module.convolve_tiles,
        module.convolve_threads,
        module.correlate_tiles,
        module.correlate_threads,
    )
    for file, module in (("direct_conv.cu", direct_conv), ("tensor_conv.cu", tensor_conv))
)


def convolve(
    x: Tensor, w: Tensor, b: Tensor | None, shape: Shape, *, turned: bool = False
) -> Tensor | None:
    """`[L, B, F, OH, OW]` from images `[L, B, C, H, W]`; None where this is not the way to do it."""
    for way in _ways(x, shape):
        tiles = _tiles(way.convolve_tiles, tuple(shape.items()))
        if tiles is None:
            continue
        w = in_lanes(w)
        # Named only where it is looked at: every other value is another kernel to compile.
        beside = {"BESIDE": at_once(w)} if way is TENSOR and not turned else {}
        sizes = _frozen(shape, tiles, BIAS=b is not None, TURNED=turned, **beside)
        kernel = _kernel(way, "convolve", sizes, x.device)
        if kernel is None:
            continue
        lanes, images = x.shape[:2]
        out = x.new_empty(lanes, images, shape["F"], shape["OH"], shape["OW"])
        blocks = -(-images // tiles["IMAGES"]) * -(-shape["OH"] // tiles["YT"])
        bias = w if b is None else in_lanes(b)
        threads = way.convolve_threads(shape, tiles)
        apart = w.stride(0), bias.stride(0)
        kernel((blocks, lanes), threads, [aligned(x), w, bias, out, images, *apart])
        return out
    return None


def correlate(x: Tensor, g: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
    """The gradients of weights `[L, F, C, KH, KW]` and biases `[L, F]`; None as above."""
    for way in _ways(x, shape):
        tiles = _tiles(way.correlate_tiles, tuple(shape.items()))
        if tiles is None:
            continue
        kernel = _kernel(way, "correlate", _frozen(shape, tiles), x.device)
        if kernel is None:
            continue
        lanes, images = x.shape[:2]
        per_split = _images_each(images, lanes)
        splits = -(-images // per_split)
        taps = shape["C"] * shape["KH"] * shape["KW"]
        parts = x.new_empty(lanes, splits, shape["F"], taps + 1)
        threads = way.correlate_threads(shape, tiles)
        kernel((splits, lanes), threads, [aligned(x), aligned(g), parts, images, per_split, splits])
        sizes = lanes, shape["F"], shape["C"], shape["KH"], shape["KW"]
        add_parts = _adding(x.device)
        if add_parts is None:
            whole = parts.sum(1)
            # Of their own and in a row, as what is compiled expects them.
            return whole[..., :taps].reshape(sizes).contiguous(), whole[..., taps].clone()
        weights, biases = x.new_empty(sizes), x.new_empty(sizes[:2])
        blocks = -(-shape["F"] * (taps + 1) // ADDING)
        add_parts((blocks, lanes), ADDING, [parts, weights, biases, splits, shape["F"], taps])
        return weights, biases
    return None


def _ways(x: Tensor, shape: Shape) -> tuple[Way, ...]:
    """How these may be computed, the best first."""
    few = max(shape["C"], shape["F"]) <= MOST_CHANNELS
    if x.dtype != torch.float32 or not few or shape["KH"] * shape["KW"] < FEWEST_TAPS:
        return ()
    deep = shape["C"] * shape["KH"] * shape["KW"] >= FEWEST_ON_TENSOR_CORES
    rounded = torch.get_float32_matmul_precision() != "highest"
    return (TENSOR, DIRECT) if deep and rounded and _has_tensor_cores(x.device) else (DIRECT,)


def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def _images_each(images: int, lanes: int) -> int:
    """Over how many images a block sums: as many as leave enough blocks, and best the same for all.

    >>> _images_each(16, 200), _images_each(64, 20), _images_each(7, 1000), _images_each(61, 200)
    (4, 2, 7, 16)
    """
    most = max(1, min(images, lanes * images // SPLIT_BLOCKS))
    even = next(n for n in range(most, 0, -1) if images % n == 0)
    return even if 2 * even > most else -(-images // -(-images // most))


@cache
def _tiles(
    divide: Callable[[Shape], Tiles | None], shape: tuple[tuple[str, int], ...]
) -> Tiles | None:
    return divide(dict(shape))


def _frozen(shape: Shape, tiles: Tiles, **more: int) -> tuple[tuple[str, int], ...]:
    return tuple({**shape, **tiles, **more}.items())


@or_fall_back(lambda *_: "parts of gradients are summed up without parts.cu")
def _adding(device: torch.device) -> CudaKernel:
    """What sums up the parts of gradients."""
    return compile_kernel(adding_text(), "add_parts", device)


def adding_text() -> str:
    """Its text."""
    text = files("fmol.kernels").joinpath("parts.cu").read_text()
    return f"#define THREADS {ADDING}\n{text}"


@or_fall_back(lambda way, *_: f"convolutions are computed without {way.file}")
def _kernel(
    way: Way, name: str, sizes: tuple[tuple[str, int], ...], device: torch.device
) -> CudaKernel:
    return compile_kernel(way.text(name, dict(sizes)), name, device)
