"""Federations that several runs share: which are alike, so that lanes of both can be stepped side by
side, and their data on the device once for all runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fmol.data import as_samples, is_lazy, tree_map
from fmol.engines.pool import make_pool
from fmol.federation import Client, ClientList, Federation

__all__ = ["are_alike", "place_data"]


def are_alike(one: Federation, other: Federation) -> bool:
    """Whether models, losses and samples are of one kind, so that lanes of both can be mixed."""
    if one is other:
        return True
    return (
        one.layout == other.layout
        and [(o.name, o.loss) for o in one.objectives]
        == [(o.name, o.loss) for o in other.objectives]
        and _same_modules(one.model, other.model)
        and _same_samples(one, other)
    )


def _same_modules(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models compute the same but for their trainable parameters."""
    mine, theirs = dict(one.named_modules()), dict(other.named_modules())
    if list(mine) != list(theirs):
        return False
    if not all(_settings(a) == _settings(theirs[name]) for name, a in mine.items()):
        return False
    fixed = [
        {
            **dict(each.named_buffers()),
            **{n: p for n, p in each.named_parameters() if not p.requires_grad},
        }
        for each in (one, other)
    ]
    return fixed[0].keys() == fixed[1].keys() and all(
        torch.equal(value, fixed[1][name]) for name, value in fixed[0].items()
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What a module is beside its parameters; what cannot be compared is only like itself."""
    told = {
        name: value
        if isinstance(value, bool | int | float | str | tuple | type(None))
        else id(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
    }
    return type(module), told


def _same_samples(one: Federation, other: Federation) -> bool:
    """Whether a client of one has samples such as a client of the other has."""
    parts = []
    for federation in (one, other):
        data = federation.client(next(iter(federation.population.ids()))).data
        if is_lazy(data):
            return False
        parts.append(as_samples(data, "data"))
    return make_pool(["one", "other"], parts) is not None


def place_data(federation: Federation, device: torch.device) -> Federation:
    """The same federation with its data on `device`, so that many runs of it share one copy.

    The federation itself where they are there already, or come from elsewhere when they are needed.
    """
    population = federation.population
    if device.type == "cpu" or not isinstance(population, ClientList):
        return federation
    clients = [federation.client(id) for id in population.ids()]
    data = [d for c in clients for d in (c.data, c.held_out)] + [federation.held_out]
    if any(is_lazy(each) for each in data if each is not None):
        return federation

    def there(each: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(device), each)

    moved: list[Client] = [
        replace(client, data=there(client.data), held_out=there(client.held_out))
        for client in clients
    ]
    return Federation(federation.model, federation.objectives, moved, there(federation.held_out))
