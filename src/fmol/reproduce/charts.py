"""Figures of an experiment: panels of curves, radar charts, and columns of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fmol.figures import DASHES, OKABE_ITO, house_style, new_figure, save_figure, set_log_scale
from fmol.reproduce.experiment import Dots, Outcome, Panel, Radar

__all__ = ["write_charts"]

MOST_BAND = 50
"""Points of a band around a line; it is most of a figure's bytes, and only says how seeds differ."""
MOST_WITHIN = 4
"""Lines whose names have room within a panel; those of more stand below all panels."""
FEW_POINTS = 8
"""A line of no more has a mark at each: one between two gaps would not be seen otherwise."""
SPREAD = 0.32
"""How far to either side the dots of a column are spread, columns being 1 apart."""
LEGEND, LEGEND_WIDE = 46, 64
"""Characters beside one another below a radar chart, and below one with many objectives."""
MANY_AXES = 16
"""From so many objectives on, their names are set along the rays."""


def write_charts(
    folder: Path, outcome: Outcome, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """The files written: `curves`, `radar` and `dots` in each format, where there is something to
    draw."""
    written: list[Path] = []
    with house_style("reproduce"):
        if outcome.panels:
            written += save_figure(_draw_panels(outcome.panels), folder, "curves", formats)
        if outcome.radars:
            written += save_figure(_draw_radars(outcome.radars), folder, "radar", formats)
        if outcome.dots:
            written += save_figure(_draw_dots(outcome.dots), folder, "dots", formats)
    return written


def _draw_panels(panels: Sequence[Panel]) -> Any:
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    apart = max(len(panel.lines) for panel in panels) > MOST_WITHIN
    figure = new_figure(3.8 * columns, 3.1 * rows + (0.18 * len(labels) / 2 if apart else 0))
    grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
    drawn: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=False):
        looks = labels if apart else [line.label for line in panel.lines]
        lines = _draw_panel(axes, panel, looks)
        drawn |= lines
        if lines and not apart:
            axes.legend()
    for unused in grid[len(panels) :]:
        unused.remove()
    if drawn and apart:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns)
    return figure


def _draw_panel(axes: Any, panel: Panel, looks: Sequence[str]) -> dict[str, Any]:
    """The lines that were drawn, by label; how each looks goes by its place among `looks`."""
    drawn: list[float] = []
    lines, places = {}, set()
    for line in panel.lines:
        # Runs that reached their target ended there: beyond the shortest there is no mean.
        length = min(len(row) for row in line.y)
        values = np.array([list(row[:length]) for row in line.y], dtype=float)
        values = np.where(np.isfinite(values) & ((values > 0) | (not panel.log)), values, np.nan)
        if not np.isfinite(values).all(0).any():
            continue  # A name without a line would say nothing.
        x = np.asarray(line.x[:length], dtype=float)
        mean = np.exp(np.log(values).mean(0)) if panel.log else values.mean(0)
        look = looks.index(line.label)
        colour, dashes = OKABE_ITO[look % len(OKABE_ITO)], DASHES[look % len(DASHES)]
        marker = "o" if len(x) <= FEW_POINTS else None
        (lines[line.label],) = axes.plot(
            x, mean, color=colour, ls=dashes, marker=marker, ms=3, label=line.label
        )
        places.update(x.tolist())
        if len(values) > 1:
            low, high = values.min(0), values.max(0)
            few = slice(None, None, math.ceil(len(x) / MOST_BAND))
            axes.fill_between(x[few], low[few], high[few], color=colour, alpha=0.15, lw=0)
        drawn += values[np.isfinite(values)].tolist()
    if panel.log and drawn:
        set_log_scale(axes, min(drawn), max(drawn))
    if len(places) <= FEW_POINTS:
        axes.set_xticks(sorted(places))
    axes.set_title(panel.title, loc="left")
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    return lines


def _draw_radars(radars: Sequence[Radar]) -> Any:
    columns = min(2, len(radars))
    rows = math.ceil(len(radars) / columns)
    side = 5.6 if max(len(radar.axes) for radar in radars) >= MANY_AXES else 4.2
    figure = new_figure(side * columns, (side + 0.5) * rows)
    grid = list(
        figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": "polar"}).ravel()
    )
    for axes, radar in zip(grid, radars, strict=False):
        _draw_radar(axes, radar)
    for unused in grid[len(radars) :]:
        unused.remove()
    return figure


