"""Small matrices are computed with in the calling thread, and what others set is set back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fmol import blas, min_norm
from fmol.blas import one_thread
from fmol.bounded import min_norm_within
from fmol.minnorm import certificate
from fmol.rules.cone import upgrad


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads a process of its own had, one number after the other."""
    numbers = [8]

    def set_threads(number: int) -> int:
        numbers.append(number)
        return numbers[-2]

    monkeypatch.setattr(blas, "_setter", lambda: set_threads)
    return numbers


@pytest.mark.skipif(blas._setter() is None, reason="numpy has another BLAS here")
def test_numpys_own_blas_is_found_and_set_back() -> None:
    setter = blas._setter()
    assert setter is not None
    before = setter(3)
    try:
        with one_thread(100):
            assert setter(1) == 1
        assert setter(3) == 3
    finally:
        setter(before)


def test_the_last_to_leave_sets_the_number_back(threads: list[int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_thread(100):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with one_thread(100):
        thread.start()
        assert inside.wait(10)
        with one_thread(100):
            pass
    assert threads == [8, 1]
    leave.set()
    thread.join(10)
    assert threads == [8, 1, 8]


def test_after_an_error_it_is_set_back_as_well(threads: list[int]) -> None:
    with pytest.raises(np.linalg.LinAlgError), one_thread(100):
        np.linalg.cholesky(-np.eye(2))
    assert threads == [8, 1, 8]


@pytest.mark.parametrize(
    "solve",
    [
        min_norm,
        upgrad,
        lambda gramian: min_norm_within(gramian, 0.0, 0.5),
        lambda gramian: certificate(gramian, torch.full((len(gramian),), 1 / len(gramian))),
    ],
)
@pytest.mark.parametrize(("rows", "held"), [(3, False), (80, True)])
def test_solvers_keep_to_one_thread_where_there_may_be_more(
    rows: int, held: bool, solve: Callable[[np.ndarray], object], threads: list[int]
) -> None:
    updates = np.random.default_rng(0).normal(size=(rows, 2 * rows))
    solve(updates @ updates.T)
    assert (len(threads) > 1) == held
    assert threads[-1] == 8


def test_another_blas_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_setter", lambda: None)
    with one_thread(100):
        assert np.linalg.solve(np.eye(2), np.ones(2)).tolist() == [1, 1]
