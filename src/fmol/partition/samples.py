"""Samples to clients: i.i.d., Dirichlet, contiguous blocks, by a group column."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from fmol.partition.columns import (
    DRAWS,
    Indices,
    Labels,
    apportion,
    ascending,
    check_clients,
    indices_by_owner,
    label_codes,
    plain_values,
)
from fmol.rng import stream

__all__ = ["blocks", "by_group", "dirichlet", "iid"]


def iid(n: int, clients: int, seed: int = 0) -> list[Indices]:
    """`n` samples dealt at random; sizes differ by at most one.

    >>> [part.tolist() for part in iid(5, clients=2, seed=1)]
    [[0, 2, 4], [1, 3]]
    """
    check_clients(clients, n)
    order = stream(seed, "partition", "iid").permutation(n)
    return [ascending(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: Labels, clients: int, alpha: float, seed: int = 0, min_samples: int = 1
) -> list[Indices]:
    """A partition in which each label's samples are shared out in proportions from Dirichlet(alpha).

    Small `alpha` gives clients of few labels and very different sizes, large `alpha` nears `iid`.
    Every client gets at least `min_samples`: the proportions are drawn anew up to ten times, and
    if that is not enough, single samples go from whichever client is then the largest to those that
    are short. (Many clients and a small `alpha` always need this; it is why such a partition
    is a little more even than the Dirichlet distribution says.)

    >>> parts = dirichlet([0, 1] * 50, clients=4, alpha=0.5, min_samples=5)
    >>> sum(len(part) for part in parts), min(len(part) for part in parts) >= 5
    (100, True)
    """
    names, codes = label_codes(labels)
    if not (math.isfinite(alpha) and alpha > 0):
        raise ValueError(
            f"`alpha` must be a positive number, got {alpha!r}. Use 0.1 for very different clients, "
            "100 for nearly alike ones."
        )
    if min_samples < 0:
        raise ValueError(
            f"`min_samples` must not be negative, got {min_samples}. Use 0 to allow empty clients."
        )
    check_clients(clients, len(codes), min_samples)
    generator = stream(seed, "partition", "dirichlet")
    by_label = indices_by_owner(codes, len(names))
    owner = np.empty(len(codes), dtype=np.int64)
    for _ in range(DRAWS):
        for indices in by_label:
            shares = generator.dirichlet(np.full(clients, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
            # Rounding errors of the cumulative sum must not push a cut beyond the end.
            cuts = np.clip(cuts, 0, len(indices))
            sizes = np.diff(cuts, prepend=0, append=len(indices))
            owner[generator.permutation(indices)] = np.repeat(np.arange(clients), sizes)
        if np.bincount(owner, minlength=clients).min() >= min_samples:
            break
    parts = indices_by_owner(owner, clients)
    if min(len(part) for part in parts) < min_samples:
        parts = _top_up(parts, min_samples, generator)
    return parts


def blocks(n: int, clients: int, boundaries: Sequence[int] = ()) -> list[Indices]:
    """Contiguous blocks in stored order, as time series need; sizes are as equal as they can be.

    `boundaries` are the positions at which another series begins. No block crosses one: a window
    over the end of one series and the beginning of the next would show a jump that never happened.

    >>> [part.tolist() for part in blocks(7, clients=3, boundaries=[2])]
    [[0, 1], [2, 3, 4], [5, 6]]
    """
    check_clients(clients, n)
    starts = sorted({int(boundary) for boundary in boundaries})
    for boundary in starts:
        if not 0 < boundary < n:
            raise ValueError(
                f"boundary {boundary} in `boundaries` does not lie inside the {n} samples. "
                f"Give positions from 1 to {n - 1} at which another series begins."
            )
    if clients <= len(starts):
        raise ValueError(
            f"{clients} clients cannot hold {len(starts) + 1} series without a block that crosses a "
            f"boundary. Use at least {len(starts) + 1} `clients`, or fewer `boundaries`."
        )
    series = np.split(np.arange(n, dtype=np.int64), starts)
    numbers = apportion([len(part) for part in series], clients, most=clients)
    return [
        block
        for part, number in zip(series, numbers, strict=True)
        for block in np.array_split(part, number)
    ]


def by_group(groups: Labels) -> dict[Any, Indices]:
    """One client per distinct value of a group column (a hospital, a user): value -> indices.

    In ascending order of the values; values that cannot be compared with one another are ordered by
    type and then by their text. So the order never depends on which group occurs first.

    >>> {name: part.tolist() for name, part in by_group(["rome", "oslo", "rome"]).items()}
    {'oslo': [1], 'rome': [0, 2]}
    """
    members: dict[Hashable, list[int]] = {}
    for i, value in enumerate(plain_values(groups, "groups")):
        if value is None or value != value:
            raise ValueError(
                f"sample {i} has no group: `groups` holds {value!r} there. "
                "Name a group for it, or leave the sample out."
            )
        members.setdefault(value, []).append(i)
    try:
        order: list[Any] = sorted(members)
    except TypeError:
        order = sorted(members, key=lambda value: (type(value).__name__, str(value)))
    return {value: np.array(members[value], dtype=np.int64) for value in order}


def _top_up(
    parts: list[Indices], min_samples: int, generator: np.random.Generator
) -> list[Indices]:
    """The same parts after single samples went from the largest clients to those that are short."""
    held = [generator.permutation(part).tolist() for part in parts]
    donors = [(-len(part), client) for client, part in enumerate(held)]
    heapq.heapify(donors)
    for mine in held:
        while len(mine) < min_samples:
            # There are enough samples for all, so the largest always has more than the minimum.
            size, donor = heapq.heappop(donors)
            mine.append(held[donor].pop())
            heapq.heappush(donors, (size + 1, donor))
    return [ascending(np.array(part, dtype=np.int64)) for part in held]
