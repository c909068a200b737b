"""Through Flower's simulation come the numbers of the sequential engine, bit for bit."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')

from flower_processes import run_script
from flower_support import (
    Halved,
    LargeOnly,
    claim_too_much,
    count_visits,
    fail,
    first_error,
    keep_phase,
    obey,
    sleep_at_c1,
    two_phases,
)
from fmol import (
    FMGDA,
    FSMGDA,
    MGD,
    SMGD,
    Alone,
    Client,
    FedALS,
    FedAvg,
    Federation,
    FedLS,
    LazyPopulation,
    Objective,
    Result,
    fit,
)
from fmol.aggregate import MeanFold
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Engine, Lane, LocalConfig, Reply, Site, Work
from fmol.flower import ClientError, FlowerEngine
from fmol.flower.client import Sites
from fmol.flower.memory import Memory
from fmol.flower.simulation import Simulation
from fmol.flower.wire import pack_ask, pack_x, unpack_reply
from fmol.local import local_work
from fmol.participation import Number
from fmol.result import Snapshot
from fmol.rounds import Algorithm, Checkpoint, RoundReport
from support import data, federation, flat, masked_error, relative, squared_error

HOLDINGS = [("a", "b"), ("c",), ("b", "c"), ("a",), ("a", "b", "c"), ("c", "a")]


def unequal(**options: Any) -> Federation:
    """Six clients with objectives and numbers of samples of their own."""
    return federation(HOLDINGS, sizes=[5, 9, 12, 7, 6, 8], **options)


def both(problem: Federation, algorithm: Algorithm, **options: Any) -> tuple[Result, Result]:
    options = {"rounds": 4, "seed": 3, "device": "cpu", **options}
    engine = options.pop("engine", "flower")
    sequential = fit(problem, algorithm, engine="sequential", **options)
    return sequential, fit(problem, algorithm, engine=engine, **options)


def without_times(report: RoundReport) -> str:
    clients = tuple(record._replace(seconds=0.0) for record in report.clients)
    return repr(replace(report, seconds={}, clients=clients))


def assert_identical(one: Result, other: Result) -> None:
    """The same bits everywhere: model, reports, what stays at the clients."""
    assert torch.equal(flat(one.model), flat(other.model))
    for mine, theirs in zip(one.reports, other.reports, strict=True):
        assert without_times(mine) == without_times(theirs)
    assert repr(one.final.losses) == repr(other.final.losses)
    assert repr(one.final.held_out) == repr(other.final.held_out)
    assert one.client_state.keys() == other.client_state.keys()
    for client, state in one.client_state.items():
        assert state.keys() == other.client_state[client].keys()
        assert all(torch.equal(t, other.client_state[client][n]) for n, t in state.items())


ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=3, batch_size=4),
    FSMGDA(
        local_epochs=2,
        batch_size=4,
        accumulate="mean",
        weighting="samples",
        normalize="loss",
        local_momentum=0.5,
        clip_norm=0.5,
        proximal=0.3,
    ),
    FSMGDA(local_steps=2, batch_size=4, drift_correction="scaffold"),
    FMGDA(local_steps=2, shared="trunk.*", on_missing_objective="reuse"),
    MGD(0.1),
    SMGD(batch_size=4),
    FedAvg({"a": 0.5, "b": 0.0, "c": 2.0}, local_steps=3, batch_size=4),
    FedLS(local_steps=3, batch_size=4),
    FedALS(local_steps=3, batch_size=4, heads="heads.*", local_lr=0.01, temperature=2.0),
    Alone(local_steps=2, batch_size=4),
]


@pytest.mark.parametrize("participation", [None, Number(3)], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_flower_gives_the_bits_of_the_sequential_engine(
    algorithm: Algorithm, participation: Any
) -> None:
    assert_identical(*both(unequal(), algorithm, participation=participation))


def test_float32_dropout_held_out_data_and_true_gradients_give_the_same_bits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    objectives = [
        Objective(name, masked_error(s), {"error": squared_error(s)})
        for s, name in enumerate("abc")
    ]

    def single(n: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = data(n, seed=seed)
        targets[::3, 0] = torch.nan
        return inputs.float(), targets.float()

    clients = [
        Client(f"c{i}", single(6 + i, i), held, held_out=single(5, 9 + i) if i % 2 else None)
        for i, held in enumerate(HOLDINGS)
    ]
    problem = Federation(net, objectives, clients)
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    assert_identical(*both(problem, algorithm, true_gradients_every=2, evaluate_every=2))


def test_lazy_clients_become_nodes_when_they_are_asked() -> None:
    def make(id: str) -> Client:
        return Client(id, lambda: data(6 + int(id[1:]) % 3, seed=int(id[1:])), ("a", "b", "c"))

    class Many:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, i: int) -> str:
            return f"c{i:06d}"

    made: list[FlowerEngine] = []

    def engine(*arguments: Any, **options: Any) -> FlowerEngine:
        made.append(FlowerEngine(*arguments, **options))
        return made[-1]

    base = federation()
    problem = Federation(base.model, base.objectives, LazyPopulation(Many(), make))  # type: ignore[arg-type]
    algorithm = FSMGDA(local_steps=2, batch_size=4, drift_correction="scaffold")
    assert_identical(*both(problem, algorithm, participation=Number(5), engine=engine))
    assert 5 < len(made[0]._simulation._nodes) <= 5 * 5


@pytest.mark.parametrize("transforms", [(Halved(0.25),), (LargeOnly(), Halved())], ids=str)
def test_transforms_have_their_client_half_at_the_client(transforms: tuple[Any, ...]) -> None:
    algorithm = FSMGDA(local_steps=2, batch_size=4, transforms=transforms)
    one, other = both(unequal(), algorithm, participation=Number(4))
    assert_identical(one, other)
    assert bool(other.client_state) == (LargeOnly() in transforms)


class Counting(FSMGDA):
    """FSMGDA whose clients count how often they were asked for their losses."""

    work: ClassVar[Work] = staticmethod(count_visits)


def test_a_work_of_ones_own_is_found_at_the_client_by_its_import_path() -> None:
    one, other = both(unequal(), Counting(local_steps=2, batch_size=4), participation=Number(3))
    assert_identical(one, other)
    assert other.client_state


def test_a_work_without_an_import_path_is_refused_and_it_is_said_why() -> None:
    engine = FlowerEngine(federation())

    def inside(ask: Ask, site: Site) -> Reply:
        return local_work(ask, site)

    with pytest.raises(ValueError, match=r"(?s)inside.*which a client cannot find by that name"):
        engine.map([Ask(client="c0", round=0, x=flat(engine.federation.model))], work=inside)
    assert engine._simulation._workers is None  # Nothing was started for it.


def run_two_phases(engine: Engine, rounds: int, fail_in: int | None = None) -> Tensor:
    """Phase 0 keeps deltas at the clients, phase 1 sends them; a round may fail in between."""
    problem = engine.federation
    x = flat(problem.model)
    for t in range(rounds):
        asks = [
            Ask(
                client=id,
                round=t,
                x=x,
                lanes=tuple(Lane(n, {n: 1.0}) for n in problem.client(id).objectives),
                local=LocalConfig(lr=0.1, steps=2, batch_size=3),
            )
            for id in problem.population.ids()
        ]
        engine.map(asks, work=two_phases)
        if t == fail_in:
            engine.discard()
            assert engine.client_state() == {}
            continue
        payload = {"scale": torch.tensor(2.0, dtype=x.dtype)}
        again = [replace(ask, phase=1, payload=payload) for ask in asks]
        means, _ = engine.map(again, MeanFold(problem.names, x, "uniform"), work=two_phases)
        engine.commit()
        assert engine.client_state() == {}
        x = x - 0.05 * means.deltas.sum(0)
    return x


@pytest.mark.parametrize("fail_in", [None, 1])
def test_two_phases_and_a_round_that_is_discarded(fail_in: int | None) -> None:
    problem = unequal()
    engine = FlowerEngine(problem)
    try:
        ours = run_two_phases(engine, 3, fail_in)
    finally:
        engine.close()
    assert torch.equal(ours, run_two_phases(SequentialEngine(problem), 3, fail_in))


@pytest.mark.parametrize("make", [SequentialEngine, FlowerEngine])
def test_a_refusal_in_a_later_phase_takes_back_what_was_kept(make: Any) -> None:
    problem = federation([("a",)], names=("a",))
    engine, x = make(problem), flat(problem.model)
    try:
        for phase in (0, 1):
            _, receipt = engine.map([Ask(client="c0", round=0, phase=phase, x=x)], work=keep_phase)
        assert "its training loss at x is nan" in str(receipt.refused[0])
        engine.commit()
        assert engine.client_state() == {}
        engine.map([Ask(client="c0", round=1, phase=0, x=x)], work=keep_phase)
        engine.discard()
        assert engine.client_state() == {}
        engine.map([Ask(client="c0", round=2, phase=0, x=x)], work=keep_phase)
        engine.commit()
        assert float(engine.client_state()["c0"]["phase"]) == 0.0
        _, receipt = engine.map([Ask(client="c0", round=3, phase=1, x=x)], work=keep_phase)
        engine.commit()
        assert float(engine.client_state()["c0"]["phase"]) == 0.0
    finally:
        engine.close()


class Seen:
    """What clients saw in their own state."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, list[float]]]] = []

    def add(self, reply: Reply, ask: Ask) -> None:
        saw = {name: tensor.tolist() for name, tensor in reply.extra.items()}
        self.all.append((reply.client, saw))

    def result(self) -> list[tuple[str, dict[str, list[float]]]]:
        return self.all


