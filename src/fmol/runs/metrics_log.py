"""`metrics.jsonl`: one line of JSON per round, and one for the trained model at the end."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
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

__all__ = ["MetricsLog", "Salvage", "read_metrics", "salvage_metrics"]

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What reading a line raises that is not what was written."""
BEGINNING = b'{"kind": '
"""What every line begins with."""


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
    found = salvage_metrics(path, bytes)
    if found.damaged:
        raise ValueError(f"line {found.damaged[0]} is damaged")
    return list(found.reports), found.final, found.stopped


@dataclass(frozen=True)
class Salvage:
    """What can be read of a file, whatever has happened to it."""

    reports: tuple[RoundReport, ...]
    """In the order of their rounds, without those that are lost."""
    final: Evaluation | None
    stopped: str
    damaged: tuple[int, ...]
    """The lines that cannot be read, the first being 1."""
    cut_short: int | None
    """The last line, where it has no end."""


def salvage_metrics(path: Path, bytes: int | None = None) -> Salvage:
    """The same as `read_metrics` gives, of all lines that are whole, and which are not.

    A last line that was cut short is what a kill leaves, and is no damage.
    """
    content = b""
    if path.exists():
        with path.open("rb") as file:
            content = file.read() if bytes is None else file.read(bytes)
    *lines, rest = content.split(b"\n")
    reports: list[RoundReport] = []
    final, stopped = None, ""
    damaged: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if data.pop("kind") == "round":
                report = report_from_json(data)
                if final is not None or report.round < (reports[-1].round + 1 if reports else 0):
                    raise ValueError("a round that is not the next")
                reports.append(report)
            else:
                stopped = data.pop("stopped")
                final = evaluation_from_json(data)
        except DAMAGE:
            damaged.append(number)
    last = len(lines) + 1
    if not _is_cut_short(rest):
        damaged.append(last)
    cut_short = last if rest and last not in damaged else None
    return Salvage(tuple(reports), final, stopped, tuple(damaged), cut_short)


def _is_cut_short(rest: bytes) -> bool:
    """Whether what has no end of line is a part of one line, or nothing."""
    written = rest.rstrip(b"\0")  # With these a power cut may leave what was not written yet.
    text = written.decode(errors="replace")
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return written.startswith(BEGINNING) or BEGINNING.startswith(written)
    return not text[end:].strip()
