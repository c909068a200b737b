"""Devices, precision, chunks, batches drawn ahead: they change how something is computed, not what."""

from __future__ import annotations

import copy
import itertools
import math
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from fmol import FSMGDA, Client, FedAvg, Federation, LazyPopulation, Objective, fit, rng
from fmol.engines import (
    AutoEngine,
    SequentialEngine,
    VectorizedEngine,
    gradients,
    lanes,
    make_engine,
    vectorized,
    worker,
)
from fmol.engines.convolutions import channels_last
from fmol.engines.memory import LargestTensor, lane_bytes
from fmol.engines.schedule import BatchTables, Draw
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply, Site
from fmol.layout import FlatModel
from fmol.local import batch_counts, batch_rows, batches
from fmol.result import Result
from fmol.rounds import Algorithm, Plan
from support import data, federation, flat, relative, squared_error

HOLDERS = [("a", "b"), ("c",), ("b", "c"), ("a",)]


# ---- several devices -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 9])
@pytest.mark.parametrize(
    "algorithm",
    [
        FSMGDA(local_steps=3, batch_size=4),
        FSMGDA(local_epochs=2, batch_size=4, accumulate="mean"),
        FedAvg(local_steps=3, batch_size=4),
    ],
    ids=lambda a: type(a).__name__,
)
def test_lanes_divided_among_devices_give_the_same_model(algorithm: Algorithm, count: int) -> None:
    problem = federation(HOLDERS, sizes=[5, 9, 12, 7])
    one = fit(problem, algorithm, rounds=5, device="cpu")
    engine = partial(VectorizedEngine, devices=["cpu"] * count)
    many = fit(problem, algorithm, rounds=5, device="cpu", engine=engine)
    assert relative(flat(many.model), flat(one.model)) < 1e-12
    assert not any("one by one" in note for report in many.reports for note in report.notes)


def test_each_device_has_a_part_of_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = worker.LaneWorker.steps

    def steps(self: Any, jobs: Any, pool: Any) -> Any:
        seen.append((id(self), len(jobs)))
        return real(self, jobs, pool)

    monkeypatch.setattr(worker.LaneWorker, "steps", steps)
    problem = federation(HOLDERS, sizes=[5, 9, 12, 7])
    engine = partial(VectorizedEngine, devices=["cpu", "cpu"])
    fit(problem, FSMGDA(local_steps=1), rounds=1, device="cpu", engine=engine)
    assert len({who for who, _ in seen}) == 2
    assert [count for _, count in seen] == [3, 3]


def test_clients_made_when_asked_for_are_divided_among_devices_too() -> None:
    eager = federation(HOLDERS, sizes=[6, 6, 6, 6])

    def make(id: str) -> Client:
        return eager.client(id)

    ids = tuple(eager.population.ids())
    lazy = Federation(eager.model, eager.objectives, LazyPopulation(ids, make))
    engine = partial(VectorizedEngine, devices=["cpu", "cpu"])
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one = fit(eager, algorithm, rounds=4, device="cpu", evaluate="all")
    two = fit(lazy, algorithm, rounds=4, device="cpu", engine=engine, evaluate="all")
    assert relative(flat(two.model), flat(one.model)) < 1e-12


def test_all_cuda_devices_need_an_engine_that_divides_lanes() -> None:
    with pytest.raises(ValueError, match="'vectorized' and 'auto' alone"):
        make_engine("sequential", federation(), seed=0, device="cuda:all")


# ---- precision -------------------------------------------------------------------------------


def single_precision() -> Federation:
    double = federation(HOLDERS, sizes=[12] * 4)
    clients = [
        Client(
            id, tuple(part.float() for part in double.client(id).data), double.client(id).objectives
        )
        for id in double.population.ids()
    ]
    return Federation(copy.deepcopy(double.model).float(), double.objectives, clients)


@pytest.mark.parametrize("engine", [SequentialEngine, VectorizedEngine])
def test_bf16_steps_differ_from_full_ones_and_come_near_them(engine: Any) -> None:
    problem = single_precision()
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    full = fit(problem, algorithm, rounds=3, device="cpu")
    rough = fit(
        problem, algorithm, rounds=3, device="cpu", engine=partial(engine, precision="bf16")
    )
    off = relative(flat(rough.model), flat(full.model))
    assert 1e-6 < off < 2e-2
    assert flat(rough.model).dtype == torch.float32


