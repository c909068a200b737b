"""Static figures of one run or of several, ready for a paper."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fmol.grouping import RunGroup, group_records
from fmol.record import RunRecord

__all__ = ["house_style", "new_figure", "save_figure", "set_log_scale", "write_figures"]

Array = npt.NDArray[np.float64]

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C7A00")
"""Colours that stay apart for colour-blind eyes; the yellow darkened, so as to show on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MOST_COLOURS = len(OKABE_ITO)
MOST_CHARACTERS = 26
MEGABYTE = 1e6
CLOSE = re.compile(r"(?<=[A-Za-z]) | (?=[A-Za-z])")
"""Spaces around the letters of a path, which it does not need."""

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.0,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "svg.fonttype": "none",  # Text stays text: searchable, and set in the paper's own font.
    "svg.hashsalt": "fmol",
    "pdf.fonttype": 42,
    "figure.dpi": 200.0,
    "savefig.dpi": 200.0,
    "text.usetex": False,
    "text.parse_math": False,  # A name may hold a `$`.
}


@dataclass(frozen=True)
class Curve:
    """A number over something else: its mean over the seeds, and the least and greatest."""

    x: Array
    mean: Array
    low: Array
    high: Array


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
        replace(group, label=_short(group.label, 2 * MOST_CHARACTERS))
        for group in group_records(records)
    ]
    names = records[0].portrait.objectives
    drawings: dict[str, Callable[[], Any]] = {
        "losses": lambda: _draw_losses(groups, names),
        "weights": lambda: _draw_weights(groups, names),
        "direction": lambda: _draw_direction(groups),
        "radar": lambda: _draw_radar(groups, names),
        "trade_off": lambda: _draw_trade_off(groups, names, pair),
        "communication": lambda: _draw_communication(groups, names),
    }
    written: list[Path] = []
    with house_style("write_figures"):
        for name, draw in drawings.items():
            figure = draw()
            if figure is not None:
                written += save_figure(figure, folder, name, formats)
    return written


@contextmanager
def house_style(function: str) -> Iterator[None]:
    """Within it figures look the same on every machine; `function` is who asks, for the error."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ImportError(
            f'`{function}` needs matplotlib. Install it with: pip install "fmol[figures]".'
        ) from error
    # From matplotlib's defaults, not from the user's; the backend is the one thing that a context
    # would not put back.
    defaults: dict[Any, Any] = {k: v for k, v in mpl.rcParamsDefault.items() if "backend" not in k}
    with mpl.rc_context({**defaults, **STYLE}), warnings.catch_warnings():
        # Names in scripts that the bundled font lacks: the SVG has them as text all the same.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def save_figure(
    figure: Any, folder: str | os.PathLike[str], name: str, formats: Sequence[str]
) -> list[Path]:
    """The files written to `folder`, one per format; without a date, so that bytes can be compared."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / f"{name}.{kind}" for kind in formats]
    for path, kind in zip(written, formats, strict=True):
        figure.savefig(path, format=kind, bbox_inches="tight", metadata=_undated(kind))
        if kind == "svg":
            path.write_text(tidy_svg(path.read_text(encoding="utf-8")), encoding="utf-8")
    return written


def tidy_svg(text: str) -> str:
    """The same picture in fewer bytes: places in tenths of a point, no indentation.

    >>> tidy_svg('<g>\\n  <path d="M 12.345678 0.04\\nL 1.5 -2.25 \\nz\\n"/>')
    '<g>\\n<path d="M12.3 0L1.5 -2.2z"/>'
    """

    def tenths(text: str) -> str:
        return re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), text)

    def shorten(place: re.Match[str]) -> str:
        points = " ".join(tenths(place[2]).split())
        return f'{place[1]}"{CLOSE.sub("", points)}"'

    text = re.sub(r'(\s(?:d|x|y|transform)=)"([^"]*)"', shorten, text)
    return re.sub(r">\n\s+<", ">\n<", text)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that no window ever shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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


def _undated(kind: str) -> dict[str, Any]:
    keys = {"svg": ("Date",), "pdf": ("CreationDate",), "png": ("Software",)}
    return dict.fromkeys(keys.get(kind, ()))


def _short(name: str, most: int = MOST_CHARACTERS) -> str:
    text = name if len(name) <= most else f"{name[: most - 1]}…"
    # matplotlib leaves out of a legend what begins with an underscore.
    return f" {text}" if text.startswith("_") else text


# ---- numbers of runs ---------------------------------------------------------------------------


