"""How finely local steps are computed: in full, or rounded where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fmol.data import tree_map

__all__ = [
    "Precision",
    "check_precision",
    "full_precision",
    "in_dtype",
    "products",
    "rounding",
    "step_dtype",
]

Precision = Literal["fp32", "tf32", "bf16"]
"""Of products in local steps: in full, with 10 bits after the point, or with 7.

Everything else, means, Gramian, weights, losses that are reported, is computed in full in any case.
"""


def check_precision(precision: str, device: torch.device) -> None:
    """Raises for a precision that is none, or that the device does not have."""
    if precision not in ("fp32", "tf32", "bf16"):
        raise ValueError(f"`precision` must be 'fp32', 'tf32' or 'bf16', got {precision!r}.")
    if precision == "tf32" and device.type != "cuda":
        raise ValueError(
            f"`precision` is 'tf32', which only CUDA devices have, and `device` is {device}. "
            "Use 'fp32'."
        )


def step_dtype(precision: Precision) -> torch.dtype | None:
    """What products of a local step are taken in; None is the parameters' own dtype."""
    return torch.bfloat16 if precision == "bf16" else None


@contextmanager
def products(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within it, float32 products on a CUDA device are rounded with `tf32`, and not otherwise.

    Torch itself rounds them in convolutions unless it is told not to.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it nothing is rounded to TF32, whatever is allowed elsewhere."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounding(dtype: torch.dtype | None) -> float:
    """How far apart, relatively, the same steps may come out where products are as they are now.

    `dtype` is what products are taken in, as from `step_dtype`; TF32 is read off torch's state.
    """
    if dtype is not None:
        return 0.2
    return 1e-3 if torch.get_float32_matmul_precision() == "highest" else 0.05


@contextmanager
def in_dtype(dtype: torch.dtype | None, device: torch.device) -> Iterator[Callable[[Any], Any]]:
    """Within it products are taken in `dtype`; yields what widens their results again."""
    if dtype is None:
        yield lambda tree: tree
        return

    def widen(leaf: Tensor) -> Tensor:
        return leaf.float() if leaf.dtype == dtype else leaf

    with torch.autocast(device.type, dtype):
        yield lambda tree: tree_map(widen, tree)
