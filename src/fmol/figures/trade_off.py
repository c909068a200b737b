"""The losses of two objectives against each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fmol.figures.axes import legend_beside, set_log_scale
from fmol.figures.curves import losses_of
from fmol.figures.style import look, new_figure, short
from fmol.grouping import RunGroup

__all__ = ["draw_trade_off"]


def draw_trade_off(
    groups: Sequence[RunGroup], names: Sequence[str], pair: tuple[str, str] | None
) -> Any:
    """The figure, of the first two objectives without a `pair`; None where they were not measured.

    The way of the losses of two objectives: hollow where it begins, full where it ends.
    """
    if pair is None and len(names) < 2:
        return None
    first, second = (list(names).index(name) for name in pair) if pair else (0, 1)
    figure = new_figure(4.6, 3.4)
    axes = figure.add_subplot()
    lines, paths = [], []
    for i, group in enumerate(groups):
        for k, record in enumerate(group.records):
            losses = losses_of(record, names)[:, [first, second]]
            path = losses[np.isfinite(losses).all(axis=1)]
            if not len(path):
                continue
            looks = look(i)
            (line,) = axes.plot(*path.T, lw=1.1, alpha=0.85, label=group.label, **looks)
            axes.plot(*path[0], "o", ms=5, mfc="white", mec=looks["color"], zorder=4)
            axes.plot(*path[-1], "o", ms=5, color=looks["color"], mec="white", mew=0.5, zorder=5)
            paths.append(path)
            if k == 0:
                lines.append(line)
    if not paths:
        return None
    for axis, values in zip("xy", np.concatenate(paths).T, strict=True):
        if (values > 0).all():
            set_log_scale(axes, float(values.min()), float(values.max()), axis)
    axes.set(
        xlabel=f"training loss of {short(names[first])}",
        ylabel=f"training loss of {short(names[second])}",
    )
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"marker": "o", "ms": 5, "lw": 0, "color": "#666666"}
    lines = lines if len(groups) > 1 else []
    lines += [
        Line2D([], [], mfc="white", label="untrained", **dot),
        Line2D([], [], label="last", **dot),
    ]
    legend_beside(axes, lines)
    return figure
