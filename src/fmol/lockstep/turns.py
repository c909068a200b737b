"""Runs in turns: each goes as far as its next question, and then all get their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from fmol.engines.seam import Engine
from fmol.federation import Federation
from fmol.lockstep.alike import are_alike
from fmol.lockstep.seats import Seat, SharedEngine
from fmol.lockstep.stepper import Stepper

__all__ = ["Guest", "run_in_lockstep"]


@dataclass(frozen=True)
class Guest:
    """A run that is to go on beside others; `run` is called with the engine it shall use."""

    federation: Federation
    seed: int
    rounds: int
    """How many rounds the run has in all."""
    run: Callable[[Engine], Any] = field(repr=False)


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
