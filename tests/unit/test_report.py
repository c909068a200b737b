"""A report's payload says what the records say, and its page is safe whatever things are called."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from fmol import FSMGDA, Alone, FedAvg, fit
from fmol.alarms import Alarm
from fmol.engines.seam import ClientRecord, Refusal
from fmol.measurement import Evaluation
from fmol.metrics import conflict_rate
from fmol.portrait import ClientPortrait, Portrait
from fmol.problems.quadratic import Quadratic
from fmol.record import RunRecord
from fmol.report import build_report, write_report
from fmol.report.data import FEWEST_POINTS, MOST_POINTS, build_payload
from fmol.report.numbers import number
from fmol.report.run import MOST_CLIENTS
from fmol.rounds import RoundReport

NAN, INF = float("nan"), float("inf")
EVIL = "</script><script>alert(1)</script> <b>&amp;\"'`{{script}} \ud800 λ 目标 <!--"


def round_report(t: int, names: tuple[str, ...] = ("a", "b"), **changes: Any) -> RoundReport:
    size = len(names)
    cosines = torch.full((size, size), -0.25)
    cosines.fill_diagonal_(1.0)
    values: dict[str, Any] = {
        "round": t,
        "cohort": ("c0",),
        "losses": {name: 1.0 / (t + 1 + s) for s, name in enumerate(names)},
        "evaluated": "all 2 clients",
        "held_out": {name: {"accuracy": 0.5} for name in names},
        "delta_norms": dict.fromkeys(names, 1.0),
        "weights": dict.fromkeys(names, 1 / size),
        "direction_norm_squared": 0.5,
        "gap": 0.0,
        "min_cosine": 0.5,
        "cosines": cosines,
        "bytes_up": 1_000_000,
        "bytes_down": 500_000,
        "seconds": {"clients": 0.5, "server": 0.25},
    }
    return RoundReport(**{**values, **changes})


def client_record(client: str, objective: str, loss: float, **held_out: float) -> ClientRecord:
    return ClientRecord(
        client=client,
        objective=objective,
        loss=loss,
        samples=4,
        delta_norm=1.0,
        held_out=held_out,
        seconds=0.1,
        bytes_up=1,
        bytes_down=1,
    )


def record(
    rounds: int = 3,
    names: tuple[str, ...] = ("a", "b"),
    clients: tuple[str, ...] = ("c0", "c1"),
    loss: float = 0.25,
    **changes: Any,
) -> RunRecord:
    portrait = Portrait(
        model="Net",
        parameters=10,
        objectives=names,
        targets={},
        size=len(clients),
        clients=tuple(ClientPortrait(id=i, objectives=names, samples=4) for i in clients),
    )
    final = Evaluation(
        round=rounds,
        losses=dict.fromkeys(names, loss),
        held_out={name: {"accuracy": 0.9} for name in names},
        clients=tuple(client_record(i, name, loss) for i in clients for name in names),
        evaluated="all 2 clients",
    )
    values: dict[str, Any] = {
        "name": "plain",
        "algorithm": "FSMGDA",
        "portrait": portrait,
        "reports": tuple(round_report(t, names) for t in range(rounds)),
        "final": final,
        "stopped": f"all {rounds} rounds done",
        "seed": 0,
    }
    return RunRecord(**{**values, **changes})


def payload_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


class Tags(HTMLParser):
    """Counts what a browser would take for elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


# ---- numbers ---------------------------------------------------------------------------------


def test_the_losses_drawn_are_those_of_the_rounds_and_of_the_trained_model() -> None:
    (run,) = build_payload([record()])["runs"]
    assert run["at"] == [0, 1, 2, 3]
    assert run["loss"] == [[1, 0.5, 0.333333, 0.25], [0.5, 0.333333, 0.25, 0.25]]
    assert run["held_out"]["accuracy"][0] == [0.5, 0.5, 0.5, 0.9]
    assert run["weights"] == [[0.5] * 3] * 2


def test_what_was_not_measured_is_null_and_never_zero() -> None:
    reports = [round_report(t, losses={"a": NAN if t % 2 else 0.5, "b": INF}) for t in range(3)]
    page = build_report([record(reports=tuple(reports))])
    (run,) = payload_of(page)["runs"]
    assert run["loss"] == [[0.5, None, 0.5, 0.25], [None, None, None, 0.25]]
    assert "stationarity" not in run["scalars"]
    assert any("infinite" in fact for fact in run["facts"])


def test_numbers_keep_six_digits() -> None:
    assert number(math.pi * 1e-9) == 3.14159e-9
    assert number(123456789.0) == 123457000
    assert [number(value) for value in (None, NAN, INF, -INF, 0.0)] == [None] * 4 + [0]


