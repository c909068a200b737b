"""C++ kernels for convolutions with few channels on a CPU: right, kept on disk, and done without."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import FSMGDA, Client, Federation, Objective, fit
from fmol.engines import AutoEngine, SequentialEngine, VectorizedEngine, auto
from fmol.errors import FmolError
from fmol.kernels import cpu, cpu_conv, fallbacks
from fmol.rounds import Plan

needs_compiler = pytest.mark.skipif(
    cpu.find_compiler() is None, reason="needs a C++ compiler, as g++"
)

SHAPES = [
    # lanes, images, channels, height, width, filters, kernel, padding; also those that are not chosen.
    (2, 9, 1, 36, 36, 10, 5, (0, 0)),  # LeNet's.
    (3, 5, 10, 16, 16, 20, 5, (0, 0)),
    (1, 3, 3, 9, 13, 7, 4, (1, 0)),  # Rows that do not fill vectors, and other than high.
    (2, 2, 4, 8, 17, 9, 5, (2, 3)),
    (2, 1, 2, 5, 5, 3, 5, (4, 4)),  # As much around the images as a kernel reaches.
    (1, 4, 5, 5, 40, 1, 5, (0, 0)),  # A single row of results.
    (4, 3, 32, 7, 7, 31, 4, (0, 2)),
]
DTYPES = {torch.float32: 1e-6, torch.float64: 1e-14}


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_a_convolution_and_its_gradients(shape: Any, dtype: torch.dtype) -> None:
    x, w, b, padding = _made(shape, dtype)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    want = torch.stack(
        [torch.conv2d(*one, padding=padding) for one in zip(*leaves, strict=True)]  # type: ignore[call-overload]
    )
    g = torch.randn(want.shape, dtype=dtype)
    right = torch.autograd.grad(want, leaves, g.double())
    found = _all_three(x, w, b, g, padding)
    for got, wanted in zip(found, (want.detach(), *right), strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).norm() <= DTYPES[dtype] * wanted.norm()


@needs_compiler
def test_results_are_the_same_bits_with_any_number_of_threads() -> None:
    x, w, b, padding = _made((3, 9, 10, 16, 16, 20, 5, (0, 0)), torch.float32)
    g = torch.randn(3, 9, 20, 12, 12)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(_all_three(x, w, b, g, padding))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(2, 2), (6, 12), (7, 41), (5, 64), (32, 33)], ids=str)
def test_pooling_and_its_gradient_are_those_of_torch(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, *size, dtype=dtype).mul(2).round()  # Equals are frequent.
    x[0, 0, 0, 0], x[0, 1, 1, 1] = torch.nan, torch.inf
    leaf = x.clone().requires_grad_()
    want = torch.max_pool2d(leaf, 2)
    g = torch.randn(want.shape, dtype=dtype)
    want.backward(g)
    assert cpu_conv.has_library(cpu_conv.pool_library(x))
    out, places = cpu_conv.pool_planes(x)
    assert torch.equal(out.nan_to_num(9.0), want.detach().nan_to_num(9.0))
    assert leaf.grad is not None
    assert torch.equal(cpu_conv.unpool_planes(g, places, *size), leaf.grad)


@pytest.mark.parametrize(
    ("x", "weight", "how"),
    [
        ((1, 9, 9), (21, 1, 5, 5), {}),
        ((10, 16, 16), (16, 10, 5, 5), {}),  # Vectors of the library's are full.
        ((12, 16, 16), (10, 12, 5, 5), {}),
        ((1, 6, 8), (4, 1, 4, 4), {}),  # Few pixels are left.
        ((1, 28, 28), (4, 1, 8, 8), {}),
        ((1, 9, 9), (4, 1, 3, 3), {}),
        ((1, 9, 9), (4, 1, 5, 4), {}),
        ((1, 9, 9), (4, 1, 5, 5), {"stride": (2, 1)}),
        ((1, 9, 9), (4, 1, 5, 5), {"dilation": (1, 2)}),
        ((1, 9, 9), (4, 1, 5, 5), {"padding": (5, 0)}),
        ((1, 19, 19), (4, 1, 5, 5), {"padding": (-1, -1)}),
        ((1, 9, 9), (4, 1, 5, 5), {"bias": torch.zeros(3)}),
        ((1, 9, 9), (4, 1, 5, 5), {"bias": torch.zeros(4, dtype=torch.float64)}),
        ((2, 9, 9), (4, 1, 5, 5), {}),
        ((1, 3, 9), (4, 1, 5, 5), {}),
    ],
)
def test_what_the_library_does_better_or_has_a_word_to_say_of_is_left_to_it(
    x: tuple[int, ...], weight: tuple[int, ...], how: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"bias": None, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    assert not cpu_conv.fits(torch.zeros(2, *x), torch.zeros(weight), **(usual | how))
    assert cpu_conv.fits(torch.zeros(2, 1, 9, 9), torch.zeros(4, 1, 5, 5), **usual)
    half = torch.zeros(4, 1, 5, 5, dtype=torch.bfloat16)
    assert not cpu_conv.fits(torch.zeros(2, 1, 9, 9, dtype=half.dtype), half, **usual)


# ---- in an engine ----------------------------------------------------------------------------


def federation(dtype: torch.dtype = torch.float64) -> Federation:
    """Two clients with pictures of their own, and a smooth network with convolutions and poolings."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 5, padding=2), nn.MaxPool2d(2), nn.Tanh(),
        nn.Conv2d(3, 5, 4, bias=False), nn.Tanh(), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(5, 4, 2, stride=2), nn.Flatten(), nn.Linear(4, 2),
    ).to(dtype)  # fmt: skip

    def data(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 1, 14, 14, dtype=dtype), torch.randn(count, 2, dtype=dtype)

    return Federation(
        model,
        [
            Objective("first", lambda out, y: (out[:, 0] - y[:, 0]) ** 2),
            Objective("second", lambda out, y: (out[:, 1] - y[:, 1]) ** 2),
        ],
        [
            Client("a", data(11), ("first", "second")),
            Client("b", data(7), ("second",)),
        ],
    )


