"""The CUDA kernels for convolutions with few channels, run thread by thread on the CPU.

Their text is compiled as C++ with a few lines that stand in for CUDA; on a GPU the same shapes are
tested in tests/invariances/test_gpu.py.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol.engines import direct_conv

GXX = shutil.which("g++")

STAND_IN = """
#include <barrier>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(n)
struct Place { int x, y; };
static thread_local Place threadIdx;
static Place blockIdx;
static std::barrier<>* barrier;
#define __syncthreads() barrier->arrive_and_wait()
"""
LAUNCH = """
extern "C" void launch(int wide, int high, int threads, ARGUMENTS) {
  for (int y = 0; y < high; ++y)
    for (int x = 0; x < wide; ++x) {
      blockIdx = {x, y};
      std::barrier<> all(threads);
      barrier = &all;
      std::vector<std::thread> started;
      for (int t = 0; t < threads; ++t)
        started.emplace_back([=] { threadIdx = {t, 0}; CALL; barrier->arrive_and_drop(); });
      for (auto& one : started) one.join();
    }
}
"""
PARAMETERS = {
    "convolve": ("const float* a, const float* b, const float* c, float* d, int e", "a, b, c, d, e"),
    "correlate": ("const float* a, const float* b, float* c, int d, int e, int f", "a, b, c, d, e, f"),
}  # fmt: skip


class OnCpu:
    """A kernel whose threads are threads of the CPU."""

    def __init__(self, name: str, sizes: Mapping[str, int], folder: Path) -> None:
        arguments, call = PARAMETERS[name]
        launch = LAUNCH.replace("ARGUMENTS", arguments).replace("CALL", f"{name}({call})")
        source, library = folder / f"{name}.cpp", folder / f"{name}.so"
        source.write_text(STAND_IN + direct_conv.kernel_text(name, sizes) + launch)
        command = [str(GXX), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=120)
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(self, grid: tuple[int, int], threads: int, arguments: list[Tensor | int]) -> None:
        self._launch(
            *grid,
            threads,
            *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments),
        )


SHAPES = [
    # lanes, images, channels, height, width, filters, kernel, padding
    (2, 3, 1, 20, 36, 10, (5, 5), (0, 0)),
    (1, 5, 10, 16, 16, 20, (5, 5), (0, 0)),
    (2, 2, 3, 9, 13, 7, (3, 6), (1, 0)),
    (1, 1, 4, 3, 70, 29, (1, 17), (0, 2)),
    (1, 2, 2, 5, 5, 3, (4, 4), (5, 5)),
]


@pytest.mark.skipif(GXX is None, reason="needs g++ to compile the kernels for the CPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_compute_a_convolution_and_its_gradients(
    shape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count()

    def build(name: str, sizes: tuple[tuple[str, int], ...], device: torch.device) -> OnCpu:
        folder = tmp_path / str(next(count))
        folder.mkdir()
        return OnCpu(name, dict(sizes), folder)

    monkeypatch.setattr(direct_conv, "_kernel", build)
    lanes, images, channels, height, width, filters, kernel, padding = shape
    torch.manual_seed(0)
    x, w = (
        torch.randn(lanes, images, channels, height, width),
        torch.randn(lanes, filters, channels, *kernel),
    )
    b = torch.randn(lanes, filters)
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    want = torch.stack([torch.conv2d(one[0], one[1], one[2], 1, padding) for one in zip(*leaves, strict=True)])
    g = torch.randn(want.shape)
    right = torch.autograd.grad(want, leaves, g.double())
    sizes = {
        "C": channels, "H": height, "W": width, "F": filters, "OH": want.shape[3],
        "OW": want.shape[4], "KH": kernel[0], "KW": kernel[1], "PH": padding[0], "PW": padding[1],
    }  # fmt: skip
    back = sizes | {
        "C": filters, "H": sizes["OH"], "W": sizes["OW"], "F": channels, "OH": height, "OW": width,
        "PH": kernel[0] - 1 - padding[0], "PW": kernel[1] - 1 - padding[1],
    }  # fmt: skip
    out = direct_conv.convolve(x, w, b, sizes)
    dx = direct_conv.convolve(g, w, None, back, turned=True)
    found = direct_conv.correlate(x, g, sizes)
    assert out is not None
    assert dx is not None
    assert found is not None
    for got, wanted in zip((out, dx, *found), (want.detach(), *right), strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()


def test_many_channels_and_small_kernels_are_left_to_products_of_matrices() -> None:
    sizes = dict.fromkeys(("H", "W", "OH", "OW"), 8) | dict.fromkeys(("PH", "PW"), 0)
    for channels, kernel in ((64, 5), (8, 3)):
        sizes |= {"C": channels, "F": channels, "KH": kernel, "KW": kernel}
        x, w = torch.zeros(1, 1, channels, 8, 8), torch.zeros(1, channels, channels, kernel, kernel)
        assert direct_conv.convolve(x, w, None, sizes) is None
        assert direct_conv.correlate(x, x, sizes) is None


@pytest.mark.parametrize("channels", [1, 3, 8, 32])
@pytest.mark.parametrize("filters", [1, 10, 32])
@pytest.mark.parametrize("side", [4, 28, 64, 224])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_tiles_fit_into_a_block(channels: int, filters: int, side: int, kernel: int) -> None:
    out = max(1, side - kernel + 1)
    sizes = {
        "C": channels, "H": side, "W": side, "F": filters, "OH": out, "OW": out,
        "KH": kernel, "KW": kernel, "PH": 0, "PW": 0,
    }  # fmt: skip
    tiles = direct_conv.convolve_tiles(sizes)
    if tiles is not None:
        assert 1 <= tiles["CT"] <= channels
        assert 1 <= tiles["YT"] <= out
        assert tiles["FT"] * tiles["XT"] <= direct_conv.MOST_RESULTS
    tiles = direct_conv.correlate_tiles(sizes)
    if tiles is not None:
        assert 1 <= tiles["R"] <= tiles["YT"] <= out
        assert channels * kernel * tiles["R"] * -(-filters // tiles["FT"]) <= 2 * 512
