"""Rounds until a loss of 0.01 (the paper's Table 3), for plain FSMGDA and for what may do better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fmol.record import RunRecord
from fmol.reproduce.digits import LABELS, READING, TASKS, digits
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Cost,
    Experiment,
    Line,
    Outcome,
    Panel,
    Place,
    Records,
    Size,
    Table,
    Trial,
)
from fmol.reproduce.naming import named
from fmol.reproduce.numbers import final_metric, mean_log_loss, rounds_until, rounds_until_all

__all__ = ["LOCAL_STEPS", "METHODS"]

TARGET, SMALL_TARGET = 0.01, 0.1
PAPER: Mapping[tuple[str, int], tuple[float, float]] = {
    ("iid", 1): (82, 84), ("iid", 5): (18, 20), ("iid", 10): (10, 9), ("iid", 20): (5, 5),
    ("left-shards", 1): (96, 82), ("left-shards", 5): (24, 20),
    ("left-shards", 10): (13, 10), ("left-shards", 20): (6, 5),
}  # fmt: skip
MOMENTUM = {"name": "momentum", "beta": 0.5}
ADAM = {"name": "adam"}
BY_UNIT = {"extrapolate": True, "extrapolate_by": "unit"}
HEAVY = {"local_momentum": 0.9}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"name": "fsmgda"},
    "FedAvg": {"name": "fedavg"},
    "FedAvg, local momentum": {"name": "fedavg", **HEAVY},
    "FedAvg, momentum": {"name": "fedavg", "server_step": MOMENTUM},
    "FedAvg, extrapolation and momentum": {
        "name": "fedavg", "server_step": MOMENTUM, "extrapolate": True,
    },
    "FedAvg, unit extrapolation and momentum": {
        "name": "fedavg", "server_step": MOMENTUM, **BY_UNIT,
    },
    "FedLS": {"name": "fedls"},
    "FedLS, local momentum": {"name": "fedls", **HEAVY},
    "FedALS": {"name": "fedals", "heads": "left,right", "temperature": 4.0, **HEAVY},
    "local momentum": {"name": "fsmgda", **HEAVY},
    "l2": {"name": "fsmgda", "normalize": "l2"},
    "loss": {"name": "fsmgda", "normalize": "loss"},
    "loss+": {"name": "fsmgda", "normalize": "loss+"},
    "UPGrad": {"name": "fsmgda", "rule": "upgrad"},
    "extrapolation": {"name": "fsmgda", "extrapolate": True},
    "momentum": {"name": "fsmgda", "server_step": MOMENTUM},
    "objective momentum": {"name": "fsmgda", "objective_momentum": 0.5},
    "Adam": {"name": "fsmgda", "server_step": ADAM},
    "proximal": {"name": "fsmgda", "proximal": 0.1},
    "loss, extrapolation and momentum": {
        "name": "fsmgda", "normalize": "loss", "server_step": MOMENTUM, "extrapolate": True,
    },
    "UPGrad, extrapolation and momentum": {
        "name": "fsmgda", "rule": "upgrad", "server_step": MOMENTUM, "extrapolate": True,
    },
    "loss, unit extrapolation and momentum": {
        "name": "fsmgda", "normalize": "loss", "server_step": MOMENTUM, **BY_UNIT,
    },
    "SCAFFOLD": {"name": "fsmgda", "drift_correction": "scaffold"},
    "loss, SCAFFOLD and extrapolation": {
        "name": "fsmgda", "normalize": "loss", "drift_correction": "scaffold", "extrapolate": True,
    },
}  # fmt: skip
"""What is compared, as options of an algorithm."""
SMALL = ("plain", "FedAvg", "loss", "UPGrad, extrapolation and momentum")
STEPS: Sequence[tuple[float, float]] = (
    (0.1, 0.1), (0.1, 0.2), (0.05, 0.1), (0.05, 0.05), (0.2, 0.2),
)  # fmt: skip
"""(η_L, η_t) that each method may choose from, by one run of a seed that is not measured."""
MIXED = ("fedavg", "fedls", "fedals")
"""Algorithms whose lanes descend the mean of the two objectives: half as far for each."""
MIXED_STEPS, HEAVY_STEPS = 2.0, 0.2
"""How many times as long these are for such a mean, so that they are as long for each objective, and
with local momentum, which makes ten steps of one."""
ADAM_STEPS: Sequence[tuple[float, float]] = (
    (0.1, 0.003), (0.1, 0.01), (0.1, 0.03), (0.05, 0.01), (0.2, 0.01),
)  # fmt: skip
"""The pairs for Adam, whose η_t is how far each parameter goes and no factor on an update."""
TUNING_SEED = 1000
BASELINES = ("FedAvg", "FedAvg, local momentum", "plain", "local momentum")
"""FedAvg and FSMGDA as they are, with local momentum where that is better."""
DRAWN = (
    "plain", "FedAvg", "FedAvg, local momentum", "UPGrad, extrapolation and momentum", "FedLS",
    "FedLS, local momentum", "FedALS",
)  # fmt: skip
"""What is drawn against K: all methods would be too many."""
PRESETS = ("FedLS", "FedALS")
"""What is claimed to need fewer rounds than these: FedLS by name beforehand, and FedALS, which was made
for it later, on the tuning seed and fifteen others that are not measured; not the best of all."""


def _partitions(size: Size) -> tuple[str, ...]:
    return ("iid",) if size.small else ("iid", "left-shards", "both-shards")


def _epochs(size: Size) -> tuple[int, ...]:
    return (1, 5) if size.small else (1, 5, 10, 20)


def _methods(size: Size) -> list[str]:
    return list(SMALL) if size.small else list(METHODS)


def _rounds(size: Size, epochs: int) -> int:
    return ({1: 50, 5: 20} if size.small else {1: 160, 5: 60, 10: 40, 20: 40})[epochs]


def _short(method: str) -> str:
    """A method's name as part of a folder's."""
    words = method.lower().replace("+", " plus").replace(",", " ").replace(" and ", " ")
    return "-".join(words.split())


def _trial(
    size: Size, partition: str, epochs: int, method: str, steps: tuple[float, float], seed: int
) -> Trial:
    """A run; those that tune the same are a race, since the first that is there is the one."""
    local_lr, server_lr = steps
    target = SMALL_TARGET if size.small else TARGET
    tuned, tunes = f"lr{local_lr}-{server_lr}", seed == TUNING_SEED
    rounds = _rounds(size, epochs)
    return Trial(
        named(partition, f"k{epochs}", _short(method), tuned, seed=seed),
        {
            "rounds": rounds // 2 if tunes else rounds,
            "seed": seed,
            "stop_at": target,
            "problem": digits(size, partition, samples=256, seed=seed),
            "algorithm": {
                **METHODS[method],
                "local_epochs": epochs,
                "batch_size": 16,
                "local_lr": local_lr,
                "server_lr": server_lr,
            },
        },
        race=named(partition, f"k{epochs}", _short(method), seed=seed) if tunes else "",
        hopeful=True,
    )


def _choices(size: Size, method: str) -> Sequence[tuple[float, float]]:
    told = METHODS[method]
    times = (MIXED_STEPS if told["name"] in MIXED else 1.0) * (
        HEAVY_STEPS if "local_momentum" in told else 1.0
    )
    steps = ADAM_STEPS if told.get("server_step") == ADAM else STEPS
    steps = steps[:2] if size.small else steps
    return [(round(times * one, 4), round(times * two, 4)) for one, two in steps]


def _tuning(size: Size, done: Records | None) -> Sequence[Trial]:
    return [
        _trial(size, partition, epochs, method, steps, TUNING_SEED)
        for partition in _partitions(size)
        for epochs in _epochs(size)
        for method in _methods(size)
        for steps in _choices(size, method)
    ]


def _reached(size: Size, record: RunRecord, epochs: int) -> tuple[float, bool, float]:
    """How a run that tunes did, the less the better: rounds until both are there; else whether it was
    given up or failed, and how low losses were."""
    rounds = _rounds_of(size, record)
    short = math.isinf(rounds) and len(record.reports) < _rounds(size, epochs) // 2
    return rounds, short, mean_log_loss(record, list(TASKS))


def _rounds_of(size: Size, record: RunRecord) -> float:
    return rounds_until_all(record, TASKS, SMALL_TARGET if size.small else TARGET)


def _best(
    size: Size, records: Records, partition: str, epochs: int, method: str
) -> tuple[float, float] | None:
    """The step sizes that did best; None where not all were tried."""
    tried = {
        steps: _trial(size, partition, epochs, method, steps, TUNING_SEED).name
        for steps in _choices(size, method)
    }
    if not all(name in records for name in tried.values()):
        return None
    return min(tried, key=lambda steps: _reached(size, records[tried[steps]], epochs))


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    trials = []
    for partition in _partitions(size):
        for epochs in _epochs(size):
            for method in _methods(size):
                steps = _choices(size, method)[0]
                if done is not None:
                    best = _best(size, done, partition, epochs, method)
                    if best is None:
                        continue
                    steps = best
                trials += [
                    _trial(size, partition, epochs, method, steps, seed)
                    for seed in range(size.seeds)
                ]
    return trials


def _runs(
    size: Size, records: Records, partition: str, epochs: int, method: str
) -> tuple[tuple[float, float], list[RunRecord]] | None:
    """A method's step sizes and its runs with them; None where there is one too few."""
    steps = _best(size, records, partition, epochs, method)
    if steps is None:
        return None
    names = [
        _trial(size, partition, epochs, method, steps, seed).name for seed in range(size.seeds)
    ]
    if not all(name in records for name in names):
        return None
    return steps, [records[name] for name in names]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    target = SMALL_TARGET if size.small else TARGET
    tables, claims, panels = [], [], []
    for partition in _partitions(size):
        plain: dict[int, float] = {}
        by_epochs: dict[int, Mapping[str, Sequence[float]]] = {}
        for epochs in _epochs(size):
            rows = {}
            rounds: dict[str, list[float]] = {}
            for method in _methods(size):
                found = _runs(size, records, partition, epochs, method)
                if found is None:
                    continue
                steps, runs = found
                theirs: Sequence[float | None] = (None, None)
                if method == "plain" and not size.small:
                    theirs = PAPER.get((partition, epochs), (None, None))
                cells = [
                    Cell(tuple(rounds_until(run, task, target) for run in runs), paper)
                    for task, paper in zip(TASKS, theirs, strict=True)
                ]
                both = [_rounds_of(size, run) for run in runs]
                rows[f"{method} (η_L {steps[0]}, η_t {steps[1]})"] = [
                    *cells,
                    Cell(tuple(both)),
                    *(Cell(tuple(final_metric(r, t, "accuracy") for r in runs)) for t in TASKS),
                ]
                rounds[method] = both
            if not rows:
                continue
            by_epochs[epochs] = rounds
            if "plain" in rounds:
                plain[epochs] = fmean(rounds["plain"])
            title = f"rounds until a loss of {target:g}, K = {epochs}, {LABELS[partition]}"
            columns = ("L", "R", "both", "held-out accuracy L", "held-out accuracy R")
            tables.append(Table(title, columns, rows))
            if epochs == max(_epochs(size)) and not size.small:
                claims += _fewer(rounds, target, epochs, partition, _rounds(size, epochs))
        if by_epochs:
            panels.append(_panel(size, partition, by_epochs))
        if len(plain) > 1:
            first, last = min(plain), max(plain)
            claims.append(
                Claim(
                    f"FSMGDA needs fewer rounds with K = {last} than with K = {first} "
                    f"({LABELS[partition]})",
                    math.isfinite(plain[last]) and plain[last] < plain[first],
                    f"rounds until both tasks are at {target:g}: "
                    + ", ".join(f"K = {k} {Cell((rounds,))}" for k, rounds in plain.items()),
                )
            )
    return Outcome(tables, claims, panels)


