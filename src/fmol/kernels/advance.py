"""A step of many lanes on a GPU, in one pass over their numbers."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from fmol.kernels.fallbacks import or_fall_back
from fmol.kernels.nvrtc import CudaKernel, compile_kernel

__all__ = ["advance", "kernel_text"]

THREADS = 256
"""Of a block; each has four numbers."""


def advance(x: Tensor, delta: Tensor, direction: Tensor, lr: Tensor) -> bool:
    """Adds `direction` `[L, d]` to `delta` and takes `lr` times it from `x`, both in place.

    False, and nothing done, where the kernel is not for such tensors. `lr` is one number, or `[L, 1]`.
    """
    lanes, d = x.shape
    for each in (x, delta, direction):
        if each.dtype != torch.float32 or not each.is_contiguous() or each.data_ptr() % 16:
            return False
    if lr.dtype != torch.float32 or not lr.is_contiguous() or lr.numel() not in (1, lanes) or d < 4:
        return False
    kernel = _kernel(d, x.device)
    if kernel is None:
        return False
    blocks = -(-lanes * d // (4 * THREADS))
    kernel((blocks, 1), THREADS, [x, delta, direction, lr, int(lr.numel() > 1), lanes])
    return True


def kernel_text(d: int) -> str:
    """The text of the kernel for lanes of `d` numbers."""
    text = files("fmol.kernels").joinpath("advance.cu").read_text()
    return f"#define THREADS {THREADS}\n#define D {d}\n{text}"


@or_fall_back(lambda *_: "steps are taken in two passes, without advance.cu")
def _kernel(d: int, device: torch.device) -> CudaKernel:
    return compile_kernel(kernel_text(d), "advance_lanes", device)