def test_megabytes_are_those_sent_before_a_point_was_reached() -> None:
    (run,) = build_payload([record()])["runs"]
    assert run["up"] == [0, 1, 2, 3]
    assert run["down"] == [0, 0.5, 1, 1.5]
    assert run["seconds"] == {"clients": 1.5, "server": 0.75}


def test_a_long_run_is_sampled_from_its_first_round_to_its_last_and_says_so() -> None:
    rounds = 2 * MOST_POINTS + 7
    (run,) = build_payload([record(rounds)])["runs"]
    assert run["sampled"]
    assert run["done"] == rounds
    assert len(run["t"]) == MOST_POINTS
    assert (run["t"][0], run["t"][-1], run["at"][-1]) == (0, rounds - 1, rounds)
    assert run["up"][-1] == rounds


def test_sampling_keeps_rounds_that_were_evaluated() -> None:
    rounds, every = 2 * MOST_POINTS, 5
    reports = [round_report(t) for t in range(rounds)]
    reports = [r if r.round % every == 1 else replace(r, losses={"a": NAN}) for r in reports]
    (run,) = build_payload([record(rounds, reports=tuple(reports))])["runs"]
    kept = [t for t in run["t"] if t % every == 1]
    assert len(kept) >= rounds / every - 1


def test_many_objectives_in_many_runs_stay_a_small_page() -> None:
    names = tuple(f"objective {s}" for s in range(40))
    runs = [record(150, names, name=f"run {i}") for i in range(3)]
    payload = build_payload(runs)
    assert all(len(run["t"]) >= FEWEST_POINTS for run in payload["runs"])
    pairs = sum(len(v) for run in payload["runs"] for v in run["cosines"]["values"])
    assert pairs <= 12_000
    assert len(build_report([record(40, names)])) < 300_000


def test_conflict_is_what_the_metrics_say() -> None:
    apart = torch.tensor([[1.0, -0.9], [-0.9, 1.0]])
    lopsided = round_report(1, cosines=apart, delta_norms={"a": 1.0, "b": 5.0})
    reports = (round_report(0), lopsided)
    (run,) = build_payload([record(2, reports=reports)])["runs"]
    assert run["conflict"] == [0, 1]
    assert run["conflict_rate"] == conflict_rate(reports) == 0.5
    assert run["lowest"] == [-0.25, -0.9]
    assert run["cosines"]["values"] == [[-250], [-900]]


def test_no_updates_per_objective_means_no_cosines() -> None:
    result = fit(Quadratic().build(), FedAvg(local_steps=1, local_lr=0.01), rounds=2)
    (run,) = build_payload([result.record()])["runs"]
    assert run["cosines"]["rounds"] == []
    assert run["conflict_rate"] is None
    assert set(run["conflict"]) == {None}


# ---- runs beside one another -----------------------------------------------------------------


def test_runs_on_different_objectives_can_stand_beside_one_another() -> None:
    payload = build_payload([record(names=("a", "b")), record(names=("b", "c"), name="other")])
    assert payload["objectives"] == ["a", "b", "c"]
    assert payload["runs"][1]["loss"][0] == [None] * 4
    assert payload["runs"][1]["cosines"]["objectives"] == [1, 2]


def test_the_title_names_every_problem_that_is_compared() -> None:
    runs = [record(name=name, config={"problem": {"name": name}}) for name in ("adult", "river")]
    assert build_payload(runs)["title"] == "adult and river: 2 runs compared"
    seeds = [
        replace(runs[0], seed=seed, config={**runs[0].config, "seed": seed}) for seed in (1, 2)
    ]
    assert build_payload([*runs, *seeds])["title"] == "adult and river: 2 settings, 4 runs compared"
    more = [record(name=str(i), config={"problem": f"p{i}"}) for i in range(5)]
    assert build_payload(more)["title"] == "p0, p1 and others: 5 runs compared"


@pytest.mark.parametrize(
    ("algorithm", "config", "found"),
    [
        ("FSMGDA", {}, True),
        ("mgd", {"algorithm": {"name": "mgd", "rule": "min-norm"}}, True),
        ("FSMGDA", {"algorithm": {"rule": {"name": "fixed", "weights": {"a": 1}}}}, False),
        ("FedAvg", {}, False),
        ("alone", {}, False),
    ],
)
def test_whether_weights_are_found_is_the_algorithms_affair(
    algorithm: str, config: dict[str, Any], found: bool
) -> None:
    for rounds in (0, 3):
        (run,) = build_payload([record(rounds, algorithm=algorithm, config=config)])["runs"]
        assert run["finds_weights"] is found


