"""What runs of an experiment are called, and whether they are there."""

from __future__ import annotations

from collections.abc import Iterable

from fmol.reproduce.experiment import Records, Size

__all__ = ["complete", "named"]


def named(*parts: object, seed: int) -> str:
    """A trial's name of what it is of.

    >>> named("iid", "k5", seed=0)
    'iid-k5-seed0'
    """
    return "-".join([*map(str, parts), f"seed{seed}"])


def complete(records: Records, size: Size, settings: Iterable[tuple[object, ...]]) -> bool:
    """Whether the runs of all these settings, each as `named` takes it, are there with every seed."""
    return all(
        named(*parts, seed=seed) in records for parts in settings for seed in range(size.seeds)
    )
