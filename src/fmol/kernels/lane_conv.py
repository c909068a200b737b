"""Convolutions of many lanes at once on a GPU, each lane with weights of its own.

A lane's convolution is a product of its weights `[F, C·k·k]` with the windows of its images. Which way
to compute it is the best hangs on channels, pixels and precision. Imported only where there is a CUDA
device and Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from fmol.kernels import lane_kernels as kernels
from fmol.kernels.few_conv import convolve, correlate
from fmol.kernels.strides import in_lanes

__all__ = ["lane_conv2d", "lane_conv2d_input", "lane_conv2d_weight"]

Pair = tuple[int, int]

FEW = 32
"""Up to so many channels the work is in reading windows, above in products."""
SMALL_IMAGE = 4
"""Up to so many pixels of a result weights are most of what is moved, and gradients are best written
out for the library also where products are rounded."""
TOGETHER = 32
"""Channels that a rounded product takes at a time where they lie last."""


def _tile(size: int, most: int) -> int:
    return int(max(16, min(most, triton.next_power_of_2(size))))


def _sizes(
    x: Tensor, w: Tensor, out: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Any:
    """What a kernel is specialised for: channels, images, kernel, and how it moves."""
    _, _, c, h, width = x.shape
    _, filters, _, kh, kw = w.shape
    return {
        "C": c, "H": h, "W": width, "F": filters, "OH": out[0], "OW": out[1], "KH": kh, "KW": kw,
        "SH": stride[0], "SW": stride[1], "PH": padding[0], "PW": padding[1],
        "DH": dilation[0], "DW": dilation[1],
    }  # fmt: skip


def _inside(sizes: Any) -> bool:
    """Whether all windows lie within their image."""
    for a in "HW":
        first = -sizes["P" + a]
        last = first + (sizes["O" + a] - 1) * sizes["S" + a] + (sizes["K" + a] - 1) * sizes["D" + a]
        if first < 0 or last >= sizes[a]:
            return False
    return True


def _full() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


def _precision() -> str:
    # Three products of rounded parts have nearly the accuracy of single precision, on units that
    # are many times as fast as those for it.
    return "tf32x3" if _full() else "tf32"


def _by_library(w: Tensor, *, tiny: bool = False) -> bool:
    """Whether windows are written out and multiplied by the library.

    With many channels in single precision nothing is faster: its products are as exact as they get
    and near the device's limit, and there windows are a small part of what is moved. Where products
    are rounded so it is for gradients alone that are `tiny`, of few pixels or with gaps between them.
    """
    return bool(w.shape[1] > FEW and w.dtype == torch.float32 and (_full() or tiny))


def _by_rows(w: Tensor, size: Sequence[int]) -> bool:
    """Whether windows are written out as rows: for rounded products where weights are most of what is
    moved, since tensor cores want both sides along what is summed over, as weights lie."""
    tiny = size[0] * size[1] <= SMALL_IMAGE
    return bool(tiny and w.shape[1] > FEW and w.dtype == torch.float32 and not _full())


def _product_tiles(filters: int, columns: int) -> dict[str, int]:
    """The shape of a block of products, as measured to be the best."""
    if filters <= FEW:
        t = {"BM": _tile(filters, FEW), "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
        if columns > 32:
            t |= {"BK": 16, "num_stages": 2} if _full() else {"BN": 256, "BK": 16}
        return t
    if filters < 128:
        return {"BM": 64, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 3}
    if columns < 2048:
        return {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3}


def _lies_better_last(x: Tensor, filters: int, size: Sequence[int]) -> bool:
    """Whether a rounded product, without gaps, is worth turning its images and weights first, channels
    last."""
    many = x.shape[2] % TOGETHER == 0 and filters > FEW and size[0] * size[1] > SMALL_IMAGE
    return bool(many and x.dtype == torch.float32 and not _full())


def _apart(x: Tensor) -> tuple[int, int]:
    """How many times how many numbers lanes of `x` lie apart: four, where they can be read at once.

    >>> _apart(torch.zeros(2, 12)[:, :8]), _apart(torch.zeros(2, 9)[:, :8])
    ((3, 4), (9, 1))
    """
    quad = 4 if x.stride(0) % 4 == 0 and x.data_ptr() % 16 == 0 else 1
    return x.stride(0) // quad, quad


def _last(x: Tensor, each: int, channels: int) -> Tensor:
    """Every lane of `x` as `each` matrices with `channels` rows, and these as columns."""
    x = in_lanes(x)
    count, pixels = len(x) * each, x[0].numel() // (each * channels)
    out = torch.empty(count, pixels, channels, dtype=x.dtype, device=x.device)
    bp, bc = _tile(pixels, 64), _tile(channels, 64)
    grid = (count, triton.cdiv(channels, bc), triton.cdiv(pixels, bp))
    kernels.turn_last[grid](x, out, channels, pixels, each, *_apart(x), BC=bc, BP=bp)
    return out


def _product_last(
    x: Tensor,
    w: Tensor,
    size: Sequence[int],
    padding: Pair,
    dilation: Pair,
    *,
    turned: bool,
) -> Tensor:
    """`_product` without gaps, by tensor cores; `turned`, that of weights `[L, C, F, k, k]`, the last
    tap first."""
    lanes, images, channels = x.shape[:3]
    filters = w.shape[2] if turned else w.shape[1]
    weights = _last(w, 1 if turned else filters, channels)
    pictures = _last(x, images, channels)
    out = torch.empty(lanes, images, filters, *size, dtype=x.dtype, device=x.device)
    like = w.transpose(1, 2) if turned else w
    sizes = _sizes(x, like, size, (1, 1), padding, dilation)
    del sizes["SH"], sizes["SW"]
    t = {"BM": 64, "BN": 128, "num_warps": 4} if filters < 128 else {"BM": 128, "BN": 128}
    t = {"BK": TOGETHER, "num_warps": 8, "num_stages": 3} | t
    grid = (
        triton.cdiv(images * size[0] * size[1], t["BN"]),
        triton.cdiv(filters, t["BM"]),
        lanes,
    )
    kernels.forward_last[grid](pictures, weights, out, images, **sizes, TURNED=turned, **t)
    return out


def _windows(x: Tensor, sizes: Any) -> Tensor:
    """The windows written out, `[L, C·k·k, B·pixels]`."""
    lanes, images = x.shape[:2]
    columns, n = sizes["C"] * sizes["KH"] * sizes["KW"], images * sizes["OH"] * sizes["OW"]
    windows = torch.empty(lanes, columns, n, dtype=x.dtype, device=x.device)
    kernels.unfold[(triton.cdiv(n, 1024), columns, lanes)](x, windows, images, **sizes, BN=1024)
    return windows


def lane_conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    **tiles: Any,
) -> Tensor:
    """`[L, B, F, h', w']` from images `[L, B, C, h, w]`, weights `[L, F, C, k, k]`, biases `[L, F]`."""
    out = [
        (x.shape[3 + i] + 2 * padding[i] - dilation[i] * (w.shape[3 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]
    if not tiles and stride == dilation == (1, 1):
        direct = convolve(x, w, b, _sizes(x, w, out, stride, padding, dilation))
        if direct is not None:
            return direct
    if not tiles and _by_library(w):
        lanes, images, filters = x.shape[0], x.shape[1], w.shape[1]
        windows = _windows(x.contiguous(), _sizes(x, w, out, stride, padding, dilation))
        found = torch.bmm(w.reshape(lanes, filters, -1), windows)
        if b is not None:
            found += b[:, :, None]
        return found.reshape(lanes, filters, images, *out).transpose(1, 2).contiguous()
    if not tiles and _by_rows(w, out):
        return _product_by_rows(x, w, b, out, stride, padding, dilation)
    if not tiles and stride == (1, 1) and _lies_better_last(x, w.shape[1], out):
        found = _product_last(x, w, out, padding, dilation, turned=False)
        return found if b is None else found.add_(b[:, None, :, None, None])
    return _product(x, w, b, out, stride, padding, dilation, tiles)


def _product_by_rows(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    size: Sequence[int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """A convolution with an output of `size` by the library, windows written out as rows."""
    lanes, images, filters = x.shape[0], x.shape[1], w.shape[1]
    sizes = _sizes(x, w, size, stride, padding, dilation)
    columns, n = w[0, 0].numel(), images * size[0] * size[1]
    windows = torch.empty(lanes, n, columns, dtype=x.dtype, device=x.device)
    kernels.unfold_rows[(n, triton.cdiv(columns, 1024), lanes)](
        x.contiguous(), windows, images, **sizes, BK=1024
    )
    found = torch.bmm(w.reshape(lanes, filters, columns), windows.mT)
    if b is not None:
        found += b[:, :, None]
    return found.reshape(lanes, filters, images, *size).transpose(1, 2).contiguous()


def _product(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    size: Sequence[int],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tiles: dict[str, Any],
) -> Tensor:
    """A convolution with an output of `size`; padding may be negative, and more behind than before."""
    x, w = x.contiguous(), in_lanes(w)
    lanes, images, filters = x.shape[0], x.shape[1], w.shape[1]
    out = torch.empty(lanes, images, filters, *size, dtype=x.dtype, device=x.device)
    sizes = _sizes(x, w, size, stride, padding, dilation)
    t = _product_tiles(filters, w[0, 0].numel()) | {"PRECISION": _precision()} | tiles
    grid = (
        triton.cdiv(images * size[0] * size[1], t["BN"]),
        triton.cdiv(filters, t["BM"]),
        lanes,
    )
    bias = w if b is None else in_lanes(b)
    apart, quad = _apart(w)
    kernels.forward[grid](
        x, w, bias, out, images, apart, bias.stride(0),
        **sizes, QUAD=quad, INSIDE=_inside(sizes), BIAS=b is not None, **t,
    )  # fmt: skip
    return out


def lane_conv2d_weight(
    x: Tensor,
    g: Tensor,
    w: Tensor,
    bias: bool,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    **tiles: Any,
) -> tuple[Tensor, Tensor]:
    """The gradients of the weights `[L, F, C, k, k]` and, with `bias`, of the biases `[L, F]`."""
    x, g = x.contiguous(), g.contiguous()
    lanes, images, filters = x.shape[0], x.shape[1], w.shape[1]
    columns, n = w[0, 0].numel(), images * g.shape[3] * g.shape[4]
    sizes = _sizes(x, w, g.shape[3:], stride, padding, dilation)
    if not tiles and stride == dilation == (1, 1):
        direct = correlate(x, g, sizes)
        if direct is not None:
            return direct[0], direct[1] if bias else w.new_empty(0, filters)
    biases = g.sum((1, 3, 4), dtype=torch.float32).to(w.dtype) if bias else w.new_empty(0, filters)
    if not tiles and _by_library(w, tiny=g.shape[3] * g.shape[4] <= SMALL_IMAGE):
        along = g.transpose(1, 2).reshape(lanes, filters, n)
        return torch.bmm(along, _windows(x, sizes).mT).reshape(w.shape), biases
    t: dict[str, Any] = {"BK": 32, "num_warps": 4, "num_stages": 3, "programs": 1056}
    if filters <= FEW:
        t |= {"BM": _tile(filters, FEW), "BN": 32, "num_warps": 2, "num_stages": 2}
    else:
        t |= {"BM": 64 if filters < 128 else 128, "BN": 64}
    t |= {"PRECISION": _precision()} | tiles
    blocks = triton.cdiv(filters, t["BM"]) * triton.cdiv(columns, t["BN"])
    splits = max(
        1, min(triton.cdiv(t.pop("programs"), lanes * blocks), triton.cdiv(n, 4 * t["BK"]))
    )
    per_split = triton.cdiv(triton.cdiv(n, splits), t["BK"]) * t["BK"]
    splits = triton.cdiv(n, per_split)
    dw = torch.empty(lanes, splits, filters, columns, dtype=torch.float32, device=x.device)
    kernels.weight[(splits, blocks, lanes)](
        x, g, dw, images, per_split, splits, **sizes, INSIDE=_inside(sizes), **t
    )
    whole = dw[:, 0] if splits == 1 else dw.sum(1)
    return whole.reshape(w.shape).to(w.dtype), biases


def lane_conv2d_input(
    g: Tensor, w: Tensor, x: Tensor, stride: Pair, padding: Pair, dilation: Pair, **tiles: Any
) -> Tensor:
    """The gradient of the images `[L, B, C, h, w]`; `x` is looked at for its shape alone."""
    if not tiles and stride == dilation == (1, 1):
        around = (w.shape[3] - 1 - padding[0], w.shape[4] - 1 - padding[1])
        back = _sizes(g, w.transpose(1, 2), x.shape[3:], stride, around, dilation)
        direct = convolve(g, w, None, back, turned=True)
        if direct is not None:
            return direct
    tiny = g.shape[3] * g.shape[4] <= SMALL_IMAGE or stride != (1, 1)
    by_library = not tiles and _by_library(w, tiny=tiny)
    if x.shape[2] <= FEW or (dilation != (1, 1) and stride != (1, 1)) or by_library:
        return _input_by_folding(g, w, x, stride, padding, dilation, tiles, by_library)
    if not tiles and stride == (1, 1) and _lies_better_last(g, x.shape[2], x.shape[3:]):
        behind = [dilation[i] * (w.shape[3 + i] - 1) - padding[i] for i in (0, 1)]
        return _product_last(g, w, x.shape[3:], (behind[0], behind[1]), dilation, turned=True)
    if stride == (1, 1):
        return _turned(g, w, x.shape[3:], (0, 0), (1, 1), padding, dilation, tiles)
    # A pixel meets those weights alone whose place has the same remainder as its own: one small
    # convolution for each.
    dx = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    for i, j in itertools.product(range(stride[0]), range(stride[1])):
        first = ((i - padding[0]) % stride[0], (j - padding[1]) % stride[1])
        met = i < w.shape[3] and j < w.shape[4]
        if met and first[0] < x.shape[3] and first[1] < x.shape[4]:
            dx[..., first[0] :: stride[0], first[1] :: stride[1]] = _turned(
                g, w, x.shape[3:], (i, j), stride, padding, (1, 1), tiles
            )
    return dx


def _input_by_folding(
    g: Tensor,
    w: Tensor,
    x: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tiles: dict[str, Any],
    by_library: bool,
) -> Tensor:
    """Columns first, then sums of them: for few channels, where each gathered number is used little."""
    lanes, images, _, rows, width = g.shape
    across = w.reshape(lanes, w.shape[1], -1).mT
    sizes = _sizes(x, w, (rows, width), stride, padding, dilation)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if by_library:
        along = g.transpose(1, 2).reshape(lanes, w.shape[1], -1)
        spread = torch.bmm(across, along)
    else:
        t = {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2} | tiles
        one = across[..., None, None]
        spread = _product(g, one, None, (rows, width), (1, 1), (0, 0), (1, 1), t)
    kernels.fold[(triton.cdiv(dx.numel(), 1024),)](
        spread, dx, dx.numel(), images, **sizes, BY_LANE=by_library, BN=1024
    )
    return dx


def _turned(
    g: Tensor,
    w: Tensor,
    size: Sequence[int],
    remainder: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    tiles: dict[str, Any],
) -> Tensor:
    """What `g` gives the pixels with `(h + padding) % stride == remainder`; `w` `[L, F, C, k, k]`."""
    lanes, filters, channels, *kernel = w.shape
    taps = [-(-(kernel[i] - remainder[i]) // stride[i]) for i in (0, 1)]
    turned = torch.empty(lanes, channels, filters, *taps, dtype=w.dtype, device=w.device)
    w = in_lanes(w)
    kernels.turn[(triton.cdiv(turned.numel(), 1024),)](
        w, turned, turned.numel(), w.stride(0), filters, channels, *kernel, *remainder, *stride,
        *taps, BN=1024,
    )  # fmt: skip
    out, around = [], []
    for i in (0, 1):
        first = -((remainder[i] - padding[i]) // stride[i])
        last = (size[i] - 1 + padding[i] - remainder[i]) // stride[i]
        out.append(last + 1 - first)
        around.append(dilation[i] * (taps[i] - 1) - first)
    return _product(g, turned, None, out, (1, 1), (around[0], around[1]), dilation, tiles)
