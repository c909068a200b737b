"""A strategy over a grid: the sequential engine's numbers, and rounds that go on whatever sites do."""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fmol
from flower_grid import FakeGrid, connect, site_app, site_of
from flower_support import Halved
from fmol import Client, Federation, Objective, Result, fit
from fmol.engines.seam import Ask, Reply
from fmol.errors import MissingObjectiveError, RefusedError
from fmol.flower import FMGDA, FSMGDA, FedAvg, MissingSitesError, MultiObjective, StrategyResult
from fmol.flower import client as own
from fmol.flower.client import QUERY
from fmol.flower.frames import NOTE
from fmol.flower.messages import HEAD, X, from_content, to_arrays, to_content
from fmol.flower.wire import (
    Introduction,
    pack_introduction,
    pack_reply,
    unpack_ask,
    unpack_introduction,
    unpack_reply,
)
from fmol.participation import Number, Stratified
from fmol.result import Snapshot
from fmol.rounds import RoundReport
from fmol.runs import RunError, RunFolder, resume
from support import data, federation, flat

HOLDINGS = [("a", "b"), ("c",), ("b", "c"), ("a",), ("a", "b", "c"), ("c", "a")]


def unequal() -> Federation:
    """Six clients with objectives, numbers of samples and held-out data of their own."""
    problem = federation(HOLDINGS, sizes=[5, 9, 12, 7, 6, 8])
    clients = [
        replace(client, held_out=data(4, seed=50 + i))
        for i, client in enumerate(clients_of(problem))
    ]
    return Federation(problem.model, problem.objectives, clients)


def clients_of(problem: Federation) -> list[Client]:
    return [problem.client(id) for id in problem.population.ids()]


def train(
    problem: Federation,
    grid: FakeGrid,
    kind: type[MultiObjective] = FSMGDA,
    rounds: int = 4,
    timeout: float = 30.0,
    **options: Any,
) -> StrategyResult:
    given = {"local_steps": 2, "seed": 3, "device": "cpu", "patience": 2.0, **options}
    return kind(problem.model, problem.objectives, **given).start(
        grid, num_rounds=rounds, timeout=timeout
    )


def run_of(result: StrategyResult) -> Result:
    assert result.run is not None
    return result.run


def reports_of(result: StrategyResult) -> tuple[RoundReport, ...]:
    return run_of(result).reports


def without_traffic(report: RoundReport) -> str:
    """A report but for seconds and bytes, of which the wire's headers are a part, and notes."""
    clients = tuple(each._replace(seconds=0.0, bytes_up=0, bytes_down=0) for each in report.clients)
    return repr(replace(report, seconds={}, bytes_up=0, bytes_down=0, notes=(), clients=clients))


STRATEGIES: list[tuple[type[MultiObjective], Any, dict[str, Any]]] = [
    (FSMGDA, fmol.FSMGDA, {"local_steps": 3, "batch_size": 4}),
    (FSMGDA, fmol.FSMGDA, {"local_steps": 2, "batch_size": 4, "drift_correction": "scaffold"}),
    (FSMGDA, fmol.FSMGDA, {"local_epochs": 1, "weighting": "samples", "normalize": "loss"}),
    (FMGDA, fmol.FMGDA, {"local_steps": 2, "on_missing_objective": "reuse"}),
    (FedAvg, fmol.FedAvg, {"weights": {"a": 1.0, "b": 2.0, "c": 1.0}, "local_steps": 2}),
]


@pytest.mark.parametrize("participation", [None, Number(3), Stratified(2)], ids=str)
@pytest.mark.parametrize(("kind", "algorithm", "options"), STRATEGIES, ids=str)
def test_sites_with_their_own_objectives_give_the_bits_of_the_sequential_engine(
    kind: type[MultiObjective], algorithm: Any, options: dict[str, Any], participation: Any
) -> None:
    problem = unequal()
    more = {} if participation is None else {"participation": participation}
    grid = connect(problem, engine="sequential")
    strategy = kind(problem.model, problem.objectives, seed=3, device="cpu", **options, **more)
    there = run_of(strategy.start(grid, num_rounds=4, timeout=30))
    here = fit(
        problem, algorithm(**options), rounds=4, seed=3, device="cpu", evaluate="cohort", **more
    )
    assert torch.equal(flat(there.model), flat(here.model))
    for mine, theirs in zip(there.reports, here.reports, strict=True):
        assert without_traffic(mine) == without_traffic(theirs)
    assert repr(there.final.losses) == repr(here.final.losses)
    assert repr(there.final.held_out) == repr(here.final.held_out)
    assert there.reports[0].held_out


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_how_long_a_site_took_is_told_whatever_its_engine(engine: str) -> None:
    problem = unequal()
    (report, *_) = reports_of(train(problem, connect(problem, engine=engine)))
    assert report.clients
    assert all(each.seconds > 0 for each in report.clients)


