"""Step sizes that change from round to round: plain callables `round -> lr`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fmol.options import NotNegative

__all__ = ["Cosine", "InverseSqrt", "Schedule", "StepDecay", "Warmup", "at"]

Schedule = NotNegative | Callable[[int], float]
"""A number, or anything that turns the round's number (from 0) into one."""


def at(schedule: Schedule, round: int, name: str) -> float:
    """The step size of `round`; `name` is the option that is named when it is not usable."""
    value = schedule(round) if callable(schedule) else schedule
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"`{name}` is {value!r} in round {round}. A step size must be finite and not negative."
        )
    return float(value)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` of a schedule must be positive, got {value!r}.")


@dataclass(frozen=True)
class Cosine:
    """From `start` down to `end` along half a cosine over `rounds`, then `end`.

    >>> [round(Cosine(0.1, rounds=2)(t), 3) for t in range(4)]
    [0.1, 0.05, 0.0, 0.0]
    """

    start: float
    rounds: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("rounds", self.rounds)

    def __call__(self, round: int) -> float:
        share = min(round / self.rounds, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class StepDecay:
    """`start`, multiplied by `factor` every `every` rounds."""

    start: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("every", self.every)

    def __call__(self, round: int) -> float:
        return float(self.start * self.factor ** (round // self.every))


@dataclass(frozen=True)
class InverseSqrt:
    """`start / √(1 + round/scale)`: the decay of the stochastic theorems."""

    start: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("scale", self.scale)

    def __call__(self, round: int) -> float:
        return self.start / math.sqrt(1 + round / self.scale)


@dataclass(frozen=True)
class Warmup:
    """Rises in equal steps over the first `rounds` to what `then` gives, then follows it."""

    then: Schedule
    rounds: int

    def __post_init__(self) -> None:
        _check_positive("rounds", self.rounds)

    def __call__(self, round: int) -> float:
        value = self.then(round) if callable(self.then) else self.then
        return value * min((round + 1) / self.rounds, 1.0)
