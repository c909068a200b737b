"""The commands, one function each: they read arguments, call the library and say what came out."""

from fmol.cli.commands.group import fmol

__all__ = ["fmol"]