step = st.tuples(st.sampled_from(["c0", "c1", "both"]), st.integers(0, 5), st.booleans())
moves = st.lists(st.sampled_from(["commit", "discard", "checkpoint"]) | step, max_size=14)


@settings(max_examples=40, deadline=None)
@given(moves)
def test_whatever_is_kept_refused_committed_or_discarded_clients_have_the_same(
    moves: list[Any],
) -> None:
    problem = federation([("a", "b"), ("a", "b")], names=("a", "b"))
    engines: list[Engine] = [SequentialEngine(problem), FlowerEngine(problem)]
    x, lanes = flat(problem.model), (Lane("a", {"a": 1.0}), Lane("b", {"b": 1.0}))
    try:
        for round, move in enumerate(moves):
            if move == "checkpoint":
                for engine in engines:
                    engine.load_client_state(engine.client_state())
            elif isinstance(move, str):
                for engine in engines:
                    getattr(engine, move)()
            else:
                who, order, broken = move
                payload = {"order": torch.tensor(order)} | ({"broken": x} if broken else {})
                asks = [
                    Ask(client=id, round=round, x=x, lanes=lanes, payload=payload)
                    for id in (("c0", "c1") if who == "both" else (who,))
                ]
                one, other = (engine.map(asks, Seen(), work=obey)[0] for engine in engines)
                assert one == other
            kept, same = (
                {c: {n: t.tolist() for n, t in s.items()} for c, s in e.client_state().items()}
                for e in engines
            )
            assert kept == same
    finally:
        engines[1].close()