def _losses(record: RunRecord, names: Sequence[str]) -> Array:
    """`[rounds + 1, S]`, NaN where not measured; without the last row for a run that has not ended."""
    rows = np.full((record.rounds + (record.final is not None), len(names)), math.nan)
    for report in record.reports:
        rows[report.round] = [report.losses[name] for name in names]
    if record.final is not None:
        rows[-1] = [record.final.losses[name] for name in names]
    return rows


def _weights(record: RunRecord, names: Sequence[str]) -> Array:
    rows = np.full((record.rounds, len(names)), math.nan)
    for report in record.reports:
        rows[report.round] = [report.weights.get(name, math.nan) for name in names]
    return rows


def _megabytes(record: RunRecord) -> Array:
    """`[rounds + 1]`: what had gone over the wire, both ways, when the model stood at `x_t`."""
    sent = np.zeros(record.rounds)
    for report in record.reports:
        sent[report.round] = report.bytes_up + report.bytes_down
    return np.concatenate([[0.0], np.cumsum(sent)]) / MEGABYTE


def _each_round(record: RunRecord, field: str) -> Array:
    """`[rounds]`: one of the numbers that a round's report has, NaN where there is none."""
    values = np.full(record.rounds, math.nan)
    for report in record.reports:
        values[report.round] = getattr(report, field)
    return values


def _curve(values: Sequence[Array], along: Sequence[Array] | None = None) -> Curve | None:
    """One number per round of several runs, as one curve over the rounds that all of them have."""
    length = min(len(each) for each in values)
    stacked = np.stack([each[:length] for each in values])
    known = ~np.isnan(stacked).any(axis=0)
    if not known.any():
        return None
    x = np.arange(length, dtype=np.float64)
    if along is not None:
        x = np.mean([each[:length] for each in along], axis=0)
    stacked = stacked[:, known]
    return Curve(x[known], stacked.mean(axis=0), stacked.min(axis=0), stacked.max(axis=0))


def _curves(group: RunGroup, names: Sequence[str], megabytes: bool = False) -> list[Curve | None]:
    """The group's loss of each objective over rounds, or over megabytes."""
    losses = [_losses(record, names) for record in group.records]
    along = [_megabytes(record) for record in group.records] if megabytes else None
    return [_curve([each[:, s] for each in losses], along) for s in range(len(names))]


# ---- drawing -----------------------------------------------------------------------------------


def _look(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th of a few things: apart in colour, and in black and white."""
    return {"color": OKABE_ITO[i % MOST_COLOURS], "linestyle": DASHES[i % len(DASHES)]}


def _draw_curve(axes: Any, curve: Curve, label: str, **look: Any) -> Any:
    if (curve.low < curve.high).any():
        axes.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.18, lw=0)
    marker = "o" if len(curve.x) == 1 else None
    (line,) = axes.plot(curve.x, curve.mean, label=label, marker=marker, **look)
    return line


def _scale(axes: Any, curves: Sequence[Curve | None], axis: str = "y") -> None:
    """Logarithmic where every value allows it."""
    known = [each for each in curves if each is not None]
    if known and all((each.low > 0).all() for each in known):
        low, high = min(each.low.min() for each in known), max(each.high.max() for each in known)
        set_log_scale(axes, float(low), float(high), axis)


def set_log_scale(axes: Any, low: float, high: float, axis: str = "y") -> None:
    """Makes an axis logarithmic, with numbers to read values from `low` to `high` by."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    getattr(axes, f"set_{axis}scale")("log")
    along = getattr(axes, f"{axis}axis")
    along.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    along.set_minor_formatter(NullFormatter())
    span = high / low
    powers = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
    if powers > 2:
        along.set_major_locator(LogLocator(numticks=8))
    else:  # Too few powers of ten to read by.
        between = (1.0, 2.0, 5.0) if span > 5 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
        along.set_major_locator(LogLocator(subs=between, numticks=12))
        along.set_minor_locator(NullLocator())


def _tick(value: float) -> str:
    """A number on a logarithmic axis: 0.01, 1, 100, and 10⁻⁵ beyond."""
    power = round(math.log10(value))
    if abs(power) <= 3 or not math.isclose(value, 10.0**power):
        return f"{value:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _legend_beside(axes: Any, handles: Sequence[Any], title: str | None = None) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        title=title,
        alignment="left",
        title_fontsize=8.0,
    )


def _rounds_axis(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.0)


