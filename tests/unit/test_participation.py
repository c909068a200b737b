"""Who takes part in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fmol.federation import Client, ClientList, LazyPopulation, Population
from fmol.participation import (
    Everyone,
    Fraction,
    Number,
    Participation,
    Stratified,
)

NAMES = ["left", "right"]


def clients(count: int, objectives: tuple[str, ...] = ("left", "right")) -> list[Client]:
    return [Client(f"c{i:03d}", data=None, objectives=objectives) for i in range(count)]


def ask(
    who: Participation, population: Population, round: int = 0, seed: int = 0
) -> tuple[str, ...]:
    return who.cohort(population, NAMES, round, seed)


ALL = [Everyone(), Fraction(0.3), Number(6), Stratified(6, per_objective=2)]
DRAWN = ALL[1:]


@pytest.mark.parametrize("who", ALL)
def test_a_cohort_is_sorted_distinct_and_the_same_each_time(who: Participation) -> None:
    population = ClientList(clients(20))
    cohort = ask(who, population, round=3, seed=5)
    assert list(cohort) == sorted(set(cohort))
    assert cohort == ask(who, population, round=3, seed=5)


@pytest.mark.parametrize("who", ALL)
def test_the_order_of_clients_and_objectives_changes_nothing(who: Participation) -> None:
    some = clients(20)
    expected = who.cohort(ClientList(some), ["left", "right"], 2, 7)
    assert who.cohort(ClientList(some[::-1]), ["right", "left"], 2, 7) == expected


@pytest.mark.parametrize("who", DRAWN)
def test_another_round_or_seed_draws_another_cohort(who: Participation) -> None:
    population = ClientList(clients(50))
    assert len({ask(who, population, round=t) for t in range(20)}) > 10
    assert len({ask(who, population, seed=s) for s in range(20)}) > 10


@pytest.mark.parametrize(
    ("who", "size"),
    [
        (Everyone(), 25),
        (Fraction(1.0), 25),
        (Fraction(0.1), 3),
        (Fraction(0.001), 1),
        (Number(7), 7),
        (Number(1000), 25),
        (Stratified(7), 7),
        (Stratified(1000), 25),
        (Stratified(1, per_objective=4), 4),
    ],
)
def test_cohorts_have_the_size_asked_for(who: Participation, size: int) -> None:
    assert len(ask(who, ClientList(clients(25)))) == size


def test_every_client_is_drawn_equally_often() -> None:
    population = ClientList(clients(20))
    rounds, count = 2000, 5
    drawn = Counter(c for t in range(rounds) for c in ask(Number(count), population, round=t))
    expected = rounds * count / 20
    chi_square = sum((drawn[c] - expected) ** 2 / expected for c in population.ids())
    # 19 degrees of freedom, and less spread than independent draws have: 43.8 is one in a thousand.
    assert chi_square < 43.8


def test_a_uniform_cohort_often_misses_a_rare_objective_and_a_stratified_one_never() -> None:
    rare = Client("rare", data=None, objectives=("right",))
    population = ClientList([rare, *clients(50, ("left",))])
    assert any("rare" not in ask(Number(5), population, round=t) for t in range(20))
    assert all("rare" in ask(Stratified(5), population, round=t) for t in range(20))


def test_a_stratified_cohort_is_larger_than_asked_for_only_if_the_cover_needs_it() -> None:
    own = [Client(f"c{s}", data=None, objectives=(f"o{s}",)) for s in range(8)]
    names = [f"o{s}" for s in range(8)]
    assert len(Stratified(3).cohort(ClientList(own), names, 0, 0)) == 8
    shared = [Client(f"c{s}", data=None, objectives=tuple(names)) for s in range(8)]
    assert len(Stratified(3).cohort(ClientList(shared), names, 0, 0)) == 3


def test_a_stratified_cohort_does_without_an_objective_nobody_holds() -> None:
    assert len(Stratified(2).cohort(ClientList(clients(5)), ["left", "unheld"], 0, 0)) == 2


class Numbered(Sequence[str]):
    """A million names, of which it counts the lookups; it cannot be walked through or searched."""

    def __init__(self, size: int = 1_000_000, step: int = 1) -> None:
        self.size, self.step, self.lookups = size, step, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: Any) -> Any:
        assert 0 <= i < self.size
        self.lookups += 1
        return f"phone-{i * self.step:07d}"

    def __iter__(self) -> Any:
        raise AssertionError("the population was walked through")

    def __contains__(self, value: object) -> bool:
        raise AssertionError("the population was searched")


@pytest.mark.parametrize(
    "who",
    [
        Number(20),
        Fraction(2e-5),
        Stratified(20, per_objective=3),
        Number(20, available=0.5),
        Stratified(20, available=lambda client, _: client.endswith("0")),
    ],
)
def test_twenty_of_a_million_cost_twenty(who: Participation) -> None:
    names, rare = Numbered(), Numbered(1000, step=1000)
    made: list[str] = []

    def make(id: str) -> Client:
        made.append(id)
        return Client(id, None, ("left", "right") if id.endswith("000") else ("left",))

    population = LazyPopulation(names, make, {"left": names, "right": rare})
    assert len(ask(who, population)) == 20
    assert names.lookups + rare.lookups <= 20 * 20 + 20
    assert len(made) <= 20
    if not cast(Any, who).available:
        assert names.lookups + rare.lookups <= 2 * 20


def test_drawing_is_bounded_when_nobody_can_be_reached() -> None:
    names = Numbered()
    population = LazyPopulation(names, lambda name: Client(name, None, ("left", "right")))
    assert ask(Number(10, available=0.0, attempts=3), population) == ()
    assert names.lookups == 30
    assert ask(Stratified(10, available=0.0, attempts=3), population) == ()
    assert names.lookups == 30 + 3 + 3 + 30


@pytest.mark.parametrize("kind", [Everyone, Fraction, Number, Stratified])
def test_only_available_clients_take_part_and_others_replace_the_rest(kind: Any) -> None:
    population = ClientList(clients(40))
    size = {Everyone: (), Fraction: (0.25,), Number: (10,), Stratified: (10,)}[kind]
    for round in range(10):
        who = kind(*size, available=lambda c, t: (int(c[1:]) + t) % 2 == 0)
        cohort = ask(who, population, round)
        assert all((int(c[1:]) + round) % 2 == 0 for c in cohort)
        assert len(cohort) == (20 if kind is Everyone else 10)


def test_a_cohort_is_smaller_when_not_enough_are_available() -> None:
    population = ClientList(clients(40))
    chances = {c: 1.0 if c in ("c003", "c017") else 0.0 for c in population.ids()}
    for who in (Everyone(chances), Number(10, chances), Stratified(10, 3, chances)):
        assert ask(who, population) == ("c003", "c017")


def test_a_client_is_available_or_not_whoever_asks() -> None:
    population = ClientList(clients(60))
    reachable = set(ask(Everyone(available=0.5), population, round=4, seed=9))
    assert 15 < len(reachable) < 45
    assert set(ask(Number(60, available=0.5), population, round=4, seed=9)) == reachable
    assert set(ask(Stratified(60, available=0.5), population, round=4, seed=9)) == reachable
    few = ClientList(clients(30))
    assert set(ask(Everyone(available=0.5), few, round=4, seed=9)) == reachable & set(few.ids())


def test_availability_changes_from_round_to_round() -> None:
    population = ClientList(clients(30))
    assert len({ask(Everyone(available=0.5), population, round=t) for t in range(10)}) == 10


@pytest.mark.parametrize("certain", [1.0, 1, lambda c, t: True, lambda c, t: 1.0])
def test_certain_availability_changes_nothing(certain: Any) -> None:
    population = ClientList(clients(30))
    assert ask(Number(5, available=certain), population) == ask(Number(5), population)
    assert ask(Stratified(5, 2, certain), population) == ask(Stratified(5, 2), population)


def test_probabilities_are_met() -> None:
    population = ClientList(clients(100))
    met = sum(len(ask(Everyone(available=lambda c, t: 0.2), population, t)) for t in range(30))
    assert 500 < met < 700


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_lies_between_zero_and_one(share: float) -> None:
    with pytest.raises(ValueError, match="`share` must be above 0 and at most 1"):
        Fraction(share)


@pytest.mark.parametrize("count", [0, -3, 2.5, "2"])
def test_counts_are_whole_numbers_of_at_least_one(count: Any) -> None:
    with pytest.raises(ValueError, match="`count` must be a whole number of at least 1"):
        Number(count)
    with pytest.raises(ValueError, match="`count` must be a whole number of at least 1"):
        Stratified(count)
    with pytest.raises(ValueError, match="`per_objective` must be a whole number"):
        Stratified(2, per_objective=count)
    with pytest.raises(ValueError, match="`attempts` must be a whole number"):
        Fraction(0.5, attempts=count)


@pytest.mark.parametrize("available", [-0.1, 1.5, float("nan"), "often", {"c000": 2.0}])
@pytest.mark.parametrize("kind", [Everyone, lambda a: Fraction(0.5, a), lambda a: Number(2, a)])
def test_availability_must_be_a_probability(kind: Any, available: Any) -> None:
    with pytest.raises(ValueError, match="must be a probability from 0 to 1"):
        kind(available)


def test_what_an_availability_function_returns_is_checked() -> None:
    with pytest.raises(ValueError, match=r"`available\('c000', 3\)` must be a probability"):
        ask(Everyone(available=lambda c, t: 7.0), ClientList(clients(1)), round=3)


def test_a_client_left_out_of_the_availabilities_is_named() -> None:
    with pytest.raises(ValueError, match="client `c001` is not in `available`"):
        ask(Everyone(available={"c000": 1.0}), ClientList(clients(2)))