def test_convolutions_are_rounded_too_where_steps_are() -> None:
    """Behind a linear layer, whose output is narrow already, and with nothing else to round."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 6),
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2),
        nn.Flatten(),
        nn.Linear(6, 2),
    )
    generator = torch.Generator().manual_seed(1)
    clients = [
        Client(
            f"c{i}",
            (torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)),
            ("a", "b"),
        )
        for i in range(3)
    ]
    objectives = [Objective("a", squared_error(0)), Objective("b", squared_error(1))]
    problem = Federation(net, objectives, clients)
    seen: list[torch.dtype] = []
    real = torch.conv2d

    def spy(input: Tensor, *arguments: Any) -> Tensor:
        seen.append(input.dtype)
        return real(input, *arguments)

    engine = partial(VectorizedEngine, precision="bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "conv2d", spy)
        rough = fit(problem, FSMGDA(local_steps=2, batch_size=4), 2, device="cpu", engine=engine)
    assert not any("one by one" in note for report in rough.reports for note in report.notes)
    assert torch.bfloat16 in seen
    full = fit(problem, FSMGDA(local_steps=2, batch_size=4), 2, device="cpu")
    assert relative(flat(rough.model), flat(full.model)) < 2e-2


def test_losses_are_reported_in_full_whatever_steps_are_computed_in() -> None:
    problem = single_precision()
    full = fit(problem, FSMGDA(local_steps=1), rounds=1, device="cpu")
    engine = partial(VectorizedEngine, precision="bf16")
    rough = fit(problem, FSMGDA(local_steps=1), rounds=1, device="cpu", engine=engine)
    torch.testing.assert_close(rough.losses[0], full.losses[0], rtol=1e-6, atol=0)


def test_a_precision_that_the_device_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="'tf32', which only CUDA devices have"):
        SequentialEngine(federation(), precision="tf32")
    with pytest.raises(ValueError, match="`precision` must be 'fp32', 'tf32' or 'bf16'"):
        VectorizedEngine(federation(), precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`compile` must be 'auto', 'always' or 'never'"):
        VectorizedEngine(federation(), compile="sometimes")  # type: ignore[arg-type]


def test_steps_are_compiled_on_a_cpu_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It changes last bits, and a run that goes on after a break is to be the same run."""
    compilations: list[Any] = []

    def compile(step: Any, **_: Any) -> Any:
        compilations.append(step)
        return step

    monkeypatch.setattr(torch, "compile", compile)
    problem, algorithm = federation(), FSMGDA(local_steps=3, batch_size=4)
    models = {}
    for when in ("auto", "never", "always"):
        said: list[str] = []
        engine = partial(VectorizedEngine, compile=when, say=said.append)
        models[when] = flat(fit(problem, algorithm, 3000, device="cpu", engine=engine, callbacks=[
            lambda report, _: report.round >= 2
        ]).model)  # fmt: skip
        assert said == (["compiling"] if when == "always" else [])
        assert len(compilations) == (when == "always")
    assert torch.equal(models["auto"], models["never"])
    assert torch.equal(models["auto"], models["always"])


# ---- batches ---------------------------------------------------------------------------------


@given(
    n=st.integers(1, 40),
    batch=st.none() | st.integers(1, 45),
    steps=st.integers(1, 12),
    epochs=st.none() | st.integers(1, 4),
    round=st.integers(0, 5),
)
@settings(max_examples=200)
def test_a_table_of_batches_holds_the_batches(
    n: int, batch: int | None, steps: int, epochs: int | None, round: int
) -> None:
    local = LocalConfig(lr=0.1, steps=None if epochs else steps, epochs=epochs, batch_size=batch)
    name: dict[str, Any] = {"seed": 7, "round": round, "client": "c"}
    one_by_one = [np.arange(n) if b is None else b.numpy() for b in batches(n, local, **name)]
    rows = batch_rows(n, local, rng.stream(7, "batches", round, "c"))
    counts = batch_counts(n, local)
    assert rows.shape[0] == len(counts) == len(one_by_one)
    for row, count, want in zip(rows, counts, one_by_one, strict=True):
        assert np.array_equal(row[:count], want)
        assert (row[count:] == row[0]).all()


