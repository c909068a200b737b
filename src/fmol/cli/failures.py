"""What went wrong, in words."""

from __future__ import annotations

import traceback
from pathlib import Path

import fmol
from fmol.errors import FmolError, MisuseError
from fmol.files import is_leftover
from fmol.runs import RunError

__all__ = ["describe", "is_foreseen", "is_misuse"]

PACKAGE = Path(fmol.__file__).parent
WRITERS = ("cli", "figures", "files.py", "front", "rates", "report", "reproduce", "runs")
"""What of the package writes where it is told to."""
READERS = "problems"
"""What of it reads data where it is told to."""


def is_foreseen(error: BaseException) -> bool:
    """Whether fmol itself raised it, with a sentence for people; elsewhere a traceback says more."""
    if isinstance(error, RunError | FmolError | MisuseError) or _unwritten(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return ours and isinstance(error, ImportError | OSError | ValueError)


def is_misuse(error: BaseException) -> bool:
    """Whether what was asked for is wrong: data that are not there, or not what they should be, too."""
    if isinstance(error, MisuseError):
        return True
    wrong_data = isinstance(error, OSError | ValueError) and _in_readers(error)
    return wrong_data and is_foreseen(error)


def _in_readers(error: BaseException) -> bool:
    """Whether a built-in problem was last to have a hand in it."""
    place = _place(error)
    # In the first of its files fmol calls functions of others.
    return place.parent == Path(READERS) and place.name != "__init__.py"


def _place(error: BaseException) -> Path:
    """The last file of the package that an error came through, from the package's folder on."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [path.relative_to(PACKAGE) for path in frames if path.is_relative_to(PACKAGE)]
    return ours[-1] if ours else Path()


def _unwritten(error: BaseException) -> str:
    """The sentence for a file or folder that could not be read or written; empty for any other."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    read = _in_readers(error)
    if not read and next(iter(_place(error).parts), "") not in WRITERS:
        return ""
    path = Path(error.filename2 or error.filename)
    path = path.parent if is_leftover(path) else path
    reason = error.strerror or type(error).__name__
    done = "read" if read else "read or written"
    return f"`{path}` cannot be {done}: {reason}. Give leave to, or name another place."


def describe(error: BaseException) -> str:
    """The sentence of an error that fmol foresaw, the traceback of any other."""
    if is_foreseen(error):
        return _unwritten(error) or str(error)
    return "".join(traceback.format_exception(error)).rstrip()
