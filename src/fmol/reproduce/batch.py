"""Loss against rounds for several batch sizes (the paper's figure 1 a)."""

from __future__ import annotations

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

__all__ = ["BATCH"]


def _partitions(size: Size) -> tuple[str, ...]:
    return ("iid", "left-shards") if size.small else ("iid", "left-shards", "both-shards")


def _batches(size: Size) -> tuple[int, ...]:
    return (16, 64, 256) if size.small else (16, 64, 128, 256)


def _trials(size: Size, done: Records) -> Sequence[Trial]:
    return [
        Trial(
            named(partition, f"b{batch}", seed=seed),
            {
                "rounds": 60 if size.small else 100,
                "seed": seed,
                "problem": digits(size, partition, samples=256, seed=seed),
                "algorithm": algorithm("fsmgda", local_steps=10, batch_size=batch),
            },
        )
        for partition in _partitions(size)
        for batch in _batches(size)
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    for partition in _partitions(size):
        rows = {
            f"batch {batch}": [
                *finals(records, size, partition, f"b{batch}"),
                *accuracies(records, size, partition, f"b{batch}"),
            ]
            for batch in _batches(size)
        }
        title = f"after the last round, {LABELS[partition]}"
        columns = ("loss L", "loss R", "accuracy L", "accuracy R")
        tables.append(Table(title, columns, rows))
        lows = {
            batch: sum(
                mean_log_loss(records[named(partition, f"b{batch}", seed=s)], list(TASKS))
                for s in range(size.seeds)
            )
            / size.seeds
            for batch in _batches(size)
        }
        first, last = min(lows), max(lows)
        claims.append(
            Claim(
                f"FSMGDA converges faster the larger the batch ({LABELS[partition]})",
                lows[last] < lows[first],
                "mean of log loss over all rounds: "
                + ", ".join(f"batch {batch} {low:.3f}" for batch, low in lows.items()),
            )
        )
        settings = {f"batch {b}": (partition, f"b{b}") for b in _batches(size)}
        panels += [curves(records, size, LABELS[partition], settings, task) for task in TASKS]
    return Outcome(tables, claims, panels)


BATCH = Experiment(
    "batch",
    "Batch sizes (figure 1 a)",
    READING
    + " K = 10 gradient steps whatever the batch, so that it is the only change; a batch of 256 is "
    "FMGDA.",
    (_trials,),
    _conclude,
    data=("multimnist",),
)
