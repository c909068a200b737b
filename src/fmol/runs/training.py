"""Training into a run folder: what `fit` does, written down as it goes, and gone on with later."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmol.algorithms.trouble import known_trouble
from fmol.config import Config, RunOptions, read_config, read_file
from fmol.engines import (
    AutoEngine,
    EngineFactory,
    SequentialEngine,
    VectorizedEngine,
    all_devices,
    resolve_device,
)
from fmol.federation import Federation
from fmol.files import write_whole
from fmol.listeners import Listener
from fmol.metrics import conflict_rate
from fmol.participation import Participation
from fmol.portrait import portray
from fmol.problems import problem_file as file_of
from fmol.report import write_report
from fmol.result import Result, Snapshot
from fmol.rounds import Algorithm, Checkpoint, RoundReport
from fmol.runs.checkpoints import SavedState, remove_old, save_checkpoint
from fmol.runs.environment import describe_environment
from fmol.runs.folder import RunError, RunFolder, RunMisuseError, plain_numbers
from fmol.runs.identity import changed_keys, changed_versions, fingerprint, versions
from fmol.runs.metrics_log import MetricsLog, read_metrics
from fmol.training import Callback, fit

__all__ = ["StoppedError", "lane_options", "resume", "start", "train", "train_config"]

logger = logging.getLogger("fmol")

EVERY_ROUNDS, EVERY_SECONDS = 10, 60.0

FLOWER_APP = "flower-app"
"""What stands for the problem in the config of a run whose clients are sites of a Flower app."""

Say = Callable[[str], None]
Watch = Callable[[Federation, int, int], Sequence[Callback]]
"""Makes callbacks for a run of (federation, rounds already done, rounds in all): a progress line."""


class StoppedError(RunError):
    """A run that was stopped from outside, after writing a checkpoint."""


def start(
    config: Config,
    out: str | Path,
    *,
    command: str = "",
    federation: Federation | None = None,
    watch: Watch | None = None,
    say: Say = logger.info,
) -> Result:
    """The result of the run that `config` says, written into the new folder `out`.

    The folder holds config and environment before training begins. Interrupted, it writes a
    checkpoint and raises `StoppedError`; `resume(out)` goes on from there. `federation` is what
    `config.build()` gives, where that has been called already.
    """
    folder = RunFolder(out)
    if folder.path.exists():
        with writing(folder):
            folder = RunFolder.create(out)  # Says what is wrong before anything is built.
    for note in (*config.notes, *known_trouble(config.algorithm_options)):
        say(note)
    if federation is None:
        say(f"building the problem {config.problem}")
        federation = config.build()
    return train_config(folder, config, federation, command=command, watch=watch, say=say)


def train_config(
    folder: RunFolder,
    config: Config,
    federation: Federation,
    *,
    command: str = "",
    watch: Watch | None = None,
    say: Say = logger.info,
    engine: EngineFactory | None = None,
    participation: Participation | None = None,
    known: str = "",
    report: bool = True,
) -> Result:
    """The result of `config` with what it builds, begun in `folder` or gone on with there.

    `engine` is another than the config names, where several runs share one, and so is `participation`,
    where cohorts are drawn among those who are connected; `known` is the federation's fingerprint,
    where that was taken already. Without `report` no page is written.
    """
    with writing(folder):
        if not folder.config.is_file():
            folder = RunFolder.create(folder.path)
        write_whole(folder.config, config.to_toml())
        lock = folder.take_lock()
    try:
        with lock:
            return train(
                folder,
                federation,
                config.algorithm_options,
                config.run,
                config=config.tables,
                problem_file=config.problem_file,
                command=command,
                notes=config.notes,
                watch=watch,
                say=say,
                engine=engine,
                participation=participation,
                known=known,
                report=report,
            )
    except StoppedError:
        raise
    except BaseException:
        # Where not one round was done there is nothing to keep, and `out` is free again.
        folder.remove_if_empty()
        raise


def resume(
    path: str | Path,
    *,
    flags: Mapping[str, str] | None = None,
    anyway: bool = False,
    watch: Watch | None = None,
    say: Say = logger.info,
) -> Result:
    """The result of a run that was stopped, gone on with from its last good checkpoint.

    `flags` are options as on a command line: `{"rounds": "80"}` goes on to another number than was
    asked for at first. What would change results is refused, be it a flag, the config file or the
    problem; another version of fmol or torch, or another kind of device, only `anyway`.
    """
    folder = RunFolder.open(path)
    tables = read_file(folder.config)
    if tables.get("problem", {}).get("name") == FLOWER_APP:
        raise RunMisuseError(
            f"the clients of the run in `{folder.path}` are sites of a Flower app. Start that app "
            "again with the same folder, and it goes on."
        )
    if not any(folder.checkpoints.glob("round-*.ckpt")):
        say(f"there is no checkpoint in `{folder.path}`: it begins at round 0")
    before = folder.problem_file()
    config = read_config(tables, flags, before)
    say(f"building the problem {config.problem}{_found_in(config, before)}")
    federation = config.build()
    with writing(folder):
        lock = folder.take_lock()
    with lock:
        return train(
            folder,
            federation,
            config.algorithm_options,
            config.run,
            config=config.tables,
            problem_file=config.problem_file,
            # What may change, as the number of rounds, stands in the file from now on.
            toml=config.to_toml() if flags else "",
            anyway=anyway,
            watch=watch,
            say=say,
            notes=config.notes,
        )


def _found_in(config: Config, before: Path | None) -> str:
    """In which file a problem was found, where its name alone does not tell."""
    file = config.problem_file
    if file is None or before is None:
        return ""
    if not before.is_file():
        return f", of this folder: `{before}` is gone"
    named = file_of(config.problem)
    return "" if named is not None and named.resolve() == file.resolve() else f" in {file}"


def train(
    folder: RunFolder,
    federation: Federation,
    algorithm: Algorithm,
    options: RunOptions,
    *,
    config: Mapping[str, Any],
    problem_file: Path | None = None,
    toml: str = "",
    command: str = "",
    notes: Sequence[str] = (),
    anyway: bool = False,
    watch: Watch | None = None,
    say: Say = logger.info,
    engine: EngineFactory | None = None,
    participation: Participation | None = None,
    known: str = "",
    report: bool = True,
) -> Result:
    """The result of training into `folder`, from its last good checkpoint if it has one.

    `config` is what was asked for, by which a later resume tells whether it goes on with the same
    run, and `problem_file` is where its problem was found, if in a file; `toml` takes the place of the
    folder's config file, unless it is empty, and `engine` and `participation` those of what `options`
    name. `known` and `report` are as for `train_config`.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    begin = federation.layout.flatten(dict(federation.model.named_parameters()))
    identity = {
        "config": config,
        "federation": known or fingerprint(federation, begin),
        "versions": versions(device),
    }
    saved, said = folder.last_state()
    for text in said:
        say(text)
    if saved is not None:
        said += _changes(folder, saved, identity, anyway, say)
        if saved.rounds > options.rounds:
            raise RunMisuseError(
                f"`rounds` is {options.rounds}, and {saved.rounds} are done already in "
                f"`{folder.path}`. Give at least as many."
            )
    with writing(folder):
        folder.remove_leftovers()
        environment = _note_environment(
            folder, device, command, [*notes, *said], saved, problem_file
        )
        folder.write_json(folder.federation, portray(federation).to_json())
        if toml:
            write_whole(folder.config, toml)
    done = 0 if saved is None else saved.rounds
    if saved is not None and done >= options.rounds:
        say(f"all {done} rounds are done already; give more with `--rounds`")
    # Before the log is opened, which cuts off what a finished run ends with: an extra may be missing.
    listeners = _listeners(folder, options, config, environment, say)
    keeper = _Keeper(folder, identity, options, saved)
    callbacks: list[Callback] = [keeper, *listeners]
    callbacks += watch(federation, done, options.rounds) if watch else ()
    started = time.perf_counter()
    broken: BaseException | None = None
    try:
        with writing(folder):
            folder.remove_end()  # What an earlier end left is not of the run as it will be.
        result = fit(
            federation,
            algorithm,
            options.rounds,
            options.seed,
            engine or _engine(folder, options, environment, say),
            device,
            participation=participation or options.participation,
            evaluate=options.evaluate,
            evaluate_every=options.evaluate_every,
            stop_at=options.stop_at,
            true_gradients_every=options.true_gradients_every,
            resume=None if saved is None else _checkpoint(folder, saved),
            callbacks=callbacks,
        )
        with writing(folder):
            keeper.finish(result)
        for listener in listeners:
            listener.finish(result)
        if report:
            say("writing the report")
        with writing(folder):
            _write_end(folder, result, time.perf_counter() - started, report)
        return result
    except KeyboardInterrupt as error:
        broken = error
        with writing(folder):
            rounds = keeper.save()
        if not rounds:
            raise
        raise StoppedError(
            f"stopped after {rounds} rounds; a checkpoint is written. Go on with: "
            f"fmol resume {folder.path}"
        ) from error
    except Exception as error:
        broken = error
        if not isinstance(error, RunError):  # Then writing is what failed.
            with writing(folder):
                keeper.save()
        raise
    finally:
        keeper.close()
        for listener in listeners:
            listener.close(broken)


