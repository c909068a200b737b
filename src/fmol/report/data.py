"""The payload of a report: records as one compact JSON object, rounded, and sampled where long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmol.algorithms.mixture import MIXTURE
from fmol.config import plain_value, toml_value
from fmol.engines.seam import ClientRecord
from fmol.grouping import RunGroup, algorithm_name, group_records
from fmol.metrics import conflict, conflict_rate
from fmol.record import RunRecord
from fmol.report.front import build_front
from fmol.rounds import RoundReport

__all__ = ["build_payload"]

DIGITS = 6
MOST_POINTS = 2000
"""Rounds drawn of a run; of more, as many spread evenly over it."""
MOST_NUMBERS = 60_000
"""Numbers of one kind (rounds times objectives) over all runs: a page should open at once."""
FEWEST_POINTS = 100
MOST_COSINES = 12_000
"""Pairwise cosines over all runs; with many objectives they are kept for fewer rounds."""
MOST_CLIENTS = 200
"""Clients in the heat map of losses; of more, as many spread evenly over the list."""
MOST_WORDS = 20
"""Refusals told one by one."""

SCALARS = {
    "direction": "direction_norm_squared",
    "true_direction": "true_direction_norm_squared",
    "stationarity": "stationarity",
    "gap": "gap",
    "min_cosine": "min_cosine",
    "optimality_gap": "optimality_gap",
}
LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "gap", "violation", "disparity", "unfair")
HIGHER_IS_BETTER = ("accuracy", "auc", "f1", "precision", "recall", "r2", "score")

MIXING = ("FedAvg", "FedLS", "FedALS", "Alone")
"""Algorithms that train a mixture of objectives with weights that are given."""

Payload = dict[str, Any]


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
    portraits: list[Payload] = []
    runs = []
    for record in records:
        portrait = _portrait(record)
        if portrait not in portraits:
            portraits.append(portrait)
        run = _run(record, names, most, cosine_rounds)
        run["portrait"] = portraits.index(portrait)
        runs.append(run)
    metrics = list(dict.fromkeys(metric for run in runs for metric in run["held_out"]))
    return {
        "title": title if title is not None else _title(records, groups),
        "objectives": names,
        "metrics": [{"name": metric, "better": better(metric)} for metric in metrics],
        "portraits": portraits,
        "runs": runs,
        "groups": [{"label": each.label, "runs": list(each.members)} for each in groups],
        "alone": _alone(records, alone, names),
        "front": build_front(groups, names, front),
        "experiment": None if experiment is None else dict(experiment),
    }


def is_alone(record: RunRecord) -> bool:
    """Whether each client trained by itself in this run."""
    chosen = record.config.get("algorithm")
    if isinstance(chosen, Mapping):
        chosen = chosen.get("name")
    return "alone" in (record.algorithm.lower(), str(chosen).lower())


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
        return f"{problem}: {len(groups)} runs compared" if problem else f"{len(groups)} runs"
    label = groups[0].label
    return f"{problem}: {label}" if problem else label


def problem_name(record: RunRecord) -> str:
    """What the config calls the problem; empty without one."""
    problem = record.config.get("problem", "")
    if isinstance(problem, Mapping):
        problem = problem.get("name", "")
    return str(problem)


def finds_weights(record: RunRecord) -> bool:
    """Whether a round finds the weights of objectives; otherwise they are given before the run."""
    chosen = record.config.get("algorithm")
    rule = chosen.get("rule") if isinstance(chosen, Mapping) else None
    if isinstance(rule, Mapping):
        rule = rule.get("name")
    return not (str(rule).lower() == "fixed" or algorithm_name(record) in MIXING)


# ---- one run ---------------------------------------------------------------------------------


def _run(record: RunRecord, names: Sequence[str], most: int, cosine_rounds: int) -> Payload:
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
        "clients": _clients(record, names),
        "alarms": _alarms(reports),
        "refused": _refused(record),
        "unheard": _unheard(record),
        "protected": [sum(name in r.protected for r in reports) for name in names],
        "facts": list(_facts(record)),
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


def _clients(record: RunRecord, names: Sequence[str]) -> Payload | None:
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
            "clients": _clients(record, names),
        }
        for record in trained
    ]
    return [each for each in found if each["clients"] is not None]


# ---- words -----------------------------------------------------------------------------------


def _alarms(reports: Sequence[RoundReport]) -> list[Payload]:
    """One entry per kind and objective: its last stretch of rounds, and how many there were."""
    stretches: dict[tuple[str, str], Payload] = {}
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


def _refused(record: RunRecord) -> Payload:
    refused = [refusal for report in record.reports for refusal in report.refused]
    if record.final is not None:
        refused += record.final.refused
    return {"count": len(refused), "first": [str(refusal) for refusal in refused[:MOST_WORDS]]}


def _unheard(record: RunRecord) -> list[Payload]:
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


def _facts(record: RunRecord) -> Iterator[str]:
    """What happened in some rounds and would be missed in a chart."""
    reports = record.reports
    count = partial(_count, total=len(reports))
    unheard = [each["objective"] for each in _unheard(record)]
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


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def _portrait(record: RunRecord) -> Payload:
    portrait = record.portrait
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
                "samples": client.samples,
                "held_out": client.held_out,
                "labels": {column: list(counts) for column, counts in client.labels.items()},
            }
            for client in portrait.clients
        ],
    }


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


# ---- numbers ---------------------------------------------------------------------------------


def number(value: float | None) -> float | int | None:
    """The value to six digits; None for what is not measured or not finite, which JSON cannot say."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _any(table: Iterable[Iterable[float | None]]) -> bool:
    return any(value is not None for row in table for value in row)
