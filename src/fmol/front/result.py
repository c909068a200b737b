"""What a front came to: its points, which of them are beaten, and how much they cover together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmol import __version__
from fmol.errors import MisuseError
from fmol.files import write_whole
from fmol.report.data import better
from fmol.runs.folder import plain_numbers
from fmol.tradeoffs import Hypervolume, exact_limit, hypervolume, non_dominated

__all__ = ["LOSS", "RESULTS", "Front", "FrontPoint", "write_front"]

Array = NDArray[np.float64]

RESULTS = "front.json"
LOSS = "loss"
"""The measure that every run has: the training loss."""
HELD_OUT_LOSS = "held-out-loss"
MARGIN = 0.1
"""How far beyond the worst value a suggested reference is, as a share of the range."""


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """One trained model of a front."""

    method: str
    index: int
    """Which of the preferences it was trained with."""
    preference: Mapping[str, float]
    seed: int
    run: str
    """The name of its run folder."""
    rounds: int
    stopped: str
    losses: Mapping[str, float]
    """Training losses of the trained model."""
    held_out: Mapping[str, Mapping[str, float]]
    stationarity: Mapping[str, float]
    """`norm_squared`, `relative` and `common_cosine` at the trained model."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Trained models, one per method, preference and seed, measured by one number per objective."""

    objectives: tuple[str, ...]
    points: tuple[FrontPoint, ...]
    measure: str = LOSS
    """The training loss, `held-out-loss`, or a held-out metric by its name."""
    reference: Mapping[str, float] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The config that all points share, as tables."""

    def __post_init__(self) -> None:
        for point in self.points:
            for name in self.objectives:
                if math.isnan(self._value(point, name)):
                    known = sorted({m for row in point.held_out.values() for m in row} - {"loss"})
                    held_out = [HELD_OUT_LOSS, *known] if point.held_out else []
                    raise MisuseError(
                        f"run `{point.run}` has no {self.measure!r} of objective `{name}`. What is "
                        f"measured of it is {[LOSS, *held_out]}: set `measure` to one of them."
                    )
        if self.measure not in (LOSS, HELD_OUT_LOSS) and not better(self.measure):
            raise MisuseError(
                f"`measure` is {self.measure!r}, whose name does not tell whether more of it is "
                "better. Take a loss, or call it by a name that does, as accuracy or error."
            )

    @property
    def maximise(self) -> bool:
        """Whether more of the measure is better."""
        return self.measure not in (LOSS, HELD_OUT_LOSS) and better(self.measure) == "higher"

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.method for point in self.points))

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({point.seed for point in self.points}))

    def rows(self) -> list[tuple[FrontPoint, ...]]:
        """The points of one method and preference together, a seed each."""
        found: dict[tuple[str, int], list[FrontPoint]] = {}
        for point in self.points:
            found.setdefault((point.method, point.index), []).append(point)
        return [tuple(sorted(row, key=lambda point: point.seed)) for row in found.values()]

    def values(self, rows: Sequence[Sequence[FrontPoint]] | None = None) -> Array:
        """The measure `[n, S]` of each of `rows` (all), means over seeds."""
        return np.array(
            [
                [fmean(self._value(point, name) for point in row) for name in self.objectives]
                for row in (self.rows() if rows is None else rows)
            ]
        ).reshape(-1, len(self.objectives))

    def kept(self) -> NDArray[np.bool_]:
        """Which rows no other one dominates, whatever its method, `[n]`."""
        return non_dominated(self.values(), self.maximise)

    def hypervolumes(self) -> dict[str, list[Hypervolume]]:
        """Method → the hypervolume of its points, a seed each; empty without a reference.

        Where that would take too long to be exact it is an estimate, and says so.
        """
        if self.reference is None:
            return {}
        corner = [self.reference[name] for name in self.objectives]
        found: dict[str, list[Hypervolume]] = {}
        for method in self.methods:
            for seed in self.seeds:
                own = [(p,) for p in self.points if p.method == method and p.seed == seed]
                limit = exact_limit(len(self.objectives))
                slow = limit is not None and len(own) > limit
                found.setdefault(method, []).append(
                    hypervolume(self.values(own), corner, maximise=self.maximise, estimate=slow)
                )
        return found

    def suggested_reference(self) -> dict[str, float]:
        """A point a little worse than every trained model: the worst value of each objective, as it
        mostly is where another one was trained by itself, and a tenth of the range beyond."""
        values = self.values()
        best, worst = values.min(axis=0), values.max(axis=0)
        if self.maximise:
            best, worst = worst, best
        beyond = worst + MARGIN * (worst - best)
        return {
            name: float(f"{value:.3g}") for name, value in zip(self.objectives, beyond, strict=True)
        }

    def summary(self) -> dict[str, Any]:
        """What a report cannot tell from the runs themselves: measure, reference and hypervolume."""
        return {
            "measure": self.measure,
            "reference": self.reference,
            "hypervolume": {
                method: {
                    "value": fmean(each.value for each in found),
                    "exact": all(each.exact for each in found),
                    "beyond": sum(len(each.beyond) for each in found),
                    "seeds": len(found),
                }
                for method, found in self.hypervolumes().items()
            },
        }

    def _value(self, point: FrontPoint, name: str) -> float:
        if self.measure == LOSS:
            return point.losses.get(name, math.nan)
        metric = "loss" if self.measure == HELD_OUT_LOSS else self.measure
        return point.held_out.get(name, {}).get(metric, math.nan)


def read_reference(
    reference: Mapping[str, float] | float, objectives: Sequence[str]
) -> dict[str, float]:
    """The reference by objective; raises where it is not one finite number for each."""
    given = reference
    if not isinstance(given, Mapping):
        given = dict.fromkeys(objectives, given)
    unknown = [name for name in given if name not in objectives]
    absent = [name for name in objectives if name not in given]
    if unknown or absent:
        raise ValueError(
            f"`reference` must have a number for each of {list(objectives)}, got {dict(given)}. "
            + (f"Take out `{unknown[0]}`." if unknown else f"Add `{absent[0]}`.")
        )
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value)):
            raise ValueError(
                f"`reference` for objective `{name}` must be a finite number, got {value!r}."
            )
    return {name: float(given[name]) for name in objectives}


def write_front(path: Path, front: Front, command: str = "") -> None:
    """Writes every number of the front with the settings it was made with."""
    kept = front.kept()
    volumes = front.hypervolumes()
    content = {
        "fmol": __version__,
        "command": command,
        "measure": front.measure,
        "maximise": front.maximise,
        "objectives": list(front.objectives),
        "reference": front.reference,
        "hypervolume": {
            method: [asdict(each) for each in found] for method, found in volumes.items()
        },
        "settings": dict(front.settings),
        "points": [
            {**asdict(point), "dominated": not good}
            for row, good in zip(front.rows(), kept.tolist(), strict=True)
            for point in row
        ],
    }
    text = json.dumps(plain_numbers(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")
