"""The steps of several runs' lanes as one, in blocks of one size where they are recorded."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fmol import rng
from fmol.data import TensorSamples
from fmol.engines import VectorizedEngine
from fmol.engines.gradients import first_line
from fmol.engines.pool import Pool, make_pool
from fmol.engines.schedule import BatchTables, Job
from fmol.engines.seam import Ask, LocalConfig
from fmol.local import batch_rows
from fmol.lockstep.seats import Seat, SharedEngine
from fmol.precision import products
from fmol.wording import many

__all__ = ["Stepper"]

logger = logging.getLogger("fmol")

BLOCK, BLOCK_ON = 128, ("cuda",)
"""How many lanes are stepped at a time, and on what. When runs end there are fewer lanes, and what was
recorded or compiled is of as many as there were: so it is of blocks of one size, the last filled up."""


class Stepper(VectorizedEngine):
    """Takes the steps of lanes of several shared engines, whose models and losses are alike."""

    def __init__(self, members: Sequence[SharedEngine], **options: Any) -> None:
        # It asks no client anything, so it holds no data but those that all members share.
        super().__init__(members[0].federation, cache_bytes=0, **options)
        self._batches = _Batches(0)
        self._least = sys.maxsize
        """How many lanes fitted at a time when memory ran out the last time."""
        for worker in self._workers:
            worker.batches = self._batches
        self._apart: set[frozenset[Seat]] = set()
        """Runs whose lanes failed side by side; tried again in every round, they would fail first."""
        self._block = BLOCK if self.device.type in BLOCK_ON else None
        self._places = {id(member): place for place, member in enumerate(members)}
        self._joint = _join_pools(members)
        for member in members:
            member.stepper = self

    @property
    def masked(self) -> set[str]:
        """Objectives whose loss marks which samples have a label, as far as steps have shown."""
        return set().union(*(worker.gradients.masked for worker in self._workers))

    def take(self, seats: Sequence[Seat]) -> None:
        """Takes the steps that these runs ask for as one; each finds its rows when it goes on.

        Where they fail, each run takes its own from here on, and fails with words of its own or not at
        all.
        """
        mix = frozenset(seats)
        if mix in self._apart:
            return
        try:
            self._take_together(seats)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - one's own model and losses may raise anything.
            self._apart.add(mix)
            _tell(
                seats,
                f"lanes of {len(seats)} runs failed side by side ({first_line(error)}): each run takes "
                "its own from here on",
            )

    def _take_together(self, seats: Sequence[Seat]) -> None:
        started = perf_counter()
        self._notes = []
        for worker in self._workers:
            worker.gradients.begin_round()
        self._rounds = max(seat.rounds - seat.asks[0].round for seat in seats)
        self.expect(self._rounds)
        for seat in seats:
            self._single_losses.update(seat.engine.single_losses)
        for worker in self._workers:
            worker.single_losses = bool(self._single_losses)
        jobs, first = self._all_jobs(seats)
        pool = self._pool_of(jobs)
        if pool is None:
            _tell(seats, f"each of {len(seats)} runs took its own steps: their data are not alike")
            return
        with products(self.precision, self.device):
            most, each = seats[0].engine.most_lanes(seats[0])
            self._most = allowed = min(most, self._least)
            for worker in self._workers:
                worker.lane_bytes = each
            steps = self._descend(jobs, pool)
        if self._most < allowed:  # Memory ran out, and is no more in the next round.
            self._least = self._most
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        share = (perf_counter() - started) / len(seats)
        note = f"lanes were stepped side by side with those of {many(len(seats) - 1, 'other run')}"
        for seat in seats:
            seat.taken = (first, steps)
            told = () if seat.told else (note,)  # Once is enough.
            seat.seconds, seat.notes, seat.told = share, (*told, *dict.fromkeys(self._notes)), True

    def _all_jobs(self, seats: Sequence[Seat]) -> tuple[list[Job], dict[int, int]]:
        """The lanes of some runs, and the first of each ask; clients are told apart by name.

        Runs of one seed that are in one round have the same batches, so there a client is the same
        for all of them.
        """
        jobs: list[Job] = []
        first: dict[int, int] = {}
        told: dict[int, Ask] = {}
        self._batches.begin()
        for seat in seats:
            place = self._places[id(seat.engine)]
            for job in seat.engine.jobs_of(seat):
                ask = job.ask
                if id(ask) not in first:
                    first[id(ask)] = len(jobs)
                    key = f"{place}/{ask.round}/{ask.client}"
                    self._batches.whose[key] = _Whose(seat.engine, ask.round, ask.client)
                    told[id(ask)] = replace(ask, client=key)
                jobs.append(job._replace(ask=told[id(ask)]))
        return jobs, first

    def _descend(self, jobs: Sequence[Job], pool: Pool) -> Any:
        """The steps of all jobs, on a CUDA device in blocks of one size."""
        if self._block is None:
            return super()._descend(jobs, pool)
        order: list[int] = []
        found = []
        for kind in _kinds(jobs):
            blocks = _blocks(kind, self._block)
            self.expect(self._rounds * len(blocks))  # As often are steps of this shape to come.
            for block in blocks:
                steps = super()._descend(_filled(jobs, block), pool)
                own = sum(map(len, block.asks))
                order += itertools.chain(*block.asks)
                found.append((steps.deltas[:own], steps.table[:, :own]))
        back = torch.tensor(order, device=self.device).argsort()
        deltas, tables = zip(*found, strict=True)
        return replace(
            steps,
            deltas=torch.cat(deltas)[back],
            table=torch.cat(tables, dim=1)[:, back.to(tables[0].device)],
        )

    def _pool_of(self, jobs: Sequence[Job]) -> Pool | None:
        """The samples of these jobs' clients, under the names that they have here."""
        whose = self._batches.whose
        if self._joint is None:
            sites = {job.ask.client: job.site for job in jobs}
            return make_pool(list(sites), [site.samples for site in sites.values()])
        pool = copy.copy(self._joint)
        inside = {
            key: f"{self._places[id(each.engine)]}/{each.client}" for key, each in whose.items()
        }
        pool.sizes = {key: self._joint.sizes[name] for key, name in inside.items()}
        pool.offsets = {key: self._joint.offsets[name] for key, name in inside.items()}
        return pool

    def _pool_on(self, device: torch.device, pool: Pool) -> Pool:
        """The same samples on another device; those that stay are brought there once."""
        if self._joint is None or device == pool.device:
            return super()._pool_on(device, pool)
        if device not in self._copies:
            self._copies[device] = self._joint.to(device)
            self._copies[device].stays = True
        there = copy.copy(self._copies[device])
        there.sizes, there.offsets = pool.sizes, pool.offsets
        return there