@contextlib.contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Turns a failure to write into a sentence that says what stands and what to do."""
    try:
        yield
    except OSError as error:
        there = folder.checkpoints.is_dir() and any(folder.checkpoints.glob("round-*.ckpt"))
        stands = (
            f"The last checkpoint is intact: make room or give leave to write, then `fmol resume "
            f"{folder.path}`."
            if there
            else "Nothing was lost: no round was done. Name another folder with `--out`."
        )
        reason = error.strerror or str(error)
        raise RunError(f"`{folder.path}` cannot be written to: {reason}. {stands}") from error


@dataclass
class _Keeper:
    """The callback that writes a run down: a line per round, and checkpoints."""

    folder: RunFolder
    identity: Mapping[str, Any]
    options: RunOptions
    saved: SavedState | None
    log: MetricsLog = field(init=False)
    latest: tuple[Checkpoint, int, str] | None = None
    """The state after the last round that was written to the log, and how much of the log that is."""

    def __post_init__(self) -> None:
        keep = 0 if self.saved is None else self.saved.metrics_bytes
        with writing(self.folder):
            self.log = MetricsLog(self.folder.metrics, keep)
        self.last_rounds = 0 if self.saved is None else self.saved.rounds
        self.last_time = time.monotonic()

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        with writing(self.folder):
            self.log.add(report)
            # One assignment: an interrupt may come between any two.
            self.latest = (snapshot.checkpoint(), self.log.bytes, self.log.sha256)
            if self._due():
                self.save()

    def _due(self) -> bool:
        assert self.latest is not None
        rounds = len(self.latest[0].reports) - self.last_rounds
        if self.options.checkpoint_every is not None:
            return rounds >= self.options.checkpoint_every
        return rounds >= EVERY_ROUNDS or time.monotonic() - self.last_time >= EVERY_SECONDS

    def save(self) -> int:
        """Writes a checkpoint of the latest round, unless it has one; how many rounds are done."""
        if self.latest is None or len(self.latest[0].reports) <= self.last_rounds:
            return self.last_rounds
        kept, size, sha256 = self.latest
        self.log.sync()  # A checkpoint may only speak of metrics that are on the disk.
        rounds = len(kept.reports)
        save_checkpoint(
            self.folder.checkpoints,
            SavedState(
                rounds, kept.state, kept.client_state, kept.seed, size, sha256, self.identity
            ),
        )
        self.last_rounds, self.last_time = rounds, time.monotonic()
        return rounds

    def finish(self, result: Result) -> None:
        # Before the last line of the log: whoever goes on with more rounds cuts it off again.
        self.save()
        remove_old(self.folder.checkpoints)  # A killed run may have left one more.
        self.log.finish(result.final, result.stopped)

    def close(self) -> None:
        self.log.close()


def _checkpoint(folder: RunFolder, saved: SavedState) -> Checkpoint:
    reports, _, _ = read_metrics(folder.metrics, saved.metrics_bytes)
    if len(reports) != saved.rounds:
        raise RunError(
            f"the checkpoint is of {saved.rounds} rounds and `{folder.metrics.name}` holds "
            f"{len(reports)} of them. Start the run anew in another folder."
        )
    return Checkpoint(saved.state, tuple(reports), saved.client_state, saved.seed)


def _changes(
    folder: RunFolder,
    saved: SavedState,
    identity: Mapping[str, Any],
    anyway: bool,
    say: Say,
) -> list[str]:
    """What has changed since the checkpoint and does no harm; raises for what would."""
    changes = changed_keys(saved.identity["config"], identity["config"])
    if changes:
        raise RunMisuseError(
            f"the config is not what the run in `{folder.path}` was started with: "
            f"{'; '.join(changes)}. Results would be of neither. Change it back, or start a new run."
        )
    if saved.identity["federation"] != identity["federation"]:
        raise RunError(
            "the problem is not what the run was started with: its model, objectives, clients or "
            "data have changed. Restore them (a problem of your own must build the same each time: "
            "seed what it draws), or start a new run."
        )
    other = changed_versions(saved.identity["versions"], identity["versions"])
    if other and not anyway:
        raise RunError(
            f"{'; '.join(other)} since the run was started, so results may differ from those of an "
            "unbroken run. Go back, or accept that with `--anyway`."
        )
    said = [f"After round {saved.rounds}: {text}." for text in other]
    for text in said:
        say(text)
    return said


def _note_environment(
    folder: RunFolder,
    device: torch.device,
    command: str,
    notes: Sequence[str],
    saved: SavedState | None,
    problem_file: Path | None,
) -> dict[str, Any]:
    """Writes where the problem is and on what the run is made, from its start and after each resume."""
    now = describe_environment(device)
    if folder.environment.exists():
        known = folder.read_json(folder.environment)
        at = 0 if saved is None else saved.rounds
        known["resumed"] = [*known.get("resumed", ()), {"round": at, **now}]
        known["notes"] = [*known.get("notes", ()), f"Resumed after round {at}.", *notes]
    else:
        known = {"command": command, "started": now, "resumed": [], "notes": list(notes)}
    if problem_file is not None:
        known["problem_file"] = folder.path_from_here(problem_file)
    folder.write_json(folder.environment, known)
    return known


def _engine(
    folder: RunFolder, options: RunOptions, environment: dict[str, Any], say: Say
) -> EngineFactory:
    """The engine; where it is chosen by measuring, the choice of the first stretch is kept."""
    if options.engine == "sequential":
        return partial(SequentialEngine, precision=options.precision)
    if options.engine == "flower":
        from fmol.flower import FlowerEngine

        return partial(FlowerEngine, precision=options.precision, backend=options.flower_backend)
    side_by_side = lane_options(options, say)
    if options.engine == "vectorized":
        return partial(VectorizedEngine, **side_by_side)

    def keep(choice: str) -> None:
        environment["engine"] = choice
        folder.write_json(folder.environment, environment)

    return partial(AutoEngine, choice=environment.get("engine"), decided=keep, **side_by_side)


def lane_options(options: RunOptions, say: Say) -> dict[str, Any]:
    """What a run's options say to an engine that steps lanes side by side."""
    return {
        "precision": options.precision,
        "compile": options.compile,
        "lanes_in_flight": options.lanes_in_flight,
        "devices": all_devices(options.device),
        "say": say,
    }


