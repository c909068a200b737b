"""What a run leaves to look at reads the same from JSON as from memory."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FSMGDA, MGD, Alone, Client, FedAvg, Federation, Result, fit
from fmol.alarms import Alarm
from fmol.engines.seam import ClientRecord, Refusal
from fmol.measurement import Evaluation
from fmol.participation import Number
from fmol.portrait import portray
from fmol.record import (
    RunRecord,
    evaluation_from_json,
    evaluation_to_json,
    report_from_json,
    report_to_json,
)
from fmol.rounds import Algorithm, RoundReport
from support import data, federation

ODD = ("inf", "none", "</script>")
NAN = float("nan")


def same(a: Any, b: Any) -> bool:
    """Equal in every bit and type, NaN being equal to NaN."""
    if type(a) is not type(b):
        return isinstance(a, Mapping) and isinstance(b, Mapping) and same({**a}, {**b})
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return (
            alike
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def through_json(report: RoundReport) -> RoundReport:
    return report_from_json(json.loads(json.dumps(report_to_json(report), allow_nan=False)))


def final_through_json(final: Evaluation) -> Evaluation:
    return evaluation_from_json(json.loads(json.dumps(evaluation_to_json(final), allow_nan=False)))


def assert_comes_back(result: Result) -> None:
    assert result.reports
    for report in result.reports:
        assert same(through_json(report), report)
    assert same(final_through_json(result.final), result.final)


def problem(names: Sequence[str] = ("a", "b", "c"), **options: Any) -> Federation:
    return federation([tuple(names), names[:1], names[1:]], names=names, **options)


def broken(names: Sequence[str] = ("a", "b", "c")) -> Federation:
    """A federation one of whose clients sends what is refused."""
    base = problem(names)
    x, y = data(12)
    clients = [base.client(id) for id in base.population.ids()]
    clients.append(Client("</script>", (x, torch.full_like(y, torch.inf)), tuple(names[:1])))
    return Federation(base.model, base.objectives, clients)


ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=2, batch_size=4),
    FSMGDA(local_steps=2, normalize="l2", on_missing_objective="reuse"),
    FedAvg(local_steps=2),
    Alone(local_steps=2),
    MGD(),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
def test_the_reports_of_every_algorithm_come_back_exactly(algorithm: Algorithm) -> None:
    held_out = None if isinstance(algorithm, Alone) else data(9, seed=7)
    assert_comes_back(
        fit(
            problem(held_out=held_out),
            algorithm,
            3,
            true_gradients_every=2 if algorithm.shares_model else None,
            evaluate_every=2,
        )
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
def test_refusals_come_back_exactly(algorithm: Algorithm) -> None:
    result = fit(broken(), algorithm, 2)
    assert any(report.refused for report in result.reports) or result.final.refused
    assert_comes_back(result)


def test_missing_objectives_come_back_exactly() -> None:
    result = fit(
        federation([("a", "b"), ("a",), ("c",), ("b",)]),
        FSMGDA(local_steps=1, on_missing_objective="reuse"),
        8,
        participation=Number(1),
        evaluate="cohort",
    )
    assert any(report.missing for report in result.reports)
    assert any(report.reused for report in result.reports)
    assert any(report.cosines.isnan().any() for report in result.reports)
    assert_comes_back(result)


def test_names_that_look_like_numbers_or_markup_come_back_as_names() -> None:
    result = fit(broken(ODD), FSMGDA(local_steps=1), 2)
    assert_comes_back(result)
    assert {each.objective for each in result.reports[0].clients} <= set(ODD)


def full_report() -> RoundReport:
    record = ClientRecord(
        client="inf",
        objective="none",
        loss=math.inf,
        samples=3,
        delta_norm=NAN,
        held_out={"inf": -math.inf, "🙂": 0.1, "nan": NAN},
        seconds=1e-300,
        bytes_up=1,
        bytes_down=2,
    )
    return RoundReport(
        round=3,
        cohort=("inf", "🙂", "</script>"),
        losses={"inf": NAN, "none": math.inf, "": 0.1 + 0.2},
        evaluated="all",
        held_out={"none": {"inf": -math.inf, "loss": NAN}},
        delta_norms={"inf": 5e-324},
        weights={"inf": 1 / 3},
        scale=-math.inf,
        missing=("inf",),
        reused={"inf": 3},
        protected=("-inf",),
        refused=(Refusal(3, "inf", "none", "inf"),),
        silent=("inf",),
        stationary=True,
        cosines=torch.tensor([[1.0, NAN], [0.1, -1.0]]),
        alarms=(Alarm("stall", "inf", 2, "inf", "a “quoted”\nline"),),
        clients=(record, record._replace(client="nan", held_out={})),
        notes=("inf", "none"),
    )


def test_infinities_unknowns_and_odd_names_come_back_exactly() -> None:
    report = full_report()
    assert same(through_json(report), report)
    final = Evaluation(
        round=4,
        losses=report.losses,
        held_out=report.held_out,
        clients=report.clients,
        refused=report.refused,
        evaluated="all 3 clients",
    )
    assert same(final_through_json(final), final)


def test_a_report_without_clients_or_objectives_comes_back() -> None:
    report = RoundReport(round=0, cohort=(), losses={}, delta_norms={}, weights={})
    assert same(through_json(report), report)


def test_the_comparison_of_these_tests_sees_every_difference() -> None:
    report = full_report()
    for change in (
        {"scale": 1.0},
        {"notes": ("inf", None)},
        {"losses": {"inf": NAN, "none": "inf", "": 0.1 + 0.2}},
        {"losses": {"inf": NAN, "none": math.inf, "": 0.3}},
        {"cosines": report.cosines.double()},
        {"reused": {"inf": 3.0}},
    ):
        assert not same(replace(report, **change), report)


def test_the_table_of_a_record_is_the_table_of_its_result() -> None:
    trained = problem(held_out=data(9, seed=7))
    result = fit(trained, FSMGDA(local_steps=2), 3)
    record = RunRecord(
        name="run",
        algorithm="fsmgda",
        portrait=portray(trained),
        reports=tuple(map(through_json, result.reports)),
        final=final_through_json(result.final),
        stopped=result.stopped,
        seed=0,
    )
    assert record.table() == result.table()
    ended = [row for row in record.table() if row.round == 3]
    assert ended
    assert replace(record, final=None).table() == [r for r in result.table() if r not in ended]
