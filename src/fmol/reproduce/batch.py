"""Loss against rounds for several batch sizes (the paper's figure 1 a)."""

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

__all__ = ["BATCH"]


def _partitions(size: Size) -> tuple[str, ...]:
    return ("iid", "left-shards") if size.small else ("iid", "left-shards", "both-shards")


def _batches(size: Size) -> tuple[int, ...]:
    return (16, 64, 256) if size.small else (16, 64, 128, 256)


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    return [
        Trial(
            named(partition, f"b{batch}", seed=seed),
            {
                "rounds": 40 if size.small else 100,
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
        words = LABELS[partition]
        settings = {f"batch {b}": (partition, f"b{b}") for b in _batches(size)}
        if not complete(records, size, settings.values()):
            continue
        tables.append(ends(records, size, f"after the last round, {words}", settings))
        tables.append(weighing(records, size, words, settings))
        least, most = min(_batches(size)), max(_batches(size))
        text = f"FSMGDA converges faster with batches of {most} than of {least} ({words})"
        claims.append(ranked(records, size, text, settings, strict=False))
        panels += [curves(records, size, words, settings, task) for task in TASKS]
    return Outcome(tables, claims, panels)


BATCH = Experiment(
    "batch",
    "Batch sizes (figure 1 a)",
    "K = 10 gradient steps whatever the batch, so that it is the only change; a batch of 256 is "
    "FMGDA.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("25 s", gpu="5.4 min (shared)", cpu="about 1 h (estimated)"),
    data=("multimnist",),
)