def test_batches_drawn_ahead_are_those_of_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, local = BatchTables(seed=3), LocalConfig(lr=0.1, steps=4, batch_size=3)

    def draw(round: int, n: int = 10, lr: float = 0.1) -> Draw:
        return Draw(("c", "d"), (n, 2), (2, 0), replace(local, lr=lr), round)

    def want(round: int, n: int = 10) -> tuple[Any, Any]:
        c, d = (
            batch_rows(size, local, rng.stream(3, "batches", round, client))
            for client, size in (("c", n), ("d", 2))
        )
        rows = np.stack([c + 2, np.concatenate([d, d[:, :1]], 1)], 1)
        return rows, np.stack([batch_counts(n, local), np.full(4, 2)], 1)

    def same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))

    for round in (0, 1):
        assert same(drawn.of_all(draw(round)), want(round))
        drawn.draw_ahead()
    with monkeypatch.context() as patch:  # Those of round 2 are there: nothing is drawn for them.
        patch.setattr(BatchTables, "of", None)
        assert same(drawn.of_all(draw(2, lr=0.05)), want(2))
    drawn.draw_ahead()
    assert same(drawn.of_all(draw(3, n=11)), want(3, 11))  # Not what was drawn for.


# ---- outputs by objective ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lanes_of",
    [
        [(0, 1, 2, 3), (0, 1, 2, 3)],  # All of all.
        [(0, 2, 4), (1, 3, 5)],  # In turns.
        [(0, 1), (2, 3, 4)],  # In a row.
        [(0, 3), (1,), (2, 4)],  # In some order.
        [(0, 1, 2), (2, 3)],  # One of two objectives.
        [(1, 3)],  # Some of none.
    ],
    ids=str,
)
def test_each_objective_gets_the_outputs_of_its_own_lanes(lanes_of: list[tuple[int, ...]]) -> None:
    size = 1 + max(map(max, lanes_of))
    nest = {
        "a": torch.arange(6.0 * size).reshape(size, 3, 2).requires_grad_(),
        "b": torch.arange(3.0 * size).reshape(size, 3).requires_grad_(),
    }
    objective = Objective("o", squared_error(0))
    pulls = [lanes.Pull(objective, mine, (1.0,) * len(mine)) for mine in lanes_of]
    found = lanes.outputs_of(pulls, nest)
    for mine, own in zip(lanes_of, found, strict=True):
        for key, leaf in nest.items():
            assert torch.equal(own[key], leaf[list(mine)])
    total = sum((own[key] ** 2).sum() for own in found for key in nest)
    times = torch.tensor([sum(lane in mine for mine in lanes_of) for lane in range(size)])
    for leaf, grad in zip(
        nest.values(), torch.autograd.grad(total, tuple(nest.values())), strict=True
    ):
        shape = (size, *(1 for _ in leaf.shape[1:]))
        assert torch.equal(grad, 2 * leaf.detach() * times.reshape(shape))


# ---- what rounding explains --------------------------------------------------------------------


def _gradients() -> gradients.LaneGradients:
    model = FlatModel(nn.Linear(2, 1), torch.device("cpu"))
    return gradients.LaneGradients(lanes.LaneModel(model), lambda name: True)


def test_what_a_change_of_the_size_of_rounding_does_is_explained_and_no_more() -> None:
    starts = 1 + torch.rand(3, 50, generator=torch.Generator().manual_seed(0))

    def wild(x: Tensor) -> Tensor:  # A change of 1e-6 becomes one of about 1.
        return (1e6 * x).sin()

    found = wild(starts * (1 + 1e-7))
    assert not torch.allclose(found, wild(starts), rtol=0.05)
    assert _gradients().explains(found, wild, starts)

    def calm(x: Tensor) -> Tensor:
        return 2 * x

    assert _gradients().explains(calm(starts) * (1 + 1e-5), calm, starts)
    other = calm(starts)
    other[1] *= 1.01
    assert not _gradients().explains(other, calm, starts)


def test_steps_that_come_out_otherwise_each_time_are_not_explained_by_rounding() -> None:
    calls = itertools.count(1)

    def counts(x: Tensor) -> Tensor:
        return next(calls) * x

    starts = torch.ones(2, 3)
    assert not _gradients().explains(counts(starts), counts, starts)


