"""What a run leaves to look at, without its model and data: the source of every report.

A `RunRecord` is made of a result in memory or of a run folder, and reads the same from both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from fmol.alarms import Alarm
from fmol.engines.seam import ClientRecord, Refusal
from fmol.measurement import Evaluation
from fmol.metrics import Row, rows
from fmol.portrait import Portrait
from fmol.rounds import RoundReport

__all__ = [
    "RunRecord",
    "evaluation_from_json",
    "evaluation_to_json",
    "report_from_json",
    "report_to_json",
]

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run, finished or not, as numbers and words."""

    name: str
    """What it is called beside others."""
    algorithm: str
    portrait: Portrait
    reports: tuple[RoundReport, ...]
    final: Evaluation | None
    """How the trained model stands; None for a run that has not ended."""
    stopped: str
    """Why it ended, in words; empty for a run that has not."""
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """As in `config.toml`: `problem`, `algorithm`, … by key."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions, device, and when."""
    command: str = ""
    """How to do it again, as one would type it; or a few lines of Python."""
    notes: tuple[str, ...] = ()
    """What a reader should know: resumed, with which changes, fallbacks."""

    @property
    def rounds(self) -> int:
        """How many rounds were done, those included whose report is lost."""
        if self.final is not None:
            return self.final.round
        return self.reports[-1].round + 1 if self.reports else 0

    def table(self) -> list[Row]:
        """Every number as one long table; what was not measured has no row."""
        table = [row for report in self.reports for row in rows(report)]
        return table + ([] if self.final is None else final_rows(self.final))

    def to_pandas(self) -> Any:
        """`table()` as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                '`to_pandas` needs pandas. Install it with: pip install "fmol[pandas]".'
            ) from error
        return pd.DataFrame(self.table(), columns=list(Row._fields))


def final_rows(final: Evaluation) -> list[Row]:
    """The trained model's losses and metrics as rows; what was not measured has none."""
    t, table = final.round, []
    for name, loss in final.losses.items():
        table.append(Row(t, "train", "", name, "loss", loss))
        for metric, value in final.held_out.get(name, {}).items():
            table.append(Row(t, "held_out", "", name, metric, value))
    for record in final.clients:
        table.append(Row(t, "train", record.client, record.objective, "loss", record.loss))
        for metric, value in record.held_out.items():
            table.append(Row(t, "held_out", record.client, record.objective, metric, value))
    return [row for row in table if not math.isnan(row.value)]


# ---- to JSON and back ------------------------------------------------------------------------
# Floats keep every bit (Python writes the shortest text that reads back the same); NaN is null.


def report_to_json(report: RoundReport) -> dict[str, Any]:
    """A round's report as dicts, lists, numbers and text."""
    data = {f.name: getattr(report, f.name) for f in fields(report)}
    data["clients"] = _columns(report.clients)
    data["cosines"] = report.cosines.double().tolist()
    for name in ("refused", "alarms"):
        data[name] = [asdict(each) for each in data[name]]
    return {name: _plain(value) for name, value in data.items()}


def report_from_json(data: Mapping[str, Any]) -> RoundReport:
    """What `report_to_json` gave, back."""
    values = {name: _number_back(value) for name, value in data.items()}
    for name in ("cohort", "missing", "protected", "silent", "notes"):
        values[name] = tuple(data[name])
    values["cosines"] = _matrix_back(values["cosines"])
    values["refused"] = tuple(Refusal(**each) for each in data["refused"])
    values["alarms"] = tuple(Alarm(**each) for each in data["alarms"])
    values["clients"] = _records(data["clients"])
    return RoundReport(**values)


def evaluation_to_json(final: Evaluation) -> dict[str, Any]:
    """The standing of a model as dicts, lists, numbers and text."""
    data = {f.name: getattr(final, f.name) for f in fields(final)}
    data["clients"] = _columns(final.clients)
    data["refused"] = [asdict(each) for each in final.refused]
    return {name: _plain(value) for name, value in data.items()}


def evaluation_from_json(data: Mapping[str, Any]) -> Evaluation:
    """What `evaluation_to_json` gave, back."""
    values = {name: _number_back(value) for name, value in data.items()}
    values["refused"] = tuple(Refusal(**each) for each in data["refused"])
    values["clients"] = _records(data["clients"])
    return Evaluation(**values)


def _columns(records: Sequence[ClientRecord]) -> dict[str, list[Any]]:
    """One list per field: a thousand clients need their names once each and no field's name twice."""
    columns = zip(*records, strict=True) if records else ((),) * len(ClientRecord._fields)
    return {name: list(each) for name, each in zip(ClientRecord._fields, columns, strict=True)}


def _records(columns: Mapping[str, Sequence[Any]]) -> tuple[ClientRecord, ...]:
    # Names stay text: a client may be called `inf`.
    back = {
        name: values if name in ("client", "objective") else _number_back(values)
        for name, values in columns.items()
    }
    return tuple(
        ClientRecord(**dict(zip(back, values, strict=True)))
        for values in zip(*back.values(), strict=True)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _number_back(value: Any) -> Any:
    if value is None:
        return NAN
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {name: _number_back(each) for name, each in value.items()}
    return [_number_back(each) for each in value] if isinstance(value, list) else value


def _matrix_back(rows: list[list[float]]) -> Tensor:
    size = len(rows)
    return torch.tensor(rows, dtype=torch.float32).reshape(size, size)