def test_what_clients_reach_alone_stands_beside_what_they_reach_together() -> None:
    alone = record(algorithm="Alone", name="alone", loss=0.5)
    beside = build_payload([record()], alone=alone)
    among = build_payload([record(), alone])
    for payload in (beside, among):
        (by_themselves,) = payload["alone"]
        assert by_themselves["clients"]["ids"] == ["c0", "c1"]
        assert by_themselves["clients"]["loss"] == [[0.5, 0.5], [0.5, 0.5]]
    assert len(beside["runs"]) == 1
    assert len(among["runs"]) == 2


def test_only_a_run_of_alone_can_be_the_one_alone() -> None:
    with pytest.raises(ValueError, match="`alone` must be a record of training with `Alone`, got"):
        build_report([record()], alone=record())


def test_a_report_on_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="`records` is empty"):
        build_report([])


def test_clients_show_what_was_measured_last() -> None:
    early = (client_record("c0", "a", 3.0), client_record("c1", "a", 2.0))
    late = (client_record("c0", "a", 1.0, accuracy=0.5), client_record("c1", "a", NAN))
    reports = (round_report(0, clients=early), round_report(1, clients=late))
    (run,) = build_payload([record(2, reports=reports, final=None)])["runs"]
    assert run["clients"]["loss"] == [[1, None], [2, None]]
    assert run["clients"]["held_out"] == {"accuracy": [[0.5, None], [None, None]]}
    assert run["clients"]["rounds"] == [0, 1]


def test_of_very_many_clients_some_are_drawn_and_all_are_counted() -> None:
    ids = tuple(f"c{i:04d}" for i in range(3 * MOST_CLIENTS))
    (run,) = build_payload([record(1, clients=ids)])["runs"]
    assert len(run["clients"]["ids"]) == MOST_CLIENTS
    assert run["clients"]["total"] == len(ids)


def test_labelled_samples_are_told_per_client_and_objective_of_one_federation() -> None:
    base = record()
    assert base.final is not None
    few = replace(
        base.final,
        clients=tuple(
            each._replace(samples={"a": 4, "b": 0}[each.objective])
            for each in base.final.clients
            if each.client == "c0"
        ),
    )
    other = replace(base, name="other", final=few, reports=())
    (portrait,) = build_payload([other, base])["portraits"]
    assert [client["labelled"] for client in portrait["clients"]] == [[4, 0], [4, 4]]
    refusal = Refusal(0, "c0", "b", "broken")
    (unknown,) = build_payload([replace(other, final=replace(few, refused=(refusal,)))])[
        "portraits"
    ]
    assert unknown["clients"][0]["labelled"] == [4, None]


# ---- words -----------------------------------------------------------------------------------


def test_an_alarm_is_told_once_with_the_rounds_in_which_it_stood() -> None:
    alarm = Alarm(kind="stall", objective="a", since=1, cause="solved", message="a is solved")
    later = replace(alarm, message="a is still solved")
    reports = (
        round_report(0),
        round_report(1, alarms=(alarm,)),
        round_report(2, alarms=(later,)),
        round_report(3),
    )
    (run,) = build_payload([record(4, reports=reports)])["runs"]
    (told,) = run["alarms"]
    assert (told["since"], told["until"], told["stands"], told["times"]) == (1, 2, False, 1)
    assert told["message"] == "a is still solved"
    again = (*reports, round_report(4, alarms=(replace(alarm, since=4),)))
    (told,) = build_payload([record(5, reports=again)])["runs"][0]["alarms"]
    assert (told["since"], told["stands"], told["times"]) == (4, True, 2)


def test_refusals_missing_objectives_and_notes_are_told() -> None:
    refusal = Refusal(0, "c1", "a", "not finite")
    reports = (
        round_report(0, refused=(refusal,) * 30, missing=("b",), notes=("one by one",)),
        round_report(1, silent=("c0",), held=True, protected=("a",)),
    )
    (run,) = build_payload([record(2, reports=reports, notes=("resumed",))])["runs"]
    assert run["refused"]["count"] == 30
    assert run["refused"]["first"][0] == str(refusal)
    told = " ".join(run["facts"])
    for words in (
        "`b` had no update",
        "one by one",
        "did not answer",
        "stayed",
        "`a` was protected",
    ):
        assert words in told
    assert run["notes"] == ["resumed"]


