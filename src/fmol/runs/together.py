"""Several runs at a time, each into a folder of its own, their lanes stepped side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fmol.config import Config, RunOptions
from fmol.engines import resolve_device
from fmol.engines.memory import free_memory
from fmol.engines.seam import Engine
from fmol.federation import Federation
from fmol.lockstep import Guest, place_data, run_in_lockstep
from fmol.result import Result
from fmol.runs.engine import lane_options
from fmol.runs.folder import RunFolder
from fmol.runs.identity import fingerprint
from fmol.runs.training import Say, Watch, train_config
from fmol.training import Callback

__all__ = ["PlannedRun", "most_together", "steps_together", "train_planned", "train_together"]

MOST_TOGETHER = 128
"""Runs that go on at a time, at most: each keeps files open."""
RUN_BYTES, RUNS_SHARE = 150_000_000, 0.25
"""What a run takes of a GPU beside its lanes, about, since libraries keep handles and work space for
every thread; and how much of what is free all of them may take so."""


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be trained, or gone on with: its folder, its config, and what that builds."""

    folder: RunFolder
    config: Config
    federation: Federation
    callbacks: Sequence[Callback] = field(default=(), repr=False)
    """What is called after each of its rounds, and may stop it."""
    ended: Callable[[Result], object] = field(default=lambda result: None, repr=False)
    """What is told when it has ended, while others may go on."""

    @property
    def name(self) -> str:
        return self.folder.path.name


def steps_together(options: RunOptions) -> bool:
    """Whether the engine that is asked for steps lanes of several runs side by side."""
    if options.engine == "auto":
        return resolve_device(options.device).type == "cuda"
    return options.engine == "vectorized"


def most_together(options: RunOptions) -> int:
    """How many runs are to go on at a time."""
    device = resolve_device(options.device)
    if device.type != "cuda":
        return MOST_TOGETHER
    return max(1, min(MOST_TOGETHER, int(RUNS_SHARE * free_memory(device) / RUN_BYTES)))


def train_planned(
    run: PlannedRun,
    *,
    command: str = "",
    watch: Watch | None = None,
    say: Say = lambda text: None,
    report: bool = True,
    engine: Engine | None = None,
    known: str = "",
) -> Result:
    """What one run gives, begun or gone on with; `engine` is one that it shares with others."""

    def called(federation: Federation, done: int, rounds: int) -> list[Callback]:
        return [*(watch(federation, done, rounds) if watch else ()), *run.callbacks]

    result = train_config(
        run.folder,
        run.config,
        run.federation,
        command=command,
        watch=called,
        say=say,
        engine=None if engine is None else lambda *arguments, **options: engine,
        known=known,
        report=report,
    )
    run.ended(result)
    return result


def train_together(
    runs: Sequence[PlannedRun],
    *,
    command: str = "",
    watch: Watch | None = None,
    say: Say = lambda text: None,
    report: bool = True,
) -> list[Result | BaseException]:
    """What each run gives, or what ended it, all in lock-step; the progress line is one's alone.

    All are to have the same engine, device and precision. Runs of one federation share its data on
    the device. Without `report` they write no page of their own.
    """
    if not runs:
        return []
    options = runs[0].config.run
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    shown = runs[len(runs) // 2]  # Of a front, not one that neglects an objective on purpose.
    quiet: Say = lambda text: None  # noqa: E731
    placed: dict[int, tuple[Federation, str]] = {}
    for run in runs:
        if id(run.federation) not in placed:
            start = run.federation.layout.flatten(dict(run.federation.model.named_parameters()))
            known = fingerprint(run.federation, start)
            placed[id(run.federation)] = place_data(run.federation, device), known

    def guest(run: PlannedRun) -> Guest:
        mine = run is shown
        federation, known = placed[id(run.federation)]

        def go(engine: Engine) -> Result:
            return train_planned(
                replace(run, federation=federation),
                command=command,
                watch=watch if mine else None,
                say=say if mine else quiet,
                report=report,
                engine=engine,
                known=known,
            )

        return Guest(federation, run.config.run.seed, run.config.run.rounds, go)

    if len(runs) > 1:
        say(f"{len(runs)} runs side by side; the line is that of {shown.name}")
    return run_in_lockstep(
        [guest(run) for run in runs], device=device, **lane_options(options, say)
    )
