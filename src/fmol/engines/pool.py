"""Clients' samples in one place on the device, so that batches of many clients are one gather."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmol.data import Samples, TensorSamples, tree_leaves, tree_map

__all__ = ["Pool", "make_pool"]


class Pool:
    """The samples of several clients, one after the other: nests of tensors `[N, …]`."""

    def __init__(self, clients: Sequence[str], parts: Sequence[TensorSamples]) -> None:
        self.sizes = {client: len(part) for client, part in zip(clients, parts, strict=True)}
        self.offsets: dict[str, int] = {}
        total = 0
        for client, size in self.sizes.items():
            self.offsets[client] = total
            total += size
        if len(parts) == 1:
            self.inputs, self.targets = parts[0].inputs, parts[0].targets
        else:
            self.inputs = _concatenate([part.inputs for part in parts])
            self.targets = _concatenate([part.targets for part in parts])
        self.device = tree_leaves(self.inputs)[0].device
        self.total = total
        self.stays = False
        """Whether the next round finds the same tensors, in the same places."""

    @property
    def kind(self) -> Any:
        """What two pools must share so that what is recorded with one is right for the other."""
        leaves = tree_leaves((self.inputs, self.targets))
        where = tuple(leaf.data_ptr() for leaf in leaves) if self.stays else ()
        return tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves), where

    def to(self, device: torch.device) -> Pool:
        """The same samples on `device`; the pool itself where they are there already."""
        if device == self.device:
            return self
        moved = copy.copy(self)
        moved.inputs = tree_map(lambda leaf: leaf.to(device), self.inputs)
        moved.targets = tree_map(lambda leaf: leaf.to(device), self.targets)
        moved.device, moved.stays = device, False
        return moved

    def span(self, start: int, stop: int) -> tuple[Any, Any]:
        """Samples `start` to `stop − 1` of all."""
        inputs: Any = tree_map(lambda leaf: leaf[start:stop], self.inputs)
        targets: Any = tree_map(lambda leaf: leaf[start:stop], self.targets)
        return inputs, targets

    def gather(self, rows: Tensor) -> tuple[Any, Any]:
        """The samples at `rows` `[…]`, in that shape: nests of `[…, …]`."""
        flat, shape = rows.reshape(-1), rows.shape

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, flat).reshape(*shape, *leaf.shape[1:])

        return tree_map(pick, self.inputs), tree_map(pick, self.targets)


def make_pool(clients: Sequence[str], parts: Sequence[Samples]) -> Pool | None:
    """A pool of the clients' samples; None where they are not tensors of one kind."""
    if not all(isinstance(part, TensorSamples) for part in parts):
        return None
    tensors = [part for part in parts if isinstance(part, TensorSamples)]
    kinds = {_kind((part.inputs, part.targets)) for part in tensors}
    return Pool(clients, tensors) if len(kinds) == 1 else None


def _kind(tree: Any) -> str:
    """What two nests must share so that they can be put together."""
    described = tree_map(lambda leaf: torch.empty(0, *leaf.shape[1:], dtype=leaf.dtype), tree)
    return repr(_shapes(described))


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.dtype)
    if isinstance(tree, dict):
        return {name: _shapes(value) for name, value in tree.items()}
    return [_shapes(value) for value in tree] if isinstance(tree, tuple | list) else type(tree)


def _concatenate(trees: Sequence[Any]) -> Any:
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(list(trees))
    if isinstance(first, dict):
        return {name: _concatenate([tree[name] for tree in trees]) for name in first}
    joined = [_concatenate(list(column)) for column in zip(*trees, strict=True)]
    return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
