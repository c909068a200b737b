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
#include <cstring>
#include <deque>
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

// A warp's product on tensor cores: its threads put down what they have, and each takes what it needs.
// Two places in turn: nobody is back at the first before all have passed the second's barrier.
static std::barrier<>* warp_barriers[32];
static float all_lefts[2][32][32][4], all_rights[2][32][32][2];
static thread_local int turn;
static float tf32(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x1000u) & ~0x1fffu;  // To nearest, ties away from zero.
  std::memcpy(&value, &bits, 4);
  return value;
}
static void add_product(float* sum, const float* left, const float* right) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  turn = 1 - turn;
  auto& lefts = all_lefts[turn];
  auto& rights = all_rights[turn];
  std::memcpy(lefts[warp][lane], left, 16);
  std::memcpy(rights[warp][lane], right, 8);
  warp_barriers[warp]->arrive_and_wait();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 8; ++k)
      sum[i] += lefts[warp][row % 8 * 4 + k % 4][row / 8 + k / 4 * 2] *
                rights[warp][column * 4 + k % 4][k / 4];
  }
}
static double all_tops[2][32][32][3];
static void add_product(double* sum, double top, double bottom, double right) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  turn = 1 - turn;
  auto& mine = all_tops[turn][warp];
  mine[lane][0] = top, mine[lane][1] = bottom, mine[lane][2] = right;
  warp_barriers[warp]->arrive_and_wait();
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k)
      sum[i] += mine[lane / 4 * 4 + k][i / 2] * mine[(2 * (lane % 4) + i % 2) * 4 + k][2];
}
"""
LAUNCH = """
extern "C" void launch(int wide, int high, int threads, ARGUMENTS) {
  for (int y = 0; y < high; ++y)
    for (int x = 0; x < wide; ++x) {
      blockIdx = {x, y};
      std::barrier<> all(threads);
      barrier = &all;
      std::deque<std::barrier<>> warps;
      for (int first = 0; first < threads; first += 32) {
        warps.emplace_back(threads - first < 32 ? threads - first : 32);
        warp_barriers[first / 32] = &warps.back();
      }
      std::vector<std::thread> started;
      for (int t = 0; t < threads; ++t)
        started.emplace_back([=] { threadIdx = {t, 0}; CALL; barrier->arrive_and_drop(); });
      for (auto& one : started) one.join();
    }
}
"""
PARAMETERS = {
    "advance_lanes": ("float* a", "float* b", "const float* c", "const float* d", "int e", "int f"),
    "add_parts": ("const float* a", "float* b", "float* c", "int d", "int e", "int f"),
    "convolve": (
        "const float* a",
        "const float* b",
        "const float* c",
        "float* d",
        "int e",
        "int f",
        "int g",
    ),
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
        # A GPU fails on numbers that do not lie where they may be read four at a time; so does this.
        command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
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
