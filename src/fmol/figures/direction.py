"""How long the common direction is over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmol.figures.axes import count_rounds, draw_curve, legend_beside, scale_to
from fmol.figures.curves import Curve, each_round, mean_curve
from fmol.figures.style import look, new_figure
from fmol.grouping import RunGroup

__all__ = ["draw_direction"]

KINDS = {"direction_norm_squared": "‖d‖²", "stationarity": "‖d*‖², true gradients"}
"""Number of a round's report → what it is called."""


def draw_direction(groups: Sequence[RunGroup]) -> Any:
    """The figure, of the true gradients' too where they were measured; None where there is neither."""
    drawn: list[tuple[Curve, str, int, int]] = []
    for i, group in enumerate(groups):
        for j, (kind, words) in enumerate(KINDS.items()):
            curve = mean_curve([each_round(record, kind) for record in group.records])
            if curve is not None:
                drawn.append((curve, words if len(groups) == 1 else group.label, i, j))
    if not drawn:
        return None
    figure = new_figure(4.6, 3.0)
    axes = figure.add_subplot()
    lines = []
    for curve, label, i, j in drawn:
        looks = look(i if len(groups) > 1 else j)
        label = f"{label}, ‖d*‖²" if len(groups) > 1 and j else label
        lines.append(draw_curve(axes, curve, label, **looks, lw=0.9 if j and i else 1.3))
    scale_to(axes, [curve for curve, *_ in drawn])
    axes.set(xlabel="round t", ylabel="squared length of the direction ‖d‖²")
    count_rounds(axes)
    if len(drawn) > 1:
        legend_beside(axes, lines)
    return figure
