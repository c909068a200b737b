"""Results as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from fmol.grouping import group_records
from fmol.metrics import conflict_rate
from fmol.record import RunRecord
from fmol.result import Result
from fmol.runs.folder import RunFolder

__all__ = ["compare_table", "summary_lines"]

MOST = 6
"""Objectives that are named one by one; of more, the worst, the median and the best."""


def summary_lines(folder: RunFolder, result: Result) -> list[str]:
    """A run in at most eleven lines, the last of which says where the report is."""
    reports, final = result.reports, result.final
    sent = sum(report.bytes_up + report.bytes_down for report in reports) / 1e6
    lines = [
        "",
        f"{type(result.algorithm).__name__}: {result.stopped}, {sent:,.1f} MB sent",
        f"training loss   {_some(final.losses)}",
    ]
    metrics = list(dict.fromkeys(m for row in final.held_out.values() for m in row))
    for metric in metrics[:2]:
        values = {name: row[metric] for name, row in final.held_out.items() if metric in row}
        lines.append(f"held-out {metric:6} {_some(values)}")
    rate = conflict_rate(reports)
    if not math.isnan(rate):
        lines.append(
            f"conflict        equal weights would hurt some objective in {rate:.0%} of rounds"
        )
    alarms = reports[-1].alarms if reports else ()
    lines += [
        f"alarm           {alarm.kind}: {alarm.objective}, since round {alarm.since}"
        for alarm in alarms[:1]
    ]
    refused = sum(len(report.refused) for report in reports) + len(final.refused)
    lines += [f"refused         {refused} updates or losses; see the report"] if refused else []
    if result.notes:
        more = f" (and {len(result.notes) - 1} more; see the report)"
        lines.append(f"note            {result.notes[0]}{more if len(result.notes) > 1 else ''}")
    return [*lines, f"run             {folder.path}", f"report          {folder.report}"]


def _some(values: Mapping[str, float]) -> str:
    if len(values) <= MOST:
        return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    known = sorted((value, name) for name, value in values.items() if not math.isnan(value))
    if not known:
        return "not measured"
    low, middle, high = known[0], known[len(known) // 2], known[-1]
    return (
        f"lowest {low[0]:.4g} ({low[1]})  median {middle[0]:.4g}  highest {high[0]:.4g} ({high[1]})"
    )


def compare_table(records: Sequence[RunRecord]) -> list[str]:
    """Runs side by side, one line per setting, means over its seeds.

    Of more than six objectives the mean and the highest loss are shown, and the mean of each
    held-out metric.
    """
    names = list(dict.fromkeys(name for record in records for name in record.portrait.objectives))
    columns = _columns(records, names)
    rows = [["setting", "runs", *(title for title, _, _ in columns)]]
    for group in group_records(records):
        cells = [_mean([value(r) for r in group.records], form) for _, value, form in columns]
        rows.append([group.label, str(len(group.records)), *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if any(set(record.portrait.objectives) != set(names) for record in records):
        over = "; mean and highest are over each run's own" if len(names) > MOST else ""
        lines.append(f"these runs do not share all objectives{over}")
    alone = [record for record in records if record.algorithm.lower() == "alone"]
    if 0 < len(alone) < len(records) and any(r.final and r.final.held_out for r in alone):
        lines.append("Alone: held-out values are means over the clients' own held-out data.")
    return lines


Column = tuple[str, Callable[[RunRecord], float], str]
"""A title, what stands there for a run, and how it is written."""


def _columns(records: Sequence[RunRecord], names: Sequence[str]) -> list[Column]:
    columns: list[Column] = [("rounds", lambda r: r.rounds, ".0f")]
    metrics = {name: metric for name in names if (metric := _metric(records, name))}
    if len(names) <= MOST:
        columns += [(f"loss {n}", partial(_last, name=n), ".4g") for n in names]
        columns += [
            (f"{metric} {n}", partial(_held_out, name=n, metric=metric), ".4g")
            for n, metric in metrics.items()
        ]
    else:
        columns.append(("loss mean", lambda r: _over(fmean, _losses(r)), ".4g"))
        columns.append(("loss highest", lambda r: _over(max, _losses(r)), ".4g"))
        for metric in dict.fromkeys(
            metric
            for record in records
            for row in (record.final.held_out.values() if record.final else ())
            for metric in row
            if metric != "loss"
        ):
            columns.append((f"{metric} mean", partial(_mean_held_out, metric=metric), ".4g"))
    columns.append(("conflict", lambda r: conflict_rate(r.reports), ".0%"))
    columns.append(("MB", _megabytes, ",.1f"))
    return columns


def _megabytes(record: RunRecord) -> float:
    return sum(report.bytes_up + report.bytes_down for report in record.reports) / 1e6


def _mean_held_out(record: RunRecord, metric: str) -> float:
    held_out = record.final.held_out if record.final else {}
    values = [row[metric] for row in held_out.values() if metric in row]
    return _over(fmean, values)


def _losses(record: RunRecord) -> list[float]:
    """Of the run's own objectives: those of other runs are not unmeasured here, there are none."""
    return [_last(record, name) for name in record.portrait.objectives]


def _over(sum_up: Callable[[list[float]], float], values: Sequence[float]) -> float:
    """What `sum_up` makes of the values that are known."""
    known = [value for value in values if not math.isnan(value)]
    return sum_up(known) if known else math.nan


def _last(record: RunRecord, name: str) -> float:
    """The loss of the trained model, or the last that was measured."""
    if record.final is not None and not math.isnan(record.final.losses.get(name, math.nan)):
        return record.final.losses[name]
    known = [r.losses[name] for r in record.reports if not math.isnan(r.losses.get(name, math.nan))]
    return known[-1] if known else math.nan


def _metric(records: Sequence[RunRecord], name: str) -> str:
    """The first held-out metric of an objective that is not its loss; empty if there is none."""
    for record in records:
        held_out = record.final.held_out.get(name, {}) if record.final else {}
        for metric in held_out:
            if metric != "loss":
                return metric
    return ""


def _held_out(record: RunRecord, name: str, metric: str) -> float:
    held_out = record.final.held_out.get(name, {}) if record.final else {}
    return held_out.get(metric, math.nan)


def _mean(values: Sequence[float], form: str = ".4g") -> str:
    known = [value for value in values if not math.isnan(value)]
    return format(fmean(known), form) if known else "–"
