"""Commands that put the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fmol.cli.arguments import FOLDER, data_option, quiet_option
from fmol.cli.console import Console
from fmol.cli.failures import describe
from fmol.cli.flags import ExperimentType
from fmol.rates import CASES, measure_rates, rates_table, write_figure
from fmol.rates.measuring import POINTS
from fmol.reproduce import (
    EXPERIMENTS,
    UnfinishedError,
    UnmatchedError,
    experiment_size,
    missing_data,
    plan_runs,
    reproduce,
)
from fmol.reproduce.text import experiment_lines, outcome_lines, plan_lines
from fmol.runs import RunError, RunMisuseError
from fmol.runs.training import StoppedError

__all__ = ["rates", "reproduce_command"]


@click.command()
@click.option(
    "--out",
    type=FOLDER,
    default=Path("rates"),
    show_default=True,
    help="Where points.json and the figure go; what is there already is not measured again.",
)
@click.option("--small", is_flag=True, help="Fewer rounds and seeds: a first look in a minute.")
@click.option(
    "--seeds", type=click.IntRange(min=1), help="Problems and runs for each point.  [5; small: 3]"
)
@click.option(
    "--case", "cases", multiple=True, type=click.Choice(list(CASES)), help="Only this one; repeat."
)
@quiet_option
def rates(out: Path, small: bool, seeds: int | None, cases: Sequence[str], quiet: bool) -> None:
    """Measures how fast FMGDA and FSMGDA converge, and puts the slopes beside the paper's Table 1."""
    console = Console(quiet)
    result = measure_rates(small=small, seeds=seeds, cases=cases or None, out=out, say=console.say)
    console.print(*rates_table(result), f"points: {out / POINTS}")
    console.print(*(f"figure: {path}" for path in write_figure(out, result)))


@click.command("reproduce")
@click.argument("name", required=False, type=ExperimentType())
@click.option("--all", "everything", is_flag=True, help="Every experiment, one after the other.")
@click.option(
    "--list",
    "listed",
    is_flag=True,
    help="Says what there is, and what each takes.",
)
@click.option("--small", is_flag=True, help="Fewer runs of smaller problems: a first look.")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each setting.")
@click.option(
    "--engine", type=click.Choice(["auto", "sequential", "vectorized"]), default="auto",
    show_default=True, help="How clients compute.",
)  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="As torch names it, or auto.")
@click.option(
    "--precision", type=click.Choice(["fp32", "tf32", "bf16"]), default="fp32", show_default=True,
    help="How products in local steps are rounded on a CUDA device.",
)  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="TEXT",
    help="Runs whose name has this in it, `*` standing for anything; may be given again.",
)  # fmt: skip
@click.option(
    "--plan", is_flag=True, help="Says which runs it takes and how many steps; runs none."
)
@data_option
@click.option(
    "--out",
    type=FOLDER,
    default=Path("reproduce"),
    show_default=True,
    help="A folder in it for each experiment; runs that are there already are not run again.",
)
@quiet_option
def reproduce_command(
    name: str | None,
    everything: bool,
    listed: bool,
    small: bool,
    seeds: int | None,
    engine: str,
    device: str,
    precision: str,
    only: tuple[str, ...],
    plan: bool,
    data_dir: Path | None,
    out: Path,
    quiet: bool,
) -> None:
    """Runs an experiment of the paper and puts its numbers beside ours."""
    console = Console(quiet)
    if listed:
        console.print(*experiment_lines())
        return
    if (name is None) == (not everything):
        raise click.UsageError("name one experiment, or give --all; --list says which there are.")
    told: list[str] = []
    failed: list[str] = []
    chosen = list(EXPERIMENTS) if everything else [str(name)]
    with console:
        for each in chosen:
            experiment = EXPERIMENTS[each]
            lacking = missing_data(experiment, small, data_dir)
            if everything and lacking:
                console.print(
                    f"{each}: left out, since the data of {', '.join(lacking)} are not found"
                )
                continue
            try:
                if plan:
                    size = experiment_size(experiment, small, seeds)
                    parts = plan_runs(experiment, size, only, data_dir)
                    lines = list(plan_lines(experiment, parts))
                else:
                    found = reproduce(
                        experiment,
                        out / (f"{each}-small" if small else each),
                        small=small,
                        seeds=seeds,
                        engine=engine,
                        device=device,
                        precision=precision,
                        only=only,
                        data_dir=None if data_dir is None else str(data_dir),
                        watch=console.watch,
                        say=console.say,
                    )
                    lines = list(outcome_lines(found))
            except UnfinishedError as unfinished:  # As it was asked for.
                lines = [str(unfinished)]
            except UnmatchedError:
                if not everything:
                    raise
                continue
            except StoppedError:
                raise
            except Exception as error:  # Whatever it is: the others have nothing to do with it.
                if not everything:
                    raise
                failed.append(each)
                console.complain(f"{each} failed: {describe(error)}")
                continue
            told.append(each)
            console.print(*lines)
    if failed:
        raise RunError(f"{len(failed)} of {len(chosen)} experiments failed: {', '.join(failed)}.")
    if only and not told:
        raise RunMisuseError(
            f"no experiment whose data are found has a run with {' or '.join(map(repr, only))} in its "
            "name. Name one experiment, which then says what a run of it is called."
        )
