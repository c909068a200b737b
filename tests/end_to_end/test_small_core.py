"""`import fmol` and a whole run need torch and numpy alone; what is missing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fmol import FMGDA, fit
from support import federation

RUN_WITHOUT = """
import importlib.abc, sys

EXTRAS = {"pandas", "sklearn", "scipy", "matplotlib", "hypothesis", "pytest", "click", "safetensors",
          "tensorboard", "mlflow", "PIL", "rich", "playwright", "torchjd", "quadprog",
          "flwr", "ray"}

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import torch
import fmol
from fmol import partition, participation, rules, schedules

x = torch.randn(12, 2)
clients = partition.make_clients(x, x, partition.iid(12, 3), partition.one_each(["a", "b", "c"], 3))
objectives = [fmol.Objective(name, lambda out, y: (out[:, 0] - y[:, 0]) ** 2) for name in "abc"]
federation = fmol.Federation(torch.nn.Linear(2, 1), objectives, clients)
result = fmol.fit(federation, fmol.FSMGDA(local_steps=2), rounds=2)
print(result.losses.shape, result.report(sys.argv[1]).name)
try:
    from fmol.cli import main
    main()
except SystemExit as error:
    print(error)
"""


def test_a_run_and_its_report_need_torch_and_numpy_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHOUT, str(tmp_path / "report.html")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([3, 3]) report.html" in done.stdout
    assert 'the command line needs click. Install it with: pip install "fmol[cli]".' in done.stdout


def test_a_missing_extra_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = fit(federation(), FMGDA(local_steps=1), rounds=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[pandas\]"'):
        result.to_pandas()
