"""What stays at a client between rounds, and which of it counts.

A client answers before it knows whether its answer is let in and whether the round is committed. So it
keeps what it would store beside what it has, and each ask tells it what became of its last answer: no
message of its own is needed, and one that was lost does no harm.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fmol.files import write_whole
from fmol.flower.wire import WireError, pack_tensors, unpack_tensors

__all__ = ["Fate", "Memory", "Stored", "load_memory", "memory_file", "save_memory", "settle"]

logger = logging.getLogger("fmol")

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
    of: str = ""
    """The answer that `kept` came with, empty where nothing is kept: by this both sides can tell
    whether it is what the server counts on."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What the client's own computation sees."""
        return self.kept if self.held is None else self.held.state

    def __bool__(self) -> bool:
        return bool(self.kept) or self.held is not None or self.pending is not None

    def to_bytes(self) -> bytes:
        """As one stretch of bytes, which Flower or a file keeps; empty where there is nothing."""
        if not self:
            return b""
        stored = {"held": self.held, "pending": self.pending}
        sections = {"kept": self.kept}
        sections |= {name: each.state for name, each in stored.items() if each is not None}
        answers = {name: each.answer for name, each in stored.items() if each is not None}
        return pack_tensors(sections, {"of": self.of, **answers})

    @classmethod
    def from_bytes(cls, data: bytes) -> Memory:
        if not data:
            return cls()
        sections, note = unpack_tensors(data)
        held, pending = (
            Stored(note[name], sections.get(name, {})) if name in note else None
            for name in ("held", "pending")
        )
        return cls(sections.get("kept", {}), held, pending, note["of"])


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
        return Memory(memory.kept, of=memory.of)
    kept, held, of = memory.kept, memory.held, memory.of
    if held is not None and held.answer != fate.answer:
        held = None
    if memory.pending is not None and memory.pending.answer == fate.answer:
        held = _let_in(memory.pending, kept, fate.only)
    if held is not None and fate.settled == "committed":
        kept, of = held.state, held.answer if held.state else ""
    return Memory(kept, held if fate.settled == "held" else None, of=of)


def _let_in(
    pending: Stored, kept: Mapping[str, Tensor], only: tuple[str, ...] | None
) -> Stored | None:
    """What may be kept of an answer; None where all of it goes, and `kept` stands."""
    if only is None:
        return pending
    own = {name: pending.state[name] for name in only if name in pending.state}
    return replace(pending, state={**kept, **own}) if own else None


def memory_file(folder: str | Path, client: str) -> Path:
    """The file in which a site keeps what it remembers, named after it."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in client)[:60]
    return Path(folder) / f"{plain}-{hashlib.sha256(client.encode()).hexdigest()[:8]}.memory"


def load_memory(file: Path) -> Memory:
    """What a site remembers; nothing where there is no file, or none that is whole, which is logged."""
    if not file.is_file():
        return Memory()
    try:
        return Memory.from_bytes(file.read_bytes())
    except (WireError, KeyError) as error:
        logger.warning("`%s` is left out, since it cannot be read: %s", file, error)
        return Memory()


def save_memory(file: Path, memory: Memory) -> None:
    """Writes down what a site remembers, whole or not at all; no file where that is nothing."""
    if memory:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, memory.to_bytes())
    else:
        file.unlink(missing_ok=True)
