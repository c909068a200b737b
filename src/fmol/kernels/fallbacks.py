"""Why something is computed without a kernel that there might be for it: for the log, and for notes.

Whether a kernel can be had is a matter of the machine, and is found out once in a process: so what was
found is kept for the whole process, and the first round that ends after it says so.
"""

from __future__ import annotations

import logging
from threading import Lock

__all__ = ["fall_back", "take_fallbacks"]

logger = logging.getLogger("fmol")

_lock = Lock()
_known: set[str] = set()
_new: list[str] = []


def fall_back(reason: str) -> None:
    """Takes note of a reason: as a warning, and for `take_fallbacks`. Each counts once in a process.

    What a compiler says goes on for many lines: all of them are for the log, the first for notes.
    """
    first = next(iter(reason.strip().splitlines()), "")
    with _lock:
        if first in _known:
            return
        _known.add(first)
        _new.append(first)
    logger.warning("%s", reason)


def take_fallbacks() -> list[str]:
    """The reasons that came up since the last call, in their order."""
    with _lock:
        taken = list(_new)
        _new.clear()
    return taken
