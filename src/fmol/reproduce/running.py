"""Runs what an experiment takes into run folders, and writes down what it comes to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fmol import __version__
from fmol.config import Config, read_config, toml_value
from fmol.federation import Federation
from fmol.files import write_whole
from fmol.problems import find_problem
from fmol.problems.loading import find_data
from fmol.record import RunRecord
from fmol.reproduce.charts import write_charts
from fmol.reproduce.experiment import Experiment, Outcome, Place, Size, Trial
from fmol.runs import RunError, RunFolder, resume, start
from fmol.runs.identity import changed_keys
from fmol.runs.training import Watch

__all__ = ["RESULTS", "Reproduction", "missing_data", "reproduce"]

RESULTS = "results.json"
KEPT_BUILT = 4
"""Problems that are kept in memory: many runs are of one."""


@dataclass(frozen=True)
class Reproduction:
    """What an experiment came to, and where it is written."""

    experiment: Experiment
    size: Size
    outcome: Outcome
    records: Mapping[str, RunRecord]
    files: tuple[Path, ...]


def reproduce(
    experiment: Experiment,
    out: str | os.PathLike[str],
    *,
    small: bool = False,
    seeds: int | None = None,
    engine: str = "auto",
    device: str = "auto",
    data_dir: str | None = None,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Reproduction:
    """Runs an experiment into the folder `out`: `runs/`, `results.json` and figures.

    Runs that are there already are not run again, and one that was stopped is gone on with.
    """
    size = Size(small, seeds or (experiment.small_seeds if small else experiment.seeds))
    folder = Path(out)
    where = {"engine": engine, "device": device}
    if data_dir is not None:
        where["data_dir"] = data_dir
    built: dict[str, Federation] = {}
    records: dict[str, RunRecord] = {}
    for stage in experiment.stages:
        trials = stage(size, records)
        for number, trial in enumerate(trials, 1):
            config = read_config({**trial.tables, **where})
            at = f"{experiment.name} {number}/{len(trials)}: {trial.name}"
            _run(folder / "runs" / trial.name, trial, config, built, at, watch, say)
            records[trial.name] = RunFolder(folder / "runs" / trial.name).record(trial.name)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = experiment.conclude(size, records, Place(folder, say))
    content = _content(experiment, size, outcome, records)
    path = folder / RESULTS
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return Reproduction(experiment, size, outcome, records, (path, *write_charts(folder, outcome)))


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


def _run(
    path: Path,
    trial: Trial,
    config: Config,
    built: dict[str, Federation],
    at: str,
    watch: Watch | None,
    say: Callable[[str], None],
) -> None:
    if (path / "config.toml").is_file():
        record = RunFolder.open(path).record()
        changed = changed_keys(record.config, config.tables)
        if changed:
            raise RunError(
                f"`{path}` is of other settings than this experiment takes now: {changed[0]}. Name "
                "another folder, or remove that run."
            )
        if record.final is None:
            say(f"{at}, gone on with")
            resume(path, watch=watch, say=lambda text: None)
        return
    say(at)
    problem = toml_value(config.tables["problem"])
    if problem not in built:
        while len(built) >= KEPT_BUILT:
            built.pop(next(iter(built)))
        built[problem] = config.build()
    path.parent.mkdir(parents=True, exist_ok=True)
    start(config, path, federation=built[problem], watch=watch, say=lambda text: None)


def _content(
    experiment: Experiment, size: Size, outcome: Outcome, records: Mapping[str, RunRecord]
) -> dict[str, Any]:
    """Every number, with what it was computed from."""
    tables = [
        {
            "title": table.title,
            "columns": list(table.columns),
            "rows": {
                row: [
                    {"mean": cell.mean, "half_width": cell.half_width, **asdict(cell)}
                    for cell in cells
                ]
                for row, cells in table.rows.items()
            },
        }
        for table in outcome.tables
    ]
    content = {
        "fmol": __version__,
        "experiment": experiment.name,
        "title": experiment.title,
        "reading": experiment.reading,
        "size": asdict(size),
        "tables": tables,
        "claims": [asdict(claim) for claim in outcome.claims],
        "panels": [asdict(panel) for panel in outcome.panels],
        "radars": [asdict(radar) for radar in outcome.radars],
        "runs": {
            name: {
                "config": dict(record.config),
                "rounds": len(record.reports),
                "stopped": record.stopped,
                "environment": dict(record.environment),
            }
            for name, record in records.items()
        },
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _plain(value: Any) -> Any:
    """The same in what JSON knows: a number that is none, or infinite, is null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
