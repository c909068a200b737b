"""The numbers of a round by name, the same for everyone who follows a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from fmol.alarms import Alarm
from fmol.measurement import Evaluation
from fmol.metrics import conflict
from fmol.result import Snapshot
from fmol.rounds import RoundReport

__all__ = ["Beginnings", "Traffic", "final_scalars", "scalars"]


def scalars(report: RoundReport, spell: Callable[[str], str] = str) -> dict[str, float]:
    """Name → what was measured in a round, without its clients; no NaN.

    `conflict` is the share of pairs of objectives whose updates point against each other. `spell`
    gives the names of objectives and metrics as a store can keep them.
    """
    found = dict(_standing(report.losses, report.held_out, spell))
    for kind, values in [
        ("weight", report.weights),
        ("delta_norm", report.delta_norms),
        ("spread", report.spread),
        ("extrapolation", report.extrapolation),
        ("seconds", report.seconds),
    ]:
        found |= {f"{kind}/{spell(name)}": value for name, value in values.items()}
    found |= {
        "direction/norm_squared": report.direction_norm_squared,
        "direction/gap": report.gap,
        "direction/min_cosine": report.min_cosine,
        "direction/scale": report.scale,
        "direction/true_norm_squared": report.true_direction_norm_squared,
        "direction/stationarity": report.stationarity,
        "direction/optimality_gap": report.optimality_gap,
        "conflict": _conflict(report),
        "opposed_pairs": _opposed_pairs(report),
        "step/norm_squared": report.step_norm_squared,
        "step/min_cosine": report.step_min_cosine,
        "step/local_lr": report.local_lr,
        "step/server_lr": report.server_lr,
        "cohort/size": float(len(report.cohort)),
        "cohort/silent": float(len(report.silent)),
        "cohort/refused": float(len(report.refused)),
        "objectives/missing": float(len(report.missing)),
        "objectives/protected": float(len(report.protected)),
        "objectives/alarms": float(len(report.alarms)),
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def final_scalars(final: Evaluation, spell: Callable[[str], str] = str) -> dict[str, float]:
    """The same names for how the trained model stands."""
    found = _standing(final.losses, final.held_out, spell)
    return {name: value for name, value in found if not math.isnan(value)}


def _standing(
    losses: Mapping[str, float],
    held_out: Mapping[str, Mapping[str, float]],
    spell: Callable[[str], str],
) -> Iterator[tuple[str, float]]:
    for name, loss in losses.items():
        yield f"loss/train/{spell(name)}", loss
    for name, metrics in held_out.items():
        for metric, value in metrics.items():
            yield f"held_out/{spell(metric)}/{spell(name)}", value


def _conflict(report: RoundReport) -> float:
    known = conflict(report)
    return math.nan if known is None else float(known)


def _opposed_pairs(report: RoundReport) -> float:
    """The share of pairs of objectives whose updates point against each other."""
    size = len(report.cosines)
    values = report.cosines.tolist()
    pairs = [values[i][j] for i in range(size) for j in range(i)]
    known = [cosine for cosine in pairs if not math.isnan(cosine)]
    return sum(cosine < 0 for cosine in known) / len(known) if known else math.nan


class Traffic:
    """Adds up what went over the wire, from the run's first round even if it was resumed later."""

    def __init__(self) -> None:
        self._sums: dict[str, float] | None = None

    def add(self, report: RoundReport, snapshot: Snapshot) -> dict[str, float]:
        """`communication/bytes_up` and `bytes_down` up to and including this round."""
        if self._sums is None:
            # Asked for once: a checkpoint of many clients' states is not free.
            before = snapshot.checkpoint().reports[:-1] if report.round else ()
            self._sums = {
                "communication/bytes_up": float(sum(each.bytes_up for each in before)),
                "communication/bytes_down": float(sum(each.bytes_down for each in before)),
            }
        self._sums["communication/bytes_up"] += report.bytes_up
        self._sums["communication/bytes_down"] += report.bytes_down
        return dict(self._sums)


class Beginnings:
    """Tells alarms and refusals that begin from those that go on: each is worth saying once."""

    def __init__(self) -> None:
        self._alarms: set[tuple[str, str]] = set()
        self._refused: set[tuple[str, str]] = set()

    def of(self, report: RoundReport) -> tuple[list[Alarm], list[str]]:
        """The alarms and, in words, the refusals that did not stand after the round before."""
        alarms = [a for a in report.alarms if (a.kind, a.objective) not in self._alarms]
        refused = [r for r in report.refused if (r.client, r.objective) not in self._refused]
        self._alarms = {(a.kind, a.objective) for a in report.alarms}
        self._refused = {(r.client, r.objective) for r in report.refused}
        return alarms, [str(r) for r in refused]
