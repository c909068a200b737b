"""Arguments and flags that several commands take."""

from __future__ import annotations

from pathlib import Path

import click

from fmol.cli.flags import AlgorithmType, ProblemType
from fmol.config import ALGORITHMS

__all__ = [
    "FOLDER",
    "PATH",
    "algorithm_option",
    "data_option",
    "figures_option",
    "problem_argument",
    "quiet_option",
    "runs_argument",
]

PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
quiet_option = click.option("--quiet", is_flag=True, help="Says nothing but errors.")
figures_option = click.option(
    "--figures", type=FOLDER, help="Also writes PNG and SVG figures here."
)
data_option = click.option("--data-dir", type=FOLDER, help="The folder with data sets.")
problem_argument = click.argument("problem", type=ProblemType())
algorithm_option = click.option(
    "--algorithm",
    type=AlgorithmType(),
    help=f"{', '.join(ALGORITHMS)}  [{next(iter(ALGORITHMS))}]",
)
runs_argument = click.argument("runs", nargs=-1, required=True, type=FOLDER)
