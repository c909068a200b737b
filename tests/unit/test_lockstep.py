"""Runs in lock-step: on several devices, and where they fail side by side."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fmol import FSMGDA, fit
from fmol.engines.seam import Engine
from fmol.lockstep import Guest, run_in_lockstep
from fmol.lockstep.seats import SharedEngine
from fmol.lockstep.stepper import Stepper
from support import federation, flat, relative


def test_data_that_all_runs_share_are_brought_to_each_device_once() -> None:
    """Also where another round asks for other clients. `meta` stands for a second device."""
    problem = federation([("a", "b", "c")] * 4, sizes=[5, 9, 12, 7])
    stepper = Stepper([SharedEngine(problem, seed=seed) for seed in (0, 1)])
    here, there = stepper._joint, torch.device("meta")
    assert here is not None
    later = copy.copy(here)
    later.sizes, later.offsets = {"0/c1": 9}, {"0/c1": 5}
    first, second = stepper._pool_on(there, here), stepper._pool_on(there, later)
    assert first.device == second.device == there
    assert first.inputs is second.inputs
    assert first.targets is second.targets
    assert first.stays
    assert second.stays
    assert (first.sizes, first.offsets) == (here.sizes, here.offsets)
    assert (second.sizes, second.offsets) == (later.sizes, later.offsets)
    assert stepper._pool_on(here.device, later) is later


PROBLEM = federation([("a", "b"), ("c",)], sizes=[9, 12])


def guest(lr: float, rounds: int = 3) -> Guest:
    """A run that gives its result."""

    def go(engine: Engine) -> Any:
        algorithm = FSMGDA(local_steps=3, batch_size=4, local_lr=lr)
        return fit(PROBLEM, algorithm, rounds, device="cpu", engine=lambda *_, **__: engine)

    return Guest(PROBLEM, 0, rounds, go)


def as_alone(result: Any) -> None:
    alone = fit(PROBLEM, result.algorithm, len(result.reports), device="cpu")
    assert relative(flat(result.model), flat(alone.model)) < 1e-10


def test_runs_that_fail_side_by_side_go_on_by_themselves_and_are_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []

    def failing(self: Stepper, jobs: Any, pool: Any) -> Any:
        tried.append(len(jobs))
        raise ArithmeticError("not all of them")

    monkeypatch.setattr(Stepper, "_descend", failing)
    for result in run_in_lockstep([guest(0.1), guest(0.2)]):
        as_alone(result)
        (note,) = result.reports[0].notes
        assert "2 runs failed side by side (ArithmeticError: not all of them)" in note
        assert [report.notes for report in result.reports[1:]] == [(), ()]
    assert tried == [6]


def test_runs_that_failed_beside_one_are_tried_again_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    descend = Stepper._descend

    def failing(self: Stepper, jobs: Any, pool: Any) -> Any:
        tried.append(len(jobs))
        if len(jobs) > 6:
            raise ArithmeticError("too many")
        return descend(self, jobs, pool)

    monkeypatch.setattr(Stepper, "_descend", failing)
    results = run_in_lockstep([guest(0.1), guest(0.2, rounds=1), guest(0.3)])
    for result in results:
        as_alone(result)
        assert "3 runs failed side by side" in result.reports[0].notes[0]
    assert tried == [9, 6, 6]
    assert "beside" not in results[0].reports[0].notes[0]
    assert "stepped side by side with those of 1 other" in results[0].reports[1].notes[0]


def test_runs_whose_data_are_not_alike_in_a_round_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stepper, "_pool_of", lambda self, jobs: None)
    for result in run_in_lockstep([guest(0.1), guest(0.2)]):
        as_alone(result)
        assert result.notes == ("each of 2 runs took its own steps: their data are not alike",)
