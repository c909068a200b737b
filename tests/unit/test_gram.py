"""The CUDA kernel for Gramians, run thread by thread on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuda_on_cpu import GXX, OnCpu
from fmol.kernels import gram


@pytest.mark.skipif(GXX is None, reason="needs g++ to compile the kernel for the CPU")
@pytest.mark.parametrize(
    ("s", "d"), [(1, 3), (2, 2100), (5, 515), (8, 1024), (11, 4099), (17, 260), (40, 700), (64, 65)]
)
def test_the_kernel_computes_all_inner_products(
    s: int, d: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(s: int, aligned: bool, device: torch.device) -> OnCpu:
        return OnCpu("gram", gram.kernel_text(s, aligned), tmp_path)

    monkeypatch.setattr(gram, "_kernel", build)
    monkeypatch.setattr(gram, "MOST_BLOCKS", 2)
    monkeypatch.setattr(gram, "WARPS", 2)
    torch.manual_seed(0)
    rows = torch.randn(s, d) * torch.logspace(-6, 6, s)[:, None]
    found = gram.gram(rows)
    assert found is not None
    exact = rows.double() @ rows.double().T
    lengths = exact.diagonal().sqrt()
    assert ((found - exact).abs() <= 1e-13 * lengths[:, None] * lengths).all()
    assert torch.equal(found, found.T)


def test_many_rows_and_other_dtypes_are_left_to_products_of_matrices() -> None:
    assert gram.gram(torch.zeros(gram.MOST_ROWS + 1, 4)) is None
    assert gram.gram(torch.zeros(2, 4, dtype=torch.float64)) is None


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (12, 0)])
def test_devices_that_are_slow_in_double_precision_are_left_to_products_of_matrices(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gram, "compile_kernel", lambda *_: pytest.fail("compiled all the same"))
    gram._kernel.forget()
    assert gram.gram(torch.zeros(2, 4)) is None
    gram._kernel.forget()
