"""Numbers as a report's JSON has them."""

from __future__ import annotations

import math

__all__ = ["number"]

DIGITS = 6


def number(value: float | None) -> float | int | None:
    """The value to six digits; None for what is not measured or not finite, which JSON cannot say."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
