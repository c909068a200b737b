"""CUDA kernels run thread by thread on the CPU: their text compiled as C++, with a few lines that stand
in for CUDA."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

__all__ = ["GXX", "OnCpu"]

GXX = shutil.which("g++")

STAND_IN = """
#include <barrier>
#include <thread>
#include <vector>
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
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
    "convolve": ("const float* a", "const float* b", "const float* c", "float* d", "int e"),
    "correlate": ("const float* a", "const float* b", "float* c", "int d", "int e", "int f"),
    "gram": ("const float* a", "double* b", "int c", "int d"),
}
_number = itertools.count()


class OnCpu:
    """The kernel `name` of a text; called as `fmol.kernels.nvrtc.CudaKernel` is."""

    def __init__(self, name: str, text: str, folder: Path) -> None:
        given = PARAMETERS[name]
        call = f"{name}({', '.join(each.split()[-1] for each in given)})"
        launch = LAUNCH.replace("ARGUMENTS", ", ".join(given)).replace("CALL", call)
        source = folder / f"{name}-{next(_number)}.cpp"
        source.write_text(STAND_IN + text + launch)
        library = source.with_suffix(".so")
        command = [str(GXX), "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True, timeout=120)
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(
        self, grid: tuple[int, int], threads: int, arguments: Sequence[Tensor | int]
    ) -> None:
        assert threads <= 1024
        self._launch(
            *grid,
            threads,
            *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments),
        )
