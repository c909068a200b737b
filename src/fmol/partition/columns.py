"""Columns and index arrays: what all partitions are made of."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = [
    "DRAWS",
    "Indices",
    "Labels",
    "apportion",
    "ascending",
    "check_clients",
    "check_number_of_clients",
    "indices_by_owner",
    "label_codes",
    "named_parts",
    "plain_values",
]

Indices: TypeAlias = npt.NDArray[np.int64]
"""The positions of one client's samples in the data set, `[n_i]`, ascending."""

Labels: TypeAlias = Tensor | npt.NDArray[Any] | Sequence[Any]
"""One label (a number or a string) per sample, `[n]`."""

DRAWS = 10
"""How often a random partition is drawn anew before the best, or a repaired one, is taken."""


def apportion(sizes: Sequence[int], total: int, most: int) -> list[int]:
    """`total` parts shared out so that the largest `size / parts` is as small as it can be.

    Everyone gets at least one part and at most `min(size, most)`; fewer than `total` are given only
    if that bound is met everywhere.
    """
    parts = [1] * len(sizes)
    queue = [(-float(size), i) for i, size in enumerate(sizes)]
    heapq.heapify(queue)
    left = total - len(sizes)
    while left > 0 and queue:
        _, i = heapq.heappop(queue)
        if parts[i] < min(sizes[i], most):
            parts[i] += 1
            left -= 1
            heapq.heappush(queue, (-sizes[i] / parts[i], i))
    return parts


def indices_by_owner(owner: Indices, clients: int) -> list[Indices]:
    """For each client the ascending indices `i` with `owner[i]` that client."""
    order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
    cuts = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    return np.split(order, cuts)


def ascending(indices: npt.NDArray[np.integer[Any]]) -> Indices:
    return np.sort(indices.astype(np.int64, copy=False))


def plain_values(column: Labels, name: str) -> list[Any]:
    """A column of any kind as a list of plain Python values."""
    if isinstance(column, Tensor | np.ndarray):
        if column.ndim != 1:
            raise ValueError(
                f"`{name}` must have one entry per sample, got shape {tuple(column.shape)}. "
                f"Choose one column, as in `{name}[:, 0]`."
            )
        return list(column.tolist())
    return [v.item() if isinstance(v, np.generic | Tensor) else v for v in column]


def label_codes(labels: Labels) -> tuple[npt.NDArray[Any], Indices]:
    """The distinct labels in ascending order `[L]`, and each sample's position among them `[n]`."""
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or array.dtype == object:
        raise ValueError(
            "`labels` must hold one number or string per sample, got an array of shape "
            f"{array.shape} and type {array.dtype}. Choose one column, as in `labels[:, 0]`."
        )
    names, codes = np.unique(array, return_inverse=True)
    return names, codes.astype(np.int64, copy=False)


def named_parts(
    parts: Sequence[Indices] | Mapping[Any, Indices],
) -> tuple[tuple[str, ...], list[Indices]]:
    if isinstance(parts, Mapping):
        names = tuple(str(name) for name in parts)
        parts = list(parts.values())
    else:
        width = len(str(len(parts) - 1))
        names = tuple(f"{i:0{width}d}" for i in range(len(parts)))
    return names, [np.asarray(part, dtype=np.int64) for part in parts]


def check_number_of_clients(clients: int) -> None:
    if clients < 1:
        raise ValueError(f"`clients` must be at least 1, got {clients}. Ask for one or more.")


def check_clients(clients: int, n: int, min_samples: int = 1) -> None:
    check_number_of_clients(clients)
    if clients * min_samples > n:
        raise ValueError(
            f"{n} samples are too few for {clients} `clients` with at least {min_samples} each. "
            f"Use fewer clients or more data."
        )
