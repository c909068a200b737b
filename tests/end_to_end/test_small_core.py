"""`import fmol` and a whole run need torch and numpy alone; what is missing is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fmol import FMGDA, fit
from support import federation

RUN_WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pandas", "sklearn", "scipy", "matplotlib", "hypothesis", "pytest"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch
import fmol
from fmol import partition, participation, rules, schedules

x = torch.randn(12, 2)
clients = partition.make_clients(x, x, partition.iid(12, 3), partition.one_each(["a", "b", "c"], 3))
objectives = [fmol.Objective(name, lambda out, y: (out[:, 0] - y[:, 0]) ** 2) for name in "abc"]
federation = fmol.Federation(torch.nn.Linear(2, 1), objectives, clients)
print(fmol.fit(federation, fmol.FSMGDA(local_steps=2), rounds=2).losses.shape)
"""


def test_a_run_needs_torch_and_numpy_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([3, 3])" in done.stdout


def test_a_missing_extra_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = fit(federation(), FMGDA(local_steps=1), rounds=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[pandas\]"'):
        result.to_pandas()
