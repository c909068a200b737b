"""What stays at a client between rounds, and which of it counts.

A client answers before it knows whether its answer is let in and whether the round is committed. So it
keeps what it would store beside what it has, and each ask tells it what became of its last answer: no
message of its own is needed, and one that was lost does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from fmol.flower.wire import pack_tensors, unpack_tensors

__all__ = ["Fate", "Memory", "Stored", "settle"]

Settled = Literal["held", "committed", "discarded"]


@dataclass(frozen=True)
class Stored:
    """What a client would keep, and the answer that it came with."""

    answer: str
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Memory:
    """All that a client has of its own."""

    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Of committed rounds."""
    held: Stored | None = None
    """Of an answer that was let in, in a round that is not committed yet."""
    pending: Stored | None = None
    """Of the last answer, of which nothing was heard yet."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What the client's own computation sees."""
        return self.kept if self.held is None else self.held.state

    def __bool__(self) -> bool:
        return bool(self.kept) or self.held is not None or self.pending is not None

    def to_record(self) -> dict[str, Any]:
        """As names and bytes, which Flower keeps at a node."""
        record: dict[str, Any] = {"kept": pack_tensors(self.kept)}
        for name, stored in (("held", self.held), ("pending", self.pending)):
            if stored is not None:
                record[name] = pack_tensors(stored.state)
                record[f"{name}.answer"] = stored.answer
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Memory:
        def stored(name: str) -> Stored | None:
            if name not in record:
                return None
            return Stored(record[f"{name}.answer"], unpack_tensors(record[name]))

        kept = unpack_tensors(record["kept"]) if "kept" in record else {}
        return cls(kept, stored("held"), stored("pending"))


@dataclass(frozen=True)
class Fate:
    """What the server did with the last answer that it had from a client."""

    answer: str
    only: tuple[str, ...] | None = None
    """Of an answer of which something was refused, what may be kept all the same; None is all."""
    settled: Settled = "held"

    def to_note(self) -> dict[str, Any]:
        only = None if self.only is None else list(self.only)
        return {"answer": self.answer, "only": only, "settled": self.settled}

    @classmethod
    def from_note(cls, note: Mapping[str, Any] | None) -> Fate | None:
        if note is None:
            return None
        only = None if note["only"] is None else tuple(note["only"])
        return cls(note["answer"], only, note["settled"])


def settle(memory: Memory, fate: Fate | None) -> Memory:
    """The memory once it is known what became of the last answer that the server had.

    What came with any other answer was never taken in, and is forgotten. Told twice, it is the same.

    >>> import torch
    >>> memory = Memory(pending=Stored("7", {"c": torch.ones(1)}))
    >>> settle(memory, Fate("7", settled="committed")).kept
    {'c': tensor([1.])}
    >>> bool(settle(memory, Fate("6", settled="committed")))
    False
    """
    if fate is None:
        return Memory(memory.kept)
    kept, held = memory.kept, memory.held
    if held is not None and held.answer != fate.answer:
        held = None
    if memory.pending is not None and memory.pending.answer == fate.answer:
        held = _let_in(memory.pending, kept, fate.only)
    if held is not None and fate.settled == "committed":
        kept = held.state
    return Memory(kept, held if fate.settled == "held" else None)


def _let_in(
    pending: Stored, kept: Mapping[str, Tensor], only: tuple[str, ...] | None
) -> Stored | None:
    """What may be kept of an answer; None where all of it goes, and `kept` stands."""
    if only is None:
        return pending
    own = {name: pending.state[name] for name in only if name in pending.state}
    return replace(pending, state={**kept, **own}) if own else None
