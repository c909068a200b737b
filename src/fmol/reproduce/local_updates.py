"""Loss against rounds, and against local updates, for several K (figures 1 b and of the appendix)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fmol.reproduce.digits import (
    LABELS,
    PARTITIONS,
    READING,
    TASKS,
    algorithm,
    curves,
    digits,
    ends,
    ranked,
    weighing,
)
from fmol.reproduce.experiment import Cost, Experiment, Outcome, Place, Records, Size, Trial
from fmol.reproduce.naming import complete, named

__all__ = ["LOCAL_UPDATES"]


def _steps(size: Size) -> tuple[int, ...]:
    return (1, 5, 20) if size.small else (1, 5, 10, 20)


def _kinds(size: Size) -> tuple[str, ...]:
    return ("fsmgda",) if size.small else ("fmgda", "fsmgda")


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    options = {"fmgda": {}, "fsmgda": {"batch_size": 64}}
    return [
        Trial(
            named(partition, kind, f"k{steps}", seed=seed),
            {
                "rounds": 30 if size.small else 100,
                "seed": seed,
                "problem": digits(size, partition, samples=256, seed=seed),
                "algorithm": algorithm(kind, local_steps=steps, **options[kind]),
            },
        )
        for partition in PARTITIONS
        for kind in _kinds(size)
        for steps in _steps(size)
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    stretch = {f"K = {k}": float(k) for k in _steps(size)}
    updates = "local updates (K × rounds)"
    for partition, kind in itertools.product(PARTITIONS, _kinds(size)):
        settings = {f"K = {k}": (partition, kind, f"k{k}") for k in _steps(size)}
        if not complete(records, size, settings.values()):
            continue
        words = LABELS[partition]
        title = f"{kind.upper()}, {words}"
        tables.append(ends(records, size, f"{title}, after the last round", settings))
        tables.append(weighing(records, size, title, settings))
        text = f"{kind.upper()} needs fewer rounds the more local steps it takes ({words})"
        claims.append(ranked(records, size, text, settings, strict=True))
        for task in TASKS:
            panels.append(curves(records, size, title, settings, task))
            panels.append(curves(records, size, title, settings, task, stretch, updates))
    return Outcome(tables, claims, panels)


LOCAL_UPDATES = Experiment(
    "local-updates",
    "Rounds and local updates for K = 1, 5, 10, 20 (figure 1 b, appendix)",
    "K counts gradient steps; FSMGDA with batches of 64. Figure 1 b is of non-i.i.d. clients, the "
    "appendix has i.i.d. ones: here both, with two left labels a client.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("12 s", gpu="about 4 min (shared)", cpu="about 100 min (estimated)"),
    data=("multimnist",),
)
