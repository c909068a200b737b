"""Results as a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """A run in at most ten lines, the last of which says where the report is."""
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
    """Runs side by side, one line per setting, means over its seeds."""
    names = list(dict.fromkeys(name for record in records for name in record.portrait.objectives))
    shown = names if len(names) <= MOST else []
    header = ["setting", "runs", "rounds", *(f"loss {name}" for name in shown)]
    header += [] if shown else ["loss mean", "loss highest"]
    header += [*(f"{_metric(records, name)} {name}" for name in shown if _metric(records, name))]
    header += ["conflict", "MB"]
    rows = [header]
    for each in group_records(records):
        label, group = each.label, each.records
        losses = [{n: _last(r, n) for n in names} for r in group]
        row = [label, str(len(group)), _mean([len(r.reports) for r in group], ".0f")]
        if shown:
            row += [_mean([each[name] for each in losses]) for name in shown]
            for name in shown:
                if metric := _metric(records, name):
                    row.append(_mean([_held_out(r, name, metric) for r in group]))
        else:
            row.append(_mean([fmean(each.values()) for each in losses]))
            row.append(_mean([max(each.values()) for each in losses]))
        row.append(_mean([conflict_rate(r.reports) for r in group], ".0%"))
        sent = [sum(t.bytes_up + t.bytes_down for t in r.reports) / 1e6 for r in group]
        rows.append([*row, _mean(sent, ",.1f")])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
