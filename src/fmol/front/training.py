"""`train_front`: a run for every preference, side by side where the engine can."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fmol.config import Config, ConfigError, read_config, read_file
from fmol.engines import make_engine, resolve_device
from fmol.engines.seam import Engine
from fmol.errors import FmolError
from fmol.federation import Federation
from fmol.front.options import FrontOptions
from fmol.front.preferences import (
    Method,
    default_points,
    read_methods,
    spread_preferences,
)
from fmol.front.result import RESULTS, Front, FrontPoint, read_reference, write_front
from fmol.front.table import point_label
from fmol.record import RunRecord
from fmol.result import Result
from fmol.runs import RunError, RunFolder, RunMisuseError
from fmol.runs.folder import new_folder
from fmol.runs.identity import changed_keys
from fmol.runs.together import PlannedRun, steps_together, train_together
from fmol.runs.training import Say, StoppedError, Watch, train_config
from fmol.stationarity import measure_stationarity
from fmol.tradeoffs import load_moocore
from fmol.training import read_vector

__all__ = ["front_records", "train_front"]

Complain = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """One point that is to be trained, or was."""

    method: str
    index: int
    preference: Mapping[str, float]
    config: Config
    folder: RunFolder

    @property
    def name(self) -> str:
        return self.folder.path.name


def train_front(
    tables: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
    options: FrontOptions | None = None,
    *,
    out: str | Path | None = None,
    command: str = "",
    watch: Watch | None = None,
    say: Say = lambda text: None,
    complain: Complain | None = None,
) -> tuple[Path, Front]:
    """The folder and the front of the problem that `tables` and `flags` name, as for a run.

    Every preference is a run in a folder of its own under `out`; those that are finished are kept,
    those that are not go on. With the vectorized engine, or `auto` on a CUDA device, the lanes of all
    of them are stepped together; otherwise they run one after the other. Without a reference
    among `options` there is no hypervolume.

    >>> import tempfile
    >>> small = {"problem": "quadratic", "rounds": 2, "device": "cpu"}
    >>> path, front = train_front(small, {}, FrontOptions(points=3), out=tempfile.mkdtemp())
    >>> front.values().shape, (path / "front.json").is_file()
    ((3, 2), True)
    """
    flags = dict(flags or {})
    options = options or FrontOptions()
    methods = read_methods(options.method)
    base = _base(tables, flags, methods)
    for note in base.notes:
        say(note)
    say(f"building the problem {base.problem}")
    federation = base.build()
    names = federation.names
    if len(names) < 2:
        raise ConfigError([f"`{base.problem}` has one objective, so there is nothing to trade."])
    try:
        given = options.reference
        goal = None if given is None else read_reference(given, names)
        if goal is not None:
            load_moocore(len(names))  # Said before training, not after.
        shares = spread_preferences(len(names), options.points or default_points(len(names)))
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    seeded = [base.run.seed + i for i in range(options.seeds)]
    path = (
        Path(out) if out else new_folder("runs", f"front-{base.problem}", base.algorithm, seeded[0])
    )
    planned = _plan(tables, flags, methods, shares, names, seeded, path)
    todo = [run for run in planned if not _is_done(run)]
    say(f"{len(planned)} points, {len(planned) - len(todo)} of them done already, in {path}")
    failed = _train(federation, todo, command or _command(), watch, say, complain or say)
    say("measuring stationarity")
    done = [run for run in planned if run.folder.summary.is_file()]
    if not done:
        raise RunError(f"none of {len(planned)} points was trained; see what is said above.")
    front = Front(
        objectives=names,
        points=tuple(_measure(federation, done)),
        measure=options.measure,
        reference=goal,
        settings={k: v for k, v in base.tables.items() if k != "seed"},
    )
    write_front(path / RESULTS, front, command)
    if failed:
        write = f"The front of the other {len(done)} is in `{path / RESULTS}`."
        raise RunError(
            f"{len(failed)} of {len(planned)} points failed: {', '.join(failed)}. {write}"
        )
    return path, front


def _base(tables: Mapping[str, Any], flags: Mapping[str, str], methods: Sequence[Method]) -> Config:
    """What all points have in common, checked as a whole."""
    wrong: list[str] = []
    with contextlib.suppress(ConfigError):  # Which algorithm is meant is not known: said below.
        wrong += [text for method in methods for text in method.problems(tables, flags)]
    wrong = list(dict.fromkeys(wrong))
    try:
        base = read_config(tables, flags)
    except ConfigError as error:
        raise ConfigError([*error.problems, *wrong]) from error.__cause__
    if wrong:
        raise ConfigError(wrong)
    return base


def _command() -> str:
    return shlex.join(["fmol", *sys.argv[1:]])


def _plan(
    tables: Mapping[str, Any],
    flags: Mapping[str, str],
    methods: Sequence[Method],
    shares: Any,
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path,
) -> list[_Run]:
    """Every point, its config checked."""
    planned, problems = [], []
    width = len(str(len(shares) - 1))
    for method in methods:
        for index, row in enumerate(shares.tolist()):
            preference = dict(zip(names, row, strict=True))
            for seed in seeds:
                try:
                    config = method.config(tables, {**flags, "seed": str(seed)}, preference)
                except ConfigError as error:
                    problems += [text for text in error.problems if text not in problems]
                    continue
                folder = RunFolder(out / f"{method.name}-{index:0{width}}-seed{seed}")
                planned.append(_Run(method.name, index, preference, config, folder))
    if problems:
        raise ConfigError(problems)
    return planned


def _is_done(run: _Run) -> bool:
    """Whether a point was trained before; raises where its folder is of another config."""
    if not run.folder.config.is_file():
        return False
    before = read_file(run.folder.config)
    changes = changed_keys(before, run.config.tables)
    if changes:
        raise RunMisuseError(
            f"`{run.folder.path}` is of another front: {'; '.join(changes)}. Name another folder with "
            "`--out`."
        )
    return run.folder.summary.is_file() and before["rounds"] >= run.config.run.rounds


# ---- training --------------------------------------------------------------------------------


def _train(
    federation: Federation,
    todo: Sequence[_Run],
    command: str,
    watch: Watch | None,
    say: Say,
    complain: Complain,
) -> list[str]:
    """Trains what is to be trained; the names of runs that failed."""
    ended: dict[str, Any] = {}
    try:
        if len(todo) > 1 and steps_together(todo[0].config.run):
            planned = [PlannedRun(run.folder, run.config, federation) for run in todo]
            outcomes = train_together(planned, command=command, watch=watch, say=say)
            ended |= {run.name: each for run, each in zip(todo, outcomes, strict=True)}
        else:
            for run in todo:
                say(run.name)
                ended[run.name] = _outcome(
                    partial(_train_one, federation, run, command, watch, say)
                )
    except KeyboardInterrupt as error:
        ended["interrupt"] = error
    halted = (KeyboardInterrupt, StoppedError)
    stopped = next((each for each in ended.values() if isinstance(each, halted)), None)
    if stopped is not None:
        finished = sum(isinstance(each, Result) for each in ended.values())
        cause = stopped.__cause__ if isinstance(stopped, StoppedError) else stopped
        raise StoppedError(
            f"stopped: {finished} of {len(todo)} points are done, the others keep their rounds. Go "
            f"on with the same command and `--out {todo[0].folder.path.parent}`"
        ) from cause
    failed = {name: each for name, each in ended.items() if isinstance(each, BaseException)}
    for name, why in failed.items():
        if not isinstance(why, FmolError | RunError | ValueError | OSError):
            raise why
        complain(f"{name} failed: {why}")
    return list(failed)


def _outcome(run: Callable[[], Result]) -> Result | Exception:
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - said by who waits for it.
        return error


def _train_one(
    federation: Federation,
    run: _Run,
    command: str,
    watch: Watch | None,
    say: Say,
) -> Result:
    """The result of a point's run, gone on with where it was begun."""
    return train_config(run.folder, run.config, federation, command=command, watch=watch, say=say)


