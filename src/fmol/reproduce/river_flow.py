"""Eight forecasts of one river (the paper's figure 2 b)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

from fmol.problems.river_flow import SITES
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

__all__ = ["RIVER_FLOW"]

STEPS, BATCHES = (1, 10, 30, 50), (16, 64, 256)
LARGE, LONG = 256, 30
SUMS = ("sum", "mean")


def _settings(size: Size) -> list[tuple[int, int]]:
    """(K, batch): K varied at a batch of 256, the batch at K = 30."""
    steps = STEPS[:3] if size.small else STEPS
    pairs = [(k, LARGE) for k in steps] + [(LONG, batch) for batch in BATCHES]
    return list(dict.fromkeys(pairs))


def _trials(size: Size, done: Records | None) -> Sequence[Trial]:
    return [
        Trial(
            named(how, f"k{k}", f"b{batch}", seed=seed),
            {
                "rounds": 20 if size.small else 100,
                "seed": seed,
                "problem": {
                    "name": "river-flow",
                    "partition": "iid",
                    "client_test_samples": 0,
                    "seed": seed,
                },
                "algorithm": {
                    "name": "fsmgda",
                    "local_steps": k,
                    "batch_size": batch,
                    "local_lr": 0.001,
                    "server_lr": 0.1,
                    "accumulate": how,
                },
            },
        )
        for how in SUMS
        for k, batch in _settings(size)
        for seed in range(size.seeds)
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    tables, claims, radars = [], [], []
    for how in SUMS:
        if not complete(records, size, ((how, f"k{k}", f"b{b}") for k, b in _settings(size))):
            continue
        means: dict[tuple[int, int], list[float]] = {}
        rows = {}
        for k, batch in _settings(size):
            runs = [records[named(how, f"k{k}", f"b{batch}", seed=s)] for s in range(size.seeds)]
            means[k, batch] = [fmean(final_loss(run, site) for run in runs) for site in SITES]
            first = [first_loss(run, site) for run in runs for site in SITES]
            rows[f"K = {k}, batch {batch}"] = [
                loss_cell(fmean(final_loss(run, site) for site in SITES) for run in runs),
                Cell(
                    tuple(fmean(final_metric(run, site, "rmse") for site in SITES) for run in runs)
                ),
                Cell((fmean(first),)),
            ]
        columns = ("loss, mean over sites", "held-out RMSE (standard units)", "loss at the start")
        tables.append(Table(f"Δ is the {how} over the K steps", columns, rows))
        for title, kept in (
            (f"K varied, batch {LARGE}", [s for s in means if s[1] == LARGE]),
            (f"batch varied, K = {LONG}", [s for s in means if s[0] == LONG]),
        ):
            finite = [v for s in kept for v in means[s] if math.isfinite(v)]
            if not finite:
                continue
            top = [max((means[s][i] for s in kept if math.isfinite(means[s][i])), default=1.0)
                   for i in range(len(SITES))]  # fmt: skip
            rings = {
                f"K = {k}, batch {b}": [
                    min(v / t, 1.0) for v, t in zip(means[k, b], top, strict=True)
                ]
                for k, b in kept
                if all(map(math.isfinite, means[k, b]))
            }
            lost = [f"K = {k}, batch {b}" for k, b in kept]
            lost = [label for label in lost if label not in rings]
            # What has no ring would be taken for one that was not run.
            said = f";\ndiverged: {' and '.join(lost)}" if lost else ""
            if rings:
                radars.append(Radar(f"normalised loss, {title} ({how}){said}", SITES, rings))
        by_steps = [fmean(means[s]) for s in sorted(s for s in means if s[1] == LARGE)]
        by_batch = [fmean(means[s]) for s in sorted(s for s in means if s[0] == LONG)]
        claims += [
            Claim(
                f"more local steps converge faster (Δ the {how})",
                all(b < a for a, b in itertools.pairwise(by_steps)),
                "mean loss by K: " + ", ".join(map(told_loss, by_steps)),
            ),
            Claim(
                f"larger batches converge faster (Δ the {how})",
                all(b < a for a, b in itertools.pairwise(by_batch)),
                "mean loss by batch: " + ", ".join(map(told_loss, by_batch)),
            ),
        ]
    return Outcome(tables, claims, radars=radars)


RIVER_FLOW = Experiment(
    "river-flow",
    "Eight tasks: River Flow (figure 2 b)",
    "RF1 of the Mulan collection, rows dealt at random to ten clients, an MLP 64-64-64-8, inputs and "
    "targets in standard units. η_L = 0.001 and η_t = 0.1 as in the paper, with Δ as the sum over "
    "the K steps (its algorithm) and as the mean (its proofs). A loss is normalised by the largest "
    "of the settings beside it.",
    (_trials,),
    _conclude,
    cost=Cost("37 s", gpu="not timed", cpu="about 30 min (shared)"),
    data=("river-flow",),
    small_data=("river-flow",),
    small_seeds=1,
)
