"""Every example runs as a user would run it, and shows what it is there to show."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


class Runner:
    """Runs `examples/NAME.py ARGUMENTS` and gives what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, name: str, *arguments: str) -> str:
        path = str(EXAMPLES / f"{name}.py")
        self._monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return self._capsys.readouterr().out


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]


def test_every_example_has_its_test_here_and_is_short() -> None:
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert names == ["demo", "million_clients", "missing_labels", "own_rule", "three_cases"]
    for name in names:
        lines = len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines())
        assert lines <= (150 if name == "demo" else 60), f"{name} has {lines} lines"


def test_in_all_three_cases_every_loss_falls(run: Runner) -> None:
    lines = run("three_cases").splitlines()
    falls = [numbers(line)[:2] for line in lines if "→" in line]
    assert len(falls) == 9
    assert all(after < 0.5 * before for before, after in falls)
    assert "A [1, 0, 0]" in lines[1]


def test_a_rule_of_ones_own_evens_out_the_losses_and_gives_up_common_descent(run: Runner) -> None:
    ours, own = run("own_rule").splitlines()
    assert numbers(own)[1] < numbers(ours)[1]
    assert "common descent: 0 of 60" in ours
    assert "common descent: 0 of 60" not in own


def test_a_million_clients_learn(run: Runner) -> None:
    thousand, million = run("million_clients").splitlines()[1:]
    assert thousand.split()[0] == "1,000"
    assert million.split()[0] == "1,000,000"
    assert all(loss < 0.1 for line in (thousand, million) for loss in numbers(line)[1:])


def test_missing_labels_a_stall_its_alarm_and_its_end(run: Runner) -> None:
    pytest.importorskip("pandas")
    lines = run("missing_labels").splitlines()
    alarms = [line for line in lines if "alarm, stall: objective `weight`" in line]
    assert len(alarms) == 1
    assert "it is solved" in alarms[0]
    plain, protected = (line for line in lines if "Result(" in line)
    assert numbers(protected)[-1] < 0.5 * numbers(plain)[-1]


def test_the_demo_runs_compares_and_reports(run: Runner, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    out = run("demo", "--rounds", "2", "--out", str(tmp_path / "demo"))
    for text in (
        'FSMGDA, normalize="loss"',
        "FedAvg, weights ½ and ½",
        "every client alone",
        "Why:",
    ):
        assert text in out
    report = tmp_path / "demo" / "report.html"
    assert f"Now look at {report}" in out
    assert "every client alone" in report.read_text(encoding="utf-8")
    assert (tmp_path / "demo" / "fsmgda" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_demo_learns_what_the_readme_says(run: Runner, tmp_path: Path) -> None:
    """Losses and accuracies within 30 %: rounding differs between machines, learning does not."""
    pytest.importorskip("sklearn")
    pytest.importorskip("safetensors")
    out = run("demo", "--out", str(tmp_path / "demo"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for title in ("FSMGDA ", 'FSMGDA, normalize="loss"', "FedAvg, weights ½ and ½"):
        (shown,) = re.findall(rf"^{re.escape(title)} .*$", readme, re.MULTILINE)
        (printed,) = re.findall(rf"^{re.escape(title)} .*$", out, re.MULTILINE)
        assert numbers(printed)[:4] == pytest.approx(numbers(shown)[:4], rel=0.3)
