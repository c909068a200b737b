"""Local step sizes (appendix)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fmol.reproduce.digits import (
    LABELS,
    READING,
    TASKS,
    accuracies,
    algorithm,
    curves,
    digits,
    finals,
    named,
)
from fmol.reproduce.experiment import Claim, Experiment, Outcome, Place, Records, Size, Table, Trial
from fmol.reproduce.numbers import mean_log_loss

__all__ = ["STEP_SIZE"]

STEPS = (0.01, 0.05, 0.1)
KINDS = ("fmgda", "fsmgda")
PARTITION = "left-shards"


def _trials(size: Size, done: Records) -> Sequence[Trial]:
    options = {"fmgda": {}, "fsmgda": {"batch_size": 64}}
    return [
        Trial(
            named(kind, f"lr{step}", seed=seed),
            {
                "rounds": 60 if size.small else 100,
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
        rows = {
            f"η_L = {step}": [
                *finals(records, size, kind, f"lr{step}"),
                *accuracies(records, size, kind, f"lr{step}"),
            ]
            for step in STEPS
        }
        columns = ("loss L", "loss R", "accuracy L", "accuracy R")
        tables.append(Table(f"{kind.upper()}, after the last round", columns, rows))
        settings = {f"η_L = {step}": (kind, f"lr{step}") for step in STEPS}
        panels += [curves(records, size, kind.upper(), settings, task) for task in TASKS]
        lows = {
            step: sum(
                mean_log_loss(records[named(kind, f"lr{step}", seed=s)], list(TASKS))
                for s in range(size.seeds)
            )
            / size.seeds
            for step in STEPS
        }
        claims.append(
            Claim(
                f"{kind.upper()} converges faster with a larger local step size, up to 0.1",
                all(lows[b] < lows[a] for a, b in itertools.pairwise(STEPS)),
                "mean of log loss over all rounds: "
                + ", ".join(f"η_L = {step} {low:.3f}" for step, low in lows.items()),
            )
        )
    return Outcome(tables, claims, panels)


STEP_SIZE = Experiment(
    "step-size",
    "Local step sizes 0.01, 0.05 and 0.1 (appendix)",
    READING
    + f" M = 5, K = 10 gradient steps, η_t = 0.1, {LABELS[PARTITION]}; FSMGDA with batches of 64.",
    (_trials,),
    _conclude,
    data=("multimnist",),
)
