"""Federated against centralised after as many gradient steps (the paper's figure 2 a)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import exp, log

from fmol.reproduce.digits import (
    LABELS,
    PARTITIONS,
    READING,
    TASKS,
    algorithm,
    digits,
    ends,
)
from fmol.reproduce.experiment import (
    Claim,
    Cost,
    Experiment,
    Line,
    Outcome,
    Panel,
    Place,
    Records,
    Size,
    Trial,
)
from fmol.reproduce.naming import complete, named
from fmol.reproduce.numbers import final_loss

__all__ = ["CENTRALISED"]

PAIRS = {"fmgda": "mgd", "fsmgda": "smgd"}
CLAIMS = {
    "fmgda": ("FMGDA and MGD end near one another", (0.5, 2)),
    "fsmgda": ("FSMGDA ends slightly worse than SMGD", (1, 3)),
}
"""What the paper sees, and which ratios of losses count as that: it names none."""
BATCH = 16


def _steps(size: Size) -> tuple[int, ...]:
    return (1, 5) if size.small else (1, 5, 10, 20)


def _rounds(size: Size) -> int:
    return 40 if size.small else 100


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    rounds, steps, trials = _rounds(size), _steps(size), []
    federated = {"fmgda": {}, "fsmgda": {"batch_size": BATCH}}
    central = {"mgd": {}, "smgd": {"batch_size": BATCH}}
    for partition, seed in itertools.product(PARTITIONS, range(size.seeds)):
        problem = digits(size, partition, samples=256, seed=seed)
        for (kind, options), k in itertools.product(federated.items(), steps):
            told = algorithm(kind, local_steps=k, **options)
            tables = {"rounds": rounds, "seed": seed, "problem": problem, "algorithm": told}
            trials.append(Trial(named(*_parts(partition, kind, k), seed=seed), tables))
        for kind, options in central.items():
            told = {"name": kind, "server_lr": 0.1, **options}
            # One iteration is one round here. Those that stand beside smaller K are the first of them.
            tables = {
                "rounds": max(steps) * rounds, "evaluate_every": max(steps),
                "seed": seed, "problem": problem, "algorithm": told,
            }  # fmt: skip
            trials.append(Trial(named(*_parts(partition, kind, max(steps)), seed=seed), tables))
    return trials


def _parts(partition: str, kind: str, k: int) -> tuple[str, ...]:
    """What runs are called that stand in a table of K: centralised ones are the same for each."""
    return (partition, kind, f"k{k}") if kind in PAIRS else (partition, kind)


def _after(size: Size, kind: str, k: int) -> int:
    """How many rounds of a run are as many gradient steps as T rounds of K."""
    return _rounds(size) if kind in PAIRS else k * _rounds(size)


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    kinds = list(itertools.chain(*PAIRS.items()))
    for partition, k in itertools.product(PARTITIONS, _steps(size)):
        settings = {
            kind.upper(): _parts(partition, kind, k)
            for kind in kinds
            if complete(records, size, [_parts(partition, kind, k)])
        }
        if settings:
            title = f"K = {k}, {LABELS[partition]}, after the last round"
            after = {kind.upper(): _after(size, kind, k) for kind in kinds}
            tables.append(ends(records, size, title, settings, after))
    for partition, pair in itertools.product(PARTITIONS, PAIRS.items()):
        needed = [_parts(partition, kind, k) for kind in pair for k in _steps(size)]
        if not complete(records, size, needed):
            continue
        panels += [_panel(records, size, partition, *pair, task) for task in TASKS]
        # With one local step they are the same algorithm.
        steps = [k for k in _steps(size) if k > 1]
        ratios = {k: _ratio(records, size, partition, *pair, k) for k in steps}
        text, (low, high) = CLAIMS[pair[0]]
        one, other = (kind.upper() for kind in pair)
        told = ", ".join(f"K = {k}: {ratio:.3g}" for k, ratio in ratios.items())
        claims.append(
            Claim(
                f"{text}, {LABELS[partition]} (its loss is {low:g} to {high:g} times {other}'s, "
                "for every K above 1)",
                all(low < ratio < high for ratio in ratios.values()),
                f"{one}'s loss is so many times {other}'s (geometric mean): {told}",
            )
        )
    return Outcome(tables, claims, panels)


def _loss(
    records: Records, size: Size, partition: str, kind: str, k: int, seed: int, task: str
) -> float:
    """A training loss after as many gradient steps as T rounds of K have."""
    run = records[named(*_parts(partition, kind, k), seed=seed)]
    return final_loss(run, task, _after(size, kind, k))


def _panel(
    records: Records, size: Size, partition: str, federated: str, central: str, task: str
) -> Panel:
    """Where a pair ends, over K."""
    steps, seeds = _steps(size), range(size.seeds)
    lines = [
        Line(
            kind.upper(),
            steps,
            [
                [_loss(records, size, partition, kind, k, seed, task) for k in steps]
                for seed in seeds
            ],
        )
        for kind in (federated, central)
    ]
    title = f"{federated.upper()} and {central.upper()}, {LABELS[partition]}, task {TASKS[task]}"
    return Panel(
        title, "gradient steps a round, K", f"training loss after {_rounds(size)} rounds", lines
    )


def _ratio(
    records: Records, size: Size, partition: str, federated: str, central: str, k: int
) -> float:
    def told(kind: str, seed: int, task: str) -> float:
        return log(max(_loss(records, size, partition, kind, k, seed, task), 1e-12))

    pairs = itertools.product(range(size.seeds), TASKS)
    logs = [told(federated, *each) - told(central, *each) for each in pairs]
    return exp(sum(logs) / len(logs))


CENTRALISED = Experiment(
    "centralised",
    "FMGDA against MGD, FSMGDA against SMGD (figure 2 a)",
    "T rounds of K local steps beside K × T iterations with all data in one place, which are the "
    f"first of one run for all K; SMGD draws {BATCH} samples of each client, as FSMGDA does, "
    "which is how the paper's batch size of all clients together is read. Local and central step size "
    "0.1. Figure 2 a is of non-i.i.d. clients, read as two left labels a client; i.i.d. ones, which "
    "the paper does not describe here, are run beside them.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("33 s", gpu="about 4 min (shared)", cpu="about 3 h (estimated)"),
    data=("multimnist",),
)
