"""How many clients (appendix)."""

from __future__ import annotations

import math
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
from fmol.reproduce.experiment import Claim, Cost, Experiment, Outcome, Place, Records, Size, Trial
from fmol.reproduce.naming import complete, named
from fmol.reproduce.numbers import final_loss, losses_over_rounds

__all__ = ["CLIENTS"]

COUNTS = (5, 10, 30)
PAIRS_IN_ALL = 30_000
"""Of digits of 60 000 images, two a pair; each client has its share."""


def _partitions(size: Size) -> tuple[str, ...]:
    return ("iid", "left-shards") if size.small else ("iid", "left-shards", "both-shards")


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    return [
        Trial(
            named(partition, f"m{count}", seed=seed),
            {
                "rounds": 40 if size.small else 100,
                "seed": seed,
                "problem": digits(
                    size,
                    partition,
                    clients=count,
                    samples=(3000 if size.small else PAIRS_IN_ALL) // count,
                    seed=seed,
                ),
                "algorithm": algorithm("fsmgda", local_steps=10, batch_size=64),
            },
        )
        for partition in _partitions(size)
        for count in COUNTS
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    for partition in _partitions(size):
        settings = {f"M = {count}": (partition, f"m{count}") for count in COUNTS}
        if not complete(records, size, settings.values()):
            continue
        tables.append(ends(records, size, f"after the last round, {LABELS[partition]}", settings))
        tables.append(weighing(records, size, LABELS[partition], settings))
        panels += [curves(records, size, LABELS[partition], settings, task) for task in TASKS]
        text = f"FSMGDA converges faster the more clients there are ({LABELS[partition]})"
        claims.append(ranked(records, size, text, settings, strict=True))
        falls = {}
        for count in COUNTS:
            runs = [records[named(partition, f"m{count}", seed=s)] for s in range(size.seeds)]
            falls[count] = max(
                final_loss(run, task) / losses_over_rounds(run, task)[0]
                if run.reports
                else math.inf
                for run in runs
                for task in TASKS
            )
        claims.append(
            Claim(
                f"FSMGDA converges with 5, 10 and 30 clients ({LABELS[partition]})",
                all(fall < 0.5 for fall in falls.values()),
                "the last loss is at most so many times the first: "
                + ", ".join(f"M = {count} {fall:.3f}" for count, fall in falls.items()),
                "ours",
            )
        )
    return Outcome(tables, claims, panels)


CLIENTS = Experiment(
    "clients",
    "5, 10 and 30 clients (appendix)",
    "Here the clients share 30 000 pairs (60 000/(2M) each), with batches of 64 and K = 10 "
    "gradient steps. The paper runs FMGDA too, whose steps would be over all of a client's up to 6000 "
    "pairs; here FSMGDA alone is run.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("25 s", gpu="3 min (shared)", cpu="about 80 min (estimated)"),
    data=("multimnist",),
)
