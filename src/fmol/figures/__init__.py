"""Static figures of one run or of several, ready for a paper, and what all figures of fmol share."""

from fmol.figures.axes import set_log_scale
from fmol.figures.runs import write_figures
from fmol.figures.saving import save_figure
from fmol.figures.style import DASHES, OKABE_ITO, house_style, new_figure

__all__ = [
    "DASHES",
    "OKABE_ITO",
    "house_style",
    "new_figure",
    "save_figure",
    "set_log_scale",
    "write_figures",
]
