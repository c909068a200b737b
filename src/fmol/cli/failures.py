"""What went wrong, in words."""

from __future__ import annotations

import traceback
from pathlib import Path

import fmol
from fmol.errors import FmolError
from fmol.runs import RunError

__all__ = ["describe", "is_foreseen"]

PACKAGE = Path(fmol.__file__).parent


def is_foreseen(error: BaseException) -> bool:
    """Whether fmol itself raised it, with a sentence for people; elsewhere a traceback says more."""
    if isinstance(error, RunError | FmolError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return ours and isinstance(error, ImportError | OSError | ValueError)


def describe(error: BaseException) -> str:
    """The sentence of an error that fmol foresaw, the traceback of any other."""
    if is_foreseen(error):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