def _draw_losses(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    return _draw_loss_curves(groups, names, "round t", megabytes=False)


def _draw_communication(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    sent = [r.bytes_up + r.bytes_down for g in groups for each in g.records for r in each.reports]
    if not any(sent):
        return None
    return _draw_loss_curves(groups, names, "sent by all, both ways (MB)", megabytes=True)


def _draw_loss_curves(
    groups: Sequence[RunGroup], names: Sequence[str], xlabel: str, megabytes: bool
) -> Any:
    curves = [_curves(group, names, megabytes) for group in groups]
    if not any(curve for each in curves for curve in each):
        return None
    if len(groups) > 1:
        return _draw_panels(groups, names, curves, xlabel, megabytes)
    figure = new_figure(5.2, 3.2)
    axes = figure.add_subplot()
    _draw_objectives(axes, names, curves[0])
    _scale(axes, curves[0])
    axes.set(xlabel=xlabel, ylabel="training loss")
    if megabytes:
        axes.margins(x=0.0)
    else:
        _rounds_axis(axes)
    return figure


def _draw_objectives(axes: Any, names: Sequence[str], curves: Sequence[Curve | None]) -> None:
    """A line per objective: each its own look if they are few, else shades and the extremes' names."""
    drawn = [(name, curve) for name, curve in zip(names, curves, strict=True) if curve is not None]
    by_last = sorted(drawn, key=lambda each: -float(each[1].mean[-1]))
    if len(names) <= MOST_COLOURS:
        looks = {name: _look(i) for i, name in enumerate(names)}
        lines = {n: _draw_curve(axes, c, _short(n), **looks[n]) for n, c in drawn}
        # In the order in which the lines end, so that the eye finds each beside its name.
        _legend_beside(axes, [lines[name] for name, _ in by_last])
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
            label=_short(name),
        )
        if strong:
            handles.append(line)
        if place == 3:
            (gap,) = axes.plot([], [], lw=0, label=f"⋮  {len(by_last) - 8} more")
            handles.append(gap)
    _legend_beside(axes, handles, "by last loss")


def _draw_panels(
    groups: Sequence[RunGroup],
    names: Sequence[str],
    curves: Sequence[Sequence[Curve | None]],
    xlabel: str,
    megabytes: bool,
) -> Any:
    """A panel per objective with a line per group; of many objectives the worst, median and best."""
    titles = [_short(name) for name in names]
    if len(names) > MOST_COLOURS:
        titles = ["worst objective", "median objective", "best objective"]
        curves = [_spread_over_objectives(group, names, megabytes) for group in groups]
    figure, panels = _panels(len(titles))
    for s, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        column = [each[s] for each in curves]
        for i, (group, curve) in enumerate(zip(groups, column, strict=True)):
            if curve is not None:
                _draw_curve(axes, curve, group.label, **_look(i))
        _scale(axes, column)
        axes.set_title(title, loc="left")
        if megabytes:
            axes.margins(x=0.0)
        else:
            _rounds_axis(axes)
    _finish_panels(figure, groups, xlabel, "training loss")
    return figure


def _spread_over_objectives(
    group: RunGroup, names: Sequence[str], megabytes: bool
) -> list[Curve | None]:
    losses = [_losses(record, names) for record in group.records]
    along = [_megabytes(record) for record in group.records] if megabytes else None
    return [_curve([reduce(each, 1) for each in losses], along) for reduce in (_max, _median, _min)]


def _max(values: Array, axis: int) -> Array:
    return np.asarray(np.max(values, axis=axis))


def _median(values: Array, axis: int) -> Array:
    return np.asarray(np.median(values, axis=axis))


def _min(values: Array, axis: int) -> Array:
    return np.asarray(np.min(values, axis=axis))


def _panels(count: int, sharey: bool = False) -> tuple[Any, list[Any]]:
    columns = min(count, 3 if count != 4 else 2)
    rows = math.ceil(count / columns)
    figure = new_figure(0.5 + (2.7 if columns < 3 else 2.2) * columns, 0.7 + 1.8 * rows)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    panels = list(grid.ravel())
    for unused in panels[count:]:
        unused.remove()
    for axes in panels[:count]:
        # The lowest of each column keeps its numbers, also above an empty place.
        axes.tick_params(labelbottom=panels.index(axes) + columns >= count)
    return figure, panels[:count]


def _finish_panels(figure: Any, groups: Sequence[RunGroup], xlabel: str, ylabel: str) -> None:
    from matplotlib.lines import Line2D

    figure.supxlabel(xlabel, fontsize=9.0)
    figure.supylabel(ylabel, fontsize=9.0)
    handles = [Line2D([], [], label=group.label, **_look(i)) for i, group in enumerate(groups)]
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


def _draw_weights(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    weights = [[_weights(record, names) for record in group.records] for group in groups]
    if len(names) < 2 or not any(np.isfinite(w).any() for each in weights for w in each):
        return None
    if len(names) > MOST_COLOURS:
        return _draw_weight_maps(groups, names, weights)
    curves = [[_curve([w[:, s] for w in each]) for s in range(len(names))] for each in weights]
    if len(groups) == 1:
        figure = new_figure(5.2, 3.2)
        axes = figure.add_subplot()
        handles = _stack_weights(axes, names, curves[0])
        _legend_beside(axes, handles)
        axes.set(xlabel="round t", ylabel="weight λ", ylim=(0.0, 1.0))
        axes.grid(visible=False)
        _rounds_axis(axes)
        return figure
    figure, panels = _panels(len(names), sharey=True)
    for s, axes in enumerate(panels):
        for i, (group, each) in enumerate(zip(groups, curves, strict=True)):
            curve = each[s]
            if curve is not None:
                _draw_curve(axes, curve, group.label, **{**_look(i), "lw": 1.2})
        axes.set_title(_short(names[s]), loc="left")
        axes.set_ylim(-0.02, 1.02)
        _rounds_axis(axes)
    _finish_panels(figure, groups, "round t", "weight λ")
    return figure


def _stack_weights(axes: Any, names: Sequence[str], curves: Sequence[Curve | None]) -> list[Any]:
    """Shares of a whole, one on the other; the legend from top to bottom as they lie."""
    drawn = [(i, curve) for i, curve in enumerate(curves) if curve is not None]
    layers = axes.stackplot(
        drawn[0][1].x,
        [curve.mean for _, curve in drawn],
        labels=[_short(names[i]) for i, _ in drawn],
        colors=[OKABE_ITO[i] for i, _ in drawn],
        step="mid",
        linewidth=0.3,
        edgecolor="white",
    )
    return list(reversed(layers))


def _draw_weight_maps(
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
        axes.set_xlabel("round t")
        if len(groups) > 1:
            axes.set_title(group.label, loc="left")
        _rounds_axis(axes)
    every = math.ceil(len(names) / 60)
    places = range(0, len(names), every)
    grid[0, 0].set_yticks(list(places), [_short(names[i]) for i in places], fontsize=6.0)
    figure.colorbar(image, ax=list(grid.ravel()), label="weight λ", pad=0.015, aspect=40)
    return figure


def _draw_direction(groups: Sequence[RunGroup]) -> Any:
    kinds = [("direction_norm_squared", "‖d‖²"), ("stationarity", "‖d*‖², true gradients")]
    drawn: list[tuple[Curve, str, int, int]] = []
    for i, group in enumerate(groups):
        for j, (kind, words) in enumerate(kinds):
            curve = _curve([_each_round(record, kind) for record in group.records])
            if curve is not None:
                drawn.append((curve, words if len(groups) == 1 else group.label, i, j))
    if not drawn:
        return None
    figure = new_figure(4.6, 3.0)
    axes = figure.add_subplot()
    lines = []
    for curve, label, i, j in drawn:
        look = _look(i if len(groups) > 1 else j)
        label = f"{label}, ‖d*‖²" if len(groups) > 1 and j else label
        lines.append(_draw_curve(axes, curve, label, **{**look, "lw": 0.9 if j and i else 1.3}))
    _scale(axes, [curve for curve, *_ in drawn])
    axes.set(xlabel="round t", ylabel="squared length of the direction ‖d‖²")
    _rounds_axis(axes)
    if len(drawn) > 1:
        _legend_beside(axes, lines)
    return figure


def _draw_radar(groups: Sequence[RunGroup], names: Sequence[str]) -> Any:
    """Losses around a circle: of one group at several rounds, of several groups at their last."""
    tables = [_mean_losses(group, names) for group in groups]
    if not all(len(table) for table in tables):
        return None
    if len(groups) == 1:
        known, first = tables[0], tables[0][0][1]
        chosen = sorted({round((len(known) - 1) * share) for share in (0, 1 / 16, 1 / 4, 1)})
        rings = [(f"round {known[i][0]}", known[i][1]) for i in chosen]
        scale, title = first, "loss / loss at round 0"
        if known[0][0] != 0:
            title = f"loss / loss at round {known[0][0]}"
    else:
        rings = [(group.label, table[-1][1]) for group, table in zip(groups, tables, strict=True)]
        scale, title = np.max([values for _, values in rings], axis=0), "last loss / worst run's"
    usable = np.flatnonzero(np.isfinite(scale) & (scale > 0)).tolist()
    if len(usable) < 3 or len(rings) < 2:
        return None
    return _draw_rings(
        [_short(names[i], 16) for i in usable],
        [(label, values[usable] / scale[usable]) for label, values in rings],
        title,
        over_time=len(groups) == 1,
    )


def _mean_losses(group: RunGroup, names: Sequence[str]) -> list[tuple[int, Array]]:
    """(round, mean losses over seeds) wherever all were measured."""
    losses = [_losses(record, names) for record in group.records]
    length = min(len(each) for each in losses)
    mean = np.mean([each[:length] for each in losses], axis=0)
    return [(t, row) for t, row in enumerate(mean) if np.isfinite(row).all()]


def _draw_rings(
    names: Sequence[str], rings: Sequence[tuple[str, Array]], title: str, over_time: bool
) -> Any:
    import matplotlib as mpl

    angles = np.linspace(0.0, 2.0 * np.pi, len(names), endpoint=False)
    size = 4.0 if len(names) <= 12 else 5.2
    figure = new_figure(size + 1.3, size)
    axes = figure.add_subplot(projection="polar")
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    lines = []
    for i, (label, values) in enumerate(rings):
        look = _look(i)
        if over_time:
            # One thing that changes: light to dark, as time goes on.
            shade = mpl.colormaps["viridis_r"](0.15 + 0.85 * i / (len(rings) - 1))
            look = {"color": shade, "linestyle": "-"}
        around = np.append(values, values[0])
        (line,) = axes.plot(np.append(angles, angles[0]), around, label=label, lw=1.5, **look)
        if over_time and i == len(rings) - 1:
            axes.fill(angles, values, color=look["color"], alpha=0.12, lw=0)
        lines.append(line)
    top = max(float(values.max()) for _, values in rings)
    axes.set_ylim(0.0, 1.05 * top)
    _name_spokes(axes, names, angles, 1.09 * top)
    steps = (
        [0.25, 0.5, 0.75, 1.0] if top <= 1.5 else [top * share for share in (0.25, 0.5, 0.75, 1)]
    )
    axes.set_yticks(steps, [f"{step:.2g}" for step in steps], fontsize=6.5, color="#666666")
    axes.set_rlabel_position(180.0 / len(names))
    axes.spines["polar"].set_color("#CCCCCC")
    axes.legend(
        handles=lines,
        loc="upper left",
        bbox_to_anchor=(1.15 if len(names) <= 12 else 1.22, 1.1),
        title=title,
        alignment="left",
        title_fontsize=8.0,
    )
    return figure


def _name_spokes(axes: Any, names: Sequence[str], angles: Array, radius: float) -> None:
    """Names begin or end at the circle; many of them stand like spokes, so that none overlap."""
    many = len(names) > 12
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


def _draw_trade_off(
    groups: Sequence[RunGroup], names: Sequence[str], pair: tuple[str, str] | None
) -> Any:
    """The way of the losses of two objectives: hollow where it begins, full where it ends."""
    if pair is None and len(names) < 2:
        return None
    first, second = (list(names).index(name) for name in pair) if pair else (0, 1)
    figure = new_figure(4.6, 3.4)
    axes = figure.add_subplot()
    lines, ends = [], []
    for i, group in enumerate(groups):
        for k, record in enumerate(group.records):
            losses = _losses(record, names)[:, [first, second]]
            path = losses[np.isfinite(losses).all(axis=1)]
            if not len(path):
                continue
            look = _look(i)
            (line,) = axes.plot(*path.T, lw=1.1, alpha=0.85, label=group.label, **look)
            axes.plot(*path[0], "o", ms=5, mfc="white", mec=look["color"], zorder=4)
            axes.plot(*path[-1], "o", ms=5, color=look["color"], mec="white", mew=0.5, zorder=5)
            ends.append(path)
            if k == 0:
                lines.append(line)
    if not ends:
        return None
    for axis, values in zip("xy", np.concatenate(ends).T, strict=True):
        _scale(axes, [Curve(values, values, values, values)], axis)
    axes.set(
        xlabel=f"training loss of {_short(names[first])}",
        ylabel=f"training loss of {_short(names[second])}",
    )
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"marker": "o", "ms": 5, "lw": 0, "color": "#666666"}
    lines = lines if len(groups) > 1 else []
    lines += [
        Line2D([], [], mfc="white", label="untrained", **dot),
        Line2D([], [], label="last", **dot),
    ]
    _legend_beside(axes, lines)
    return figure
