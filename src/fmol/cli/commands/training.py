"""Commands that train: one run, many, or one for each of many preferences."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fmol.cli.arguments import FOLDER, algorithm_option, problem_argument, quiet_option
from fmol.cli.commands.results import show_comparison
from fmol.cli.console import Console
from fmol.cli.exits import stop
from fmol.cli.flags import ConfigCommand, GridType, is_file
from fmol.cli.sweep import read_grid, run_sweep
from fmol.cli.tables import summary_lines
from fmol.config import read_config, read_file
from fmol.front import (
    METHODS,
    front_records,
    front_table,
    read_front_options,
    train_front,
    write_front_figure,
)
from fmol.front.result import RESULTS as FRONT
from fmol.problems import ProblemError
from fmol.report import write_report
from fmol.runs import RunError, RunFolder, resume, start
from fmol.runs.folder import new_folder

__all__ = ["front", "resume_command", "run", "sweep"]


@click.command(cls=ConfigCommand)
@problem_argument
@algorithm_option
@click.option(
    "--out",
    type=FOLDER,
    help="The run's folder; must be new or empty.  [a new one under runs/]",
)
@quiet_option
@click.pass_context
def run(ctx: click.Context, problem: str, algorithm: str, out: Path | None, quiet: bool) -> None:
    """Trains on PROBLEM, into a run folder with a report.

    PROBLEM is a built-in problem (`fmol problems` lists them), a config file that ends in .toml, or
    your own federation as package.module:name or file.py:name.
    """
    tables, _ = _read_file(problem)
    config = read_config(tables, _flags(ctx, problem))
    out = out or new_folder("runs", config.problem, config.algorithm, config.run.seed)
    console = Console(quiet)
    with console:
        result = start(config, out, command=_command_line(), watch=console.watch, say=console.say)
    console.print(*summary_lines(RunFolder(out), result))


@click.command("resume", cls=ConfigCommand)
@click.argument("run_folder", metavar="RUN", type=FOLDER)
@click.option("--algorithm", metavar="NAME", hidden=True)
@click.option(
    "--anyway", is_flag=True, help="Goes on with another fmol, torch or device than it began with."
)
@quiet_option
@click.pass_context
def resume_command(
    ctx: click.Context, run_folder: Path, algorithm: str, anyway: bool, quiet: bool
) -> None:
    """Goes on with a run from its last good checkpoint, to the same end as without the break.

    --rounds goes on to another number of rounds. Flags that would change results are refused.
    """
    folder = RunFolder.open(run_folder)
    flags = ConfigCommand.flags(ctx)
    console = Console(quiet)
    ended = folder.summary.is_file()
    try:
        with console:
            result = resume(
                folder.path, flags=flags, anyway=anyway, watch=console.watch, say=console.say
            )
    except KeyboardInterrupt as error:
        stands = (
            "held no round and is gone"
            if not folder.config.is_file()
            else "is as it was"
            if folder.summary.is_file() == ended
            else f"keeps its rounds. Go on with: fmol resume {run_folder}"
        )
        stop(f"stopped before a new round was done; `{run_folder}` {stands}", error)
    console.print(*summary_lines(folder, result))


@click.command(cls=ConfigCommand)
@problem_argument
@algorithm_option
@click.option(
    "--grid",
    multiple=True,
    type=GridType(),
    metavar="KEY=A,B,…",
    help="Values to try of one key, with ; between those that hold a comma, or as a TOML list; every "
    "combination of all grids is a run. Also `[sweep]` in a file.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time."
)
@click.option("--out", type=FOLDER, help="The sweep's folder.  [a new one under runs/]")
@quiet_option
@click.pass_context
def sweep(
    ctx: click.Context,
    problem: str,
    algorithm: str,
    grid: Sequence[str],
    jobs: int,
    out: Path | None,
    quiet: bool,
) -> None:
    """Runs every combination of some options on PROBLEM, and compares them in one report.

    Started again with the same --out, finished runs are kept and unfinished ones go on.
    """
    console = Console(quiet)
    tables, table = _read_file(problem, "sweep")
    combinations = read_grid(table, grid, console.say)
    with console:
        folder, failed = run_sweep(tables, _flags(ctx, problem), combinations, out, jobs, console)
    ended = [RunFolder(each.parent) for each in sorted(folder.glob("*/summary.json"))]
    records = [each.record(say=console.complain) for each in ended]
    if records:
        show_comparison(console, records, folder / "comparison.html")
    if failed:
        raise RunError(f"{len(failed)} of {len(combinations)} runs failed: {', '.join(failed)}.")


@click.command(cls=ConfigCommand)
@problem_argument
@algorithm_option
@click.option(
    "--method",
    multiple=True,
    metavar="NAME",
    help=f"How preferences are trained: {', '.join(METHODS)}; repeat for several. The rule's own "
    "options stand behind commas, as near-prior,radius=0.2.  [weights]",
)
@click.option(
    "--points", metavar="NUMBER", help="Preferences.  [11 for two objectives, 15 for three]"
)
@click.option("--seeds", metavar="NUMBER", help="Seeds for each, from --seed on.  [1]")
@click.option(
    "--measure",
    metavar="NAME",
    help="What is compared: loss, held-out-loss, or a held-out metric by its name.  [loss]",
)
@click.option(
    "--reference",
    metavar="OBJECTIVE=VALUE,…",
    help="The worst values that still count, or one for all: what hypervolume is measured up to.",
)
@click.option("--out", type=FOLDER, help="The front's folder.  [a new one under runs/]")
@quiet_option
@click.pass_context
def front(
    ctx: click.Context,
    /,
    problem: str,
    algorithm: str,
    out: Path | None,
    quiet: bool,
    **asked: Any,
) -> None:
    """Trains a model for each of many preferences on PROBLEM, and shows what can be traded for what.

    With --engine vectorized all of them are trained side by side. Started again with the same --out,
    finished points are kept and unfinished ones go on. Also `[front]` in a file.
    """
    console = Console(quiet)
    tables, table = _read_file(problem, "front")
    options = read_front_options(table, asked)
    with console:
        folder, found = train_front(
            tables,
            _flags(ctx, problem),
            options,
            out=out,
            command=_command_line(),
            watch=console.watch,
            say=console.say,
            complain=console.complain,
        )
    page = write_report(folder / "front.html", front_records(folder, found), front=found.summary())
    console.print(*front_table(found), f"results: {folder / FRONT}", f"report: {page}")
    console.print(*(f"figure: {path}" for path in write_front_figure(folder, found)))


def _read_file(problem: str, command: str = "") -> tuple[dict[str, Any], Any]:
    """What a config file says of runs, and the table in it that is for this command alone."""
    if not is_file(problem):
        return {}, {}
    if not Path(problem).is_file():
        raise ProblemError(f"there is no file `{problem}`. Name a config file that is there.")
    tables = read_file(Path(problem))
    of_commands = {name: tables.pop(name, {}) for name in ("sweep", "front")}
    return tables, of_commands.get(command, {})


def _flags(ctx: click.Context, problem: str) -> dict[str, str]:
    """Option → text, of the flags that were given; among them the problem, if it is no file."""
    return ConfigCommand.flags(ctx) | ({} if is_file(problem) else {"problem": problem})


def _command_line() -> str:
    return shlex.join(["fmol", *sys.argv[1:]])
