"""Commands that look at runs that are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fmol.cli.arguments import FOLDER, PATH, figures_option, quiet_option, runs_argument
from fmol.cli.console import Console
from fmol.cli.tables import compare_table
from fmol.record import RunRecord
from fmol.report import write_report
from fmol.runs import RunFolder, RunMisuseError
from fmol.runs.folder import find_runs

__all__ = ["compare", "report", "show_comparison"]


@click.command()
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


@click.command()
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
    show_comparison(console, records, out)
    if figures is not None:
        console.print(*_write_figures(figures, records))


def show_comparison(console: Console, records: Sequence[RunRecord], out: Path) -> None:
    """Says how the runs stand beside one another, and writes the report of all to `out`."""
    console.print(*compare_table(records))
    out.parent.mkdir(parents=True, exist_ok=True)
    console.print(f"report: {write_report(out, records)}")


def _write_figures(folder: Path, records: Sequence[RunRecord]) -> list[str]:
    from fmol.figures import write_figures

    return [f"figure: {path}" for path in write_figures(folder, records)]
