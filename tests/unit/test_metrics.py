"""Means over clients, and everything a run measured as one long table."""

from __future__ import annotations

import builtins
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, Client, FedAvg, Federation, Objective, Result, fit, whole_set
from fmol.algorithms.descent import measure_angles
from fmol.engines.seam import ClientRecord, Refusal
from fmol.metrics import Row, conflict, conflict_rate, mean_held_out, mean_losses, rows
from fmol.participation import Number
from fmol.problems.quadratic import Quadratic
from fmol.rounds import RoundReport
from support import Net, data, masked_error, squared_error

NAN = float("nan")


def record(
    client: str,
    objective: str = "a",
    loss: float = 1.0,
    samples: int = 1,
    held_out: Mapping[str, float] | None = None,
    **more: Any,
) -> ClientRecord:
    fixed: dict[str, Any] = {"delta_norm": NAN, "seconds": 0.5, "bytes_up": 8, "bytes_down": 16}
    return ClientRecord(
        client=client,
        objective=objective,
        loss=loss,
        samples=samples,
        held_out=held_out or {},
        **{**fixed, **more},
    )


# --- means ----------------------------------------------------------------------------------


def test_losses_are_averaged_over_the_clients_that_hold_the_objective() -> None:
    records = [record("x", loss=1.0), record("y", loss=4.0), record("y", "b", loss=7.0)]
    assert mean_losses(records, ["a", "b"], "uniform") == {"a": 2.5, "b": 7.0}


def test_losses_can_be_weighted_by_the_clients_samples() -> None:
    records = [record("x", loss=1.0, samples=3), record("y", loss=5.0, samples=1)]
    assert mean_losses(records, ["a"], "uniform") == {"a": 3.0}
    assert mean_losses(records, ["a"], "samples") == {"a": 2.0}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_clients_that_did_not_measure_do_not_count(weighting: str) -> None:
    records = [record("x", loss=NAN, samples=100), record("y", loss=4.0, samples=2)]
    assert mean_losses(records, ["a"], weighting) == {"a": 4.0}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_loss_that_nobody_measured_is_not_a_number(weighting: str) -> None:
    losses = mean_losses([record("x", loss=NAN)], ["a", "b"], weighting)
    assert list(losses) == ["a", "b"]
    assert all(math.isnan(value) for value in losses.values())


def test_losses_come_in_the_order_of_the_objectives() -> None:
    records = [record("x", "a"), record("x", "b")]
    assert list(mean_losses(records, ["b", "a"], "uniform")) == ["b", "a"]


def test_held_out_metrics_are_averaged_over_the_clients_that_have_them() -> None:
    records = [
        record("x", held_out={"loss": 1.0, "accuracy": 0.5}, samples=100),
        record("y", held_out={"loss": 3.0}),
        record("y", "b", held_out={"loss": 9.0}),
        record("z", held_out={"loss": NAN, "accuracy": 0.7}),
        record("z", "c"),
    ]
    assert mean_held_out(records, ["a", "b", "c"]) == {
        "a": {"accuracy": pytest.approx(0.6), "loss": 2.0},
        "b": {"loss": 9.0},
    }


# --- one report -----------------------------------------------------------------------------


def report(**more: Any) -> RoundReport:
    fixed: dict[str, Any] = {
        "round": 4,
        "cohort": ("x", "y"),
        "losses": {"a": 0.5, "b": 0.25, "c": NAN},
        "delta_norms": {"a": 2.0, "b": 3.0, "c": NAN},
        "weights": {"a": 0.75, "b": 0.25, "c": 0.0},
        "missing": ("c",),
        "cosines": torch.tensor([[1.0, -0.5, NAN], [-0.5, 1.0, NAN], [NAN, NAN, NAN]]),
    }
    return RoundReport(**{**fixed, **more})


def values(table: Sequence[Row]) -> dict[tuple[str, str, str, str], float]:
    """Row by (split, client, objective, name); no key may come twice."""
    keys = Counter(row[:5] for row in table)
    assert [key for key, count in keys.items() if count > 1] == []
    return {(r.split, r.client, r.objective, r.name): r.value for r in table}


