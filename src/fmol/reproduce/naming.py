"""What runs of an experiment are called."""

from __future__ import annotations

__all__ = ["named"]


def named(*parts: object, seed: int) -> str:
    """A trial's name of what it is of.

    >>> named("iid", "k5", seed=0)
    'iid-k5-seed0'
    """
    return "-".join([*map(str, parts), f"seed{seed}"])
