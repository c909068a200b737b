"""Several runs in lock-step, so that the lanes of all of them are stepped side by side.

Every run goes on in a thread of its own, but only one at a time: a run goes as far as its next
question to the clients and waits there. When all wait, the steps of all their lanes are taken together
by the one engine they share; then each goes on with its own rows. To a run this is an engine like any
other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fmol.engines import VectorizedEngine
from fmol.engines.pool import Pool
from fmol.engines.schedule import Job
from fmol.engines.seam import Ask, ClientState, Engine, Fold, Receipt, Transform, Work
from fmol.federation import Federation
from fmol.precision import products

__all__ = ["SharedEngine", "run_in_lockstep"]


class SharedEngine(VectorizedEngine):
    """A vectorized engine for several runs: one model, one copy of the data, clients' state by run."""

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

    def step_together(self, seats: Sequence[Seat]) -> None:
        """Takes the steps that these runs ask for as one; each finds its rows when it goes on."""
        started = perf_counter()
        self._notes = []
        for worker in self._workers:
            worker.gradients.begin_round()
        jobs: list[Job] = []
        first: dict[int, int] = {}
        for seat in seats:
            asks = seat.asks
            with self.seated(seat):
                sites = {ask.client: self._site_of(ask) for ask in asks}
                for job in self._jobs(asks, sites):
                    first.setdefault(id(job.ask), len(jobs))
                    jobs.append(job)
        pool = self._pool_for({job.ask.client: job.site for job in jobs})
        if pool is None:
            return
        with products(self.precision, self.device):
            self._most = self._most_lanes(seats[0].asks)
            steps = super()._descend(jobs, pool)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        share = (perf_counter() - started) / len(seats)
        note = f"lanes were stepped side by side with those of {len(seats) - 1} other runs"
        for seat in seats:
            seat.taken = (first, steps)
            told = () if seat.told else (note,)  # Once is enough.
            seat.seconds, seat.notes, seat.told = share, (*told, *dict.fromkeys(self._notes)), True

    def room(self, seats: Sequence[Seat]) -> int:
        """How many of these runs, from the first on, have lanes that fit into memory together."""
        with products(self.precision, self.device):
            most = self._most_lanes(seats[0].asks)
        total = 0
        for count, seat in enumerate(seats):
            total += sum(len(ask.lanes) for ask in seat.asks)
            if total > most:
                return count
        return len(seats)

    def can_batch(self, seat: Seat) -> bool:
        """Whether lanes of this run can be stepped beside others at all."""
        with self.seated(seat), products(self.precision, self.device):
            return self._why_not(seat.asks, seat.work) is None

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

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        self.asks, self.work = sorted(asks, key=lambda ask: ask.client), work
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


def run_in_lockstep(
    engine: SharedEngine, runs: Sequence[Callable[[Engine], Any]], rounds: int
) -> list[Any]:
    """What each run gives, or the exception that ended it; each is called with an engine of its own.

    Interrupted, every run that has not ended is interrupted at its next question, so that it can write
    down how far it came.
    """
    seats = [Seat(engine, rounds) for _ in runs]

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

    for seat, run in zip(seats, runs, strict=True):
        # Nothing but an interrupt of an interrupt leaves one behind: it must not keep the process.
        threading.Thread(target=begin, args=(seat, run), daemon=True).start()
    try:
        _take_turns(engine, seats)
    except KeyboardInterrupt as error:
        for seat in seats:
            if not seat.ended:
                seat.stop = error
                _let_go(seat)
    return [seat.outcome for seat in seats]


def _take_turns(engine: SharedEngine, seats: Sequence[Seat]) -> None:
    for seat in seats:
        _let_go(seat)
    while waiting := [seat for seat in seats if not seat.ended]:
        alike: dict[Any, list[Seat]] = {}
        for seat in waiting:
            alike.setdefault(_kind(engine, seat), []).append(seat)
        for kind, group in alike.items():
            start = 0
            while start < len(group):
                count = 1 if kind is None else max(1, engine.room(group[start:]))
                part = group[start : start + count]
                if count > 1:
                    engine.step_together(part)
                for seat in part:
                    _let_go(seat)
                start += count


def _kind(engine: SharedEngine, seat: Seat) -> Any:
    """What runs must have in common for their lanes to be stepped together; None for none at all."""
    lanes = [ask for ask in seat.asks if ask.lanes]
    if not lanes or len({(ask.round, ask.phase) for ask in lanes}) > 1:
        return None
    local = lanes[0].local
    if any(ask.local != local for ask in lanes) or not engine.can_batch(seat):
        return None
    return lanes[0].round, lanes[0].phase, local


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
