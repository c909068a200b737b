"""Why something is computed without a kernel that there might be for it: for the log, and for notes.

Whether a kernel can be had is a matter of the machine, and is found out once in a process. A run is
told of those that it wanted itself, also where another has found out before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from threading import Lock, RLock
from typing import Generic, TypeVar, TypeVarTuple

__all__ = ["Fallbacks", "fall_back", "or_fall_back"]

logger = logging.getLogger("fmol")

Given = TypeVarTuple("Given")
T = TypeVar("T")

_lock = Lock()
_times = count(1)
_uses: dict[str, int] = {}
"""Reason → when something was computed so for the last time, counted over all of them."""


def fall_back(reason: str) -> None:
    """Takes note that something is computed without a kernel, and why. The log says it once.

    What a compiler says goes on for many lines: all of them are for the log, the first for notes.
    """
    first = next(iter(reason.strip().splitlines()), "")
    with _lock:
        new = first not in _uses
        _uses[first] = next(_times)
    if new:
        logger.warning("%s", reason)


class Fallbacks:
    """What was computed without a kernel since this was made, each reason told once."""

    def __init__(self) -> None:
        self._since = next(_times)
        self._told: set[str] = set()

    def take(self) -> list[str]:
        """The reasons that have come up since the last call and were not told yet, in their order."""
        with _lock:
            since, self._since = self._since, next(_times)
            wanted = sorted((when, reason) for reason, when in _uses.items() if when > since)
        new = [reason for _, reason in wanted if reason not in self._told]
        self._told.update(new)
        return new


def or_fall_back(
    words: Callable[..., str],
) -> Callable[[Callable[[*Given], T]], KernelOrNone[T, *Given]]:
    """Decorates what makes a kernel; `words` say of its arguments what is done where there is none."""
    return lambda make: KernelOrNone(make, words)


class KernelOrNone(Generic[T, *Given]):
    """Asked once for the same arguments; None where a kernel cannot be had, which counts each time."""

    def __init__(self, make: Callable[[*Given], T], words: Callable[..., str]) -> None:
        self._make, self._words = make, words
        self._making = RLock()
        self._found: dict[object, tuple[T | None, str]] = {}

    def __call__(self, *args: *Given) -> T | None:
        if args not in self._found:
            with self._making:
                if args not in self._found:
                    self._found[args] = self._try(*args)
        kernel, reason = self._found[args]
        if reason:
            fall_back(reason)
        return kernel

    def _try(self, *args: *Given) -> tuple[T | None, str]:
        try:
            return self._make(*args), ""
        except (OSError, RuntimeError) as error:
            return None, f"{self._words(*args)}: {error}"

    def knows(self, *args: *Given) -> bool:
        """Whether it has been asked so before, so that asking takes no time."""
        return args in self._found

    def forget(self) -> None:
        """As in a new process."""
        self._found.clear()
