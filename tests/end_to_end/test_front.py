"""Fronts: where they lie, that they go on where they stopped, and what is said and written."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmol import Federation
from fmol.cli.commands import fmol
from fmol.config import ConfigError
from fmol.front import (
    Front,
    FrontOptions,
    front_records,
    front_table,
    read_front_options,
    spread_preferences,
    train_front,
    write_front_figure,
)
from fmol.front.preferences import read_methods
from fmol.front.result import FrontPoint
from fmol.problems.quadratic import Quadratic
from fmol.report import build_report
from fmol.report.data import build_payload
from fmol.runs import RunError, RunFolder, together
from fmol.runs.training import StoppedError, train_config

SMALL: dict[str, Any] = {"clients": 4, "samples": 8}


def tables(engine: str = "vectorized", rounds: int = 60, **problem: Any) -> dict[str, Any]:
    return {
        "problem": {"name": "quadratic", **SMALL, **problem},
        "algorithm": {"name": "fmgda", "local_steps": 2, "local_lr": 0.1, "server_lr": 0.5},
        "rounds": rounds,
        "engine": engine,
        "device": "cpu",
    }


# ---- where it lies ---------------------------------------------------------------------------


@pytest.mark.parametrize("objectives", [2, 3])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_weights_reach_the_pareto_front_of_quadratics_in_closed_form(
    objectives: int, engine: str, tmp_path: Path
) -> None:
    problem = Quadratic(objectives=objectives, **SMALL)
    count = {2: 5, 3: 6}[objectives]
    _, front = train_front(
        tables(engine, objectives=objectives), {}, FrontOptions(points=count), out=tmp_path
    )
    exact = [
        list(problem.optimum([p.preference[n] for n in problem.names]).values())
        for p in front.points
    ]
    assert np.allclose(front.values(), exact, atol=1e-5)
    assert front.kept().all()
    assert max(point.stationarity["relative"] for point in front.points) < 1e-3


def test_side_by_side_gives_what_one_after_the_other_gives(tmp_path: Path) -> None:
    options = FrontOptions(points=3, method=("weights", "tchebycheff", "near-prior,radius=0.2"))
    found = [
        train_front(tables(engine, 8), {"batch_size": "4", "algorithm": "fsmgda"}, options, out=out)
        for engine, out in (("sequential", tmp_path / "one"), ("vectorized", tmp_path / "many"))
    ]
    assert np.allclose(found[0][1].values(), found[1][1].values(), rtol=1e-9)
    for point in found[1][1].points:
        reports = RunFolder(tmp_path / "many" / point.run).record().reports
        notes = {note for report in reports for note in report.notes}
        assert "lanes were stepped side by side with those of 8 other runs" in notes


def test_clients_keep_what_they_keep_for_each_run_by_itself(tmp_path: Path) -> None:
    """With control variates, which stay at the clients, runs in lock-step must not mix them up."""
    options = FrontOptions(points=3)
    flags = {"algorithm": "fsmgda", "batch_size": "4", "drift_correction": "scaffold"}
    told = {"heterogeneity": 0.5}
    found = [
        train_front(tables(engine, 6, **told), flags, options, out=tmp_path / engine)[1]
        for engine in ("sequential", "vectorized")
    ]
    assert np.allclose(found[0].values(), found[1].values(), rtol=1e-8)


def test_fedavg_takes_the_preference_as_its_weights(tmp_path: Path) -> None:
    told = tables("vectorized") | {"algorithm": {"name": "fedavg", "batch_size": "none"}}
    _, front = train_front(told, {"local_lr": "0.1"}, FrontOptions(points=3), out=tmp_path)
    problem = Quadratic(**SMALL)
    exact = [list(problem.optimum(list(p.preference.values())).values()) for p in front.points]
    assert np.allclose(front.values(), exact, atol=1e-5)


# ---- preferences -----------------------------------------------------------------------------


@pytest.mark.parametrize("objectives", [2, 3, 5, 8, 40])
@pytest.mark.parametrize("count", [2, 7, 15, 50])
def test_preferences_are_distinct_and_sum_to_one(objectives: int, count: int) -> None:
    shares = spread_preferences(objectives, count)
    assert shares.shape == (count, objectives)
    assert np.allclose(shares.sum(axis=1), 1)
    assert (shares >= 0).all()
    assert len(np.unique(shares.round(9), axis=0)) == count
    if count >= objectives:
        assert (shares.max(axis=1) == 1).sum() == objectives
    assert np.array_equal(shares, spread_preferences(objectives, count))


def test_three_objectives_have_a_lattice() -> None:
    assert {tuple(row) for row in (4 * spread_preferences(3, 15)).round().astype(int)} == {
        (i, j, 4 - i - j) for i in range(5) for j in range(5 - i)
    }


# ---- going on --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_started_again_finished_points_are_kept_and_missing_ones_trained(
    engine: str, tmp_path: Path
) -> None:
    out, said = tmp_path / "front", list[str]()
    _, first = train_front(tables(engine, 4), {}, FrontOptions(points=3), out=out)
    stamps = {p.run: (out / p.run / "summary.json").stat().st_mtime_ns for p in first.points}
    gone = first.points[1].run
    for file in sorted((out / gone).rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (out / gone).rmdir()
    _, again = train_front(
        tables(engine, 4), {}, FrontOptions(points=3, reference=2.0), out=out, say=said.append
    )
    assert any("3 points, 2 of them done already" in text for text in said)
    assert np.allclose(first.values(), again.values(), rtol=1e-12)
    after = {p.run: (out / p.run / "summary.json").stat().st_mtime_ns for p in again.points}
    assert [run for run in stamps if stamps[run] != after[run]] == [gone]


def test_a_folder_of_another_front_is_refused(tmp_path: Path) -> None:
    train_front(tables(rounds=2), {}, FrontOptions(points=2), out=tmp_path)
    with pytest.raises(RunError, match=r"is of another front: .*`local_lr` was 0.1 and is 0.2"):
        train_front(tables(rounds=2), {"local_lr": "0.2"}, FrontOptions(points=2), out=tmp_path)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_interrupted_it_goes_on_to_the_same_front(engine: str, tmp_path: Path) -> None:
    options = FrontOptions(points=3)
    whole = train_front(tables(engine, 12), {}, options, out=tmp_path / "whole")[1]

    def interrupting(federation: Federation, done: int, rounds: int) -> Any:
        def callback(report: Any, snapshot: Any) -> None:
            if report.round == 5:
                signal.raise_signal(signal.SIGINT)

        return [callback]

    with pytest.raises(StoppedError, match=r"of 3 points are done.*--out"):
        train_front(tables(engine, 12), {}, options, out=tmp_path / "broken", watch=interrupting)
    broken = RunFolder(tmp_path / "broken" / whole.points[0].run)
    assert not broken.summary.is_file()
    again = train_front(tables(engine, 12), {}, options, out=tmp_path / "broken")[1]
    assert np.allclose(whole.values(), again.values(), rtol=1e-12)


def test_a_point_that_fails_is_said_and_the_others_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = train_config, list[str]()

    def failing(folder: RunFolder, *arguments: Any, **named: Any) -> Any:
        if "-1-" in folder.path.name:
            raise RunError("no room")
        return real(folder, *arguments, **named)

    monkeypatch.setattr(together, "train_config", failing)
    with pytest.raises(RunError, match="1 of 3 points failed: weights-1-seed0"):
        train_front(
            tables(rounds=2), {}, FrontOptions(points=3), out=tmp_path, complain=said.append
        )
    assert said == ["weights-1-seed0 failed: no room"]
    assert len(json.loads((tmp_path / "front.json").read_text())["points"]) == 2


# ---- what is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "flags", "options", "words"),
    [
        ({}, {"rule": "upgrad"}, {}, "`rule` is what a front sets"),
        ({}, {"algorithm": "alone"}, {}, "`alone` trains a model for each client"),
        ({}, {"algorithm": "fedavg"}, {"method": ("upgrad",)}, "takes fixed weights and no rule"),
        ({}, {}, {"reference": {"f1": 1.0}}, "Add `f2`"),
        ({}, {}, {"reference": {"f1": 1.0, "f2": 1.0, "f3": 1.0}}, "Take out `f3`"),
        ({"objectives": 1, "angle": 0}, {}, {}, "one objective, so there is nothing to trade"),
        ({}, {}, {"method": ("weigths",)}, "Did you mean `weights`"),
        ({}, {}, {"method": ("near-prior,radios=1",)}, "has the options"),
        ({}, {}, {"method": ("weights", "weights")}, "twice"),
        ({}, {}, {"method": ("near-prior,radius=-1",)}, "`radius` must be"),
    ],
)
def test_what_cannot_be_is_said_before_training(
    told: dict[str, Any], flags: dict[str, str], options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    base = tables(rounds=1, **told)
    base = base | {"algorithm": {}} if "algorithm" in flags else base
    with pytest.raises(ConfigError, match=words):
        train_front(base, flags, FrontOptions(**options), out=tmp_path / "front")
    assert not (tmp_path / "front").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"algorithm": "fedavgg", "rounds": "x"}, ["`algorithm` must be", "`rounds` must be"]),
        ({"rule": "upgrad", "rounds": "x"}, ["`rule` is what a front sets", "`rounds` must be"]),
    ],
)
def test_all_that_is_wrong_with_a_front_is_said_at_once(
    flags: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        train_front({"problem": "quadratic"}, flags, out=tmp_path / "front")
    assert len(caught.value.problems) == len(words)
    assert all(word in str(caught.value) for word in words)


def test_options_of_a_file_and_flags_are_read_together() -> None:
    options = read_front_options({"points": 7, "seeds": 2}, {"points": "5", "method": ()})
    assert (options.points, options.seeds, options.method) == (5, 2, ("weights",))
    with pytest.raises(ConfigError, match=r"\[front\] `points` must be .*got 1") as caught:
        read_front_options({"points": 1, "sedes": 2}, {})
    assert "Did you mean `seeds`" in str(caught.value)
    assert read_methods(["near-prior,radius=0.2"])[0].options == {"radius": 0.2}


def test_the_command_writes_table_json_figure_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "front"
    line = "front quadratic --algorithm fmgda --rounds 5 --points 3 --seeds 2 --engine vectorized"
    more = ["--device", "cpu", "--reference", "f1=1.2,f2=1.2", "--out", str(out)]
    fmol.main([*line.split(), *more], standalone_mode=False)
    said = capsys.readouterr().out
    assert "‖d*‖ relative" in said
    assert "means over 2 seeds" in said
    assert "hypervolume weights: " in said
    assert {"front.json", "front.png", "front.svg", "front.html"} <= {p.name for p in out.iterdir()}
    written = json.loads((out / "front.json").read_text(encoding="utf-8"))
    assert len(written["points"]) == 6
    assert written["reference"] == {"f1": 1.2, "f2": 1.2}
    assert written["settings"]["algorithm"]["name"] == "fmgda"
    assert all(0 <= p["stationarity"]["relative"] <= 1 for p in written["points"])


def test_without_a_reference_one_is_suggested_from_the_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "front quadratic --rounds 40 --points 3 --engine vectorized --device cpu --quiet"
    fmol.main([*line.split(), "--out", str(tmp_path / "quiet")], standalone_mode=False)
    assert capsys.readouterr().out == ""
    fmol.main([*line.split()[:-1], "--out", str(tmp_path / "quiet")], standalone_mode=False)
    assert "--reference f1=1.1,f2=1.1" in capsys.readouterr().out


def test_a_file_has_a_table_for_it_which_other_commands_pass_over(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        'rounds = 2\ndevice = "cpu"\n[problem]\nname = "quadratic"\n[front]\npoints = 2\n',
        encoding="utf-8",
    )
    fmol.main(["front", str(file), "--quiet", "--out", str(tmp_path / "f")], standalone_mode=False)
    assert len(json.loads((tmp_path / "f" / "front.json").read_text())["points"]) == 2
    fmol.main(["run", str(file), "--quiet", "--out", str(tmp_path / "r")], standalone_mode=False)


# ---- made-up fronts --------------------------------------------------------------------------


def made_up(values: list[list[float]], **more: Any) -> Front:
    names = tuple(f"o{s}" for s in range(len(values[0])))
    points = [
        FrontPoint(
            method="weights",
            index=i,
            preference=dict.fromkeys(names, 1 / len(names)),
            seed=0,
            run=f"weights-{i}",
            rounds=1,
            stopped="",
            losses=dict(zip(names, row, strict=True)),
            held_out={n: {"accuracy": v} for n, v in zip(names, row, strict=True)},
            stationarity={"relative": 0.0, "norm_squared": 0.0, "common_cosine": 0.0},
        )
        for i, row in enumerate(values)
    ]
    return Front(objectives=names, points=tuple(points), **more)


def test_a_metric_of_which_more_is_better_is_maximised() -> None:
    values = [[0.9, 0.1], [0.5, 0.5], [0.4, 0.4]]
    assert made_up(values, measure="accuracy").kept().tolist() == [True, True, False]
    assert made_up(values).kept().tolist() == [True, False, True]
    corner = {"o0": 0.0, "o1": 0.0}
    volume = made_up(values, measure="accuracy", reference=corner).hypervolumes()["weights"][0]
    assert math.isclose(volume.value, 0.5 * 0.5 + 0.4 * 0.1, rel_tol=1e-12)
    with pytest.raises(ValueError, match="has no 'recall' of objective `o0`"):
        made_up(values, measure="recall")


@pytest.mark.parametrize("objectives", [2, 3, 4, 6, 12])
def test_a_figure_is_drawn_for_any_number_of_objectives_and_the_same_each_time(
    objectives: int, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).random((9, objectives)).tolist()
    values[0] = [2.0] * objectives  # Dominated.
    corner = {f"o{s}": 2.1 for s in range(objectives)}
    front = made_up(values, reference=corner)
    first, again = (write_front_figure(tmp_path / name, front) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    drawn = first[1].read_text(encoding="utf-8")
    assert all(word in drawn for word in ("training loss", "dominated", "reference"))
    table = front_table(front)
    assert sum(line.endswith("yes") for line in table) >= 1
    assert all(len(line) < 200 for line in table)


def test_many_objectives_have_an_estimate_that_says_so() -> None:
    rows = np.abs(np.random.default_rng(0).standard_normal((80, 10)))
    values = (1 - rows / np.linalg.norm(rows, axis=1, keepdims=True)).tolist()
    front = made_up(values, reference={f"o{s}": 1.1 for s in range(10)})
    assert "(an estimate)" in "\n".join(front_table(front))


# ---- the report ------------------------------------------------------------------------------


def test_runs_that_differ_in_their_preference_are_a_front_in_the_report(tmp_path: Path) -> None:
    options = FrontOptions(points=3, reference=1.2)
    path, front = train_front(tables(rounds=3), {}, options, out=tmp_path)
    records = front_records(path, front)
    payload = build_payload(records, front=front.summary())["front"]
    assert [point["preference"] for point in payload["points"]] == [[1, 0], [0.5, 0.5], [0, 1]]
    assert payload["reference"] == [1.2, 1.2]
    assert payload["hypervolume"]["weights"]["exact"]
    # From the folders alone, as `fmol compare` has them.
    plain = build_payload([RunFolder(path / point.run).record() for point in front.points])
    assert len(plain["front"]["points"]) == 3
    assert plain["front"]["reference"] is None
    assert build_payload(records[:1])["front"] is None
    assert "What can be traded" in build_report(records)


def test_threads_leave_torchs_generator_as_it_was(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train_front(tables(rounds=2), {}, FrontOptions(points=2), out=tmp_path)
    assert torch.equal(before, torch.get_rng_state())
