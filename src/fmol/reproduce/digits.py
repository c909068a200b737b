"""What the experiments with two digits share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from fmol.record import RunRecord
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Line,
    Panel,
    Records,
    Size,
    Table,
    loss_cell,
)
from fmol.reproduce.naming import named
from fmol.reproduce.numbers import (
    final_loss,
    final_metric,
    losses_over_rounds,
    mean_log_loss,
)
from fmol.rounds import RoundReport

__all__ = [
    "LABELS",
    "PARTITIONS",
    "READING",
    "TASKS",
    "algorithm",
    "curves",
    "digits",
    "ends",
    "ranked",
    "weighing",
]

TASKS = {"left": "L", "right": "R"}
PARTITIONS = ("iid", "left-shards")
"""Where the paper shows both kinds of client: its non-i.i.d. ones read as those of the left label,
which Table 3 points to."""
LABELS = {
    "iid": "i.i.d.",
    "left-shards": "two left labels a client",
    "both-shards": "two labels of each digit a client",
}
READING = (
    "MultiMNIST with 256 pairs a client and LeNet, which the paper does not name. Non-i.i.d. means "
    "at most two labels a client, of the left digit or of both: the paper does not say of which. "
    "Losses are those of the global model over all clients. The small version takes scikit-learn's "
    "digits and a network without convolutions."
)


def digits(size: Size, partition: str, **options: Any) -> dict[str, Any]:
    """The problem: MultiMNIST, or its small likeness that needs no file.

    What clients hold out themselves is not asked for: accuracies are those at the server.
    """
    name = "multidigits" if size.small else "multimnist"
    return {"name": name, "partition": partition, "client_test_samples": 0, **options}


def algorithm(name: str, **options: Any) -> dict[str, Any]:
    """FSMGDA and its like with the paper's step sizes, where nothing else is said."""
    return {"name": name, "local_lr": 0.1, "server_lr": 0.1, **options}


def ends(
    records: Records,
    size: Size,
    title: str,
    settings: Mapping[str, tuple[object, ...]],
    after: Mapping[str, int] | None = None,
) -> Table:
    """Where models stand in the end, or those of some labels `after` that many rounds, a row for each
    setting: training losses, held-out accuracies."""
    rows = {}
    for label, parts in settings.items():
        runs = [records[named(*parts, seed=seed)] for seed in range(size.seeds)]
        rounds = (after or {}).get(label)
        losses = [loss_cell(final_loss(run, task, rounds) for run in runs) for task in TASKS]
        right = [
            Cell(tuple(final_metric(run, task, "accuracy", rounds) for run in runs))
            for task in TASKS
        ]
        rows[label] = [*losses, *right]
    columns = ("loss L", "loss R", "held-out accuracy L", "held-out accuracy R")
    return Table(title, columns, rows)


EARLY = 0.2
"""Of a run's rounds, how many have gone before it is looked at what its weights go by."""


def weighing(
    records: Records, size: Size, title: str, settings: Mapping[str, tuple[object, ...]]
) -> Table:
    """What the weights go by, a row for each setting: the left digit's λ, how long the mean updates
    are, and how far clients cancel one another in them (ρ: the mean square of their own lengths
    beside that of the mean's). Medians over all rounds but the first fifth."""
    left, right = TASKS
    measures: Mapping[str, Callable[[RoundReport], float]] = {
        "λ L": lambda report: report.weights.get(left, math.nan),
        "‖Δ‖ L": lambda report: report.delta_norms.get(left, math.nan),
        "‖Δ‖ R": lambda report: report.delta_norms.get(right, math.nan),
        "ρ L": lambda report: report.spread.get(left, math.nan),
        "ρ R": lambda report: report.spread.get(right, math.nan),
    }

    def cell(parts: tuple[object, ...], measure: Callable[[RoundReport], float]) -> Cell:
        values = []
        for seed in range(size.seeds):
            reports = records[named(*parts, seed=seed)].reports
            late = [measure(report) for report in reports[math.ceil(EARLY * len(reports)) :]]
            known = [value for value in late if not math.isnan(value)]
            values.append(median(known) if known else math.nan)
        return Cell(tuple(values))

    rows = {
        label: [cell(parts, measure) for measure in measures.values()]
        for label, parts in settings.items()
    }
    return Table(f"{title}: what weights go by", tuple(measures), rows)


def ranked(
    records: Records,
    size: Size,
    text: str,
    settings: Mapping[str, tuple[object, ...]],
    strict: bool,
) -> Claim:
    """The claim that curves lie the lower the later their setting stands: each below the one before it
    if `strict`, else the last below the first.

    It holds where it is so for every seed: a mean alone may be one seed's luck.
    """
    lows = [
        [_lowness(records[named(*parts, seed=seed)]) for seed in range(size.seeds)]
        for parts in settings.values()
    ]
    pairs = list(itertools.pairwise(lows)) if strict else [(lows[0], lows[-1])]
    so = [all(b[seed] < a[seed] for a, b in pairs) for seed in range(size.seeds)]
    told = ", ".join(f"{label} {fmean(low):.3f}" for label, low in zip(settings, lows, strict=True))
    evidence = f"mean of log loss over all rounds: {told}; so in {sum(so)} of {len(so)} seeds"
    return Claim(text, all(so), evidence)


def _lowness(record: RunRecord) -> float:
    """How low its losses lie; a run that failed is as bad as can be, however low it was before."""
    return math.inf if record.final is None else mean_log_loss(record, list(TASKS))


def curves(
    records: Records,
    size: Size,
    title: str,
    settings: Mapping[str, tuple[object, ...]],
    task: str,
    scale: Mapping[str, float] | None = None,
    xlabel: str = "communication rounds",
) -> Panel:
    """A task's loss over the rounds, a line for each setting; `scale` stretches a line's rounds."""
    lines = []
    for label, parts in settings.items():
        runs = [records[named(*parts, seed=seed)] for seed in range(size.seeds)]
        losses = [losses_over_rounds(run, task) for run in runs]
        each = 1.0 if scale is None else scale[label]
        x = [each * t for t in range(max(map(len, losses)))]
        lines.append(Line(label, x, losses))
    return Panel(f"{title}, task {TASKS[task]}", xlabel, "training loss", lines)
