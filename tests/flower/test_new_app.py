"""`fmol new-flower-app` writes an app that runs as it stands."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')

from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from flower_grid import FakeGrid
from flower_processes import free_port, run_command
from fmol import FSMGDA, Client, Federation, Result, fit
from fmol.cli.commands import fmol
from fmol.flower.new_app import write_app
from fmol.runs import RunFolder
from support import flat

COMMANDS = Path(sys.executable).parent


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new app whose package can be imported."""
    folder = tmp_path / "my-flats"
    write_app(folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_flats"]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"my_flats.{name}")


def read_config(folder: Path) -> dict[str, Any]:
    tables = tomllib.loads((folder / "pyproject.toml").read_text())
    config: dict[str, Any] = tables["tool"]["flwr"]["app"]["config"]
    return config


def context_of(node: int, **node_config: Any) -> Context:
    return Context(
        run_id=1, node_id=node, node_config=node_config, state=RecordDict(), run_config={}
    )


def trained_here(config: dict[str, Any], sites: int, rounds: int) -> Result:
    """What the app trains, by the sequential engine."""
    task = module("task")
    clients: list[Client] = []
    for number in range(sites):
        own: Federation = task.load_site(context_of(number, number=number))
        clients += [own.client(id) for id in own.population.ids()]
    algorithm = FSMGDA(
        local_steps=config["local-steps"],
        batch_size=config["batch-size"],
        local_lr=config["learning-rate"],
        server_lr=config["server-learning-rate"],
    )
    problem = Federation(task.make_model(), task.OBJECTIVES, clients)
    return fit(problem, algorithm, rounds, device="cpu")


def test_the_app_trains_and_goes_on_where_it_was(app: Path, tmp_path: Path) -> None:
    config = {**read_config(app), "num-server-rounds": 3, "out": str(tmp_path / "run")}
    grid = FakeGrid()
    for number in range(6):
        grid.join(module("client_app").app, number=number)
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    module("server_app").app(grid, server)
    server.run_config["num-server-rounds"] = 5
    module("server_app").app(grid, server)
    record = RunFolder.open(tmp_path / "run").record()
    assert len(record.reports) == 5
    assert [client.objectives for client in record.portrait.clients[:3]] == [
        ("price", "sold"),
        ("price",),
        ("sold",),
    ]
    assert "accuracy" in record.reports[0].held_out["sold"]
    here = trained_here(config, 6, 5)
    final = load_file(tmp_path / "run" / "model.safetensors")
    there = torch.cat([final[name].reshape(-1) for name, _ in here.model.named_parameters()])
    assert torch.allclose(there, flat(here.model), rtol=1e-4, atol=1e-6)
    assert here.losses[-1].sum() < 0.7 * here.losses[0].sum()


def test_the_command_writes_the_app_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "Two Sites"
    first = CliRunner().invoke(fmol, ["new-flower-app", str(folder)])
    assert first.exit_code == 0, first.output
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml",
        "README.md",
        *(
            f"two_sites/{name}.py"
            for name in ("__init__", "task", "site", "client_app", "server_app")
        ),
    }
    assert "{{" not in "".join(path.read_text() for path in folder.rglob("*.*") if path.is_file())
    assert "flwr run" in first.output
    again = CliRunner().invoke(fmol, ["new-flower-app", str(folder)])
    assert again.exit_code != 0
    assert "is there already, and nothing is overwritten" in again.output
    with pytest.raises(ValueError, match="cannot be the name of an app's package"):
        write_app(tmp_path / "1st")


def test_the_app_is_written_as_the_rest_is(app: Path) -> None:
    ruff = COMMANDS / "ruff"
    if not ruff.exists():
        pytest.skip('needs ruff: pip install "fmol[dev]"')
    root = Path(__file__).resolve().parents[2]
    for line in (["check"], ["format", "--check"]):
        command = [str(ruff), *line, "--config", str(root / "pyproject.toml"), "--no-cache"]
        # Seen from there fmol is one of many packages.
        command += ["--ignore", "T201,I001"] if line == ["check"] else []
        done = subprocess.run(
            [*command, str(app)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_flowers_own_command_runs_the_app_with_six_nodes(app: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs ray: pip install "fmol[flower]"')
    home = tmp_path / "home"
    home.mkdir()
    said = run_command(
        [
            str(COMMANDS / "flwr"),
            "run",
            str(app),
            "--stream",
            "--federation-config",
            "num-supernodes=6",
            "--run-config",
            f'num-server-rounds=4 min-sites=6 out="{tmp_path / "run"}"',
        ],
        home,
        timeout=300,
        more={
            "PATH": f"{COMMANDS}:/usr/bin:/bin",
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        },
    )
    assert "all 4 rounds done" in said
    here = trained_here(read_config(app), 6, 4)
    final = load_file(tmp_path / "run" / "model.safetensors")
    there = torch.cat([final[name].reshape(-1) for name, _ in here.model.named_parameters()])
    assert torch.allclose(there, flat(here.model), rtol=1e-4, atol=1e-6)
    reports = RunFolder.open(tmp_path / "run").record().reports
    assert [len(report.cohort) for report in reports] == [6] * 4