ALGORITHM = FSMGDA(local_steps=3, batch_size=4, local_lr=0.05, server_lr=0.05)


@needs_compiler
def test_the_vectorized_engine_gives_the_sequential_engines_numbers_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[cpu.Library] = []
    kernels = cpu_conv._kernels

    def ask(library: cpu.Library) -> ctypes.CDLL:
        asked.append(library)
        return kernels(library)

    monkeypatch.setattr(cpu_conv, "_kernels", ask)
    runs = [
        fit(federation(), ALGORITHM, rounds=10, engine=engine)
        for engine in ("sequential", "vectorized")
    ]
    x, other = (nn.utils.parameters_to_vector(run.model.parameters()).detach() for run in runs)
    assert (x - other).norm() <= 1e-10 * x.norm()
    taps = {dict(meanings).get("K") for _, meanings in asked}
    assert taps == {5, 4, None}  # Either size of kernel, and poolings.
    assert not any("convolution" in note for report in runs[1].reports for note in report.notes)


@needs_compiler
def test_evaluations_are_computed_with_them_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients' images as those of one lane."""
    asked: list[tuple[int, ...]] = []
    convolve = cpu_conv._convolve

    def ask(x: Tensor, *arguments: Any, **named: Any) -> None:
        asked.append(tuple(x.shape))
        convolve(x, *arguments, **named)

    problem = federation()
    engine = VectorizedEngine(problem, seed=0, device="cpu")
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    plan = Plan(0, ("a", "b"), evaluate=True)
    asks = [plan.ask(problem.client(id), x, lanes=(), local=None) for id in plan.cohort]
    engine.map(asks)  # The first one also tries what can be batched.
    monkeypatch.setattr(cpu_conv, "_convolve", ask)
    _, receipt = engine.map(asks)
    assert asked == [(1, 18, 1, 14, 14), (1, 18, 3, 7, 7)]
    _, right = SequentialEngine(problem, seed=0, device="cpu").map(asks)
    assert [record.loss for record in receipt.clients] == [
        pytest.approx(record.loss, rel=1e-12) for record in right.clients
    ]


