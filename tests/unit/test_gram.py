"""The CUDA kernel for Gramians, run thread by thread on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuda_on_cpu import GXX, OnCpu
from fmol.kernels import gram


@pytest.mark.skipif(GXX is None, reason="needs g++ to compile the kernel for the CPU")
@pytest.mark.parametrize(
    ("s", "d"), [(1, 3), (2, 2100), (5, 515), (8, 1024), (11, 4099), (40, 700)]
)
def test_the_kernel_computes_all_inner_products(
    s: int, d: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(s: int, aligned: bool, device: torch.device) -> OnCpu:
        return OnCpu("gram", gram.kernel_text(s, aligned), tmp_path)

    monkeypatch.setattr(gram, "_kernel", build)
    monkeypatch.setattr(gram, "BLOCKS", 2)
    monkeypatch.setattr(gram, "LONGEST", 64)
    torch.manual_seed(0)
    rows = torch.randn(s, d) * torch.logspace(-6, 6, s)[:, None]
    found = gram.gram(rows)
    assert found is not None
    exact = rows.double() @ rows.double().T
    lengths = exact.diagonal().sqrt()
    assert ((found - exact).abs() <= 1e-6 * lengths[:, None] * lengths).all()
    assert torch.equal(found, found.T)


def test_many_rows_and_other_dtypes_are_left_to_products_of_matrices() -> None:
    assert gram.gram(torch.zeros(gram.MOST_ROWS + 1, 4)) is None
    assert gram.gram(torch.zeros(2, 4, dtype=torch.float64)) is None


@pytest.mark.parametrize("s", range(1, gram.MOST_ROWS + 1))
def test_tiles_fit_into_a_block(s: int) -> None:
    side, slices, turns = gram.gram_tiles(s)
    groups = -(-s // side)
    pairs = groups * (groups + 1) // 2
    assert pairs * slices <= 1024
    columns = 4 * slices * turns
    assert 4 * groups * side * (columns + 4) + 8 * pairs * side**2 <= 48 * 1024
