"""Convolutions in which every lane has weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fmol.kernels import cpu_conv

__all__ = ["LaneConv2d", "channels_last", "lanes_first"]


class LaneConv2d(torch.autograd.Function):
    """`conv2d` that knows what to do when `vmap` gives every lane its own weights."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        own: bool,
    ) -> Tensor:
        if own:  # Of a single lane: an evaluation.
            b = None if bias is None else bias[None]
            how = (list(stride), list(padding), list(dilation))
            out: Tensor = _conv2d(input[None], weight[None], b, *how)
            return out[0]
        return torch.conv2d(input, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.has_bias, ctx.how = inputs[2] is not None, inputs[3:6]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.how
        shape = [weight.shape[0]] if ctx.has_bias else None
        mask = [*ctx.needs_input_grad[:2], ctx.has_bias]
        grads = torch.ops.aten.convolution_backward(
            grad, input, weight, shape, stride, padding, dilation, False, [0, 0], 1, mask
        )
        return (*grads, None, None, None, None)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        own: bool,
    ) -> tuple[Tensor, int]:
        lanes = info.batch_size
        x = lanes_first(input, in_dims[0], lanes)
        flat = x.reshape(-1, *x.shape[2:])
        if in_dims[1] is None and (bias is None or in_dims[2] is None):
            out = torch.conv2d(flat, weight, bias, stride, padding, dilation)
            return out.reshape(lanes, -1, *out.shape[1:]), 0
        w = lanes_first(weight, in_dims[1], lanes)
        b = None if bias is None else lanes_first(bias, in_dims[2], lanes)
        if not x.is_cuda and not own:
            return _LoopConv2d.apply(x, w, b, stride, padding, dilation), 0  # type: ignore[no-untyped-call]
        if own or (_triton_kernels() is not None and x.dtype in KERNEL_DTYPES):
            return _KernelConv2d.apply(x, w, b, stride, padding, dilation), 0  # type: ignore[no-untyped-call]
        kernel = (w.shape[-2], w.shape[-1])
        size = _out_size(x, w, stride, padding, dilation)
        if dilation == (1, 1):
            if padding != (0, 0):
                x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
            # Windows as a view, and one copy of it: `functional.unfold` starts a kernel per image.
            windows = x.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
            columns = windows.permute(0, 1, 3, 4, 2, 5, 6)
        else:
            columns = functional.unfold(flat, kernel, dilation, padding, stride).mT
        # A product per image, with its lane's weights: [O, C·k·k] by [C·k·k, P]. Their gradients are
        # then short sums as well, where one product per lane would add up all images in one go.
        images = x.shape[1]
        columns = columns.reshape(lanes * images, size[0] * size[1], -1).mT
        w = w.reshape(lanes, 1, w.shape[1], -1).expand(-1, images, -1, -1)
        out = torch.bmm(w.reshape(lanes * images, *w.shape[2:]), columns)
        out = out.reshape(lanes, images, -1, *size)
        return out if b is None else out + b[:, None, :, None, None], 0


KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _triton_kernels() -> Any:
    """The module with Triton kernels; None where there is no Triton."""
    return import_module("fmol.kernels.lane_conv") if find_spec("triton") else None


def _kernels(x: Tensor) -> Any:
    """The module that computes convolutions of lanes where these images are."""
    return _triton_kernels() if x.is_cuda else cpu_conv


@torch.library.custom_op("fmol::lane_conv2d", mutates_args=())
def _conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    out: Tensor = _kernels(x).lane_conv2d(x, w, b, tuple(stride), tuple(padding), tuple(dilation))
    return out


@_conv2d.register_fake
def _(x, w, b, stride, padding, dilation):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:2], w.shape[1], *_out_size(x, w, stride, padding, dilation))


@torch.library.custom_op("fmol::lane_conv2d_weight", mutates_args=())
def _conv2d_weight(
    x: Tensor,
    g: Tensor,
    w: Tensor,
    bias: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _kernels(x).lane_conv2d_weight(
        x, g, w, bias, tuple(stride), tuple(padding), tuple(dilation)
    )
    return found


@_conv2d_weight.register_fake
def _(x, g, w, bias, stride, padding, dilation):  # type: ignore[no-untyped-def]
    return w.new_empty(w.shape), w.new_empty(w.shape[:2] if bias else (0, w.shape[1]))


@torch.library.custom_op("fmol::lane_conv2d_input", mutates_args=())
def _conv2d_input(
    g: Tensor,
    w: Tensor,
    x: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    out: Tensor = _kernels(x).lane_conv2d_input(
        g, w, x, tuple(stride), tuple(padding), tuple(dilation)
    )
    return out


@_conv2d_input.register_fake
def _(g, w, x, stride, padding, dilation):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


class _KernelConv2d(torch.autograd.Function):
    """All lanes' convolutions in one kernel of our own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.how = bias is not None, (list(stride), list(padding), list(dilation))
        out: Tensor = _conv2d(x, weight, bias, *ctx.how)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = _conv2d_input(grad, weight, x, *ctx.how) if ctx.needs_input_grad[0] else None
        dw, db = _conv2d_weight(x, grad, weight, ctx.has_bias, *ctx.how)
        return dx, dw, db if ctx.has_bias else None, None, None, None


class _LoopConv2d(torch.autograd.Function):
    """One convolution after the other, each with its lane's weights `[L, O, C, k, k]`.

    On a CPU, where no kernel of ours fits, that is faster than any way to do them at once: the
    library's convolution of one lane keeps to the cache, and unfolded images do not. Channels lie
    last in memory: gradients and poolings are much faster so.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> Tensor:
        x = channels_last(x)
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.how = bias is not None, (stride, padding, dilation)
        biases = [None] * len(x) if bias is None else bias.unbind()
        each = zip(x.unbind(), weight.unbind(), biases, strict=True)
        return _stack_last([torch.conv2d(*one, stride, padding, dilation) for one in each])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape = [weight.shape[1]] if ctx.has_bias else None
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias]
        each = zip(channels_last(grad).unbind(), x.unbind(), weight.unbind(), strict=True)
        parts = [
            torch.ops.aten.convolution_backward(*one, shape, *ctx.how, False, [0, 0], 1, mask)
            for one in each
        ]
        dx, dw, db = zip(*parts, strict=True)
        return (
            _stack_last(list(dx)) if mask[0] else None,
            torch.stack(list(dw)) if mask[1] else None,
            torch.stack(list(db)) if mask[2] else None,
            None,
            None,
            None,
        )


def channels_last(x: Tensor) -> Tensor:
    """The same images `[…, C, h, w]`, in memory with channels last; a view where they are so."""
    last = x.movedim(-3, -1).contiguous().movedim(-1, -3)
    if x.shape[-3] > 1:
        return last
    # Of a single channel both orders are the same: it is taken for the one that its strides say.
    return last.as_strided(last.shape, (*last.stride()[:-3], 1, *last.stride()[-2:]))


def _stack_last(parts: Sequence[Tensor]) -> Tensor:
    """Lanes' images `[B, C, h, w]` as `[L, B, C, h, w]`, in memory with channels last."""
    return torch.stack([part.movedim(1, -1) for part in parts]).movedim(-1, 2)


def _out_size(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    return [
        (x.shape[3 + i] + 2 * padding[i] - dilation[i] * (w.shape[3 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    ]


def lanes_first(value: Tensor, dim: int | None, lanes: int) -> Tensor:
    """The tensor with its lanes first."""
    return value.expand(lanes, *value.shape) if dim is None else value.movedim(dim, 0)
