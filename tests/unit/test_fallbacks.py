"""What is computed without a kernel is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fmol import FSMGDA, fit
from fmol.engines import SequentialEngine
from fmol.kernels import advance, fallbacks, few_conv, gram
from fmol.kernels.fallbacks import Fallbacks, fall_back, or_fall_back
from fmol.kernels.few_conv import DIRECT
from support import federation


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "_uses", {})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise OSError("no compiler\nand more of it")

    caches = (advance._kernel, few_conv._kernel, few_conv._adding, gram._kernel)
    for module in (advance, few_conv, gram):
        monkeypatch.setattr(module, "compile_kernel", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for each in caches:
        each.forget()
    yield
    for each in caches:
        each.forget()


def test_a_reason_is_logged_once_and_told_once_to_each_who_wants_to_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Fallbacks()
    with caplog.at_level(logging.WARNING, "fmol"):
        for reason in ("first", "second", "second"):
            fall_back(reason)
        assert one.take() == ["first", "second"]
        other = Fallbacks()
        fall_back("second")
    assert one.take() == []
    assert other.take() == ["second"]  # And not what nobody has wanted since.
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]


def test_what_makes_a_kernel_is_asked_once_and_tells_each_time_that_there_is_none() -> None:
    asked: list[int] = []

    @or_fall_back(lambda size: f"no kernel of size {size}")
    def make(size: int) -> str:
        asked.append(size)
        if size > 1:
            raise RuntimeError("too large")
        return "kernel"

    found = Fallbacks()
    assert [make(1), make(2), make(2)] == ["kernel", None, None]
    assert found.take() == ["no kernel of size 2: too large"]
    later = Fallbacks()
    assert make(2) is None
    assert later.take() == ["no kernel of size 2: too large"]
    assert asked == [1, 2]
    assert make.knows(2)
    assert not make.knows(3)


def test_of_what_a_compiler_says_the_first_line_is_told_and_all_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = Fallbacks()
    with caplog.at_level(logging.WARNING, "fmol"):
        fall_back("no kernel: line 3: error\nline 4: another")
    assert found.take() == ["no kernel: line 3: error"]
    assert "another" in caplog.text


def test_threads_lose_no_reason_and_tell_none_twice() -> None:
    everyone = Fallbacks()

    def one(i: int) -> None:
        fall_back(f"reason {i % 50}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(400)))
    found = everyone.take()
    assert sorted(found) == sorted(f"reason {i}" for i in range(50))
    assert everyone.take() == []


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_every_kernel_says_what_is_done_in_its_place() -> None:
    device, found = torch.device("cpu"), Fallbacks()
    assert advance._kernel(4, device) is None
    assert few_conv._kernel(DIRECT, "convolve", (), device) is None
    assert few_conv._adding(device) is None
    assert gram._kernel(2, True, device) is None
    said = found.take()
    assert len(said) == 4
    assert all(reason.endswith(": no compiler") for reason in said)


def test_the_notes_of_a_round_say_what_was_computed_without_a_kernel() -> None:
    reasons = ["of the first round", "of the second"]

    def engine(*arguments: object, **named: object) -> SequentialEngine:
        fall_back(reasons[0])
        return SequentialEngine(*arguments, **named)  # type: ignore[arg-type]

    result = fit(
        federation(),
        FSMGDA(local_steps=1),
        rounds=3,
        device="cpu",
        engine=engine,
        callbacks=[lambda report, _: fall_back(reasons[1])],
    )
    notes = [[note for note in report.notes if note in reasons] for report in result.reports]
    assert notes == [reasons[:1], reasons[1:], []]
