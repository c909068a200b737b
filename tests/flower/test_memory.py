"""What a client keeps counts when its answer was let in and the round committed, and not before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_support import Halved, LargeOnly
from fmol.flower.imports import describe_transform, find, make_transform, path_of
from fmol.flower.memory import Fate, Memory, Stored, settle
from fmol.local import local_work


def state(value: float) -> dict[str, Tensor]:
    return {"own": torch.tensor([value])}


def own(memory: Memory) -> float | None:
    return float(memory.state["own"]) if "own" in memory.state else None


def test_a_committed_answer_is_kept_and_telling_it_twice_changes_nothing() -> None:
    memory = Memory(state(1), pending=Stored("a.1", state(2)))
    assert own(memory) == 1
    for _ in range(2):
        memory = settle(memory, Fate("a.1", settled="committed"))
        assert own(memory) == 2
        assert memory.held is memory.pending is None


def test_an_answer_that_was_let_in_is_seen_in_the_next_phase_and_gone_if_discarded() -> None:
    memory = settle(Memory(state(1), pending=Stored("a.1", state(2))), Fate("a.1"))
    assert own(memory) == 2
    assert own(settle(memory, Fate("a.1", settled="committed"))) == 2
    assert own(settle(memory, Fate("a.1", settled="discarded"))) == 1


def test_an_answer_that_the_server_never_had_is_forgotten() -> None:
    """The answer a.1 was let in, the one to a.2 was lost, and then the round was committed."""
    memory = settle(Memory(pending=Stored("a.1", state(1))), Fate("a.1"))
    memory = Memory(memory.kept, memory.held, Stored("a.2", state(2)))
    assert own(settle(memory, Fate("a.1", settled="committed"))) == 1
    assert own(settle(memory, Fate("a.1", settled="discarded"))) is None
    assert own(settle(memory, None)) is None
    assert own(settle(Memory(state(5), pending=Stored("a.2", state(2))), None)) == 5
    lost = Memory(
        state(5), held=Stored("a.1", state(6))
    )  # Of a.2 the server knows, the client not.
    assert own(settle(lost, Fate("a.2", settled="committed"))) == 5


def test_of_an_answer_that_was_refused_only_what_is_named_is_kept() -> None:
    sent = {"own": torch.ones(1), "control.a": torch.ones(2), "control.b": torch.zeros(2)}
    memory = Memory(state(7), pending=Stored("a.1", sent))
    some = settle(memory, Fate("a.1", ("control.a", "control.c"), "committed"))
    assert sorted(some.kept) == ["control.a", "own"]
    assert own(some) == 7
    assert sorted(settle(memory, Fate("a.1", (), "committed")).kept) == ["own"]
    assert own(settle(memory, Fate("a.1", (), "committed"))) == 7


def test_a_memory_survives_as_a_record_and_a_fate_as_a_note() -> None:
    memory = Memory(state(1), Stored("a.1", state(2)), Stored("a.2", {}))
    back = Memory.from_bytes(memory.to_bytes())
    assert (own(back), back.held and back.held.answer) == (2, "a.1")
    assert back.pending == Stored("a.2", {})
    assert not Memory.from_bytes(Memory().to_bytes())
    for fate in (Fate("a.1"), Fate("a.2", ("x",), "committed")):
        assert Fate.from_note(fate.to_note()) == fate
    assert Fate.from_note(None) is None


def test_a_work_goes_by_its_import_path() -> None:
    assert find(path_of(local_work, "`work`"), "`work`") is local_work
    with pytest.raises(ValueError, match="a client cannot find by that name"):
        path_of(lambda ask, site: None, "`work`")
    with pytest.raises(ValueError, match="`work` is `nowhere:at_all`, which cannot be imported"):
        find("nowhere:at_all", "`work`")


def test_a_transform_is_made_again_from_its_options() -> None:
    for transform in (Halved(0.25), LargeOnly()):
        assert make_transform(describe_transform(transform)) == transform
    with pytest.raises(ValueError, match="cannot be made again at a client"):
        describe_transform(Halved([0.5]))  # type: ignore[arg-type]
