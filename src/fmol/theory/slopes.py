"""Slopes of measured curves, with the uncertainty that seeds leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np

__all__ = ["Slope", "fit_slope", "seed_slopes", "student"]

T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantiles of Student's t for 1, 2, … degrees of freedom; of the normal, 1.960, beyond."""


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with so many degrees of freedom."""
    return T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.960


@dataclass(frozen=True)
class Slope:
    """A slope: its mean over the seeds, and a 95 % interval of that mean."""

    value: float
    low: float
    high: float
    seeds: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, slope: float) -> bool:
        return self.low <= slope <= self.high

    def __str__(self) -> str:
        spread = "" if math.isinf(self.half_width) else f" ± {self.half_width:.2g}"
        return f"{self.value:.4g}{spread}"


def fit_slope(
    values: Mapping[int, Sequence[float]], axes: Literal["log-log", "log-linear"] = "log-log"
) -> Slope:
    """The slope of `log(value)` over `log(T)`, or over `T`, with its uncertainty.

    The interval is Student's over the seeds' slopes; infinite for one seed.

    >>> print(fit_slope({10: [0.1, 0.3], 100: [0.01, 0.02], 1000: [0.001, 0.001]}))
    -1.119 ± 1.5
    """
    slopes = seed_slopes(values, axes)
    mean, seeds = fmean(slopes), len(slopes)
    if seeds == 1:
        return Slope(mean, -math.inf, math.inf, 1)
    half = student(seeds - 1) * stdev(slopes) / math.sqrt(seeds)
    return Slope(mean, mean - half, mean + half, seeds)


def seed_slopes(
    values: Mapping[int, Sequence[float]], axes: Literal["log-log", "log-linear"] = "log-log"
) -> list[float]:
    """The slope of each seed's own least-squares line.

    `values` has for each `T` one value per seed, always of the same seeds: numbers of one seed at
    different `T` share their randomness, those of different seeds do not.
    """
    rounds = sorted(values)
    counts = {len(values[each]) for each in rounds}
    if len(rounds) < 2 or len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"`values` must have at least two numbers of rounds with one value per seed each, got "
            f"{ {each: len(values[each]) for each in rounds} }."
        )
    for each in rounds:
        for seed, value in enumerate(values[each]):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"`values` has {value!r} at T = {each} (entry {seed}), which has no logarithm. "
                    "Measure something positive, as means of squares are."
                )
    along = np.array(rounds, dtype=float)
    if axes == "log-log":
        along = np.log(along)
    logs = np.log(np.array([list(values[each]) for each in rounds], dtype=float))  # [T, seeds]
    away = along - along.mean()
    return [float(slope) for slope in away @ logs / (away @ away)]
