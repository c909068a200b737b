"""The paper's experiments by name: how they run, what they write, and which claims hold in small."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fmol.cli.commands import fmol, paper
from fmol.lockstep import stepper
from fmol.problems.river_flow import SITES
from fmol.rates import measure_rates
from fmol.record import RunRecord
from fmol.reproduce import (
    EXPERIMENTS,
    RESULTS,
    celeba,
    conflict,
    digits,
    heterogeneity,
    local_steps,
    missing_data,
    plan_runs,
    rates,
    reproduce,
)
from fmol.reproduce.charts import write_charts
from fmol.reproduce.clients import CLIENTS
from fmol.reproduce.experiment import (
    Cell,
    Claim,
    Dots,
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
from fmol.reproduce.naming import named
from fmol.reproduce.numbers import (
    final_loss,
    losses_over_rounds,
    rounds_until,
    rounds_until_all,
)
from fmol.reproduce.section import REPORT
from fmol.reproduce.text import outcome_lines
from fmol.reproduce.trials import FAILED
from fmol.result import Snapshot
from fmol.rounds import RoundReport
from fmol.runs import RunError, RunFolder, together
from fmol.runs.training import StoppedError

DATA = Path(__file__).parents[3] / "shared" / "data"
"""Where the data sets are that are not the project's own."""


def _first(size: Size, done: Records | None) -> list[Trial]:
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


def _second(size: Size, done: Records | None) -> list[Trial]:
    best = min(done, key=lambda name: final_loss(done[name], "f1")) if done else "lr0.2"
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
    assert [path.name for path in found.files] == [
        RESULTS,
        "curves.png",
        "curves.svg",
        REPORT,
    ]
    assert sorted(path.name for path in (tmp_path / "tiny" / "runs").iterdir()) == [
        "best",
        "lr0.05",
        "lr0.2",
    ]
    written = json.loads((tmp_path / "tiny" / RESULTS).read_text())
    assert written["tables"][0]["rows"]["best"][0]["paper"] == 0.1
    page = (tmp_path / "tiny" / REPORT).read_text()
    assert "from 0.5 to" in page
    assert "data:image/png;base64," in page
    assert written["runs"]["best"]["config"]["algorithm"]["server_lr"] == 0.2
    assert len(said) == 3


def test_runs_that_are_there_are_not_run_again_and_stopped_ones_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reproduce(TINY, tmp_path, small=True, device="cpu")
    said: list[str] = []

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("a run that is there was begun anew")

    monkeypatch.setattr(together, "train_config", never)
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


def test_rates_are_measured_once_and_come_out_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no runs, and still a report; and one seed has no interval."""
    few = partial(measure_rates, cases=["fmgda-strongly-convex"])
    monkeypatch.setattr(rates, "measure_rates", few)
    one = reproduce(EXPERIMENTS["rates"], tmp_path, small=True, seeds=1)
    written = (tmp_path / RESULTS).read_text()
    said: list[str] = []
    two = reproduce(EXPERIMENTS["rates"], tmp_path, small=True, seeds=1, say=said.append)
    assert said == []
    assert (tmp_path / RESULTS).read_text() == written
    names = [path.name for path in two.files]
    assert names == [RESULTS, "rates.png", "rates.svg", REPORT]
    assert "FMGDA, strongly convex" in (tmp_path / REPORT).read_text()
    (claim,) = one.outcome.claims
    assert "inf" not in claim.evidence + " ".join(outcome_lines(one))
    content = json.loads(written)
    assert content["settings"]["local_steps"] == 2
    ((cell,),) = content["tables"][0]["rows"].values()
    assert cell["values"] == [one.outcome.tables[0].rows["FMGDA, strongly convex"][0].mean]
    assert cell["paper"] == pytest.approx(-0.105, abs=1e-3)


def test_all_go_on_where_one_fails_and_the_command_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size: Size, records: Records, place: Place) -> Outcome:
        raise RuntimeError("not today")

    broken = replace(TINY, name="broken", conclude=fail)
    monkeypatch.setattr(paper, "EXPERIMENTS", {"broken": broken, "tiny": TINY})
    told = ["reproduce", "--all", "--small", "--out", str(tmp_path)]
    found = CliRunner().invoke(fmol, told)
    assert found.exit_code == 1
    assert "broken failed" in found.stderr
    assert "not today" in found.stderr
    assert "error: 1 of 2 experiments failed: broken." in found.stderr
    assert "it falls" in found.stdout


def test_all_run_only_what_is_named_and_somebody_must_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Experiment("other", "", "", (lambda size, done: [_told("mine")],), lambda *_: Outcome())
    monkeypatch.setattr(paper, "EXPERIMENTS", {"tiny": TINY, "other": other})
    told = ["reproduce", "--all", "--small", "--out", str(tmp_path), "--only"]
    for plan in ([], ["--plan"]):
        found = CliRunner().invoke(fmol, [*told, "mine", *plan])
        assert found.exit_code == 0, found.output
        missed = CliRunner().invoke(fmol, [*told, "nobodys", *plan])
        assert missed.exit_code == 2
        assert "no experiment whose data are found has a run with 'nobodys'" in missed.stderr
    assert not (tmp_path / "tiny-small").exists()
    assert [path.name for path in (tmp_path / "other-small" / "runs").iterdir()] == ["mine"]


def test_the_command_knows_what_a_misspelt_experiment_was_meant_to_be() -> None:
    found = CliRunner().invoke(fmol, ["reproduce", "heterogenity"])
    assert found.exit_code == 2
    assert "no experiment `heterogenity`. Did you mean `heterogeneity`?" in found.output


def test_who_stops_reading_a_plan_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    told = [sys.executable, "-m", "fmol", "reproduce", "--list"]
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(told, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr


# ---- many runs at a time -----------------------------------------------------------------------


def _told(trial: str, seed: int = 0, **options: Any) -> Trial:
    """A short run on quadratics whose clients differ, with batches."""
    algorithm = {"name": "fsmgda", "local_steps": 3, "batch_size": 4, "local_lr": 0.05}
    return Trial(
        trial,
        {
            "rounds": 8,
            "seed": seed,
            "problem": {"name": "quadratic", "heterogeneity": 0.5, "noise": 0.5, "seed": seed},
            "algorithm": {**algorithm, "server_lr": 0.3, **options},
        },
    )


MIXED = [
    _told("plain"),
    _told("other seed", seed=1),
    _told("other step", local_lr=0.02, server_lr=0.1),
    _told("other K", local_steps=5),
    _told("loss", seed=2, normalize="loss"),
    _told("momentum", server_step={"name": "momentum", "beta": 0.5}, extrapolate=True),
    _told("fedavg", seed=1, name="fedavg"),
    _told("scaffold", drift_correction="scaffold"),
    _told("scaffold of another seed", seed=2, drift_correction="scaffold", accumulate="mean"),
]


def _of(*trials: Trial, tables: Sequence[Table] = (Table("", (), {}),)) -> Experiment:
    outcome = Outcome(tables)
    return Experiment("mixed", "", "", (lambda size, done: trials,), lambda *_: outcome)


def _losses(record: RunRecord) -> list[float]:
    return losses_over_rounds(record, "f1") + losses_over_rounds(record, "f2")


@pytest.mark.parametrize("block", [None, 4, 16])
def test_runs_side_by_side_are_what_each_is_by_itself(
    block: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they differ in: seed and data, method, step sizes, K, what stays at the clients. So it
    is in blocks of lanes, as on a GPU."""
    if block is not None:
        monkeypatch.setattr(stepper, "BLOCK", block)
        monkeypatch.setattr(stepper, "BLOCK_ON", ("cpu",))
    many, one = (
        reproduce(_of(*MIXED), tmp_path / engine, engine=engine, device="cpu").records
        for engine in ("vectorized", "sequential")
    )
    for name in one:
        assert _losses(many[name]) == pytest.approx(_losses(one[name]), rel=1e-9), name
    # Quadratics of another seed have other losses, so that these are of the same seed.
    notes = {note for report in many["plain"].reports for note in report.notes}
    assert "lanes were stepped side by side with those of 2 other runs" in notes
    assert not any("one by one" in note for note in notes)


