"""Table 1 measured: slopes as in theory, and below the bounds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fmol.cli.commands import fmol
from fmol.rates import CASES, RatesResult, measure_rates, rates_table, write_figure
from fmol.theory import fit_slope

LINEAR = "fmgda-strongly-convex"
TABLE = [name for name, case in CASES.items() if case.rate]


@pytest.fixture(scope="module")
def result() -> RatesResult:
    return measure_rates(small=True, seeds=2)


def test_the_small_version_has_the_four_entries_of_table_one(result: RatesResult) -> None:
    assert len(TABLE) == 4
    assert [case.name for case in result.cases] == TABLE


def test_fmgda_is_linear_on_strongly_convex_objectives(result: RatesResult) -> None:
    """log Δ_Q over T is a line that falls by at least μη/2 a round, 0.105 here."""
    expected = result.expected(LINEAR)
    assert expected == pytest.approx(math.log(1 - 0.5 * 0.4 / 2))
    assert result.slope(LINEAR).value == pytest.approx(expected, abs=0.01)
    means = [np.mean(values) for values in result.values(LINEAR).values()]
    falls = np.diff(np.log(means)) / 16
    assert falls == pytest.approx(np.full(3, expected), abs=0.02)


@pytest.mark.parametrize(
    ("case", "low", "high"),
    [
        ("fmgda-nonconvex", -1.05, -0.95),
        ("fsmgda-strongly-convex", -1.2, -0.9),
        ("fsmgda-nonconvex", -0.6, -0.4),
    ],
)
def test_sublinear_rates_have_the_slopes_of_table_one(
    result: RatesResult, case: str, low: float, high: float
) -> None:
    expected = result.expected(case)
    assert expected is not None
    assert low < expected < high
    assert low < result.slope(case).value < high


@pytest.mark.parametrize("case", TABLE)
def test_what_is_measured_is_below_the_theorems_bounds(result: RatesResult, case: str) -> None:
    for version in ("repaired", "printed"):
        margins = result.margins(case, version)
        assert sorted(margins) == sorted(CASES[case].small)
        assert min(margins.values()) > 1


def test_batches_grow_as_the_step_falls(result: RatesResult) -> None:
    """β = O(η): the batch times the step stays what it is, up to rounding up."""
    for case in ("fsmgda-strongly-convex", "fsmgda-nonconvex"):
        steps = [row[0].steps for row in result.of(case).values()]
        products = [(each.batch_size or 0) * each.server_lr for each in steps]
        assert steps[-1].batch_size is not None
        assert steps[0].batch_size is not None
        assert steps[-1].batch_size > steps[0].batch_size
        assert max(products) < 1.3 * min(products)


def test_the_best_weights_give_no_more_than_the_algorithms(result: RatesResult) -> None:
    for rows in (result.of("fsmgda-nonconvex"), result.of("fmgda-nonconvex")):
        for row in rows.values():
            assert all(each.beside["mean of ‖d*_t‖²"] <= each.value for each in row)


@pytest.mark.slow
def test_at_a_fixed_batch_the_papers_measure_stops_falling_and_stationarity_goes_on() -> None:
    measured = measure_rates(cases=["fsmgda-nonconvex", "fsmgda-nonconvex-fixed-batch"], seeds=3)
    growing = measured.slope("fsmgda-nonconvex").value
    fixed = measured.slope("fsmgda-nonconvex-fixed-batch").value
    best = measured.slope("fsmgda-nonconvex-fixed-batch", "mean of ‖d*_t‖²").value
    assert growing < -0.45
    assert fixed > growing + 0.08
    assert best < fixed - 0.05


# ---- slopes ------------------------------------------------------------------------------------


def test_intervals_hold_the_true_slope_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    rounds, held = [64, 128, 256, 512], 0
    for _ in range(400):
        values = {T: (3 / T * np.exp(0.3 * generator.standard_normal(5))).tolist() for T in rounds}
        held += -1.0 in fit_slope(values)
    assert 0.92 <= held / 400 <= 0.98


def test_a_slope_over_t_itself_is_that_of_an_exponential() -> None:
    values = {T: [5 * math.exp(-0.3 * T), math.exp(-0.3 * T)] for T in (10, 20, 30)}
    slope = fit_slope(values, "log-linear")
    assert slope.value == pytest.approx(-0.3)
    assert slope.half_width == pytest.approx(0, abs=1e-9)


def test_one_seed_says_nothing_on_its_uncertainty() -> None:
    slope = fit_slope({10: [1.0], 100: [0.1]})
    assert slope.value == pytest.approx(-1)
    assert math.isinf(slope.half_width)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({10: [1.0]}, "at least two numbers of rounds"),
        ({10: [1.0], 20: [1.0, 2.0]}, "one value per seed each"),
        ({10: [1.0, 1.0], 20: [1.0, -0.5]}, r"-0.5 at T = 20 \(entry 1\), which has no logarithm"),
        ({10: [1.0, math.nan], 20: [1.0, 0.5]}, "nan at T = 10"),
    ],
)
def test_what_has_no_slope_is_refused(values: dict[int, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_slope(values)


# ---- files, table, figure, command -------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    said: list[str] = []
    first = measure_rates(cases=[LINEAR], small=True, seeds=1, out=tmp_path, say=said.append)
    assert len(said) == 4
    assert "T = 16, seed 0" in said[0]
    again = measure_rates(cases=[LINEAR], small=True, seeds=1, out=tmp_path, say=said.append)
    assert len(said) == 4
    assert again == first
    content = json.loads((tmp_path / "points.json").read_text(encoding="utf-8"))
    assert content["slopes"][LINEAR]["measured"]["value"] == first.slope(LINEAR).value
    # Half of it gone, only that half is run; and it comes out the same.
    content["points"] = content["points"][:2]
    (tmp_path / "points.json").write_text(json.dumps(content), encoding="utf-8")
    once_more = measure_rates(cases=[LINEAR], small=True, seeds=1, out=tmp_path, say=said.append)
    assert len(said) == 6
    assert once_more == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"local_steps": 2', '"local_steps": 3', 1), "other settings"),
        (lambda text: text[:100], "is not what was written there"),
    ],
)
def test_results_of_other_settings_and_broken_ones_are_refused(
    tmp_path: Path, change: object, message: str
) -> None:
    measure_rates(cases=[LINEAR], small=True, seeds=1, out=tmp_path)
    path = tmp_path / "points.json"
    assert callable(change)
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        measure_rates(cases=[LINEAR], small=True, seeds=1, out=tmp_path)


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`cases` must be among .* got 'fedavg'"):
        measure_rates(cases=["fedavg"])


def test_the_table_has_a_line_per_entry_with_both_slopes(result: RatesResult) -> None:
    lines = rates_table(result)
    (line,) = (each for each in lines if each.startswith("FSMGDA, non-convex"))
    assert "O(1/√T)" in line
    assert "−0.500" in line
    assert f"−{-result.slope('fsmgda-nonconvex').value:.3f} ±" in line


def test_the_table_leaves_out_a_slope_that_there_is_not(result: RatesResult) -> None:
    """The last Δ_Q of a run may be negative: then it has no line, and the others stay."""
    last = "last Δ_Q"
    assert any(last in line for line in rates_table(result))
    points = [
        replace(p, measured=replace(p.measured, beside={last: -1.0}))
        if p.case == "fsmgda-strongly-convex"
        else p
        for p in result.points
    ]
    lines = rates_table(RatesResult(tuple(points)))
    assert not any(last in line for line in lines)
    assert len(lines) == len(rates_table(result)) - 1


def test_the_figure_says_what_it_shows_and_is_always_the_same(
    result: RatesResult, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `figures`")
    written = write_figure(tmp_path / "1", result)
    assert [path.name for path in written] == ["rates.png", "rates.svg"]
    again = write_figure(tmp_path / "2", result)
    assert [a.read_bytes() for a in written] == [b.read_bytes() for b in again]
    text = written[1].read_text(encoding="utf-8")
    for words in (
        "T (communication rounds)",
        "mean of ‖d̄_t‖² (gradient²)",
        "w_t-weighted mean of Δ_Q (loss)",
        "theory: -0.5",
        "bound, repaired",
        "FSMGDA, strongly convex: Õ(1/T)",
    ):
        assert words in text


def test_the_command_measures_says_how_far_it_is_and_writes_what_it_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `figures`")
    out = tmp_path / "deep" / "rates"
    line = ["rates", "--small", "--seeds", "1", "--case", LINEAR, "--out", str(out)]
    done = CliRunner().invoke(fmol, line, catch_exceptions=False)
    assert done.exit_code == 0
    assert "4/4  FMGDA, strongly convex: T = 64, seed 0" in done.stderr
    assert "FMGDA, strongly convex  O(exp(−μT))" in done.stdout
    assert {path.name for path in out.iterdir()} == {"points.json", "rates.png", "rates.svg"}
    quiet = CliRunner().invoke(fmol, [*line, "--quiet"], catch_exceptions=False)
    assert (quiet.stdout, quiet.stderr) == ("", "")