# ---- what came out ---------------------------------------------------------------------------


def _measure(federation: Federation, runs: Sequence[_Run]) -> list[FrontPoint]:
    """The points of finished runs, with the stationarity of each model."""
    options = runs[0].config.run
    machine = make_engine(
        "vectorized" if steps_together(runs[0].config.run) else "sequential",
        federation,
        seed=options.seed,
        device=resolve_device(options.device),
    )
    try:
        return [_point(machine, run) for run in runs]
    finally:
        machine.close()


def _point(engine: Engine, run: _Run) -> FrontPoint:
    from safetensors.torch import load_file

    final = run.folder.record().final
    assert final is not None
    options = run.config.run
    there = measure_stationarity(
        engine,
        read_vector(engine.federation, load_file(run.folder.model), "model"),
        run.config.algorithm_options.weighting,
        None if options.evaluate == "cohort" else options.evaluate,
        options.seed,
    )
    summary = run.folder.read_json(run.folder.summary)
    return FrontPoint(
        method=run.method,
        index=run.index,
        preference=run.preference,
        seed=options.seed,
        run=run.name,
        rounds=summary["rounds"],
        stopped=summary["stopped"],
        losses=final.losses,
        held_out=final.held_out,
        stationarity={
            "norm_squared": there.norm_squared,
            "relative": there.relative,
            "common_cosine": there.common_cosine,
        },
    )


def front_records(path: str | Path, front: Front) -> list[RunRecord]:
    """The records of a front's runs, called by method and preference: what its report is made of."""
    return [
        RunFolder(Path(path) / point.run).record(
            f"{point.method} {point_label(point, front.objectives)}"
        )
        for point in front.points
    ]
