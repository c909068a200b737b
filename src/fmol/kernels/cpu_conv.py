"""Convolutions of lanes with few channels on a CPU, and poolings after them, by C++ kernels.

With ten or twenty channels the library's convolutions leave parts of every vector empty; those in
`cpu_conv.cpp` lay vectors along pixels. With channels that fill vectors, or small kernels, the
library's are faster. `benchmarks/cpu_convolutions.py` measures where.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from fmol.kernels.cpu import Library, find_compiler, is_kept, load_library
from fmol.kernels.fallbacks import or_fall_back

__all__ = [
    "conv_library",
    "fits",
    "has_library",
    "is_at_hand",
    "lane_conv2d",
    "lane_conv2d_input",
    "lane_conv2d_weight",
    "missing_libraries",
    "pool_library",
    "pool_planes",
    "pools",
    "unpool_planes",
]

MOST_CHANNELS = 20
"""With more, the library's convolutions are faster."""
BLOCK, FULL = 16, 0.65
"""And so they are where channels fill more than this share of the library's blocks of channels, unless
there is one channel of images and one block of results."""
FIRST = 3
"""So few channels of images the library does not lay out in blocks."""
KERNELS = range(4, 8)
"""With smaller kernels, and with larger ones, the library is faster."""
FEWEST_PIXELS = 16
"""Of a result; fewer leave parts of our own vectors empty."""
REALS = {torch.float32: "float", torch.float64: "double"}
TWO = (2, (2, 2))

Pair = Sequence[int]


class Sizes(ctypes.Structure):
    """`Sizes` of `cpu_conv.cpp`."""

    _fields_ = tuple(
        (name, ctypes.c_long)
        for name in (
            "lanes", "images", "channels", "height", "width", "filters",
            "top", "left", "out_height", "out_width",
        )
    )  # fmt: skip


def fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> bool:
    """Whether images `[…, C, H, W]` and weights `[…, F, C, k, k]` are for these kernels.

    >>> usual = None, (1, 1), (0, 0), (1, 1)
    >>> fits(torch.zeros(16, 10, 16, 16), torch.zeros(20, 10, 5, 5), *usual)
    True
    >>> fits(torch.zeros(16, 64, 8, 8), torch.zeros(64, 64, 3, 3), *usual)
    False
    """
    filters, channels, height, width = weight.shape[-4:]
    sizes = [
        size + 2 * around - height + 1 for size, around in zip(x.shape[-2:], padding, strict=True)
    ]
    # What does not fit together is told by the library, in the words that everybody knows.
    sound = (
        x.shape[-3] == channels
        and x.dtype == weight.dtype
        and (bias is None or (bias.dtype == weight.dtype and bias.shape[-1:] == (filters,)))
        and min(padding) >= 0
        and min(sizes) > 0
    )
    return bool(
        sound
        and weight.device.type == "cpu"
        and weight.dtype in REALS
        and height == width
        and height in KERNELS
        and max(filters, channels) <= MOST_CHANNELS
        and (_fill(filters) <= FULL or (filters <= BLOCK and channels == 1))
        and (channels <= FIRST or _fill(channels) <= FULL)
        and sizes[0] * sizes[1] >= FEWEST_PIXELS
        and max(padding) < height
        and all(each == 1 for each in chain(stride, dilation))
    )


