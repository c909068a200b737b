"""An experiment's outcome as a section of a report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fmol.record import RunRecord
from fmol.report import write_report
from fmol.reproduce.experiment import Reproduction

__all__ = ["REPORT", "write_section"]

REPORT = "report.html"
MOST_RUNS = 48
"""Runs that a page shows beside the outcome: with more it would not open at once."""


def write_section(folder: Path, found: Reproduction) -> Path:
    """The report of an experiment: its outcome, and below it its runs where it has any."""
    records = list(found.records.values())
    shown, note = _some(records)
    return write_report(
        folder / REPORT,
        shown,
        title=f"{found.experiment.title}{', small' if found.size.small else ''}",
        experiment={
            "reading": found.experiment.reading,
            "claims": [
                {**asdict(claim), "verdict": claim.verdict} for claim in found.outcome.claims
            ],
            "tables": [
                {
                    "title": table.title,
                    "columns": list(table.columns),
                    "rows": [
                        [row, [str(cell) for cell in cells]] for row, cells in table.rows.items()
                    ],
                }
                for table in found.outcome.tables
            ],
            "figures": _figures(found.files),
            "note": " ".join(filter(None, (found.gap, note))),
        },
    )


def _some(records: Sequence[RunRecord]) -> tuple[Sequence[RunRecord], str]:
    """The runs that are shown, and what is to be said of the others."""
    if len(records) <= MOST_RUNS:
        return records, ""
    said = f"Below are the first {MOST_RUNS} of {len(records)} runs"
    return records[:MOST_RUNS], f"{said}. `fmol compare` puts others side by side."


def _figures(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The figures as they stand in a page that asks for nothing else."""
    return [
        {
            "name": path.stem,
            "image": f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}",
        }
        for path in files
        if path.suffix == ".png"
    ]