def test_a_client_that_is_asked_twice_hears_of_the_first_answer_before_the_second() -> None:
    states = []
    for make in (SequentialEngine, FlowerEngine):
        engine: Engine = make(federation())
        ask = Ask(client="c0", round=0, x=flat(engine.federation.model), evaluate=("a",))
        try:
            engine.map([ask, ask, ask], work=count_visits)
            engine.commit()
            states.append(float(engine.client_state()["c0"]["visits"]))
        finally:
            engine.close()
    assert states == [3.0, 3.0]


def test_what_is_not_finite_or_claimed_too_high_is_refused_alike() -> None:
    problem = unequal()
    clients = [problem.client(id) for id in problem.population.ids()]
    broken = clients[4].data[1].clone()
    broken[0, 0] = torch.inf
    clients[4] = replace(clients[4], data=(clients[4].data[0], broken))
    refusing = Federation(problem.model, problem.objectives, clients)
    algorithm = FSMGDA(local_steps=2, batch_size=4, drift_correction="scaffold")
    one, other = both(refusing, algorithm)
    assert_identical(one, other)
    assert other.reports[0].refused
    ask = Ask(client="c0", round=0, x=flat(problem.model), evaluate=("a",))
    refusals = []
    for make in (SequentialEngine, FlowerEngine):
        engine: Engine = make(problem)
        try:
            refusals.append(engine.map([ask], work=claim_too_much)[1].refused)
        finally:
            engine.close()
    assert refusals[0] == refusals[1]
    assert "claims 1000000 samples" in str(refusals[0][0])


