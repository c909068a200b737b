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
    rounds, trials = _rounds(size), []
    federated = {"fmgda": {}, "fsmgda": {"batch_size": BATCH}}
    central = {"mgd": {}, "smgd": {"batch_size": BATCH}}
    for partition, k, seed in itertools.product(PARTITIONS, _steps(size), range(size.seeds)):
        problem = digits(size, partition, samples=256, seed=seed)
        for kind, options in federated.items():
            told = algorithm(kind, local_steps=k, **options)
            tables = {"rounds": rounds, "seed": seed, "problem": problem, "algorithm": told}
            trials.append(Trial(named(partition, kind, f"k{k}", seed=seed), tables))
        for kind, options in central.items():
            told = {"name": kind, "server_lr": 0.1, **options}
            # One iteration is one round here: K × T of them, measured as often as the others.
            tables = {
                "rounds": k * rounds, "evaluate_every": k,
                "seed": seed, "problem": problem, "algorithm": told,
            }  # fmt: skip
            trials.append(Trial(named(partition, kind, f"k{k}", seed=seed), tables))
    return trials


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    for partition, k in itertools.product(PARTITIONS, _steps(size)):
        kinds = itertools.chain(*PAIRS.items())
        settings = {kind.upper(): (partition, kind, f"k{k}") for kind in kinds}
        settings = {
            name: parts for name, parts in settings.items() if complete(records, size, [parts])
        }
        if settings:
            title = f"K = {k}, {LABELS[partition]}, after the last round"
            tables.append(ends(records, size, title, settings))
    for partition, pair in itertools.product(PARTITIONS, PAIRS.items()):
        needed = itertools.product((partition,), pair, (f"k{k}" for k in _steps(size)))
        if not complete(records, size, needed):
            continue
        federated, central = pair
        panels += [_panel(records, size, partition, *pair, task) for task in TASKS]
        # With one local step they are the same algorithm.
        steps = [k for k in _steps(size) if k > 1]
        ratios = {k: _ratio(records, size, partition, federated, central, k) for k in steps}
        text, (low, high) = CLAIMS[federated]
        one, other = federated.upper(), central.upper()
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


def _panel(
    records: Records, size: Size, partition: str, federated: str, central: str, task: str
) -> Panel:
    """Where a pair ends, over K."""
    lines = [
        Line(
            kind.upper(),
            _steps(size),
            [
                [
                    final_loss(records[named(partition, kind, f"k{k}", seed=seed)], task)
                    for k in _steps(size)
                ]
                for seed in range(size.seeds)
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
    logs = [
        log(max(final_loss(records[named(partition, federated, f"k{k}", seed=s)], task), 1e-12))
        - log(max(final_loss(records[named(partition, central, f"k{k}", seed=s)], task), 1e-12))
        for s in range(size.seeds)
        for task in TASKS
    ]
    return exp(sum(logs) / len(logs))


CENTRALISED = Experiment(
    "centralised",
    "FMGDA against MGD, FSMGDA against SMGD (figure 2 a)",
    f"T rounds of K local steps beside K × T iterations with all data in one place; SMGD draws "
    f"{BATCH} samples of each client, as FSMGDA does. Local and central step size 0.1. Figure 2 a is "
    "of non-i.i.d. clients, the appendix has i.i.d. ones: here both, with two left labels a client.",
    (_trials,),
    _conclude,
    shared_reading=READING,
    cost=Cost("33 s", gpu="minutes (estimated)", cpu="about 3 h (estimated)"),
    data=("multimnist",),
)