def test_what_was_measured_for_an_objective_has_a_row_each() -> None:
    table = values(list(rows(report(protected=("b",), spread={"a": 1.5}))))
    assert table["train", "", "a", "loss"] == 0.5
    assert table["server", "", "b", "weight"] == 0.25
    assert table["server", "", "b", "delta_norm"] == 3.0
    assert table["server", "", "a", "spread"] == 1.5
    assert [table["server", "", name, "missing"] for name in "abc"] == [0.0, 0.0, 1.0]
    assert [table["server", "", name, "protected"] for name in "abc"] == [0.0, 1.0, 0.0]


def test_what_was_not_measured_has_no_row() -> None:
    table = list(rows(report()))
    assert not any(math.isnan(row.value) for row in table)
    keys = values(table)
    assert ("train", "", "c", "loss") not in keys
    assert ("server", "", "c", "delta_norm") not in keys
    assert ("server", "", "", "gap") not in keys
    assert ("server", "", "", "stationarity") not in keys


def test_every_pair_of_objectives_has_its_cosine_once() -> None:
    table = values(list(rows(report())))
    cosines = {key: value for key, value in table.items() if key[3].startswith("cosine")}
    assert cosines == {("server", "", "a", "cosine:b"): -0.5}


def test_what_concerns_the_whole_round_stands_without_client_and_objective() -> None:
    refused = (Refusal(4, "x", "a", "no"), Refusal(4, "y", "a", "no"))
    table = values(
        list(
            rows(
                report(
                    gap=1e-9,
                    stationary=True,
                    held=False,
                    bytes_up=80,
                    seconds={"clients": 2.0, "server": 0.1},
                    refused=refused,
                )
            )
        )
    )
    expected = {
        "gap": 1e-9,
        "stationary": 1.0,
        "held": 0.0,
        "bytes_up": 80.0,
        "bytes_down": 0.0,
        "scale": 1.0,
        "refused": 2.0,
        "alarms": 0.0,
        "seconds_clients": 2.0,
        "seconds_server": 0.1,
    }
    for name, value in expected.items():
        assert table["server", "", "", name] == value


def test_what_a_client_sent_is_counted_once_and_not_per_objective() -> None:
    clients = (
        record("x", "a", loss=0.5, samples=3, delta_norm=2.0, held_out={"loss": 0.7}),
        record("x", "b", loss=NAN, samples=4),
        record("y", "a", bytes_up=99),
    )
    table = values(list(rows(report(clients=clients))))
    assert table["train", "x", "a", "loss"] == 0.5
    assert table["train", "x", "b", "samples"] == 4.0
    assert table["train", "x", "a", "delta_norm"] == 2.0
    assert table["held_out", "x", "a", "loss"] == 0.7
    assert ("train", "x", "b", "loss") not in table
    assert table["server", "x", "", "bytes_up"] == 8.0
    assert table["server", "y", "", "bytes_up"] == 99.0
    assert table["server", "x", "", "seconds"] == 0.5


# --- conflict -------------------------------------------------------------------------------


def report_of(deltas: Tensor) -> RoundReport:
    """A round whose updates are these `[S, d]`, as algorithms report them."""
    names = [f"f{s}" for s in range(len(deltas))]
    angles = measure_angles(deltas)
    return report(
        losses=dict.fromkeys(names, 1.0),
        delta_norms=dict(zip(names, angles.norms.tolist(), strict=True)),
        weights=dict.fromkeys(names, 1 / len(names)),
        missing=(),
        cosines=angles.cosines.float(),
    )


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], False),
        ([[1.0, 0.0], [-1.0, 1.0]], False),  # ⟨Δ_0, ΣΔ⟩ = 0: not hurt, to first order.
        ([[1.0, 0.0], [-1.1, 1.0]], True),
        ([[1.0, 0.0], [-0.9, 0.9]], False),  # Opposed, but none outweighs the other.
        ([[1.0, 0.0], [-1.0, 0.0]], False),  # They cancel: nobody moves.
        ([[1.0, 0.0], [-2.0, 0.0]], True),
        ([[0.0, 0.0], [-1.0, 0.0]], False),
        ([[0.0, 0.0], [-1.0, 0.0], [2.0, 0.0]], True),
        ([[3.0, 0.0]], False),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_a_conflict_is_a_sum_of_updates_that_hurts_an_objective(
    deltas: list[list[float]], expected: bool, scale: float
) -> None:
    assert conflict(report_of(scale * torch.tensor(deltas, dtype=torch.float64))) is expected


