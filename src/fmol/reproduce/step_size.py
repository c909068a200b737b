"""Local step sizes (appendix)."""

from __future__ import annotations

from collections.abc import Sequence

from fmol.reproduce.digits import (
    LABELS,
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

__all__ = ["STEP_SIZE"]

STEPS = (0.01, 0.05, 0.1)
KINDS = ("fmgda", "fsmgda")
PARTITION = "left-shards"


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    options = {"fmgda": {}, "fsmgda": {"batch_size": 64}}
    return [
        Trial(
            named(kind, f"lr{step}", seed=seed),
            {
                "rounds": 40 if size.small else 100,
                "seed": seed,
                "problem": digits(size, PARTITION, clients=5, samples=256, seed=seed),
                "algorithm": algorithm(kind, local_steps=10, **options[kind]) | {"local_lr": step},
            },
        )
        for kind in KINDS
        for step in STEPS
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    for kind in KINDS:
        settings = {f"η_L = {step}": (kind, f"lr{step}") for step in STEPS}
        if not complete(records, size, settings.values()):
            continue
        tables.append(ends(records, size, f"{kind.upper()}, after the last round", settings))
        tables.append(weighing(records, size, kind.upper(), settings))
        text = f"{kind.upper()} converges faster with a larger local step size, up to 0.1"
        claims.append(ranked(records, size, text, settings, strict=True))
        panels += [curves(records, size, kind.upper(), settings, task) for task in TASKS]
    return Outcome(tables, claims, panels)


STEP_SIZE = Experiment(
    "step-size",
    "Local step sizes 0.01, 0.05 and 0.1 (appendix)",
    f"M = 5, K = 10 gradient steps, η_t = 0.1, {LABELS[PARTITION]}; FSMGDA with batches of 64.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("14 s", gpu="2.8 min (shared)", cpu="about 45 min (estimated)"),
    data=("multimnist",),
)
