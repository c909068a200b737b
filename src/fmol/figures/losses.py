"""Losses over rounds, and over what was sent for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fmol.figures.axes import count_rounds, draw_curve, legend_beside, scale_to
from fmol.figures.curves import Curve, loss_curves
from fmol.figures.panels import draw_panels
from fmol.figures.style import MOST_COLOURS, look, new_figure, short
from fmol.grouping import RunGroup

__all__ = ["draw_communication", "draw_losses"]


def draw_losses(groups: Sequence[RunGroup], names: Sequence[str], megabytes: bool = False) -> Any:
    """The figure, over rounds or megabytes; None where no loss was measured.

    A line per objective for one group; for several a panel per objective with a line per group, or
    of many objectives panels of the worst, the median and the best.
    """
    curves = [loss_curves(group, names, megabytes=megabytes) for group in groups]
    if not any(curve for each in curves for curve in each):
        return None
    xlabel, ylabel = "sent by all, both ways (MB)" if megabytes else "round t", "training loss"
    if len(groups) == 1:
        figure = new_figure(5.2, 3.2)
        panels = [figure.add_subplot()]
        _draw_objectives(panels[0], names, curves[0])
        panels[0].set(xlabel=xlabel, ylabel=ylabel)
        scaled_to: list[Sequence[Curve | None]] = [curves[0]]
    else:
        titles = [short(name) for name in names]
        if len(names) > MOST_COLOURS:
            titles = ["worst objective", "median objective", "best objective"]
            curves = [
                loss_curves(group, names, megabytes=megabytes, spread=True) for group in groups
            ]
        figure, panels = draw_panels(groups, titles, curves, xlabel, ylabel)
        scaled_to = list(zip(*curves, strict=True))
    for axes, drawn in zip(panels, scaled_to, strict=True):
        scale_to(axes, drawn)
        if megabytes:
            axes.margins(x=0.0)
        else:
            count_rounds(axes)
    return figure


def draw_communication(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    """The figure; None where nothing was sent."""
    sent = [r.bytes_up + r.bytes_down for g in groups for each in g.records for r in each.reports]
    return draw_losses(groups, names, megabytes=True) if any(sent) else None


def _draw_objectives(axes: Any, names: Sequence[str], curves: Sequence[Curve | None]) -> None:
    """A line per objective: each its own look if they are few, else shades and the extremes' names."""
    drawn = [(name, curve) for name, curve in zip(names, curves, strict=True) if curve is not None]
    by_last = sorted(drawn, key=lambda each: -float(each[1].mean[-1]))
    if len(drawn) <= MOST_COLOURS:  # Of many objectives few may have been measured.
        shown = names if len(names) <= MOST_COLOURS else [name for name, _ in drawn]
        looks = {name: look(i) for i, name in enumerate(shown)}
        lines = {n: draw_curve(axes, c, short(n), **looks[n]) for n, c in drawn}
        # In the order in which the lines end, so that the eye finds each beside its name.
        legend_beside(axes, [lines[name] for name, _ in by_last])
        return
    import matplotlib as mpl

    shades = mpl.colormaps["viridis"]
    named = {name for name, _ in [*by_last[:4], *by_last[-4:]]}
    handles = []
    for place, (name, curve) in enumerate(by_last):
        colour = shades(0.92 * place / (len(by_last) - 1))
        strong = name in named
        (line,) = axes.plot(
            curve.x,
            curve.mean,
            color=colour,
            lw=1.5 if strong else 0.7,
            alpha=1.0 if strong else 0.55,
            zorder=3 if strong else 2,
            label=short(name),
        )
        if strong:
            handles.append(line)
        if place == 3:
            (gap,) = axes.plot([], [], lw=0, label=f"⋮  {len(by_last) - 8} more")
            handles.append(gap)
    legend_beside(axes, handles, "by last loss")
