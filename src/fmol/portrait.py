"""A federation to look at when its data are elsewhere: who holds what, and how much of which labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmol.data import TensorSamples, as_samples, is_lazy
from fmol.federation import Federation

__all__ = ["ClientPortrait", "Portrait", "portray"]

MOST_CLIENTS = 200
"""How many clients are described one by one; of more, as many spread evenly over the list."""
MOST_LABELS = 20
"""A column of targets with more distinct values is not one of labels."""


@dataclass(frozen=True, kw_only=True)
class ClientPortrait:
    """One client: what it holds and has, never a sample of it."""

    id: str
    objectives: tuple[str, ...]
    samples: int | None = None
    """Training samples; None where the data come when they are needed and do not say how many."""
    held_out: int | None = None
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Column of the targets → how many samples have each of the portrait's `labels`."""


@dataclass(frozen=True, kw_only=True)
class Portrait:
    """A federation without its data: enough to draw the matrix A and the partition."""

    model: str
    parameters: int
    objectives: tuple[str, ...]
    targets: Mapping[str, float]
    """Objective → the loss at which it counts as reached, where it has one."""
    size: int
    """M, the number of clients, of which `clients` may be some."""
    clients: tuple[ClientPortrait, ...]
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Column of the targets → its distinct values; only columns that look like labels."""
    held_out: int | None = None
    """Samples held out at the server."""

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and text."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Portrait:
        """What `to_json` gave, back."""
        clients = tuple(
            ClientPortrait(
                **{
                    **each,
                    "objectives": tuple(each["objectives"]),
                    "labels": {name: tuple(counts) for name, counts in each["labels"].items()},
                }
            )
            for each in data["clients"]
        )
        labels = {name: tuple(values) for name, values in data["labels"].items()}
        objectives = tuple(data["objectives"])
        return cls(**{**data, "objectives": objectives, "clients": clients, "labels": labels})


def portray(federation: Federation) -> Portrait:
    """What can be said of a federation without any of its data; at most 200 clients one by one.

    Labels are columns of the targets with few distinct whole numbers. Data that come when they are
    needed are not fetched for it.

    >>> from fmol.problems.quadratic import Quadratic
    >>> portray(Quadratic().build()).size
    10
    """
    population = federation.population
    size, ids = len(population), population.ids()
    chosen = range(size)
    if size > MOST_CLIENTS:
        chosen = range(0, size, math.ceil(size / MOST_CLIENTS))
    clients = [federation.client(ids[i]) for i in chosen]
    columns = [_label_columns(client.data) for client in clients]
    labels = _common_labels(columns)
    return Portrait(
        model=type(federation.model).__name__,
        parameters=federation.layout.size,
        objectives=federation.names,
        targets={o.name: float(o.target) for o in federation.objectives if o.target is not None},
        size=size,
        clients=tuple(
            ClientPortrait(
                id=client.id,
                objectives=client.objectives,
                samples=_length(client.data),
                held_out=_length(client.held_out),
                labels={name: _counts(mine[name], labels[name]) for name in labels if name in mine},
            )
            for client, mine in zip(clients, columns, strict=True)
        ),
        labels={name: tuple(f"{value:.0f}" for value in values) for name, values in labels.items()},
        held_out=_length(federation.held_out),
    )


def _length(data: Any) -> int | None:
    if data is None or is_lazy(data):
        return len(data) if isinstance(data, Sized) else None
    return len(as_samples(data, "data"))


def _label_columns(data: Any) -> dict[str, Tensor]:
    """Column → values `[n]` of those targets that may be labels: few, whole, not negative."""
    if is_lazy(data):
        return {}
    samples = as_samples(data, "data")
    if not isinstance(samples, TensorSamples) or not isinstance(samples.targets, Tensor):
        return {}
    targets = samples.targets.detach().cpu()
    columns = targets[:, None] if targets.dim() == 1 else targets
    if columns.dim() != 2 or columns.shape[1] > 64 or columns.is_complex():
        return {}
    count = columns.shape[1]
    # Which objective looks at which column is in its loss alone.
    titles = [f"target column {c}" for c in range(count)] if count > 1 else ["label"]
    return dict(zip(titles, columns.double().unbind(1), strict=True))


def _common_labels(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Column → its distinct values over all clients, for those that are labels everywhere."""
    found: dict[str, set[float] | None] = {}
    for mine in columns:
        for name, values in mine.items():
            known = values[torch.isfinite(values)]
            distinct = torch.unique(known[: 10 * MOST_LABELS])
            if len(distinct) <= MOST_LABELS:
                distinct = torch.unique(known)
            seen = found.setdefault(name, set())
            whole = bool((distinct == distinct.round()).all()) and bool((distinct >= 0).all())
            if seen is None or not whole or len(seen | set(distinct.tolist())) > MOST_LABELS:
                found[name] = None
            else:
                seen |= set(distinct.tolist())
    return {name: sorted(seen) for name, seen in found.items() if seen and len(seen) > 1}


def _counts(values: Tensor, labels: Sequence[float]) -> tuple[int, ...]:
    return tuple(int((values == label).sum()) for label in labels)
