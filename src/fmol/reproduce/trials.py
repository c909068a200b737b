"""The runs of an experiment: which are there, and training the others, many at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fmol.config import Config, read_config, read_file, toml_value
from fmol.errors import FmolError
from fmol.federation import Federation
from fmol.files import write_whole
from fmol.portrait import portray
from fmol.record import RunRecord
from fmol.reproduce.experiment import Trial
from fmol.reproduce.numbers import rounds_until_all
from fmol.result import Result, Snapshot
from fmol.rounds import RoundReport
from fmol.runs import RunFolder, RunMisuseError
from fmol.runs.identity import changed_keys
from fmol.runs.metrics_log import read_metrics
from fmol.runs.together import PlannedRun, most_together, train_planned, train_together
from fmol.runs.training import StoppedError, Watch
from fmol.training import Callback

__all__ = ["FAILED", "Trials"]

FAILED = "failed.txt"
"""In the folder of a run that ended with an error: what it said. It is not run again."""
HOPELESS, PATIENCE = 2.0, 5
"""A run is given up if a loss is more than so many times its first, in so many rounds running."""

Say = Callable[[str], None]


@dataclass
class Race:
    """How many rounds the fastest of some runs took to where all of them are to stop."""

    best: float = math.inf

    def over(self, report: RoundReport, snapshot: Snapshot) -> bool:
        """Whether a run that was not there by this round can only be later."""
        return report.round >= self.best

    def enter(self, rounds: float) -> None:
        self.best = min(self.best, rounds)


@dataclass
class Hope:
    """Whether losses still say that a run may reach what it is to stop at."""

    first: dict[str, float] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)
    """Rounds in which some loss was far above its first."""

    def look(self, report: RoundReport) -> None:
        measured = {name: loss for name, loss in report.losses.items() if not math.isnan(loss)}
        self.first = self.first or measured
        if any(loss > HOPELESS * self.first[name] for name, loss in measured.items()):
            self.bad.add(report.round)

    def lost(self, report: RoundReport, snapshot: Snapshot) -> bool:
        """Whether the run is to be given up after this round."""
        self.look(report)
        return all(report.round - back in self.bad for back in range(PATIENCE))


@dataclass
class Trials:
    """Trains trials into `folder`, each in a folder of its own, those that are there left out."""

    folder: Path
    where: Mapping[str, Any]
    """Engine, device, precision and data, as a config file has them."""
    watch: Watch | None = None
    say: Say = lambda text: None
    _built: dict[str, Federation] = field(default_factory=dict)

    def run(self, trials: Sequence[Trial], called: str) -> None:
        """Trains those of `trials` that are not there; one that was stopped goes on."""
        todo = [(trial, config) for trial in trials if (config := self._config_of(trial))]
        races = {trial.race: Race() for trial in trials if trial.race}
        for trial in trials:
            if trial.race and self._is_done(trial):
                races[trial.race].enter(_reached(self.record(trial), trial.tables["stop_at"]))
        done = 0
        for group in _groups(todo, most_together(todo[0][1].run) if todo else 1):
            self.say(f"{called}: {done} of {len(todo)} runs done, now {_span(group)}")
            planned = [self._plan(trial, config, races) for trial, config in group]
            self._train(planned)
            done += len(group)

    def record(self, trial: Trial) -> RunRecord:
        """What is known of a run that is there, but for what single clients did in each round."""
        whole = RunFolder(self.folder / trial.name).record(trial.name)
        # An experiment may have thousands of runs, and clients' lines are most of what they take.
        return replace(whole, reports=tuple(replace(each, clients=()) for each in whole.reports))

    def found(self, trials: Sequence[Trial]) -> dict[str, RunRecord]:
        """The records of those trials that are there, by name."""
        return {trial.name: self.record(trial) for trial in trials if self._is_done(trial)}

    def _is_done(self, trial: Trial) -> bool:
        path = self.folder / trial.name
        return RunFolder(path).summary.is_file() or (path / FAILED).is_file()

    def _config_of(self, trial: Trial) -> Config | None:
        """What is to be run; None where it is there already, and an error where another is."""
        config = read_config({**trial.tables, **self.where})
        path = self.folder / trial.name
        if not RunFolder(path).config.is_file():
            return config
        changed = changed_keys(read_file(RunFolder(path).config), config.tables)
        if changed:
            raise RunMisuseError(
                f"`{path}` is of other settings than this experiment takes now: {changed[0]}. Name "
                "another folder, or remove that run."
            )
        return None if self._is_done(trial) else config

    def _plan(self, trial: Trial, config: Config, races: Mapping[str, Race]) -> PlannedRun:
        folder = RunFolder(self.folder / trial.name)
        callbacks: list[Callback] = []
        if trial.hopeful:
            hope = Hope()
            saved, _ = folder.last_state()
            if saved is not None:  # It goes on, and its first losses are of then.
                for report in read_metrics(folder.metrics, saved.metrics_bytes)[0]:
                    hope.look(report)
            callbacks.append(hope.lost)
        ended: Callable[[Result], object] = lambda result: None  # noqa: E731
        if trial.race:
            race, goal = races[trial.race], trial.tables["stop_at"]
            callbacks.append(race.over)

            def ended(result: Result) -> None:
                if all(loss <= goal for loss in result.final.losses.values()):
                    race.enter(len(result.reports))

        return PlannedRun(folder, config, self._build(config), callbacks, ended)

    def _build(self, config: Config) -> Federation:
        problem = toml_value(config.tables["problem"])
        if problem not in self._built:
            self._built[problem] = config.build()
        return self._built[problem]

    def _train(self, planned: Sequence[PlannedRun]) -> None:
        """Trains some runs; what fails is written down, and what stops them stops all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if planned[0].config.run.engine == "sequential":
            outcomes = list(self._one_by_one(planned))
        else:
            outcomes = train_together(planned, watch=self.watch, say=self.say, report=False)
        for run, outcome in zip(planned, outcomes, strict=False):
            if isinstance(outcome, FmolError):
                _write_failure(run, str(outcome))
                self.say(f"{run.name} failed: {outcome}")
        # Problems of the next group may be the same; all would be too many.
        kept = {toml_value(run.config.tables["problem"]) for run in planned}
        self._built = {name: each for name, each in self._built.items() if name in kept}
        for outcome in outcomes:
            if isinstance(outcome, KeyboardInterrupt | StoppedError):
                cause = outcome.__cause__ if isinstance(outcome, StoppedError) else outcome
                raise StoppedError(
                    f"stopped: runs in `{self.folder}` keep their rounds. Go on with the same command"
                ) from cause
            if isinstance(outcome, BaseException) and not isinstance(outcome, FmolError):
                raise outcome

    def _one_by_one(self, planned: Sequence[PlannedRun]) -> Iterator[Result | BaseException]:
        for run in planned:
            try:
                yield train_planned(run, watch=self.watch, report=False)
            except (FmolError, StoppedError, KeyboardInterrupt) as error:
                yield error
                if not isinstance(error, FmolError):
                    return


