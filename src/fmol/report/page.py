"""The page of a report: payload, style and script put into one file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from fmol.files import write_whole
from fmol.record import RunRecord
from fmol.report.data import build_payload

__all__ = ["build_report", "write_report"]

SCRIPTS = (
    "base.js",
    "marks.js",
    "card.js",
    "frame.js",
    "overview.js",
    "training.js",
    "clients.js",
    "exchange.js",
    "front.js",
    "experiment.js",
    "page.js",
)
"""In the order in which they build on one another."""
SLOT = re.compile(r"\{\{(\w+)\}\}")


def build_report(
    records: Sequence[RunRecord],
    *,
    title: str | None = None,
    alone: RunRecord | None = None,
    front: Mapping[str, Any] | None = None,
    experiment: Mapping[str, Any] | None = None,
) -> str:
    """A whole HTML page: one record is the report of a run, several are a comparison.

    Records that differ only in their seed are drawn as one line, their mean, with a band. `alone`,
    a record of training with `Alone`, adds what each client gains over training by itself; a record
    of that kind among `records` serves as well. Runs that differ in the preference they were trained
    with are shown as a front; `front`, of `Front.summary()`, adds its reference point and hypervolume.
    `experiment`, what `fmol.reproduce.section` makes, adds a section with tables and claims; it may
    stand without records.

    >>> from fmol import FMGDA, fit
    >>> from fmol.problems.quadratic import Quadratic
    >>> result = fit(Quadratic().build(), FMGDA(local_steps=2, local_lr=0.05), rounds=3)
    >>> build_report([result.record()]).startswith("<!doctype html>")
    True
    """
    payload = build_payload(records, title=title, alone=alone, front=front, experiment=experiment)
    style, script = _asset("page.css"), "\n".join(_asset(name) for name in SCRIPTS)
    parts = {
        # Only what was written here may run: a name that smuggles in markup would stay inert.
        "policy": (
            f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
            "img-src data: blob:; base-uri 'none'; form-action 'none'"
        ),
        "title": html.escape(_encodable(payload["title"])),
        "style": style,
        "script": script,
        "payload": _script_text(payload),
    }
    # One pass, so that a name which looks like a slot is not filled in.
    return SLOT.sub(lambda slot: parts[slot[1]], _asset("page.html"))


def write_report(
    path: str | os.PathLike[str],
    records: Sequence[RunRecord],
    *,
    title: str | None = None,
    alone: RunRecord | None = None,
    front: Mapping[str, Any] | None = None,
    experiment: Mapping[str, Any] | None = None,
) -> Path:
    """The path of the file written, with what `build_report` gives in it.

    The file appears at once or not at all: whoever opens it meanwhile sees the one before.
    """
    target = Path(path)
    page = build_report(records, title=title, alone=alone, front=front, experiment=experiment)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page)
    return target


def _asset(name: str) -> str:
    return resources.files("fmol.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script_text(payload: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _encodable(text: str) -> str:
    """The text without halves of characters, which no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
