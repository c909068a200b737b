"""Runs what an experiment takes into run folders, and writes down what it comes to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

from fmol import __version__
from fmol.files import write_whole
from fmol.problems import find_problem
from fmol.problems.loading import find_data
from fmol.record import RunRecord
from fmol.reproduce.charts import write_charts
from fmol.reproduce.experiment import Cell, Experiment, Place, Reproduction, Size
from fmol.reproduce.section import write_section
from fmol.reproduce.trials import Trials
from fmol.runs import RunError, RunMisuseError
from fmol.runs.training import Watch

__all__ = [
    "RESULTS",
    "UnfinishedError",
    "UnmatchedError",
    "experiment_size",
    "is_wanted",
    "missing_data",
    "reproduce",
]

RESULTS = "results.json"


def reproduce(
    experiment: Experiment,
    out: str | os.PathLike[str],
    *,
    small: bool = False,
    seeds: int | None = None,
    engine: str = "auto",
    device: str = "auto",
    precision: str = "fp32",
    data_dir: str | None = None,
    only: Sequence[str] = (),
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Reproduction:
    """Runs an experiment into the folder `out`: `runs/`, `results.json`, figures and a report.

    Runs that are there already are not run again, and one that was stopped is gone on with. With the
    engines `auto` and `vectorized` many runs go on at a time, their lanes stepped side by side. `only`
    runs those alone whose name has one of these texts in it (`*` stands for anything), and concludes
    from what is there, as far as that goes.
    """
    size = experiment_size(experiment, small, seeds)
    folder = Path(out)
    where = {"engine": engine, "device": device, "precision": precision}
    if data_dir is not None:
        where["data_dir"] = data_dir
    trials = Trials(folder / "runs", where, watch, say)
    records: dict[str, RunRecord] = {}
    lacking: list[str] = []
    meant = unnamed = 0
    for stage in experiment.stages:
        planned = stage(size, records)
        wanted = [trial for trial in planned if is_wanted(trial.name, only)]
        meant += len(wanted)
        trials.run(wanted, experiment.name)
        there = trials.found(planned)
        lacking += [trial.name for trial in planned if trial.name not in there]
        # What waits for runs that tune it is not planned yet, and is to be counted all the same.
        unnamed += max(0, len(stage(size, None)) - len(planned))
        records |= there
    if only and not meant:
        raise UnmatchedError(experiment, size, only)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = experiment.conclude(size, records, Place(folder, say))
    if lacking and not outcome.tables:
        in_all = len(records) + len(lacking) + unnamed
        raise UnfinishedError(
            f"{len(records)} of {in_all} runs are in `{folder}`, and no table of "
            f"{experiment.name} has all of its runs. Go on with the same command without `--only`."
        )
    found = Reproduction(experiment, size, outcome, records, (), tuple(lacking), unnamed)
    path = folder / RESULTS
    content = _content(found)
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    found = replace(found, files=(path, *outcome.figures, *write_charts(folder, outcome)))
    return replace(found, files=(*found.files, write_section(folder, found)))


class UnmatchedError(RunMisuseError):
    """None of an experiment's runs has in its name what was asked for."""

    def __init__(self, experiment: Experiment, size: Size, only: Sequence[str]) -> None:
        known = [trial.name for stage in experiment.stages for trial in stage(size, None)]
        super().__init__(
            f"no run of {experiment.name} has {' or '.join(map(repr, only))} in its name. "
            + (f"One is called {known[0]}." if known else "It has none to choose from.")
        )


class UnfinishedError(RunError):
    """The runs that were asked for are there, and no table has all of its runs yet."""


def experiment_size(experiment: Experiment, small: bool, seeds: int | None = None) -> Size:
    """How much is run of an experiment, with as many seeds as it takes where none are given."""
    return Size(small, seeds or (experiment.small_seeds if small else experiment.seeds))


def is_wanted(name: str, only: Sequence[str]) -> bool:
    """Whether a run is among those that are asked for; all are, where none are named.

    >>> is_wanted("iid-k20-fedavg-seed0", ["k20-*seed0"]), is_wanted("iid-k1-seed0", ["k20"])
    (True, False)
    """
    return not only or any(fnmatchcase(name, f"*{text}*") for text in only)


def missing_data(
    experiment: Experiment, small: bool, data_dir: str | os.PathLike[str] | None = None
) -> list[str]:
    """The problems among those that an experiment takes whose data are not found."""
    lacking = []
    for name in experiment.small_data if small else experiment.data:
        sets = getattr(find_problem(name), "data_sets", ())
        if not any(find_data(each, data_dir) is not None for each in sets):
            lacking.append(name)
    return lacking


def _content(found: Reproduction) -> dict[str, Any]:
    """Every number, with what it was computed from; values of a row of seeds are in their order."""
    experiment, outcome = found.experiment, found.outcome
    tables = [
        {
            "title": table.title,
            "columns": list(table.columns),
            "rows": {row: [_cell(cell) for cell in cells] for row, cells in table.rows.items()},
        }
        for table in outcome.tables
    ]
    content = {
        "fmol": __version__,
        "experiment": experiment.name,
        "title": experiment.title,
        "reading": experiment.reading,
        "size": asdict(found.size),
        "seeds": list(range(found.size.seeds)),
        "settings": dict(outcome.settings),
        "lacking": list(found.lacking),
        "unnamed": found.unnamed,
        "tables": tables,
        "claims": [asdict(claim) for claim in outcome.claims],
        "panels": [asdict(panel) for panel in outcome.panels],
        "radars": [asdict(radar) for radar in outcome.radars],
        "dots": [asdict(dots) for dots in outcome.dots],
        "runs": {
            name: {
                "config": dict(record.config),
                "rounds": len(record.reports),
                "stopped": record.stopped,
                "environment": dict(record.environment),
            }
            for name, record in found.records.items()
        },
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _cell(cell: Cell) -> dict[str, Any]:
    """A cell's numbers: what was never reached says so in words, and what was not measured is null."""
    values = [cell.infinite if value == math.inf else value for value in cell.values]
    mean = cell.infinite if cell.mean == math.inf else cell.mean
    # An infinite half width is none: one seed, or one that never got there, has no interval.
    half_width = cell.half_width if math.isfinite(cell.half_width) else None
    told = {"mean": mean, "half_width": half_width, "values": values, "paper": cell.paper}
    if 0 < len(cell.reached) < len(cell.values):
        told |= {"reached": len(cell.reached), "mean_of_reached": fmean(cell.reached)}
    return told


def _plain(value: Any) -> Any:
    """The same in what JSON knows: infinite in words, and null for a number that is none."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if isinstance(value, float) and math.isnan(value):
        return None
    return value
