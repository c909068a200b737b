"""What a run has for an engine: a seat at one that it shares with others."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmol.engines import VectorizedEngine
from fmol.engines.pool import Pool
from fmol.engines.schedule import Job
from fmol.engines.seam import Ask, ClientState, Fold, Receipt, Transform, Work
from fmol.federation import Federation
from fmol.precision import products

if TYPE_CHECKING:
    from fmol.lockstep.stepper import Stepper

__all__ = ["Seat", "SharedEngine"]


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
