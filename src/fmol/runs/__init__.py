"""Runs that survive: a folder with everything that was said, measured and learned."""

from fmol.runs.folder import RunError, RunFolder, RunMisuseError
from fmol.runs.training import resume, start, train

__all__ = ["RunError", "RunFolder", "RunMisuseError", "resume", "start", "train"]
