"""What is on axes: curves with bands, logarithmic scales, rounds, and a legend beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fmol.figures.curves import Curve

__all__ = ["count_rounds", "draw_curve", "legend_beside", "scale_to", "set_log_scale", "tick_text"]


def draw_curve(axes: Any, curve: Curve, label: str, **look: Any) -> Any:
    """The line of the means; behind it a band from the least to the greatest, where they differ."""
    if (curve.low < curve.high).any():
        axes.fill_between(curve.x, curve.low, curve.high, color=look["color"], alpha=0.18, lw=0)
    marker = "o" if len(curve.x) == 1 else None
    (line,) = axes.plot(curve.x, curve.mean, label=label, marker=marker, **look)
    return line


def scale_to(axes: Any, curves: Sequence[Curve | None]) -> None:
    """Makes the vertical axis logarithmic, where every value of the curves allows it."""
    known = [each for each in curves if each is not None]
    if known and all((each.low > 0).all() for each in known):
        low, high = min(each.low.min() for each in known), max(each.high.max() for each in known)
        set_log_scale(axes, float(low), float(high))


def set_log_scale(axes: Any, low: float, high: float, axis: str = "y") -> None:
    """Makes an axis logarithmic, with numbers to read values from `low` to `high` by."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    getattr(axes, f"set_{axis}scale")("log")
    along = getattr(axes, f"{axis}axis")
    along.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    along.set_minor_formatter(NullFormatter())
    span = high / low
    powers = math.floor(math.log10(high)) - math.ceil(math.log10(low)) + 1
    if powers > 2:
        along.set_major_locator(LogLocator(numticks=8))
    else:  # Too few powers of ten to read by.
        between = (1.0, 2.0, 5.0) if span > 5 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
        along.set_major_locator(LogLocator(subs=between, numticks=12))
        along.set_minor_locator(NullLocator())


def tick_text(value: float) -> str:
    """A number on a logarithmic axis: 0.01, 1, 100, and 10⁻⁵ beyond."""
    power = round(math.log10(value))
    if abs(power) <= 3 or not math.isclose(value, 10.0**power):
        return f"{value:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def count_rounds(axes: Any) -> None:
    """Makes the horizontal axis one of rounds: whole numbers, from edge to edge."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.margins(x=0.0)


def legend_beside(axes: Any, handles: Sequence[Any], title: str | None = None) -> None:
    """Puts a legend to the right of the axes."""
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        title=title,
        alignment="left",
        title_fontsize=8.0,
    )
