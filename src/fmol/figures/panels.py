"""Several groups of runs side by side: a panel for each of some things, one legend for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fmol.figures.axes import draw_curve
from fmol.figures.curves import Curve
from fmol.figures.style import MOST_CHARACTERS, look, new_figure
from fmol.grouping import RunGroup

__all__ = ["draw_panels"]


def draw_panels(
    groups: Sequence[RunGroup],
    titles: Sequence[str],
    curves: Sequence[Sequence[Curve | None]],
    xlabel: str,
    ylabel: str,
    *,
    sharey: bool = False,
    **style: Any,
) -> tuple[Any, list[Any]]:
    """The figure and its axes: a panel per title, with a line per group of those in `curves`.

    `curves` has a row per group with a curve per title.
    """
    figure, panels = _grid(len(titles), sharey)
    for s, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for i, (group, row) in enumerate(zip(groups, curves, strict=True)):
            curve = row[s]
            if curve is not None:
                draw_curve(axes, curve, group.label, **look(i), **style)
        axes.set_title(title, loc="left")
    figure.supxlabel(xlabel, fontsize=9.0)
    figure.supylabel(ylabel, fontsize=9.0)
    _legend_above(figure, groups)
    return figure, panels


def _grid(count: int, sharey: bool) -> tuple[Any, list[Any]]:
    columns = min(count, 3 if count != 4 else 2)
    rows = math.ceil(count / columns)
    figure = new_figure(0.5 + (2.7 if columns < 3 else 2.2) * columns, 0.7 + 1.8 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    panels = list(grid.ravel())
    for unused in panels[count:]:
        unused.remove()
    for place, axes in enumerate(panels[:count]):
        # The lowest of each column keeps its numbers, also above an empty place.
        axes.tick_params(labelbottom=place + columns >= count)
    return figure, panels[:count]


def _legend_above(figure: Any, groups: Sequence[RunGroup]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=group.label, **look(i)) for i, group in enumerate(groups)]
    seeds = max(len(group.records) for group in groups)
    title = f"mean and range of {seeds} seeds" if seeds > 1 else None
    columns = 1 if max(len(group.label) for group in groups) > MOST_CHARACTERS else 4
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=min(len(groups), columns),
        title=title,
        title_fontsize=8.0,
    )
