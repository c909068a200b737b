"""What went wrong, in words."""

from __future__ import annotations

import traceback
from pathlib import Path

import fmol
from fmol.errors import FmolError
from fmol.files import is_leftover
from fmol.runs import RunError

__all__ = ["describe", "is_foreseen"]

PACKAGE = Path(fmol.__file__).parent
WRITERS = ("cli", "figures.py", "files.py", "front", "rates", "report", "reproduce", "runs")
"""What of the package writes where it is told to."""


def is_foreseen(error: BaseException) -> bool:
    """Whether fmol itself raised it, with a sentence for people; elsewhere a traceback says more."""
    if isinstance(error, RunError | FmolError) or _unwritten(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return ours and isinstance(error, ImportError | OSError | ValueError)


def _unwritten(error: BaseException) -> str:
    """The sentence for a file or folder that could not be read or written; empty for any other."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path.relative_to(PACKAGE) for path in frames if path.is_relative_to(PACKAGE)]
    if not ours or ours[-1].parts[0] not in WRITERS:
        return ""
    path = Path(error.filename2 or error.filename)
    path = path.parent if is_leftover(path) else path
    reason = error.strerror or type(error).__name__
    return f"`{path}` cannot be read or written: {reason}. Give leave to, or name another place."


def describe(error: BaseException) -> str:
    """The sentence of an error that fmol foresaw, the traceback of any other."""
    if is_foreseen(error):
        return _unwritten(error) or str(error)
    return "".join(traceback.format_exception(error)).rstrip()
