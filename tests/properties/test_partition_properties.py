"""What every partition keeps, whatever the data."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fmol.partition import (
    Indices,
    blocks,
    by_group,
    dirichlet,
    iid,
    label_shards,
    random_subsets,
)

few = settings(max_examples=60, deadline=None)
some_labels = st.lists(st.integers(-3, 8), min_size=1, max_size=120)
seeds = st.integers(0, 2**32)


def assert_a_partition(parts: list[Indices], n: int) -> None:
    assert all(part.dtype == np.int64 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))


@few
@given(data=st.data(), n=st.integers(1, 200), seed=seeds)
def test_iid_is_complete_disjoint_and_even(data: st.DataObject, n: int, seed: int) -> None:
    clients = data.draw(st.integers(1, n))
    parts = iid(n, clients, seed)
    assert_a_partition(parts, n)
    assert len(parts) == clients
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=150, deadline=None)
@given(data=st.data(), labels=some_labels, per_client=st.integers(1, 4), seed=seeds)
def test_label_shards_keep_every_promise(
    data: st.DataObject, labels: list[int], per_client: int, seed: int
) -> None:
    distinct = len(set(labels))
    least = -(-distinct // per_client)
    clients = data.draw(st.integers(least, max(least, min(len(labels), 30))))
    parts = label_shards(labels, clients, per_client, seed)
    assert_a_partition(parts, len(labels))
    assert len(parts) == clients
    held = [[labels[i] for i in part] for part in parts]
    assert all(1 <= len(set(mine)) <= per_client for mine in held)

    # No sizes are more equal with these sets of labels: whoever a client can pass samples to,
    # directly or through others, is at most one smaller.
    for start in range(clients):
        reached, queue = {start}, [start]
        while queue:
            giver = queue.pop()
            spare = {label for label in held[giver] if held[giver].count(label) > 1}
            for taker in range(clients):
                if taker not in reached and spare & set(held[taker]):
                    reached.add(taker)
                    queue.append(taker)
        assert min(len(held[taker]) for taker in reached) >= len(held[start]) - 1


@few
@given(number=st.integers(2, 8), each=st.integers(1, 10), per_client=st.integers(1, 3), seed=seeds)
def test_label_shards_of_equal_labels_are_equal(
    number: int, each: int, per_client: int, seed: int
) -> None:
    labels = np.repeat(np.arange(number), each * per_client)
    parts = label_shards(labels, number, per_client, seed)
    assert {len(part) for part in parts} == {each * per_client}


@few
@given(
    data=st.data(),
    labels=some_labels,
    alpha=st.floats(1e-6, 1e6),
    least=st.integers(0, 3),
    seed=seeds,
)
def test_dirichlet_is_complete_disjoint_and_gives_everyone_the_minimum(
    data: st.DataObject, labels: list[int], alpha: float, least: int, seed: int
) -> None:
    clients = data.draw(st.integers(1, max(1, len(labels) // max(1, least))))
    least = min(least, len(labels) // clients)
    parts = dirichlet(labels, clients, alpha, seed, min_samples=least)
    assert_a_partition(parts, len(labels))
    assert len(parts) == clients
    assert min(map(len, parts)) >= least


@few
@given(data=st.data(), n=st.integers(1, 200), boundaries=st.sets(st.integers(1, 199), max_size=5))
def test_blocks_follow_one_another_and_stop_at_boundaries(
    data: st.DataObject, n: int, boundaries: set[int]
) -> None:
    inside = [b for b in boundaries if b < n]
    clients = data.draw(st.integers(len(inside) + 1, n))
    parts = blocks(n, clients, inside)
    assert len(parts) == clients
    assert all(len(part) > 0 for part in parts)
    assert np.concatenate(parts).tolist() == list(range(n))
    assert all(not part[0] < b <= part[-1] for part in parts for b in inside)


@few
@given(groups=st.lists(st.one_of(st.integers(-2, 3), st.sampled_from(["", "a", "2"])), max_size=40))
def test_groups_are_complete_and_in_an_order_of_their_own(groups: list[int | str]) -> None:
    found = by_group(groups)
    for value, part in found.items():
        assert part.tolist() == [i for i, group in enumerate(groups) if group == value]
    assert sum(map(len, found.values())) == len(groups)
    assert list(found) == list(by_group(groups[::-1]))


@few
@given(data=st.data(), number=st.integers(1, 8), seed=seeds)
def test_random_subsets_cover_all_and_leave_nobody_without(
    data: st.DataObject, number: int, seed: int
) -> None:
    names = [f"o{s}" for s in range(number)]
    high = data.draw(st.integers(1, number))
    low = data.draw(st.integers(1, high))
    clients = data.draw(st.integers(-(-number // high), 12 + number))
    held = random_subsets(names, clients, (low, high), seed)
    assert len(held) == clients
    assert set().union(*held) == set(names)
    for mine in held:
        assert low <= len(mine) <= high
        assert list(mine) == [name for name in names if name in mine]
    assert held == random_subsets(names, clients, (low, high), seed)
