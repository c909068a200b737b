"""All figures of one run or of several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fmol.figures.direction import draw_direction
from fmol.figures.losses import draw_communication, draw_losses
from fmol.figures.radar import draw_radar
from fmol.figures.saving import save_figure
from fmol.figures.style import MOST_CHARACTERS, house_style, short
from fmol.figures.trade_off import draw_trade_off
from fmol.figures.weights import draw_weights
from fmol.grouping import group_records
from fmol.record import RunRecord

__all__ = ["write_figures"]


def write_figures(
    folder: str | os.PathLike[str],
    records: Sequence[RunRecord],
    formats: Sequence[str] = ("png", "svg"),
    *,
    pair: tuple[str, str] | None = None,
) -> list[Path]:
    """The files written to `folder`: each figure that these runs have numbers for, in each format.

    `losses`, `weights`, `direction`, `radar` (from three objectives on), `trade_off` (for `pair`, or
    the first two objectives) and `communication`. For one run, or several that differ in their seed
    alone, there is a line per objective; for several kinds of runs a panel per objective. Lines are
    means over seeds, bands go from the least to the greatest. The same runs give the same bytes.
    """
    _check(records, pair)
    groups = [
        replace(group, label=short(group.label, 2 * MOST_CHARACTERS))
        for group in group_records(records)
    ]
    names = records[0].portrait.objectives
    drawings: dict[str, Callable[[], Any]] = {
        "losses": lambda: draw_losses(groups, names),
        "weights": lambda: draw_weights(groups, names),
        "direction": lambda: draw_direction(groups),
        "radar": lambda: draw_radar(groups, names),
        "trade_off": lambda: draw_trade_off(groups, names, pair),
        "communication": lambda: draw_communication(groups, names),
    }
    written: list[Path] = []
    with house_style("write_figures"):
        for name, draw in drawings.items():
            figure = draw()
            if figure is not None:
                written += save_figure(figure, folder, name, formats)
    return written


def _check(records: Sequence[RunRecord], pair: tuple[str, str] | None) -> None:
    if not records:
        raise ValueError("`records` is empty. Give at least one run.")
    names = records[0].portrait.objectives
    for record in records:
        if record.portrait.objectives != names:
            raise ValueError(
                f"run `{record.name}` has the objectives {list(record.portrait.objectives)}, and run "
                f"`{records[0].name}` has {list(names)}. Draw runs of one problem together."
            )
    unknown = [name for name in pair or () if name not in names]
    if unknown:
        raise ValueError(
            f"`pair` names objective `{unknown[0]}`, which the runs do not have. "
            f"Their objectives are {list(names)}."
        )