def test_a_conflict_is_what_the_updates_themselves_say() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(200):
        deltas = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        deltas *= torch.rand(4, 1, generator=generator, dtype=torch.float64)
        found.append(conflict(report_of(deltas)))
        assert found[-1] is bool((deltas @ deltas.sum(0) < 0).any())
    assert 20 < sum(map(bool, found)) < 180


def test_objectives_without_an_update_take_no_part_in_a_conflict() -> None:
    # a and b of lengths 2 and 3 with cosine −½: 2 − 1.5 > 0 and 3 − 1 > 0; c is missing.
    assert conflict(report()) is False
    assert conflict(report(delta_norms={"a": 1.0, "b": 3.0, "c": NAN})) is True  # 1 − 1.5 < 0


def test_without_updates_per_objective_nothing_is_said_of_conflict() -> None:
    unknown = [
        report(delta_norms={}),
        report(delta_norms=dict.fromkeys("abc", NAN)),
        report(cosines=torch.empty(0, 0)),
    ]
    assert [conflict(each) for each in unknown] == [None] * 3
    assert math.isnan(conflict_rate(unknown))
    assert math.isnan(conflict_rate([]))
    assert all(row.name != "conflict" for each in unknown for row in rows(each))


def test_the_rate_counts_the_rounds_that_can_tell() -> None:
    yes, no = report(delta_norms={"a": 1.0, "b": 3.0}), report()
    assert conflict_rate([yes, no, report(delta_norms={}), no]) == pytest.approx(1 / 3)
    table = [values(list(rows(each)))["server", "", "", "conflict"] for each in (yes, no)]
    assert table == [1.0, 0.0]


@pytest.mark.parametrize(
    ("angle", "ratio", "expected"),
    [
        # Pulls of lengths 1 and 1/r: the shorter is hurt where 1/r + cos(angle) < 0.
        (60, 1, False), (120, 1, False), (179, 1, False),
        (120, 1.9, False), (120, 2.1, True), (80, 100, False), (100, 100, True),
    ],
)  # fmt: skip
def test_the_first_round_of_two_bowls_is_in_conflict_as_their_angle_says(
    angle: float, ratio: float, expected: bool
) -> None:
    federation = Quadratic(angle=angle, scale_ratio=ratio, clients=2).build()
    result = fit(federation, FMGDA(local_steps=1, local_lr=0.1, server_lr=0.1), rounds=1)
    assert conflict(result.reports[0]) is expected
    assert result.conflict_rate == float(expected)


def test_a_run_of_fed_avg_has_no_conflict_rate() -> None:
    result = fit(Quadratic(clients=2).build(), FedAvg(local_steps=1), rounds=2)
    assert math.isnan(result.conflict_rate)


# --- a run ----------------------------------------------------------------------------------


def closeness(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets[:, 0]).abs() < 0.5


def worst(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 1] - targets[:, 1]).abs().max()


@pytest.fixture(scope="module")
def run() -> Result:
    """A little of everything: cohorts, labels that are missing, metrics with awkward names."""
    unlabelled = data(4, seed=3)
    unlabelled[1][:, 2] = NAN
    held = [("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c")]
    clients = [
        Client(
            f"c{i}",
            unlabelled if i == 2 else data(3 + i, seed=i),
            names,
            held_out=data(2, seed=10 + i) if i % 2 else None,
        )
        for i, names in enumerate(held)
    ]
    problem = Federation(
        Net().double(),
        [
            Objective("a", squared_error(0), {"samples": closeness, "weight": closeness}),
            Objective("b", squared_error(1), {"delta_norm": whole_set(worst)}),
            Objective("c", masked_error(2), {"spread": masked_error(2)}),
        ],
        clients,
    )
    algorithm = FSMGDA(local_steps=2, batch_size=2)
    return fit(problem, algorithm, rounds=5, participation=Number(2), evaluate=2, evaluate_every=2)


