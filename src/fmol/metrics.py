"""Numbers about a run: means over clients, and everything as one long table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fmol.engines.seam import ClientRecord

if TYPE_CHECKING:
    from fmol.rounds import RoundReport

__all__ = ["Row", "conflict", "conflict_rate", "mean_held_out", "mean_losses", "rows"]

NAN = float("nan")

ROUNDING = 1e-6
"""Reports keep cosines in single precision; what is within this of zero may be either side of it."""


class Row(NamedTuple):
    """One number. `client` and `objective` are empty where it is not about one."""

    round: int
    split: str
    """`train`, `held_out`, or `server` for what is neither."""
    client: str
    objective: str
    name: str
    value: float


def mean_losses(
    records: Sequence[ClientRecord], names: Sequence[str], weighting: str
) -> dict[str, float]:
    """`f_s`: the mean of the clients' losses per objective; NaN where nobody measured it."""
    values: dict[str, list[tuple[float, int]]] = {name: [] for name in names}
    for record in records:
        values[record.objective].append((record.loss, record.samples))
    return {name: _mean(values[name], weighting) for name in names}


def mean_held_out(
    records: Sequence[ClientRecord], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Mean over clients of each metric on their own held-out data, by objective."""
    values: dict[str, dict[str, list[tuple[float, int]]]] = {name: {} for name in names}
    for record in records:
        for metric, value in record.held_out.items():
            values[record.objective].setdefault(metric, []).append((value, 1))
    return {
        name: {metric: _mean(each, "uniform") for metric, each in metrics.items()}
        for name, metrics in values.items()
        if metrics
    }


def _mean(values: Iterable[tuple[float, int]], weighting: str) -> float:
    # Clients come sorted by id, so the order of the sum does not depend on anything else.
    known = [(v, n if weighting == "samples" else 1) for v, n in values if not math.isnan(v)]
    weight = sum(n for _, n in known)
    return sum(v * n for v, n in known) / weight if weight else NAN


def conflict(report: RoundReport) -> bool | None:
    """Whether equal weights would have hurt some objective: `⟨Δ_i, Σ_j Δ_j⟩ < 0` for some `i`.

    A round without it needs no multi-objective rule: the plain sum descends every objective, to first
    order. Only objectives with an update count. None where there is none to tell from, as with
    FedAvg, whose clients send one update for all objectives.
    """
    names = list(report.losses)
    norms = torch.tensor([report.delta_norms.get(n, NAN) for n in names], dtype=torch.float64)
    present = norms.isfinite()
    if not bool(present.any()) or report.cosines.shape != (len(names), len(names)):
        return None
    lengths = norms[present]
    # A zero update has no angle to any other, and nothing can hurt it.
    cosines = report.cosines.double().cpu()[present][:, present].nan_to_num(nan=0.0)
    # [S], divided by ‖Δ_i‖, which does not change the sign and cannot underflow.
    pull = cosines @ lengths
    return bool((pull < -ROUNDING * lengths.sum()).any())


def conflict_rate(reports: Iterable[RoundReport]) -> float:
    """The share of rounds with a `conflict`, among those that can tell; NaN if none can."""
    known = [found for found in map(conflict, reports) if found is not None]
    return sum(known) / len(known) if known else NAN


def rows(report: RoundReport) -> Iterator[Row]:
    """Everything a report measured, as rows of one long table; what was not measured is left out."""
    for row in _all_rows(report):
        if not math.isnan(row.value):
            yield row


def _all_rows(report: RoundReport) -> Iterator[Row]:
    t = report.round
    for name in report.losses:
        yield Row(t, "train", "", name, "loss", report.losses[name])
        yield Row(t, "server", "", name, "weight", report.weights.get(name, NAN))
        yield Row(t, "server", "", name, "delta_norm", report.delta_norms.get(name, NAN))
        yield Row(t, "server", "", name, "spread", report.spread.get(name, NAN))
        yield Row(t, "server", "", name, "extrapolation", report.extrapolation.get(name, NAN))
        yield Row(t, "server", "", name, "missing", float(name in report.missing))
        yield Row(t, "server", "", name, "protected", float(name in report.protected))
        for metric, value in report.held_out.get(name, {}).items():
            yield Row(t, "held_out", "", name, metric, value)
    yield from _pairs(report)
    for name in (
        "direction_norm_squared",
        "gap",
        "min_cosine",
        "stationary",
        "step_norm_squared",
        "step_min_cosine",
        "scale",
        "held",
        "local_lr",
        "server_lr",
        "bytes_up",
        "bytes_down",
        "true_direction_norm_squared",
        "stationarity",
        "optimality_gap",
    ):
        yield Row(t, "server", "", "", name, float(getattr(report, name)))
    found = conflict(report)
    yield Row(t, "server", "", "", "conflict", NAN if found is None else float(found))
    yield Row(t, "server", "", "", "refused", float(len(report.refused)))
    yield Row(t, "server", "", "", "alarms", float(len(report.alarms)))
    for phase, seconds in report.seconds.items():
        yield Row(t, "server", "", "", f"seconds_{phase}", seconds)
    seen: set[str] = set()
    for record in report.clients:
        yield Row(t, "train", record.client, record.objective, "loss", record.loss)
        yield Row(t, "train", record.client, record.objective, "samples", float(record.samples))
        yield Row(t, "train", record.client, record.objective, "delta_norm", record.delta_norm)
        for metric, value in record.held_out.items():
            yield Row(t, "held_out", record.client, record.objective, metric, value)
        if record.client not in seen:
            seen.add(record.client)
            yield Row(t, "server", record.client, "", "seconds", record.seconds)
            yield Row(t, "server", record.client, "", "bytes_up", float(record.bytes_up))
            yield Row(t, "server", record.client, "", "bytes_down", float(record.bytes_down))


def _pairs(report: RoundReport) -> Iterator[Row]:
    names = list(report.losses)
    if report.cosines.shape != (len(names), len(names)):
        return
    values = report.cosines.tolist()
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            yield Row(report.round, "server", "", first, f"cosine:{names[j]}", values[i][j])
