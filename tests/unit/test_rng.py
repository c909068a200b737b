"""One seed, independent streams."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from fmol.rng import key, sample_without_replacement, stream


def test_a_stream_is_found_again_by_its_name() -> None:
    assert np.array_equal(
        stream(7, "batches", 3, "a").random(20), stream(7, "batches", 3, "a").random(20)
    )


def test_streams_do_not_share_a_position() -> None:
    first = stream(0, "a")
    first.random(1000)
    assert stream(0, "a").random() != first.random()


def test_names_that_look_alike_are_different_streams() -> None:
    names: list[tuple[str | int, ...]] = [
        ("a",),
        ("a", 1, 2),
        ("a", 12),
        ("a", "1", 2),
        ("a", "12"),
        ("a1", 2),
        ("a", -1, 2),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("a", ""),
        ("2:i1",),
        (),
    ]
    keys = [key(seed, *name) for seed in (0, 1) for name in names]
    assert len(set(keys)) == len(keys)


def test_the_seed_is_not_just_another_part_of_the_name() -> None:
    assert key(1, 2, "a") != key(2, 1, "a")
    assert key(12, "a") != key(1, 2, "a")


def test_numbers_of_numpy_name_the_same_stream_as_those_of_python() -> None:
    assert key(0, "batches", int(np.int64(3))) == key(0, "batches", np.int64(3))  # type: ignore[arg-type]


def test_a_seed_means_the_same_in_every_release() -> None:
    """Published seeds must stay good; a change here breaks them and belongs in the changelog."""
    assert key(0, "batches", 3, "a") == 23652628859654330480221511561931441992
    assert stream(0, "batches", 3, "a").permutation(8).tolist() == [3, 4, 7, 2, 1, 6, 5, 0]


def test_any_string_and_any_whole_number_can_name_a_stream() -> None:
    drawn = {
        stream(s, n).random() for s in (-1, 0, 2**200) for n in ("", "é", "线", "a\nb", 2**200)
    }
    assert len(drawn) == 15


def test_streams_of_neighbouring_rounds_and_clients_are_not_correlated() -> None:
    draws = np.stack([stream(0, "x", t, c).random(4000) for t in range(3) for c in "ab"])
    correlations = np.corrcoef(draws) - np.eye(6)
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)


@pytest.mark.parametrize(("population", "count"), [(10, 4), (10, 10), (10, 25), (1, 1), (5, 0)])
def test_a_sample_without_replacement_is_distinct_and_as_large_as_it_can_be(
    population: int, count: int
) -> None:
    drawn = list(sample_without_replacement(stream(0, "s"), population, count))
    assert len(drawn) == len(set(drawn)) == min(count, population)
    assert set(drawn) <= set(range(population))


def test_a_sample_of_everyone_is_a_permutation_and_not_always_the_same() -> None:
    orders = {tuple(sample_without_replacement(stream(s, "s"), 6, 6)) for s in range(20)}
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(orders) > 15


def test_stopping_early_gives_the_beginning_of_the_longer_sample() -> None:
    few = list(itertools.islice(sample_without_replacement(stream(1, "s"), 100, 90), 5))
    assert few == list(sample_without_replacement(stream(1, "s"), 100, 5))


def test_every_ordered_pair_is_equally_likely() -> None:
    draws = 12_000
    generator = stream(0, "pairs")
    seen = Counter(tuple(sample_without_replacement(generator, 4, 2)) for _ in range(draws))
    expected = draws / 12
    assert len(seen) == 12
    chi_squared = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_squared < 31.3  # 99.9 % of a χ² with 11 degrees of freedom


def test_drawing_from_a_population_too_large_for_memory_costs_only_what_is_drawn() -> None:
    drawn = list(sample_without_replacement(stream(0, "s"), 10**15, 50))
    assert len(set(drawn)) == 50
    assert max(drawn) > 10**14