def test_no_number_of_a_run_stands_in_the_table_twice(run: Result) -> None:
    keys = Counter(row[:5] for row in run.table())
    assert [key for key, count in keys.items() if count > 1] == []
    assert len(keys) > 100


def test_every_row_of_the_table_is_a_number(run: Result) -> None:
    for row in run.table():
        assert type(row.value) is float
        assert not math.isnan(row.value)
        assert row.split in ("train", "held_out", "server")


def test_the_losses_in_the_table_are_those_of_the_result(run: Result) -> None:
    found = {
        (row.round, row.objective): row.value
        for row in run.table()
        if row.name == "loss" and row.split == "train" and not row.client
    }
    names = run.federation.names
    expected = {
        (t, names[s]): float(run.losses[t, s])
        for t in range(len(run.losses))
        for s in range(len(names))
        if not math.isnan(run.losses[t, s])
    }
    assert found == expected
    assert {t for t, _ in found} == {0, 2, 4, 5}  # Every other round, and after the last.


def test_the_weights_in_the_table_are_those_of_the_result(run: Result) -> None:
    for row in run.table():
        if row.name == "weight" and row.split == "server":
            s = run.federation.names.index(row.objective)
            assert row.value == float(run.weights[row.round, s])


def test_metrics_may_have_the_names_of_our_own_numbers(run: Result) -> None:
    held_out = {row.name for row in run.table() if row.split == "held_out"}
    assert {"loss", "samples", "weight", "delta_norm", "spread"} <= held_out


def test_only_clients_of_the_cohort_have_rows_in_a_round(run: Result) -> None:
    for report in run.reports:
        seen = {row.client for row in run.table() if row.round == report.round and row.client}
        assert seen == set(report.cohort)


def test_a_client_without_labels_has_no_loss_and_no_samples_in_the_table(run: Result) -> None:
    mine = [r for r in run.table() if r.client == "c2" and r.objective == "c"]
    assert {row.name for row in mine} == {"samples"}
    assert {row.value for row in mine} == {0.0}


def test_the_table_of_a_run_without_deltas_per_objective_is_unique_too() -> None:
    problem = Federation(
        Net().double(),
        [Objective("a", squared_error(0)), Objective("b", squared_error(1))],
        [Client("x", data(3), ("a", "b")), Client("y", data(3), ("b",))],
        held_out=data(4, seed=8),
    )
    result = fit(problem, FedAvg(local_steps=1), rounds=2)
    keys = Counter(row[:5] for row in result.table())
    assert max(keys.values()) == 1
    assert (2, "held_out", "", "b", "loss") in keys


def test_the_table_of_no_rounds_is_the_model_as_it_was(run: Result) -> None:
    result = fit(run.federation, run.algorithm, rounds=0)
    table = result.table()
    assert {row.round for row in table} == {0}
    assert {r.objective for r in table if r.name == "loss" and not r.client} == {"a", "b", "c"}


def test_a_run_becomes_a_data_frame_with_a_line_per_row(run: Result) -> None:
    frame = run.to_pandas()
    assert list(frame.columns) == ["round", "split", "client", "objective", "name", "value"]
    assert [tuple(line) for line in frame.itertuples(index=False)] == [
        tuple(r) for r in run.table()
    ]
    assert frame["value"].dtype == "float64"
    wide = frame[(frame["name"] == "weight") & (frame["split"] == "server")].pivot(
        index="round", columns="objective", values="value"
    )
    assert torch.equal(torch.tensor(wide.to_numpy()), run.weights)


def test_without_pandas_it_is_said_how_to_get_it(
    run: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return find(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install .*fmol\[pandas\]"):
        run.to_pandas()
