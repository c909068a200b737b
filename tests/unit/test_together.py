"""How many runs go on at a time."""

from __future__ import annotations

import pytest
import torch

from fmol.config import RunOptions
from fmol.runs import together


def test_on_a_cpu_it_is_by_their_files_alone() -> None:
    assert together.most_together(RunOptions(device="cpu")) == together.MOST_TOGETHER


@pytest.mark.parametrize(("free", "most"), [(140e9, together.MOST_TOGETHER), (24e9, 40), (1e8, 1)])
def test_on_a_gpu_also_by_its_memory(
    free: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "resolve_device", lambda device: torch.device("cuda:0"))
    monkeypatch.setattr(together, "free_memory", lambda device: free)
    assert together.most_together(RunOptions(device="cpu")) == most
