"""How the numbers of many lanes lie in memory, and how many of them a kernel may read at once."""

from __future__ import annotations

from torch import Tensor

__all__ = ["aligned", "at_once", "in_lanes"]


def in_lanes(tensor: Tensor) -> Tensor:
    """The same with all numbers of a lane in a row, lanes as far apart as they are where that is so:
    parameters are parts of rows that hold all of a lane's."""
    if tensor[0].is_contiguous():
        return tensor
    return tensor.contiguous()


def aligned(tensor: Tensor) -> Tensor:
    """As kernels read it: four numbers at a time, where they begin at a multiple of as many bytes."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def at_once(rows: Tensor) -> int:
    """How many numbers of `rows` `[L, …]` in single precision can be read at once, wherever a lane's
    begin: four, two or one.

    >>> import torch
    >>> at_once(torch.zeros(2, 12)[:, :8]), at_once(torch.zeros(2, 10)), at_once(torch.zeros(2, 9))
    (4, 2, 1)
    """
    for count in (4, 2):
        if rows.data_ptr() % (4 * count) == 0 and rows.stride(0) % count == 0:
            return count
    return 1
