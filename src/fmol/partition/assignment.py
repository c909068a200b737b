"""Objectives to clients: the columns of the paper's matrix A, and the clients themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fmol.data import as_samples
from fmol.federation import Client
from fmol.partition.columns import Indices, check_number_of_clients, named_parts
from fmol.rng import stream

__all__ = ["all_objectives", "make_clients", "one_each", "random_subsets"]


def all_objectives(names: Sequence[str], clients: int) -> list[tuple[str, ...]]:
    """Every client holds every objective: the paper's `A` all ones.

    >>> all_objectives(["left", "right"], clients=2)
    [('left', 'right'), ('left', 'right')]
    """
    names = _check_names(names)
    check_number_of_clients(clients)
    return [names] * clients


def one_each(names: Sequence[str], clients: int) -> list[tuple[str, ...]]:
    """Client `i` holds objective `i mod S` alone; with as many clients as objectives, `A = I`.

    >>> one_each(["left", "right"], clients=3)
    [('left',), ('right',), ('left',)]
    """
    names = _check_names(names)
    check_number_of_clients(clients)
    if clients < len(names):
        raise ValueError(
            f"{clients} clients with one objective each leave objective `{names[clients]}` without a "
            f"holder. Use at least {len(names)} `clients`, or fewer `names`."
        )
    return [(names[i % len(names)],) for i in range(clients)]


def random_subsets(
    names: Sequence[str], clients: int, size: int | tuple[int, int], seed: int = 0
) -> list[tuple[str, ...]]:
    """Each client holds a random subset of the objectives, and each objective has a holder.

    `size` is the number of objectives a client holds, or `(low, high)` for a number drawn evenly
    from `low` to `high`. Where the numbers drawn are too few to cover all objectives, some are
    raised, never above `high`. A client's objectives come in the order of `names`.

    >>> random_subsets(["a", "b", "c"], clients=3, size=(1, 2), seed=4)
    [('a',), ('b', 'c'), ('a', 'b')]
    """
    names = _check_names(names)
    check_number_of_clients(clients)
    low, high = size if isinstance(size, Sequence) and len(size) == 2 else (size, size)
    whole = isinstance(low, int | np.integer) and isinstance(high, int | np.integer)
    if not (whole and 1 <= low <= high <= len(names)):
        raise ValueError(
            f"`size` must be a number from 1 to {len(names)} (the number of objectives), or a pair "
            f"(low, high) of such with low ≤ high, got {size!r}. Change `size`."
        )
    if clients * high < len(names):
        raise ValueError(
            f"{clients} clients with at most {high} objectives each cannot cover {len(names)} "
            f"objectives. Use more `clients` or a larger `size`."
        )
    generator = stream(seed, "partition", "random_subsets")
    sizes = generator.integers(low, high + 1, size=clients)
    short = len(names) - int(sizes.sum())
    if short > 0:
        room = np.repeat(np.arange(clients), high - sizes)
        raised = generator.choice(room, size=short, replace=False)
        sizes += np.bincount(raised, minlength=clients)
    # Cover first: each objective goes to one of the places, then every client fills its own.
    places = generator.permutation(np.repeat(np.arange(clients), sizes))
    held: list[set[int]] = [set() for _ in range(clients)]
    for objective, client in enumerate(places[: len(names)]):
        held[client].add(objective)
    for client, mine in enumerate(held):
        others = [s for s in range(len(names)) if s not in mine]
        mine.update(
            generator.choice(others, size=sizes[client] - len(mine), replace=False).tolist()
        )
    return [tuple(names[s] for s in sorted(mine)) for mine in held]


def make_clients(
    inputs: Any,
    targets: Any,
    parts: Sequence[Indices] | Mapping[Any, Indices],
    objectives: Sequence[Sequence[str]],
    prefix: str = "client-",
) -> list[Client]:
    """One `Client` per part, holding its own copy of those rows of `inputs` and `targets`.

    `inputs` and `targets` are tensors or arrays, or dicts and tuples of them, with one row per
    sample; `objectives` says what each client holds, one tuple per part. Ids are `prefix` and a
    number with leading zeros, so that their order is that of `parts`; for groups (a mapping, as
    `by_group` returns) they are `prefix` and the group.

    >>> from fmol.partition import blocks
    >>> x, y = torch.arange(6.0), torch.zeros(6, 2)
    >>> clients = make_clients(x, y, blocks(6, 3), all_objectives(["left", "right"], 3))
    >>> clients[1].id, clients[1].data[0], clients[1].objectives
    ('client-1', tensor([2., 3.]), ('left', 'right'))
    """
    names, parts = named_parts(parts)
    if len(objectives) != len(parts):
        raise ValueError(
            f"`objectives` has {len(objectives)} entries for {len(parts)} clients. Give one tuple of "
            "names per client, as `all_objectives(names, clients)` does."
        )
    for held in objectives:
        if isinstance(held, str):
            raise ValueError(
                f"`objectives` must hold one tuple of names per client, got the string {held!r}. "
                "Use `all_objectives(names, clients)` or `one_each(names, clients)`."
            )
    # A pair of tensor trees always becomes rows that can be selected, and is checked on the way.
    samples = as_samples((inputs, targets), "the data to be dealt out")
    clients = []
    for name, part, held in zip(names, parts, objectives, strict=True):
        id = prefix + name
        if len(part) == 0:
            raise ValueError(
                f"client `{id}` gets no samples. Leave it out of `parts`, or use fewer clients."
            )
        if part.min() < 0 or part.max() >= len(samples):
            raise ValueError(
                f"client `{id}` gets sample {part.min() if part.min() < 0 else part.max()}, but there "
                f"are {len(samples)} samples. Make `parts` for this data set."
            )
        clients.append(Client(id, samples.batch(torch.from_numpy(part)), tuple(held)))
    return clients


def _check_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ValueError(
            f"`names` must be a list of names, got the string {names!r}. Wrap it: [{names!r}]."
        )
    names = tuple(names)
    if not names:
        raise ValueError("`names` is empty. Give at least one objective's name.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"objective `{name}` is named twice in `names`. Name it once.")
    return names
