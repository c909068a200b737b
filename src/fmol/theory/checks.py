"""Checks of the numbers that theorems take."""

from __future__ import annotations

import math
from numbers import Integral, Real

__all__ = ["check_at_most", "check_counts", "check_not_negative", "check_positive"]


def check_counts(**values: int) -> None:
    """Raises for what is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")


def check_positive(**values: float) -> None:
    """Raises for what is not a finite number above 0."""
    for name, value in values.items():
        if not _is_finite(value) or value <= 0:
            raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}.")


def check_not_negative(**values: float) -> None:
    """Raises for what is not a finite number of at least 0."""
    for name, value in values.items():
        if not _is_finite(value) or value < 0:
            raise ValueError(f"`{name}` must be a finite number of at least 0, got {value!r}.")


def check_at_most(most: float, why: str, **values: float) -> None:
    """Raises for steps that a theorem does not allow; `why` is its condition in words."""
    for name, value in values.items():
        # As computed from L and μ by the caller, who need not round as is done here.
        if value > most * (1 + 1e-12):
            raise ValueError(
                f"`{name}` is {value!r}, and the theorem needs {why}, at most {most:.6g}. Take a "
                "smaller step."
            )


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
