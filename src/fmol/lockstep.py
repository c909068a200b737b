"""Several runs in lock-step, so that the lanes of all of them are stepped side by side.

Every run goes on in a thread of its own, but only one at a time: a run goes as far as its next
question to the clients and waits there. When all wait, the steps of all their lanes are taken together;
then each goes on with its own rows. To a run this is an engine like any other. Runs may be of one
federation or of several whose models and losses are alike: other data, seeds, methods.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fmol.alike import are_alike
from fmol.data import TensorSamples
from fmol.engines import VectorizedEngine
from fmol.engines.pool import Pool, make_pool
from fmol.engines.schedule import BatchTables, Job, Table
from fmol.engines.seam import (
    Ask,
    ClientState,
    Engine,
    Fold,
    LocalConfig,
    Receipt,
    Transform,
    Work,
)
from fmol.federation import Federation
from fmol.local import batch_table
from fmol.precision import products

__all__ = ["Guest", "run_in_lockstep"]

BLOCK, BLOCK_ON = 128, ("cuda",)
"""How many lanes are stepped at a time, and on what. When runs end there are fewer lanes, and what was
recorded or compiled is of as many as there were: so it is of blocks of one size, the last filled up."""


@dataclass(frozen=True)
class Guest:
    """A run that is to go on beside others; `run` is called with the engine it shall use."""

    federation: Federation
    seed: int
    rounds: int
    """How many rounds the run has in all."""
    run: Callable[[Engine], Any] = field(repr=False)


class SharedEngine(VectorizedEngine):
    """A vectorized engine for the runs of one federation and seed; clients' state is by run."""

    stepper: Stepper | None = None
    """Who takes the steps of several runs."""
    _taken: tuple[Mapping[int, int], Any] | None = None
    """Ask (by identity) → its first row, of steps that were taken together."""

    @contextmanager
    def seated(self, seat: Seat) -> Iterator[None]:
        """Within it clients keep what they keep for this run."""
        self._kept, self._pending = seat.kept, seat.pending
        try:
            yield
        finally:
            seat.kept, seat.pending = self._kept, self._pending

    def jobs_of(self, seat: Seat) -> list[Job]:
        """The lanes that a run asks for."""
        with self.seated(seat):
            sites = {ask.client: self._site_of(ask) for ask in seat.asks}
            return self._jobs(seat.asks, sites)

    def most_lanes(self, seat: Seat) -> tuple[int, int]:
        """How many lanes such as this run's fit into memory, and how many bytes one takes."""
        with products(self.precision, self.device):
            return self._most_lanes(seat.asks), self._workers[0].lane_bytes

    def can_batch(self, seat: Seat) -> bool:
        """Whether lanes of this run can be stepped beside others at all."""
        with self.seated(seat), products(self.precision, self.device):
            return self._why_not(seat.asks, seat.work) is None

    @property
    def single_losses(self) -> Mapping[str, str]:
        """Objective → why its loss is computed lane by lane."""
        return self._single_losses

    def map_for(self, seat: Seat, *arguments: Any, **named: Any) -> tuple[Any, Receipt]:
        """What `map` gives for a run whose steps may have been taken already."""
        self._taken = seat.taken
        try:
            with self.seated(seat):
                result, receipt = self.map(*arguments, **named)
        finally:
            self._taken = seat.taken = None
        if not seat.seconds:
            return result, receipt
        receipt = replace(
            receipt, seconds=receipt.seconds + seat.seconds, notes=(*receipt.notes, *seat.notes)
        )
        seat.notes, seat.seconds = (), 0.0
        return result, receipt

    def everyone(self) -> Pool | None:
        """All clients' training data on the device, where they are kept there."""
        return self._everyone

    def lend(self, pool: Pool) -> None:
        """Takes the training data from a pool that others use too: they are there once."""
        self._everyone = pool

    @property
    def _masked(self) -> set[str]:
        seen = set() if self.stepper is None else self.stepper.masked
        return super()._masked | seen

    def _descend(self, jobs: Sequence[Job], pool: Pool) -> Any:
        if self._taken is None or not jobs:
            return super()._descend(jobs, pool)
        first, steps = self._taken
        seen: dict[int, int] = {}
        rows = []
        for job in jobs:
            place = id(job.ask)
            rows.append(first[place] + seen.get(place, 0))
            seen[place] = seen.get(place, 0) + 1
        # A run's lanes lie together; only where it has them in several chunks they may not.
        if rows == list(range(rows[0], rows[0] + len(rows))):
            own: Any = slice(rows[0], rows[0] + len(rows))
        else:
            own = torch.tensor(rows, device=steps.deltas.device)
        return replace(steps, deltas=steps.deltas[own], table=steps.table[:, own])


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
        """Takes the steps that these runs ask for as one; each finds its rows when it goes on."""
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
        note = f"lanes were stepped side by side with those of {len(seats) - 1} other runs"
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
                jobs.append(replace(job, ask=told[id(ask)]))
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
        self._drawn: dict[Any, Table] = {}

    def begin(self) -> None:
        super().begin()
        self.whose.clear()
        self._drawn.clear()

    def of(self, client: str, n: int, local: LocalConfig, round: int) -> Table:
        own = self.whose[client]
        key = client, local.steps, local.epochs, local.batch_size
        if key not in self._drawn:
            self._drawn[key] = batch_table(
                n,
                local,
                seed=own.engine.seed,
                round=own.round,
                client=own.client,
                generator=self._generator,
            )
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
        found += [replace(job, ask=ask) for job in again]
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


