"""Table 1: measured slopes beside the theory's."""

from __future__ import annotations

from dataclasses import replace

from fmol.rates import RatesResult, measure_rates
from fmol.rates.cases import SETTINGS
from fmol.rates.figure import write_figure
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Cost,
    Experiment,
    Outcome,
    Place,
    Records,
    Size,
    Table,
)
from fmol.theory.slopes import Slope

__all__ = ["RATES", "tabulate"]

TOLERANCE = 0.15
"""How far, relative to it, a slope may be from the theory's."""


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    result = measure_rates(small=size.small, seeds=size.seeds, out=place.folder, say=place.say)
    found = tabulate(result)
    figures = write_figure(place.folder, result)
    return replace(found, figures=figures, settings=SETTINGS)


def tabulate(result: RatesResult) -> Outcome:
    """Slopes, a cell for each case with a value for each seed, and whether they are the theory's."""
    rows, claims = {}, []
    for case in result.cases:
        slope, expected = result.slope(case.name), result.expected(case.name)
        rows[case.title] = [Cell(tuple(result.slopes(case.name)), expected)]
        if expected is not None and case.rate:
            claims.append(
                Claim(
                    f"{case.title}: {case.rate}",
                    _near(slope, expected),
                    f"slope {slope}, theory {expected:.4g}",
                )
            )
    table = Table("slope of the measure [theory's]", ("slope",), rows)
    return Outcome([table], claims)


def _near(slope: Slope, expected: float) -> bool:
    """Whether it falls as fast as theory says, but for a little."""
    return abs(slope.value - expected) <= TOLERANCE * abs(expected)


RATES = Experiment(
    "rates",
    "Convergence rates (Table 1)",
    "Every T is a run of its own with the corollary's step sizes for that T, on quadratics and on "
    "sums of waves whose constants are known; batches grow where the corollary needs it. "
    "`fmol rates` is the same by itself, and docs/theory.md explains it.",
    (),
    _conclude,
    cost=Cost("19 s", gpu="none needed", cpu="13 min (shared)"),
    seeds=5,
    small_seeds=3,
)