def test_by_default_a_site_computes_by_the_faster_engine_and_remembers_which() -> None:
    problem = unequal()
    grid = connect(problem)
    there = run_of(train(problem, grid, rounds=3))
    here = fit(problem, fmol.FSMGDA(local_steps=2), 3, 3, device="cpu", evaluate="cohort")
    assert torch.allclose(flat(there.model), flat(here.model), rtol=1e-9, atol=1e-12)
    assert sum("engine" in note for note in there.reports[0].notes) == len(HOLDINGS)
    assert not any("engine" in note for note in there.reports[1].notes)


def test_sites_like_one_another_in_one_process_find_out_once_which_engine_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six sites hold one, two or three objectives: three of them time their steps."""
    monkeypatch.setattr(own, "_choices", {})
    problem = unequal()
    there = run_of(train(problem, connect(problem), rounds=1))
    notes = [note for note in there.reports[0].notes if ": engine" in note]
    assert sum("at a site like this one" in note for note in notes) == 3
    assert sum("a lane's step takes" in note for note in notes) == 3


OPTIONS = (torch.device("cpu"), "sequential", "fp32", ())


def test_a_process_keeps_the_sites_it_answers_for_while_there_is_room() -> None:
    problem = unequal()
    sites = {name: site_of(problem, name) for name in ("c0", "c1", "c2")}
    kept = own._Ours(most=2 * own.SITE_BYTES + 2**19)
    first = {name: kept.get(name, sites[name], OPTIONS) for name in ("c0", "c1")}
    assert kept.get("c0", sites["c0"], OPTIONS) is first["c0"]
    assert kept.get("c0", sites["c0"], (*OPTIONS[:3], (len,))) is not first["c0"]
    kept = own._Ours(most=2 * own.SITE_BYTES + 2**19)
    first = {name: kept.get(name, sites[name], OPTIONS) for name in ("c0", "c1")}
    kept.get("c0", sites["c0"], OPTIONS)
    kept.get("c2", sites["c2"], OPTIONS)  # For which the one that was not used since must go.
    assert kept.get("c0", sites["c0"], OPTIONS) is first["c0"]
    assert kept.get("c1", sites["c1"], OPTIONS) is not first["c1"]


def test_a_site_that_loads_itself_anew_each_time_is_kept_once() -> None:
    problem = unequal()
    kept = own._Ours()
    gone = weakref.ref(kept.get("c0", site_of(problem, "c0"), OPTIONS).federation)
    assert kept.get("c0", site_of(problem, "c0"), OPTIONS).federation is not gone()
    assert gone() is None


def test_one_message_a_site_and_round_and_the_model_is_shared_by_all_of_them() -> None:
    problem = unequal()
    grid = connect(problem)
    result = train(problem, grid, rounds=2)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds == [f"query.{QUERY}"] * 6 + ["train"] * 12 + ["evaluate"] * 6
    first = [message.content.array_records["fmol"] for message in grid.sent[6:12]]
    assert all(sorted(each) == [f"{HEAD}.0000", f"{X}.0000"] for each in first)
    assert len({id(each[f"{X}.0000"]) for each in first}) == 1
    report = reports_of(result)[0]
    sent = [sum(len(array.data) for array in each.values()) for each in first]
    assert report.bytes_down == sum(sent)
    assert {record.bytes_down for record in report.clients} == set(sent)


# ---- what is refused -------------------------------------------------------------------------


def spoiled(change: Callable[[Reply, Ask], Reply], **note: Any) -> Any:
    """Lets a node change its reply before it is sent, and what it says beside it."""

    def spoil(message: Message, answer: Message) -> Message:
        if message.metadata.message_type.startswith("query"):
            return answer
        data, x = from_content(message.content), from_content(message.content, X)
        layout = unequal().layout.digest
        ask, _ = unpack_ask(data, x, layout)
        received = unpack_reply(from_content(answer.content), ask, layout)
        assert isinstance(received.answer, Reply)
        reply = change(received.answer, ask)
        told = {**received.note, **note}
        return Message(to_content(pack_reply(reply, ask, layout, note=told)), reply_to=message)

    return spoil


def with_delta(value: Any) -> Callable[[Reply, Ask], Reply]:
    return lambda reply, ask: replace(reply, deltas=dict.fromkeys(reply.deltas, value))


SIZE = unequal().layout.size
BAD: dict[str, tuple[Any, str]] = {
    "nan": (spoiled(with_delta(torch.full((SIZE,), torch.nan))), "non-finite"),
    "shape": (spoiled(with_delta(torch.ones(1))), "shape [1] instead of"),
    "whole numbers": (spoiled(with_delta(torch.ones(SIZE, dtype=torch.int64))), "torch.int64"),
    "too many samples": (
        spoiled(lambda r, a: replace(r, samples=dict.fromkeys(r.samples, 9999)), samples=9999),
        "claims 9999 samples and the server knows of",
    ),
    "loss": (
        spoiled(lambda r, a: replace(r, losses=dict.fromkeys(r.losses, 1e9))),
        "1e+09, and 0 to 1e+06 is let in",
    ),
    "negative loss": (
        spoiled(lambda r, a: replace(r, losses=dict.fromkeys(r.losses, -1.0))),
        "-1, and 0 to 1e+06 is let in",
    ),
    "stale": (spoiled(lambda r, a: r, answer="of before"), "It is of another ask"),
    "another's name": (spoiled(lambda r, a: replace(r, client="c4")), "comes from client `c4`"),
    "not held": (
        spoiled(lambda r, a: replace(r, losses={**r.losses, "c": 0.1})),
        "objective that it does not hold",
    ),
    "foreign": (
        lambda message, answer: (
            Message(
                RecordDict({"arrays": ArrayRecord([]), "metrics": MetricRecord({"loss": 1.0})}),
                reply_to=message,
            )
            if message.metadata.message_type == "train"
            else answer
        ),
        "no `head` of fmol's",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_is_refused_by_name_and_the_round_goes_on(fault: str) -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")
    grid.nodes[100].spoil, words = BAD[fault]
    result = run_of(train(problem, grid))
    for report in result.reports:
        assert {refusal.client for refusal in report.refused} == {"c0"}
        assert any(words in str(refusal) for refusal in report.refused)
        assert not report.held
    assert torch.isfinite(flat(result.model)).all()
    if fault != "not held":  # Its own objectives are as good as ever.
        clients = [client for client in clients_of(problem) if client.id != "c0"]
        without = Federation(problem.model, problem.objectives, clients)
        same = fit(without, fmol.FSMGDA(local_steps=2), 4, 3, device="cpu")
        assert torch.equal(flat(result.model), flat(same.model))


def test_metrics_that_nobody_asked_for_do_not_get_into_the_report() -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")
    many = {f"metric {i}": 0.0 for i in range(1000)}
    grid.nodes[100].spoil = spoiled(
        lambda r, a: replace(r, held_out={n: {**row, **many} for n, row in r.held_out.items()})
    )
    report = reports_of(train(problem, grid))[0]
    assert all(set(record.held_out) == {"loss"} for record in report.clients)


def test_an_answer_in_the_name_of_another_node_is_not_heard() -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")

    def disguise(message: Message, answer: Message) -> Message:
        if message.metadata.message_type == "train":
            answer.metadata.__dict__["_src_node_id"] = 104
        return answer

    grid.nodes[100].spoil = disguise
    report = reports_of(train(problem, grid))[0]
    assert report.silent == ("c0",)
    assert "client `c0` was silent: its answer says that it comes from node 104" in report.notes
    assert not report.refused


def test_words_of_a_site_are_cut_before_they_fill_the_metrics() -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")
    odd = {f"{i} {'x' * 2000}": torch.ones(1) for i in range(1500)}
    grid.nodes[100].spoil = spoiled(
        lambda r, a: replace(r, deltas={**r.deltas, **odd}), notes=["y" * 10_000] * 200
    )
    report = reports_of(train(problem, grid, rounds=1))[0]
    assert len(report.refused) == 1000
    assert max(len(each.objective) for each in report.refused) == 500
    assert max(map(len, report.notes)) < 600


def test_one_reply_at_a_time_is_at_the_server() -> None:
    problem = unequal()
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Watched(FakeGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            nonlocal most
            most = max(most, sum(each() is not None for each in alive))
            found = list(super().pull_messages(message_ids))
            alive.extend(weakref.ref(each) for each in found)
            return found

    grid = Watched()
    for client in problem.population.ids():
        grid.join(site_app(site_of(problem, client), engine="sequential"))
    train(problem, grid, rounds=2)
    assert len(alive) == 6 + 12 + 6
    assert most <= 1


@pytest.mark.parametrize("evaluate", ["all", 2])
def test_others_than_the_cohort_may_be_evaluated(evaluate: Any) -> None:
    problem = unequal()
    options: dict[str, Any] = {"participation": Number(2), "evaluate": evaluate}
    there = run_of(train(problem, connect(problem, engine="sequential"), **options))
    here = fit(problem, fmol.FSMGDA(local_steps=2), 4, 3, device="cpu", **options)
    assert torch.equal(there.losses, here.losses)
    assert there.reports[0].evaluated == here.reports[0].evaluated


def test_a_reply_to_a_round_of_before_is_refused() -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")
    old: list[Message] = []

    def replay(message: Message, answer: Message) -> Message:
        if message.metadata.message_type == "train":
            old.append(answer)
            return Message(old[0].content, reply_to=message)
        return answer

    grid.nodes[100].spoil = replay
    reports = reports_of(train(problem, grid))
    assert not reports[0].refused
    assert {str(each).split(": ", 1)[1] for each in reports[2].refused} == {
        "the message is of round 0, and 2 was expected. It is too late or too early, and is left out."
    }


def test_a_second_answer_to_one_ask_is_left_out_and_said() -> None:
    problem = unequal()

    class Twice(FakeGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            found = list(super().pull_messages(message_ids))
            return found + [each for each in found if each.metadata.message_type == "train"]

    grid = Twice()
    for client in problem.population.ids():
        grid.join(site_app(site_of(problem, client), engine="sequential"))
    there = run_of(train(problem, grid))
    here = fit(problem, fmol.FSMGDA(local_steps=2), 4, 3, device="cpu", evaluate="cohort")
    assert torch.equal(flat(there.model), flat(here.model))
    assert sum("nobody waits for" in note for note in there.reports[0].notes) == 6


def test_where_everything_is_refused_the_run_ends_and_says_why() -> None:
    problem = unequal()
    grid = connect(problem, engine="sequential")
    for node in grid.nodes.values():
        node.spoil = BAD["nan"][0]
    with pytest.raises(RefusedError, match="non-finite"):
        train(problem, grid)


def test_an_error_at_a_site_is_a_refusal_that_tells_nothing_of_its_data() -> None:
    problem = unequal()
    grid = connect(problem)

    def broken(outputs: Any, targets: Any) -> Any:
        raise ValueError(f"the secret is {targets[0]}")

    own = replace(problem.client("c0"), objectives=("a",))
    bad = Federation(problem.model, [Objective("a", broken)], [own])
    grid.nodes[100].app = site_app(bad)
    report = reports_of(train(problem, grid))[1]
    assert [str(each) for each in report.refused] == [
        "round 1, client `c0`, objective `a`: it could not answer: ValueError: what went wrong is in "
        "the site's log"
    ]
    assert "secret" not in repr(report)


class Unreadable:
    """Cannot read what c1 sends."""

    def client(self, reply: Reply, ask: Ask, site: Any) -> Reply:
        return reply

    def server(self, reply: Reply, ask: Ask) -> Reply:
        if reply.client == "c1":
            raise KeyError("scale")
        return reply


def test_what_goes_wrong_while_a_site_is_made_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    problem = unequal()
    grid = connect(problem)

    def load(context: Context) -> Federation:
        raise OSError("/data/secret.csv is not there")

    grid.nodes[100].app = site_app(load)
    report = reports_of(train(problem, grid))[0]
    (note,) = [note for note in report.notes if "turned away" in note]
    assert note == "node 100 was turned away: OSError: what went wrong is in the site's log"
    assert "secret.csv" in caplog.text


def test_a_warm_process_that_did_not_answer_is_noted() -> None:
    problem = unequal()
    grid = connect(problem)

    def tell(message: Message, answer: Message) -> Message:
        answer.content[NOTE] = ConfigRecord({"where": "here", "why": "it ended"})
        return answer

    grid.nodes[100].spoil = tell
    report = reports_of(train(problem, grid))[0]
    assert "client `c0`: the warm process did not answer: it ended" in report.notes


def test_a_transform_that_cannot_read_a_reply_refuses_it() -> None:
    problem = unequal()
    grid = connect(problem, allow=[Unreadable])
    report = reports_of(train(problem, grid, transforms=(Unreadable(),)))[0]
    assert {each.client for each in report.refused} == {"c1"}
    assert "Unreadable cannot take it in: KeyError" in str(report.refused[0])


# ---- code by name ----------------------------------------------------------------------------


def test_a_site_carries_out_only_what_it_was_told_to_trust() -> None:
    problem = unequal()
    options: dict[str, Any] = {"transforms": (Halved(),)}
    with pytest.raises(RefusedError, match="`flower_support:Halved`, which this site has not been"):
        train(problem, connect(problem), **options)
    trusting = train(problem, connect(problem, allow=[Halved]), **options)
    assert not reports_of(trusting)[0].refused


def test_a_path_that_a_message_names_is_never_imported_at_a_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = unequal()
    grid = connect(problem)
    monkeypatch.setattr("fmol.flower.server.path_of", lambda thing, what: "this:is_poetry")
    with pytest.raises(
        RefusedError, match="`work` is `this:is_poetry`, which this site has not been"
    ):
        train(problem, grid)
    assert "this" not in sys.modules


# ---- who is there ----------------------------------------------------------------------------


def test_a_site_that_is_deaf_is_silent_after_the_deadline_and_the_others_count() -> None:
    problem = unequal()
    grid = connect(problem)
    strategy = FSMGDA(problem.model, problem.objectives, local_steps=1, device="cpu", patience=2.0)

    def deafen(report: RoundReport, snapshot: Snapshot) -> None:
        grid.nodes[102].deaf = report.round == 0

    began = monotonic()
    result = strategy.start(grid, num_rounds=3, timeout=0.5, callbacks=[deafen])
    silent = [report.silent for report in reports_of(result)]
    assert silent == [(), ("c2",), ()]
    assert "client `c2` was silent: no answer within 0.5 s" in reports_of(result)[1].notes
    assert monotonic() - began < 20


def leave_and_come_back(grid: FakeGrid, node: int, app: ClientApp) -> Any:
    """After the first round a site goes; after the third it is back, as another node."""

    def callback(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 0:
            del grid.nodes[node]
        if report.round == 2:
            grid.join(app, node + 1000)

    return callback


@pytest.mark.parametrize("policy", ["skip", "reuse", "hold"])
def test_the_only_holder_of_an_objective_goes_and_comes_back(policy: str) -> None:
    problem = federation([("a", "b"), ("b",), ("c",)])
    grid = connect(problem)
    app = grid.nodes[102].app
    strategy = FSMGDA(
        problem.model,
        problem.objectives,
        local_steps=1,
        on_missing_objective=policy,
        patience=2.0,
        device="cpu",
    )
    result = strategy.start(
        grid, num_rounds=6, timeout=5, callbacks=[leave_and_come_back(grid, 102, app)]
    )
    reports = reports_of(result)
    assert [report.missing for report in reports] == [(), ("c",), ("c",), (), (), ()]
    assert [report.held for report in reports] == [
        False,
        *[policy == "hold"] * 2,
        *[False] * 3,
    ]
    assert [bool(report.reused) for report in reports] == [
        False,
        *[policy == "reuse"] * 2,
        *[False] * 3,
    ]
    assert [len(report.cohort) for report in reports] == [3, 2, 2, 3, 3, 3]
    assert "site `c2` is gone, and nobody else holds `c`" in reports[1].notes
    assert "site `c2` is back and holds c" in reports[3].notes


def test_a_missing_objective_may_end_the_run() -> None:
    problem = federation([("a", "b"), ("b",), ("c",)])
    grid = connect(problem)
    strategy = FSMGDA(
        problem.model,
        problem.objectives,
        local_steps=1,
        on_missing_objective="fail",
        patience=2.0,
        device="cpu",
    )
    leave = leave_and_come_back(grid, 102, grid.nodes[102].app)
    with pytest.raises(MissingObjectiveError, match="objective `c`"):
        strategy.start(grid, num_rounds=6, timeout=5, callbacks=[leave])


def test_too_few_sites_are_waited_for_within_bounds_and_all_that_is_known_is_said() -> None:
    problem = federation([("a", "b"), ("c",)])
    grid = connect(problem)
    grid.nodes[101].deaf = True
    began = monotonic()
    with pytest.raises(MissingSitesError) as caught:
        train(problem, grid, patience=0.5)
    assert monotonic() - began < 10
    assert str(caught.value).startswith(
        "within 0.5 s 1 of at least 2 sites were there (`c0`); no site holds `c`; node 101 has not "
        "said who it is. Start more SuperNodes"
    )
    with pytest.raises(MissingSitesError, match="0 of at least 2 sites were there"):
        train(problem, FakeGrid(), patience=0.3)


def test_sites_that_leave_in_the_middle_end_the_run_after_the_patience() -> None:
    problem = federation([("a", "b", "c")] * 3)
    grid = connect(problem)
    strategy = FSMGDA(problem.model, problem.objectives, local_steps=1, patience=0.5, device="cpu")

    def clear(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 1:
            grid.nodes.clear()

    with pytest.raises(MissingSitesError, match="0 of at least 2 sites"):
        strategy.start(grid, num_rounds=5, timeout=5, callbacks=[clear])


def introduced(**changes: Any) -> Any:
    """Lets a node say something else of itself."""

    def spoil(message: Message, answer: Message) -> Message:
        if not message.metadata.message_type.startswith("query"):
            return answer
        site = unpack_introduction(from_content(answer.content))
        assert isinstance(site, Introduction)
        return Message(to_content(pack_introduction(replace(site, **changes))), reply_to=message)

    return spoil


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layout": "0123456789abcdef"},
            "a model with layout '0123456789abcdef', and the server's",
        ),
        ({"objectives": ("x",)}, "none of them is among the server's objectives"),
        ({"samples": 10**6}, "says that it has 1000000 samples, and 1 to 1000 are let in"),
        ({"samples": 0}, "says that it has 0 samples"),
        ({"client": ""}, "its name is ''"),
        ({"client": "a\nb"}, "letters that can be printed"),
    ],
    ids=str,
)
def test_a_site_that_cannot_take_part_is_turned_away_and_the_others_train(
    changes: dict[str, Any], words: str
) -> None:
    problem = unequal()
    grid = connect(problem)
    grid.nodes[104].spoil = introduced(**changes)
    report = reports_of(train(problem, grid, max_samples=1000))[0]
    assert len(report.cohort) == 5
    (note,) = [note for note in report.notes if "turned away" in note]
    assert note.startswith("node 104 was turned away")
    assert words in note


def test_a_name_belongs_to_the_node_that_gave_it_first_until_that_is_gone() -> None:
    problem = unequal()
    grid = connect(problem)
    twin = grid.join(site_app(site_of(problem, "c0")), 900)

    def leave(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 0:
            del grid.nodes[100]

    strategy = FSMGDA(problem.model, problem.objectives, local_steps=1, device="cpu", patience=2)
    reports = reports_of(strategy.start(grid, num_rounds=2, timeout=5, callbacks=[leave]))
    assert f"node {twin} says that it is `c0`, which node 100 is" in "\n".join(reports[0].notes)
    assert "site `c0` is back and holds a, b" in reports[1].notes
    assert [len(report.cohort) for report in reports] == [6, 6]


def test_a_node_that_is_no_site_of_fmols_is_turned_away() -> None:
    problem = unequal()
    grid = connect(problem)
    stranger = ClientApp()

    @stranger.train()
    def echo(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    grid.join(stranger, 900)
    report = reports_of(train(problem, grid))[0]
    assert len(report.cohort) == 6
    assert any(note.startswith("node 900 was turned away") for note in report.notes)


def test_a_site_that_comes_late_takes_part_from_then_on(tmp_path: Path) -> None:
    problem = unequal()
    out = tmp_path / "run"
    grid = connect(problem)
    late = grid.nodes.pop(104)

    def arrive(report: RoundReport, snapshot: Snapshot) -> None:
        grid.nodes[104] = late

    options: dict[str, Any] = {"local_steps": 1, "device": "cpu", "patience": 2}
    strategy = FSMGDA(problem.model, problem.objectives, out=out, **options)
    reports = reports_of(strategy.start(grid, num_rounds=3, timeout=5, callbacks=[arrive]))
    assert [len(report.cohort) for report in reports] == [5, 6, 6]
    record = RunFolder.open(out).record()
    assert [client.id for client in record.portrait.clients] == [f"c{i}" for i in range(6)]


def test_too_few_replies_leave_the_model_as_it_is() -> None:
    problem = unequal()
    grid = connect(problem)
    strategy = FSMGDA(
        problem.model, problem.objectives, local_steps=1, min_replies=6, device="cpu", patience=2
    )

    def deafen(report: RoundReport, snapshot: Snapshot) -> None:
        grid.nodes[102].deaf = report.round == 0

    result = strategy.start(grid, num_rounds=3, timeout=0.3, callbacks=[deafen])
    reports = reports_of(result)
    assert [report.held for report in reports] == [False, True, False]
    assert "5 replies came and at least 6 are asked for (`min_replies`)" in str(reports[1].notes)


@pytest.mark.parametrize("drift", ["none", "scaffold"])
def test_an_objective_with_too_few_replies_counts_as_missing(drift: str) -> None:
    problem = federation([("a", "b"), ("a", "b"), ("a",)], names=("a", "b"))
    grid = connect(problem, engine="sequential")
    strategy = FSMGDA(
        problem.model,
        problem.objectives,
        local_steps=2,
        batch_size=4,
        min_replies_per_objective=2,
        drift_correction=drift,
        device="cpu",
        patience=2,
    )
    cleared: list[torch.Tensor] = []

    def deafen(report: RoundReport, snapshot: Snapshot) -> None:
        grid.nodes[100].deaf = report.round == 0
        cleared.extend(t.clone() for n, t in snapshot.state.memory.items() if n == "control_weight")

    result = strategy.start(grid, num_rounds=3, timeout=0.3, callbacks=[deafen])
    reports = reports_of(result)
    assert [report.missing for report in reports] == [(), ("b",), ()]
    assert reports[1].weights["b"] == 0
    assert not reports[1].held
    assert "`b` has updates of 1 sites and at least 2 are asked for" in str(reports[1].notes)
    assert not any("did not have" in note for report in reports for note in report.notes)
    if drift == "scaffold":
        assert [each.tolist() for each in cleared] == [[3.0, 2.0]] * 3


# ---- stopping and going on -------------------------------------------------------------------


class Killed(BaseException):
    """What a kill is like: nothing is caught, nothing is written."""


@pytest.mark.parametrize("drift", ["none", "scaffold"])
@pytest.mark.parametrize("when", ["ask", "commit"])
def test_a_server_that_was_killed_goes_on_to_the_same_model(
    tmp_path: Path, drift: str, when: str
) -> None:
    problem = unequal()
    options: dict[str, Any] = {
        "local_steps": 2,
        "batch_size": 4,
        "drift_correction": drift,
        "participation": Number(4),
        "seed": 3,
        "device": "cpu",
    }
    straight = run_of(
        FSMGDA(problem.model, problem.objectives, **options).start(
            connect(problem, engine="sequential"), num_rounds=6
        )
    )
    grid = connect(problem, engine="sequential")
    count = 0

    def kill(message: Message) -> None:
        nonlocal count
        count += message.metadata.message_type == "train"
        if count == 14:  # In the fourth round, when some sites have answered.
            raise Killed

    def stop(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 3:  # After sites were told nothing of it, and before it is written down.
            raise Killed

    strategy = FSMGDA(problem.model, problem.objectives, out=tmp_path / "run", **options)
    if when == "ask":
        grid.before_pull = kill
    with pytest.raises(Killed):
        strategy.start(grid, num_rounds=6, callbacks=[stop] if when == "commit" else ())
    grid.before_pull = None
    again = FSMGDA(problem.model, problem.objectives, out=tmp_path / "run", **options)
    resumed = run_of(again.start(grid, num_rounds=6))
    assert torch.equal(flat(resumed.model), flat(straight.model))
    assert len(resumed.reports) == 6
    assert torch.equal(resumed.losses, straight.losses)
    assert not any("did not have" in note for each in resumed.reports for note in each.notes)


def test_what_a_site_kept_is_gone_with_its_memory_and_that_is_said_and_harmless() -> None:
    problem = federation([("a", "b", "c")] * 3)
    grid = connect(problem, engine="sequential")
    strategy = FSMGDA(
        problem.model,
        problem.objectives,
        local_steps=2,
        batch_size=4,
        drift_correction="scaffold",
        device="cpu",
    )
    weights: list[list[float]] = []

    def forget(report: RoundReport, snapshot: Snapshot) -> None:
        weights.append(snapshot.state.memory["control_weight"].tolist())
        if report.round == 1:
            grid.nodes[101].context.state = RecordDict()

    reports = reports_of(strategy.start(grid, num_rounds=5, timeout=5, callbacks=[forget]))
    lost = [[note for note in report.notes if "did not have" in note] for report in reports]
    assert [len(each) for each in lost] == [0, 0, 1, 0, 0]
    assert lost[2][0].startswith("client `c1` did not have what it should have kept")
    assert weights == [[3.0] * 3] * 5  # Nobody is counted twice.


def test_with_a_folder_of_its_own_a_site_forgets_nothing(tmp_path: Path) -> None:
    problem = unequal()
    options: dict[str, Any] = {
        "local_steps": 2,
        "batch_size": 4,
        "drift_correction": "scaffold",
        "device": "cpu",
    }
    grid = connect(problem, engine="sequential", keep=tmp_path)

    def forget(report: RoundReport, snapshot: Snapshot) -> None:
        for node in grid.nodes.values():
            node.context.state = RecordDict()

    strategy = FSMGDA(problem.model, problem.objectives, **options)
    there = run_of(strategy.start(grid, num_rounds=4, timeout=5, callbacks=[forget]))
    del options["device"]
    here = fit(problem, fmol.FSMGDA(**options), 4, device="cpu")
    assert torch.equal(flat(there.model), flat(here.model))
    assert len(list(tmp_path.glob("c0-*.memory"))) == 1
    next(tmp_path.glob("c0-*.memory")).write_bytes(b"broken")
    more = train(problem, connect(problem, keep=tmp_path), rounds=1)
    assert not reports_of(more)[0].refused


def test_a_run_folder_is_as_of_any_run(tmp_path: Path) -> None:
    problem = unequal()
    result = train(problem, connect(problem), out=tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    record = folder.record()
    assert len(record.reports) == 4
    assert record.algorithm == "fsmgda"
    assert [each.samples for each in record.portrait.clients] == [5, 9, 12, 7, 6, 8]
    assert [each.held_out for each in record.portrait.clients] == [4] * 6
    assert folder.report.stat().st_size > 10_000
    line = json.loads(folder.metrics.read_text().splitlines()[0])
    assert line["bytes_up"] == reports_of(result)[0].bytes_up
    with pytest.raises(RunError, match=r"sites of a Flower app. Start that app again"):
        resume(folder.path)
    with pytest.raises(RunError, match="`local_steps` was 2 and is 3"):
        train(problem, connect(problem), out=tmp_path / "run", local_steps=3)
    # Other sites may be there when it goes on, and be waited for otherwise.
    fewer = connect(problem)
    del fewer.nodes[105]
    more = train(problem, fewer, rounds=5, out=tmp_path / "run", patience=3.0, min_sites=1)
    assert [len(report.cohort) for report in reports_of(more)] == [6, 6, 6, 6, 5]


# ---- Flower's side ---------------------------------------------------------------------------


def test_the_result_is_flowers_and_has_fmols_in_it() -> None:
    problem = unequal()
    seen: list[int] = []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(round)
        assert list(arrays) == list(problem.model.state_dict())
        return MetricRecord({"norm": float(flat(problem.model).norm())})

    strategy = FSMGDA(problem.model, problem.objectives, local_steps=2, device="cpu")
    begin = {name: tensor + 0.5 for name, tensor in problem.model.state_dict().items()}
    result = strategy.start(
        connect(problem), ArrayRecord(begin), num_rounds=2, evaluate_fn=evaluate
    )
    assert seen == [0, 1, 2]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert sorted(result.evaluate_metrics_clientapp) == [0, 1, 2]
    first = result.train_metrics_clientapp[1]
    assert first["loss.a"] == reports_of(result)[0].losses["a"]
    assert "Global Arrays" in repr(result)
    final = run_of(result).model.state_dict()
    for name, tensor in result.arrays.to_torch_state_dict().items():
        assert torch.equal(tensor, final[name])
    model = copy.deepcopy(problem.model)
    model.load_state_dict(begin)
    here = Federation(model, problem.objectives, clients_of(problem))
    same = fit(here, fmol.FSMGDA(local_steps=2), 2, device="cpu")
    assert torch.allclose(flat(run_of(result).model), flat(same.model), rtol=1e-9)


def test_hooks_are_called_in_flowers_order_and_may_be_added_to() -> None:
    problem = unequal()
    calls: list[Any] = []

    class Mine(FSMGDA):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            calls.append(("configure", server_round, sorted(arrays)))
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            _, metrics = super().aggregate_train(server_round, replies)
            calls.append(("aggregate", server_round, dict(metrics or {})))
            return None, metrics

        def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
            calls.append(("evaluate", server_round))
            return super().aggregate_evaluate(server_round, replies)

    grid = connect(problem)
    strategy = Mine(problem.model, problem.objectives, local_steps=1, device="cpu")
    config = ConfigRecord({"hello": "sites"})
    strategy.start(grid, num_rounds=2, train_config=config)
    assert calls == [
        ("configure", 1, ["x.0000"]),
        ("aggregate", 1, {"replies": 6, "refused": 0}),
        ("configure", 2, ["x.0000"]),
        ("aggregate", 2, {"replies": 6, "refused": 0}),
        ("evaluate", 3),
    ]
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all(message.content["config"]["hello"] == "sites" for message in trained)
    with pytest.raises(ValueError, match="no round is going on"):
        list(strategy.configure_train(1, ArrayRecord([]), ConfigRecord(), grid))


def test_options_that_make_no_sense_are_refused() -> None:
    problem = unequal()

    def make(**options: Any) -> FSMGDA:
        return FSMGDA(problem.model, problem.objectives, **{"local_steps": 1, **options})

    with pytest.raises(
        ValueError, match=r"no option `local_step` \(did you mean `local_steps`\?\)"
    ):
        make(local_step=3)
    with pytest.raises(ValueError, match="`min_replies` must be"):
        make(min_replies=0)
    with pytest.raises(ValueError, match="`evaluate_every` must be"):
        make(evaluate_every=0)
    with pytest.raises(ValueError, match="`min_sites` must be at least 1, got 0"):
        make(min_sites=0)
    with pytest.raises(ValueError, match="`patience` must be more than 0"):
        make(patience=0)
    with pytest.raises(ValueError, match="MultiObjective has no algorithm"):
        MultiObjective(problem.model, problem.objectives)
    with pytest.raises(ValueError, match="`timeout` must be more than 0"):
        make().start(FakeGrid(), timeout=0)
    with pytest.raises(ValueError, match="`initial_arrays` are not those of the strategy's model"):
        make().start(FakeGrid(), ArrayRecord(nn.Linear(2, 2).state_dict()))


def test_a_site_with_several_clients_or_a_foreign_query_says_so() -> None:
    problem = unequal()
    grid = FakeGrid()
    grid.join(site_app(problem))
    with pytest.raises(MissingSitesError, match="this site's federation has 6 clients"):
        train(problem, grid, patience=0.5)


def test_large_messages_go_in_several_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = unequal()

    def small(data: bytes, name: str, part_bytes: int = 100) -> Any:
        return to_arrays(data, name, 100)

    monkeypatch.setattr("fmol.flower.server.to_arrays", small)
    grid = connect(problem, engine="sequential")
    there = run_of(train(problem, grid))
    assert len(grid.sent[-1].content["fmol"]) > 5
    here = fit(problem, fmol.FSMGDA(local_steps=2), 4, 3, device="cpu")
    assert torch.equal(flat(there.model), flat(here.model))


def test_updates_in_half_precision_weigh_less() -> None:
    problem = unequal()
    full, half = (reports_of(train(problem, connect(problem), half=h))[0] for h in (False, True))
    assert half.bytes_up < full.bytes_up
    assert half.bytes_down == full.bytes_down


def test_data_of_a_site_are_not_at_the_server() -> None:
    problem = unequal()
    result = run_of(train(problem, connect(problem)))
    client = result.federation.client("c0")
    assert len(client.data) == 5
    with pytest.raises(fmol.FmolError, match="these data are at their site"):
        client.data()
