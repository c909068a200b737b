"""Who takes part in a round: the cohort, drawn from the seed and the round alone.

Each kind of participation is a frozen record with one method, `cohort`. Drawing costs time and
memory in proportion to the cohort, not to the population: 20 of a million clients cost 20.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from fmol.federation import Population
from fmol.rng import restart, sample_without_replacement, stream

__all__ = ["Availability", "Everyone", "Fraction", "Number", "Participation", "Stratified"]

Availability: TypeAlias = float | Mapping[str, float] | Callable[[str, int], bool | float]
"""When a client can be reached: a probability for all, one per client id, or a function of
(client, round) that returns a probability or simply True or False.

A probability is tossed once per client and round, from a stream of its own: who else is asked, or
in which order, changes nothing.
"""


class Participation(Protocol):
    """Anything that names a round's cohort."""

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        """The ids of the clients that take part in `round`, sorted; empty if nobody can be reached."""


@dataclass(frozen=True)
class Everyone:
    """All clients, every round: the paper's setting. With `available`, all that can be reached.

    >>> from fmol.federation import Client, ClientList
    >>> three = ClientList(Client(id, data=None, objectives=("a",)) for id in ("x", "z", "y"))
    >>> Everyone().cohort(three, ["a"], round=0, seed=0)
    ('x', 'y', 'z')
    """

    available: Availability | None = None

    def __post_init__(self) -> None:
        _check_available(self.available)

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        ids = population.ids()
        everyone = (ids[i] for i in range(len(ids)))
        return tuple(sorted(filter(_Reachable(self.available, round, seed), everyone)))


@dataclass(frozen=True)
class Fraction:
    """A share of all clients, rounded to the nearest number but at least one, drawn uniformly.

    `available` and `attempts` are as in `Number`; the share is of all clients, reachable or not.

    >>> from fmol.federation import Client, ClientList
    >>> ten = ClientList(Client(id, data=None, objectives=("a",)) for id in "abcdefghij")
    >>> Fraction(0.3).cohort(ten, ["a"], round=0, seed=0)
    ('a', 'e', 'i')
    """

    share: float
    available: Availability | None = None
    attempts: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"`share` must be above 0 and at most 1, got {self.share!r}. "
                "Use Number(count) for a fixed number of clients."
            )
        _check_available(self.available)
        _check_whole("attempts", self.attempts)

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        # Half rounds up: Python's own rounding would take 2 of 5 clients for a half, and 4 of 7.
        wanted = max(1, int(self.share * len(population) + 0.5))
        return _uniform(population, wanted, round, seed, self.available, self.attempts)


@dataclass(frozen=True)
class Number:
    """`count` clients drawn uniformly without replacement; everyone if there are not so many.

    Where a drawn client is not `available` another is drawn in its place, up to
    `attempts · count` clients in all; after that the cohort is smaller than `count`, or empty.
    So a cohort costs O(count) even if nearly everyone is out of reach.

    >>> from fmol.federation import Client, ClientList
    >>> ten = ClientList(Client(id, data=None, objectives=("a",)) for id in "abcdefghij")
    >>> Number(3).cohort(ten, ["a"], round=0, seed=0)
    ('a', 'e', 'i')
    >>> Number(3, available=lambda client, round: client > "d").cohort(ten, ["a"], round=0, seed=0)
    ('e', 'h', 'i')
    """

    count: int
    available: Availability | None = None
    attempts: int = 20

    def __post_init__(self) -> None:
        _check_whole("count", self.count)
        _check_available(self.available)
        _check_whole("attempts", self.attempts)

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        return _uniform(population, self.count, round, seed, self.available, self.attempts)


