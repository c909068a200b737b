"""Numbers of runs: when a loss was reached, where it ended, how it went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fmol.measurement import Evaluation
from fmol.record import RunRecord
from fmol.rounds import RoundReport

__all__ = [
    "final_loss",
    "final_metric",
    "first_loss",
    "losses_over_rounds",
    "mean_log_loss",
    "rounds_until",
    "rounds_until_all",
    "told_loss",
]


def losses_over_rounds(record: RunRecord, objective: str) -> list[float]:
    """The training loss at `x_0, x_1, …`, the trained model's last."""
    losses = [report.losses[objective] for report in record.reports]
    if record.final is not None and record.final.round == len(record.reports):
        losses.append(record.final.losses[objective])
    return losses


def rounds_until(record: RunRecord, objective: str, target: float) -> float:
    """After how many rounds the loss is at or below `target` for the first time; else infinite."""
    for rounds, loss in enumerate(losses_over_rounds(record, objective)):
        if loss <= target:
            return float(rounds)
    return math.inf


def rounds_until_all(record: RunRecord, objectives: Iterable[str], target: float) -> float:
    """The same of all losses together: the first round in which none is above `target`."""
    columns = [losses_over_rounds(record, name) for name in objectives]
    for rounds, losses in enumerate(zip(*columns, strict=True)):
        if max(losses) <= target:
            return float(rounds)
    return math.inf


def first_loss(record: RunRecord, objective: str) -> float:
    """The untrained model's training loss; NaN where the run failed before it was measured."""
    losses = losses_over_rounds(record, objective)
    return losses[0] if losses else math.nan


def final_loss(record: RunRecord, objective: str, after: int | None = None) -> float:
    """The training loss in the end, or after that many rounds; infinite where it is not a number, or
    the run failed before."""
    found = _after(record, after)
    loss = math.nan if found is None else found.losses[objective]
    return math.inf if math.isnan(loss) else loss


def final_metric(record: RunRecord, objective: str, metric: str, after: int | None = None) -> float:
    """A held-out metric in the end, or after that many rounds; NaN where it was not measured."""
    found = _after(record, after)
    return math.nan if found is None else found.held_out.get(objective, {}).get(metric, math.nan)


def _after(record: RunRecord, rounds: int | None) -> Evaluation | RoundReport | None:
    """How the model stood after that many rounds, or in the end; None where a run did not get there."""
    if record.final is not None and rounds in (None, record.final.round):
        return record.final
    if rounds is None or rounds >= len(record.reports):
        return None
    return record.reports[rounds]


def mean_log_loss(record: RunRecord, objectives: Sequence[str]) -> float:
    """The mean over rounds and objectives of the losses' logarithms: how low a curve lies.

    One number for a whole curve on logarithmic axes, which the last round alone is not.
    """
    logs = [
        math.log(max(loss, 1e-12))
        for name in objectives
        for loss in losses_over_rounds(record, name)
        if math.isfinite(loss)
    ]
    return sum(logs) / len(logs) if logs else math.inf


def told_loss(loss: float) -> str:
    """A loss as a sentence has it.

    >>> told_loss(0.98765), told_loss(math.inf)
    ('0.9877', 'diverged')
    """
    return "diverged" if math.isinf(loss) else "unknown" if math.isnan(loss) else f"{loss:.4g}"
