"""The same numbers on a CUDA device. Run with `pytest -m gpu` where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fmol import (
    FMGDA,
    FSMGDA,
    SMGD,
    Alone,
    Client,
    FedALS,
    FedAvg,
    Federation,
    FedLS,
    LazyPopulation,
    Objective,
    fit,
)
from fmol.aggregate import gramian
from fmol.engines import SequentialEngine, VectorizedEngine, gradients
from fmol.engines.graphs import GraphMemory, StepGraph
from fmol.engines.seam import Engine
from fmol.lockstep import Guest, run_in_lockstep
from fmol.participation import Number
from fmol.precision import products
from fmol.rounds import Algorithm
from fmol.schedules import Cosine
from support import data, federation, flat, relative, squared_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

ALGORITHMS: list[Algorithm] = [
    FMGDA(local_steps=3),
    FSMGDA(local_steps=3, batch_size=4, weight_decay=0.01, local_momentum=0.5, clip_norm=1.0),
    FSMGDA(local_epochs=2, batch_size=5, normalize="loss", shared="trunk.*"),
    FSMGDA(local_epochs=2, batch_size=5, local_average=0.5),
    SMGD(4, 0.1),
    FedAvg(local_steps=3, batch_size=4),
    Alone(local_steps=3, batch_size=4),
]


class Kept(VectorizedEngine):
    """Tells what graphs it had when it was closed."""

    recorded: Sequence[StepGraph | None] = ()

    def close(self) -> None:
        self.recorded = list(self._workers[0]._graphs.values())
        super().close()


def kept(**options: Any) -> tuple[list[Kept], Callable[..., Kept]]:
    """A list, and what makes engines of these options and puts them into it."""
    made: list[Kept] = []
    make = partial(Kept, **options)

    def engine(*arguments: Any, **named: Any) -> Kept:
        made.append(make(*arguments, **named))
        return made[-1]

    return made, engine


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
    monkeypatch.setattr(gradients, "RECORD_AT", 3)
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
    made, engine = kept()

    cpu = fit(problem, algorithm, rounds=10, device="cpu")
    gpu = fit(problem, algorithm, rounds=10, device="cuda", engine=engine)
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-9, atol=1e-12)
    assert [type(graph) for graph in made[0].recorded] == [StepGraph]
    assert not any("no CUDA graph" in note for report in gpu.reports for note in report.notes)


@pytest.mark.parametrize(("most", "stale"), [(32, 128), (1, 128), (1, 0)])
def test_graphs_of_several_shapes_share_their_memory_and_give_the_cpus_numbers(
    most: int, stale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes in chunks of four and two, so that two graphs are replayed in turns; or there is room for
    one, which the other has to wait for, or takes from it every time."""
    monkeypatch.setattr("fmol.engines.worker.MOST_GRAPHS", most)
    monkeypatch.setattr("fmol.engines.worker.STALE", stale)
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[12] * 4)
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    made, engine = kept(lanes_in_flight=4)
    cpu = fit(problem, algorithm, rounds=10, device="cpu")
    gpu = fit(problem, algorithm, rounds=10, device="cuda", engine=engine)
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    assert [type(graph) for graph in made[0].recorded] == [StepGraph] * min(2, most)


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


# ---- kernels, compiled steps, several devices ------------------------------------------------

