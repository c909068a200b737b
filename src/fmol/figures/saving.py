"""Figures as files: small, and the same bytes whenever they are written."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["save_figure", "tidy_svg"]

CLOSE = re.compile(r"(?<=[A-Za-z]) | (?=[A-Za-z])")
"""Spaces around the letters of a path, which it does not need."""


def save_figure(
    figure: Any, folder: str | os.PathLike[str], name: str, formats: Sequence[str]
) -> list[Path]:
    """The files written to `folder`, one per format; without a date, so that bytes can be compared."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = [target / f"{name}.{kind}" for kind in formats]
    for path, kind in zip(written, formats, strict=True):
        figure.savefig(path, format=kind, bbox_inches="tight", metadata=_undated(kind))
        if kind == "svg":
            path.write_text(tidy_svg(path.read_text(encoding="utf-8")), encoding="utf-8")
    return written


def _undated(kind: str) -> dict[str, Any]:
    keys = {"svg": ("Date",), "pdf": ("CreationDate",), "png": ("Software",)}
    return dict.fromkeys(keys.get(kind, ()))


def tidy_svg(text: str) -> str:
    """The same picture in fewer bytes: places in tenths of a point, no indentation.

    >>> tidy_svg('<g>\\n  <path d="M 12.345678 0.04\\nL 1.5 -2.25 \\nz\\n"/>')
    '<g>\\n<path d="M12.3 0L1.5 -2.2z"/>'
    """

    def tenths(text: str) -> str:
        return re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.1f}".removesuffix(".0"), text)

    def shorten(place: re.Match[str]) -> str:
        points = " ".join(tenths(place[2]).split())
        return f'{place[1]}"{CLOSE.sub("", points)}"'

    text = re.sub(r'(\s(?:d|x|y|transform)=)"([^"]*)"', shorten, text)
    return re.sub(r">\n\s+<", ">\n<", text)
