"""Forty attributes of a face (appendix)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fmol.problems.faces import ATTRIBUTES
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Cost,
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
from fmol.reproduce.numbers import final_loss, final_metric, first_loss, told_loss

__all__ = ["CELEBA"]

PARTITIONS = {"iid": "i.i.d.", "shards": "two kinds of face a client"}
LOCAL_LR, SERVER_LR = 0.0005, 0.1
SETTINGS = {
    "FMGDA, Δ the sum": ("fmgda", "sum"),
    "FSMGDA, Δ the sum": ("fsmgda", "sum"),
    "FSMGDA, Δ the mean": ("fsmgda", "mean"),
}
BATCH, SMALL_BATCH = 32, 8
ROUNDS, SAMPLES = 10, 64
"""A round of 400 networks takes an H200 some seconds, and FMGDA's as often that as it has batches."""
FEW = (
    "Bald",
    "Blond_Hair",
    "Eyeglasses",
    "Male",
    "Smiling",
    "Wearing_Hat",
    "Wearing_Lipstick",
    "Young",
)
"""What the small version learns."""


def _tasks(size: Size) -> tuple[str, ...]:
    return FEW if size.small else ATTRIBUTES


def _problem(size: Size, partition: str, seed: int) -> dict[str, Any]:
    told: dict[str, Any] = {"name": "celeba", "partition": partition, "seed": seed}
    if size.small:
        few = {"clients": 4, "samples": 24, "image_size": 16, "width": 4, "test_samples": 200}
        return told | few | {"attributes": list(FEW)}
    return told | {"samples": SAMPLES}


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    trials = []
    for partition in PARTITIONS:
        for kind, how in SETTINGS.values():
            for seed in range(size.seeds):
                batch = SMALL_BATCH if size.small else BATCH
                told = {"batch_size": batch} if kind == "fsmgda" else {}
                tables = {
                    "rounds": 4 if size.small else ROUNDS,
                    "seed": seed,
                    "problem": _problem(size, partition, seed),
                    "algorithm": {
                        "name": kind,
                        "local_steps": 2 if size.small else 10,
                        "local_lr": LOCAL_LR,
                        "server_lr": SERVER_LR,
                        "accumulate": how,
                        **told,
                    },
                }
                trials.append(Trial(named(partition, kind, how, seed=seed), tables))
    return trials


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, radars = [], [], []
    tasks = _tasks(size)
    for partition, words in PARTITIONS.items():
        if not complete(records, size, ((partition, *each) for each in SETTINGS.values())):
            continue
        rows, rings = {}, {}
        for label, (kind, how) in SETTINGS.items():
            runs = [records[named(partition, kind, how, seed=s)] for s in range(size.seeds)]
            first = [fmean(first_loss(run, name) for run in runs) for name in tasks]
            last = [fmean(final_loss(run, name) for run in runs) for name in tasks]
            rings[label] = [b / a for a, b in zip(first, last, strict=True)]
            rows[label] = [
                Cell((fmean(first),)),
                loss_cell(fmean(final_loss(run, n) for n in tasks) for run in runs),
                loss_cell(max(final_loss(run, n) for n in tasks) for run in runs),
                *(
                    Cell(tuple(fmean(final_metric(run, n, m) for n in tasks) for run in runs))
                    for m in ("accuracy", "auc")
                ),
            ]
            if how == "sum":
                fell = [name for name, ring in zip(tasks, rings[label], strict=True) if ring < 1]
                claims.append(
                    Claim(
                        f"{kind.upper()} lowers the loss of every task ({words}): what is taken here "
                        "for the efficacy that the paper says it demonstrates",
                        len(fell) == len(tasks),
                        f"of {len(fell)} of {len(tasks)} tasks, of {label}, {words}, means of "
                        f"{size.seeds} {'seed' if size.seeds == 1 else 'seeds'}; mean loss from "
                        f"{told_loss(fmean(first))} to {told_loss(fmean(last))}",
                        "ours",
                    )
                )
        columns = (
            "loss at the start", "loss, mean over tasks", "largest loss",
            "held-out accuracy, mean", "held-out AUC, mean",
        )  # fmt: skip
        tables.append(Table(f"after the last round, {words}", columns, rows))
        radars.append(Radar(f"loss beside that at the start, {words}", tasks, rings))
    return Outcome(tables, claims, radars=radars)


CELEBA = Experiment(
    "celeba",
    "Forty tasks: CelebA (appendix)",
    f"The first 10 000 images where the whole of CelebA is not there, {SAMPLES} a client, scaled to "
    f"64×64; M = 10, K = 10 gradient steps, {ROUNDS} rounds, η_L = {LOCAL_LR} and η_t = {SERVER_LR} as "
    "in the paper, with Δ as the sum over the K steps and as the mean. FSMGDA takes batches of "
    f"{BATCH}. ResNet-18 has GroupNorm instead of BatchNorm. What its non-i.i.d. clients are the paper "
    "does not say: here each has at most two of the eight combinations of Male, Young and Smiling. Nor "
    "does it say by what its efficacy is told: here by whether every task's loss falls. The "
    "small version has four clients with 24 images of 16×16, eight attributes, a narrow network and "
    "K = 2.",
    (_trials,),
    _conclude,
    cost=Cost("22 s", gpu="12 min (shared)", cpu="about 2 days (estimated)"),
    seeds=1,
    small_seeds=1,
    data=("celeba",),
    small_data=("celeba",),
)