@pytest.mark.parametrize(
    "algorithm",
    [
        FSMGDA(local_steps=2, batch_size=4, drift_correction="scaffold"),
        Alone(local_steps=2, batch_size=4),
    ],
    ids=lambda a: type(a).__name__,
)
def test_resuming_gives_the_same_model_as_not_stopping(algorithm: Algorithm) -> None:
    problem, options = unequal(), {"device": "cpu", "participation": Number(4)}
    straight = fit(problem, algorithm, rounds=5, engine="sequential", **options)  # type: ignore[arg-type]
    kept: list[Checkpoint] = []

    def stop(report: RoundReport, snapshot: Snapshot) -> bool:
        kept.append(snapshot.checkpoint())
        return report.round == 2

    fit(problem, algorithm, rounds=5, engine="flower", callbacks=[stop], **options)  # type: ignore[arg-type]
    resumed = fit(problem, algorithm, rounds=5, engine="flower", resume=kept[-1], **options)  # type: ignore[arg-type]
    assert torch.equal(flat(resumed.model), flat(straight.model))
    for client, state in straight.client_state.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, resumed.client_state[client][name])


def test_a_client_that_does_not_answer_in_time_is_silent_and_the_others_count() -> None:
    problem = federation([("a",), ("a",), ("a",)], names=("a",))
    engine = FlowerEngine(problem, patience=0.3)
    x = flat(problem.model)
    asks = [Ask(client=f"c{i}", round=0, x=x, evaluate=("a",)) for i in range(3)]
    try:
        _, receipt = engine.map(asks, work=sleep_at_c1)
    finally:
        engine.close()
    assert receipt.silent == ("c1",)
    assert [record.client for record in receipt.clients] == ["c0", "c2"]
    assert receipt.notes == ("client `c1` was silent: no answer within 0.3 s",)
    same = SequentialEngine(problem).map([asks[0], asks[2]])[1]
    assert [r.loss for r in receipt.clients] == [r.loss for r in same.clients]


def test_an_error_at_a_client_is_told_with_round_client_and_traceback() -> None:
    engine = FlowerEngine(federation())
    ask = Ask(client="c2", round=7, x=flat(engine.federation.model))
    try:
        with pytest.raises(ClientError, match=r"client `c2` could not answer in round 7") as caught:
            engine.map([ask], work=fail)
    finally:
        engine.close()
    assert "ZeroDivisionError: at c2" in str(caught.value)
    assert "flower_support.py" in caught.value.__notes__[0]
    assert engine.client_state() == {}


def test_a_reply_that_was_damaged_on_its_way_is_refused_and_the_others_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = unequal()
    pull = Simulation.pull_messages

    def damaged(self: Simulation, ids: Any) -> Any:
        replies = list(pull(self, ids))
        for reply in replies:
            (array,) = reply.content.array_records["fmol"].values()
            if b'"client":"c0"' in array.data:
                array.data = array.data[:-9] + b"\xff" + array.data[-8:]
        return replies

    monkeypatch.setattr(Simulation, "pull_messages", damaged)
    result = fit(problem, FSMGDA(local_steps=1), rounds=1, device="cpu", engine="flower")
    refused = [str(refusal) for refusal in result.reports[0].refused]
    assert [each.split(":")[0] for each in refused] == [
        "round 0, client `c0`, objective `a`",
        "round 0, client `c0`, objective `b`",
    ]
    assert "does not match its checksum" in refused[0]


def test_products_in_bf16_are_those_of_the_sequential_engine() -> None:
    algorithm, options = FSMGDA(local_steps=2, batch_size=4), {"rounds": 2, "device": "cpu"}
    one, other = (
        fit(unequal(), algorithm, engine=partial(make, precision="bf16"), **options)  # type: ignore[arg-type]
        for make in (SequentialEngine, FlowerEngine)
    )
    assert_identical(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_sequential_engine_gives_there() -> None:
    algorithm = FSMGDA(local_steps=2, batch_size=4, transforms=(LargeOnly(),))
    one, other = both(unequal(), algorithm, device="cuda")
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert other.client_state["c0"]["rest.a"].device.type == "cuda"


def test_no_message_is_kept_after_it_was_answered() -> None:
    engine = FlowerEngine(federation())
    x = flat(engine.federation.model)
    try:
        for round in range(3):
            engine.map([Ask(client=f"c{i}", round=round, x=x) for i in range(4)])
        state = engine._simulation._state
        assert (state.num_message_ins(), state.num_message_res()) == (0, 0)
    finally:
        engine.close()


def test_updates_in_half_precision_are_close_and_weigh_half() -> None:
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one, other = both(unequal(), algorithm, engine=partial(FlowerEngine, half=True))
    assert 0 < relative(flat(other.model), flat(one.model)) < 1e-3
    assert other.reports[0].bytes_up < 0.4 * one.reports[0].bytes_up  # Of eight bytes two are left.


def test_nothing_is_left_running_and_nothing_is_started_before_it_is_needed() -> None:
    def ours() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("fmol-flower")}

    before = ours()
    FlowerEngine(federation())
    fit(unequal(), FSMGDA(local_steps=1), rounds=1, device="cpu", engine="flower")
    failing = Client("x", lambda: 1 / 0, ("a", "b", "c"))
    broken = Federation(federation().model, federation().objectives, [failing])
    with pytest.raises(ClientError):
        fit(broken, FSMGDA(local_steps=1), rounds=1, device="cpu", engine="flower")
    assert ours() <= before


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="`backend` must be 'thread' or 'ray', got 'dask'"):
        FlowerEngine(federation(), backend="dask")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whose processes compute on the CPU"):
        FlowerEngine(federation(), backend="ray", device="meta")
    with pytest.raises(ValueError, match="`patience` must be more than 0"):
        FlowerEngine(federation(), patience=0)
    with pytest.raises(ValueError, match="`in_flight` must be at least 1"):
        FlowerEngine(federation(), in_flight=0)


