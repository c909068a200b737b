"""An experiment's outcome as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fmol.reproduce.experiment import Table
from fmol.reproduce.running import Reproduction

__all__ = ["experiment_lines", "outcome_lines"]

WIDTH = 100


def experiment_lines() -> Iterator[str]:
    """All experiments: what each is of, how it was read, what it takes."""
    from fmol.reproduce import EXPERIMENTS

    for name, experiment in EXPERIMENTS.items():
        yield f"{name:15} {experiment.title}"
        if experiment.cost:
            yield f"{'':15} {experiment.cost}"
        yield from textwrap.wrap(
            experiment.reading, WIDTH, initial_indent=" " * 16, subsequent_indent=" " * 16
        )


def outcome_lines(found: Reproduction) -> Iterator[str]:
    """Tables, then which claims hold and which do not, then the files."""
    yield f"{found.experiment.title}{', small' if found.size.small else ''}"
    yield from textwrap.wrap(found.experiment.reading, WIDTH)
    for table in found.outcome.tables:
        yield ""
        yield from _table_lines(table)
    for holds, heading in ((True, "holds"), (False, "not reproduced")):
        claims = [claim for claim in found.outcome.claims if claim.holds is holds]
        if claims:
            yield ""
        for claim in claims:
            yield f"{heading}: {claim.text}"
            yield from textwrap.wrap(
                claim.evidence, WIDTH, initial_indent="    ", subsequent_indent="    "
            )
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
