"""What an experiment takes before it is run: runs, rounds, and steps of lanes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmol.algorithms.mixture import MixtureOptions
from fmol.config import Config, read_config, toml_value
from fmol.engines.seam import LocalConfig
from fmol.federation import Federation
from fmol.local import step_count
from fmol.reproduce.experiment import Experiment, Size
from fmol.reproduce.running import UnmatchedError, is_wanted

__all__ = ["PlannedPart", "plan_runs"]


@dataclass(frozen=True)
class PlannedPart:
    """Runs of one problem with as many rounds and local steps: those that are stepped together."""

    label: str
    runs: int
    rounds: int
    """Of all runs together."""
    lanes: int
    """Of all runs together, in one round."""
    lane_steps: int
    """Gradient steps of all lanes in all rounds."""


def plan_runs(
    experiment: Experiment,
    size: Size,
    only: Sequence[str] = (),
    data_dir: str | os.PathLike[str] | None = None,
) -> list[PlannedPart]:
    """What the runs take at most: those that stop early take less.

    With `only`, of those alone that have such a name; raises where there are none. Problems are built,
    one for all seeds and partitions, since they say who takes how many steps.
    """
    built: dict[str, Federation] = {}
    parts: dict[str, list[tuple[int, int, int]]] = {}
    where = {} if data_dir is None else {"data_dir": str(data_dir)}
    for stage in experiment.stages:
        for trial in stage(size, None):
            if not is_wanted(trial.name, only):
                continue
            config = read_config({**trial.tables, **where})
            table: Mapping[str, Any] = config.tables["problem"]
            problem = toml_value({k: v for k, v in table.items() if k not in ("seed", "partition")})
            if problem not in built:
                built[problem] = config.build()
            lanes, steps = _lanes(config, built[problem])
            rounds = config.run.rounds
            parts.setdefault(_label(config), []).append((rounds, lanes, rounds * steps))
    if only and not parts:
        raise UnmatchedError(experiment, size, only)
    return [
        PlannedPart(
            label,
            runs=len(each),
            rounds=sum(rounds for rounds, _, _ in each),
            lanes=sum(lanes for _, lanes, _ in each),
            lane_steps=sum(steps for _, _, steps in each),
        )
        for label, each in parts.items()
    ]


def _lanes(config: Config, federation: Federation) -> tuple[int, int]:
    """How many lanes a round has, and how many steps all of them take in it."""
    options = config.algorithm_options
    local = LocalConfig(
        lr=0.0,
        steps=getattr(options, "local_steps", 1),
        epochs=getattr(options, "local_epochs", None),
        batch_size=getattr(options, "batch_size", None),
    )
    lanes = steps = 0
    for client in map(federation.client, federation.population.ids()):
        # One for the mixture of all objectives, or one for each of them.
        mine = 1 if isinstance(options, MixtureOptions) else len(client.objectives)
        lanes += mine
        steps += mine * step_count(local, len(client.data[0]))
    return lanes, steps


def _label(config: Config) -> str:
    told = config.tables["algorithm"]
    words = [f"{config.problem}, {config.run.rounds} rounds"]
    words += [
        f"{key} {told[key]}"
        for key in ("local_steps", "local_epochs", "batch_size")
        if told.get(key) not in (None, "none")
    ]
    return ", ".join(words)