def test_without_a_compiler_the_library_computes_them_and_the_first_round_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cpu, "find_compiler", lambda: None)
    _forget(monkeypatch)
    with caplog.at_level(logging.WARNING, "fmol"):
        found = fit(federation(), ALGORITHM, rounds=2, engine="vectorized")
    right = fit(federation(), ALGORITHM, rounds=2)
    assert torch.allclose(found.losses, right.losses, rtol=1e-10)
    noted = [note for note in found.reports[0].notes if "there is no C++ compiler" in note]
    assert len(noted) == 1
    assert not any("C++" in note for note in found.reports[1].notes)
    assert "there is no C++ compiler" in caplog.text


@pytest.mark.skipif(shutil.which("false") is None, reason="needs the command `false`")
@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_a_compiler_that_fails_is_named_with_what_it_said_and_done_without(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cpu, "find_compiler", lambda: "false")
    monkeypatch.setattr(cpu, "_native", cpu._native.__wrapped__)
    monkeypatch.setattr(auto, "BUILD_SECONDS", 0.0)
    _forget(monkeypatch)
    # A second run in the same process is told as well.
    for _ in range(2):
        found = fit(federation(), ALGORITHM, rounds=2, engine=engine)
        told = "\n".join(found.reports[0].notes)
        assert "without cpu_conv.cpp: `false` ended with 1 and said: nothing" in told
        assert "one by one" not in told
    right = fit(federation(), ALGORITHM, rounds=2)
    assert torch.allclose(found.losses, right.losses, rtol=1e-10)
    assert list(tmp_path.iterdir()) == []
    # And one without convolutions is not.
    data = torch.ones(3, 2), torch.ones(3, 2)
    clients = [Client("a", data, ("first",)), Client("b", data, ("second",))]
    other = Federation(nn.Linear(2, 2), federation().objectives, clients)
    assert not any("cpp" in note for note in fit(other, ALGORITHM, rounds=1).reports[0].notes)


@needs_compiler
@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_a_folder_that_cannot_be_looked_at_is_done_without(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(auto, "BUILD_SECONDS", 0.0)
    _forget(monkeypatch)
    found = fit(federation(), ALGORITHM, rounds=1, engine=engine)
    assert not any("one by one" in note or "cpp" in note for note in found.reports[0].notes)


@needs_compiler
def test_without_a_home_kernels_are_compiled_for_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cpu.CACHE_VARIABLE)
    monkeypatch.setattr(Path, "home", nowhere)
    assert not cpu.is_kept(LIBRARY)
    assert cpu.load_library(LIBRARY).fmol_pool


