"""The CUDA kernel that takes a step, run thread by thread on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuda_on_cpu import GXX, OnCpu
from fmol.kernels import advance


@pytest.mark.skipif(GXX is None, reason="needs g++ to compile the kernel for the CPU")
@pytest.mark.parametrize(("lanes", "d"), [(1, 4), (3, 5), (2, 8), (5, 7), (7, 33), (2, 1000)])
@pytest.mark.parametrize("own", [False, True], ids=["one size", "own sizes"])
def test_a_step_is_taken_in_one_pass(
    lanes: int, d: int, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "THREADS", 32)
    kernel = OnCpu("advance_lanes", advance.kernel_text(d), tmp_path)
    monkeypatch.setattr(advance, "_kernel", lambda d, device: kernel)
    generator = torch.Generator().manual_seed(0)
    x, delta, direction = (torch.randn(lanes, d, generator=generator) for _ in range(3))
    lr = torch.rand(lanes, 1, generator=generator) if own else torch.tensor([0.3])
    want = x.double() - lr.double() * direction.double(), delta.double() + direction.double()
    assert advance.advance(x, delta, direction, lr)
    torch.testing.assert_close(x.double(), want[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(delta.double(), want[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "direction",
    [torch.ones(2, 8, dtype=torch.float64), torch.ones(8, 2).T, torch.ones(17)[1:].view(2, 8)],
    ids=["double", "turned", "not aligned"],
)
def test_what_the_kernel_is_not_for_is_left_alone(direction: torch.Tensor) -> None:
    x, delta = torch.zeros(2, 8), torch.zeros(2, 8)
    assert not advance.advance(x, delta, direction, torch.tensor([1.0]))
    assert not x.any()
    assert not delta.any()
