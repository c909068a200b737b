"""How figures look: colours, dashes, fonts, and how long names are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "DASHES",
    "MOST_CHARACTERS",
    "MOST_COLOURS",
    "OKABE_ITO",
    "house_style",
    "look",
    "new_figure",
    "short",
]

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C7A00")
"""Colours that stay apart for colour-blind eyes; the yellow darkened, so as to show on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MOST_COLOURS = len(OKABE_ITO)
MOST_CHARACTERS = 26

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


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that no window ever shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th of a few things: apart in colour, and in black and white."""
    return {"color": OKABE_ITO[i % MOST_COLOURS], "linestyle": DASHES[i % len(DASHES)]}


def short(name: str, most: int = MOST_CHARACTERS) -> str:
    """The name, cut where it is longer than `most` characters, and such that a legend shows it."""
    text = name if len(name) <= most else f"{name[: most - 1]}…"
    # matplotlib leaves out of a legend what begins with an underscore.
    return f" {text}" if text.startswith("_") else text
