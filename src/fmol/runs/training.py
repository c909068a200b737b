"""Training into a run folder: what `fit` does, written down as it goes, and gone on with later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fmol.algorithms.trouble import known_trouble
from fmol.config import Config, RunOptions, read_config, read_file
from fmol.engines import EngineFactory, resolve_device
from fmol.environment import describe_environment
from fmol.federation import Federation
from fmol.files import write_whole
from fmol.listeners import Listener
from fmol.participation import Participation
from fmol.portrait import portray
from fmol.problems import problem_file as file_of
from fmol.result import Result
from fmol.rounds import Algorithm
from fmol.runs.checkpoints import SavedState
from fmol.runs.end import write_end
from fmol.runs.engine import named_engine
from fmol.runs.folder import RunError, RunFolder, RunMisuseError, writing
from fmol.runs.identity import check_unchanged, fingerprint, versions
from fmol.runs.keeper import Keeper, read_checkpoint
from fmol.training import Callback, fit
from fmol.wording import many

__all__ = ["StoppedError", "resume", "start", "train", "train_config"]

logger = logging.getLogger("fmol")

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
        harmless = check_unchanged(folder.path, saved, identity, anyway)
        for text in harmless:
            say(text)
        said += harmless
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
        already = "the 1 round is" if done == 1 else f"all {done} rounds are"
        say(f"{already} done already; give more with `--rounds`")
    # Before the log is opened, which cuts off what a finished run ends with: an extra may be missing.
    listeners = _listeners(folder, options, config, environment, say)
    keeper = Keeper(folder, identity, options, saved)
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
            engine or named_engine(folder, options, environment, say),
            device,
            participation=participation or options.participation,
            evaluate=options.evaluate,
            evaluate_every=options.evaluate_every,
            stop_at=options.stop_at,
            true_gradients_every=options.true_gradients_every,
            resume=None if saved is None else read_checkpoint(folder, saved),
            callbacks=callbacks,
        )
        with writing(folder):
            if environment["resumed"] and len(result.reports) == done:
                _forget_resumption(folder, environment)
            keeper.finish(result)
        for listener in listeners:
            listener.finish(result)
        if report:
            say("writing the report")
        with writing(folder):
            write_end(folder, result, time.perf_counter() - started, report)
        return result
    except KeyboardInterrupt as error:
        broken = error
        with writing(folder):
            rounds = keeper.save()
        if not rounds:
            raise
        raise StoppedError(
            f"stopped after {many(rounds, 'round')}; a checkpoint is written. See what there is with: "
            f"fmol report {folder.path}. Go on with: fmol resume {folder.path}"
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
        known["notes"] = [*known.get("notes", ()), _resumption(at), *notes]
    else:
        known = {"command": command, "started": now, "resumed": [], "notes": list(notes)}
    if problem_file is not None:
        known["problem_file"] = folder.path_from_here(problem_file)
    folder.write_json(folder.environment, known)
    return known


def _resumption(at: int) -> str:
    return f"Resumed after round {at}."


def _forget_resumption(folder: RunFolder, environment: dict[str, Any]) -> None:
    """Takes back what was written before it was known that no round would be added."""
    at = environment["resumed"].pop()["round"]
    environment["notes"].remove(_resumption(at))
    folder.write_json(folder.environment, environment)


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
