"""The weights of the objectives over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fmol.figures.axes import count_rounds, legend_beside
from fmol.figures.curves import Array, Curve, mean_curve, weights_of
from fmol.figures.panels import draw_panels
from fmol.figures.style import MOST_COLOURS, OKABE_ITO, new_figure, short
from fmol.grouping import RunGroup

__all__ = ["draw_weights"]

ROUND, WEIGHT = "round t", "weight λ"


def draw_weights(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    """The figure; None where there is one objective, or nothing was weighed.

    Shares of a whole for one group, a panel per objective for several; a map of shades where there
    are many objectives.
    """
    weights = [[weights_of(record, names) for record in group.records] for group in groups]
    if len(names) < 2 or not any(np.isfinite(w).any() for each in weights for w in each):
        return None
    if len(names) > MOST_COLOURS:
        return _draw_maps(groups, names, weights)
    curves = [[mean_curve([w[:, s] for w in each]) for s in range(len(names))] for each in weights]
    if len(groups) == 1:
        figure = new_figure(5.2, 3.2)
        axes = figure.add_subplot()
        handles = _stack_shares(axes, names, curves[0])
        legend_beside(axes, handles)
        axes.set(xlabel=ROUND, ylabel=WEIGHT, ylim=(0.0, 1.0))
        axes.grid(visible=False)
        count_rounds(axes)
        return figure
    titles = [short(name) for name in names]
    figure, panels = draw_panels(groups, titles, curves, ROUND, WEIGHT, sharey=True, lw=1.2)
    for axes in panels:
        axes.set_ylim(-0.02, 1.02)
        count_rounds(axes)
    return figure


def _stack_shares(axes: Any, names: Sequence[str], curves: Sequence[Curve | None]) -> list[Any]:
    """Shares of a whole, one on the other; the legend from top to bottom as they lie."""
    drawn = [(i, curve) for i, curve in enumerate(curves) if curve is not None]
    layers = axes.stackplot(
        drawn[0][1].x,
        [curve.mean for _, curve in drawn],
        labels=[short(names[i]) for i, _ in drawn],
        colors=[OKABE_ITO[i] for i, _ in drawn],
        step="mid",
        linewidth=0.3,
        edgecolor="white",
    )
    return list(reversed(layers))


def _draw_maps(
    groups: Sequence[RunGroup], names: Sequence[str], weights: Sequence[Sequence[Array]]
) -> Any:
    """Objectives by rounds, the weight as a shade, one map per group."""
    means = []
    for each in weights:
        length = min(len(w) for w in each)
        means.append(np.mean([w[:length] for w in each], axis=0).T)
    height = min(1.0 + 0.13 * len(names), 9.0)
    figure = new_figure(1.8 + 3.4 * len(groups), height)
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)
    top = max(float(np.nanmax(mean)) for mean in means)
    image = None
    for axes, group, mean in zip(grid.ravel(), groups, means, strict=True):
        image = axes.imshow(
            mean,
            aspect="auto",
            interpolation="nearest",
            cmap="cividis",
            vmin=0.0,
            vmax=top,
            extent=(-0.5, mean.shape[1] - 0.5, len(names) - 0.5, -0.5),
        )
        axes.grid(visible=False)
        axes.set_xlabel(ROUND)
        if len(groups) > 1:
            axes.set_title(group.label, loc="left")
        count_rounds(axes)
    every = math.ceil(len(names) / 60)
    places = range(0, len(names), every)
    grid[0, 0].set_yticks(list(places), [short(names[i]) for i in places], fontsize=6.0)
    figure.colorbar(image, ax=list(grid.ravel()), label=WEIGHT, pad=0.015, aspect=40)
    return figure