QUIET = """
import os
import socket
import sys

def refuse(self, address):
    raise AssertionError(f"a connection to {address}")

socket.socket.connect = socket.socket.connect_ex = refuse
import fmol
assert "flwr" not in sys.modules, "the core imports flwr"
from support import federation
fmol.fit(federation(), fmol.FSMGDA(local_steps=1), rounds=1, device="cpu", engine="flower")
assert "flwr" in sys.modules
assert "ray" not in sys.modules
from flwr.supercore import telemetry
assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
assert not os.listdir(os.environ["HOME"]), os.listdir(os.environ["HOME"])
print("quiet")
"""

MISSING = """
import sys
sys.modules["flwr"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flwr" else found(name, *rest)
import fmol
from fmol.config import RunOptions
from support import federation
for attempt in (
    lambda: fmol.fit(federation(), fmol.FSMGDA(local_steps=1), rounds=1, engine="flower"),
    lambda: RunOptions(engine="flower", device="cpu"),
):
    try:
        attempt()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_no_connection_is_made_and_nothing_is_written_to_the_home_folder(tmp_path: Path) -> None:
    assert "quiet" in run_script(QUIET, tmp_path)


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    out = run_script(MISSING, tmp_path)
    expected = 'needs flwr. Install it with: pip install "fmol[flower]".'
    assert f'ImportError: `engine="flower"` {expected}' in out
    assert f"OptionsError: RunOptions: `engine` is flower, which {expected}" in out


def test_a_run_and_its_resume_by_command_are_those_of_the_sequential_engine(
    tmp_path: Path,
) -> None:
    from fmol.cli.commands import fmol
    from fmol.runs.folder import RunFolder

    small = "--rounds 2 --device cpu --quiet --drift-correction scaffold"
    line = ["run", "quadratic", *small.split()]
    for name in ("sequential", "flower"):
        out = str(tmp_path / name)
        fmol.main([*line, "--engine", name, "--out", out], standalone_mode=False)
        fmol.main(["resume", out, "--rounds", "4", "--quiet"], standalone_mode=False)
    one, other = (RunFolder.open(tmp_path / name) for name in ("sequential", "flower"))
    assert one.model.read_bytes() == other.model.read_bytes()


RAY = """
from functools import partial
import torch
torch.set_num_threads(1)
import fmol
from fmol.flower import FlowerEngine
from fmol.engines.seam import Ask
from fmol.participation import Number
from flower_support import LargeOnly, sleep_at_c1
from support import federation, flat

holdings = [("a", "b"), ("c",), ("b", "c"), ("a",), ("a", "b", "c"), ("c", "a")]
problem = federation(holdings, sizes=[5, 9, 12, 7, 6, 8])
algorithm = fmol.FSMGDA(local_steps=2, batch_size=4, transforms=(LargeOnly(),))
options = dict(rounds=3, device="cpu", participation=Number(4))
one = fmol.fit(problem, algorithm, **options)
other = fmol.fit(problem, algorithm, engine=partial(FlowerEngine, backend="ray"), **options)
assert torch.equal(flat(one.model), flat(other.model))
assert torch.equal(one.losses, other.losses)
for client, state in one.client_state.items():
    for name, tensor in state.items():
        assert torch.equal(tensor, other.client_state[client][name])