def test_an_objective_that_was_never_heard_is_told_with_the_first_refusal() -> None:
    refusals = tuple(Refusal(0, "c1", name, f"no {name}") for name in ("a", "b"))
    reports = (
        round_report(0, refused=refusals, missing=("a", "b")),
        round_report(1, missing=("b",)),
    )
    (run,) = build_payload([record(2, reports=reports)])["runs"]
    assert run["unheard"] == [{"objective": "b", "reason": str(refusals[1])}]
    assert [fact for fact in run["facts"] if "`b`" in fact] == []
    assert build_payload([record(0)])["runs"][0]["unheard"] == []


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([2], "in round 2."),
        ([1, 2, 3], "in rounds 1 to 3."),
        ([0, 1, 2, 3, 4, 5], "in all 6 rounds."),
        ([1, 4], "in 2 of 6 rounds, between round 1 and round 4."),
    ],
)
def test_rounds_are_told_without_mixing_how_many_and_which(rounds: list[int], words: str) -> None:
    reports = tuple(round_report(t, silent=("c0",) if t in rounds else ()) for t in range(6))
    (run,) = build_payload([record(6, reports=reports)])["runs"]
    assert run["facts"] == [f"Some clients that were asked did not answer {words}"]


def test_a_protected_objective_has_the_weight_of_a_constraint() -> None:
    reports = (round_report(0, protected=("a",)), round_report(1, protected=("a",)))
    (run,) = build_payload([record(2, reports=reports)])["runs"]
    assert run["protected"] == [2, 0]
    assert "weight there is that of a constraint" in run["facts"][0]


def test_a_run_that_has_not_ended_says_so() -> None:
    (run,) = build_payload([record(final=None, stopped="")])["runs"]
    assert not run["finished"]
    assert run["at"] == run["t"] == [0, 1, 2]


def test_config_is_written_as_in_the_file() -> None:
    config = {"rounds": 3, "algorithm": {"name": "FSMGDA", "clip": True, "steps": [1, 2]}}
    (run,) = build_payload([record(config=config, environment={"torch": "2.6"})])["runs"]
    assert run["config"] == [
        ["rounds", "3"],
        ["algorithm.name", '"FSMGDA"'],
        ["algorithm.clip", "true"],
        ["algorithm.steps", "[1, 2]"],
    ]
    assert run["environment"] == [["torch", "2.6"]]


# ---- the page --------------------------------------------------------------------------------


def test_a_name_with_a_script_tag_stays_text() -> None:
    evil = record(names=(EVIL, "b"), clients=(EVIL, "c1"), name=EVIL, config={EVIL: EVIL})
    page = build_report([evil], title=EVIL)
    plain = Tags(build_report([record()])).tags
    assert [tag for tag, _ in Tags(page).tags] == [tag for tag, _ in plain]
    payload = payload_of(page)
    assert payload["title"] == EVIL
    assert payload["objectives"][0] == EVIL
    assert payload["runs"][0]["clients"]["ids"][0] == EVIL


def test_a_name_that_no_file_can_hold_does_not_stop_the_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "r.html", [record(names=(EVIL, "b"))], title=EVIL)
    assert payload_of(path.read_text(encoding="utf-8"))["objectives"][0] == EVIL


def test_the_page_asks_for_nothing_and_forbids_the_rest() -> None:
    page = build_report([record()])
    tags = Tags(page).tags
    (policy,) = [a["content"] for tag, a in tags if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not any("src" in a or tag in ("link", "iframe", "img") for tag, a in tags)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)


def test_every_objective_of_a_real_run_and_of_alone_is_in_the_page() -> None:
    federation = Quadratic().build()
    result = fit(federation, FSMGDA(local_steps=2, local_lr=0.01, batch_size=4), rounds=3)
    alone = fit(federation, Alone(local_steps=2, local_lr=0.01), rounds=3)
    payload = payload_of(build_report([result.record("r")], alone=alone.record()))
    assert payload["objectives"] == list(federation.names)
    assert payload["runs"][0]["loss"][0][-1] == pytest.approx(float(result.losses[-1, 0]), 1e-5)
    assert payload["alone"][0]["clients"]["ids"]


def test_the_same_records_give_the_same_page() -> None:
    assert build_report([record()]) == build_report([record()])


def test_a_report_appears_at_once_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new" / "report.html"
    assert write_report(target, [record()]) == target
    before = target.read_text(encoding="utf-8")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(target, [record(name="other")])
    assert target.read_text(encoding="utf-8") == before
    assert list(target.parent.iterdir()) == [target]


def test_an_algorithm_is_spelt_alike_from_memory_and_from_a_file() -> None:
    runs = build_payload([record(algorithm="fsmgda"), record(algorithm="FSMGDA", seed=1)])["runs"]
    assert [run["algorithm"] for run in runs] == ["FSMGDA", "FSMGDA"]
    assert build_payload([record(algorithm="alone")])["runs"][0]["alone"]
