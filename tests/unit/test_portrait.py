"""A portrait says who holds what and which labels, without any of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fmol import Client, Federation, LazyPopulation, Objective
from fmol.portrait import MOST_CLIENTS, MOST_LABELS, Portrait, portray
from fmol.problems.multidigits import MultiDigits
from fmol.problems.quadratic import Quadratic

ODD = ("inf", "none", "</script>", "🙂 β", '"')


def first_column(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] ** 2


def federation(
    targets: Sequence[Tensor | None], names: Sequence[str] = ("a", "b"), **options: Any
) -> Federation:
    """One client per tensor of targets; None is data that come when they are needed."""

    def never() -> Any:
        raise AssertionError("data were fetched")

    clients = [
        Client(
            f"c{i}",
            never if each is None else (torch.ones(len(each), 2), each),
            tuple(names),
        )
        for i, each in enumerate(targets)
    ]
    objectives = [Objective(name, first_column, target=0.5) for name in names]
    return Federation(nn.Linear(2, 2), objectives, clients, **options)


def back(portrait: Portrait) -> Portrait:
    return Portrait.from_json(json.loads(json.dumps(portrait.to_json(), allow_nan=False)))


def test_a_portrait_comes_back_from_json_as_it_was() -> None:
    targets = [torch.tensor([[0, 1], [1, 3]]), torch.tensor([[1, 1]]), None]
    held_out = (torch.ones(3, 2), torch.zeros(3, 2))
    portrait = portray(federation(targets, held_out=held_out))
    assert back(portrait) == portrait
    assert portrait.held_out == 3


@pytest.mark.parametrize("problem", [Quadratic(clients=3), MultiDigits(clients=3)], ids=str)
def test_portraits_of_built_in_problems_come_back_from_json(problem: Any) -> None:
    portrait = portray(problem.build())
    assert back(portrait) == portrait


def test_names_of_any_kind_come_back_from_json() -> None:
    portrait = portray(federation([torch.arange(6)[:, None].expand(6, len(ODD))], names=ODD))
    assert back(portrait) == portrait
    assert back(portrait).objectives == ODD
    assert list(portrait.labels) == [f"target column {c}" for c in range(len(ODD))]
    assert portrait.targets == dict.fromkeys(ODD, 0.5)


def test_it_says_who_holds_what_and_how_much() -> None:
    portrait = portray(MultiDigits(clients=4, samples=7).build())
    assert (portrait.model, portrait.size, portrait.objectives) == ("Mlp", 4, ("left", "right"))
    assert [client.samples for client in portrait.clients] == [7] * 4
    columns = ("target column 0", "target column 1")
    assert portrait.labels == {column: tuple("0123456789") for column in columns}
    for client in portrait.clients:
        assert {column: sum(counts) for column, counts in client.labels.items()} == dict.fromkeys(
            columns, 7
        )


def test_a_column_is_not_called_as_the_objective_that_happens_to_stand_in_its_place() -> None:
    """Which column a loss looks at is in the loss alone."""
    targets = torch.tensor([[0, 5], [1, 5], [1, 6]])
    portrait = portray(federation([targets], names=("of the second", "of the first")))
    assert portrait.labels == {"target column 0": ("0", "1"), "target column 1": ("5", "6")}


def test_labels_are_counted_over_all_clients_values() -> None:
    portrait = portray(federation([torch.tensor([0, 0, 2]), torch.tensor([5, 2, 2])]))
    assert portrait.labels == {"label": ("0", "2", "5")}
    assert [client.labels["label"] for client in portrait.clients] == [(2, 1, 0), (0, 2, 1)]


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor([0.5, 1.0]),
        torch.tensor([-1.0, 1.0]),
        torch.arange(MOST_LABELS + 1),
        torch.tensor([1.0, 1.0]),
        torch.zeros(4, 2, 2),
        torch.zeros(4, 65),
        torch.zeros(4, dtype=torch.complex64),
        torch.full((4,), torch.nan),
    ],
    ids=["parts", "negative", "too many", "only one", "3-d", "wide", "complex", "unknown"],
)
def test_what_is_not_labels_is_not_taken_for_labels(targets: Tensor) -> None:
    assert portray(federation([targets])).labels == {}


@pytest.mark.parametrize(
    ("targets", "labels"),
    [
        (torch.tensor([True, False]), {"label": ("0", "1")}),
        (torch.tensor([1.0, torch.nan, 0.0]), {"label": ("0", "1")}),
        (torch.arange(MOST_LABELS), {"label": tuple(str(i) for i in range(MOST_LABELS))}),
        (torch.tensor([[3], [4]], dtype=torch.uint8), {"label": ("3", "4")}),
        (torch.tensor([[0, 1, 2], [1, 1, 2]]), {"target column 0": ("0", "1")}),
        (torch.tensor([[0.0, 0.5], [1.0, 0.5]]), {"target column 0": ("0", "1")}),
        (torch.tensor([1_000_001, 1_000_002]), {"label": ("1000001", "1000002")}),
    ],
    ids=["bool", "with gaps", "as many as may be", "one column", "columns", "mixed", "large"],
)
def test_labels_are_recognised(targets: Tensor, labels: dict[str, tuple[str, ...]]) -> None:
    assert portray(federation([targets])).labels == labels


def test_a_column_that_is_no_label_at_one_client_is_none_at_all() -> None:
    assert portray(federation([torch.tensor([0, 1]), torch.tensor([0.5, 1])])).labels == {}


def test_labels_that_are_too_many_only_together_are_none() -> None:
    halves = torch.arange(2 * MOST_LABELS).chunk(2)
    assert portray(federation([halves[0]])).labels
    assert portray(federation(list(halves))).labels == {}


def test_a_late_value_that_is_no_label_is_noticed() -> None:
    targets = torch.cat([torch.arange(2.0).repeat(500), torch.tensor([0.5])])
    assert portray(federation([targets])).labels == {}


def test_clients_may_have_different_columns_or_no_data_here() -> None:
    portrait = portray(federation([torch.tensor([[0, 1], [1, 0]]), torch.tensor([3, 4]), None]))
    assert [set(client.labels) for client in portrait.clients] == [
        {"target column 0", "target column 1"},
        {"label"},
        set(),
    ]
    assert [client.samples for client in portrait.clients] == [2, 2, None]


def test_datasets_are_counted_and_their_items_left_alone() -> None:
    class Untouchable(Dataset[Any]):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, i: int) -> Any:
            raise AssertionError("an item was fetched")

    x = torch.ones(3, 2)
    clients = [
        Client("plain", TensorDataset(x, torch.tensor([0, 1, 1])), ("a",)),
        Client("far", Untouchable(), ("a",)),
    ]
    objectives = [Objective("a", first_column)]
    portrait = portray(Federation(nn.Linear(2, 2), objectives, clients))
    assert {client.id: client.samples for client in portrait.clients} == {"far": 11, "plain": 3}


@pytest.mark.parametrize("size", [MOST_CLIENTS, MOST_CLIENTS + 1, 5_000, 1_000_000])
def test_of_many_clients_only_some_are_made_and_no_data_fetched(size: int) -> None:
    made = []

    class Numbered(Sequence[str]):
        def __len__(self) -> int:
            return size

        def __getitem__(self, i: Any) -> Any:
            return f"c{i:07d}"

    def fetch() -> Any:
        raise AssertionError("data were fetched")

    def make(id: str) -> Client:
        made.append(id)
        return Client(id, fetch, ("a",))

    population = LazyPopulation(Numbered(), make)
    problem = Federation(nn.Linear(2, 2), [Objective("a", first_column)], population)
    made.clear()
    portrait = portray(problem)
    assert portrait.size == size
    assert len(portrait.clients) == len(made) <= MOST_CLIENTS
    assert len(made) >= MOST_CLIENTS / 2
    assert int(portrait.clients[-1].id[1:]) > 0.98 * size - 1
    assert all(client.samples is None for client in portrait.clients)
