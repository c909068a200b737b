"""One run of a report: its curves, its clients and its conflicts, sampled where it is long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmol.config import plain_value, toml_value
from fmol.engines.seam import ClientRecord
from fmol.grouping import algorithm_name
from fmol.metrics import conflict, conflict_rate
from fmol.record import RunRecord
from fmol.report.numbers import number
from fmol.report.settings import finds_weights, is_alone, problem_name
from fmol.report.words import alarms_of, facts_of, refused_in, unheard_in
from fmol.rounds import RoundReport

__all__ = ["Payload", "build_clients", "build_run"]

MOST_CLIENTS = 200
"""Clients in the heat map of losses; of more, as many spread evenly over the list."""

SCALARS = {
    "direction": "direction_norm_squared",
    "true_direction": "true_direction_norm_squared",
    "stationarity": "stationarity",
    "gap": "gap",
    "min_cosine": "min_cosine",
    "optimality_gap": "optimality_gap",
}

Payload = dict[str, Any]
"""What a page is given: dicts, lists, numbers and text."""


def build_run(record: RunRecord, names: Sequence[str], most: int, cosine_rounds: int) -> Payload:
    """All that the page draws of one run: of at most so many rounds, and cosines of fewer."""
    reports, final = record.reports, record.final
    chosen = _choose(reports, most)
    some = [reports[i] for i in chosen]
    rounds = [report.round for report in some]
    points: list[Any] = [*some, *([] if final is None else [final])]
    metrics = dict.fromkeys(
        metric for each in points for row in each.held_out.values() for metric in row
    )
    ends = [*chosen, *([] if final is None else [len(reports)])]
    measured = [each for each in points if each.evaluated]
    run: Payload = {
        "name": record.name or record.algorithm,
        "algorithm": algorithm_name(record),
        "problem": problem_name(record),
        "seed": record.seed,
        "stopped": record.stopped,
        "finished": final is not None,
        "alone": is_alone(record),
        "finds_weights": finds_weights(record),
        "done": record.rounds,
        "sampled": len(some) < len(reports),
        "evaluated": measured[-1].evaluated if measured else "",
        "t": rounds,
        "at": [each.round for each in points],
        "loss": [[number(each.losses.get(name)) for each in points] for name in names],
        "held_out": {
            metric: [
                [number(each.held_out.get(name, {}).get(metric)) for each in points]
                for name in names
            ]
            for metric in metrics
        },
        "weights": [[number(report.weights.get(name)) for report in some] for name in names],
        "norms": [[number(report.delta_norms.get(name)) for report in some] for name in names],
        "scalars": {
            key: [number(getattr(report, field)) for report in some]
            for key, field in SCALARS.items()
        },
        "up": _cumulative([report.bytes_up for report in reports], ends),
        "down": _cumulative([report.bytes_down for report in reports], ends),
        "seconds": _seconds(reports),
        "clients": build_clients(record, names),
        "alarms": alarms_of(reports),
        "refused": refused_in(record),
        "unheard": unheard_in(record),
        "protected": [sum(name in r.protected for r in reports) for name in names],
        "facts": list(facts_of(record)),
        "notes": list(record.notes),
        "config": [[key, _written(value)] for key, value in _flat(record.config)],
        "environment": [
            [key, _text(value)] for key, value in _flat(record.environment) if value is not None
        ],
        "command": record.command,
    }
    run.update(_conflicts(record, some, names, cosine_rounds))
    run["held_out"] = {k: v for k, v in run["held_out"].items() if _any(v)}
    run["scalars"] = {k: v for k, v in run["scalars"].items() if _any([v])}
    return run


def _choose(reports: Sequence[RoundReport], most: int) -> list[int]:
    """Indices of the rounds drawn: all, or one of each of `most` equal stretches, the last included.

    Of a stretch it is the first round with a loss, if there is one: losses may be rarer than rounds.
    """
    count = len(reports)
    if count <= most:
        return list(range(count))
    chosen = []
    for k in range(most):
        stretch = range(k * count // most, (k + 1) * count // most)
        known = (i for i in stretch if not all(map(math.isnan, reports[i].losses.values())))
        chosen.append(next(known, stretch[0]))
    chosen[-1] = count - 1
    return chosen


def _cumulative(amounts: Sequence[int], ends: Sequence[int]) -> list[float | None]:
    """Megabytes sent before each of the rounds `ends`: what it took to get to that `x_t`."""
    sums = [0]
    for amount in amounts:
        sums.append(sums[-1] + amount)
    return [number(sums[end] / 1e6) for end in ends]


def _seconds(reports: Sequence[RoundReport]) -> dict[str, float | None]:
    totals: dict[str, float] = {}
    for report in reports:
        for phase, seconds in report.seconds.items():
            if math.isfinite(seconds):
                totals[phase] = totals.get(phase, 0.0) + seconds
    return {phase: number(seconds) for phase, seconds in totals.items()}


def _conflicts(
    record: RunRecord, some: Sequence[RoundReport], names: Sequence[str], most: int
) -> Payload:
    """Whether rounds were in conflict, the most opposed pair, and the cosines of some rounds."""
    own = record.portrait.objectives
    place = [names.index(name) for name in own]
    upper = torch.triu_indices(len(own), len(own), 1)
    lowest: list[float | None] = []
    known: list[tuple[int, list[int | None]]] = []
    for report in some:
        cosines = report.cosines
        if cosines.shape != (len(own), len(own)) or len(own) < 2:
            lowest.append(None)
            continue
        values = cosines[upper[0], upper[1]].tolist()
        finite = [value for value in values if math.isfinite(value)]
        lowest.append(number(min(finite, default=math.nan)))
        if finite:
            # Thousandths: a third of the text, and more than a colour can show.
            known.append(
                (report.round, [round(1000 * v) if math.isfinite(v) else None for v in values])
            )
    if len(known) > most:
        known = [known[i * (len(known) - 1) // (most - 1)] for i in range(most)]
    rate = conflict_rate(record.reports)
    return {
        "conflict_rate": number(rate),
        "conflict": [None if (c := conflict(report)) is None else int(c) for report in some],
        "lowest": lowest,
        "cosines": {
            "objectives": place,
            "rounds": [at for at, _ in known],
            "values": [values for _, values in known],
        },
    }


def build_clients(record: RunRecord, names: Sequence[str]) -> Payload | None:
    """The last known loss and held-out metrics per client and objective, and of which rounds."""
    latest: dict[tuple[str, str], ClientRecord] = {}
    heard: set[str] = set()
    rounds: set[int] = set()
    sources: list[tuple[int, tuple[ClientRecord, ...]]] = []
    if record.final is not None:
        sources.append((record.final.round, record.final.clients))
    sources += [(report.round, report.clients) for report in reversed(record.reports)]
    for at, clients in sources:
        for each in clients:
            key = (each.client, each.objective)
            if key not in latest and (not math.isnan(each.loss) or each.held_out):
                latest[key] = each
                heard.add(each.client)
                rounds.add(at)
        if len(heard) >= record.portrait.size:
            break
    if not latest:
        return None
    ids = _in_order(heard, record)
    total = len(ids)
    if total > MOST_CLIENTS:
        ids = [ids[i] for i in range(0, total, math.ceil(total / MOST_CLIENTS))]
    metrics = dict.fromkeys(metric for each in latest.values() for metric in each.held_out)

    def table(value: Callable[[ClientRecord], float | None]) -> list[list[float | None]]:
        return [
            [number(value(latest[i, s])) if (i, s) in latest else None for s in names] for i in ids
        ]

    return {
        "ids": ids,
        "total": total,
        "rounds": [min(rounds), max(rounds)],
        "loss": table(lambda each: each.loss),
        "held_out": {metric: table(partial(_metric, metric)) for metric in metrics},
    }


def _metric(metric: str, each: ClientRecord) -> float | None:
    return each.held_out.get(metric)


def _in_order(clients: set[str], record: RunRecord) -> list[str]:
    """As the portrait lists them, so that all pictures of clients agree; the others by name."""
    listed = [client.id for client in record.portrait.clients if client.id in clients]
    return [*listed, *sorted(clients - set(listed))]


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested tables as dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written(value: Any) -> str:
    """A value as one would write it in `config.toml`."""
    return toml_value(plain_value(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _written(value)


def _any(table: Iterable[Iterable[float | None]]) -> bool:
    return any(value is not None for row in table for value in row)
