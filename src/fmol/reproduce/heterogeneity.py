"""Who holds which objective: the paper's three kinds of matrix A, and what each client gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fmol.record import RunRecord
from fmol.reproduce.experiment import (
    Claim,
    Cost,
    Dots,
    Experiment,
    Outcome,
    Place,
    Radar,
    Records,
    Size,
    Table,
    Trial,
    loss_cell,
)
from fmol.reproduce.naming import complete, named

__all__ = ["HETEROGENEITY"]

PROBLEMS: Mapping[str, Mapping[str, Any]] = {
    "river-flow": {"local_lr": 0.02, "server_lr": 0.02},
    "shoppers": {"local_lr": 0.1, "server_lr": 0.1},
}
KINDS = {"one-each": "one objective each", "all": "all objectives", "subsets": "own subsets"}
METHODS = {
    "fsmgda": ("FSMGDA", {"name": "fsmgda"}),
    "fsmgda-loss": ("FSMGDA, loss", {"name": "fsmgda", "normalize": "loss"}),
    "fsmgda-upgrad": ("FSMGDA, UPGrad", {"name": "fsmgda", "rule": "upgrad"}),
    "fedavg": ("FedAvg", {"name": "fedavg"}),
    "smgd": ("SMGD", {"name": "smgd"}),
    "mgd": ("MGD", {"name": "mgd"}),
    "alone": ("alone", {"name": "alone"}),
}
"""What is compared: what it is called, and its options."""
CENTRAL = ("smgd", "mgd")
STEPS, BATCH = 10, 64


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    rounds = 40 if size.small else 100
    trials = []
    for problem, steps in PROBLEMS.items():
        for kind in KINDS:
            for method, (_, options) in METHODS.items():
                for seed in range(size.seeds):
                    told: dict[str, Any] = {**options, **steps}
                    tables: dict[str, Any] = {"rounds": rounds, "seed": seed}
                    if method != "mgd":  # It takes all samples in every step.
                        told["batch_size"] = BATCH
                    if method in CENTRAL:  # All data in one place, as many gradient steps.
                        told.pop("local_lr")
                        tables |= {"rounds": rounds * STEPS, "evaluate_every": STEPS}
                    else:
                        told["local_steps"] = STEPS
                    if method == "alone":
                        told.pop("server_lr")
                    tables["problem"] = {"name": problem, "assignment": kind, "seed": seed}
                    tables["algorithm"] = told
                    trials.append(Trial(named(problem, kind, method, seed=seed), tables))
    return trials


def _standing(record: RunRecord, held_out: bool) -> dict[tuple[str, str], float]:
    """(client, objective) → the trained model's loss there, on its training or its held-out data."""
    if record.final is None:
        return {}
    losses = {
        (each.client, each.objective): each.held_out.get("loss", math.nan)
        if held_out
        else each.loss
        for each in record.final.clients
    }
    return {key: loss for key, loss in losses.items() if math.isfinite(loss)}


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, dots = [], [], []
    rings: dict[str, list[float]] = {}
    axes = []
    for problem in PROBLEMS:
        for kind, words in KINDS.items():
            if not complete(records, size, ((problem, kind, method) for method in METHODS)):
                continue
            axes.append(f"{problem},\n{words}")
            rows = {}
            better: dict[str, float] = {}
            gains: dict[str, dict[str, list[float]]] = {}
            for method, (called, _) in METHODS.items():
                things: dict[str, list[float]] = {}
                trained, losses, ratios, shares, worst = [], [], [], [], []
                for seed in range(size.seeds):
                    run = records[named(problem, kind, method, seed=seed)]
                    mine = _standing(run, held_out=True)
                    alone = _standing(records[named(problem, kind, "alone", seed=seed)], True)
                    # What failed is as bad as can be; beside what failed nothing can be said.
                    beside = {
                        key: mine.get(key, math.inf) / max(alone[key], 1e-12) for key in alone
                    }
                    for (client, objective), ratio in beside.items():
                        thing = things.setdefault(f"{client}: {objective}", [math.nan] * size.seeds)
                        thing[seed] = ratio
                    each = list(beside.values()) or [math.nan]
                    own = _standing(run, held_out=False)
                    trained.append(fmean(own.values()) if own else math.inf)
                    losses.append(fmean(mine.values()) if mine else math.inf)
                    ratios.append(math.exp(fmean(math.log(max(r, 1e-12)) for r in each)))
                    shares.append(100 * fmean(float(r < 1) for r in each) if beside else math.nan)
                    worst.append(max(each))
                rows[called] = [
                    loss_cell(values) for values in (trained, losses, ratios, shares, worst)
                ]
                better[method] = fmean(ratios)
                rings.setdefault(called, []).append(better[method])
                if method != "alone":
                    gains[called] = things
            columns = (
                "training loss, mean",
                "held-out loss, mean",
                "held-out loss beside training alone (geometric mean)",
                "clients' objectives that gain (%)",
                "worst held-out loss beside training alone",
            )
            tables.append(Table(f"{problem}, {words}", columns, rows))
            ylabel = "held-out loss beside training alone"
            dots.append(Dots(f"{problem}, {words}", ylabel, gains))
            if math.isnan(better["fsmgda"]):  # Training alone failed.
                continue
            claims.append(
                Claim(
                    f"with FSMGDA clients do better than alone, on average ({problem}, {words})",
                    better["fsmgda"] < 1,
                    "held-out loss beside training alone: "
                    + ", ".join(
                        f"{METHODS[m][0]} {v:.3f}" for m, v in better.items() if m != "alone"
                    ),
                    "ours",
                )
            )
    radar = Radar("held-out loss beside training alone", tuple(axes), rings)
    return Outcome(tables, claims, radars=[radar] if len(axes) > 2 else [], dots=dots)


HETEROGENEITY = Experiment(
    "heterogeneity",
    "Who holds which objective: three kinds of A",
    "The paper argues for clients with one objective each, with all of them and with subsets of "
    "their own, and shows none but the second. Here all three, on River Flow and on shoppers: "
    'FSMGDA as in the paper, with `normalize="loss"` and with UPGrad, beside FedAvg with equal '
    "weights, MGD and SMGD with all data in one place (MGD takes all samples in every step), and "
    f"every client by itself; K = {STEPS}, batches of {BATCH}, the problems' recommended step sizes. "
    "Losses are those at the clients; what a client gains is measured on data of its own that are "
    "held out. A dot of the figure is one client's loss of one objective beside that of the client "
    "trained alone (a geometric mean over seeds).",
    (_trials,),
    _conclude,
    cost=Cost("2 min", gpu="not timed", cpu="22 min (shared)"),
    seeds=3,
    small_seeds=1,
    data=("river-flow", "shoppers"),
    small_data=("river-flow", "shoppers"),
)
