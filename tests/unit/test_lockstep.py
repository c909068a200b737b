"""Runs in lock-step on several devices."""

from __future__ import annotations

import copy

import torch

from fmol.lockstep.seats import SharedEngine
from fmol.lockstep.stepper import Stepper
from support import federation


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