engine = FlowerEngine(problem, backend="ray", processes=1, patience=10)
asks = [Ask(client=f"c{i}", round=0, x=flat(problem.model)) for i in range(3)]
engine.map(asks)
engine._simulation._workers._patience = 0.5
silent = [engine.map(asks, work=sleep_at_c1)[1].silent]
engine._simulation._workers._patience = 60
silent.append(engine.map(asks, work=sleep_at_c1)[1].silent)
engine.close()
print(silent)
"""


@pytest.mark.slow
def test_rays_processes_give_the_same_bits_and_one_that_hangs_is_replaced(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs ray: pip install "fmol[flower]"')
    out = run_script(RAY, tmp_path, timeout=300)
    assert "[('c1'," in out
    assert out.strip().endswith("()]")


def test_sites_that_were_sent_to_another_process_compute_the_same() -> None:
    """Whose losses can be pickled: those of the tests are functions inside functions."""
    problem = federation()
    objectives = [Objective("a", first_error)]
    clients = [Client("c0", data(9), ("a",))]
    sites = Sites(
        Federation(problem.model, objectives, clients), device=torch.device("cpu"), private=True
    )
    sent = pickle.loads(pickle.dumps(sites))
    assert sent.private
    ask = Ask(
        client="c0",
        round=0,
        x=flat(problem.model) + 0.1,
        lanes=(Lane("a", {"a": 1.0}),),
        local=LocalConfig(lr=0.1, steps=3, batch_size=4),
    )
    told = {"work": "fmol.local:local_work", "transforms": [], "seed": 0, "answer": "1"}
    told |= {"fate": None, "kept": "", "half": False}
    layout = problem.layout.digest
    x = pack_x(ask.x, layout)
    packed = pack_ask(ask, layout, x, told)
    one, other = (
        unpack_reply(each.answer(packed, x, Memory())[0], ask, layout).answer
        for each in (sites, sent)
    )
    assert isinstance(one, Reply)
    assert isinstance(other, Reply)
    assert torch.equal(one.deltas["a"], other.deltas["a"])


FLOWERS_OWN = """
import time
import torch
torch.set_num_threads(1)
from fmol.flower.client import Sites, make_client_app
from flwr.app import Message
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Lane, LocalConfig
from fmol.flower.messages import exchange, from_content, to_arrays, to_content
from fmol.flower.wire import pack_ask, pack_x, unpack_reply
from support import federation, flat

problem = federation([("a", "b"), ("c",), ("b", "c")], sizes=[5, 9, 12])
layout = problem.layout.digest
local = LocalConfig(lr=0.1, steps=3, batch_size=4)
asks = [
    Ask(
        client=id,
        round=0,
        x=flat(problem.model),
        lanes=tuple(Lane(n, {n: 1.0}) for n in problem.client(id).objectives),
        local=local,
    )
    for id in problem.population.ids()
]
told = {"work": "fmol.local:local_work", "transforms": [], "seed": 0, "answer": "1"}
told |= {"fate": None, "kept": "", "half": False}
x = pack_x(asks[0].x, layout)
app = ServerApp()


class Same:
    def __init__(self, replies):
        self.replies, self.count = replies, 0

    def add(self, reply, ask):
        other = self.replies[ask.client]
        assert other.samples == reply.samples
        assert all(torch.equal(d, other.deltas[s]) for s, d in reply.deltas.items())
        self.count += len(reply.deltas)

    def result(self):
        return self.count


@app.main()
def main(grid, context):
    until = time.monotonic() + 120
    while len(nodes := sorted(grid.get_node_ids())) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    messages = [
        Message(to_content(pack_ask(ask, layout, x, told), to_arrays(x, "x", 300)), node, "train")
        for ask, node in zip(asks, nodes)
    ]
    answers = exchange(grid, messages, in_flight=3, patience=120, wait=time.sleep)
    replies = {
        a.client: unpack_reply(from_content(each.content), a, layout).answer
        for a, each in zip(asks, answers)
    }
    count, _ = SequentialEngine(problem).map(asks, Same(replies))
    print(f"{count} updates alike")


sites = Sites(problem, device=torch.device("cpu"))
run_simulation(
    app,
    make_client_app(sites),
    num_supernodes=3,
    backend_config={"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1}},
)
"""


@pytest.mark.slow
def test_flowers_own_simulation_carries_the_same_messages(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='needs ray: pip install "fmol[flower]"')
    assert "5 updates alike" in run_script(FLOWERS_OWN, tmp_path, timeout=300)
