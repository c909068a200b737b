"""The commands, one function each: they read arguments, call the library and say what came out."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import get_completion_class

import fmol as package
from fmol.cli.doctor import check_up, list_problems
from fmol.cli.failures import describe, is_foreseen, is_misuse
from fmol.cli.flags import (
    AlgorithmType,
    ConfigCommand,
    ExperimentType,
    GridType,
    ProblemType,
    is_file,
)
from fmol.cli.sweep import read_grid, run_sweep
from fmol.cli.tables import compare_table, summary_lines
from fmol.config import ALGORITHMS, Config, read_config, read_file
from fmol.errors import FmolError
from fmol.federation import Federation
from fmol.front import (
    METHODS,
    front_records,
    front_table,
    read_front_options,
    train_front,
    write_front_figure,
)
from fmol.front.result import RESULTS as FRONT
from fmol.listeners import Progress
from fmol.problems import ProblemError
from fmol.rates import CASES, measure_rates, rates_table, write_figure
from fmol.rates.measuring import POINTS
from fmol.record import RunRecord
from fmol.report import write_report
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
from fmol.runs import RunError, RunFolder, RunMisuseError, resume, start
from fmol.runs.folder import find_runs, new_folder
from fmol.runs.training import StoppedError
from fmol.training import Callback

__all__ = ["fmol"]

FAILED, MISUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143

PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
quiet_option = click.option("--quiet", is_flag=True, help="Says nothing but errors.")
figures_option = click.option(
    "--figures", type=FOLDER, help="Also writes PNG and SVG figures here."
)
data_option = click.option("--data-dir", type=FOLDER, help="The folder with data sets.")
algorithm_option = click.option(
    "--algorithm",
    type=AlgorithmType(),
    help=f"{', '.join(ALGORITHMS)}  [{next(iter(ALGORITHMS))}]",
)
runs_argument = click.argument("runs", nargs=-1, required=True, type=FOLDER)


class Commands(click.Group):
    """The commands, all of which say what goes wrong in one way, from the arguments on."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors(), terminable():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with: fmol run multidigits",
)
@click.version_option(package.__version__, prog_name="fmol")
def fmol() -> None:
    """Federated multi-objective learning: many clients, each with its own objectives, one model."""


@fmol.command(cls=ConfigCommand)
@click.argument("problem", type=ProblemType())
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
    config = _config(problem, ConfigCommand.flags(ctx))
    out = out or new_folder("runs", config.problem, config.algorithm, config.run.seed)
    command = shlex.join(["fmol", *sys.argv[1:]])
    console = Console(quiet)
    with console:
        result = start(config, out, command=command, watch=console.watch, say=console.say)
    console.print(*summary_lines(RunFolder(out), result))


@fmol.command(cls=ConfigCommand)
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


resume_command.name = "resume"
fmol.add_command(resume_command, "resume")
fmol.commands.pop("resume-command", None)


@fmol.command()
@runs_argument
@click.option("--out", type=PATH, help="The file to write.  [report.html in the folder]")
@click.option("--alone", type=FOLDER, help="A run of `alone` to compare gains with.")
@figures_option
@quiet_option
def report(
    runs: Sequence[Path], out: Path | None, alone: Path | None, figures: Path | None, quiet: bool
) -> None:
    """Writes the report of each RUN anew, finished or not: report.html in its folder, or --out."""
    console = Console(quiet)
    folders = find_runs(runs)
    if out is not None and len(folders) > 1:
        raise RunMisuseError(
            f"`--out` names one file and there are {len(folders)} runs. Use `compare`."
        )
    baseline = RunFolder.open(alone).record(say=console.complain) if alone else None
    for folder in folders:
        record = folder.record(say=console.complain)
        path = write_report(out or folder.report, [record], alone=baseline)
        console.print(f"report: {path}")
        if figures is not None:
            to = figures if len(folders) == 1 else figures / folder.path.name
            console.print(*_write_figures(to, [record]))


@fmol.command()
@runs_argument
@click.option(
    "--out",
    type=PATH,
    default=Path("comparison.html"),
    show_default=True,
    help="The report to write.",
)
@figures_option
@quiet_option
def compare(runs: Sequence[Path], out: Path, figures: Path | None, quiet: bool) -> None:
    """Puts several RUNs (or folders of runs) into one report, seeds of one setting with a band."""
    console = Console(quiet)
    records = [folder.record(say=console.complain) for folder in find_runs(runs)]
    console.print(*compare_table(records))
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"report: {write_report(out, records)}")
    if figures is not None:
        console.print(*_write_figures(figures, records))


@fmol.command(cls=ConfigCommand)
@click.argument("problem", type=ProblemType())
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
    tables = _tables(problem)
    tables.pop("front", None)
    combinations = read_grid(tables.pop("sweep", {}), grid, console.say)
    flags = ConfigCommand.flags(ctx) | ({} if is_file(problem) else {"problem": problem})
    with console:
        folder, failed = run_sweep(tables, flags, combinations, out, jobs, console)
    ended = [RunFolder(each.parent) for each in sorted(folder.glob("*/summary.json"))]
    records = [each.record(say=console.complain) for each in ended]
    if records:
        console.print(*compare_table(records))
        console.print(f"report: {write_report(folder / 'comparison.html', records)}")
    if failed:
        raise RunError(f"{len(failed)} of {len(combinations)} runs failed: {', '.join(failed)}.")