@pytest.mark.parametrize("block", [None, 64])
def test_networks_of_other_seeds_and_partitions_are_stepped_together(
    block: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the small digits: its own data, first parameters and batches for each."""
    if block is not None:
        monkeypatch.setattr(stepper, "BLOCK", block)
        monkeypatch.setattr(stepper, "BLOCK_ON", ("cpu",))
    told = {"local_steps": 2, "batch_size": 16, "local_lr": 0.1, "server_lr": 0.1}
    trials = [
        Trial(
            f"{partition}-{seed}",
            {
                "rounds": 3,
                "seed": seed,
                "problem": {"name": "multidigits", "partition": partition, "seed": seed},
                "algorithm": {"name": "fsmgda", **told},
            },
        )
        for partition in ("iid", "left-shards")
        for seed in (0, 1)
    ]
    many = reproduce(_of(*trials), tmp_path / "many", engine="vectorized", device="cpu").records
    for trial in trials:
        one = reproduce(_of(trial), tmp_path / trial.name, engine="vectorized", device="cpu")
        for task in ("left", "right"):
            alone = losses_over_rounds(one.records[trial.name], task)
            assert losses_over_rounds(many[trial.name], task) == pytest.approx(alone, rel=1e-4)
    notes = {note for report in many["iid-0"].reports for note in report.notes}
    assert "lanes were stepped side by side with those of 3 other runs" in notes


def test_interrupted_all_runs_go_on_to_the_same_end(tmp_path: Path) -> None:
    """One of them as if it was killed while it wrote a line."""
    trials = [replace(trial, hopeful=True) for trial in MIXED]
    whole = reproduce(_of(*trials), tmp_path / "whole", device="cpu").records

    def interrupt(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StoppedError, match="the same command"):
        reproduce(_of(*trials), tmp_path / "broken", device="cpu", watch=lambda *_: [interrupt])
    folder = RunFolder(tmp_path / "broken" / "runs" / "plain")
    assert not folder.summary.is_file()
    assert folder.metrics.stat().st_size
    with folder.metrics.open("a") as log:
        log.write('{"kind": "rou')
    again = reproduce(_of(*trials), tmp_path / "broken", device="cpu").records
    for name in whole:
        assert _losses(again[name]) == pytest.approx(_losses(whole[name]), rel=1e-12), name


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_a_race_ends_when_one_is_there(engine: str, tmp_path: Path) -> None:
    fast, slow = (
        Trial(
            name,
            {**_told(name, server_lr=lr, local_lr=0.1, batch_size=64).tables, "stop_at": 0.2501}
            | {"rounds": 200},
            race="tuning",
        )
        for name, lr in (("fast", 0.3), ("slow", 0.001))
    )
    records = reproduce(_of(fast, slow), tmp_path, engine=engine, device="cpu").records
    took = len(records["fast"].reports)
    assert 1 < took < 100
    assert took < len(records["slow"].reports) <= took + 2
    assert rounds_until(records["slow"], "f1", 0.2501) == math.inf
    # One that comes later knows how fast the others were.
    third = Trial("third", {**slow.tables, "seed": 3}, race="tuning")
    found = reproduce(_of(fast, slow, third), tmp_path, engine=engine, device="cpu").records
    assert len(found["third"].reports) == took + 1


def test_runs_without_hope_are_given_up_and_those_that_fail_are_not_tried_again(
    tmp_path: Path,
) -> None:
    trials = [
        Trial(
            "lost", {**_told("", server_lr=1.2, local_lr=0.01).tables, "rounds": 60}, hopeful=True
        ),
        Trial("broken", {**_told("", server_lr=1e30, local_lr=1e30).tables, "rounds": 60}),
        _told("good"),
    ]
    said: list[str] = []
    found = reproduce(_of(*trials), tmp_path, device="cpu", say=said.append).records
    assert len(found["lost"].reports) < 60
    assert "stopped" in found["lost"].stopped
    assert found["broken"].final is None
    assert final_loss(found["broken"], "f1") == math.inf
    assert (tmp_path / "runs" / "broken" / FAILED).is_file()
    assert len([text for text in said if "broken failed" in text]) == 1
    said.clear()
    again = reproduce(_of(*trials), tmp_path, device="cpu", say=said.append).records
    assert said == []
    assert again.keys() == found.keys()
    assert len(found["good"].reports) == 8


def test_some_runs_alone_are_run_where_they_are_named(tmp_path: Path) -> None:
    found = reproduce(_of(*MIXED), tmp_path, device="cpu", only=["scaffold", "o*er seed"])
    assert sorted(found.records) == ["other seed", "scaffold", "scaffold of another seed"]
    with pytest.raises(RunError, match=r"no run of mixed has 'scafold' in its name.*plain"):
        reproduce(_of(*MIXED), tmp_path, device="cpu", only=["scafold"])
    assert set(found.lacking) == {trial.name for trial in MIXED} - found.records.keys()
    with pytest.raises(RunError, match="3 of 9 runs"):
        reproduce(_of(*MIXED, tables=()), tmp_path, device="cpu", only=["scaffold"])


def test_what_has_all_of_its_runs_is_told_and_what_has_not_is_said_to_be_left_out(
    tmp_path: Path,
) -> None:
    told = ["reproduce", "conflict", "--small", "--out", str(tmp_path), "--only", "quadratic"]
    found = CliRunner().invoke(fmol, told)
    assert found.exit_code == 0, found.output
    gap = "From 30 of 50 runs; tables and claims that need the others are left out."
    assert gap in found.output
    written = json.loads((tmp_path / "conflict-small" / RESULTS).read_text())
    assert len(written["lacking"]) == 20
    assert [table["title"] for table in written["tables"]] == [
        "quadratic, hypervolume by angle and scales",
        *(title for title, _ in conflict.BOWLS.values()),
    ]
    assert [claim["holds"] for claim in written["claims"]] == [True]
    assert gap in (tmp_path / "conflict-small" / REPORT).read_text()


def test_runs_that_wait_for_what_is_tuned_are_counted_as_lacking(tmp_path: Path) -> None:
    def tuned(size: Size, done: Records | None) -> list[Trial]:
        return [] if done is not None and "b" not in done else [_told("c"), _told("d")]

    table = Table("", (), {})
    experiment = Experiment(
        "tuned",
        "",
        "",
        (lambda size, done: [_told("a"), _told("b")], tuned),
        lambda *_: Outcome([table]),
    )
    found = reproduce(experiment, tmp_path, device="cpu", only=["a"])
    assert found.lacking == ("b",)
    assert found.gap.startswith("From 1 of 4 runs")
    found = reproduce(experiment, tmp_path, device="cpu", only=["b"])
    assert found.gap.startswith("From 2 of 4 runs")
    assert reproduce(experiment, tmp_path, device="cpu").gap == ""


def test_no_experiment_concludes_from_runs_that_are_not_there() -> None:
    """Nor does it fall over one that is there alone."""
    for name, experiment in EXPERIMENTS.items():
        for stage in experiment.stages:
            size = Size(small=True, seeds=1)
            first = stage(size, None)[0].name
            fine = _curve(*([[2.3 * 0.95**t for t in range(40)]] * 2))
            found = experiment.conclude(size, {first: fine}, Place(Path(), print))
            assert not found.claims, name


def test_a_plan_counts_runs_rounds_and_steps_of_lanes() -> None:
    parts = plan_runs(_of(*MIXED), Size(True, 1))
    assert sum(part.runs for part in parts) == 9
    three, five = parts
    # Ten clients with two objectives each, but for FedAvg, which has one lane a client.
    assert (three.lanes, three.lane_steps) == (7 * 20 + 10, 8 * 3 * (7 * 20 + 10))
    assert (five.rounds, five.lane_steps) == (8, 8 * 5 * 20)
    assert [part.runs for part in plan_runs(_of(*MIXED), Size(True, 1), ["scaffold"])] == [2]


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


def test_what_was_never_reached_and_what_was_not_measured_are_told_apart(tmp_path: Path) -> None:
    cells = [Cell((3.0, math.inf)), Cell((math.nan, 2.0)), Cell((math.inf,), infinite="diverged")]
    table = Table("rounds", ("a", "b", "c"), {"row": cells})
    panel = Panel("a", "x", "y", [Line("b", [0, 1], [[1.0, math.inf], [math.nan, 1.0]])])
    shown = Experiment("shown", "", "", (), lambda *_: Outcome([table], panels=[panel]), seeds=2)
    reproduce(shown, tmp_path)
    written = json.loads((tmp_path / RESULTS).read_text())
    assert written["seeds"] == [0, 1]
    found = written["tables"][0]["rows"]["row"]
    assert [cell["values"] for cell in found] == [[3.0, "never"], [None, 2.0], ["diverged"]]
    assert [cell["mean"] for cell in found] == ["never", None, "diverged"]
    assert [cell["half_width"] for cell in found] == [None] * 3
    reached = [(cell.get("reached"), cell.get("mean_of_reached")) for cell in found]
    assert reached == [(1, 3.0), (1, 2.0), (None, None)]
    assert written["panels"][0]["lines"][0]["y"] == [[1.0, "infinite"], [None, 1.0]]


def test_a_larger_local_step_is_claimed_faster_only_where_each_is() -> None:
    size, experiment = Size(small=True, seeds=1), EXPERIMENTS["step-size"]
    slow, fast, faster = (
        _curve(*([[2.3 * fall**t for t in range(9)]] * 2)) for fall in (0.9, 0.8, 0.7)
    )
    for last, verdicts in ((faster, ["holds"] * 2), (slow, ["not reproduced", "not reproduced"])):
        by_step = {0.01: slow, 0.05: fast, 0.1: last}
        records = {
            trial.name: by_step[trial.tables["algorithm"]["local_lr"]]
            for trial in experiment.stages[0](size, None)
        }
        found = experiment.conclude(size, records, Place(Path(), print))
        assert [claim.verdict for claim in found.claims] == verdicts
        assert "so in" in found.claims[0].evidence


@pytest.mark.parametrize(("charts", "lost"), [(1, False), (6, True)])
def test_a_dot_is_drawn_for_each_thing_and_what_is_infinite_is_counted(
    charts: int, lost: bool, tmp_path: Path
) -> None:
    things = {f"client {i}: f1": [0.5 + i / 10, math.nan] for i in range(20)}
    if lost:
        things["client 99: f1"] = [math.inf, 1.0]
    dots = [Dots(f"chart {i}", "beside alone", {"FSMGDA": things}) for i in range(charts)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_charts(tmp_path, Outcome(dots=dots))
    assert [file.name for file in files] == ["dots.png", "dots.svg"]
    drawn = files[1].read_text()
    assert all(words in drawn for words in ("better", "worse", "median", "beside alone"))
    assert ("(1 infinite)" in drawn) is lost


def test_digits_in_conflict_are_told_with_the_numbers_of_every_method() -> None:
    rates = {"FSMGDA": 63.0, "FSMGDA, UPGrad": 4.0, "FedAvg": math.nan}
    lost = {name: float(i) for i, name in enumerate((*conflict.BOWLS, "digits"))}
    claims = conflict._claims({"digits": rates, "adult": rates, "shoppers": rates}, lost)
    digits_claim = claims[1]
    assert digits_claim.verdict == "does not hold"
    assert "FSMGDA 63 %, FSMGDA, UPGrad 4 %;" in digits_claim.evidence
    assert "less than 5 %" in digits_claim.text


@pytest.mark.parametrize(
    ("given_up", "share"),
    [((0.0, 0.0), 1.0), ((0.5, 0.5), 0.25), ((0.5, -0.5), 0.5), ((2.0, -0.5), 0.0)],
)
def test_hypervolume_is_a_share_of_the_box_whatever_is_gained_outside_of_it(
    given_up: tuple[float, float], share: float
) -> None:
    assert conflict._volume(dict(zip("ab", given_up, strict=True))) == share


@pytest.mark.parametrize("objectives", [8, 40])
def test_radar_charts_are_drawn_for_few_and_many_objectives(
    objectives: int, tmp_path: Path
) -> None:
    names = tuple(f"Attribute_{i}" for i in range(objectives))
    rings = {
        f"K = {k}, batches of 256 samples": [1 / (k + i) for i in range(objectives)]
        for k in (1, 5, 10, 20)
    }
    radars = [Radar("normalised loss", names, rings)] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # As where a legend leaves no room for the chart.
        files = write_charts(tmp_path, Outcome(radars=radars))
    assert [file.name for file in files] == ["radar.png", "radar.svg"]
    drawn = files[1].read_text()
    assert all(f"Attribute {i}" in drawn for i in range(objectives))


@pytest.mark.parametrize("methods", [1, 6])
def test_panels_in_which_nobody_got_there_are_drawn_without_names(
    methods: int, tmp_path: Path
) -> None:
    lines = [Line(f"method {i}", [20], [[math.inf], [9]]) for i in range(methods)]
    panels = [Panel(title, "K", "rounds", lines) for title in ("one", "two")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # As where a legend has nothing to name.
        files = write_charts(tmp_path, Outcome(panels=panels))
    assert "method 0" not in files[1].read_text()


def test_the_names_of_many_lines_stand_once_below_all_panels(tmp_path: Path) -> None:
    """And what never got there leaves a gap."""
    lines = [Line(f"method {i}", [1, 5, 20], [[9, 5 + i, math.inf], [8, 4, 3]]) for i in range(6)]
    panels = [Panel(title, "K", "rounds", lines) for title in ("one", "two", "three")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = write_charts(tmp_path, Outcome(panels=panels))
    drawn = files[1].read_text()
    assert [drawn.count(f">method {i}<") for i in range(6)] == [1] * 6


def test_rounds_against_k_are_drawn_beside_the_papers() -> None:
    rounds = {
        1: {"plain": [80.0, 90.0], "FedLS": [60.0, 70.0]},
        20: {"FedLS": [5.0, 6.0], "l2": [30.0, 30.0]},
    }
    panel = local_steps._panel(Size(small=False, seeds=2), "iid", rounds)
    assert [(line.label, list(line.x), list(line.y)) for line in panel.lines] == [
        ("FSMGDA", [1], [[80.0], [90.0]]),
        ("FedLS", [1, 20], [[60.0, 5.0], [70.0, 6.0]]),
        ("the paper", [1, 20], [[84, 5]]),
    ]
    assert local_steps._panel(Size(small=True, seeds=2), "iid", rounds).lines[-1].label == "FedLS"


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


def test_some_runs_may_be_run_by_themselves_and_that_is_no_error(tmp_path: Path) -> None:
    told = ["reproduce", "local-updates", "--small", "--seeds", "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(fmol, [*told, "--only", "k1-"])
    assert found.exit_code == 0, found.output
    assert (
        "no table of local-updates has all of its runs. Go on with the same command without `--only`"
        in found.output
    )
    assert not (tmp_path / "local-updates").exists()
    assert list((tmp_path / "local-updates-small" / "runs").iterdir())


def test_the_command_lists_experiments_and_asks_for_one() -> None:
    listed = CliRunner().invoke(fmol, ["reproduce", "--list"])
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    rows = {line.split()[0]: line for line in lines[1 : len(EXPERIMENTS) + 1]}
    assert rows.keys() == EXPERIMENTS.keys()
    assert rows["step-size"].endswith(" multimnist")
    assert "shoppers*, adult*" in rows["conflict"]
    assert all("estimated" in row or "timed" in row or " min" in row for row in rows.values())
    assert max(map(len, lines)) <= 124
    # What several experiments have in common is said once.
    assert " ".join(listed.output.split()).count(digits.READING) == 1
    asked = CliRunner().invoke(fmol, ["reproduce"])
    assert asked.exit_code == 2
    assert "name one experiment, or give --all" in asked.output


def test_methods_choose_from_as_many_steps_that_are_as_long_for_each_objective() -> None:
    size = Size(small=False, seeds=5)
    choices = {name: local_steps._choices(size, name) for name in local_steps.METHODS}
    assert {len(each) for each in choices.values()} == {5}
    plain = choices["plain"]
    # Adam's η_t is no factor on an update.
    adam = choices.pop("Adam")
    assert {local for local, _ in adam} == {local for local, _ in plain}
    for name in choices:
        told = local_steps.METHODS[name]
        momentum = float(told.get("local_momentum", 0.0))
        share = 0.5 if told["name"] in ("fedavg", "fedls", "fedals") else 1.0
        longer = 2.0 if momentum else 1.0  # Ten steps in one, a fifth as long each.
        own = [(share / (1 - momentum) * a, share / (1 - momentum) * b) for a, b in choices[name]]
        assert own == [pytest.approx((longer * a, longer * b)) for a, b in plain], name


def _curve(left: list[float], right: list[float]) -> RunRecord:
    """A run with these losses at `x_0, x_1, …`; nothing else of it is looked at."""
    record: Any = SimpleNamespace(
        reports=[
            SimpleNamespace(
                losses={"left": a, "right": b}, held_out={}, weights={}, delta_norms={}, spread={}
            )
            for a, b in zip(left[:-1], right[:-1], strict=True)
        ],
        final=SimpleNamespace(
            round=len(left) - 1, losses={"left": left[-1], "right": right[-1]}, held_out={}
        ),
    )
    return record  # type: ignore[no-any-return]


def test_both_tasks_are_there_when_they_are_so_at_once() -> None:
    run = _curve([1.0, 0.005, 0.02, 0.01], [1.0, 0.5, 0.005, 0.01])
    assert [rounds_until(run, task, 0.01) for task in ("left", "right")] == [1, 2]
    assert rounds_until_all(run, ["left", "right"], 0.01) == 3
    assert rounds_until_all(run, ["left", "right"], 0.001) == math.inf


@pytest.mark.parametrize(("later", "verdict"), [(0.05, "holds"), (0.5, "not reproduced")])
def test_local_steps_say_when_both_are_there_and_which_k_they_compare(
    later: float, verdict: str
) -> None:
    size = Size(small=True, seeds=1)
    first, second = local_steps.LOCAL_STEPS.stages
    trials = [trial for trial in first(size, None) if "-plain-" in trial.name]
    slow, fast = (
        _curve([2.3, 0.5, 0.05, 0.05], [2.3, 0.05, 0.5, 0.05]),
        _curve([2.3, later], [2.3, 0.05]),
    )
    tuned = {trial.name: slow if "-k1-" in trial.name else fast for trial in trials}
    trials = [trial for trial in second(size, tuned) if "-plain-" in trial.name]
    runs = tuned | {trial.name: slow if "-k1-" in trial.name else fast for trial in trials}
    found = local_steps.LOCAL_STEPS.conclude(size, runs, Place(Path(), print))
    (row,) = found.tables[0].rows.values()
    told = dict(zip(found.tables[0].columns, map(str, row), strict=True))
    assert [told[column] for column in ("L", "R", "both")] == ["2", "1", "3"]
    (claim,) = found.claims
    assert claim.text == "FSMGDA needs fewer rounds with K = 5 than with K = 1 (i.i.d.)"
    assert claim.verdict == verdict


def test_steps_whose_run_was_given_up_are_not_chosen() -> None:
    size, k = Size(small=False, seeds=5), 20
    steady = _curve(*([[2.3 * 0.88**t for t in range(21)]] * 2))
    wild = _curve([2.3, 4.0, *[6.0] * 6], [2.3, 0.3, 0.05, 0.02, 0.005, 0.003, 0.002, 0.001])
    assert local_steps._reached(size, steady, k) < local_steps._reached(size, wild, k)


@pytest.mark.parametrize(("last", "holds"), [(0.2, True), (0.31, False), (0.09, False)])
def test_federated_and_centralised_pairs_are_drawn_over_k_and_judged_plainly(
    last: float, holds: bool
) -> None:
    """Beside centralised losses of 0.1 both claims hold up to twice as much, or three times."""
    ends = {"fmgda": last / 1.5, "mgd": 0.1, "fsmgda": last, "smgd": 0.1}
    records = {
        name: record
        for partition in digits.PARTITIONS
        for kind, end in ends.items()
        for name, record in _beside_centralised(partition, kind, end).items()
    }
    found = EXPERIMENTS["centralised"].conclude(Size(True, 1), records, Place(Path(), print))
    for claim, words in (
        (found.claims[1], "i.i.d."),
        (found.claims[3], "two left labels a client"),
    ):
        assert claim.text.startswith(f"FSMGDA ends slightly worse than SMGD, {words} (")
        assert claim.verdict == ("holds" if holds else "not reproduced")
        assert f"K = 5: {last / 0.1:.3g}" in claim.evidence
    assert [panel.title for panel in found.panels] == [
        f"{pair}, {words}, task {task}"
        for words in ("i.i.d.", "two left labels a client")
        for pair in ("FMGDA and MGD", "FSMGDA and SMGD")
        for task in ("L", "R")
    ]
    for line in found.panels[2].lines:
        end = ends[line.label.lower()]
        assert line.x == (1, 5)
        assert line.y == [[end, end] if line.label == "FSMGDA" else [1.5, end]]


def _beside_centralised(partition: str, kind: str, end: float) -> dict[str, RunRecord]:
    """Runs of one algorithm in small, with these losses in the end: 40 rounds for K = 1 and K = 5, or
    one of 200 whose losses were 1.5 after the first 40."""
    if kind in ("mgd", "smgd"):
        losses = [2.3] * 40 + [1.5] * 160 + [end]
        return {named(partition, kind, seed=0): _curve(losses, losses)}
    losses = [2.3] * 40 + [end]
    return {named(partition, kind, f"k{k}", seed=0): _curve(losses, losses) for k in (1, 5)}


def test_a_centralised_run_that_fails_still_stands_beside_the_steps_that_it_got_to() -> None:
    records = _beside_centralised("iid", "fmgda", 0.1) | _beside_centralised("iid", "mgd", 0.1)
    records[named("iid", "mgd", seed=0)].final = None  # type: ignore[misc]
    found = EXPERIMENTS["centralised"].conclude(Size(True, 1), records, Place(Path(), print))
    assert [str(table.rows["MGD"][0]) for table in found.tables] == ["1.5", "diverged"]
    assert [claim.holds for claim in found.claims] == [False]


def test_one_pair_of_federated_and_centralised_is_judged_without_the_other() -> None:
    records = _beside_centralised("iid", "fmgda", 0.1) | _beside_centralised("iid", "mgd", 0.1)
    name = named("iid", "fsmgda", "k5", seed=0)
    records[name] = _beside_centralised("iid", "fsmgda", 0.1)[name]
    found = EXPERIMENTS["centralised"].conclude(Size(True, 1), records, Place(Path(), print))
    assert [claim.text[:5] for claim in found.claims] == ["FMGDA"]
    assert [list(table.rows) for table in found.tables] == [
        ["FMGDA", "MGD"],
        ["FMGDA", "MGD", "FSMGDA"],
    ]


def test_a_run_that_failed_does_not_converge() -> None:
    fine = _curve(*([[2.3 * 0.95**t for t in range(40)]] * 2))
    failed = _curve([2.3, 0.9], [2.3, 0.9])
    failed.final = None  # type: ignore[misc]
    records = {
        named(partition, f"m{count}", seed=0): failed if count == 30 else fine
        for partition in ("iid", "left-shards")
        for count in (5, 10, 30)
    }
    place = Place(Path(), print)
    claims = CLIENTS.conclude(Size(small=True, seeds=1), records, place).claims
    assert [claim.holds for claim in claims] == [False] * len(claims)


def _clients(falls: Sequence[float]) -> dict[str, RunRecord]:
    """Runs with 5, 10 and 30 clients whose losses fall so fast, the same in all partitions."""
    return {
        named(partition, f"m{count}", seed=0): _curve(*([[2.3 * fall**t for t in range(40)]] * 2))
        for partition in ("iid", "left-shards")
        for count, fall in zip((5, 10, 30), falls, strict=True)
    }


@pytest.mark.parametrize(
    ("falls", "faster"),
    [((0.95, 0.94, 0.93), True), ((0.95, 0.93, 0.94), False), ((0.93, 0.94, 0.95), False)],
)
def test_more_clients_are_faster_where_each_number_is_faster_than_the_one_before(
    falls: Sequence[float], faster: bool
) -> None:
    found = CLIENTS.conclude(Size(small=True, seeds=1), _clients(falls), Place(Path(), print))
    held = {claim.text: claim.verdict for claim in found.claims}
    whose = {claim.text: claim.whose for claim in found.claims}
    for words in ("i.i.d.", "two left labels a client"):
        verdict = held[f"FSMGDA converges faster the more clients there are ({words})"]
        assert whose[f"FSMGDA converges with 5, 10 and 30 clients ({words})"] == "ours"
        assert verdict == ("holds" if faster else "not reproduced")
        assert held[f"FSMGDA converges with 5, 10 and 30 clients ({words})"] == "holds"


def test_who_gains_is_told_although_a_run_failed() -> None:
    standing = SimpleNamespace(client="a", objective="o", loss=1.0, held_out={"loss": 1.0})
    fine: Any = SimpleNamespace(final=SimpleNamespace(clients=[standing]))
    failed: Any = SimpleNamespace(final=None)
    records = {
        named(problem, kind, method, seed=0): failed if method == "fsmgda" else fine
        for problem in heterogeneity.PROBLEMS
        for kind in heterogeneity.KINDS
        for method in heterogeneity.METHODS
    }
    place = Place(Path(), print)
    found = heterogeneity.HETEROGENEITY.conclude(Size(small=True, seeds=1), records, place)
    assert not any(claim.holds for claim in found.claims)
    assert all(str(table.rows["FSMGDA"][2]) == "diverged" for table in found.tables)


def test_beside_clients_alone_that_failed_nothing_is_said_of_who_gains() -> None:
    standing = SimpleNamespace(client="a", objective="o", loss=1.0, held_out={"loss": 1.0})
    fine: Any = SimpleNamespace(final=SimpleNamespace(clients=[standing]))
    failed: Any = SimpleNamespace(final=None)
    records = {
        named(problem, kind, method, seed=0): failed if method == "alone" else fine
        for problem in heterogeneity.PROBLEMS
        for kind in heterogeneity.KINDS
        for method in heterogeneity.METHODS
    }
    place = Place(Path(), print)
    found = heterogeneity.HETEROGENEITY.conclude(Size(small=True, seeds=1), records, place)
    assert found.claims == []
    for table in found.tables:
        assert [str(cell) for cell in table.rows["FSMGDA"]] == ["1", "1", "–", "–", "–"]
        assert str(table.rows["alone"][0]) == "diverged"


def _failed(rounds: int, losses: dict[str, float]) -> RunRecord:
    """A run that ended with an error after so many rounds."""
    nothing: Any = {"held_out": {}, "weights": {}, "delta_norms": {}, "spread": {}}
    record: Any = SimpleNamespace(
        reports=[SimpleNamespace(losses=losses, **nothing)] * rounds, final=None
    )
    return record  # type: ignore[no-any-return]


def _there(losses: dict[str, float]) -> RunRecord:
    """A run whose first and only round left these losses."""
    record: Any = _failed(1, dict.fromkeys(losses, 2.0))
    record.final = SimpleNamespace(round=1, losses=losses, held_out={})
    return record  # type: ignore[no-any-return]


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize(("name", "tasks"), [("river-flow", SITES), ("celeba", celeba.FEW)])
def test_losses_of_runs_that_failed_are_said_to_have_diverged(
    name: str, tasks: Sequence[str], rounds: int
) -> None:
    """Even of one that failed before its first round, whose first loss is not known."""
    size = Size(small=True, seeds=1)
    experiment = EXPERIMENTS[name]
    names = [trial.name for trial in experiment.stages[0](size, None)]
    records = dict.fromkeys(names, _there(dict.fromkeys(tasks, 0.5)))
    records[names[0]] = _failed(rounds, dict.fromkeys(tasks, 2.0))
    found = experiment.conclude(size, records, Place(Path(), print))
    first, second, *_ = found.tables[0].rows.values()
    assert [str(first[0]), str(second[0])] == (
        ["diverged", "0.5"] if name == "river-flow" else ["2" if rounds else "–", "2"]
    )
    assert "diverged" in [str(cell) for cell in first]
    assert "never" not in str([str(cell) for cell in first])
    assert "diverged" in found.claims[0].evidence
    if name == "river-flow":
        titles = [radar.title for radar in found.radars]
        assert "K varied, batch 256 (sum);\ndiverged: K = 1, batch 256" in titles[0]
        assert not any("diverged" in title for title in titles[1:])


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize(("lost", "cell"), [("fsmgda", "diverged"), ("f1-alone", "–")])
def test_what_is_given_up_is_told_beside_what_did_not_fail(
    lost: str, cell: str, rounds: int
) -> None:
    size = Size(small=True, seeds=1)
    experiment = EXPERIMENTS["conflict"]
    records = {
        trial.name: _failed(rounds, {"f1": 2.0, "f2": 2.0})
        if f"-{lost}-seed" in trial.name
        else _there({"f1": 0.5, "f2": 0.5})
        for trial in experiment.stages[0](size, None)
        if trial.name.startswith("quadratic")
    }
    found = experiment.conclude(size, records, Place(Path(), print))
    table = found.tables[1]
    assert str(table.rows["FSMGDA"][1]) == cell
    assert str(table.rows["FSMGDA"][3]) == ("0" if lost == "fsmgda" else "–")
    assert str(table.rows["FedAvg"][3]) == ("1" if lost == "fsmgda" else "–")
    assert len(found.claims) == (lost == "fsmgda")


def test_losses_of_digits_whose_run_failed_are_said_to_have_diverged() -> None:
    records = {"a-seed0": _failed(1, {"left": 2.0, "right": 2.0})}
    table = digits.ends(records, Size(small=True, seeds=1), "", {"A": ("a",)})
    assert [str(cell) for cell in table.rows["A"]] == ["diverged"] * 2 + ["–"] * 2


def test_what_weights_go_by_is_told_of_all_but_the_first_rounds() -> None:
    def report(weight: float, spread: dict[str, float]) -> Any:
        return SimpleNamespace(
            weights={"left": weight, "right": 1 - weight},
            delta_norms={"left": 2 * weight, "right": 3.0},
            spread=spread,
        )

    early, late = report(0.1, {"left": 99.0}), [report(w, {"left": 5.0}) for w in (0.7, 0.9, 0.8)]
    records: Any = {
        "a-seed0": SimpleNamespace(reports=[early, late[0], late[1], late[2]]),
        "a-seed1": SimpleNamespace(reports=[early, *late[:1] * 3]),
    }
    table = digits.weighing(records, Size(small=True, seeds=2), "here", {"A": ("a",)})
    assert table.title == "here: what weights go by"
    found = dict(zip(table.columns, table.rows["A"], strict=True))
    assert found["λ L"].values == (0.8, 0.7)
    assert found["‖Δ‖ L"].values == (1.6, 1.4)
    assert found["‖Δ‖ R"].values == (3.0, 3.0)
    assert found["ρ L"].values == (5.0, 5.0)
    assert str(found["ρ R"]) == "–"


def test_fewer_rounds_are_claimed_only_where_they_are_so_in_every_seed() -> None:
    slow = dict.fromkeys(local_steps.BASELINES, [40.0] * 5)

    def claimed(fedls: list[float], **others: list[float]) -> bool:
        rounds = {**slow, "FedLS": fedls, **others}
        (claim,) = local_steps._fewer(rounds, 0.01, 20, "iid", 40)
        return claim.holds

    assert claimed([5, 6, 7, 8, 8])
    assert not claimed([5, 6, 7, 8, 9])
    assert not claimed([5, 6, 7, 8, math.inf])
    assert claimed([8] * 5, FedAvg=[math.inf] * 5)
    assert not claimed([8] * 5, FedAvg=[8, 8, 8, 8, math.inf])
    assert local_steps._fewer({"FedLS": [5.0] * 5}, 0.01, 20, "iid", 40) == []


def test_more_local_steps_need_fewer_rounds(tmp_path: Path) -> None:
    found = reproduce(EXPERIMENTS["local-updates"], tmp_path, small=True, seeds=1, device="cpu")
    held = {claim.text: claim.holds for claim in found.outcome.claims}
    text = "FSMGDA needs fewer rounds the more local steps it takes"
    assert held == {f"{text} (i.i.d.)": True, f"{text} (two left labels a client)": True}
    titles = [panel.title for panel in found.outcome.panels]
    assert titles[0] == "FSMGDA, i.i.d., task L"
    assert titles[-1] == "FSMGDA, two left labels a client, task R"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "held"),
    [
        (
            "batch",
            [
                f"FSMGDA converges faster with batches of 256 than of 16 ({words})"
                for words in ("i.i.d.", "two left labels a client")
            ],
        ),
        (
            "centralised",
            [
                f"FMGDA and MGD end near one another, {words} "
                "(its loss is 0.5 to 2 times MGD's, for every K above 1)"
                for words in ("i.i.d.", "two left labels a client")
            ],
        ),
        (
            "clients",
            [
                "FSMGDA converges with 5, 10 and 30 clients (i.i.d.)",
                "FSMGDA converges faster the more clients there are (i.i.d.)",
            ],
        ),
        ("local-steps", ["FSMGDA needs fewer rounds with K = 5 than with K = 1 (i.i.d.)"]),
    ],
)
def test_claims_of_the_paper_that_hold_in_small(name: str, held: list[str], tmp_path: Path) -> None:
    found = reproduce(EXPERIMENTS[name], tmp_path, small=True, device="cpu")
    holding = {claim.text for claim in found.outcome.claims if claim.holds}
    assert set(held) <= holding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["river-flow", "celeba", "heterogeneity", "conflict"])
def test_experiments_with_data_of_their_own_come_to_an_end_in_small(
    name: str, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS[name]
    data_dir = str(DATA) if DATA.is_dir() else None
    lacking = missing_data(experiment, small=True, data_dir=data_dir)
    if lacking:
        pytest.skip(
            f"the data of {', '.join(lacking)} are not in ../shared/data, nor in `FMOL_DATA`"
        )
    found = reproduce(experiment, tmp_path, small=True, seeds=1, device="cpu", data_dir=data_dir)
    assert found.outcome.tables
    if name in ("celeba", "conflict"):
        assert all(claim.holds for claim in found.outcome.claims)
