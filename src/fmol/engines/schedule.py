"""Which lanes take which steps on which samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmol import rng
from fmol.data import tree_leaves, tree_map, upload
from fmol.engines.lanes import Batch, Pull
from fmol.engines.pool import Pool
from fmol.engines.seam import Ask, Lane, LocalConfig, Site
from fmol.local import batch_counts, batch_rows

__all__ = [
    "BatchTables",
    "Job",
    "RowStage",
    "Schedule",
    "Stage",
    "copy_stage",
    "plan_steps",
    "pulls_of",
    "stage_bytes",
    "stage_of",
    "walk",
]


Table = tuple[NDArray[np.int64], NDArray[np.int64]]


class Walker(Protocol):
    """Takes one step after the other; `LaneSteps` does."""

    def step(self, batch: Batch, active: Tensor | None, last: bool) -> None: ...


class Job(NamedTuple):
    """One lane of one ask."""

    ask: Ask
    lane: Lane
    site: Site
    correction: Tensor | None = None
    """What is added to every step, `[d]`; None where drift is not corrected."""
    anchors: tuple[Tensor, ...] = ()
    """What the change of each anchored layer is multiplied by, `[width, width]`."""


@dataclass(frozen=True)
class Schedule:
    """The batches of `C` clients in `K` steps, and which of the clients each of `L` lanes is of."""

    rows: Tensor
    """Of the pool, `[K, C, B]`; what is beyond a client's count only fills up."""
    counts: NDArray[np.int64]
    """How many rows count, `[K, C]`; none for a client that has taken all its steps."""
    lanes: NDArray[np.int64]
    index: Tensor
    """The same as `lanes` on the device, `[L]`."""

    @property
    def even(self) -> bool:
        """Whether all lanes take all steps, with batches of one size."""
        return bool((self.counts == self.rows.shape[2]).all())

    @property
    def widths(self) -> list[int]:
        """The largest batch of each step."""
        return [int(width) for width in self.counts.max(1)]


@dataclass(frozen=True)
class Draw:
    """Whose batches are wanted: of clients with so many samples, which begin there in a pool."""

    clients: tuple[str, ...]
    """One for each column; the same one may be there more than once."""
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    local: LocalConfig
    round: int

    @property
    def key(self) -> Any:
        """What the batches hang on, but for the round."""
        local = self.local
        return self.clients, self.sizes, self.offsets, local.steps, local.epochs, local.batch_size


class BatchTables:
    """Clients' batches of a round, drawn before they are asked for where that is likely to help.

    A client's batches hang on the seed, the round and its name alone. So while a GPU computes one
    round, those of the next can be drawn, once the same clients have come twice.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = rng.stream(seed, "batches")
        self._ahead: dict[Any, Table] = {}
        self._last: list[Draw] = []
        self._seen: set[Any] = set()

    def of(self, client: str, n: int, local: LocalConfig, round: int) -> NDArray[np.int64]:
        """One client's rows of its own samples, `[K, B]`."""
        rng.restart(self._generator, self._seed, "batches", round, client)
        return batch_rows(n, local, self._generator)

    def of_all(self, draw: Draw) -> Table:
        """Rows of a pool `[K, C, B]`, and how many of each count `[K, C]`."""
        self._last.append(draw)
        ready = self._ahead.pop((draw.key, draw.round), None)
        return self._lay_out(draw) if ready is None else ready

    def draw_ahead(self) -> None:
        """Draws for the next round what was asked for since the last time, and also before that."""
        wanted = {draw.key: replace(draw, round=draw.round + 1) for draw in self._last}
        self._ahead = {
            (key, draw.round): self._lay_out(draw)
            for key, draw in wanted.items()
            if key in self._seen
        }
        self._seen = set(wanted)
        self._last.clear()

    def begin(self) -> None:
        """Forgets what was asked for."""
        self._last.clear()

    def _lay_out(self, draw: Draw) -> Table:
        local = draw.local
        drawn: dict[str, NDArray[np.int64]] = {}
        columns: dict[int, list[int]] = {}
        for c, (client, n) in enumerate(zip(draw.clients, draw.sizes, strict=True)):
            if client not in drawn:
                drawn[client] = self.of(client, n, local, draw.round)
            columns.setdefault(n, []).append(c)
        counted = {n: batch_counts(n, local) for n in columns}
        steps = max(map(len, counted.values()))
        width = max(int(count.max()) for count in counted.values())
        rows = np.empty((steps, len(draw.clients), width), dtype=np.int64)
        counts = np.zeros((steps, len(draw.clients)), dtype=np.int64)
        for n, own in columns.items():  # Those with equally many samples have batches of one shape.
            k, w = drawn[draw.clients[own[0]]].shape
            mine = np.concatenate([drawn[draw.clients[c]] for c in own])
            mine = mine.reshape(len(own), k, w).swapaxes(0, 1)
            rows[:k, own, :w], counts[:k, own] = mine, counted[n][:, None]
            if w < width:
                rows[:k, own, w:] = mine[:, :, :1]
            if k < steps:  # One that is done goes on with some sample, which moves nothing.
                rows[k:, own] = mine[0, :, :1]
        rows += np.array(draw.offsets)[:, None]
        return rows, counts


