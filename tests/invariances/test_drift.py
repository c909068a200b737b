"""Drift correction and the server's steps do not depend on where, in which order or in how many
stretches they are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fmol import FMGDA, FSMGDA, Client, FedAvg, Federation, LazyPopulation, Result, fit
from fmol.algorithms import Adam, Momentum
from fmol.engines import VectorizedEngine, gradients
from fmol.participation import Number
from fmol.rounds import Algorithm
from support import data, federation, flat, relative

SCAFFOLD: dict[str, Any] = {"drift_correction": "scaffold"}
ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=3, batch_size=4, **SCAFFOLD),
    FSMGDA(
        local_epochs=2,
        batch_size=4,
        weighting="samples",
        accumulate="mean",
        local_momentum=0.5,
        proximal=0.1,
        clip_norm=0.5,
        **SCAFFOLD,
    ),
    FSMGDA(
        local_epochs=2,
        batch_size=4,
        extrapolate=True,
        server_step=Momentum(0.5),
        normalize="loss",
        shared="trunk.*",
        **SCAFFOLD,
    ),
    FMGDA(
        local_steps=2,
        objective_momentum=0.5,
        server_step=Adam(),
        server_lr=0.01,
        on_missing_objective="reuse",
    ),
    FedAvg(local_steps=3, batch_size=4, extrapolate=True, server_step=Momentum(0.5), **SCAFFOLD),
]
IDS = ["scaffold", "scaffold-mean", "scaffold-extrapolate", "smoothed-adam", "fedavg"]


def unequal() -> Federation:
    return federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])


def assert_same(one: Result, other: Result, tolerance: float) -> None:
    assert relative(flat(other.model).cpu(), flat(one.model)) <= tolerance
    assert one.client_state.keys() == other.client_state.keys()
    for client, state in one.client_state.items():
        assert state.keys() == other.client_state[client].keys()
        for name, tensor in state.items():
            assert relative(other.client_state[client][name].cpu(), tensor) <= tolerance
    for name, tensor in one.state.memory.items():
        mine = other.state.memory[name].cpu()
        assert torch.allclose(mine, tensor, rtol=100 * tolerance, atol=tolerance, equal_nan=True)
    for a, b in zip(one.reports, other.reports, strict=True):
        assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
        assert a.extrapolation == pytest.approx(b.extrapolation)
        assert a.step_min_cosine == pytest.approx(b.step_min_cosine, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("participation", [None, Number(2)], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_engines_agree(
    algorithm: Algorithm, participation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 5)
    options: dict[str, Any] = {"seed": 3, "device": "cpu", "participation": participation}
    one = fit(unequal(), algorithm, rounds=10, **options)
    other = fit(unequal(), algorithm, rounds=10, engine="vectorized", **options)
    assert not any("one by one" in note for report in other.reports for note in report.notes)
    assert_same(one, other, 1e-10)


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_size_of_chunks_changes_nothing_but_rounding(lanes: int) -> None:
    def engine(*arguments: Any, **named: Any) -> VectorizedEngine:
        return VectorizedEngine(*arguments, lanes_in_flight=lanes, **named)

    one = fit(unequal(), ALGORITHMS[0], rounds=5, device="cpu")
    assert_same(one, fit(unequal(), ALGORITHMS[0], rounds=5, device="cpu", engine=engine), 1e-10)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_resuming_is_exact(algorithm: Algorithm, engine: str) -> None:
    options: dict[str, Any] = {
        "seed": 3,
        "participation": Number(2),
        "device": "cpu",
        "engine": engine,
    }
    straight = fit(unequal(), algorithm, rounds=7, **options)
    for stop in (1, 4):
        half = fit(unequal(), algorithm, rounds=stop, **options).checkpoint()
        resumed = fit(unequal(), algorithm, rounds=7, resume=half, **options)
        assert torch.equal(flat(resumed.model), flat(straight.model))
        assert_same(straight, resumed, 0.0)


def test_a_checkpoint_without_the_steps_memory_is_refused() -> None:
    plain = fit(unequal(), FSMGDA(local_steps=1), rounds=1).checkpoint()
    for more in (SCAFFOLD, {"server_step": Momentum()}, {"objective_momentum": 0.5}):
        with pytest.raises(ValueError, match="another model or algorithm"):
            fit(unequal(), FSMGDA(local_steps=1, **more), rounds=2, resume=plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_the_order_of_the_clients_changes_nothing(algorithm: Algorithm) -> None:
    problem = unequal()
    clients = [problem.client(id) for id in problem.population.ids()]
    turned = Federation(problem.model, problem.objectives, clients[::-1])
    one = fit(problem, algorithm, rounds=5, seed=3, device="cpu")
    assert torch.equal(
        flat(fit(turned, algorithm, rounds=5, seed=3, device="cpu").model), flat(one.model)
    )


def test_lazy_clients_keep_their_control_variates() -> None:
    def make(id: str) -> Client:
        return Client(id, lambda: data(6 + int(id[1:]) % 3, seed=int(id[1:])), ("a", "b", "c"))

    names = [f"c{i:03d}" for i in range(12)]
    problem = federation()
    lazy = Federation(problem.model, problem.objectives, LazyPopulation(names, make))
    options: dict[str, Any] = {"participation": Number(3), "seed": 1, "device": "cpu"}
    one = fit(lazy, ALGORITHMS[0], rounds=8, **options)
    other = fit(lazy, ALGORITHMS[0], rounds=8, engine="vectorized", **options)
    assert_same(one, other, 1e-10)
    seen = {client for report in one.reports for client in report.cohort}
    assert set(one.client_state) == seen


def test_auto_measures_without_a_trace_in_the_control_variates() -> None:
    auto = fit(unequal(), ALGORITHMS[0], rounds=3, device="cpu", engine="auto")
    assert_same(fit(unequal(), ALGORITHMS[0], rounds=3, device="cpu"), auto, 1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=IDS)
def test_a_cuda_device_gives_the_cpus_numbers(algorithm: Algorithm) -> None:
    cpu = fit(unequal(), algorithm, rounds=10, device="cpu")
    gpu = fit(unequal(), algorithm, rounds=10, device="cuda", engine="vectorized")
    assert_same(cpu, gpu, 1e-10)
