"""Figures: which are written, from which numbers, and always the same bytes."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmol import FSMGDA, FedAvg, fit
from fmol.figures import write_figures
from fmol.figures.axes import tick_text
from fmol.figures.curves import each_round, losses_of, mean_curve, megabytes_of, weights_of
from fmol.record import RunRecord
from support import federation

pytest.importorskip("matplotlib", reason="needs the extra `figures`")

ALL = ["losses", "weights", "direction", "radar", "trade_off", "communication"]


def record(
    names: Sequence[str] = ("a", "b", "c"),
    *,
    rounds: int = 5,
    seed: int = 0,
    algorithm: Any = None,
    name: str = "",
    **options: Any,
) -> RunRecord:
    problem = federation([tuple(names)] * 2, names=names)
    algorithm = algorithm or FSMGDA(local_steps=2, batch_size=4)
    return fit(problem, algorithm, rounds, seed=seed, **options).record(name)


def stems(paths: Sequence[Path]) -> list[str]:
    return [path.stem for path in paths]


def texts(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_one_run_gives_every_figure_in_every_format(tmp_path: Path) -> None:
    written = write_figures(tmp_path / "deep" / "er", [record()])
    assert stems(written) == [name for name in ALL for _ in range(2)]
    assert [path.suffix for path in written] == [".png", ".svg"] * len(ALL)
    for path in written:
        start = path.read_bytes()[:8]
        assert (
            start == b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else start.startswith(b"<?xml")
        )


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    run = record()
    first = write_figures(tmp_path / "1", [run], formats=("png", "svg", "pdf"))
    again = write_figures(tmp_path / "2", [run], formats=("png", "svg", "pdf"))
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_text_in_an_svg_is_text_and_axes_have_labels(tmp_path: Path) -> None:
    write_figures(tmp_path, [record()], formats=("svg",))
    losses = texts(tmp_path / "losses.svg")
    for text in (">a<", ">b<", ">c<", "round t", "training loss"):
        assert text in losses
    assert "(MB)" in texts(tmp_path / "communication.svg")
    assert "weight λ" in texts(tmp_path / "weights.svg")
    assert "‖d‖²" in texts(tmp_path / "direction.svg")
    assert "loss / loss at round 0" in texts(tmp_path / "radar.svg")
    assert "training loss of b" in texts(tmp_path / "trade_off.svg")


def test_the_pair_of_the_trade_off_can_be_chosen(tmp_path: Path) -> None:
    write_figures(tmp_path, [record()], formats=("svg",), pair=("c", "a"))
    drawn = texts(tmp_path / "trade_off.svg")
    assert "training loss of c" in drawn
    assert "training loss of a" in drawn


@pytest.mark.parametrize(
    ("names", "left_out"),
    [(("a",), {"weights", "radar", "trade_off"}), (("a", "b"), {"radar"})],
)
def test_what_needs_more_objectives_is_left_out(
    tmp_path: Path, names: Sequence[str], left_out: set[str]
) -> None:
    assert set(ALL) - set(stems(write_figures(tmp_path, [record(names)], ("svg",)))) == left_out


def test_a_curve_is_the_mean_of_the_seeds_with_their_range() -> None:
    curve = mean_curve([np.array([1.0, np.nan, 4.0, 9.0]), np.array([3.0, 2.0, 8.0])])
    assert curve is not None
    assert curve.x.tolist() == [0.0, 2.0]
    assert curve.mean.tolist() == [2.0, 6.0]
    assert curve.low.tolist() == [1.0, 4.0]
    assert curve.high.tolist() == [3.0, 8.0]


def test_losses_are_drawn_against_all_that_was_sent_before_them() -> None:
    run = record()
    sent = megabytes_of(run)
    both = [report.bytes_up + report.bytes_down for report in run.reports]
    assert sent[0] == 0.0
    assert sent[-1] == pytest.approx(sum(both) / 1e6)
    assert len(sent) == len(losses_of(run, ("a", "b", "c")))


def test_several_groups_get_a_panel_per_objective_and_one_legend(tmp_path: Path) -> None:
    average = FedAvg(local_steps=2, batch_size=4)
    runs = [record(seed=seed) for seed in range(2)]
    runs += [record(seed=seed, algorithm=average) for seed in range(2)]
    assert stems(write_figures(tmp_path, runs, ("svg",))) == ALL
    losses = texts(tmp_path / "losses.svg")
    assert losses.count(">FSMGDA<") == losses.count(">FedAvg<") == 1
    assert "mean and range of 2 seeds" in losses
    assert all(f">{name}<" in losses for name in "abc")
    assert "last loss / worst run" in texts(tmp_path / "radar.svg")


@pytest.mark.parametrize("kinds", [1, 2])
def test_forty_objectives_stay_legible(tmp_path: Path, kinds: int) -> None:
    names = [f"attribute {i:02}" for i in range(40)]
    runs = [record(names, rounds=3, name=f"run {kind}") for kind in range(kinds)]
    assert stems(write_figures(tmp_path, runs, ("svg",))) == ALL
    losses = texts(tmp_path / "losses.svg")
    if kinds == 1:
        assert losses.count(">attribute") == 8
        assert "32 more" in losses
    else:
        assert "median objective" in losses
    assert texts(tmp_path / "weights.svg").count(">attribute") == 40


@pytest.mark.parametrize("measured", [1, 5, 9])
def test_of_many_objectives_few_may_have_been_measured(measured: int, tmp_path: Path) -> None:
    names = tuple(f"task{i}" for i in range(12))
    whole = record(names)
    assert whole.final is not None

    def few(losses: Mapping[str, float]) -> dict[str, float]:
        return {
            name: loss if name in names[:measured] else math.nan for name, loss in losses.items()
        }

    reports = tuple(replace(report, losses=few(report.losses)) for report in whole.reports)
    final = replace(whole.final, losses=few(whole.final.losses))
    write_figures(tmp_path, [replace(whole, reports=reports, final=final)], formats=("svg",))
    drawn = texts(tmp_path / "losses.svg")
    assert drawn.count(">task") == min(measured, 8)
    assert ("1 more" in drawn) == (measured == 9)


def test_names_of_any_kind_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ("_hidden", "a$b$c_{x}", "左の数字", "x" * 60)
    write_figures(tmp_path, [record(names)])
    losses = texts(tmp_path / "losses.svg")
    for text in ("_hidden", "a$b$c_{x}", "左の数字", "x" * 25 + "…"):
        assert text in losses


def test_a_run_that_has_not_ended_or_was_seldom_measured_is_drawn(tmp_path: Path) -> None:
    run = replace(record(evaluate_every=3), final=None, stopped="")
    assert stems(write_figures(tmp_path, [run], ("svg",))) == ALL


def test_a_run_of_no_rounds_gives_what_it_has(tmp_path: Path) -> None:
    run = record(rounds=0)
    assert stems(write_figures(tmp_path, [run], ("svg",))) == ["losses", "trade_off"]
    assert write_figures(tmp_path, [replace(run, final=None)], ("svg",)) == []


def test_rounds_that_are_lost_leave_a_gap_and_move_no_other(tmp_path: Path) -> None:
    whole = record()
    lost = replace(whole, reports=(whole.reports[0], *whole.reports[3:]))
    names, kept = ("a", "b", "c"), [True, False, False, True, True]
    assert (whole.rounds, lost.rounds) == (5, 5)
    assert replace(lost, final=None).rounds == 5
    for drawn in (losses_of, weights_of):
        before, after = drawn(whole, names), drawn(lost, names)
        assert after.shape == before.shape
        assert np.isnan(after[1:3]).all()
        rows = [*kept, True][: len(before)]
        np.testing.assert_array_equal(after[rows], before[rows])
    direction = each_round(lost, "direction_norm_squared")
    np.testing.assert_array_equal(np.isfinite(direction), kept)
    assert len(megabytes_of(lost)) == 6
    assert stems(write_figures(tmp_path, [lost])) == [name for name in ALL for _ in range(2)]
    empty = replace(whole, reports=(), final=None)
    assert losses_of(empty, names).shape == (0, 3)


def test_losses_that_are_not_positive_are_drawn_on_a_plain_axis(tmp_path: Path) -> None:
    run = record()
    losses = [{"a": -1.0, "b": 0.0, "c": 1.0}] * len(run.reports)
    reports = tuple(replace(r, losses=each) for r, each in zip(run.reports, losses, strict=True))
    assert "radar" not in stems(write_figures(tmp_path, [replace(run, reports=reports)], ("svg",)))


def test_drawing_changes_nothing_of_matplotlibs_settings(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib as mpl; sys.path.insert(0, sys.argv[1])\n"
        "from test_figures import record; from fmol.figures import write_figures\n"
        "mpl.rcParams['font.size'] = 20; mpl.use('svg'); before = dict(mpl.rcParams)\n"
        "write_figures(sys.argv[2], [record(rounds=1)])\n"
        "assert dict(mpl.rcParams) == before and 'matplotlib.pyplot' not in sys.modules\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(here), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(here.parent), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def test_runs_that_cannot_be_drawn_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`records` is empty"):
        write_figures(tmp_path, [])
    with pytest.raises(ValueError, match=r"run `FSMGDA` has the objectives \['a', 'b'\]"):
        write_figures(tmp_path, [record(rounds=1), record(("a", "b"), rounds=1)])
    with pytest.raises(ValueError, match="`pair` names objective `z`"):
        write_figures(tmp_path, [record(rounds=1)], pair=("a", "z"))


def test_without_matplotlib_the_command_that_brings_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[figures\]"'):
        write_figures(tmp_path, [record(rounds=1)])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.001, "0.001"), (1e5, "10⁵"), (1e-12, "10⁻¹²"), (20.0, "20"), (2e4, "20000")],
)
def test_ticks_read_well(value: float, text: str) -> None:
    assert tick_text(value) == text
