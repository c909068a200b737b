"""How much conflict there is in a problem, and what each method gives up to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fmol.metrics import conflict_rate
from fmol.record import RunRecord
from fmol.reproduce.digits import digits
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
    loss_cell,
)
from fmol.reproduce.naming import complete, named
from fmol.reproduce.numbers import final_loss, final_metric

__all__ = ["CONFLICT", "METHODS"]

ANGLES = (30, 90, 120, 150)
BOWLS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    **{
        f"quadratic-{angle}": (f"quadratic, pulls {angle}° apart", {"angle": float(angle)})
        for angle in ANGLES
    },
    # Between bowls of one scale all methods stand in the middle; they part where scales differ.
    "quadratic-scales": (
        "quadratic, pulls 60° apart, one ten times as strong",
        {"angle": 60.0, "scale_ratio": 10.0},
    ),
}
"""Two bowls whose conflict is known: what each case is called, and its options."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "FSMGDA": {"name": "fsmgda"},
    "FSMGDA, loss": {"name": "fsmgda", "normalize": "loss"},
    "FSMGDA, UPGrad": {"name": "fsmgda", "rule": "upgrad"},
    "FedAvg": {"name": "fedavg"},
}
FIRST = "FSMGDA"
SELDOM, OFTEN = 5.0, 50.0
"""Percent of rounds in conflict below which a problem has hardly any, and above which it has much."""


@dataclass(frozen=True)
class _Case:
    """A problem, its objectives, and how it is trained."""

    title: str
    objectives: tuple[str, ...]
    problem: Mapping[str, Any]
    options: Mapping[str, Any]
    rounds: int
    starts_bad: bool = True
    """Whether the untrained model is bad at every objective: one that treats all alike is fair."""


def _cases(size: Size) -> dict[str, _Case]:
    short = size.small
    steps = {"local_steps": 5, "batch_size": 16, "local_lr": 0.1, "server_lr": 0.1}
    bowls = {
        name: _Case(title, ("f1", "f2"), {"name": "quadratic", **options}, steps, 60)
        for name, (title, options) in BOWLS.items()
    }
    return bowls | {
        "digits": _Case(
            "two digits",
            ("left", "right"),
            digits(size, "iid", samples=256),
            {"local_steps": 10, "batch_size": 64, "local_lr": 0.1, "server_lr": 0.1},
            60 if short else 200,
        ),
        "shoppers": _Case(
            "shoppers",
            ("conversion", "bounce", "value"),
            {"name": "shoppers", "assignment": "all"},
            {"local_steps": 10, "batch_size": 64, "local_lr": 0.1, "server_lr": 0.1},
            30 if short else 200,
        ),
        "adult": _Case(
            "adult",
            ("accuracy", "parity", "odds"),
            {"name": "adult"},
            {"local_steps": 10, "batch_size": 256, "local_lr": 1.0, "server_lr": 1.0},
            30 if short else 200,
            starts_bad=False,
        ),
    }  # fmt: skip


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    trials = []
    for name, case in _cases(size).items():
        told = dict(METHODS)
        for objective in case.objectives:
            weights = {other: float(other == objective) for other in case.objectives}
            told[_alone(objective)] = {"name": "fedavg", "weights": weights}
        for method, options in told.items():
            for seed in range(size.seeds):
                tables = {
                    "rounds": case.rounds,
                    "seed": seed,
                    "problem": {**case.problem, "seed": seed},
                    "algorithm": {**case.options, **options},
                }
                trials.append(Trial(named(name, _short(method), seed=seed), tables))
    return trials


def _alone(objective: str) -> str:
    return f"{objective} alone"


def _short(method: str) -> str:
    return "-".join(method.lower().replace(",", " ").split())


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, lost = [], {}
    rates: dict[str, dict[str, float]] = {}
    bowls: dict[str, list[Cell]] = {}
    for name, case in _cases(size).items():
        methods = (*METHODS, *map(_alone, case.objectives))
        if not complete(records, size, ((name, _short(method)) for method in methods)):
            continue
        held = any(
            _has_held_out(records[named(name, _short(method), seed=seed)], case.objectives)
            for method in methods
            for seed in range(size.seeds)
        )
        rows = {}
        for method in methods:
            runs = [records[named(name, _short(method), seed=s)] for s in range(size.seeds)]
            given = [_given_up(records, name, case, s, run, False) for s, run in enumerate(runs)]
            conflicts = Cell(tuple(100 * conflict_rate(run.reports) for run in runs))
            volume = Cell(tuple(_volume(each) for each in given))
            cells = [
                conflicts,
                *(loss_cell(100 * each[o] for each in given) for o in case.objectives),
                volume,
            ]
            rates.setdefault(name, {})[method] = conflicts.mean
            if name in BOWLS:
                bowls.setdefault(method, []).append(volume)
            if held:
                out = [_given_up(records, name, case, s, run, True) for s, run in enumerate(runs)]
                cells.append(Cell(tuple(_volume(each) for each in out)))
            rows[method] = cells
            mean = 100 * fmean(fmean(each.values()) for each in given)
            if method == FIRST and not math.isnan(mean):
                lost[name] = mean
        columns = (
            "rounds in conflict (%)",
            *(f"given up of {objective} (%)" for objective in case.objectives),
            "hypervolume",
            *(("hypervolume, held out",) if held else ()),
        )
        tables.append(Table(case.title, columns, rows))
    panels = []
    if rates.keys() >= BOWLS.keys():
        columns = tuple(title.removeprefix("quadratic, ") for title, _ in BOWLS.values())
        tables.insert(0, Table("quadratic, hypervolume by angle and scales", columns, bowls))
        panels.append(_angles(size, records))
    return Outcome(tables, _claims(rates, lost), panels)


