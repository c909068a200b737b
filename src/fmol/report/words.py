"""What happened in a run in words: alarms, refusals, and what would be missed in a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fmol.algorithms.mixture import MIXTURE
from fmol.record import RunRecord
from fmol.report.settings import is_alone
from fmol.rounds import RoundReport

__all__ = ["alarms_of", "facts_of", "refused_in", "unheard_in"]

MOST_WORDS = 20
"""Refusals told one by one."""


def alarms_of(reports: Sequence[RoundReport]) -> list[dict[str, Any]]:
    """One entry per kind and objective: its last stretch of rounds, and how many there were."""
    stretches: dict[tuple[str, str], dict[str, Any]] = {}
    last = reports[-1].round if reports else -1
    for report in reports:
        for alarm in report.alarms:
            key = alarm.kind, alarm.objective
            before = stretches.get(key, {"times": 0, "since": None})
            stretches[key] = {
                "kind": alarm.kind,
                "objective": alarm.objective,
                "since": alarm.since,
                "until": report.round,
                "stands": report.round == last,
                "times": before["times"] + (alarm.since != before["since"]),
                "message": alarm.message,
            }
    return list(stretches.values())


def refused_in(record: RunRecord) -> dict[str, Any]:
    """How many refusals there were, and the first of them in words."""
    refused = [refusal for report in record.reports for refusal in report.refused]
    if record.final is not None:
        refused += record.final.refused
    return {"count": len(refused), "first": [str(refusal) for refusal in refused[:MOST_WORDS]]}


def unheard_in(record: RunRecord) -> list[dict[str, Any]]:
    """Objectives without an update in any round, each with the first refusal that tells why."""
    if not record.reports:
        return []
    never = set.intersection(*(set(report.missing) for report in record.reports))
    refused = [refusal for report in record.reports for refusal in report.refused]
    return [
        {
            "objective": name,
            "reason": next((str(r) for r in refused if r.objective in (name, MIXTURE)), ""),
        }
        for name in record.portrait.objectives
        if name in never
    ]


def facts_of(record: RunRecord) -> Iterator[str]:
    """What happened in some rounds and would be missed in a chart."""
    reports = record.reports
    count = partial(_count, total=len(reports))
    unheard = [each["objective"] for each in unheard_in(record)]
    for name, rounds in _rounds_by_objective(reports, "missing").items():
        if name not in unheard:
            yield f"Objective `{name}` had no update in {count(rounds)}."
    for name, rounds in _rounds_by_objective(reports, "protected").items():
        yield (
            f"Objective `{name}` was protected in {count(rounds)}: at its target, so it did not pull, "
            "and no step was to hurt it. Its weight there is that of a constraint."
        )
    silent = [report.round for report in reports if report.silent]
    if silent:
        yield f"Some clients that were asked did not answer in {count(silent)}."
    held = [report.round for report in reports if report.held]
    if held and not is_alone(record):
        yield f"The model stayed what it was in {count(held)}."
    broken: dict[str, list[int]] = {}
    for report in reports:
        for name, loss in report.losses.items():
            if math.isinf(loss):
                broken.setdefault(name, []).append(report.round)
    for name, rounds in broken.items():
        yield f"The training loss of `{name}` was infinite in {count(rounds)}; not drawn."
    noted: dict[str, list[int]] = {}
    for report in reports:
        for note in report.notes:
            noted.setdefault(note, []).append(report.round)
    for note, rounds in list(noted.items())[:MOST_WORDS]:
        yield f"{note} (in {count(rounds)})"


def _rounds_by_objective(reports: Sequence[RoundReport], field: str) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {}
    for report in reports:
        for name in getattr(report, field):
            seen.setdefault(name, []).append(report.round)
    return seen


def _count(rounds: Sequence[int], total: int) -> str:
    """Which rounds of `total`, in words that do not mix numbers of rounds with their names."""
    first, last = rounds[0], rounds[-1]
    if len(rounds) == 1:
        return f"round {first}"
    if len(rounds) == total:
        return f"all {total} rounds"
    if len(rounds) == last - first + 1:
        return f"rounds {first} to {last}"
    return f"{len(rounds)} of {total} rounds, between round {first} and round {last}"
