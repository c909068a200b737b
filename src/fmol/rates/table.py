"""Measured rates as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fmol.rates.cases import Case
from fmol.rates.measuring import RatesResult

__all__ = ["rates_table"]


def rates_table(result: RatesResult) -> list[str]:
    """A line per case: Table 1's rate, its slope, the measured one, and how far bounds are above."""
    rows = [["", "Table 1", "slope", "measured, 95 %", "bound/measured", "measure"]]
    for case in result.cases:
        rows.append(_row(result, case, ""))
        for beside in next(iter(result.of(case.name).values()))[0].beside:
            try:
                rows.append(_row(result, case, beside))
            except ValueError:  # A last iterate may be below x*: no logarithm, no slope.
                continue
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if any(case.axes == "log-linear" for case in result.cases):
        lines.append("Slopes are of log over log T; the linear rate's are of log over T, a round.")
    return lines


def _row(result: RatesResult, case: Case, beside: str) -> list[str]:
    slope = result.slope(case.name, beside)
    expected = None if beside else result.expected(case.name)
    interval = "" if math.isinf(slope.half_width) else f" ± {_number(slope.half_width)}"
    return [
        "" if beside else case.title,
        "" if beside else case.rate,
        "" if expected is None else _number(expected),
        f"{_number(slope.value)}{interval}",
        "" if beside else _margins(result, case.name),
        beside or case.measure,
    ]


def _margins(result: RatesResult, case: str) -> str:
    """The least over `T`, repaired and printed: above 1, the inequality holds throughout."""
    found: Sequence[float] = [
        min(margins.values())
        for version in ("repaired", "printed")
        if (margins := result.margins(case, version))
    ]
    return " / ".join(f"{each:.3g}" for each in found)


def _number(value: float) -> str:
    text = f"{value:.3f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.1g}"
    return text.replace("-", "−")
