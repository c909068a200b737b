"""Partitions: who gets which samples and which objectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fmol.federation import ClientList
from fmol.partition import (
    Indices,
    all_objectives,
    blocks,
    by_group,
    describe,
    dirichlet,
    iid,
    label_shards,
    make_clients,
    one_each,
    random_subsets,
)

MNIST = np.repeat(np.arange(10), [592, 674, 596, 613, 584, 542, 592, 627, 585, 595])


def sizes(parts: list[Indices]) -> list[int]:
    return [len(part) for part in parts]


def labels_of(parts: list[Indices], labels: np.ndarray[Any, Any]) -> list[set[int]]:
    return [set(labels[part].tolist()) for part in parts]


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(sizes(iid(23, 5))) == [4, 4, 5, 5, 5]


@pytest.mark.parametrize(
    "partition",
    [
        lambda seed: iid(60, 4, seed),
        lambda seed: label_shards(MNIST, 10, seed=seed),
        lambda seed: dirichlet(MNIST, 5, alpha=0.5, seed=seed),
    ],
)
def test_the_same_seed_gives_the_same_parts_and_another_seed_others(
    partition: Callable[[int], list[Indices]],
) -> None:
    def text(seed: int) -> str:
        return str([part.tolist() for part in partition(seed)])

    assert text(3) == text(3)
    assert text(3) != text(4)


@pytest.mark.parametrize("clients", [5, 7, 10, 30, 100])
def test_label_shards_gives_exactly_two_labels_where_sorted_shards_would_give_more(
    clients: int,
) -> None:
    parts = label_shards(MNIST, clients, labels_per_client=2)
    assert {len(held) for held in labels_of(parts, MNIST)} == {2}


@pytest.mark.parametrize("clients", [10, 30, 100])
def test_label_shards_makes_sizes_equal_although_labels_are_not(clients: int) -> None:
    parts = label_shards(MNIST, clients)
    assert max(sizes(parts)) - min(sizes(parts)) <= 1


def test_label_shards_pairs_large_with_small_labels_when_each_goes_to_one_client() -> None:
    labels = np.repeat(np.arange(6), [10, 20, 30, 40, 50, 60])
    assert sizes(label_shards(labels, 3, labels_per_client=2)) == [70, 70, 70]


def test_label_shards_draws_other_pairs_of_labels_with_another_seed() -> None:
    pairs = {
        str(sorted(map(sorted, labels_of(label_shards(MNIST, 10, seed=s), MNIST))))
        for s in range(5)
    }
    assert len(pairs) == 5


def test_label_shards_can_give_one_label_each() -> None:
    parts = label_shards([0] * 30 + [1] * 10, 4, labels_per_client=1)
    assert sizes(parts) == [10, 10, 10, 10]


def test_label_shards_leaves_nobody_empty_when_samples_are_as_few_as_clients() -> None:
    assert sizes(label_shards([0, 0, 0, 1], 4)) == [1, 1, 1, 1]


def test_label_shards_treats_tensors_arrays_lists_and_strings_alike() -> None:
    plain = [3, 1, 3, 1, 2, 2, 3, 1]
    expected = str(label_shards(plain, 3))
    assert str(label_shards(np.array(plain), 3)) == expected
    assert str(label_shards(torch.tensor(plain), 3)) == expected
    assert str(label_shards([f"digit {value}" for value in plain], 3)) == expected


def test_label_shards_says_when_the_labels_cannot_all_be_dealt() -> None:
    with pytest.raises(ValueError, match="4 clients with at most 2 labels each cannot hold all 10"):
        label_shards(MNIST, 4)


def test_label_shards_says_when_there_are_more_clients_than_samples() -> None:
    with pytest.raises(ValueError, match="2 samples are too few for 3 `clients`"):
        label_shards([0, 1], 3)


def test_label_shards_refuses_less_than_one_label() -> None:
    with pytest.raises(ValueError, match="`labels_per_client` must be at least 1, got 0"):
        label_shards(MNIST, 4, labels_per_client=0)


@pytest.mark.parametrize("labels", [torch.zeros(4, 2), [], [1, None]])
def test_labels_must_be_one_per_sample(labels: Any) -> None:
    with pytest.raises(ValueError, match="`labels` must hold one number or string per sample"):
        label_shards(labels, 1)


def test_dirichlet_with_a_large_alpha_is_nearly_even_and_with_a_small_one_is_not() -> None:
    even = describe(dirichlet(MNIST, 10, alpha=1e5), MNIST)
    skewed = describe(dirichlet(MNIST, 10, alpha=0.05), MNIST)
    assert even.counts.min() > 45
    assert np.count_nonzero(skewed.counts) < 60


@pytest.mark.parametrize("alpha", [1e-300, 0.01, 1e300])
def test_dirichlet_gives_everyone_enough_even_when_no_draw_does(alpha: float) -> None:
    parts = dirichlet(np.zeros(200, dtype=int), 40, alpha, min_samples=3)
    assert min(sizes(parts)) >= 3
    assert sum(sizes(parts)) == 200


def test_dirichlet_may_leave_clients_empty_if_asked_to() -> None:
    assert min(sizes(dirichlet([0] * 20, 10, 0.01, min_samples=0))) == 0


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_dirichlet_refuses_an_alpha_that_is_not_positive(alpha: float) -> None:
    with pytest.raises(ValueError, match="`alpha` must be a positive number"):
        dirichlet([0, 1], 2, alpha)


def test_dirichlet_says_when_the_minimum_is_out_of_reach() -> None:
    with pytest.raises(ValueError, match="10 samples are too few for 4 `clients` with at least 3"):
        dirichlet([0] * 10, 4, 1.0, min_samples=3)
    with pytest.raises(ValueError, match="`min_samples` must not be negative"):
        dirichlet([0] * 10, 4, 1.0, min_samples=-1)


def test_blocks_are_contiguous_and_never_cross_a_boundary() -> None:
    parts = blocks(9125, 10, boundaries=[4000])
    assert np.array_equal(np.concatenate(parts), np.arange(9125))
    assert not any(part[0] < 4000 <= part[-1] for part in parts)
    assert max(sizes(parts)) - min(sizes(parts)) <= 146  # 1000 of the one, 854 of the other series


def test_blocks_give_a_long_series_more_clients_than_a_short_one() -> None:
    assert sizes(blocks(100, 5, boundaries=[20])) == [20] * 5


def test_blocks_say_when_a_boundary_would_have_to_be_crossed() -> None:
    with pytest.raises(ValueError, match="2 clients cannot hold 3 series"):
        blocks(10, 2, boundaries=[3, 6])


@pytest.mark.parametrize("boundary", [0, 10, -1, 11])
def test_blocks_refuse_a_boundary_outside(boundary: int) -> None:
    with pytest.raises(ValueError, match=f"boundary {boundary} in `boundaries`"):
        blocks(10, 3, boundaries=[boundary])


def test_by_group_orders_clients_by_value_whatever_comes_first() -> None:
    assert list(by_group([10, 9, 2, 10])) == [2, 9, 10]
    assert list(by_group(torch.tensor([10, 9, 2, 10]))) == [2, 9, 10]
    assert list(by_group(np.array(["b", "a"]))) == ["a", "b"]
    assert list(by_group([2, "b", 1, "a"])) == list(by_group(["a", "b", 2, 1])) == [1, 2, "a", "b"]
    assert by_group(["x", "y", "x"])["x"].tolist() == [0, 2]


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_by_group_refuses_a_sample_without_a_group(missing: Any) -> None:
    with pytest.raises(ValueError, match="sample 1 has no group"):
        by_group(["a", missing])


def test_by_group_refuses_a_matrix() -> None:
    with pytest.raises(
        ValueError, match=r"`groups` must have one entry per sample, got shape \(2, 3\)"
    ):
        by_group(torch.zeros(2, 3))


@pytest.mark.parametrize("clients", [0, -1])
def test_less_than_one_client_is_an_error_everywhere(clients: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: iid(10, clients),
        lambda: label_shards(MNIST, clients),
        lambda: dirichlet(MNIST, clients, 1.0),
        lambda: blocks(10, clients),
        lambda: all_objectives(["a"], clients),
        lambda: one_each(["a"], clients),
        lambda: random_subsets(["a"], clients, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"`clients` must be at least 1, got {clients}"):
            call()


def test_one_each_with_as_many_clients_as_objectives_is_the_identity() -> None:
    assert one_each(["a", "b", "c"], 3) == [("a",), ("b",), ("c",)]


def test_one_each_says_which_objective_would_have_no_holder() -> None:
    with pytest.raises(ValueError, match="leave objective `c` without a holder"):
        one_each(["a", "b", "c"], 2)


@pytest.mark.parametrize("size", [0, 4, (2, 1), (0, 2), (1, 4), (1, 2, 3), 1.5])
def test_random_subsets_refuse_an_impossible_size(size: Any) -> None:
    with pytest.raises(ValueError, match="`size` must be a number from 1 to 3"):
        random_subsets(["a", "b", "c"], 5, size)


def test_random_subsets_say_when_they_cannot_cover() -> None:
    with pytest.raises(ValueError, match="2 clients with at most 1 objectives each cannot cover 3"):
        random_subsets(["a", "b", "c"], 2, 1)


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "`names` is empty"), ("left", "got the string 'left'"), (["a", "a"], "named twice")],
)
def test_names_must_be_a_list_of_distinct_names(names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        all_objectives(names, 2)


def test_make_clients_numbers_ids_so_that_their_order_is_that_of_the_parts() -> None:
    x = torch.arange(24.0)
    clients = make_clients(x, x, blocks(24, 12), all_objectives(["a"], 12))
    assert [c.id for c in clients[:2]] == ["client-00", "client-01"]
    assert list(ClientList(clients).ids()) == [c.id for c in clients]
    assert clients[10].data[0].tolist() == [20.0, 21.0]


def test_make_clients_takes_dicts_tuples_and_arrays_apart() -> None:
    inputs = {"image": torch.arange(6).view(6, 1), "size": np.arange(6)}
    targets = (torch.arange(6), torch.arange(6) * 10)
    parts = [np.array([0, 5]), np.array([1, 2, 3, 4])]
    first, second = make_clients(inputs, targets, parts, one_each(["a", "b"], 2))
    assert first.data[0]["image"].tolist() == [[0], [5]]
    assert first.data[0]["size"].tolist() == [0, 5]
    assert first.data[1][1].tolist() == [0, 50]
    assert len(second.data[0]["size"]) == 4
    assert second.objectives == ("b",)


def test_make_clients_names_clients_after_their_groups() -> None:
    x = torch.arange(3.0)
    groups = by_group(["rome", "oslo", "rome"])
    clients = make_clients(x, x, groups, all_objectives(["a"], 2), prefix="")
    assert [(c.id, c.data[0].tolist()) for c in clients] == [("oslo", [1.0]), ("rome", [0.0, 2.0])]


def test_make_clients_says_what_does_not_fit() -> None:
    x = torch.arange(4.0)
    two = blocks(4, 2)
    with pytest.raises(ValueError, match="`objectives` has 1 entries for 2 clients"):
        make_clients(x, x, two, [("a",)])
    with pytest.raises(ValueError, match="got the string 'left'"):
        make_clients(x, x, two, ["left", "right"])
    with pytest.raises(ValueError, match="client `client-1` gets no samples"):
        make_clients(x, x, [np.arange(4), np.arange(0)], one_each(["a"], 2))
    with pytest.raises(ValueError, match="client `client-0` gets sample 5, but there are 4"):
        make_clients(x, x, [np.array([5])], one_each(["a"], 1))
    with pytest.raises(ValueError, match="client `client-0` gets sample -1"):
        make_clients(x, x, [np.array([-1])], one_each(["a"], 1))
    with pytest.raises(ValueError, match="first dimensions differ"):
        make_clients(x, x[:2], two, one_each(["a"], 2))


def test_describe_counts_samples_and_labels() -> None:
    table = describe([np.array([0, 1, 4]), np.array([2, 3])], labels=["x", "x", "y", "y", "y"])
    assert table.sizes.tolist() == [3, 2]
    assert table.labels == ("x", "y")
    assert table.counts.tolist() == [[2, 1], [0, 2]]
    assert str(table) == repr(table)
    assert str(table).splitlines() == [
        "client  samples  distinct  x  y",
        "0             3         2  2  1",
        "1             2         1  0  2",
        "2 clients, 5 samples, 2 to 3 each; 1 to 2 labels each.",
    ]


def test_describe_needs_no_labels_and_takes_groups() -> None:
    assert str(describe(by_group(["rome", "oslo", "rome"]))).splitlines() == [
        "client  samples",
        "oslo          1",
        "rome          2",
        "2 clients, 3 samples, 1 to 2 each.",
    ]


def test_describe_stays_legible_with_many_clients_and_labels() -> None:
    labels = np.arange(5000) % 100
    lines = str(describe(iid(5000, 1000), labels)).splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) < 100
    assert lines[-2] == "… and 990 more"
    assert lines[-1].startswith("1,000 clients, 5,000 samples, 5 each")


def test_describe_says_when_the_labels_are_too_few() -> None:
    with pytest.raises(ValueError, match="a client has sample 3, but there are 2 `labels`"):
        describe(blocks(4, 2), labels=[0, 1])
