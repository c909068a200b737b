"""Private data in one shape: `Samples`, from tensors or from any map-style dataset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

__all__ = ["Samples", "as_samples", "is_lazy", "tree_leaves", "tree_map", "upload"]


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nest of dicts, tuples and lists with `function` applied to each tensor in it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: tree_map(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map(function, value) for value in tree)
    return tree


def tree_leaves(tree: Any) -> list[Tensor]:
    """The tensors of a nest of dicts, tuples and lists, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, Mapping) else tree
    if isinstance(tree, Mapping | tuple | list):
        return [leaf for part in parts for leaf in tree_leaves(part)]
    return []


class Samples(Protocol):
    """`len` samples that can be had in batches, as `(inputs, targets)` on one device."""

    @property
    def nbytes(self) -> int:
        """Memory these samples occupy, as far as it is known."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor | None) -> tuple[Any, Any]:
        """The samples at `indices` in that order; all of them in stored order for None."""

    def span(self, start: int, stop: int) -> tuple[Any, Any]:
        """The samples `start` to `stop − 1` in stored order."""

    def to(self, device: torch.device) -> Samples:
        """The same samples, handed out on `device`."""

    def versions(self) -> list[int]:
        """How often each tensor that is kept was written to."""


class TensorSamples:
    """Samples that are tensors (or nests of tensors) with one leading dimension."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = inputs, targets
        self.leaves = tree_leaves((inputs, targets))

    @property
    def nbytes(self) -> int:
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves)

    def __len__(self) -> int:
        return self.leaves[0].shape[0]

    def batch(self, indices: Tensor | None) -> tuple[Any, Any]:
        if indices is None:
            return self.inputs, self.targets
        indices = indices.to(self.leaves[0].device)
        return (
            tree_map(lambda leaf: leaf.index_select(0, indices), self.inputs),
            tree_map(lambda leaf: leaf.index_select(0, indices), self.targets),
        )

    def span(self, start: int, stop: int) -> tuple[Any, Any]:
        return (
            tree_map(lambda leaf: leaf[start:stop], self.inputs),
            tree_map(lambda leaf: leaf[start:stop], self.targets),
        )

    def versions(self) -> list[int]:
        # Tensors made in inference mode do not count their writes.
        return [0 if leaf.is_inference() else leaf._version for leaf in self.leaves]

    def to(self, device: torch.device) -> TensorSamples:
        if all(leaf.device == device for leaf in self.leaves):
            return self
        return TensorSamples(
            tree_map(lambda leaf: leaf.to(device), self.inputs),
            tree_map(lambda leaf: leaf.to(device), self.targets),
        )


class DatasetSamples:
    """Samples of a map-style dataset, fetched and collated batch by batch.

    Nothing is kept: a dataset may augment at random, or read files far larger than memory.
    """

    nbytes = 0

    def __init__(self, dataset: Any, owner: str, device: torch.device | None = None) -> None:
        self.dataset, self.owner, self.device = dataset, owner, device

    def __len__(self) -> int:
        return len(self.dataset)

    def _fetch(self, indices: list[int]) -> tuple[Any, Any]:
        many = getattr(self.dataset, "__getitems__", None)
        items = many(indices) if many is not None else [self.dataset[i] for i in indices]
        batch = default_collate(items)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                f"the items of {self.owner} must be pairs (input, target), got a "
                f"{type(items[0]).__name__} of another shape. Return (input, target) from "
                "`__getitem__`; either may be a dict or a tuple."
            )
        inputs, targets = batch
        device = self.device
        if device is not None:
            inputs, targets = tree_map(lambda leaf: leaf.to(device), (inputs, targets))
        return inputs, targets

    def batch(self, indices: Tensor | None) -> tuple[Any, Any]:
        return self._fetch(list(range(len(self))) if indices is None else indices.tolist())

    def span(self, start: int, stop: int) -> tuple[Any, Any]:
        return self._fetch(list(range(start, stop)))

    def versions(self) -> list[int]:
        return []

    def to(self, device: torch.device) -> DatasetSamples:
        return DatasetSamples(self.dataset, self.owner, device)


def is_lazy(data: Any) -> bool:
    """Whether `data` is a callable that brings the data when it is needed."""
    # A class has `__getitem__` as its objects do, and is called to make one.
    return callable(data) and (isinstance(data, type) or not hasattr(data, "__getitem__"))


def as_samples(data: Any, owner: str) -> Samples:
    """`data` as `Samples`; `owner` is who is named when it cannot be.

    `data` is a pair (inputs, targets) of tensors, arrays, or dicts and tuples of those with one
    leading dimension; a map-style dataset of pairs; or a callable that returns one of these.
    """
    if is_lazy(data):
        data = data()
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    samples: Samples
    if _is_pair(data):
        inputs, targets = (_tensors(part, owner) for part in data)
        leaves = tree_leaves((inputs, targets))
        if not leaves or not tree_leaves(inputs):
            raise ValueError(f"{owner} has no tensors. Give a pair (inputs, targets) of tensors.")
        if any(leaf.dim() == 0 for leaf in leaves):
            raise ValueError(
                f"{owner} holds a tensor without dimensions. "
                "The first dimension of every tensor must count the samples."
            )
        sizes = sorted({leaf.shape[0] for leaf in leaves})
        if len(sizes) > 1:
            raise ValueError(
                f"{owner} holds tensors whose first dimensions differ: {sizes}. "
                "Every tensor must have one row per sample."
            )
        samples = TensorSamples(inputs, targets)
    elif (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, str | Tensor | np.ndarray | Mapping)
        and not (isinstance(data, tuple) and all(isinstance(p, Tensor | np.ndarray) for p in data))
    ):
        samples = DatasetSamples(data, owner)
    else:
        raise ValueError(
            f"{owner} is a {type(data).__name__}. Give a pair (inputs, targets) of tensors, "
            "a map-style dataset, or a callable that returns one of these."
        )
    if len(samples) == 0:
        raise ValueError(f"{owner} has no samples. Give it at least one, or leave the client out.")
    return samples


def _is_pair(data: Any) -> bool:
    # A list of two tensors is a pair; a list of two (input, target) tuples is a small dataset.
    if isinstance(data, tuple):
        return len(data) == 2
    leaf = (Tensor, np.ndarray, Mapping)
    return isinstance(data, list) and len(data) == 2 and all(isinstance(p, leaf) for p in data)


def _tensors(tree: Any, owner: str) -> Any:
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, np.ndarray):
        try:
            with warnings.catch_warnings():
                # Samples are only read, so that a memory map may be read-only.
                warnings.filterwarnings("ignore", message=".*not writable")
                return torch.as_tensor(tree)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{owner} holds an array of {tree.dtype} that torch cannot take: {error}"
            ) from error
    if isinstance(tree, Mapping):
        return {name: _tensors(value, owner) for name, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_tensors(value, owner) for value in tree)
    raise ValueError(
        f"{owner} holds a {type(tree).__name__} where a tensor was expected. Give tensors or arrays, "
        "or dicts and tuples of them."
    )


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, without waiting for what that is busy with."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