def _fill(channels: int) -> float:
    """Which share of the library's blocks these channels are."""
    return channels / (-(-channels // BLOCK) * BLOCK)


def conv_library(weight: Tensor) -> Library:
    """What such a convolution needs to be compiled."""
    return "cpu_conv.cpp", (("REAL", REALS[weight.dtype]), ("K", weight.shape[-1]))


def pool_library(x: Tensor) -> Library:
    """What poolings of such images need."""
    return "cpu_pool.cpp", (("REAL", REALS[x.dtype]),)


def missing_libraries(model: nn.Module) -> set[Library]:
    """What would have to be compiled for a model's steps on a CPU, as its layers say."""
    wanted = {
        conv_library(layer.weight)
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d) and _fits_layer(layer)
    }
    if wanted and any(map(_halves, model.modules())):
        wanted |= {("cpu_pool.cpp", meanings[:1]) for _, meanings in wanted}
    return {library for library in wanted if not is_at_hand(library)}


def _fits_layer(layer: nn.Conv2d) -> bool:
    # Weights that are not trained are the same for all lanes: one convolution of the library's.
    if isinstance(layer.padding, str) or layer.groups != 1 or not layer.weight.requires_grad:
        return False
    large = layer.weight.new_empty(()).expand(layer.in_channels, 2**20, 2**20)
    return fits(large, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation)


def _halves(layer: nn.Module) -> bool:
    """Whether it is a pooling of every 2 × 2 pixels."""
    return isinstance(layer, nn.MaxPool2d) and pools(
        layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode
    )


def pools(kernel: object, stride: object, padding: object, dilation: object, ceil: bool) -> bool:
    """Whether a pooling with these settings is one of every 2 × 2 pixels, without more."""
    usual = kernel in TWO and stride in TWO and padding in (0, (0, 0)) and dilation in (1, (1, 1))
    return usual and not ceil


def is_at_hand(library: Library) -> bool:
    """Whether asking for it takes no time: it is compiled, or it is known that it cannot be."""
    return _load.knows(library) or find_compiler() is None or is_kept(library)


def has_library(library: Library) -> bool:
    """Whether it can be had; compiles it where it is not at hand."""
    return _load(library) is not None


@or_fall_back(lambda library: f"convolutions are computed by the library, without {library[0]}")
def _load(library: Library) -> ctypes.CDLL:
    return load_library(library)


def _kernels(library: Library) -> ctypes.CDLL:
    kernels = _load(library)
    assert kernels is not None  # It was asked for before.
    return kernels


def lane_conv2d(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """`[L, B, F, OH, OW]` from images `[L, B, C, H, W]` and weights `[L, F, C, k, k]`."""
    (top, left), (height, width), kernel = padding, x.shape[3:], w.shape[-1]
    out = x.new_empty(
        *x.shape[:2], w.shape[1], height + 2 * top - kernel + 1, width + 2 * left - kernel + 1
    )
    _convolve(x, w, b, out, padding, turned=False)
    return out


def lane_conv2d_input(
    g: Tensor, w: Tensor, x: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """The gradient of the images, from that of the results `[L, B, F, OH, OW]`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    around = [w.shape[-1] - 1 - each for each in padding]
    _convolve(g, w, None, out, around, turned=True)
    return out


def lane_conv2d_weight(
    x: Tensor, g: Tensor, w: Tensor, bias: bool, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[Tensor, Tensor]:
    """The gradients of weights `[L, F, C, k, k]` and biases `[L, F]`, none of these without `bias`."""
    x, g = x.contiguous(), g.contiguous()
    weights, biases = w.new_empty(w.shape), w.new_empty(w.shape[:2])
    sizes = _sizes(x, g, padding)
    _kernels(conv_library(w)).fmol_correlate(
        *map(_address, (x, g, weights, biases)), ctypes.byref(sizes), torch.get_num_threads()
    )
    return weights, biases if bias else biases[:0]


def pool_planes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every 2 × 2 pixels of `[…, H, W]`, and which of the four it is."""
    x = x.contiguous()
    *some, height, width = x.shape
    out = x.new_empty(*some, height // 2, width // 2)
    places = torch.empty(out.shape, dtype=torch.uint8)
    planes = x.numel() // max(height * width, 1)
    _kernels(pool_library(x)).fmol_pool(
        *map(_address, (x, out, places)), *map(ctypes.c_long, (planes, height, width)),
        torch.get_num_threads(),
    )  # fmt: skip
    return out, places


def unpool_planes(g: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the images `[…, height, width]` of such a pooling."""
    g = g.contiguous()
    out = g.new_empty(*g.shape[:-2], height, width)
    planes = out.numel() // max(height * width, 1)
    _kernels(pool_library(g)).fmol_unpool(
        *map(_address, (g, places, out)), *map(ctypes.c_long, (planes, height, width)),
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def _convolve(
    x: Tensor, w: Tensor, b: Tensor | None, out: Tensor, padding: Pair, *, turned: bool
) -> None:
    x, w = x.contiguous(), _in_lanes(w)
    b = None if b is None else _in_lanes(b)
    sizes = _sizes(x, out, padding)
    _kernels(conv_library(w)).fmol_convolve(
        *map(_address, (x, w, b, out)), ctypes.byref(sizes), ctypes.c_long(w.stride(0)),
        ctypes.c_long(0 if b is None else b.stride(0)), int(turned), torch.get_num_threads(),
    )  # fmt: skip


def _sizes(x: Tensor, out: Tensor, padding: Pair) -> Sizes:
    return Sizes(*x.shape, out.shape[2], *padding, *out.shape[3:])


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _in_lanes(tensor: Tensor) -> Tensor:
    """The same with all numbers of a lane in a row: parameters are parts of rows of all of a lane's."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()