@fmol.command(cls=ConfigCommand)
@click.argument("problem", type=ProblemType())
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
    tables = _tables(problem)
    tables.pop("sweep", None)
    options = read_front_options(tables.pop("front", {}), asked)
    flags = ConfigCommand.flags(ctx) | ({} if is_file(problem) else {"problem": problem})
    with console:
        folder, found = train_front(
            tables,
            flags,
            options,
            out=out,
            command=shlex.join(["fmol", *sys.argv[1:]]),
            watch=console.watch,
            say=console.say,
            complain=console.complain,
        )
    page = write_report(folder / "front.html", front_records(folder, found), front=found.summary())
    console.print(*front_table(found), f"results: {folder / FRONT}", f"report: {page}")
    console.print(*(f"figure: {path}" for path in write_front_figure(folder, found)))


@fmol.command()
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


@fmol.command("reproduce")
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


@fmol.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
def new_flower_app(folder: Path) -> None:
    """Writes a small, complete Flower app into the new folder DIR: a server, sites, one task.

    It runs as it stands, simulated and across machines; its README says how.
    """
    from fmol.flower.new_app import write_app  # Where it is used: flwr is no part of the core.

    files = write_app(folder)
    click.echo("\n".join(map(str, files)))
    click.echo(f"Run it: flwr run {shlex.quote(str(folder))} --stream")


@fmol.command()
@click.argument("name", required=False, type=ProblemType())
@data_option
def problems(name: str | None, data_dir: Path | None) -> None:
    """Lists the built-in problems and whether their data are found; with NAME, its options."""
    click.echo("\n".join(list_problems(name, data_dir)))


@fmol.command()
@data_option
def doctor(data_dir: Path | None) -> None:
    """Says what is installed and found: versions, devices, extras, data."""
    click.echo("\n".join(check_up(data_dir)))


@fmol.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints what makes SHELL complete fmol's commands, flags and their values.

    For bash: put `eval "$(fmol completion bash)"` into ~/.bashrc; alike for zsh. For fish:
    fmol completion fish > ~/.config/fish/completions/fmol.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(fmol, {}, "fmol", "_FMOL_COMPLETE").source())


# ---- what commands share ---------------------------------------------------------------------


class Console:
    """What a person at a terminal sees: progress on stderr, results on stdout; or nothing."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._progress: Progress | None = None

    def watch(self, federation: Federation, done: int, rounds: int) -> Sequence[Callback]:
        """A progress line for a run that begins."""
        self.close()
        self._progress = Progress(federation.names, rounds, quiet=self.quiet, start=done)
        return [self._progress]

    def say(self, text: str) -> None:
        """Something that goes on, or went otherwise than asked for."""
        if self._progress is not None:
            self._progress.say(text)
        elif not self.quiet:
            click.echo(text, err=True)

    def complain(self, text: str) -> None:
        """Something that failed while the rest goes on; said even when quiet."""
        self.close()
        click.echo(text, err=True)

    def print(self, *lines: str) -> None:
        """Results."""
        self.close()
        if not self.quiet:
            click.echo("\n".join(lines))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM, by which clusters stop a job, do what Ctrl-C does: checkpoint and stop."""
    if threading.current_thread() is not threading.main_thread():  # Others hear no signals.
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        # Once is enough: a cluster may tell each process, and so does a sweep those it started; the
        # second must not break into the writing of the checkpoint.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("terminated")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def errors() -> Iterator[None]:
    """Turns what was foreseen into a sentence and an exit code; lets the unforeseen show itself."""
    try:
        yield
    except StoppedError as error:
        stop(str(error), error.__cause__)
    except KeyboardInterrupt as error:
        stop("stopped", error)
    except BrokenPipeError:  # Who reads what is said has had enough; click ends without a word.
        raise
    except (RunError, FmolError, ImportError, OSError, ValueError) as error:
        click.echo("error: " * is_foreseen(error) + describe(error), err=True)
        sys.exit(MISUSED if is_misuse(error) else FAILED)


def stop(text: str, cause: BaseException | None) -> NoReturn:
    """Ends the process with what is to be said, and the code of the signal that stopped it."""
    click.echo(text, err=True)
    terminated = isinstance(cause, KeyboardInterrupt) and cause.args
    sys.exit(TERMINATED if terminated else INTERRUPTED)


def _tables(problem: str) -> dict[str, Any]:
    if not is_file(problem):
        return {}
    if not Path(problem).is_file():
        raise ProblemError(f"there is no file `{problem}`. Name a config file that is there.")
    return read_file(Path(problem))


def _config(problem: str, flags: dict[str, str]) -> Config:
    tables = _tables(problem)
    for other in ("sweep", "front"):  # Commands of their own read them.
        tables.pop(other, None)
    return read_config(tables, flags if is_file(problem) else {**flags, "problem": problem})


def _write_figures(folder: Path, records: Sequence[RunRecord]) -> list[str]:
    from fmol.figures import write_figures

    return [f"figure: {path}" for path in write_figures(folder, records)]
