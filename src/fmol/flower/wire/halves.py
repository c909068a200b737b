"""Numbers in half precision, scaled so that neither large nor small ones fall out of its range."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["scaled", "to_half"]

HALF_EXPONENT = 15
"""Halves are scaled so that the largest is just below 2^15; theirs ends at 65504."""
MOST_EXPONENT = 1100
"""Float64 goes from 2^−1074 to 2^1024: further nothing is ever scaled, whatever a message says."""


def to_half(values: Tensor) -> tuple[Tensor, int]:
    """The values times 2^e in half precision, and e."""
    wide = values.double()
    finite = wide[wide.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    exponent = HALF_EXPONENT - math.frexp(largest)[1] if largest else 0
    return scaled(wide, exponent).half(), exponent


def scaled(values: Tensor, exponent: int) -> Tensor:
    """The values `[…]` in float64 times 2^e, for any e that a float64 can need."""
    exponent = max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent))
    # In two steps: for the smallest of numbers 2^e itself is beyond what a float64 holds.
    part = exponent // 2
    return values.double() * 2.0**part * 2.0 ** (exponent - part)
