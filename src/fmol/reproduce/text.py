"""An experiment's outcome as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fmol.reproduce.experiment import Experiment, Reproduction, Table
from fmol.reproduce.planning import PlannedPart

__all__ = ["experiment_lines", "outcome_lines", "plan_lines"]

WIDTH = 100


def experiment_lines() -> Iterator[str]:
    """All experiments: what each takes, then what each is of and how it was read."""
    from fmol.reproduce import EXPERIMENTS

    heads = ("", "small, CPU", "in full, GPU", "in full, CPU", "data")
    rows = [(each.name, *_cost_cells(each), _data_cell(each)) for each in EXPERIMENTS.values()]
    yield from _columns([heads, *rows])
    yield ""
    yield (
        "On two CPU cores, and on one H200; (shared) is with others on it. Data marked * are read by "
        "--small too."
    )
    told: list[str] = []
    for experiment in EXPERIMENTS.values():
        shared = experiment.shared_reading
        if shared and shared not in told:
            told.append(shared)
            alike = [e.name for e in EXPERIMENTS.values() if e.shared_reading == shared]
            yield ""
            yield ", ".join(alike)
            yield from _indented(shared)
    for experiment in EXPERIMENTS.values():
        yield ""
        yield f"{experiment.name}: {experiment.title}"
        yield from _indented(experiment.own_reading)


def _cost_cells(experiment: Experiment) -> tuple[str, str, str]:
    cost = experiment.cost
    return ("not timed",) * 3 if cost is None else (cost.small, cost.gpu, cost.cpu)


def _data_cell(experiment: Experiment) -> str:
    marked = [f"{name}{'*' * (name in experiment.small_data)}" for name in experiment.data]
    return ", ".join(marked) or "none"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")


def plan_lines(experiment: Experiment, parts: Sequence[PlannedPart]) -> Iterator[str]:
    """How many runs, rounds and steps an experiment takes at most, by what is run together."""
    if not parts:
        yield f"{experiment.name}: {experiment.title}"
        _, _, cpu = _cost_cells(experiment)
        yield f"no runs of its own to count; in full on two CPU cores {cpu}"
        return
    heads = ("runs", "rounds", "lanes", "lane-steps, millions", "")
    rows = [
        (str(p.runs), f"{p.rounds:,}", f"{p.lanes:,}", f"{p.lane_steps / 1e6:,.2f}", p.label)
        for p in parts
    ]
    total = f"{sum(p.lane_steps for p in parts) / 1e6:,.2f}"
    rows.append(
        (str(sum(p.runs for p in parts)), f"{sum(p.rounds for p in parts):,}", "", total, "in all")
    )
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(4)]
    yield f"{experiment.name}: {experiment.title}"
    for row in (heads, *rows):
        yield "  ".join([*(text.rjust(w) for text, w in zip(row, widths, strict=False)), row[4]])
    yield "at most: runs that reach their target, or are given up, end before"


def outcome_lines(found: Reproduction) -> Iterator[str]:
    """Tables, then which claims hold and which do not, then the files."""
    yield f"{found.experiment.title}{', small' if found.size.small else ''}"
    yield from textwrap.wrap(found.experiment.reading, WIDTH)
    if found.gap:
        yield found.gap
    if any("±" in str(c) for t in found.outcome.tables for cells in t.rows.values() for c in cells):
        yield "tables: means over seeds; ± is half of their 95 % interval"
    for table in found.outcome.tables:
        yield ""
        yield from _table_lines(table)
    for holds in (True, False):
        claims = [claim for claim in found.outcome.claims if claim.holds is holds]
        if claims:
            yield ""
        for claim in claims:
            yield f"{claim.verdict}: {claim.text}"
            yield from _indented(claim.evidence)
    yield ""
    yield from (f"written: {path}" for path in found.files)
    yield ""


def _table_lines(table: Table) -> Iterator[str]:
    rows = {name: [str(cell) for cell in cells] for name, cells in table.rows.items()}
    first = max(map(len, rows), default=0)
    widths = [
        max(len(column), *(len(cells[i]) for cells in rows.values()))
        for i, column in enumerate(table.columns)
    ]
    yield table.title
    heads = [c.rjust(w) for c, w in zip(table.columns, widths, strict=True)]
    yield "  ".join([" " * first, *heads])
    for name, cells in rows.items():
        yield "  ".join(
            [name.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))]
        )
