"""Private data in one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from fmol.data import as_samples, is_lazy, tree_leaves, tree_map

OWNER = "`data` of client `anna`"
X = torch.arange(12, dtype=torch.float64).reshape(6, 2)
Y = torch.arange(6) * 10
CPU = torch.device("cpu")


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.asked.append(i)
        return X[i], Y[i]


class ManyPairs(Pairs):
    """One that can be asked for many at once, and objects to being asked one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("asked one by one")

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        self.calls += 1
        return [(X[i], Y[i]) for i in indices]


SHAPES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "a list of two tensors": lambda: [X, Y],
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "an array and a tensor": lambda: (X.numpy(), Y),
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Subset": lambda: Subset(TensorDataset(X, Y), range(6)),
    "dataset": Pairs,
    "dataset with __getitems__": ManyPairs,
    "a list of samples": lambda: [(X[i], Y[i]) for i in range(6)],
    "a callable that brings tensors": lambda: lambda: (X, Y),
    "a callable that brings a dataset": lambda: partial(Pairs),
    "a callable that brings arrays": lambda: lambda: (X.numpy(), Y.numpy()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_form_the_data_come_in_the_batches_are_the_same(shape: str) -> None:
    samples = as_samples(SHAPES[shape](), OWNER)
    assert len(samples) == 6
    for indices in (torch.tensor([4, 0, 4]), torch.tensor([5]), None):
        inputs, targets = samples.batch(indices)
        wanted = torch.arange(6) if indices is None else indices
        assert torch.equal(inputs, X[wanted])
        assert torch.equal(targets, Y[wanted])
    inputs, targets = samples.span(2, 5)
    assert torch.equal(inputs, X[2:5])
    assert torch.equal(targets, Y[2:5])


@pytest.mark.parametrize("shape", SHAPES)
def test_data_that_are_on_the_device_already_stay_what_they_are(shape: str) -> None:
    samples = as_samples(SHAPES[shape](), OWNER)
    inputs, targets = samples.to(CPU).batch(torch.tensor([1, 3]))
    assert torch.equal(inputs, X[[1, 3]])
    assert torch.equal(targets, Y[[1, 3]])


def test_moving_tensors_to_where_they_are_copies_nothing() -> None:
    samples = as_samples((X, Y), OWNER)
    assert samples.to(CPU) is samples
    assert samples.batch(None)[0].data_ptr() == X.data_ptr()


def test_tensors_are_moved_to_the_device_that_is_asked_for() -> None:
    moved = as_samples(({"a": X}, (Y, X)), OWNER).to(torch.device("meta"))
    inputs, targets = moved.batch(None)
    assert {leaf.device.type for leaf in tree_leaves((inputs, targets))} == {"meta"}
    assert as_samples(Pairs(), OWNER).to(torch.device("meta")).span(0, 2)[0].device.type == "meta"


def test_nests_of_dicts_and_tuples_keep_their_shape_in_every_batch() -> None:
    inputs = {"image": X, "more": (X[:, 0], {"deep": X.numpy()})}
    samples = as_samples((inputs, (Y, {"weight": Y.double()})), OWNER)
    batch, targets = samples.batch(torch.tensor([2, 1]))
    assert set(batch) == {"image", "more"}
    assert torch.equal(batch["image"], X[[2, 1]])
    assert torch.equal(batch["more"][0], X[[2, 1], 0])
    assert torch.equal(batch["more"][1]["deep"], X[[2, 1]])
    assert isinstance(targets, tuple)
    assert torch.equal(targets[1]["weight"], Y[[2, 1]].double())
    assert torch.equal(samples.span(1, 3)[0]["more"][1]["deep"], X[1:3])


def test_samples_that_are_dicts_are_collated_by_name() -> None:
    rows = [({"image": X[i], "age": float(i)}, {"label": Y[i]}) for i in range(6)]
    inputs, targets = as_samples(rows, OWNER).batch(torch.tensor([3, 5]))
    assert torch.equal(inputs["image"], X[[3, 5]])
    assert inputs["age"].tolist() == [3.0, 5.0]
    assert torch.equal(targets["label"], Y[[3, 5]])


def test_a_list_of_two_samples_is_a_data_set_of_two_and_not_a_pair() -> None:
    samples = as_samples([(X[0], Y[0]), (X[1], Y[1])], OWNER)
    assert len(samples) == 2
    assert torch.equal(samples.batch(None)[0], X[:2])


def test_targets_may_be_empty_where_the_loss_needs_none() -> None:
    samples = as_samples((X, ()), OWNER)
    assert len(samples) == 6
    assert samples.batch(torch.tensor([0]))[1] == ()


def test_a_data_set_is_asked_only_for_the_samples_of_the_batch() -> None:
    dataset = Pairs()
    as_samples(dataset, OWNER).batch(torch.tensor([4, 1]))
    assert dataset.asked == [4, 1]


def test_a_data_set_that_can_give_many_at_once_is_asked_once_per_batch() -> None:
    dataset = ManyPairs()
    as_samples(dataset, OWNER).batch(torch.tensor([4, 1, 2]))
    assert dataset.calls == 1


def test_a_data_set_is_not_kept_in_memory_so_that_it_may_augment() -> None:
    class Growing(Pairs):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            inputs, target = super().__getitem__(i)
            return inputs + len(self.asked), target

    samples = as_samples(Growing(), OWNER)
    first, second = samples.span(0, 1)[0], samples.span(0, 1)[0]
    assert torch.equal(second - first, torch.ones(1, 2, dtype=torch.float64))


def test_a_callable_is_called_once_and_not_before_it_is_needed() -> None:
    calls = []

    def bring() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return X, Y

    assert is_lazy(bring)
    assert not calls
    samples = as_samples(bring, OWNER)
    samples.batch(None)
    assert len(calls) == 1


def test_a_data_set_that_can_be_called_is_still_a_data_set() -> None:
    class Callable(Pairs):
        def __call__(self) -> None:
            raise AssertionError("called")

    assert not is_lazy(Callable())
    assert len(as_samples(Callable(), OWNER)) == 6


def test_the_class_of_a_data_set_is_a_callable_that_brings_one() -> None:
    assert is_lazy(Pairs)
    assert len(as_samples(Pairs, OWNER)) == 6


def test_memory_is_counted_in_bytes_of_all_tensors() -> None:
    assert as_samples(({"a": X, "b": X.float()}, Y), OWNER).nbytes == 6 * (2 * 8 + 2 * 4 + 8)


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "NoneType"),
    "a number": (3, "int"),
    "a string": ("data.csv", "str"),
    "no tensors": (({}, ()), "no tensors"),
    "inputs without tensors": (((), Y), "no tensors"),
    "no dimensions": ((X, torch.tensor(3.0)), "without dimensions"),
    "an array without dimensions": ((X, np.array(3.0)), "without dimensions"),
    "lengths that differ": ((X, Y[:4]), r"\[4, 6\]"),
    "lengths that differ inside": (({"a": X, "b": X[:5]}, Y), r"\[5, 6\]"),
    "no samples": ((X[:0], Y[:0]), "no samples"),
    "an empty data set": (Subset(TensorDataset(X, Y), []), "no samples"),
    "an empty list": ([], "no samples"),
    "a list where a tensor should be": ((X, [1, 2, 3, 4, 5, 6]), "list"),
    "None for targets": ((X, None), "NoneType"),
    "a callable that brings nothing": (lambda: None, "NoneType"),
    "a callable that brings wrong lengths": (lambda: (X, Y[:4]), r"\[4, 6\]"),
    "a stream": (iter([(X[0], Y[0])]), "iterator"),
}


