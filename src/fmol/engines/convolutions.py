"""Convolutions in which every lane has weights of its own, whatever the module that makes them.

And poolings, which on a CPU are the slower half of a small network unless channels come last, or
kernels of our own compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fmol.kernels import cpu_conv
from fmol.kernels.cpu import Library

__all__ = ["LaneConvolutions"]


class LaneConvolutions(TorchFunctionMode):
    """Convolutions with weights of each lane's own, as products of matrices.

    Batched by `vmap` alone they become one convolution with a group per lane, which is slow
    everywhere. On a CPU kernels of our own may be better still; `say` is told when they are compiled.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self._say = say
        self._planes = False
        """Whether images lie plane by plane, as kernels of our own leave them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.conv2d:
            call = _conv2d_call(*args, **(kwargs or {}))
            if call is not None:
                own = self._has_kernels(*call)
                self._planes = self._planes or own
                return _LaneConv2d.apply(*call, own)  # type: ignore[no-untyped-call]
        if func in (functional.max_pool2d, torch.max_pool2d):
            pooling = _max_pool2d_call(*args, **(kwargs or {}))
            if pooling is not None:
                own = self._planes and self._pools_planes(*pooling)
                return _LaneMaxPool2d.apply(*pooling, own)  # type: ignore[no-untyped-call]
        if func is functional.embedding:
            return _embedding(*args, **(kwargs or {}))
        if func is functional.adaptive_avg_pool2d and _is_of_all(*args, **(kwargs or {})):
            # Where channels come last torch makes it of strides, which `vmap` takes lane by lane.
            return args[0].mean((-2, -1), keepdim=True)
        if func is functional.group_norm:
            # Batched, it asks how its input lies in memory, which nobody answers for channels last.
            args = (args[0].contiguous(), *args[1:])
        if func is torch.Tensor.view and not isinstance(args[-1], torch.dtype):
            # What is not contiguous here is so where each lane is by itself.
            return torch.Tensor.reshape(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _has_kernels(self, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> bool:
        """Whether a convolution is one for kernels of our own on a CPU."""
        return cpu_conv.fits(x, weight, bias, *how) and self._load(cpu_conv.conv_library(weight))

    def _pools_planes(self, x: Tensor, *how: Any) -> bool:
        """Whether a pooling is one for kernels of our own on a CPU."""
        if not cpu_conv.pools(*how) or min(x.shape[-2:]) < 2 or x.dtype not in cpu_conv.REALS:
            return False
        return self._load(cpu_conv.pool_library(x))

    def _load(self, library: Library) -> bool:
        if not cpu_conv.is_at_hand(library):
            self._say("compiling")
        return cpu_conv.has_library(library)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`functional.embedding`, whose gradient knows of padding where it is batched as well."""
    if max_norm is not None or scale_grad_by_freq:
        raise NotImplementedError("an embedding with `max_norm` or `scale_grad_by_freq`")
    found = functional.embedding(input, weight, sparse=sparse)
    if padding_idx is None:
        return found
    pads = input == padding_idx % weight.shape[0]
    return torch.where(pads[..., None], found.detach(), found)


def _conv2d_call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """The arguments of a convolution that can be written as one product per lane, else None."""
    if isinstance(padding, str):
        padding = _padding_called(padding, weight.shape[2:], _pair(dilation))
    if groups != 1 or padding is None or input.dim() != 4:
        return None
    kind = input.device.type
    if torch.is_autocast_enabled(kind):  # Which would have narrowed them, had it been asked.
        dtype = torch.get_autocast_dtype(kind)
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return input, weight, bias, _pair(stride), _pair(padding), _pair(dilation)


def _padding_called(
    name: str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...] | None:
    """What "valid" or "same" is in numbers; None where it is not the same on both sides.

    >>> _padding_called("same", (3, 5), (1, 2)), _padding_called("same", (2, 3), (1, 1))
    ((1, 4), None)
    """
    wide = [0 if name == "valid" else d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return None if any(each % 2 for each in wide) else tuple(each // 2 for each in wide)


def _is_of_all(input: Tensor, output_size: Any) -> bool:
    """Whether an adaptive pooling leaves one pixel of each channel."""
    return output_size == 1 or tuple(_pair(output_size)) == (1, 1)


def _max_pool2d_call(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Any, ...] | None:
    """The arguments of a pooling on a CPU, else None."""
    if input.dim() != 4 or return_indices or input.is_cuda:
        return None
    kernel = _pair(kernel_size)
    step = kernel if stride is None or stride == [] else _pair(stride)
    return input, kernel, step, _pair(padding), _pair(dilation), ceil_mode


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _LaneConv2d(torch.autograd.Function):
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
        x = _lead(input, in_dims[0], lanes)
        flat = x.reshape(-1, *x.shape[2:])
        if in_dims[1] is None and (bias is None or in_dims[2] is None):
            out = torch.conv2d(flat, weight, bias, stride, padding, dilation)
            return out.reshape(lanes, -1, *out.shape[1:]), 0
        w = _lead(weight, in_dims[1], lanes)
        b = None if bias is None else _lead(bias, in_dims[2], lanes)
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


class _LaneMaxPool2d(torch.autograd.Function):
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
        x = _lead(input, in_dims[0], info.batch_size)
        *usual, own = how
        if own and x.is_contiguous():
            return _PlaneMaxPool2d.apply(x), 0  # type: ignore[no-untyped-call]
        out = _LastMaxPool2d.apply(x.reshape(-1, *x.shape[2:]), *usual)  # type: ignore[no-untyped-call]
        return out.reshape(info.batch_size, -1, *out.shape[1:]), 0


class _LastMaxPool2d(torch.autograd.Function):
    """`max_pool2d` with channels last in memory, which is five times as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        last = _last(x)
        out, indices = torch.ops.aten.max_pool2d_with_indices(last, *how)
        ctx.save_for_backward(last, indices)
        ctx.how = how
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        last, indices = ctx.saved_tensors
        dx = torch.ops.aten.max_pool2d_with_indices_backward(_last(grad), last, *ctx.how, indices)
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
        x = _last(x)
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
        each = zip(_last(grad).unbind(), x.unbind(), weight.unbind(), strict=True)
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


def _last(x: Tensor) -> Tensor:
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


def _lead(value: Tensor, dim: int | None, lanes: int) -> Tensor:
    """The tensor with its lanes first."""
    return value.expand(lanes, *value.shape) if dim is None else value.movedim(dim, 0)