def _panel(
    size: Size, partition: str, rounds: Mapping[int, Mapping[str, Sequence[float]]]
) -> Panel:
    """Rounds against K, for a few methods and in the paper."""
    target = SMALL_TARGET if size.small else TARGET
    lines = []
    for method in DRAWN:
        there = [epochs for epochs, found in rounds.items() if method in found]
        if there:
            runs = zip(*(rounds[epochs][method] for epochs in there), strict=True)
            label = "FSMGDA" if method == "plain" else method
            lines.append(Line(label, there, [list(run) for run in runs]))
    paper = [] if size.small else [epochs for epochs in rounds if (partition, epochs) in PAPER]
    if paper:
        lines.append(Line("the paper", paper, [[max(PAPER[partition, k]) for k in paper]]))
    ylabel = f"rounds until both losses are at {target:g},\nwhere every seed gets there"
    return Panel(LABELS[partition], "local epochs K", ylabel, lines)


def _fewer(
    rounds: Mapping[str, Sequence[float]], target: float, epochs: int, partition: str, most: int
) -> list[Claim]:
    """The claims that presets need five times fewer rounds than FedAvg and FSMGDA, tuned.

    It holds where it does for every seed, beside the best of them for that seed. `rounds` are those of
    each seed.
    """
    if not all(name in rounds for name in BASELINES):
        return []
    claims = []
    for preset in (name for name in PRESETS if name in rounds):
        own = rounds[preset]
        # One that never got there took at least as many rounds as it was given.
        least = [min(most, *(rounds[name][seed] for name in BASELINES)) for seed in range(len(own))]
        holds = [5 * mine <= theirs for mine, theirs in zip(own, least, strict=True)]
        told = "; ".join(
            f"{name} {', '.join(str(Cell((each,))) for each in rounds[name])}"
            for name in (preset, *BASELINES)
        )
        claims.append(
            Claim(
                f"{preset} needs five times fewer rounds than FedAvg and FSMGDA at K = {epochs} "
                f"({LABELS[partition]})",
                all(holds),
                f"rounds until both tasks are at {target:g}, of {most} at most, by seed: {told}; so in "
                f"{sum(holds)} of {len(holds)} seeds",
                "ours",
            )
        )
    return claims


LOCAL_STEPS = Experiment(
    "local-steps",
    "Rounds until a loss of 0.01 for K = 1, 5, 10, 20 (Table 3)",
    "K counts local epochs in batches of 16: read as gradient steps, the paper's numbers are out "
    "of reach of any step size near 0.1. The paper's non-i.i.d. cells stand beside the left digit's "
    "shards, since its right task is untouched by them. Every method may choose its step sizes from "
    f"the same {len(STEPS)} pairs ({MIXED_STEPS:g} times them where a lane descends the mean of both "
    f"objectives, {HEAVY_STEPS:g} times with local momentum; Adam from {len(ADAM_STEPS)} of its own), "
    "by one run each of half as many rounds with a seed that is not among those measured (FedLS and "
    "FedALS were also developed on it, FedALS on fifteen more that are not measured either); these "
    "end when one of them is at the target, and where none is, the lowest losses over all their rounds "
    "decide. A run is given up where a loss is more than twice the first one in five rounds running, "
    "and counts as one that never got there.",
    (_tuning, _trials),
    _conclude,
    shared_reading=READING,
    cost=Cost("24 s", gpu="about 40 min (estimated)", cpu="days (estimated)"),
    seeds=5,
    small_seeds=1,
    data=("multimnist",),
)
