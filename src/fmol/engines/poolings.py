"""Poolings of all lanes' images, which on a CPU are the slower half of a small network unless channels
come last, or kernels of our own compute them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmol.engines.convolutions import channels_last, lanes_first
from fmol.kernels import cpu_conv

__all__ = ["LaneMaxPool2d"]


class LaneMaxPool2d(torch.autograd.Function):
    """`max_pool2d` of all lanes' images as one batch."""

    @staticmethod
    def forward(input: Tensor, *how: Any) -> Tensor:
        *usual, own = how
        if own and input.is_contiguous():
            out: Tensor = _pool(input)[0]
            return out
        return torch.max_pool2d(input, *usual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.how = inputs[1:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        _, indices = torch.ops.aten.max_pool2d_with_indices(input, *ctx.how)
        found = torch.ops.aten.max_pool2d_with_indices_backward(grad, input, *ctx.how, indices)
        return found, None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], input: Tensor, *how: Any
    ) -> tuple[Tensor, int]:
        x = lanes_first(input, in_dims[0], info.batch_size)
        *usual, own = how
        if own and x.is_contiguous():
            return _PlaneMaxPool2d.apply(x), 0  # type: ignore[no-untyped-call]
        out = _LastMaxPool2d.apply(x.reshape(-1, *x.shape[2:]), *usual)  # type: ignore[no-untyped-call]
        return out.reshape(info.batch_size, -1, *out.shape[1:]), 0


class _LastMaxPool2d(torch.autograd.Function):
    """`max_pool2d` with channels last in memory, which is five times as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        last = channels_last(x)
        out, indices = torch.ops.aten.max_pool2d_with_indices(last, *how)
        ctx.save_for_backward(last, indices)
        ctx.how = how
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        last, indices = ctx.saved_tensors
        dx = torch.ops.aten.max_pool2d_with_indices_backward(
            channels_last(grad), last, *ctx.how, indices
        )
        return dx, None, None, None, None, None


class _PlaneMaxPool2d(torch.autograd.Function):
    """The largest of every 2 × 2 pixels, of images that lie plane by plane, by a kernel of our own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, places = _pool(x)
        ctx.save_for_backward(places)
        ctx.size = x.shape[-2:]
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        found: Tensor = _unpool(grad, places, *ctx.size)
        return found


@torch.library.custom_op("fmol::lane_pool2d", mutates_args=())
def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    return cpu_conv.pool_planes(x)


@_pool.register_fake
def _(x):  # type: ignore[no-untyped-def]
    out = x.new_empty(*x.shape[:-2], x.shape[-2] // 2, x.shape[-1] // 2)
    return out, torch.empty_like(out, dtype=torch.uint8)


@torch.library.custom_op("fmol::lane_unpool2d", mutates_args=())
def _unpool(g: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    return cpu_conv.unpool_planes(g, places, height, width)


@_unpool.register_fake
def _(g, places, height, width):  # type: ignore[no-untyped-def]
    return g.new_empty(*g.shape[:-2], height, width)
