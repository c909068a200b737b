"""Which preferences a front is made of, and how each becomes the config of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmol import rng
from fmol.config import CHOICES, Config, ConfigError, find_source, read_config, toml_value
from fmol.options import list_options, nearest, parse_text
from fmol.rules import Rule

__all__ = ["METHODS", "Method", "default_points", "read_methods", "spread_preferences"]

Array = NDArray[np.float64]

METHODS: Mapping[str, tuple[str, str]] = {
    "weights": ("fixed", "weights"),
    "tchebycheff": ("tchebycheff", "preference"),
    "near-prior": ("near-prior", "prior"),
    "upgrad": ("upgrad", "preference"),
}
"""What a method is called → the rule it trains with, and the rule's option that takes a preference."""
CANDIDATES = 4096
"""Random preferences among which those are chosen that are furthest from the ones there are."""


def default_points(objectives: int) -> int:
    """How many preferences there are where nothing is said: for two and three, those of a lattice.

    >>> default_points(2), default_points(3), default_points(8)
    (11, 15, 20)
    """
    return {2: 11, 3: 15}.get(objectives, objectives + 12)


def spread_preferences(objectives: int, count: int, seed: int = 0) -> Array:
    """`count` preferences `[count, S]` spread over the simplex, each row summing to one.

    First the largest lattice that fits: its corners are the objectives by themselves. What is left are
    points as far from all others as can be, the equal preference before any. With fewer than S there
    are no corners: the equal preference, and points far from it and from one another. `seed` is for
    these alone.

    >>> spread_preferences(2, 3).tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    >>> len(spread_preferences(3, 15)), len(spread_preferences(8, 20))
    (15, 20)
    """
    if objectives < 2 or count < 2:
        raise ValueError(
            f"a front needs at least 2 objectives and 2 points, got {objectives} and {count}."
        )
    parts = 0
    while math.comb(parts + objectives, objectives - 1) <= count:
        parts += 1
    chosen = list(_lattice(objectives, parts)) if parts else []
    equal = np.full(objectives, 1 / objectives)
    if len(chosen) < count and not any(np.allclose(equal, each) for each in chosen):
        chosen.append(equal)
    if len(chosen) < count:
        drawn = rng.stream(seed, "front").dirichlet(np.ones(objectives), CANDIDATES)
        away = np.min([np.linalg.norm(drawn - each, axis=1) for each in chosen], axis=0)
        while len(chosen) < count:
            furthest = int(away.argmax())
            chosen.append(drawn[furthest])
            away = np.minimum(away, np.linalg.norm(drawn - drawn[furthest], axis=1))
    return np.array(chosen)


def _lattice(objectives: int, parts: int) -> Iterator[Array]:
    """Every division of `parts` among the objectives, the first objective's share falling."""

    def divide(left: int, places: int) -> Iterator[tuple[int, ...]]:
        if places == 1:
            yield (left,)
            return
        for mine in range(left, -1, -1):
            yield from ((mine, *rest) for rest in divide(left - mine, places - 1))

    for shares in divide(parts, objectives):
        yield np.array(shares) / parts


@dataclass(frozen=True)
class Method:
    """A way to train with a preference."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the rule, beside the preference."""

    def config(
        self, tables: Mapping[str, Any], flags: Mapping[str, str], preference: Mapping[str, float]
    ) -> Config:
        """The config of one point: what a file and a command line say, with this preference."""
        source = find_source(tables, flags)
        options = list_options(source.algorithm_kind)
        if "rule" in options:
            rule, option = METHODS[self.name]
            value = toml_value({"name": rule, **self.options, option: dict(preference)})
            return read_config(tables, {**flags, "rule": value})
        return read_config(tables, {**flags, "weights": toml_value(dict(preference))})

    def problems(self, tables: Mapping[str, Any], flags: Mapping[str, str]) -> Iterator[str]:
        """What keeps this method from setting preferences of the algorithm, in words."""
        source = find_source(tables, flags)
        options = list_options(source.algorithm_kind)
        if source.algorithm == "alone":
            yield "`alone` trains a model for each client: there is no front. Take another algorithm."
            return
        if "rule" not in options and (self.name != "weights" or self.options):
            yield (
                f"`{source.algorithm}` takes fixed weights and no rule, got the method `{self.name}`. "
                "Use `--method weights`, or an algorithm with a rule."
            )
        given = tables.get("algorithm")
        said = set(flags) | set(given if isinstance(given, Mapping) else ())
        for option in ("rule", "weights"):
            if option in said and option in options:
                yield (
                    f"`{option}` is what a front sets for each of its points. Leave it out, and name "
                    "the rule with `--method`."
                )


def read_methods(texts: Sequence[str]) -> list[Method]:
    """The methods as a command line or a file names them, with the rule's other options behind.

    >>> read_methods(["weights", "near-prior,radius=0.2"])[1]
    Method(name='near-prior', options={'radius': 0.2})
    """
    methods: list[Method] = []
    problems: list[str] = []
    for text in texts:
        read = parse_text(Mapping[str, Any], text) if "=" in text else {"name": text}
        name = str(read.pop("name", ""))
        if name not in METHODS:
            hint = nearest(name, METHODS)
            problems.append(
                f"`method` must be one of {list(METHODS)}, got {text!r}."
                + (f" Did you mean `{hint}`?" if hint else "")
            )
            continue
        rule, option = METHODS[name]
        known = [each for each in list_options(CHOICES[Rule][rule]) if each != option]
        unknown = [each for each in read if each not in known]
        if unknown:
            problems.append(
                f"`method` {name} has the options {known}, got {unknown[0]!r}."
                + (" The preference is set for each point." if unknown[0] == option else "")
            )
        elif any(each.name == name for each in methods):
            problems.append(
                f"`method` names {name} twice. Take two folders for two settings of it."
            )
        else:
            methods.append(Method(name, read))
    if problems:
        raise ConfigError(problems)
    return methods or [Method("weights")]
