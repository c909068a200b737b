"""The paper's four theorems as code: their bounds, their step sizes, their output, and slopes."""

from fmol.theory.bounds import (
    Bound,
    Version,
    fmgda_nonconvex_bound,
    fmgda_strongly_convex_bound,
    fsmgda_nonconvex_bound,
    fsmgda_strongly_convex_bound,
)
from fmol.theory.output import OutputClock, mean_gap, output_weights
from fmol.theory.slopes import Slope, fit_slope
from fmol.theory.steps import (
    Steps,
    fmgda_nonconvex_steps,
    fmgda_strongly_convex_steps,
    fsmgda_nonconvex_steps,
    fsmgda_strongly_convex_steps,
)

__all__ = [
    "Bound",
    "OutputClock",
    "Slope",
    "Steps",
    "Version",
    "fit_slope",
    "fmgda_nonconvex_bound",
    "fmgda_nonconvex_steps",
    "fmgda_strongly_convex_bound",
    "fmgda_strongly_convex_steps",
    "fsmgda_nonconvex_bound",
    "fsmgda_nonconvex_steps",
    "fsmgda_strongly_convex_bound",
    "fsmgda_strongly_convex_steps",
    "mean_gap",
    "output_weights",
]
