"""What a run leaves at its end: the model, a summary and the report."""

from __future__ import annotations

from typing import Any

from fmol.files import write_whole
from fmol.metrics import conflict_rate
from fmol.report import write_report
from fmol.result import Result
from fmol.runs.folder import RunFolder, plain_numbers

__all__ = ["summarize", "write_end"]


def write_end(folder: RunFolder, result: Result, seconds: float, report: bool) -> None:
    """Writes the end of a run that took so many seconds, with the page if it is to have a `report`."""
    from safetensors.torch import save

    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in result.model.state_dict().items()
    }
    write_whole(folder.model, save(tensors, metadata={"format": "pt"}))
    folder.write_json(folder.summary, summarize(result, seconds))
    if report:
        write_report(folder.report, [folder.record()])


def summarize(result: Result, seconds: float) -> dict[str, Any]:
    """A run's outcome in a few numbers, for `summary.json`."""
    reports = result.reports
    alarms = reports[-1].alarms if reports else ()
    data = {
        "algorithm": type(result.algorithm).__name__,
        "seed": result.seed,
        "rounds": len(reports),
        "stopped": result.stopped,
        "losses": result.final.losses,
        "held_out": result.final.held_out,
        "evaluated": result.final.evaluated,
        "conflict_rate": conflict_rate(reports),
        "bytes_up": sum(report.bytes_up for report in reports),
        "bytes_down": sum(report.bytes_down for report in reports),
        "seconds": seconds,
        "refused": sum(len(report.refused) for report in reports) + len(result.final.refused),
        "alarms": [
            {"kind": a.kind, "objective": a.objective, "message": a.message} for a in alarms
        ],
        "notes": sorted({note for report in reports for note in report.notes}),
    }
    plain: dict[str, Any] = plain_numbers(data)
    return plain