def _groups(
    todo: Sequence[tuple[Trial, Config]], most: int
) -> Iterator[Sequence[tuple[Trial, Config]]]:
    """Runs that last about as long, so that their steps are taken together to the end; so many at
    most."""
    alike: dict[Any, list[tuple[Trial, Config]]] = {}
    for trial, config in todo:
        told = config.tables["algorithm"]
        pace = tuple(told.get(key) for key in ("local_steps", "local_epochs", "batch_size"))
        key = (config.problem, config.run.rounds, pace)
        alike.setdefault(key, []).append((trial, config))
    for group in alike.values():
        parts = math.ceil(len(group) / most)
        size = math.ceil(len(group) / parts)
        yield from (group[i : i + size] for i in range(0, len(group), size))


def _span(group: Sequence[tuple[Trial, Config]]) -> str:
    first, last = group[0][0].name, group[-1][0].name
    return first if len(group) == 1 else f"{len(group)} from {first} to {last}"


def _reached(record: RunRecord, goal: float) -> float:
    """After how many rounds all losses were where the run was to stop; infinite if they were not."""
    return rounds_until_all(record, record.portrait.objectives, goal)


def _write_failure(run: PlannedRun, text: str) -> None:
    """Notes that a run ended with an error; one without a single round leaves its settings."""
    folder = run.folder
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.config.is_file():
        write_whole(folder.config, run.config.to_toml())
        folder.write_json(folder.federation, portray(run.federation).to_json())
        write_whole(folder.metrics, "")
    write_whole(folder.path / FAILED, f"{text}\n")