def test_lanes_that_are_no_numbers_say_nothing() -> None:
    starts = torch.ones(3, 4)

    def lost(x: Tensor) -> Tensor:
        out = x.clone()
        out[1] = torch.inf
        return out

    assert _gradients().explains(lost(starts), lost, starts)
    other = lost(starts)
    other[2] *= 1.1
    assert not _gradients().explains(other, lost, starts)


@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_lanes_that_should_be_numbers_are_not_excused(what: float) -> None:
    starts = torch.ones(3, 4)
    found = 2 * starts
    found[1] = what
    assert not _gradients().explains(found, lambda x: 2 * x, starts)


def test_a_wrong_lane_is_seen_beside_one_that_is_much_longer() -> None:
    right = torch.ones(3, 4)
    wrong = right.clone()
    wrong[0] *= 3
    right[1] = wrong[1] = 1e6
    assert not _gradients().same(wrong, right)
    assert not _gradients().explains(wrong, lambda x: right, torch.ones(3, 4))


def test_what_rounding_leaves_of_a_lane_that_is_solved_is_not_compared() -> None:
    right = torch.ones(3, 4)
    right[0] = 1e-9
    other = right.clone()
    other[0] = 2e-9
    assert _gradients().same(other, right)


def test_no_more_shapes_are_counted_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "MOST_COUNTED", 3)
    uses: dict[Any, int] = {}
    for key in (1, 2, 3, 1, 1):
        gradients.count_use(uses, key)
    assert uses == {1: 3, 2: 1, 3: 1}
    gradients.count_use(uses, 4)
    assert uses == {4: 1}


def _root_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean().sqrt()


def test_a_loss_of_sets_is_right_for_sets_of_any_size_however_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 2)
    generator = torch.Generator().manual_seed(1)
    clients = []
    for i, n in enumerate([10, 9, 7]):
        x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
        clients.append(Client(f"c{i}", (x, i + x.sum(1, keepdim=True)), ("a",)))
    problem = Federation(
        nn.Linear(4, 1, dtype=torch.float64), [Objective("a", _root_mean_square)], clients
    )
    algorithm = FSMGDA(local_epochs=3, batch_size=4, local_lr=0.05, server_lr=0.05)
    one = fit(problem, algorithm, rounds=4, device="cpu")
    other = fit(problem, algorithm, rounds=4, device="cpu", engine="vectorized")
    assert relative(flat(other.model), flat(one.model)) < 1e-10


# ---- chunks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "in_flight", "sizes"),
    [(10, 7, [2] * 5), (10, 9, [2] * 5), (10, 100, [10]), (7, 6, [3, 3, 1]), (5, 2, [1] * 5)],
)
def test_chunks_are_alike_where_clients_are(clients: int, in_flight: int, sizes: list[int]) -> None:
    problem = federation([("a", "b")] * clients, sizes=[6] * clients, names=("a", "b"))
    engine = VectorizedEngine(problem, lanes_in_flight=in_flight)
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    plan = Plan(0, tuple(problem.population.ids()), evaluate=False)
    local = LocalConfig(lr=0.1, steps=1)
    asks: list[Ask] = []
    for id in plan.cohort:
        client = problem.client(id)
        mine = [Lane(name, {name: 1.0}) for name in client.objectives]
        asks.append(plan.ask(client, x, lanes=mine, local=local, need_losses=False))
    assert [len(chunk) for chunk in engine._chunks(asks)] == sizes


