"""Loss against rounds, and against local updates, for several K (figures 1 b and of the appendix)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fmol.reproduce.digits import READING, TASKS, algorithm, curves, digits, finals, named
from fmol.reproduce.experiment import Claim, Experiment, Outcome, Place, Records, Size, Table, Trial
from fmol.reproduce.numbers import mean_log_loss

__all__ = ["LOCAL_UPDATES"]


def _steps(size: Size) -> tuple[int, ...]:
    return (1, 5, 20) if size.small else (1, 5, 10, 20)


def _kinds(size: Size) -> tuple[str, ...]:
    return ("fsmgda",) if size.small else ("fmgda", "fsmgda")


def _trials(size: Size, done: Records) -> Sequence[Trial]:
    options = {"fmgda": {}, "fsmgda": {"batch_size": 64}}
    return [
        Trial(
            named(kind, f"k{steps}", seed=seed),
            {
                "rounds": 30 if size.small else 100,
                "seed": seed,
                "problem": digits(size, "iid", samples=256, seed=seed),
                "algorithm": algorithm(kind, local_steps=steps, **options[kind]),
            },
        )
        for kind in _kinds(size)
        for steps in _steps(size)
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, panels = [], [], []
    for kind in _kinds(size):
        rows = {f"K = {k}": finals(records, size, kind, f"k{k}") for k in _steps(size)}
        tables.append(Table(f"{kind.upper()}: loss after the last round", ("L", "R"), rows))
        lows = {
            k: sum(
                mean_log_loss(records[named(kind, f"k{k}", seed=s)], list(TASKS))
                for s in range(size.seeds)
            )
            / size.seeds
            for k in _steps(size)
        }
        claims.append(
            Claim(
                f"{kind.upper()} needs fewer rounds the more local steps it takes (i.i.d.)",
                all(lows[b] < lows[a] for a, b in itertools.pairwise(_steps(size))),
                "mean of log loss over all rounds: "
                + ", ".join(f"K = {k} {low:.3f}" for k, low in lows.items()),
            )
        )
        settings = {f"K = {k}": (kind, f"k{k}") for k in _steps(size)}
        for task in TASKS:
            panels.append(curves(records, size, kind.upper(), settings, task))
            panels.append(
                curves(
                    records,
                    size,
                    kind.upper(),
                    settings,
                    task,
                    {f"K = {k}": float(k) for k in _steps(size)},
                    "local updates (K × rounds)",
                )
            )
    return Outcome(tables, claims, panels)


LOCAL_UPDATES = Experiment(
    "local-updates",
    "Rounds and local updates for K = 1, 5, 10, 20 (figure 1 b, appendix)",
    READING + " K counts gradient steps; FSMGDA with batches of 64, i.i.d. clients.",
    (_trials,),
    _conclude,
    data=("multimnist",),
)
