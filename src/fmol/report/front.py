"""Runs that differ in the preference they were trained with, as a report shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fmol.grouping import RunGroup
from fmol.record import RunRecord

__all__ = ["build_front", "preference_of"]

PREFERENCES = ("weights", "preference", "prior")
"""Options of rules, and of algorithms with fixed weights, that are a preference by objective."""
CALLED = {"fixed": "weights"}


def preference_of(record: RunRecord) -> tuple[str, dict[str, float]] | None:
    """By which method and with which preference a run was trained; None without one."""
    algorithm = record.config.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return None
    rule = algorithm.get("rule")
    places = [("weights", algorithm)]
    if isinstance(rule, Mapping):
        name = str(rule.get("name", ""))
        places.insert(0, (CALLED.get(name, name), rule))
    for method, options in places:
        for option in PREFERENCES:
            given = options.get(option)
            if isinstance(given, Mapping) and set(given) == set(record.portrait.objectives):
                total = sum(float(value) for value in given.values())
                shares = {str(name): float(value) / total for name, value in given.items()}
                return method, shares
    return None


def build_front(
    groups: Sequence[RunGroup], names: Sequence[str], front: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The front among groups of runs: several of one problem and method whose preferences differ.

    None where there is none. `front` adds what runs by themselves do not tell.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for g, group in enumerate(groups):
        record = group.records[0]
        chosen = preference_of(record)
        if chosen is None or set(record.portrait.objectives) != set(names):
            continue
        method, shares = chosen
        point = {"group": g, "method": method, "preference": [shares[name] for name in names]}
        found.setdefault((str(record.config.get("problem")), method), []).append(point)
    problems = {problem for problem, _ in found}
    points = [
        point
        for each in found.values()
        if len({tuple(point["preference"]) for point in each}) > 1
        for point in each
    ]
    if not points or len(names) < 2 or len(problems) > 1:
        return None
    told = front or {}
    corner = told.get("reference")
    measure = str(told.get("measure", "loss"))
    words = {"loss": "loss", "held-out-loss": "held_out:loss"}
    return {
        "points": points,
        "measure": words.get(measure, f"held_out:{measure}"),
        "reference": None if corner is None else [corner[name] for name in names],
        "hypervolume": dict(told.get("hypervolume") or {}),
    }
