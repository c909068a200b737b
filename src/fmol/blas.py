"""Numpy's products and solves of small matrices, kept in the calling thread.

OpenBLAS, which comes with numpy, divides a solve among all cores from 200 rows on and a product with a
vector from 96, and then waits for every one of its threads. Where others compute too these may not be
running: a solve of 200 rows that takes a quarter of a millisecond took 17 to 170 then.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock

import numpy as np

__all__ = ["one_thread"]

logger = logging.getLogger("fmol")

PLACES = ("../numpy.libs", ".dylibs", "../../numpy.libs")
"""Where numpy's packages have OpenBLAS, seen from numpy itself."""
FEWEST_ROWS = 64
"""Below it numpy has one thread compute anyway."""
SETTERS = ("openblas_set_num_threads_local", "scipy_openblas_set_num_threads_local")
"""What sets how many threads there are, and gives how many there were."""


@dataclass
class _Held:
    """How many are within `one_thread`, and how many threads there were before the first."""

    within: int = 0
    before: int = 1
    lock: Lock = field(default_factory=Lock)


_held = _Held()


class one_thread:  # noqa: N801
    """Within it numpy computes with matrices of `rows` rows in the calling thread, if its BLAS is the
    one that it comes with.

    >>> with one_thread(rows=300):
    ...     x = np.linalg.solve(np.eye(300), np.ones(300))
    """

    __slots__ = ("_set",)

    def __init__(self, rows: int) -> None:
        self._set = _setter() if rows >= FEWEST_ROWS else None

    def __enter__(self) -> None:
        if self._set is not None:
            with _held.lock:  # The number is the whole process's: the last to leave sets it back.
                if not _held.within:
                    _held.before = self._set(1)
                _held.within += 1

    def __exit__(self, *error: object) -> None:
        if self._set is not None:
            with _held.lock:
                _held.within -= 1
                if not _held.within:
                    self._set(_held.before)


@cache
def _setter() -> Callable[[int], int] | None:
    """What sets OpenBLAS's threads; None where numpy has another BLAS, or an older one."""
    home = Path(np.__file__).parent
    for folder in PLACES:
        for path in sorted((home / folder).glob("*openblas*")):
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                logger.info("`%s` cannot be asked for its threads: %s", path, error)
                continue
            for name in SETTERS:
                setter = getattr(library, name, None)
                if setter is not None:
                    setter.restype, setter.argtypes = ctypes.c_int, [ctypes.c_int]
                    found: Callable[[int], int] = setter
                    return found
    return None
