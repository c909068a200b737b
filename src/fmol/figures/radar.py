"""Losses around a circle, a spoke per objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fmol.figures.curves import Array, losses_of
from fmol.figures.style import look, new_figure, short
from fmol.grouping import RunGroup

__all__ = ["draw_radar"]

MOST_LEVEL = 12
"""Names that have room around the circle; of more, they stand like spokes."""


def draw_radar(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    """The figure; None where there are less than three spokes or two rings.

    Rings are the losses of one group at several rounds, or of several groups at their last.
    """
    tables = [_mean_losses(group, names) for group in groups]
    if not all(len(table) for table in tables):
        return None
    if len(groups) == 1:
        (known,) = tables
        chosen = sorted({round((len(known) - 1) * share) for share in (0, 1 / 16, 1 / 4, 1)})
        rings = [(f"round {known[i][0]}", known[i][1]) for i in chosen]
        first, scale = known[0]
        title = f"loss / loss at round {first}"
    else:
        rings = [(group.label, table[-1][1]) for group, table in zip(groups, tables, strict=True)]
        scale, title = np.max([values for _, values in rings], axis=0), "last loss / worst run's"
    usable = np.flatnonzero(np.isfinite(scale) & (scale > 0)).tolist()
    if len(usable) < 3 or len(rings) < 2:
        return None
    return _draw_rings(
        [short(names[i], 16) for i in usable],
        [(label, values[usable] / scale[usable]) for label, values in rings],
        title,
        over_time=len(groups) == 1,
    )


def _mean_losses(group: RunGroup, names: Sequence[str]) -> list[tuple[int, Array]]:
    """(round, mean losses over seeds) wherever all were measured."""
    losses = [losses_of(record, names) for record in group.records]
    length = min(len(each) for each in losses)
    mean = np.mean([each[:length] for each in losses], axis=0)
    return [(t, row) for t, row in enumerate(mean) if np.isfinite(row).all()]


def _draw_rings(
    names: Sequence[str], rings: Sequence[tuple[str, Array]], title: str, over_time: bool
) -> Any:
    import matplotlib as mpl

    angles = np.linspace(0.0, 2.0 * np.pi, len(names), endpoint=False)
    size = 4.0 if len(names) <= MOST_LEVEL else 5.2
    figure = new_figure(size + 1.3, size)
    axes = figure.add_subplot(projection="polar")
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    lines = []
    for i, (label, values) in enumerate(rings):
        looks = look(i)
        if over_time:
            # One thing that changes: light to dark, as time goes on.
            shade = mpl.colormaps["viridis_r"](0.15 + 0.85 * i / (len(rings) - 1))
            looks = {"color": shade, "linestyle": "-"}
        around = np.append(values, values[0])
        (line,) = axes.plot(np.append(angles, angles[0]), around, label=label, lw=1.5, **looks)
        if over_time and i == len(rings) - 1:
            axes.fill(angles, values, color=looks["color"], alpha=0.12, lw=0)
        lines.append(line)
    top = max(float(values.max()) for _, values in rings)
    axes.set_ylim(0.0, 1.05 * top)
    _name_spokes(axes, names, angles, 1.09 * top)
    quarters = (0.25, 0.5, 0.75, 1.0)
    steps = [share if top <= 1.5 else top * share for share in quarters]
    axes.set_yticks(steps, [f"{step:.2g}" for step in steps], fontsize=6.5, color="#666666")
    axes.set_rlabel_position(180.0 / len(names))
    axes.spines["polar"].set_color("#CCCCCC")
    axes.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(1.15 if len(names) <= MOST_LEVEL else 1.22, 1.1),
        title=title,
        alignment="left",
        title_fontsize=8.0,
    )
    return figure


def _name_spokes(axes: Any, names: Sequence[str], angles: Array, radius: float) -> None:
    """Names begin or end at the circle; many of them stand like spokes, so that none overlap."""
    many = len(names) > MOST_LEVEL
    axes.set_xticks(angles, [""] * len(names))
    for name, angle in zip(names, angles, strict=True):
        right, middle = angle < np.pi, bool(np.isclose(np.sin(angle), 0.0))
        degrees = 90.0 - float(np.degrees(angle))
        axes.text(
            angle,
            radius,
            name,
            fontsize=6.5 if many else 8.0,
            rotation=(degrees if right else degrees + 180.0) if many else 0.0,
            rotation_mode="anchor",
            ha="center" if middle and not many else "left" if right else "right",
            va=("bottom" if np.cos(angle) > 0 else "top") if middle and not many else "center",
        )
