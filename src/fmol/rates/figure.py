"""The measured rates as one figure: a panel per entry of Table 1, the theory's slope dashed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fmol.figures import DASHES, OKABE_ITO, house_style, new_figure, save_figure, set_log_scale
from fmol.rates.cases import CASES, Case
from fmol.rates.measuring import RatesResult

__all__ = ["write_figure"]

BESIDE = {
    "fsmgda-strongly-convex": ("fsmgda-strongly-convex-conflict",),
    "fsmgda-nonconvex": ("fsmgda-nonconvex-fixed-batch",),
}
"""Panel → the cases that are drawn into it as well."""


def write_figure(
    folder: str | os.PathLike[str], result: RatesResult, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """The files written to `folder`: `rates` in each format. The same result gives the same bytes."""
    measured = {case.name for case in result.cases}
    beside = {name for names in BESIDE.values() for name in names}
    panels = [case for case in result.cases if case.name not in beside]
    if not panels:  # Asked for by name, without the entry of Table 1 it belongs to.
        panels = list(result.cases)
    with house_style("write_figure"):
        columns = min(2, len(panels))
        rows = math.ceil(len(panels) / columns)
        figure = new_figure(3.7 * columns, 3.5 * rows)
        grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
        for axes, case in zip(grid, panels, strict=False):
            more = [name for name in BESIDE.get(case.name, ()) if name in measured]
            _draw_panel(axes, result, case, [] if case.name in beside else more)
        for unused in grid[len(panels) :]:
            unused.remove()
        return save_figure(figure, folder, "rates", formats)


def _draw_panel(axes: Any, result: RatesResult, case: Case, more: Sequence[str]) -> None:
    values = result.values(case.name)
    slope, unit = result.slope(case.name), "" if case.axes == "log-log" else " a round"
    spread = "" if math.isinf(slope.half_width) else f" ± {slope.half_width:.2g}"
    drawn = _draw_values(axes, values, f"measured: slope {slope.value:.3g}{spread}{unit}", 0)
    expected = result.expected(case.name)
    if expected is not None:
        _draw_reference(axes, values, expected, case)
    others = {name: result.values(case.name, name) for name in _beside(result, case)}
    for name in more:
        kind = CASES[name].title.removeprefix(f"{case.title}, ")
        others[f"{CASES[name].measure}, {kind}"] = result.values(name)
    look = 0
    for label, other in others.items():
        if all(value > 0 for row in other.values() for value in row):
            look += 1
            drawn += _draw_values(axes, other, label, look)
    bounds = result.margins(case.name)
    if bounds:
        means = [margin * float(np.mean(values[rounds])) for rounds, margin in bounds.items()]
        axes.plot(list(bounds), means, color="#666666", lw=0.9, ls=":", label="bound, repaired")
        drawn += means
    if case.axes == "log-log":
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(values), [str(rounds) for rounds in values])
        axes.minorticks_off()
    set_log_scale(axes, min(drawn), max(drawn))
    unit = "loss" if case.measure.endswith("Δ_Q") else "gradient²"
    axes.set_title(f"{case.title}: {case.rate}" if case.rate else case.title, loc="left")
    axes.set(xlabel="T (communication rounds)", ylabel=f"{case.measure} ({unit})")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=7.0)


def _beside(result: RatesResult, case: Case) -> Sequence[str]:
    return list(next(iter(result.of(case.name).values()))[0].beside)


def _draw_values(axes: Any, values: dict[int, list[float]], label: str, look: int) -> list[float]:
    """Draws means over seeds, and a band from the least to the greatest; gives what it reaches."""
    rounds = list(values)
    means = [float(np.mean(values[each])) for each in rounds]
    low = [min(values[each]) for each in rounds]
    high = [max(values[each]) for each in rounds]
    colour, dashes = OKABE_ITO[look], DASHES[look % len(DASHES)]
    axes.plot(rounds, means, color=colour, ls=dashes, marker="os^D"[look % 4], ms=3.5, label=label)
    axes.fill_between(rounds, low, high, color=colour, alpha=0.18, lw=0)
    return low + high


def _draw_reference(axes: Any, values: dict[int, list[float]], expected: float, case: Case) -> None:
    """A dashed line of the theory's slope, through the measured points' middle."""
    rounds = np.array(list(values), dtype=float)
    along = np.log(rounds) if case.axes == "log-log" else rounds
    logs = np.log([np.mean(values[int(each)]) for each in rounds])
    line = np.exp(logs.mean() + expected * (along - along.mean()))
    unit = "" if case.axes == "log-log" else " a round"
    # A little above, or it would lie on what it is there to be compared with.
    axes.plot(
        rounds, 1.6 * line, color="#000000", ls="--", lw=1.0, label=f"theory: {expected:.3g}{unit}"
    )
