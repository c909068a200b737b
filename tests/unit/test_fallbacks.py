"""What is computed without a kernel is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fmol import FSMGDA, fit
from fmol.engines import VectorizedEngine
from fmol.kernels import advance, fallbacks, few_conv, gram
from fmol.kernels.fallbacks import fall_back, take_fallbacks
from fmol.kernels.few_conv import DIRECT
from support import federation


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "_known", set())
    monkeypatch.setattr(fallbacks, "_new", [])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise OSError("no compiler\nand more of it")

    caches = (advance._kernel, few_conv._kernel, few_conv._adding, gram._kernel)
    for module in (advance, few_conv, gram):
        monkeypatch.setattr(module, "compile_kernel", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_a_reason_is_logged_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fmol"):
        for reason in ("first", "second", "first"):
            fall_back(reason)
        assert take_fallbacks() == ["first", "second"]
        fall_back("second")
    assert take_fallbacks() == []
    assert [record.getMessage() for record in caplog.records] == ["first", "second"]


def test_of_what_a_compiler_says_the_first_line_is_told_and_all_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "fmol"):
        fall_back("no kernel: line 3: error\nline 4: another")
    assert take_fallbacks() == ["no kernel: line 3: error"]
    assert "another" in caplog.text


def test_threads_lose_no_reason_and_tell_none_twice() -> None:
    def one(i: int) -> list[str]:
        fall_back(f"reason {i % 50}")
        return take_fallbacks()

    with ThreadPoolExecutor(8) as pool:
        found = [reason for taken in pool.map(one, range(400)) for reason in taken]
    found += take_fallbacks()
    assert sorted(found) == sorted(f"reason {i}" for i in range(50))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_every_kernel_says_what_is_done_in_its_place() -> None:
    device = torch.device("cpu")
    assert advance._kernel(4, device) is None
    assert few_conv._kernel(DIRECT, "convolve", (), device) is None
    assert few_conv._adding(device) is None
    assert gram._kernel(2, True, device) is None
    said = take_fallbacks()
    assert len(said) == 4
    assert all(reason.endswith(": no compiler") for reason in said)


def test_the_notes_of_a_round_say_what_was_computed_without_a_kernel() -> None:
    reasons = ["of the first round", "of the second"]

    def engine(*arguments: object, **named: object) -> VectorizedEngine:
        fall_back(reasons[0])
        return VectorizedEngine(*arguments, **named)  # type: ignore[arg-type]

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