def test_auto_tells_of_data_that_do_not_fit_as_other_engines_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it looks at them before kernels are compiled."""
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    _forget(monkeypatch)
    fine = federation(torch.float32)
    wrong = (torch.randn(4, 3, 14, 14), torch.randn(4, 2))
    clients = [Client("a", wrong, ("first", "second"))]
    broken = Federation(fine.model, fine.objectives, clients)
    errors = []
    for engine in ("sequential", "auto"):
        with pytest.raises(FmolError, match="client `a`") as caught:
            fit(broken, ALGORITHM, rounds=1, engine=engine)
        errors.append((str(caught.value), caught.value.__notes__))
    assert errors[0] == errors[1]
    assert errors[0][1] == ["This happened in round 0 at client `a`."]


# ---- on disk ---------------------------------------------------------------------------------

LIBRARY: cpu.Library = ("cpu_pool.cpp", (("REAL", "float"),))


@needs_compiler
def test_a_kernel_is_compiled_once_on_a_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    assert not cpu.is_kept(LIBRARY)
    cpu.load_library(LIBRARY)
    assert cpu.is_kept(LIBRARY)
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]

    def never(*command: Any) -> str:
        raise AssertionError(f"{command} was run again")

    monkeypatch.setattr(cpu, "_run", never)
    assert cpu.load_library(LIBRARY).fmol_pool
    assert not cpu.is_kept(("cpu_pool.cpp", (("REAL", "double"),)))


@needs_compiler
def test_half_a_file_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    place = cpu._place(LIBRARY)
    assert place is not None
    place.parent.mkdir(mode=0o700)
    place.touch(mode=0o700)
    assert cpu.load_library(LIBRARY).fmol_pool
    assert place.stat().st_size


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
@pytest.mark.parametrize("whose", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(
    whose: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    cpu.load_library(LIBRARY)
    place = cpu._place(LIBRARY)
    assert place is not None
    place.unlink()  # It is loaded: what is written into it would be in this process.
    place.write_bytes(b"no library")
    place.chmod(0o777 if whose == "file" else 0o700)
    place.parent.chmod(0o777 if whose == "folder" else 0o700)
    assert not cpu.is_kept(LIBRARY)
    assert cpu.load_library(LIBRARY).fmol_pool
    assert cpu.is_kept(LIBRARY) == (whose == "file")  # Made anew, where the folder is ours.


@needs_compiler
def test_where_nothing_can_be_kept_a_kernel_is_compiled_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(taken))
    assert cpu.load_library(LIBRARY).fmol_pool
    assert taken.read_text() == "no folder"


@needs_compiler
def test_progress_says_that_a_kernel_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    _forget(monkeypatch)
    said: list[str] = []
    fit(
        federation(torch.float32),
        ALGORITHM,
        rounds=1,
        engine=lambda *a, **k: VectorizedEngine(*a, say=said.append, **k),
    )
    assert said == ["compiling"] * 3


@needs_compiler
@pytest.mark.parametrize(("rounds", "compiles"), [(1, False), (10**6, True)])
def test_auto_compiles_kernels_only_for_a_run_that_is_long_enough(
    rounds: int, compiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cpu.CACHE_VARIABLE, str(tmp_path))
    _forget(monkeypatch)

    class Expecting(AutoEngine):
        def expect(self, told: int) -> None:
            super().expect(rounds)

    result = fit(
        federation(torch.float32),
        ALGORITHM,
        rounds=1,
        engine=lambda *a, **k: Expecting(*a, compile="never", **k),
    )
    assert (tmp_path / "kernels").exists() == compiles
    short = "engine sequential: the run is too short for kernels to be compiled first"
    assert (short in result.reports[0].notes) != compiles


def _made(shape: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """Images, and weights and biases as parameters lie: parts of rows that hold all of a lane's."""
    lanes, images, channels, height, width, filters, kernel, padding = shape
    torch.manual_seed(0)
    x = torch.randn(lanes, images, channels, height, width, dtype=dtype)
    taps = filters * channels * kernel**2
    rows = torch.randn(lanes, 3 + taps + filters, dtype=dtype)
    w = rows[:, 3 : 3 + taps].view(lanes, filters, channels, kernel, kernel)
    return x, w, rows[:, 3 + taps :], padding


def _all_three(
    x: Tensor, w: Tensor, b: Tensor, g: Tensor, padding: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Results, and the gradients of images, weights and biases."""
    how = ((1, 1), padding, (1, 1))
    assert cpu_conv.has_library(cpu_conv.conv_library(w))
    return (
        cpu_conv.lane_conv2d(x, w, b, *how),
        cpu_conv.lane_conv2d_input(g, w, x, *how),
        *cpu_conv.lane_conv2d_weight(x, g, w, True, *how),
    )


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, in which nothing was compiled or noted."""
    monkeypatch.setattr(cpu_conv._load, "_found", {})
    monkeypatch.setattr(fallbacks, "_uses", {})
