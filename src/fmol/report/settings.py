"""What a record's config says of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmol.grouping import algorithm_name
from fmol.record import RunRecord

__all__ = ["finds_weights", "is_alone", "problem_name"]

MIXING = ("FedAvg", "FedLS", "FedALS", "Alone")
"""Algorithms that train a mixture of objectives with weights that are given."""


def problem_name(record: RunRecord) -> str:
    """What the config calls the problem; empty without one."""
    return _called(record.config.get("problem", ""))


def is_alone(record: RunRecord) -> bool:
    """Whether each client trained by itself in this run."""
    return "alone" in (
        record.algorithm.lower(),
        _called(record.config.get("algorithm")).lower(),
    )


def finds_weights(record: RunRecord) -> bool:
    """Whether a round finds the weights of objectives; otherwise they are given before the run."""
    chosen = record.config.get("algorithm")
    rule = chosen.get("rule") if isinstance(chosen, Mapping) else None
    return not (_called(rule).lower() == "fixed" or algorithm_name(record) in MIXING)


def _called(value: Any) -> str:
    """The name of what a config has, in a table with options or without one."""
    return str(value.get("name", "") if isinstance(value, Mapping) else value)