@pytest.mark.parametrize("case", WRONG)
def test_data_that_cannot_be_used_are_refused_with_their_owner_and_what_was_seen(case: str) -> None:
    data, seen = WRONG[case]
    with pytest.raises(ValueError, match=seen) as error:
        as_samples(data, OWNER)
    assert str(error.value).startswith(OWNER)


@pytest.mark.parametrize(
    "data",
    [X, X.numpy(), {"inputs": X, "targets": Y}, (X, Y, Y)],
    ids=["a tensor", "an array", "a dict", "three tensors"],
)
def test_tensors_that_are_no_pair_are_refused_at_once_with_their_owner(data: Any) -> None:
    with pytest.raises(ValueError, match="anna"):
        as_samples(data, OWNER)


@pytest.mark.parametrize(
    "data",
    [
        (X.numpy()[::-1], Y.numpy()),
        (X.numpy().astype(">f8"), Y.numpy()),
        (np.array(["a"] * 6), Y.numpy()),
        (np.array([None] * 6), Y.numpy()),
    ],
    ids=["negative strides", "foreign byte order", "strings", "objects"],
)
def test_arrays_that_torch_cannot_take_are_refused_with_their_owner(data: Any) -> None:
    with pytest.raises(ValueError, match="anna"):
        as_samples(data, OWNER)


def test_read_only_arrays_such_as_memory_maps_are_taken_without_a_warning() -> None:
    inputs = X.numpy().copy()
    inputs.setflags(write=False)
    assert torch.equal(as_samples((inputs, Y), OWNER).batch(None)[0], X)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y, Y),
        TensorDataset(X),
        [X[i] for i in range(6)],
        [{"input": X[i], "target": Y[i]} for i in range(6)],
    ],
    ids=["triples", "singles", "bare tensors", "dicts"],
)
def test_items_that_are_no_pairs_are_refused_in_words(dataset: Any) -> None:
    samples = as_samples(dataset, OWNER)
    with pytest.raises(ValueError, match=r"must be pairs \(input, target\)"):
        samples.batch(torch.tensor([0, 1, 2]))


def test_items_that_are_no_pairs_are_refused_with_their_owner() -> None:
    with pytest.raises(ValueError, match="anna"):
        as_samples(TensorDataset(X, Y, Y), OWNER).batch(None)


class Point(NamedTuple):
    x: Tensor
    label: str


def test_tree_map_keeps_every_kind_of_nest_and_leaves_what_is_no_tensor() -> None:
    tree = {"a": [X, (Y, None)], "b": Point(X, "name")}
    doubled = tree_map(lambda leaf: leaf * 2, tree)
    assert torch.equal(doubled["a"][0], X * 2)
    assert isinstance(doubled["a"], list)
    assert isinstance(doubled["a"][1], tuple)
    assert doubled["a"][1][1] is None
    assert isinstance(doubled["b"], Point)
    assert doubled["b"].label == "name"
    assert torch.equal(doubled["b"].x, X * 2)
    assert [leaf.data_ptr() for leaf in tree_leaves(tree)] == [
        X.data_ptr(),
        Y.data_ptr(),
        X.data_ptr(),
    ]
