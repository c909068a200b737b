"""Label shards: the paper's non-i.i.d. split, with at most two labels a client."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

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
)
from fmol.rng import stream

__all__ = ["label_shards"]


def label_shards(
    labels: Labels, clients: int, labels_per_client: int = 2, seed: int = 0
) -> list[Indices]:
    """A partition in which no client sees more than `labels_per_client` distinct labels.

    The paper's non-i.i.d. split. Cutting the sorted data into equal shards does not give it: a shard
    that straddles two labels brings its client a third. Here each client first draws a set of
    labels (as many as allowed, and a label goes to more clients the more samples it has), and then
    each label's samples are dealt among the clients that drew it, so that no samples could be moved
    within these sets to make the sizes more equal. In ordinary cases sizes differ by at most one.
    Sets that do not allow it are drawn anew a few times, and the best of them are taken; with so
    many labels that most of them can go to a single client, sizes follow the labels' sizes.

    >>> from fmol.partition import describe
    >>> labels = [0] * 50 + [1] * 30 + [2] * 20
    >>> print(describe(label_shards(labels, clients=4), labels))
    client  samples  distinct   0   1   2
    0            25         2  16   0   9
    1            25         2  14   0  11
    2            25         2  10  15   0
    3            25         2  10  15   0
    4 clients, 100 samples, 25 each; 2 labels each.
    """
    names, codes = label_codes(labels)
    check_clients(clients, len(codes))
    if labels_per_client < 1:
        raise ValueError(
            f"`labels_per_client` must be at least 1, got {labels_per_client}. "
            "Allow each client at least one label."
        )
    if clients * labels_per_client < len(names):
        raise ValueError(
            f"{clients} clients with at most {labels_per_client} labels each cannot hold all "
            f"{len(names)} labels. Use more `clients` or a larger `labels_per_client`, so that their "
            f"product is at least {len(names)}."
        )
    generator = stream(seed, "partition", "label_shards")
    counts = [int(count) for count in np.bincount(codes)]
    best: list[dict[int, int]] = []
    best_spread = math.inf
    for draw in range(DRAWS):
        shares = _draw_label_sets(counts, clients, labels_per_client, generator, draw == DRAWS - 1)
        _level(shares, len(counts))
        sizes = [sum(share.values()) for share in shares]
        if max(sizes) - min(sizes) < best_spread:
            best, best_spread = shares, max(sizes) - min(sizes)
        if best_spread <= 1:
            break
    dealt: list[list[Indices]] = [[] for _ in range(clients)]
    rest = [generator.permutation(indices) for indices in indices_by_owner(codes, len(counts))]
    for client, share in enumerate(best):
        for label, amount in share.items():
            dealt[client].append(rest[label][:amount])
            rest[label] = rest[label][amount:]
    return [ascending(np.concatenate(pieces)) for pieces in dealt]


def _draw_label_sets(
    counts: Sequence[int],
    clients: int,
    labels_per_client: int,
    generator: np.random.Generator,
    largest_first: bool,
) -> list[dict[int, int]]:
    """For each client its labels with the number of samples of each, every label dealt evenly."""
    order = [int(label) for label in generator.permutation(len(counts))]
    holders = apportion([counts[i] for i in order], clients * labels_per_client, most=clients)
    slots = dict(zip(order, holders, strict=True))
    if largest_first:
        order.sort(key=lambda label: -counts[label] / slots[label])
    shares: list[dict[int, int]] = [{} for _ in range(clients)]
    # Those with the fewest labels come first: so their numbers never differ by more than one, and
    # there is always room for a label at as many clients as it needs. Chance decides the rest,
    # except in the last draw, where small clients go before large ones.
    queue = [(0, 0, chance, i) for i, chance in enumerate(generator.random(clients))]
    heapq.heapify(queue)
    for label in order:
        even, rest = divmod(counts[label], slots[label])
        takers = [heapq.heappop(queue) for _ in range(slots[label])]
        for rank, (held, size, _, client) in enumerate(takers):
            amount = even + (rank < rest)
            shares[client][label] = amount
            size += amount if largest_first else 0
            heapq.heappush(queue, (held + 1, size, generator.random(), client))
    return shares


def _level(shares: list[dict[int, int]], labels: int) -> None:
    """Moves samples between clients that share a label until no move makes sizes more equal.

    From the largest client along the shortest chain (`a` gives of a label to `b`, which gives of
    another to `c`) to one smaller by two or more. Nobody's last sample of a label moves. The sum of
    squared sizes falls with every move, so it ends; and since it is a convex flow problem, an
    end without such a chain is the optimum for these sets of labels.
    """
    sizes = [sum(share.values()) for share in shares]
    holders: list[list[int]] = [[] for _ in range(labels)]
    for client, share in enumerate(shares):
        for label in share:
            holders[label].append(client)
    settled: set[int] = set()
    queue = [(-size, client) for client, size in enumerate(sizes)]
    heapq.heapify(queue)
    while queue:
        size, largest = heapq.heappop(queue)
        if largest in settled or -size != sizes[largest]:
            continue
        giver, last = _search(largest, shares, holders, sizes, settled)
        if last is None:
            # Whoever the largest client can reach is within one of it: all of them are done.
            settled.update(giver)
            continue
        chain = []
        taker = last
        while taker != largest:
            chain.append((*giver[taker], taker))
            taker = giver[taker][0]
        room = min(shares[client][label] - 1 for client, label, _ in chain)
        amount = min(room, (sizes[largest] - sizes[last]) // 2)
        for client, label, taker in chain:
            shares[client][label] -= amount
            shares[taker][label] += amount
        sizes[largest] -= amount
        sizes[last] += amount
        heapq.heappush(queue, (-sizes[largest], largest))
        heapq.heappush(queue, (-sizes[last], last))


def _search(
    start: int,
    shares: list[dict[int, int]],
    holders: list[list[int]],
    sizes: list[int],
    settled: set[int],
) -> tuple[dict[int, tuple[int, int]], int | None]:
    """Breadth first: whom `start` reaches (client -> giver, label), and the first much smaller one."""
    giver = {start: (start, -1)}
    queue = deque([start])
    seen: set[int] = set()
    while queue:
        client = queue.popleft()
        for label, amount in shares[client].items():
            if amount < 2 or label in seen:
                continue
            seen.add(label)
            for taker in holders[label]:
                if taker in giver or taker in settled:
                    continue
                giver[taker] = (client, label)
                if sizes[taker] <= sizes[start] - 2:
                    return giver, taker
                queue.append(taker)
    return giver, None