def _claims(rates: Mapping[str, Mapping[str, float]], lost: Mapping[str, float]) -> list[Claim]:
    """What is said of the cases that are there."""
    claims = []
    if lost.keys() >= BOWLS.keys():
        bowls = {angle: lost[f"quadratic-{angle}"] for angle in ANGLES}
        told = ", ".join(
            f"{angle}° {f'{value:.1f} %' if math.isfinite(value) else 'diverged'}"
            for angle, value in bowls.items()
        )
        claims.append(
            Claim(
                "the more two bowls' pulls point apart, the more FSMGDA gives up of each",
                all(b > a for a, b in itertools.pairwise(bowls.values())),
                f"given up of each objective, on average: {told}",
                "ours",
            )
        )
    if "digits" in lost and not math.isnan(rates["digits"][FIRST]):
        claims.append(
            Claim(
                f"two digits hardly conflict (in less than {SELDOM:g} % of FSMGDA's rounds)",
                rates["digits"][FIRST] < SELDOM,
                f"rounds in conflict: {_told(rates['digits'])}; FSMGDA gives up "
                f"{lost['digits']:.2g} % of each digit, on average",
                "ours",
            )
        )
    if "adult" in rates and not math.isnan(rates["adult"][FIRST]):
        beside = f"; on shoppers: {_told(rates['shoppers'])}" if "shoppers" in rates else ""
        claims.append(
            Claim(
                f"accuracy and fairness conflict (in more than {OFTEN:g} % of FSMGDA's rounds)",
                rates["adult"][FIRST] > OFTEN,
                f"rounds in conflict on adult: {_told(rates['adult'])}{beside}",
                "ours",
            )
        )
    return claims


def _told(rates: Mapping[str, float]) -> str:
    known = {name: rate for name, rate in rates.items() if math.isfinite(rate)}
    return ", ".join(f"{name} {rate:.0f} %" for name, rate in known.items())


def _angles(size: Size, records: Records) -> Panel:
    """What each method gives up on the bowls, by the angle of their pulls."""
    cases = _cases(size)
    lines = []
    for method in METHODS:
        y = [
            [
                100 * fmean(_given_up(records, name, cases[name], seed, run, False).values())
                for name in (f"quadratic-{angle}" for angle in ANGLES)
                for run in [records[named(name, _short(method), seed=seed)]]
            ]
            for seed in range(size.seeds)
        ]
        lines.append(Line(method, ANGLES, y))
    return Panel("two bowls", "angle of their pulls (degrees)", "given up (%)", lines, log=False)


def _given_up(
    records: Records, name: str, case: _Case, seed: int, run: RunRecord, held_out: bool
) -> dict[str, float]:
    """Objective → where its loss lies between training on it alone, 0, and the start, 1.

    Below 0 it gained from the others. Where the start is good at some objective, 1 is the worst at
    which training on another alone leaves it. Infinite where the run failed, NaN where one of those
    that it is told by did.
    """
    found = {}
    alone = {o: records[named(name, _short(_alone(o)), seed=seed)] for o in case.objectives}
    for objective in case.objectives:
        ends = [alone[objective]] if case.starts_bad else alone.values()
        trained = [_loss(each, objective, held_out) for each in ends]
        if not all(map(math.isfinite, trained)):
            found[objective] = math.nan
            continue
        best = _loss(alone[objective], objective, held_out)
        # All runs of a seed start from one model.
        worst = _first(alone[objective], objective, held_out) if case.starts_bad else max(trained)
        there = _loss(run, objective, held_out)
        found[objective] = (there - best) / max(worst - best, 1e-12)
    return found


def _loss(record: RunRecord, objective: str, held_out: bool) -> float:
    if record.final is None or not held_out:
        return final_loss(record, objective)
    return final_metric(record, objective, "loss")


def _first(record: RunRecord, objective: str, held_out: bool) -> float:
    """The untrained model's loss."""
    first = record.reports[0]
    return first.held_out[objective]["loss"] if held_out else first.losses[objective]


def _has_held_out(record: RunRecord, objectives: Sequence[str]) -> bool:
    return all(math.isfinite(final_metric(record, name, "loss")) for name in objectives)


def _volume(given_up: Mapping[str, float]) -> float:
    """The share of the box between both ends that one model dominates: 1 gives up nothing.

    What it gained from others lies outside of the box, and makes up for nothing within it.
    """
    if any(map(math.isnan, given_up.values())):
        return math.nan
    return math.prod(min(1.0, max(0.0, 1 - value)) for value in given_up.values())


CONFLICT = Experiment(
    "conflict",
    "How much the objectives of each problem conflict",
    "The paper shows problems, and not how much their objectives conflict. Each objective is trained "
    "alone too (FedAvg with all weight on it). What a method gives up of an objective is where its "
    "loss lies between that (0 %) and the untrained model (100 %); below 0 it gained from the others. "
    "For adult, whose untrained model is perfectly fair, 100 % is the worst at which training on "
    "another objective leaves it. Hypervolume is the share of the box between these ends that the one "
    "model dominates. A round is in conflict if equal weights would have raised an objective, to first "
    "order. The problems' recommended step sizes (0.1 for the small digits too), the same for all "
    "methods, so that what is given up is also what has not been learnt yet. In adult parity and odds "
    "have the problem's targets: up to there they do not pull, but for FedAvg, which knows none.",
    (_trials,),
    _conclude,
    cost=Cost("30 s", gpu="4 min for the digits (shared)", cpu="about 30 min (estimated)"),
    seeds=3,
    small_seeds=1,
    data=("multimnist", "shoppers", "adult"),
    small_data=("shoppers", "adult"),
)
