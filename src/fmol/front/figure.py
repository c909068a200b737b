"""A front as a figure: two objectives against each other, or all of them side by side."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmol.figures import OKABE_ITO, house_style, new_figure, save_figure
from fmol.front.result import HELD_OUT_LOSS, LOSS, Front

__all__ = ["write_front_figure"]

Array = NDArray[np.float64]

MARKERS = "os^D"
MOST_PAIRS = 4
"""Objectives of which every pair has a panel; of more, there are parallel coordinates."""
GREY = "#999999"


def write_front_figure(
    folder: str | os.PathLike[str], front: Front, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """The files written to `folder`: `front` in each format. The same front gives the same bytes.

    Up to four objectives there is a panel for each pair of them, of more a line per point over all.
    Points that another one dominates are hollow, or dashed and grey. Axes are linear: what weights can
    reach, and hypervolume, are seen on no others.
    """
    with house_style("write_front_figure"):
        draw = _draw_pairs if len(front.objectives) <= MOST_PAIRS else _draw_parallel
        return save_figure(draw(front), folder, "front", formats)


def _unit(front: Front) -> str:
    words = {LOSS: "training loss", HELD_OUT_LOSS: "held-out loss"}
    return words.get(front.measure, f"held-out {front.measure}")


def _short(name: str) -> str:
    return name if len(name) <= 26 else f"{name[:25]}…"


def _draw_pairs(front: Front) -> Any:
    pairs = list(itertools.combinations(range(len(front.objectives)), 2))
    columns = min(3, len(pairs))
    rows = math.ceil(len(pairs) / columns)
    size = 4.4 if len(pairs) == 1 else 3.0
    figure = new_figure(size * columns + 1.4, 0.86 * size * rows)
    grid = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes, pair in zip(grid, pairs, strict=False):
        _draw_pair(axes, front, pair)
    for unused in grid[len(pairs) :]:
        unused.remove()
    figure.legend(
        handles=_legend(front), loc="outside right upper", alignment="left", borderaxespad=0.0
    )
    return figure


def _draw_pair(axes: Any, front: Front, pair: tuple[int, int]) -> None:
    rows, values, kept = front.rows(), front.values(), front.kept()
    for look, method in enumerate(front.methods):
        mine = np.array([row[0].method == method for row in rows])
        colour = OKABE_ITO[look % len(OKABE_ITO)]
        if len(front.objectives) == 2:
            line = values[mine & kept]
            line = line[line[:, 0].argsort(kind="stable")]
            axes.plot(*line.T, color=colour, lw=0.9, alpha=0.6, zorder=2)
        for good in (True, False):
            chosen = values[mine & (kept == good)][:, list(pair)]
            axes.plot(*chosen.T, **_mark(look, colour, good))
        if len(front.seeds) > 1:
            _draw_seeds(axes, front, method, pair, colour)
    if front.reference is not None:
        corner = np.array([[front.reference[name] for name in front.objectives]])
        axes.plot(*corner[:, list(pair)].T, "x", color="#000000", ms=6, mew=1.4, zorder=5)
    axes.set(
        xlabel=f"{_unit(front)} of {_short(front.objectives[pair[0]])}",
        ylabel=f"{_unit(front)} of {_short(front.objectives[pair[1]])}",
    )


def _draw_seeds(axes: Any, front: Front, method: str, pair: tuple[int, int], colour: str) -> None:
    """Bars from the least to the greatest over the seeds."""
    for row in front.rows():
        if row[0].method != method or len(row) < 2:
            continue
        each = front.values([(point,) for point in row])[:, list(pair)]
        middle, low, high = each.mean(axis=0), each.min(axis=0), each.max(axis=0)
        axes.plot([low[0], high[0]], [middle[1]] * 2, color=colour, lw=0.7, alpha=0.6, zorder=1)
        axes.plot([middle[0]] * 2, [low[1], high[1]], color=colour, lw=0.7, alpha=0.6, zorder=1)


def _mark(look: int, colour: str, good: bool) -> dict[str, Any]:
    return {
        "marker": MARKERS[look % len(MARKERS)],
        "ls": "",
        "ms": 5.5,
        "color": colour,
        "mfc": colour if good else "white",
        "mew": 1.1,
        "zorder": 4 if good else 3,
    }


def _legend(front: Front) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = []
    for look, method in enumerate(front.methods):
        colour = OKABE_ITO[look % len(OKABE_ITO)]
        handles.append(Line2D([], [], label=method, **_mark(look, colour, True)))
    if not front.kept().all():
        handles.append(Line2D([], [], label="dominated", **_mark(0, "#666666", False)))
    if front.reference is not None:
        handles.append(
            Line2D([], [], marker="x", ls="", color="#000000", ms=6, mew=1.4, label="reference")
        )
    return handles


def _draw_parallel(front: Front) -> Any:
    values, kept = front.values(), front.kept()
    S = len(front.objectives)
    figure = new_figure(min(4.0 + 0.45 * S, 16.0), 3.6)
    axes = figure.add_subplot()
    rows = front.rows()
    places = np.arange(S)
    for look, method in enumerate(front.methods):
        colour = OKABE_ITO[look % len(OKABE_ITO)]
        for row, own, good in zip(rows, values, kept.tolist(), strict=True):
            if row[0].method == method:
                style = {"color": colour, "lw": 1.0, "alpha": 0.75, "zorder": 3}
                if not good:
                    style = {"color": GREY, "lw": 0.8, "ls": (0, (4, 2)), "alpha": 0.6, "zorder": 2}
                axes.plot(places, own, **style)
    if front.reference is not None:
        corner = [front.reference[name] for name in front.objectives]
        axes.plot(places, corner, "x", color="#000000", ms=5, mew=1.2, zorder=5)
    axes.set_xticks(places, [_short(name) for name in front.objectives], rotation=45, ha="right")
    axes.set(xlabel="objective", ylabel=_unit(front))
    axes.margins(x=0.02)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=OKABE_ITO[i % len(OKABE_ITO)], lw=1.2, label=method)
        for i, method in enumerate(front.methods)
    ]
    if not kept.all():
        handles.append(Line2D([], [], color=GREY, lw=1.0, ls=(0, (4, 2)), label="dominated"))
    if front.reference is not None:
        handles.append(
            Line2D([], [], marker="x", ls="", color="#000000", ms=5, mew=1.2, label="reference")
        )
    figure.legend(handles=handles, loc="outside right upper", alignment="left", borderaxespad=0.0)
    return figure