def _draw_radar(axes: Any, radar: Radar) -> None:
    angles = np.linspace(0, 2 * np.pi, len(radar.axes), endpoint=False)
    closed = np.append(angles, angles[0])
    for look, (label, values) in enumerate(radar.rings.items()):
        ring = np.array([*values, values[0]], dtype=float)
        colour = OKABE_ITO[look % len(OKABE_ITO)]
        axes.plot(closed, ring, color=colour, ls=DASHES[look % len(DASHES)], label=label)
    axes.set_theta_offset(np.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_xticks(angles)
    many = len(radar.axes) >= MANY_AXES
    axes.set_xticklabels([] if many else [name.replace("_", " ") for name in radar.axes])
    found = [value for values in radar.rings.values() for value in values]
    top = max(filter(math.isfinite, found), default=1.0)
    axes.set_ylim(0, 1.05 * top)
    axes.set_rlabel_position(90 / max(len(radar.axes), 1))
    axes.tick_params(labelsize=7)
    if many:
        for angle, name in zip(angles, radar.axes, strict=True):
            turn = 90 - math.degrees(angle)
            flip = angle > np.pi
            axes.text(
                angle, 1.09 * top, name.replace("_", " "),
                rotation=turn + 180 if flip else turn, rotation_mode="anchor",
                ha="right" if flip else "left", va="center", fontsize=6.5,
            )  # fmt: skip
    else:
        # Names beside the circle begin where it ends, or end where it begins.
        for angle, text in zip(angles, axes.get_xticklabels(), strict=True):
            side = math.sin(angle)
            text.set_ha("center" if abs(side) < 0.1 else "left" if side > 0 else "right")
    axes.set_title(radar.title, pad=92 if many else 16)
    # As many labels in a row as the chart is wide: a wider legend would take the chart's place.
    longest = max(map(len, radar.rings)) + len("───  ")
    columns = max(1, min(len(radar.rings), (LEGEND_WIDE if many else LEGEND) // longest))
    below = (0.5, -0.27 if many else -0.1)
    axes.legend(loc="upper center", bbox_to_anchor=below, ncols=columns)


def _draw_dots(charts: Sequence[Dots]) -> Any:
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = new_figure(4.4 * columns, 3.2 * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
    drawn: dict[str, Any] = {}
    for axes, chart in zip(grid, charts, strict=False):
        drawn |= _draw_columns(axes, chart)
    for unused in grid[len(charts) :]:
        unused.remove()
    if drawn:
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn))
    return figure


def _draw_columns(axes: Any, chart: Dots) -> dict[str, Any]:
    """Marks of their own for what is below 1 and above, so that it can be told without colours."""
    drawn: dict[str, Any] = {}
    reached, labels = [1.0], []
    for place, (label, things) in enumerate(chart.columns.items()):
        means = sorted(map(_mean_ratio, things.values()))
        found = np.array([value for value in means if math.isfinite(value)])
        lost = sum(map(math.isinf, means))
        labels.append(f"{label}\n({lost} infinite)" if lost else label)
        if not len(found):
            continue
        reached += [float(found[0]), float(found[-1])]
        # By turns left and right of the middle, so that neighbours in height stand apart.
        beside = np.arange(len(found)) * 0.618034 % 1.0
        x = place + SPREAD * (2 * beside - 1)
        for words, those, colour, mark in (
            ("better", found < 1, OKABE_ITO[0], "o"),
            ("worse", found >= 1, OKABE_ITO[1], "^"),
        ):
            if those.any():
                drawn[words] = axes.scatter(
                    x[those], found[those], s=11, marker=mark, color=colour, alpha=0.65, lw=0
                )
        (drawn["median"],) = axes.plot(
            [place - 0.4, place + 0.4], [float(np.median(found))] * 2, color="#000000", lw=1.6
        )
    axes.axhline(1.0, color="#666666", lw=0.9, ls="--", zorder=0)
    set_log_scale(axes, min(reached), max(reached))
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_title(chart.title, loc="left")
    axes.set(ylabel=chart.ylabel)
    return drawn


def _mean_ratio(values: Sequence[float]) -> float:
    """The geometric mean over the seeds that have this."""
    there = [value for value in values if not math.isnan(value)]
    if not there or not all(map(math.isfinite, there)):
        return math.inf if there else math.nan
    return math.exp(fmean(math.log(max(value, 1e-12)) for value in there))
