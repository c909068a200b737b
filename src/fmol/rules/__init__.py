"""Rules: a Gramian of the objectives' updates in, the objectives' weights out.

A rule is any callable `rule(gramian, context) -> weights`. It sees the S×S Gramian and never the
vectors, so a new one is a function of a few lines, passed to an algorithm as `rule=`. Those that are
here are also functions of a bare Gramian:

>>> from fmol import rules
>>> gramian = [[1.0, -0.5], [-0.5, 4.0]]
>>> rules.min_norm(gramian).weights  # with its certificate
tensor([0.7500, 0.2500], dtype=torch.float64)
>>> rules.upgrad(gramian)
tensor([0.7500, 0.5625], dtype=torch.float64)
>>> rules.capped(gramian, cap=0.6)
tensor([0.6000, 0.4000], dtype=torch.float64)
"""

from fmol.minnorm import min_norm
from fmol.rules.adapter import TorchJD, torchjd
from fmol.rules.cone import UpGrad, project_rows, upgrad
from fmol.rules.given import Fixed, SmoothTchebycheff, fixed, smooth_tchebycheff
from fmol.rules.hull import Capped, MinNorm, NearPrior, capped, near_prior
from fmol.rules.memory import Smoothed, smoothed
from fmol.rules.normalization import Normalize, scales
from fmol.rules.seam import Context, Rule, needs_losses, protect

__all__ = [
    "Capped",
    "Context",
    "Fixed",
    "MinNorm",
    "NearPrior",
    "Normalize",
    "Rule",
    "SmoothTchebycheff",
    "Smoothed",
    "TorchJD",
    "UpGrad",
    "capped",
    "fixed",
    "min_norm",
    "near_prior",
    "needs_losses",
    "project_rows",
    "protect",
    "scales",
    "smooth_tchebycheff",
    "smoothed",
    "torchjd",
    "upgrad",
]