def plan_steps(jobs: Sequence[Job], pool: Pool, drawn: BatchTables) -> Schedule:
    """The schedule of some lanes, its rows on the pool's device; those of an ask share its batches."""
    local, round = jobs[0].ask.local, jobs[0].ask.round
    assert local is not None
    asks = {id(job.ask): job.ask.client for job in jobs}
    place = {ask: column for column, ask in enumerate(asks)}
    lanes = np.array([place[id(job.ask)] for job in jobs])
    clients = tuple(asks.values())
    sizes = tuple(pool.sizes[client] for client in clients)
    offsets = tuple(pool.offsets[client] for client in clients)
    rows, counts = drawn.of_all(Draw(clients, sizes, offsets, local, round))
    index = upload(lanes, pool.device)
    return Schedule(upload(rows, pool.device), counts, lanes, index)


@dataclass
class Stage:
    """Where a recorded round finds its samples: all of a schedule's, laid out client by client.

    Nests of `[K, C, B, …]`, and how many of each batch count `[K, C]` where that differs.
    """

    inputs: Any
    targets: Any
    counts: Tensor | None

    def at(self, step: int, width: int, lanes: Tensor) -> tuple[Any, Any]:
        """The samples of a step, for lanes of these clients: nests of `[L, B, …]`."""

        def pick(leaf: Tensor) -> Tensor:
            return leaf[step, :, :width].index_select(0, lanes)

        return tree_map(pick, self.inputs), tree_map(pick, self.targets)

    @property
    def tensors(self) -> list[Tensor]:
        """What is other in another round."""
        counts = () if self.counts is None else (self.counts,)
        return [*tree_leaves((self.inputs, self.targets)), *counts]

    def placed(self, place: Callable[[Tensor], Tensor]) -> Stage:
        """The same with each of these where `place` puts it."""
        inputs, targets = tree_map(place, self.inputs), tree_map(place, self.targets)
        return Stage(inputs, targets, None if self.counts is None else place(self.counts))


@dataclass
class RowStage:
    """The same where the pool stays as it is: it is enough to know which of its rows they are."""

    pool: Pool
    rows: Tensor
    """`[K, C, B]`."""
    counts: Tensor | None

    def at(self, step: int, width: int, lanes: Tensor) -> tuple[Any, Any]:
        """The samples of a step, for lanes of these clients: nests of `[L, B, …]`."""
        return self.pool.gather(self.rows[step, :, :width].index_select(0, lanes))

    @property
    def tensors(self) -> list[Tensor]:
        """What is other in another round."""
        return [self.rows] if self.counts is None else [self.rows, self.counts]

    def placed(self, place: Callable[[Tensor], Tensor]) -> RowStage:
        """The same with each of these where `place` puts it."""
        rows = place(self.rows)
        return RowStage(self.pool, rows, None if self.counts is None else place(self.counts))


def stage_of(schedule: Schedule, pool: Pool) -> Stage | RowStage:
    """The samples of a schedule, for what is recorded once and replayed with others."""
    counts = None if schedule.even else upload(schedule.counts, pool.device)
    if pool.stays:
        return RowStage(pool, schedule.rows, counts)
    return Stage(*pool.gather(schedule.rows), counts)


def stage_bytes(schedule: Schedule, pool: Pool) -> int:
    """What that takes."""
    if pool.stays:
        return schedule.rows.nbytes
    leaves = tree_leaves((pool.inputs, pool.targets))
    return schedule.rows.numel() * sum(leaf[:1].nbytes for leaf in leaves)


def copy_stage(target: Stage | RowStage, source: Stage | RowStage) -> None:
    """Puts another round's samples, of the same shapes, in the place of these."""
    for mine, new in zip(target.tensors, source.tensors, strict=True):
        mine.copy_(new)


def walk(
    steps: Walker, schedule: Schedule, source: Pool | Stage | RowStage, most: int | None = None
) -> None:
    """Takes all steps of a schedule, or the first so many, on samples from the pool or from a stage."""
    device, index = schedule.rows.device, schedule.index
    staged = not isinstance(source, Pool)
    counts = None
    if not isinstance(source, Pool):
        counts = source.counts
    elif not schedule.even:
        counts = upload(schedule.counts, device)
    sizes = np.maximum(schedule.counts, 1)[:, schedule.lanes]
    last = len(schedule.counts) - 1
    for k, width in enumerate(schedule.widths[:most]):
        if isinstance(source, Pool):
            inputs, targets = source.gather(schedule.rows[k, :, :width].index_select(0, index))
        else:
            inputs, targets = source.at(k, width, index)
        own, active = None, None
        if counts is not None:
            mine = counts[k].index_select(0, index)
            # What is recorded is replayed with other counts: there, both are always looked at.
            if staged or sizes[k].min() < width:
                own = torch.arange(width, device=device) < mine[:, None]
            if staged or not schedule.counts[k].all():
                active = mine > 0
        batch = Batch(inputs, targets, tuple(sizes[k].tolist()), own)
        steps.step(batch, active, last=k == last)


def pulls_of(lanes: Sequence[Lane], site: Site) -> list[Pull]:
    """For each objective that some lane descends, which lanes those are and by how much."""
    found: dict[str, list[tuple[int, float]]] = {}
    for i, lane in enumerate(lanes):
        for name, weight in lane.mixture.items():
            found.setdefault(name, []).append((i, weight))
    return [
        Pull(site.objectives[name], tuple(i for i, _ in each), tuple(w for _, w in each))
        for name, each in found.items()
    ]
