"""What stops a run, and what was asked for wrongly (wrong arguments in Python are ValueErrors)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmol.result import Result

__all__ = [
    "FmolError",
    "LossError",
    "MisfitError",
    "MissingObjectiveError",
    "MisuseError",
    "RefusedError",
]


class FmolError(RuntimeError):
    """A run that could not go on. `result` holds what was reached before the failing round."""

    result: Result | None = None


class MisfitError(FmolError, ValueError):
    """Data that the model cannot take: too wide, too narrow, or of another dtype."""


class MisuseError(ValueError):
    """Something asked for that cannot be: a file that is not there, a folder that is taken, a wrong
    option. A command line ends with exit code 2 for it."""


class RefusedError(FmolError):
    """Nothing that arrived in a round could be let in, or its step would break the model."""


class MissingObjectiveError(FmolError):
    """An objective had no update and `on_missing_objective` is `"fail"`."""


class LossError(FmolError, ValueError):
    """A training loss that an option cannot work with, as a negative one with `normalize="loss"`."""
