"""The same numbers on a CUDA device. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fmol import FMGDA, FSMGDA, SMGD, Alone, FedAvg, fit
from fmol.aggregate import gramian
from fmol.engines import VectorizedEngine, lanes
from fmol.engines.graphs import StepGraph
from fmol.rounds import Algorithm
from fmol.schedules import Cosine
from support import data, federation, flat, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ALGORITHMS: list[Algorithm] = [
    FMGDA(local_steps=3),
    FSMGDA(local_steps=3, batch_size=4, weight_decay=0.01, local_momentum=0.5, clip_norm=1.0),
    FSMGDA(local_epochs=2, batch_size=5, normalize="loss", shared="trunk.*"),
    SMGD(4, 0.1),
    FedAvg(local_steps=3, batch_size=4),
    Alone(local_steps=3, batch_size=4),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_a_cuda_device_gives_the_cpus_numbers(algorithm: Algorithm) -> None:
    problem = federation(
        [("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7], held_out=data(20, seed=9)
    )
    cpu = fit(problem, algorithm, rounds=10, device="cpu")
    gpu = fit(problem, algorithm, rounds=10, device="cuda")
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gpu.weights, cpu.weights, rtol=1e-7, atol=1e-9)
    assert gpu.losses.device.type == "cpu"
    assert next(gpu.model.parameters()).device == next(problem.model.parameters()).device


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_lanes_side_by_side_on_the_device_give_the_cpus_numbers(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "RECORD_AT", 3)
    problem = federation(
        [("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7], held_out=data(20, seed=9)
    )
    cpu = fit(problem, algorithm, rounds=10, device="cpu")
    gpu = fit(problem, algorithm, rounds=10, device="cuda", engine="vectorized")
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        FSMGDA(local_steps=3, batch_size=4, local_lr=Cosine(0.2, rounds=10), local_momentum=0.5),
        FSMGDA(local_epochs=2, batch_size=4, accumulate="mean", weight_decay=0.1, clip_norm=0.5),
        FMGDA(local_steps=3, normalize="loss"),
        FedAvg({"a": 0.5, "b": 0.1, "c": 2.0}, local_steps=3, batch_size=4),
    ],
    ids=lambda a: type(a).__name__,
)
def test_a_round_as_one_graph_gives_the_cpus_numbers(algorithm: Algorithm) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[12] * 4)
    made: list[VectorizedEngine] = []

    def engine(*arguments: Any, **named: Any) -> VectorizedEngine:
        made.append(VectorizedEngine(*arguments, **named))
        return made[-1]

    cpu = fit(problem, algorithm, rounds=10, device="cpu")
    gpu = fit(problem, algorithm, rounds=10, device="cuda", engine=engine)
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-9, atol=1e-12)
    assert [type(graph) for graph in made[0]._workers[0]._graphs.values()] == [StepGraph]
    assert not any("no CUDA graph" in note for report in gpu.reports for note in report.notes)


def test_a_chunk_that_does_not_fit_is_halved_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = VectorizedEngine._steps

    def scarce(self: VectorizedEngine, jobs: Any, pool: Any) -> Any:
        if len(jobs) > 2:
            raise torch.OutOfMemoryError("pretended")
        return real(self, jobs, pool)

    monkeypatch.setattr(VectorizedEngine, "_steps", scarce)
    problem, algorithm = federation(), FSMGDA(local_steps=3, batch_size=4)
    gpu = fit(problem, algorithm, rounds=3, device="cuda", engine="vectorized")
    cpu = fit(problem, algorithm, rounds=3, device="cpu")
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    assert any("memory ran out" in note for note in gpu.reports[0].notes)


def test_auto_takes_the_device_and_leaves_the_users_tensors_where_they_are() -> None:
    problem = federation()
    result = fit(problem, FSMGDA(local_steps=1), rounds=1)
    assert result.state.x.device.type == "cuda"
    assert problem.population.get("c0").data[0].device.type == "cpu"


def test_dropout_on_the_device_is_keyed_and_leaves_its_generator_alone() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    problem = federation(model=net)
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    one = fit(problem, FSMGDA(local_steps=3, batch_size=4), rounds=2)
    assert torch.equal(before, torch.cuda.get_rng_state())
    torch.cuda.manual_seed(2)
    two = fit(problem, FSMGDA(local_steps=3, batch_size=4), rounds=2)
    assert relative(flat(one.model), flat(two.model)) < 1e-12


def test_the_gramian_of_float32_updates_is_accurate_on_the_device() -> None:
    rows = torch.randn(8, 1_000_003, device="cuda")
    exact = (rows.double() @ rows.double().T).cpu()
    lengths = exact.diagonal().sqrt()
    error = (gramian(rows) - exact).abs() / (lengths[:, None] * lengths[None, :])
    assert float(error.max()) < 1e-8