def _listeners(
    folder: RunFolder,
    options: RunOptions,
    config: Mapping[str, Any],
    environment: dict[str, Any],
    say: Say,
) -> list[Listener]:
    listeners: list[Listener] = []
    if options.tensorboard:
        from fmol.listeners.tensorboard import TensorBoard

        listeners.append(TensorBoard(folder.events))
    if options.mlflow is not None:
        from fmol.listeners.mlflow import MLflow

        say(f"connecting to MLflow at {options.mlflow}")

        kept = environment.get("mlflow_run")
        listener = MLflow(options.mlflow, run_name=folder.path.name, params=config, run_id=kept)
        listeners.append(listener)
        if kept is None:  # So that a resumed run goes on in the same curves.
            environment["mlflow_run"] = listener.run_id
            folder.write_json(folder.environment, environment)
    return listeners


def _write_end(folder: RunFolder, result: Result, seconds: float, report: bool) -> None:
    from safetensors.torch import save

    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in result.model.state_dict().items()
    }
    write_whole(folder.model, save(tensors, metadata={"format": "pt"}))
    folder.write_json(folder.summary, summarize(result, seconds))
    if report:
        write_report(folder.report, [folder.record()])


def summarize(result: Result, seconds: float) -> dict[str, Any]:
    """A run's outcome in a few numbers, for `summary.json`."""
    reports = result.reports
    alarms = reports[-1].alarms if reports else ()
    data = {
        "algorithm": type(result.algorithm).__name__,
        "seed": result.seed,
        "rounds": len(reports),
        "stopped": result.stopped,
        "losses": result.final.losses,
        "held_out": result.final.held_out,
        "evaluated": result.final.evaluated,
        "conflict_rate": conflict_rate(reports),
        "bytes_up": sum(report.bytes_up for report in reports),
        "bytes_down": sum(report.bytes_down for report in reports),
        "seconds": seconds,
        "refused": sum(len(report.refused) for report in reports) + len(result.final.refused),
        "alarms": [
            {"kind": a.kind, "objective": a.objective, "message": a.message} for a in alarms
        ],
        "notes": sorted({note for report in reports for note in report.notes}),
    }
    plain: dict[str, Any] = plain_numbers(data)
    return plain