CONVOLUTIONS = [
    # images, channels, height, width, filters, kernel, stride, padding, dilation
    (3, 1, 12, 12, 10, (5, 5), (1, 1), (0, 0), (1, 1)),
    (4, 10, 9, 8, 20, (5, 3), (1, 1), (0, 0), (1, 1)),
    (2, 3, 16, 16, 64, (7, 7), (2, 2), (3, 3), (1, 1)),
    (2, 64, 8, 8, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 64, 8, 8, 128, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 64, 9, 9, 128, (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 128, 4, 4, 256, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 40, 9, 10, 48, (3, 2), (1, 2), (2, 1), (2, 1)),
    (2, 40, 11, 11, 36, (3, 3), (2, 2), (2, 2), (2, 2)),
    (2, 2, 5, 5, 3, (2, 2), (1, 1), (3, 3), (1, 1)),
    (2, 64, 3, 3, 128, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 40, 2, 2, 48, (3, 3), (1, 1), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("before", [0, 3, 8])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_convolutions_of_lanes_are_those_of_each_by_itself(
    shape: Any, precision: Any, before: int
) -> None:
    from fmol.kernels import lane_conv

    images, channels, height, width, filters, kernel, *how = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    x, w = draw(3, images, channels, height, width), draw(3, filters, channels, *kernel)
    w, b = w / w[0, 0].numel() ** 0.5, draw(3, filters)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    want = torch.stack([torch.conv2d(*one, *how) for one in zip(*leaves, strict=True)])
    g = draw(*want.shape)
    dx, dw, db = torch.autograd.grad(want, leaves, g.double())
    # As parameters lie: parts of rows that hold all of a lane's, `before` of them in front.
    rows = torch.cat([draw(3, before), w.reshape(3, -1), b], dim=1).cuda()
    x, g, b = x.cuda(), g.cuda(), rows[:, before + w[0].numel() :]
    w = rows[:, before : before + w[0].numel()].view(w.shape)
    with products(precision, x.device):
        out = lane_conv.lane_conv2d(x, w, b, *how)
        found = lane_conv.lane_conv2d_weight(x, g, w, True, *how)
        back = lane_conv.lane_conv2d_input(g, w, x, *how)
    most = 5e-6 if precision == "fp32" else 2e-3
    for got, right in zip((out, *found, back), (want.detach(), dw, db, dx), strict=True):
        assert relative(got.cpu().double(), right) < most


@pytest.mark.parametrize(("s", "d"), [(1, 7), (2, 42_000), (8, 100_003), (40, 2**20), (64, 5000)])
def test_the_gramian_kernel_is_as_exact_as_double_precision(s: int, d: int) -> None:
    from fmol.kernels.gram import gram

    rows = torch.randn(s, d, generator=torch.Generator().manual_seed(s))
    found, again = gram(rows.cuda()), gram(rows.cuda())
    assert found is not None
    assert again is not None
    assert torch.equal(found, again)
    exact = rows.double() @ rows.double().T
    lengths = exact.diagonal().sqrt()
    assert ((found - exact).abs() <= 1e-13 * lengths[:, None] * lengths).all()


@pytest.mark.parametrize(("lanes", "d"), [(3, 7), (20, 41_771), (5, 1 << 20)])
@pytest.mark.parametrize("own", [False, True], ids=["one size", "own sizes"])
def test_a_step_in_one_pass_is_the_same_step(lanes: int, d: int, own: bool) -> None:
    from fmol.kernels.advance import advance

    x, delta, direction = (torch.randn(lanes, d, device="cuda") for _ in range(3))
    lr = torch.rand(lanes if own else 1, 1, device="cuda")
    want = x.double() - lr.double() * direction.double(), delta + direction
    assert advance(x, delta, direction, lr)
    torch.testing.assert_close(x.double(), want[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(delta, want[1])


def small_images(model: nn.Module, sizes: list[int]) -> Federation:
    generator = torch.Generator().manual_seed(1)
    clients = [
        Client(
            f"c{i}",
            (
                torch.randn(n, 1, 16, 16, generator=generator),
                torch.randn(n, 2, generator=generator),
            ),
            ("a", "b") if i % 2 else ("b",),
        )
        for i, n in enumerate(sizes)
    ]
    objectives = [Objective("a", squared_error(0)), Objective("b", squared_error(1))]
    return Federation(model, objectives, clients)


def smooth_net(channels: int) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.GroupNorm(2, channels), nn.Tanh(),
        nn.AvgPool2d(2), nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
        nn.Tanh(), nn.Flatten(), nn.Linear(2 * channels * 16, 2),
    )  # fmt: skip


@pytest.mark.parametrize("channels", [6, 64])
@pytest.mark.parametrize("compile", ["never", "always"])
@pytest.mark.parametrize("sizes", [[8] * 4, [5, 9, 8, 7]], ids=str)
def test_convolutional_models_give_the_sequential_engines_numbers(
    channels: int, compile: Any, sizes: list[int]
) -> None:
    problem = small_images(smooth_net(channels), sizes)
    algorithm = FSMGDA(local_epochs=2, batch_size=4, local_lr=0.02, server_lr=0.02)
    one = fit(problem, algorithm, rounds=3, device="cuda", engine="sequential")
    said: list[str] = []
    engine = partial(VectorizedEngine, compile=compile, say=said.append)
    other = fit(problem, algorithm, rounds=3, device="cuda", engine=engine)
    assert relative(flat(other.model), flat(one.model)) < 1e-4
    notes = [note for report in other.reports for note in report.notes]
    assert not any("one by one" in note for note in notes)
    assert bool(said) == (compile == "always")


@pytest.mark.parametrize("sizes", [[8] * 4, [5, 9, 8, 7]], ids=str)
def test_averaged_steps_in_single_precision_are_the_sequential_engines(sizes: list[int]) -> None:
    """Of which Δ has shares alone, so that the kernel for steps has no part in them."""
    problem = small_images(smooth_net(6), sizes)
    algorithm = FSMGDA(
        local_epochs=2, batch_size=4, local_average=0.5, local_lr=0.02, server_lr=0.02
    )
    one, other = (
        fit(problem, algorithm, rounds=6, device="cuda", engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert relative(flat(other.model), flat(one.model)) < 1e-4
    torch.testing.assert_close(other.losses, one.losses, rtol=1e-3, atol=1e-5)
    assert not any("one by one" in note for note in other.notes)


class Captions(nn.Module):
    """Words and an image; the second head is a rate, which overflows where images are bright."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.conv, self.pool = nn.Conv2d(1, 6, 3, padding="same"), nn.AdaptiveAvgPool2d(1)
        self.a, self.b = nn.Linear(10, 1), nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = self.pool(torch.tanh(self.conv(image))).flatten(1)
        hidden = torch.cat([self.words(ids).mean(1), seen], dim=1)
        rate = torch.exp(self.b(image.mean((-2, -1))))
        return {"a": self.a(hidden)[:, 0], "b": rate[:, 0]}


@pytest.mark.parametrize("sizes", [[8] * 4, [5, 9, 8, 7]], ids=str)
def test_padding_and_heads_that_overflow_give_the_sequential_engines_numbers(
    sizes: list[int],
) -> None:
    torch.manual_seed(2)
    clients = []
    for i, n in enumerate(sizes):
        image = torch.randn(n, 1, 8, 8)
        if i == 1:  # Of either sign, so that the head overflows whatever its weights are.
            image[-2], image[-1] = 1e4, -1e4
        inputs = {"ids": torch.randint(7, (n, 5)), "image": image}
        held = ("a",) if i == 1 else ("a", "b")
        clients.append(Client(f"c{i}", (inputs, torch.randn(n, 2)), held))
    objectives = [
        Objective("a", lambda out, y: (out["a"] - y[:, 0]) ** 2),
        Objective("b", lambda out, y: (out["b"] - y[:, 1]) ** 2),
    ]
    problem = Federation(Captions(), objectives, clients)
    algorithm = FSMGDA(local_epochs=2, batch_size=4, local_lr=0.02, server_lr=0.02)
    one, other = (
        fit(problem, algorithm, rounds=4, device="cuda", engine=engine)
        for engine in ("sequential", "vectorized")
    )
    assert relative(flat(other.model), flat(one.model)) < 1e-4
    words: Any = other.model.get_submodule("words").weight
    assert not bool(words[0].any())
    assert not any(report.refused for report in other.reports)
    assert any("1 lane computed again alone" in note for note in other.notes)
    assert not any("one by one" in note for note in other.notes)


def test_a_graph_is_replayed_for_clients_made_when_asked_for() -> None:
    eager = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[12] * 4)
    ids = tuple(eager.population.ids())
    lazy = Federation(eager.model, eager.objectives, LazyPopulation(ids, eager.client))
    made, engine = kept()

    algorithm = FSMGDA(local_steps=3, batch_size=4)
    cpu = fit(eager, algorithm, rounds=6, device="cpu", evaluate="all")
    gpu = fit(lazy, algorithm, rounds=6, device="cuda", engine=engine, evaluate="all")
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    assert [type(graph) for graph in made[0].recorded] == [StepGraph]


def test_batches_of_unequal_sizes_are_replayed_as_a_graph() -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    made, engine = kept()

    algorithm = FSMGDA(local_epochs=2, batch_size=4)
    cpu = fit(problem, algorithm, rounds=8, device="cpu", participation=Number(3))
    gpu = fit(problem, algorithm, rounds=8, device="cuda", engine=engine, participation=Number(3))
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    assert made[0].recorded


def test_two_workers_on_one_device_share_the_lanes() -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[12] * 4)
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    cpu = fit(problem, algorithm, rounds=6, device="cpu")
    engine = partial(VectorizedEngine, devices=["cuda:0", "cuda:0"])
    gpu = fit(problem, algorithm, rounds=6, device="cuda", engine=engine)
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("tf32", 1e-7, 1e-2), ("bf16", 1e-5, 5e-2)]
)
def test_rounded_products_change_the_result_a_little(
    precision: Any, least: float, most: float
) -> None:
    problem = small_images(smooth_net(64), [8] * 4)
    algorithm = FSMGDA(local_steps=3, batch_size=4, local_lr=0.02, server_lr=0.02)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    full = fit(problem, algorithm, rounds=3, device="cuda", engine="vectorized")
    for kind in (SequentialEngine, VectorizedEngine):
        engine = partial(kind, precision=precision)
        rough = fit(problem, algorithm, rounds=3, device="cuda", engine=engine)
        assert least < relative(flat(rough.model), flat(full.model)) < most
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_rounded_products_are_no_reason_to_give_a_graph_up(precision: Any) -> None:
    problem = small_images(smooth_net(64), [8] * 4)
    made, engine = kept(precision=precision, compile="never")

    algorithm = FSMGDA(local_steps=3, batch_size=4, local_lr=0.02, server_lr=0.02)
    result = fit(problem, algorithm, rounds=10, device="cuda", engine=engine)
    assert [type(graph) for graph in made[0].recorded] == [StepGraph]
    assert not any("no CUDA graph" in note for report in result.reports for note in report.notes)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_least_squares_on_the_device_are_the_cpus(engine: str) -> None:
    """Its moments are sums of single precision over all samples, so no closer than that."""
    problem = small_images(smooth_net(6), [12, 9, 8, 11])
    algorithm = FedLS(local_epochs=2, batch_size=4, local_lr=0.02)
    cpu = fit(problem, algorithm, rounds=4, device="cpu")
    gpu = fit(problem, algorithm, rounds=4, device="cuda", engine=engine)
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-3, atol=1e-5)
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-3
    assert "merged by least squares" in gpu.reports[-1].notes[0]


def test_anchored_steps_on_the_device_are_the_cpus() -> None:
    """Six rounds: from the second on steps are a graph, which is told other anchors each time."""
    torch.manual_seed(2)
    model = nn.Sequential(smooth_net(6), nn.Tanh(), nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    problem = small_images(model, [12] * 4)
    algorithm = FedALS(local_steps=6, batch_size=4, local_lr=0.01, heads="4", temperature=2.0)
    cpu = fit(problem, algorithm, rounds=6, device="cpu")
    gpu = fit(problem, algorithm, rounds=6, device="cuda", engine="vectorized")
    torch.testing.assert_close(gpu.losses, cpu.losses, rtol=1e-3, atol=1e-5)
    notes = [note for report in gpu.reports for note in report.notes]
    assert not [note for note in notes if "one by one" in note or "graph" in note]


def test_a_graph_is_not_replayed_for_lanes_of_other_clients() -> None:
    """Two cohorts whose lanes descend the same objectives in the same order, divided otherwise."""
    problem = federation([("a",), ("b", "c"), ("a", "b"), ("c",)], sizes=[12] * 4)
    cohorts = [("c0", "c1"), ("c2", "c3")]

    class InTurns:
        def cohort(
            self, population: Any, objectives: Any, round: int, seed: int
        ) -> tuple[str, ...]:
            return cohorts[round % 2]

    algorithm = FSMGDA(local_steps=3, batch_size=4)
    cpu, gpu = (
        fit(problem, algorithm, rounds=12, device=device, engine=engine, participation=InTurns())
        for device, engine in (("cpu", "sequential"), ("cuda", "vectorized"))
    )
    assert relative(flat(gpu.model).cpu(), flat(cpu.model)) < 1e-10
    assert not any("one by one" in note for report in gpu.reports for note in report.notes)


@pytest.mark.parametrize("compile", ["never", "always"])
def test_runs_side_by_side_in_blocks_are_what_each_is_by_itself(compile: Any) -> None:
    """Some end before the others, so that blocks are filled up; step sizes and methods differ."""
    problem = small_images(smooth_net(6), [8] * 4)
    told: dict[str, Any] = {"local_epochs": 2, "batch_size": 4, "server_lr": 0.02}
    runs: list[tuple[Algorithm, int, int]] = [
        (FSMGDA(**told, local_lr=0.02), 12, 0),
        (FSMGDA(**told, local_lr=0.01), 5, 0),
        (FSMGDA(**told, local_lr=0.03, normalize="loss"), 12, 1),
        (FSMGDA(**told, local_lr=0.02, drift_correction="scaffold"), 12, 0),
        (FSMGDA(**told, local_lr=0.01, drift_correction="scaffold"), 12, 0),
        (FedAvg(**told, local_lr=0.02), 12, 0),
        (FedAvg(**told, local_lr=0.01), 7, 1),
        (FedLS(**told, local_lr=0.02), 12, 0),
        (FedLS(**told, local_lr=0.02), 12, 1),
    ]

    def guest(algorithm: Algorithm, rounds: int, seed: int) -> Guest:
        def go(engine: Engine) -> Any:
            given: Any = lambda *_, **__: engine  # noqa: E731
            return fit(problem, algorithm, rounds, seed=seed, device="cuda", engine=given)

        return Guest(problem, seed, rounds, go)

    many = run_in_lockstep(
        [guest(*run) for run in runs], device=torch.device("cuda:0"), compile=compile
    )
    for (algorithm, rounds, seed), found in zip(runs, many, strict=True):
        if isinstance(found, BaseException):
            raise found
        one = fit(problem, algorithm, rounds, seed=seed, device="cuda", engine="sequential")
        assert relative(flat(found.model), flat(one.model)) < 1e-3
        torch.testing.assert_close(found.losses, one.losses, rtol=1e-3, atol=1e-5)
        notes = [note for report in found.reports for note in report.notes]
        assert any("lanes were stepped side by side" in note for note in notes)
        assert not any("one by one" in note for note in notes)


def test_a_loss_that_counts_its_calls_keeps_steps_from_being_a_graph() -> None:
    """It does so only later: at once, it would not even be batched."""

    class Grows:
        calls = 0

        def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return (self.calls if self.calls > 60 else 1) * ((out - y) ** 2).mean(1)

    problem = small_images(smooth_net(6), [8] * 4)
    grows = Federation(problem.model, [Objective("a", Grows())], [
        Client(f"c{i}", problem.client(f"c{i}").data, ("a",)) for i in range(4)
    ])  # fmt: skip
    algorithm = FSMGDA(local_steps=6, batch_size=4, local_lr=1e-4, server_lr=1e-4)
    result = fit(grows, algorithm, rounds=40, device="cuda", engine="vectorized")
    notes = [note for report in result.reports for note in report.notes]
    assert not any("one by one" in note for note in notes)
    assert any("depends on more than tensors" in note for note in notes)


def test_steps_in_which_rounding_grows_are_a_graph_all_the_same() -> None:
    """Hundreds of long steps: two ways of computing them end far apart, and neither is wrong."""
    problem = small_images(smooth_net(6), [8] * 4)
    made, engine = kept(compile="never")

    algorithm = FSMGDA(local_steps=300, batch_size=4, local_lr=0.3, server_lr=0.01)
    result = fit(problem, algorithm, rounds=6, device="cuda", engine=engine)
    assert [type(graph) for graph in made[0].recorded] == [StepGraph]
    assert not any("more than tensors" in n for report in result.reports for n in report.notes)


def test_a_recording_that_fails_leaves_the_thread_where_it_was_and_the_next_one_works() -> None:
    class Owner:
        pass

    memory, owner, device = GraphMemory(), Owner(), torch.device("cuda:0")
    x, before = torch.ones(4, device=device), torch.cuda.current_stream()
    with pytest.raises(RuntimeError), memory.recording(torch.cuda.CUDAGraph(), owner, device):  # type: ignore[arg-type]
        x.sum().item()
    assert torch.cuda.current_stream() == before
    graph = torch.cuda.CUDAGraph()
    with memory.recording(graph, owner, device):  # type: ignore[arg-type]
        y = 2 * x
    graph.replay()
    assert y.tolist() == [2.0] * 4


def test_in_a_new_process_a_graph_gives_way_to_one_of_compiled_steps() -> None:
    """In a process of its own, since libraries keep what they took in the first recording."""
    code = """
from fmol import FSMGDA, fit
from fmol.engines import VectorizedEngine, worker
from fmol.problems.multidigits import MultiDigits

worker.COMPILE_SECONDS = {"first": 0.0, "later": 0.0}
worker.COMPILE_EACH = {"dense": 0.0, "convolutions": 0.0}
made = []

def engine(*arguments, **named):
    made.append(VectorizedEngine(*arguments, **named))
    return made[-1]

problem = MultiDigits(clients=4, samples=64).build()
result = fit(problem, FSMGDA(local_steps=3, batch_size=8), 12, device="cuda", engine=engine)
notes = {note for report in result.reports for note in report.notes}
assert made[0]._workers[0]._compiled, "nothing was compiled"
assert not any("graph" in note for note in notes), notes
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
