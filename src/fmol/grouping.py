"""Which runs belong together: those that differ in their seed alone, and what to call them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmol import algorithms
from fmol.record import RunRecord

__all__ = ["RunGroup", "algorithm_name", "group_records"]

SPELLINGS = {name.lower(): name for name in algorithms.__all__}
"""Config files write algorithms small; people see one spelling."""
ASIDE = frozenset(
    {"seed", "data_dir", "device", "threads", "checkpoint_every", "tensorboard", "mlflow"}
)
"""Run options that make no other setting: where and how it was computed and written."""
SEED = re.compile(r"[ ,_-]*\(?seed[ =_-]?\d+\)?(-\d{8}-\d{6}(-\d+)?)?", re.IGNORECASE)
PROBLEM_SEED = "problem.seed"
DATED = re.compile(r"-seed\d+-\d{8}-\d{6}(-\d+)?$")
"""How a run folder ends that nobody named: its beginning tells no more than its config."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one setting, a seed each."""

    label: str
    records: tuple[RunRecord, ...]
    members: tuple[int, ...]
    """Where they stand among the records that were grouped."""


def group_records(records: Sequence[RunRecord]) -> list[RunGroup]:
    """The records in groups that differ in their seed alone, in the order of their first members.

    Without a config it is algorithm and name that must agree, and with one that names no problem, as
    from Python, also who holds what. Two runs of one seed never share a group: something that is not
    written down differs. A group is called what its runs are, without
    the seed; where that tells nothing, by the algorithm and the options in which groups differ.
    """
    settings_of = [_settings(record) for record in records]
    groups = _alike(records, settings_of)
    for members in groups:
        # Where every seed has data of its own, by the same seed, that is no setting of its own.
        (first, *others) = members
        if not others and settings_of[first].get(PROBLEM_SEED) == str(records[first].seed):
            settings_of[first] = {k: v for k, v in settings_of[first].items() if k != PROBLEM_SEED}
    groups = _alike(records, settings_of)
    parts = [tuple(records[i] for i in members) for members in groups]
    labels = [_shared_name(part) for part in parts]
    settings = [settings_of[members[0]] for members in groups]
    labels = [
        label if label and labels.count(label) == 1 else _differences(g, parts[g][0], settings)
        for g, label in enumerate(labels)
    ]
    return [
        RunGroup(_numbered(labels, g), parts[g], tuple(members)) for g, members in enumerate(groups)
    ]


def _alike(records: Sequence[RunRecord], settings: Sequence[Mapping[str, str]]) -> list[list[int]]:
    """Which records have the same algorithm and settings, and seeds that differ."""
    groups: list[tuple[object, list[int]]] = []
    for i, record in enumerate(records):
        key = (record.algorithm, settings[i] or record.name, _problem_of(record))
        for known, members in groups:
            if known == key and record.seed not in {records[j].seed for j in members}:
                members.append(i)
                break
        else:
            groups.append((key, [i]))
    return [members for _, members in groups]


def _problem_of(record: RunRecord) -> object:
    """What must agree where a config names no problem: then it is not among the settings."""
    if not record.config or "problem" in record.config:
        return None
    portrait = record.portrait
    if (
        record.name == record.algorithm
    ):  # Nobody named it: who holds how much is all there is to tell.
        return portrait
    return _unseeded(record.name), portrait.model, portrait.objectives, portrait.targets


def algorithm_name(record: RunRecord) -> str:
    """The algorithm as the library spells it, whether the record comes from memory or from a file."""
    return SPELLINGS.get(record.algorithm.lower(), record.algorithm)


def _settings(record: RunRecord) -> dict[str, str]:
    """Every key of the config that makes a setting, on one level, as text.

    The run's own seed is left out; that of a problem makes other data, which is another setting.
    """
    said = {key: value for key, value in record.config.items() if key not in ASIDE}
    return {key: str(value) for key, value in _flat(said)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shared_name(records: Sequence[RunRecord]) -> str:
    """What the records are all called but for the seed; empty where that tells nothing."""
    names = {_unseeded(record.name) for record in records}
    dated = any(DATED.search(record.name) for record in records)
    return names.pop() if len(names) == 1 and not dated else ""


def _unseeded(name: str) -> str:
    return SEED.sub("", name).strip(" ,_-")


def _differences(g: int, record: RunRecord, settings: Sequence[Mapping[str, str]]) -> str:
    """The algorithm, and the options in which this group is not as all others."""
    own = settings[g]
    differing = [
        f"{key.rpartition('.')[2]}={value}"
        for key, value in own.items()
        if key != "algorithm.name"
        # An option that other algorithms do not have tells nothing that their name does not.
        and any(key in other and other[key] != value for other in settings)
    ]
    return ", ".join([algorithm_name(record), *differing])


def _numbered(labels: Sequence[str], g: int) -> str:
    """The label, with a number where several groups have the same."""
    if labels.count(labels[g]) == 1:
        return labels[g]
    return f"{labels[g]} ({list(labels[: g + 1]).count(labels[g])})"