def _tell(seats: Sequence[Seat], note: str) -> None:
    """Tells the log, and these runs when they go on, what is done otherwise than side by side."""
    logger.info(note)
    for seat in seats:
        seat.notes = (*seat.notes, note)


@dataclass(frozen=True)
class _Whose:
    """Of whom a name among all runs' clients is."""

    engine: SharedEngine
    round: int
    client: str


class _Batches(BatchTables):
    """Clients' batches under the names that they have among all runs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.whose: dict[str, _Whose] = {}
        self._drawn: dict[Any, NDArray[np.int64]] = {}

    def begin(self) -> None:
        super().begin()
        self.whose.clear()
        self._drawn.clear()

    def of(self, client: str, n: int, local: LocalConfig, round: int) -> NDArray[np.int64]:
        own = self.whose[client]
        key = client, local.steps, local.epochs, local.batch_size
        if key not in self._drawn:
            rng.restart(self._generator, own.engine.seed, "batches", own.round, own.client)
            self._drawn[key] = batch_rows(n, local, self._generator)
        return self._drawn[key]


# ---- blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Lanes that are stepped at a time, as the places of each ask's jobs, and how many asks more fill
    it up."""

    asks: Sequence[Sequence[int]]
    more: int


def _kinds(jobs: Sequence[Job]) -> list[list[list[int]]]:
    """The places of each ask's jobs, those together whose lanes descend the same objectives."""
    asks: dict[int, list[int]] = {}
    for place, job in enumerate(jobs):
        asks.setdefault(id(job.ask), []).append(place)
    kinds: dict[Any, list[list[int]]] = {}
    for places in asks.values():
        kind = tuple(tuple(jobs[place].lane.mixture.items()) for place in places)
        kinds.setdefault(kind, []).append(places)
    return list(kinds.values())


def _blocks(asks: Sequence[Sequence[int]], most: int) -> list[_Block]:
    """Blocks of equally many asks and at most so many lanes: a power of two, or all that fit."""
    fit = max(1, most // len(asks[0]))
    each = min(fit, 1 << (len(asks) - 1).bit_length())
    parts = [asks[start : start + each] for start in range(0, len(asks), each)]
    return [_Block(part, each - len(part)) for part in parts]


def _filled(jobs: Sequence[Job], block: _Block) -> list[Job]:
    """The jobs of a block, and some once more that fill it up."""
    found = [jobs[place] for places in block.asks for place in places]
    for _ in range(block.more):
        again = [jobs[place] for place in block.asks[-1]]
        ask = replace(again[0].ask)  # Not the same object, so that it has batches of its own.
        found += [job._replace(ask=ask) for job in again]
    return found


def _join_pools(members: Sequence[SharedEngine]) -> Pool | None:
    """The data of all members, one after the other; each has a part of it in place of its own."""
    pools = [member.everyone() for member in members]
    if any(pool is None for pool in pools):
        return None
    found = [pool for pool in pools if pool is not None]
    joint = make_pool(
        [str(place) for place in range(len(found))],
        [TensorSamples(pool.inputs, pool.targets) for pool in found],
    )
    if joint is None:
        return None
    sizes: dict[str, int] = {}
    offsets: dict[str, int] = {}
    for place, (member, pool) in enumerate(zip(members, found, strict=True)):
        start = joint.offsets[str(place)]
        sizes |= {f"{place}/{client}": size for client, size in pool.sizes.items()}
        offsets |= {f"{place}/{client}": start + at for client, at in pool.offsets.items()}
        own = copy.copy(pool)
        own.inputs, own.targets = joint.span(start, start + pool.total)
        member.lend(own)
    joint.sizes, joint.offsets, joint.stays = sizes, offsets, True
    return joint
