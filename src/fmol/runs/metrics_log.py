"""`metrics.jsonl`: one line of JSON per round, and one for the trained model at the end."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmol.measurement import Evaluation
from fmol.record import (
    evaluation_from_json,
    evaluation_to_json,
    report_from_json,
    report_to_json,
)
from fmol.rounds import RoundReport

__all__ = ["MetricsLog", "read_metrics"]


class MetricsLog:
    """The file, open for adding to; knows how long it is and the sha256 of what it holds."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Opens `path` and cuts off what comes after its first `keep` bytes."""
        self.path = path
        self._hash = hashlib.sha256()
        mode = "r+b" if path.exists() else "x+b"
        self._file = path.open(mode)
        self._file.truncate(keep)
        self._file.seek(0)
        self._hash.update(self._file.read())
        self.bytes = keep

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, report: RoundReport) -> None:
        self._write({"kind": "round", **report_to_json(report)})

    def finish(self, final: Evaluation, stopped: str) -> None:
        self._write({"kind": "final", "stopped": stopped, **evaluation_to_json(final)})
        self.sync()

    def _write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._hash.update(line)
        self.bytes += len(line)

    def sync(self) -> None:
        """Returns when what was written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def holds(path: Path, bytes: int, sha256: str) -> bool:
    """Whether the file's first `bytes` bytes are there and are those that were written."""
    if not path.exists():
        return bytes == 0
    with path.open("rb") as file:
        content = file.read(bytes)
    return len(content) == bytes and hashlib.sha256(content).hexdigest() == sha256


def read_metrics(
    path: Path, bytes: int | None = None
) -> tuple[list[RoundReport], Evaluation | None, str]:
    """The reports in a file, the standing of the trained model if it ended, and why it ended.

    Only the first `bytes` bytes are read, if given; a last line that was cut short is left out.
    """
    reports: list[RoundReport] = []
    final, stopped = None, ""
    for data in _lines(path, bytes):
        kind = data.pop("kind")
        if kind == "round":
            reports.append(report_from_json(data))
        else:
            stopped = data.pop("stopped")
            final = evaluation_from_json(data)
    return reports, final, stopped


def _lines(path: Path, bytes: int | None) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        content = file.read() if bytes is None else file.read(bytes)
    for line in content.split(b"\n")[:-1]:  # What has no end of line was not written whole.
        yield json.loads(line)