@dataclass(frozen=True)
class Stratified:
    """`count` clients among which every objective has at least `per_objective` holders.

    Holders are drawn first, the rarest objective's before the others' (a client drawn for one
    objective counts for all it holds), and uniform draws from all clients fill up to `count`. An
    objective with fewer holders than `per_objective` brings all of them; where the holders drawn are
    more than `count` the cohort is larger (they are drawn by chance and are not the smallest set
    that would do). `available` and `attempts` are as in `Number`; an objective none of whose
    holders can be reached stays without.

    The price is a bias: holders of a rare objective take part more often than others, so their data
    weigh more in the other objectives they hold, which a uniform cohort would not do. The
    population is asked for each client drawn as a holder, to learn what else it holds.

    >>> from fmol.federation import Client, ClientList
    >>> rare = Client("z", data=None, objectives=("rare",))
    >>> clients = ClientList([rare, *(Client(id, None, ("common",)) for id in "abcdefgh")])
    >>> Stratified(3).cohort(clients, ["common", "rare"], round=0, seed=0)
    ('c', 'e', 'z')
    """

    count: int
    per_objective: int = 1
    available: Availability | None = None
    attempts: int = 20

    def __post_init__(self) -> None:
        _check_whole("count", self.count)
        _check_whole("per_objective", self.per_objective)
        _check_available(self.available)
        _check_whole("attempts", self.attempts)

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        reachable = _Reachable(self.available, round, seed)
        attempts = 1 if self.available is None else self.attempts
        drawn: set[str] = set()
        covered: Counter[str] = Counter()
        # By rarity and name, so that the order of `objectives` changes nothing.
        for name in sorted(objectives, key=lambda name: (len(population.holders(name)), name)):
            holders = population.holders(name)
            needed = min(self.per_objective, len(holders)) - covered[name]
            # Of the clients drawn, as many as `covered` says can come up again.
            tries = needed * attempts + covered[name]
            generator = stream(seed, "cohort", round, name)
            for client in _draw(generator, holders, needed, tries, drawn, reachable):
                drawn.add(client)
                covered.update({name, *population.get(client).objectives})
        ids = population.ids()
        missing = min(self.count, len(ids)) - len(drawn)
        tries = missing * attempts + len(drawn)
        drawn.update(_draw(stream(seed, "cohort", round), ids, missing, tries, drawn, reachable))
        return tuple(sorted(drawn))


def _uniform(
    population: Population,
    count: int,
    round: int,
    seed: int,
    available: Availability | None,
    attempts: int,
) -> tuple[str, ...]:
    reachable = _Reachable(available, round, seed)
    ids = population.ids()
    wanted = min(count, len(ids))
    tries = wanted if available is None else wanted * attempts
    return tuple(sorted(_draw(stream(seed, "cohort", round), ids, wanted, tries, (), reachable)))


def _draw(
    generator: np.random.Generator,
    ids: Sequence[str],
    wanted: int,
    tries: int,
    taken: Container[str],
    reachable: Callable[[str], bool],
) -> list[str]:
    """Up to `wanted` of `ids` that are reachable and not `taken`, from at most `tries` draws."""
    drawn: list[str] = []
    if wanted <= 0:
        return drawn
    for i in sample_without_replacement(generator, len(ids), tries):
        client = ids[i]
        if client not in taken and reachable(client):
            drawn.append(client)
            if len(drawn) == wanted:
                break
    return drawn


class _Reachable:
    """Whether a client can be reached in a round."""

    def __init__(self, available: Availability | None, round: int, seed: int) -> None:
        self._available, self._round, self._seed = available, round, seed
        if available is not None:
            self._generator = stream(seed, "available", round)

    def __call__(self, client: str) -> bool:
        available, round = self._available, self._round
        if available is None:
            return True
        if isinstance(available, Mapping):
            if client not in available:
                raise ValueError(
                    f"client `{client}` is not in `available`. Give its probability, or a function "
                    "of (client, round) in place of the mapping."
                )
            chance = available[client]
        elif callable(available):
            chance = available(client, round)
            if isinstance(chance, bool | np.bool_):
                return bool(chance)
            _check_probability(f"available({client!r}, {round})", chance)
        else:
            chance = available
        restart(self._generator, self._seed, "available", round, client)
        return bool(self._generator.random() < chance)


def _check_available(available: Availability | None) -> None:
    if isinstance(available, Mapping):
        for client, chance in available.items():
            _check_probability(f"available[{client!r}]", chance)
    elif available is not None and not callable(available):
        _check_probability("available", available)


def _check_probability(name: str, chance: object) -> None:
    if not (isinstance(chance, float | int | np.number) and 0 <= chance <= 1):
        raise ValueError(
            f"`{name}` must be a probability from 0 to 1, got {chance!r}. "
            "Give a number, a mapping from client id to a number, or a function of (client, round)."
        )


def _check_whole(name: str, value: object) -> None:
    if not (isinstance(value, int | np.integer) and value >= 1):
        raise ValueError(
            f"`{name}` must be a whole number of at least 1, got {value!r}. Ask for one or more."
        )
