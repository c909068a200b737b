"""What every cohort keeps, whatever clients hold and whoever is available."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fmol.federation import Client, ClientList
from fmol.participation import Everyone, Fraction, Number, Stratified

few = settings(max_examples=80, deadline=None)
seeds = st.integers(0, 2**32)
rounds = st.integers(0, 1000)


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[Client], list[str]]:
    """Clients with a random assignment matrix `A`; some objective may have no holder."""
    names = [f"o{s}" for s in range(draw(st.integers(1, 6)))]
    holds = st.sets(st.sampled_from(names), min_size=1)
    held = draw(st.lists(holds, min_size=1, max_size=25))
    return [Client(f"c{i}", None, tuple(sorted(mine))) for i, mine in enumerate(held)], names


@few
@given(
    known=assignments(), count=st.integers(1, 30), least=st.integers(1, 4), round=rounds, seed=seeds
)
def test_a_stratified_cohort_covers_every_objective(
    known: tuple[list[Client], list[str]], count: int, least: int, round: int, seed: int
) -> None:
    clients, names = known
    population = ClientList(clients)
    cohort = Stratified(count, least).cohort(population, names, round, seed)
    for name in names:
        holders = set(population.holders(name))
        assert len(holders & set(cohort)) >= min(least, len(holders))
    assert set(cohort) <= set(population.ids())
    assert list(cohort) == sorted(set(cohort))
    assert min(count, len(clients)) <= len(cohort) <= max(count, least * len(names))


@few
@given(
    known=assignments(),
    count=st.integers(1, 30),
    least=st.integers(1, 3),
    out_of_reach=st.sets(st.integers(0, 24)),
    round=rounds,
    seed=seeds,
)
def test_a_stratified_cohort_covers_what_can_be_reached(
    known: tuple[list[Client], list[str]],
    count: int,
    least: int,
    out_of_reach: set[int],
    round: int,
    seed: int,
) -> None:
    clients, names = known
    population = ClientList(clients)
    reachable = {c.id for i, c in enumerate(clients) if i not in out_of_reach}
    # So many attempts that all clients are tried: then only reach limits the cohort.
    who = Stratified(count, least, lambda client, _: client in reachable, attempts=25)
    cohort = set(who.cohort(population, names, round, seed))
    assert cohort <= reachable
    assert len(cohort) >= min(count, len(reachable))
    for name in names:
        holders = reachable & set(population.holders(name))
        assert len(holders & cohort) >= min(least, len(holders))


@few
@given(
    size=st.integers(1, 40),
    count=st.integers(1, 50),
    share=st.floats(0.0, 1.0, exclude_min=True),
    round=rounds,
    seed=seeds,
)
def test_uniform_cohorts_have_their_size(
    size: int, count: int, share: float, round: int, seed: int
) -> None:
    population = ClientList([Client(f"c{i}", None, ("a",)) for i in range(size)])
    number = Number(count).cohort(population, ["a"], round, seed)
    assert len(number) == len(set(number)) == min(count, size)
    fraction = Fraction(share).cohort(population, ["a"], round, seed)
    assert len(fraction) == len(set(fraction)) >= 1
    assert abs(len(fraction) - share * size) <= 0.5 or len(fraction) == 1


@few
@given(
    size=st.integers(1, 30),
    count=st.integers(1, 30),
    chance=st.floats(0.0, 1.0),
    round=rounds,
    seed=seeds,
)
def test_a_draw_takes_only_those_available_and_misses_none_when_it_may_try_all(
    size: int, count: int, chance: float, round: int, seed: int
) -> None:
    population = ClientList([Client(f"c{i}", None, ("a",)) for i in range(size)])
    reachable = set(Everyone(chance).cohort(population, ["a"], round, seed))
    cohort = Number(count, chance, attempts=30).cohort(population, ["a"], round, seed)
    assert set(cohort) <= reachable
    assert len(cohort) == min(count, len(reachable))
