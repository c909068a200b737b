"""The trade-offs a problem has: a model for each of many preferences, and how they stand together."""

from fmol.front.figure import write_front_figure
from fmol.front.options import FrontOptions, read_front_options
from fmol.front.preferences import METHODS, spread_preferences
from fmol.front.result import Front, FrontPoint
from fmol.front.table import front_table
from fmol.front.training import front_records, train_front

__all__ = [
    "METHODS",
    "Front",
    "FrontOptions",
    "FrontPoint",
    "front_records",
    "front_table",
    "read_front_options",
    "spread_preferences",
    "train_front",
    "write_front_figure",
]
