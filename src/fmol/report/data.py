"""The payload of a report: records as one compact JSON object, rounded, and sampled where long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fmol.grouping import RunGroup, group_records
from fmol.measurement import Evaluation
from fmol.portrait import Portrait
from fmol.record import RunRecord
from fmol.report.front import build_front
from fmol.report.numbers import number
from fmol.report.run import Payload, build_clients, build_run
from fmol.report.settings import is_alone, problem_name
from fmol.rounds import RoundReport
from fmol.wording import many

__all__ = ["better", "build_payload"]

MOST_POINTS = 2000
"""Rounds drawn of a run; of more, as many spread evenly over it."""
MOST_NUMBERS = 60_000
"""Numbers of one kind (rounds times objectives) over all runs: a page should open at once."""
FEWEST_POINTS = 100
MOST_COSINES = 12_000
"""Pairwise cosines over all runs; with many objectives they are kept for fewer rounds."""
LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "gap", "violation", "disparity", "unfair")
HIGHER_IS_BETTER = ("accuracy", "auc", "f1", "precision", "recall", "r2", "score")


def build_payload(
    records: Sequence[RunRecord],
    *,
    title: str | None = None,
    alone: RunRecord | None = None,
    front: Mapping[str, Any] | None = None,
    experiment: Mapping[str, Any] | None = None,
) -> Payload:
    """All that the page draws, as dicts, lists, numbers and text; None where nothing was measured."""
    if not records and experiment is None:
        raise ValueError("`records` is empty, got no run to report on. Give at least one record.")
    if alone is not None and not is_alone(alone):
        raise ValueError(
            f"`alone` must be a record of training with `Alone`, got one of `{alone.algorithm}`. "
            "Train the same federation with `Alone`, or leave it out."
        )
    names = list(dict.fromkeys(name for record in records for name in record.portrait.objectives))
    groups = group_records(records)
    share = max(len(records), 1) * max(len(names), 1)
    most = max(FEWEST_POINTS, min(MOST_POINTS, MOST_NUMBERS // share))
    pairs = max(len(names) * (len(names) - 1) // 2, 1)
    cosine_rounds = max(2, MOST_COSINES // (max(len(records), 1) * pairs))
    portraits: list[Portrait] = []
    labelled: list[dict[tuple[str, str], int]] = []
    runs = []
    for record in records:
        if record.portrait not in portraits:
            portraits.append(record.portrait)
            labelled.append({})
        at = portraits.index(record.portrait)
        labelled[at] = _labelled(record) | labelled[at]
        run = build_run(record, names, most, cosine_rounds)
        run["portrait"] = at
        runs.append(run)
    metrics = list(dict.fromkeys(metric for run in runs for metric in run["held_out"]))
    return {
        "title": title if title is not None else _title(records, groups),
        "objectives": names,
        "metrics": [{"name": metric, "better": better(metric)} for metric in metrics],
        "portraits": [_portrait(*each) for each in zip(portraits, labelled, strict=True)],
        "runs": runs,
        "groups": [{"label": each.label, "runs": list(each.members)} for each in groups],
        "alone": _alone(records, alone, names),
        "front": build_front(groups, names, front),
        "experiment": None if experiment is None else dict(experiment),
    }


def better(metric: str) -> str:
    """`"lower"`, `"higher"`, or empty where the name does not tell."""
    words = metric.lower()
    if any(word in words for word in LOWER_IS_BETTER):
        return "lower"
    return "higher" if any(word in words for word in HIGHER_IS_BETTER) else ""


def _title(records: Sequence[RunRecord], groups: Sequence[RunGroup]) -> str:
    problems = list(dict.fromkeys(filter(None, map(problem_name, records))))
    problem = _listed(problems if len(problems) < 4 else [*problems[:2], "others"])
    if len(groups) > 1:
        of = f"{len(groups)} settings, " if len(groups) < len(records) else ""
        told = f"{of}{many(len(records), 'run')}"
        return f"{problem}: {told} compared" if problem else told
    label = groups[0].label
    return f"{problem}: {label}" if problem else label


def _alone(
    records: Sequence[RunRecord], alone: RunRecord | None, names: Sequence[str]
) -> list[Payload]:
    """How clients stand that trained by themselves, one entry per such run."""
    trained = [record for record in records if is_alone(record)]
    trained += [] if alone is None else [alone]
    found = [
        {
            "name": record.name,
            "seed": record.seed,
            "rounds": record.rounds,
            "clients": build_clients(record, names),
        }
        for record in trained
    ]
    return [each for each in found if each["clients"] is not None]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def _labelled(record: RunRecord) -> dict[tuple[str, str], int]:
    """Client and objective → how many samples have a label, as far as it was seen in training."""
    wanted = sum(len(client.objectives) for client in record.portrait.clients)
    found: dict[tuple[str, str], int] = {}
    sources: list[Evaluation | RoundReport] = [*record.reports]
    if record.final is not None:
        sources.insert(0, record.final)
    for each in sources:
        refused = {(refusal.client, refusal.objective) for refusal in each.refused}
        for client in each.clients:
            # What was refused may have come without its count.
            if client.samples or (client.client, client.objective) not in refused:
                found.setdefault((client.client, client.objective), client.samples)
        if len(found) >= wanted:
            break
    return found


def _portrait(portrait: Portrait, labelled: Mapping[tuple[str, str], int]) -> Payload:
    return {
        "model": portrait.model,
        "parameters": portrait.parameters,
        "objectives": list(portrait.objectives),
        "targets": {name: number(value) for name, value in portrait.targets.items()},
        "size": portrait.size,
        "held_out": portrait.held_out,
        "labels": {column: list(values) for column, values in portrait.labels.items()},
        "clients": [
            {
                "id": client.id,
                "holds": [portrait.objectives.index(name) for name in client.objectives],
                "labelled": [labelled.get((client.id, name)) for name in client.objectives],
                "samples": client.samples,
                "held_out": client.held_out,
                "labels": {column: list(counts) for column, counts in client.labels.items()},
            }
            for client in portrait.clients
        ],
    }
