"""The command line: `fmol` and its commands."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that the arguments of this process name, and exits with its code."""
    try:
        import click  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        sys.exit(f'the command line needs {error.name}. Install it with: pip install "fmol[cli]".')
    from fmol.cli.commands import fmol

    fmol(prog_name="fmol")
