"""What layers become where many lanes are side by side, whatever the module calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fmol.engines.convolutions import LaneConv2d
from fmol.engines.poolings import LaneMaxPool2d
from fmol.kernels import cpu_conv
from fmol.kernels.cpu import Library

__all__ = ["LaneLayers"]


class LaneLayers(TorchFunctionMode):
    """Within it layers are computed in ways that `vmap` takes for many lanes at once, and fast.

    Batched by `vmap` alone, convolutions become one with a group per lane, which is slow everywhere;
    others are taken lane by lane, or with wrong gradients. On a CPU kernels of our own may be better
    still; `say` is told when they are compiled.
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
                return LaneConv2d.apply(*call, own)  # type: ignore[no-untyped-call]
        if func in (functional.max_pool2d, torch.max_pool2d):
            pooling = _max_pool2d_call(*args, **(kwargs or {}))
            if pooling is not None:
                own = self._planes and self._pools_planes(*pooling)
                return LaneMaxPool2d.apply(*pooling, own)  # type: ignore[no-untyped-call]
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
