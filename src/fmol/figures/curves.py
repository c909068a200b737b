"""What is drawn of runs: their numbers round by round, and the means of several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fmol.grouping import RunGroup
from fmol.record import RunRecord

__all__ = [
    "Array",
    "Curve",
    "each_round",
    "loss_curves",
    "losses_of",
    "mean_curve",
    "megabytes_of",
    "weights_of",
]

Array = npt.NDArray[np.float64]

MEGABYTE = 1e6


@dataclass(frozen=True)
class Curve:
    """A number over something else: its mean over the seeds, and the least and greatest."""

    x: Array
    mean: Array
    low: Array
    high: Array


def losses_of(record: RunRecord, names: Sequence[str]) -> Array:
    """`[rounds + 1, S]`, NaN where not measured; without the last row for a run that has not ended."""
    rows = np.full((record.rounds + (record.final is not None), len(names)), math.nan)
    for report in record.reports:
        rows[report.round] = [report.losses[name] for name in names]
    if record.final is not None:
        rows[-1] = [record.final.losses[name] for name in names]
    return rows


def weights_of(record: RunRecord, names: Sequence[str]) -> Array:
    """`[rounds, S]`, NaN where an objective had none."""
    rows = np.full((record.rounds, len(names)), math.nan)
    for report in record.reports:
        rows[report.round] = [report.weights.get(name, math.nan) for name in names]
    return rows


def megabytes_of(record: RunRecord) -> Array:
    """`[rounds + 1]`: what had gone over the wire, both ways, when the model stood at `x_t`."""
    sent = np.zeros(record.rounds)
    for report in record.reports:
        sent[report.round] = report.bytes_up + report.bytes_down
    return np.concatenate([[0.0], np.cumsum(sent)]) / MEGABYTE


def each_round(record: RunRecord, field: str) -> Array:
    """`[rounds]`: one of the numbers that a round's report has, NaN where there is none."""
    values = np.full(record.rounds, math.nan)
    for report in record.reports:
        values[report.round] = getattr(report, field)
    return values


def mean_curve(values: Sequence[Array], along: Sequence[Array] | None = None) -> Curve | None:
    """One number per round of several runs, as one curve over the rounds that all of them have."""
    length = min(len(each) for each in values)
    stacked = np.stack([each[:length] for each in values])
    known = ~np.isnan(stacked).any(axis=0)
    if not known.any():
        return None
    x = np.arange(length, dtype=np.float64)
    if along is not None:
        x = np.mean([each[:length] for each in along], axis=0)
    stacked = stacked[:, known]
    return Curve(x[known], stacked.mean(axis=0), stacked.min(axis=0), stacked.max(axis=0))


def loss_curves(
    group: RunGroup, names: Sequence[str], *, megabytes: bool, spread: bool = False
) -> list[Curve | None]:
    """The group's loss of each objective over rounds, or over megabytes.

    With `spread` it is the worst, the median and the best of the objectives' losses.
    """
    losses = [losses_of(record, names) for record in group.records]
    if spread:
        losses = [_worst_median_best(each) for each in losses]
    along = [megabytes_of(record) for record in group.records] if megabytes else None
    return [mean_curve([each[:, s] for each in losses], along) for s in range(losses[0].shape[1])]


def _worst_median_best(losses: Array) -> Array:
    """`[rounds, 3]` of `[rounds, S]`."""
    return np.stack([losses.max(axis=1), np.median(losses, axis=1), losses.min(axis=1)], axis=1)
