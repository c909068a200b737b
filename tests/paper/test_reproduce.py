"""The paper's experiments by name: how they run, what they write, and which claims hold in small."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from fmol.cli.commands import fmol
from fmol.reproduce import EXPERIMENTS, RESULTS, missing_data, reproduce, running
from fmol.reproduce.charts import write_charts
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Experiment,
    Line,
    Outcome,
    Panel,
    Place,
    Radar,
    Records,
    Size,
    Table,
    Trial,
)
from fmol.reproduce.numbers import final_loss, losses_over_rounds, rounds_until
from fmol.runs import RunError


def _first(size: Size, done: Records) -> list[Trial]:
    return [
        Trial(
            f"lr{lr}",
            {
                "rounds": 6,
                "seed": 1,
                "problem": {"name": "quadratic"},
                "algorithm": {"name": "fmgda", "local_steps": 1, "server_lr": lr, "local_lr": 0.1},
            },
        )
        for lr in (0.05, 0.2)
    ]


def _second(size: Size, done: Records) -> list[Trial]:
    best = min(done, key=lambda name: final_loss(done[name], "f1"))
    return [
        Trial("best", {**_first(size, done)[("lr0.05", "lr0.2").index(best)].tables, "rounds": 9})
    ]


def _conclude(size: Size, records: Records, place: Place) -> Outcome:
    losses = losses_over_rounds(records["best"], "f1")
    return Outcome(
        [Table("losses", ("f1",), {"best": [Cell((losses[-1],), 0.1)]})],
        [Claim("it falls", losses[-1] < losses[0], f"from {losses[0]:.3g} to {losses[-1]:.3g}")],
        [
            Panel(
                "f1",
                "communication rounds",
                "training loss",
                [Line("best", list(range(10)), [losses])],
            )
        ],
    )


TINY = Experiment("tiny", "A tiny one", "As it is.", (_first, _second), _conclude)


def test_what_was_tuned_in_one_stage_is_run_in_the_next_and_all_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    found = reproduce(TINY, tmp_path / "tiny", small=True, device="cpu", say=said.append)
    assert [path.name for path in found.files] == [RESULTS, "curves.png", "curves.svg"]
    assert sorted(path.name for path in (tmp_path / "tiny" / "runs").iterdir()) == [
        "best",
        "lr0.05",
        "lr0.2",
    ]
    written = json.loads((tmp_path / "tiny" / RESULTS).read_text())
    assert written["tables"][0]["rows"]["best"][0]["paper"] == 0.1
    assert written["runs"]["best"]["config"]["algorithm"]["server_lr"] == 0.2
    assert len(said) == 3


def test_runs_that_are_there_are_not_run_again_and_stopped_ones_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reproduce(TINY, tmp_path, small=True, device="cpu")
    said: list[str] = []

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("a run that is there was begun anew")

    monkeypatch.setattr(running, "start", never)
    two = reproduce(TINY, tmp_path, small=True, device="cpu", say=said.append)
    assert said == []
    assert two.outcome.tables == one.outcome.tables


def test_runs_of_other_settings_in_the_folder_are_refused(tmp_path: Path) -> None:
    reproduce(TINY, tmp_path, small=True, device="cpu")
    other = Experiment(
        "tiny",
        "",
        "",
        (lambda size, done: [Trial(t.name, {**t.tables, "seed": 2}) for t in _first(size, done)],),
        _conclude,
    )
    with pytest.raises(RunError, match="`seed` was 1 and is 2"):
        reproduce(other, tmp_path, small=True, device="cpu")


@pytest.mark.parametrize(
    ("values", "paper", "text"),
    [
        ((3.0,), None, "3"),
        ((3.0, 5.0), 4.0, "4 ± 13 [4]"),
        ((3.0, math.inf), None, "3 in 1 of 2"),
        ((math.inf, math.inf), 82.0, "never [82]"),
    ],
)
def test_a_cell_says_its_mean_its_interval_and_the_papers_number(
    values: tuple[float, ...], paper: float | None, text: str
) -> None:
    assert str(Cell(values, paper)) == text


@pytest.mark.parametrize("objectives", [8, 40])
def test_radar_charts_are_drawn_for_few_and_many_objectives(
    objectives: int, tmp_path: Path
) -> None:
    names = tuple(f"Attribute_{i}" for i in range(objectives))
    rings = {f"K = {k}": [1 / (k + i) for i in range(objectives)] for k in (1, 5)}
    files = write_charts(tmp_path, Outcome(radars=[Radar("normalised loss", names, rings)]))
    assert [file.name for file in files] == ["radar.png", "radar.svg"]
    drawn = files[1].read_text()
    assert all(f"Attribute {i}" in drawn for i in range(objectives))


def test_rounds_until_a_loss_are_counted_from_the_first_model(tmp_path: Path) -> None:
    record = reproduce(TINY, tmp_path, small=True, device="cpu").records["best"]
    losses = losses_over_rounds(record, "f1")
    assert len(losses) == 10
    assert rounds_until(record, "f1", losses[4]) == next(
        t for t, loss in enumerate(losses) if loss <= losses[4]
    )
    assert rounds_until(record, "f1", -1.0) == math.inf


def test_experiments_whose_data_are_not_there_are_known(tmp_path: Path) -> None:
    assert missing_data(EXPERIMENTS["batch"], small=True, data_dir=tmp_path) == []
    assert missing_data(EXPERIMENTS["batch"], small=False, data_dir=tmp_path) == ["multimnist"]
    assert missing_data(EXPERIMENTS["river-flow"], small=True, data_dir=tmp_path) == ["river-flow"]


def test_the_command_lists_experiments_and_asks_for_one() -> None:
    listed = CliRunner().invoke(fmol, ["reproduce", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in EXPERIMENTS)
    asked = CliRunner().invoke(fmol, ["reproduce"])
    assert asked.exit_code == 2
    assert "name one experiment, or give --all" in asked.output


def test_more_local_steps_need_fewer_rounds(tmp_path: Path) -> None:
    found = reproduce(EXPERIMENTS["local-updates"], tmp_path, small=True, seeds=1, device="cpu")
    assert [claim.holds for claim in found.outcome.claims] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("batch", ["FSMGDA converges faster the larger the batch (i.i.d.)"]),
        ("centralised", ["FMGDA and MGD end near one another"]),
        ("clients", ["FSMGDA converges with 5, 10 and 30 clients (i.i.d.)"]),
    ],
)
def test_claims_of_the_paper_that_hold_in_small(name: str, held: list[str], tmp_path: Path) -> None:
    found = reproduce(EXPERIMENTS[name], tmp_path, small=True, device="cpu")
    holding = {claim.text for claim in found.outcome.claims if claim.holds}
    assert set(held) <= holding