@dataclass(eq=False)
class Seat:
    """A run's place at a shared engine, which to the run is the engine."""

    engine: SharedEngine
    rounds: int
    """How many rounds the run has in all."""
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    pending: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    asks: Sequence[Ask] = ()
    """What the run waits for, in the order of clients."""
    work: Work | None = None
    taken: tuple[Mapping[int, int], Any] | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    told: bool = False
    """Whether the run has been told that it is stepped beside others."""
    stop: BaseException | None = None
    """What ends the run at its next question."""
    ended: bool = False
    outcome: Any = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def __post_init__(self) -> None:
        self.federation: Federation = self.engine.federation
        self.device: torch.device = self.engine.device

    @property
    def lanes(self) -> int:
        """How many lanes the run waits for."""
        return sum(len(ask.lanes) for ask in self.asks)

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        self.asks, self.work = sorted(asks, key=lambda ask: ask.client), work
        if self.lanes:  # What takes no steps has nothing to wait for.
            self.back.release()
            self.go.acquire()
        if self.stop is not None:
            raise self.stop
        if self.asks:
            self.engine.expect(self.rounds - self.asks[0].round)
        return self.engine.map_for(self, self.asks, fold, work=work, transforms=transforms)

    def commit(self) -> None:
        with self.engine.seated(self):
            self.engine.commit()

    def discard(self) -> None:
        with self.engine.seated(self):
            self.engine.discard()

    def client_state(self) -> ClientState:
        with self.engine.seated(self):
            return self.engine.client_state()

    def load_client_state(self, state: ClientState) -> None:
        with self.engine.seated(self):
            self.engine.load_client_state(state)

    def close(self) -> None:
        """Nothing: others go on with the engine."""


def run_in_lockstep(guests: Sequence[Guest], **options: Any) -> list[Any]:
    """What each run gives, or the exception that ended it; each is called with an engine of its own.

    `options` are those of `VectorizedEngine`. Interrupted, every run that has not ended is
    interrupted at its next question, so that it can write down how far it came.
    """
    engines = _shared_engines(guests, options)
    steppers = {id(engine.stepper): engine.stepper for engine in engines.values()}
    seats = [Seat(engines[id(guest.federation), guest.seed], guest.rounds) for guest in guests]

    def begin(seat: Seat, run: Callable[[Engine], Any]) -> None:
        seat.go.acquire()
        try:
            if seat.stop is not None:
                raise seat.stop
            seat.outcome = run(seat)
        except BaseException as error:  # noqa: BLE001 - handed on to who waits for it.
            seat.outcome = error
        seat.ended = True
        seat.back.release()

    for seat, guest in zip(seats, guests, strict=True):
        # Nothing but an interrupt of an interrupt leaves one behind: it must not keep the process.
        threading.Thread(target=begin, args=(seat, guest.run), daemon=True).start()
    try:
        _take_turns(seats)
    except KeyboardInterrupt:
        for seat in seats:
            if not seat.ended:
                seat.stop = KeyboardInterrupt()
                _let_go(seat)
    finally:
        # Steppers first: they wait for the device, which must be done with what is let go of, and with
        # everything where other processes share it.
        for each in (*steppers.values(), *engines.values()):
            if each is not None:
                each.close()
    return [seat.outcome for seat in seats]


def _shared_engines(
    guests: Sequence[Guest], options: Mapping[str, Any]
) -> dict[tuple[int, int], SharedEngine]:
    """An engine for each federation and seed, and a stepper for those that are alike."""
    engines: dict[tuple[int, int], SharedEngine] = {}
    for guest in guests:
        key = id(guest.federation), guest.seed
        if key not in engines:
            engines[key] = SharedEngine(guest.federation, seed=guest.seed, **options)
    families: list[list[SharedEngine]] = []
    for engine in engines.values():
        for family in families:
            if are_alike(family[0].federation, engine.federation):
                family.append(engine)
                break
        else:
            families.append([engine])
    for family in families:
        Stepper(family, **options)
    return engines


def _take_turns(seats: Sequence[Seat]) -> None:
    for seat in seats:
        _let_go(seat)
    numbers = count()
    while waiting := [seat for seat in seats if not seat.ended]:
        alike: dict[Any, list[Seat]] = {}
        for seat in waiting:
            alike.setdefault(_kind(seat) or next(numbers), []).append(seat)
        for group in alike.values():
            start = 0
            while start < len(group):
                part = group[start : start + max(1, _room(group[start:]))]
                stepper = part[0].engine.stepper
                if len(part) > 1 and stepper is not None:
                    try:
                        stepper.take(part)
                    except Exception as error:  # noqa: BLE001 - raised in the runs that it is of.
                        for seat in part:
                            seat.stop = error
                for seat in part:
                    _let_go(seat)
                start += len(part)


def _room(seats: Sequence[Seat]) -> int:
    """How many of these runs, from the first on, have lanes that fit into memory together."""
    if len(seats) < 2:
        return len(seats)
    most, _ = seats[0].engine.most_lanes(seats[0])
    total = 0
    for number, seat in enumerate(seats):
        total += seat.lanes
        if total > most:
            return number
    return len(seats)


def _kind(seat: Seat) -> Any:
    """What runs must have in common for their lanes to be stepped together; None for none at all."""
    lanes = [ask for ask in seat.asks if ask.lanes]
    if not lanes or any(ask.round != lanes[0].round for ask in lanes):
        return None
    local = lanes[0].local
    if any(ask.local != local for ask in lanes) or not seat.engine.can_batch(seat):
        return None
    # Corrected steps are other ones: what is recorded of the rest has nothing to add.
    alike = None if local is None else replace(local, lr=0.0)
    return id(seat.engine.stepper), alike, any(ask.payload for ask in lanes)


def _let_go(seat: Seat) -> None:
    """Lets a run go on until it waits again or ends; an interrupt is raised only then."""
    interrupt: KeyboardInterrupt | None = None
    seat.go.release()
    while True:
        try:
            seat.back.acquire()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