@pytest.mark.parametrize("limit", ["MOST_ON_CPU", "LARGEST_ON_CPU"])
def test_lanes_in_flight_on_a_cpu_keep_to_a_few_bytes(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = federation([("a", "b")] * 6, sizes=[6] * 6, names=("a", "b"))
    taken: list[int] = []

    class Counting(VectorizedEngine):
        def _steps(self, jobs: Any, pool: Any) -> Any:
            taken.append(len(jobs))
            return super()._steps(jobs, pool)

    algorithm = FSMGDA(local_steps=2, batch_size=4)
    one = fit(problem, algorithm, rounds=1, device="cpu", engine=Counting)
    assert taken == [12]
    monkeypatch.setattr(vectorized, limit, 1)
    other = fit(problem, algorithm, rounds=1, device="cpu", engine=Counting)
    assert taken[1:] == [1] * 12
    assert relative(flat(other.model), flat(one.model)) < 1e-10


def test_the_largest_tensor_of_a_lane_is_what_a_step_makes_and_not_its_data() -> None:
    """A wide layer's results, of which nothing is kept for the gradient, and one client of many."""
    wide = nn.Sequential(nn.Linear(3, 500, bias=False), nn.AdaptiveAvgPool1d(2))
    objectives = [Objective("o", lambda out, y: ((out - y) ** 2).sum(1))]
    x, y = torch.randn(5000, 3), torch.randn(5000, 2)
    clients = [
        Client(f"c{i}", (x[i * 500 : i * 500 + 500], y[i * 500 : i * 500 + 500]), ("o",))
        for i in range(10)
    ]
    problem = Federation(wide, objectives, clients)
    engine = VectorizedEngine(problem, seed=0, device="cpu")
    start = problem.layout.flatten(dict(wide.named_parameters()))
    ask = Plan(0, ("c0",)).ask(
        clients[0], start, lanes=[Lane("o", {"o": 1.0})], local=LocalConfig(lr=0.1, steps=1)
    )
    _, largest = lane_bytes(ask, engine._site("c0"), engine._gradients, 8)
    assert largest == 8 * 500 * 4


def test_what_is_tried_takes_no_copy_of_clients_data() -> None:
    problem = federation([("a", "b", "c")] * 4, sizes=[1000] * 4)
    engine = VectorizedEngine(problem, seed=0, device="cpu")
    plan = Plan(0, tuple(problem.population.ids()))
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    local = LocalConfig(lr=0.1, steps=1, batch_size=4)
    lanes = [Lane("a", {"a": 1.0})]
    asks = [plan.ask(problem.client(id), x, lanes=lanes, local=local) for id in plan.cohort]
    with LargestTensor() as largest:
        assert engine._why_not(asks, None) is None
    assert largest.bytes < 1000 * 5 * 8


class Overlapping(VectorizedEngine):
    """Begins a chunk before the last one has ended, as on a GPU."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._overlaps = True


def _notes(result: Result) -> list[str]:
    return [note for report in result.reports for note in report.notes]


@pytest.mark.parametrize("kind", [VectorizedEngine, Overlapping])
def test_equal_clients_take_equally_long_whatever_chunk_they_are_in(kind: Any) -> None:
    class Slow(kind):  # type: ignore[misc]
        def _descend(self, jobs: Any, pool: Any) -> Any:
            time.sleep(0.1)
            return super()._descend(jobs, pool)

    problem = federation([("a", "b")] * 3, sizes=[6] * 3, names=("a", "b"))
    engine = partial(Slow, lanes_in_flight=2)
    result = fit(problem, FSMGDA(local_steps=1), rounds=3, device="cpu", engine=engine)
    best: dict[str, float] = {}
    for record in itertools.chain.from_iterable(report.clients for report in result.reports):
        best[record.client] = min(record.seconds, best.get(record.client, math.inf))
    assert len(best) == 3
    assert min(best.values()) >= 0.1
    assert max(best.values()) < 3 * min(best.values())


@pytest.mark.parametrize("kind", [VectorizedEngine, Overlapping])
def test_a_chunks_updates_are_gone_before_the_next_ones_scores(kind: Any) -> None:
    seen: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    class Watched(kind):  # type: ignore[misc]
        def _end(self) -> None:
            if self._begun is not None:
                seen.append(weakref.ref(self._begun.replies))
            super()._end()

        def _scores(self, *arguments: Any) -> Any:
            alive.extend(each() is not None for each in seen)
            return super()._scores(*arguments)

    problem = federation([("a", "b")] * 3, sizes=[6] * 3, names=("a", "b"))
    engine = partial(Watched, lanes_in_flight=2)
    fit(problem, FSMGDA(local_steps=1), rounds=1, device="cpu", engine=engine)
    assert len(alive) >= 3
    assert not any(alive)


@dataclass(frozen=True)
class _Failing:
    """A transform that breaks at one client."""

    at: str

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        if ask.client == self.at:
            raise RuntimeError("it broke")
        return reply

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


@pytest.mark.parametrize("kind", [VectorizedEngine, Overlapping])
def test_an_error_of_one_chunk_is_not_looked_for_in_the_data_of_another(
    kind: Any,
) -> None:
    problem = federation([("a", "b")] * 3, sizes=[6] * 3, names=("a", "b"))
    algorithm = FSMGDA(local_steps=1, transforms=(_Failing("c0"),))
    engine = partial(kind, lanes_in_flight=2)
    with pytest.raises(RuntimeError, match="it broke") as error:
        fit(problem, algorithm, rounds=1, device="cpu", engine=engine)
    assert error.value.__notes__ == ["This happened in round 0 at client `c0`."]


def _mixed(broken: str | None, unlike: str | None) -> Federation:
    """Six clients, one with a target that is not finite, and one with targets of another kind."""
    clients = []
    for i in range(6):
        inputs, targets = data(6 + i, seed=i)
        if f"c{i}" == broken:
            targets[0] = torch.inf
        if f"c{i}" == unlike:
            targets = targets.float()
        clients.append(Client(f"c{i}", (inputs, targets), ("c",) if i == 3 else ("a", "b")))
    alike = federation()
    return Federation(alike.model, alike.objectives, clients)


@pytest.mark.parametrize("broken", [None, "c1", "c5"])
@pytest.mark.parametrize("unlike", [None, "c0", "c2", "c5"])
@pytest.mark.parametrize("cache_bytes", [0, 2**30], ids=["lazy", "at hand"])
def test_what_is_refused_or_not_alike_while_another_chunk_is_pending_is_as_one_by_one(
    broken: str | None, unlike: str | None, cache_bytes: int
) -> None:
    problem = _mixed(broken, unlike)
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one = fit(problem, algorithm, rounds=2, device="cpu", evaluate="all")
    engine = partial(Overlapping, lanes_in_flight=4, cache_bytes=cache_bytes)
    many = fit(problem, algorithm, rounds=2, device="cpu", engine=engine, evaluate="all")
    assert relative(flat(many.model), flat(one.model)) < 1e-10
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-9, atol=1e-12)
    for a, b in zip(one.reports, many.reports, strict=True):
        assert [str(refusal) for refusal in a.refused] == [str(refusal) for refusal in b.refused]
        records = [
            [(r.client, r.objective, r.samples, r.bytes_up) for r in report.clients]
            for report in (a, b)
        ]
        assert records[0] == records[1]
    assert bool(one.reports[0].refused) == (broken is not None)
    assert any("not alike" in note for note in _notes(many)) == (unlike is not None)


@pytest.mark.parametrize("lanes", ["auto", 8])
def test_where_memory_runs_out_half_as_many_lanes_are_stepped_at_a_time(lanes: Any) -> None:
    taken: list[int] = []

    class Short(VectorizedEngine):
        def _steps(self, jobs: Any, pool: Any) -> Any:
            taken.append(len(jobs))
            if len(jobs) > 3:
                raise torch.OutOfMemoryError("pretended")
            return super()._steps(jobs, pool)

    problem = federation([("a", "b")] * 4, sizes=[6] * 4, names=("a", "b"))
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    one = fit(problem, algorithm, rounds=2, device="cpu")
    engine = partial(Short, lanes_in_flight=lanes)
    other = fit(problem, algorithm, rounds=2, device="cpu", engine=engine)
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert taken == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert _notes(other).count("memory ran out: 2 lanes at a time from here on") == 1


def test_where_memory_runs_out_beside_another_chunk_that_is_let_in_and_freed_first() -> None:
    pending: list[bool] = []
    freed: list[weakref.ref[Any]] = []

    class Short(Overlapping):
        def _steps(self, jobs: Any, pool: Any) -> Any:
            pending.append(self._begun is not None)
            if self._begun is not None:
                freed.append(weakref.ref(self._begun.replies))
                raise torch.OutOfMemoryError("pretended")
            assert not any(each() is not None for each in freed)
            return super()._steps(jobs, pool)

    problem = federation([("a", "b")] * 3, sizes=[6] * 3, names=("a", "b"))
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    one = fit(problem, algorithm, rounds=2, device="cpu")
    engine = partial(Short, lanes_in_flight=2)
    other = fit(problem, algorithm, rounds=2, device="cpu", engine=engine)
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert pending == [False, True, *[False] * 5]  # From then on there is never another.
    assert (
        _notes(other).count("memory ran out: one chunk of lanes after the other from here on") == 1
    )


def test_where_memory_runs_out_for_a_single_lane_it_is_an_error() -> None:
    class Short(VectorizedEngine):
        def _steps(self, jobs: Any, pool: Any) -> Any:
            raise torch.OutOfMemoryError("pretended")

    with pytest.raises(torch.OutOfMemoryError, match="pretended"):
        fit(federation(), FSMGDA(local_steps=2), rounds=1, device="cpu", engine=Short)


def test_where_memory_runs_out_for_anchors_half_of_the_clients_are_taken_at_a_time() -> None:
    taken: list[int] = []

    class Short(VectorizedEngine):
        def _jobs(self, chunk: Any, *rest: Any) -> Any:
            if chunk[0].lanes:
                taken.append(len(chunk))
            if chunk[0].lanes and len(chunk) > 1:
                raise torch.OutOfMemoryError("pretended")
            return super()._jobs(chunk, *rest)

    problem = federation([("a", "b")] * 3, sizes=[6] * 3, names=("a", "b"))
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    one = fit(problem, algorithm, rounds=2, device="cpu")
    other = fit(problem, algorithm, rounds=2, device="cpu", engine=Short)
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert taken == [3, 2, 1, 1, 1, 1, 1, 1]
    assert "memory ran out: 2 lanes at a time from here on" in other.reports[0].notes


def test_where_memory_runs_out_while_a_lane_is_weighed_one_is_taken_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    weighed = iter([True, False])

    def scarce(*arguments: Any) -> tuple[int, int]:
        if next(weighed):
            raise torch.OutOfMemoryError("pretended")
        return lane_bytes(*arguments)

    class Counting(VectorizedEngine):
        def _steps(self, jobs: Any, pool: Any) -> Any:
            taken.append(len(jobs))
            return super()._steps(jobs, pool)

    monkeypatch.setattr(vectorized, "lane_bytes", scarce)
    problem = federation([("a",)] * 3, sizes=[6] * 3, names=("a",))
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    one = fit(problem, algorithm, rounds=2, device="cpu")
    other = fit(problem, algorithm, rounds=2, device="cpu", engine=Counting)
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert taken == [1, 1, 1, 3]
    assert any("while a lane was weighed" in note for note in other.reports[0].notes)
    assert other.reports[1].notes == ()


def _running_out(times: int, lanes: bool) -> tuple[Federation, list[int]]:
    """A federation whose first loss is out of memory the first times that it is asked, about one lane
    or about several, and about how many samples it was asked."""
    asked: list[int] = []

    def scarce(out: Tensor, y: Tensor) -> Tensor:
        if torch._C._functorch.is_batchedtensor(out) == lanes:
            asked.append(len(out))
            if len(asked) <= times:
                raise torch.OutOfMemoryError("pretended")
        return squared_error(0)(out, y)

    plain = federation(sizes=[12] * 4)
    first, *others = plain.objectives
    clients = [plain.client(id) for id in plain.population.ids()]
    return Federation(plain.model, [replace(first, loss=scarce), *others], clients), asked


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("when", [1, 2])
def test_where_memory_runs_out_half_as_many_samples_are_tried(when: int, lanes: bool) -> None:
    problem, asked = _running_out(when, lanes)
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    other = fit(problem, algorithm, rounds=2, device="cpu", engine="vectorized")
    one = fit(federation(sizes=[12] * 4), algorithm, rounds=2, device="cpu")
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert asked[: when + 1] == [8, 4, 2][: when + 1]
    assert _notes(other) == []


def test_where_memory_runs_out_for_a_few_samples_the_next_round_tries_again() -> None:
    problem, _ = _running_out(3, False)
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    other = fit(problem, algorithm, rounds=2, device="cpu", engine="vectorized")
    one = fit(federation(sizes=[12] * 4), algorithm, rounds=2, device="cpu")
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    assert "one by one: memory ran out while it was tried" in other.reports[0].notes[0]
    assert other.reports[1].notes == ()


SCORED = "samples at a time are evaluated from here on"


class _Scarce:
    """A model of which no more than `most` samples at a time fit into memory."""

    def __init__(self, model: FlatModel, most: int) -> None:
        self._model, self._most = model, most
        self.taken: list[int] = []
        self.mode = model.mode

    def __call__(self, inputs: Tensor) -> Any:
        self.taken.append(len(inputs))
        if len(inputs) > self._most:
            raise torch.OutOfMemoryError("pretended")
        return self._model(inputs)


def _scoring(most: int, made: list[_Scarce]) -> Any:
    class Short(VectorizedEngine):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(_Scarce(self._model, most))
            self._scorer._model = made[-1]  # type: ignore[assignment]

    return Short


@pytest.mark.parametrize("unlike", [False, True])
def test_where_memory_runs_out_half_as_many_samples_are_evaluated_at_a_time(unlike: bool) -> None:
    plain = federation([("a", "b")] * 2, sizes=[6] * 2, names=("a", "b"))
    rows = TensorDataset(*data(5, outputs=2, seed=6))
    clients = [
        replace(plain.client("c0"), held_out=data(4, outputs=2, seed=5)),
        replace(plain.client("c1"), held_out=Subset(rows, range(5)) if unlike else rows.tensors),
    ]
    problem = Federation(plain.model, plain.objectives, clients)
    algorithm = FSMGDA(local_steps=1, batch_size=2)
    made: list[_Scarce] = []
    one = fit(problem, algorithm, rounds=2, device="cpu")
    other = fit(problem, algorithm, rounds=2, device="cpu", engine=_scoring(3, made))
    assert relative(flat(other.model), flat(one.model)) < 1e-10
    for report, expected in zip(other.reports, one.reports, strict=True):
        assert report.losses == pytest.approx(expected.losses)
        for record, wanted in zip(report.clients, expected.clients, strict=True):
            assert record.held_out
            for metric, value in record.held_out.items():
                assert value == pytest.approx(wanted.held_out[metric])
    assert any("not alike" in note for note in _notes(other)) == unlike
    assert made[0].taken[:6] == [12, 6, 3, 3, 3, 3]
    assert max(made[0].taken[2:]) == 3
    assert _notes(other).count(f"memory ran out: 3 {SCORED}") == 1


def test_where_memory_runs_out_for_a_single_sample_it_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="pretended"):
        fit(federation(), FSMGDA(local_steps=1), rounds=1, device="cpu", engine=_scoring(0, []))


def test_the_engines_options_reach_it_through_auto() -> None:
    problem, algorithm = federation(held_out=data(8, seed=5)), FSMGDA(local_steps=2, batch_size=4)
    engine = partial(AutoEngine, precision="bf16", lanes_in_flight=2, compile="never")
    result = fit(problem, algorithm, rounds=2, device="cpu", engine=engine)
    assert len(result.reports) == 2


# ---- images ----------------------------------------------------------------------------------


class Viewing(nn.Module):
    """A network that looks at its features with `view`, as many do."""

    def __init__(self, channels: int, **pooling: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(channels, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 6, 3, stride=2)
        self.pooling = pooling
        self.head = nn.LazyLinear(2)
        self.double()
        self(torch.zeros(1, channels, 11, 10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.tanh(self.first(x)), **self.pooling)
        x = torch.tanh(self.second(x))
        out: Tensor = self.head(x.view(x.size(0), -1))
        return out


@pytest.mark.parametrize(
    "pooling",
    [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (2, 3), "stride": (1, 2), "ceil_mode": True},
        {"kernel_size": 2, "stride": 1, "dilation": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("record_at", "channels"), [(3, 2), (40, 1)])
def test_poolings_and_views_of_images_are_computed_side_by_side(
    pooling: dict[str, Any], record_at: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", record_at)
    generator = torch.Generator().manual_seed(1)
    clients = [
        Client(
            f"c{i}",
            (
                torch.randn(7, channels, 11, 10, generator=generator, dtype=torch.float64),
                torch.randn(7, 2, generator=generator, dtype=torch.float64),
            ),
            ("a", "b"),
        )
        for i in range(3)
    ]
    objectives = [Objective("a", squared_error(0)), Objective("b", squared_error(1))]
    problem = Federation(Viewing(channels, **pooling), objectives, clients)
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one = fit(problem, algorithm, rounds=4, device="cpu")
    other = fit(problem, algorithm, rounds=4, device="cpu", engine="vectorized")
    assert not any("one by one" in note for report in other.reports for note in report.notes)
    assert relative(flat(other.model), flat(one.model)) < 1e-10


@pytest.mark.parametrize("channels", [1, 3])
def test_images_with_channels_last_are_taken_for_such(channels: int) -> None:
    images = channels_last(torch.randn(4, 2, channels, 6, 5))[1]
    out = torch.conv2d(images, torch.randn(3, channels, 2, 2))
    assert out.is_contiguous(memory_format=torch.channels_last)
