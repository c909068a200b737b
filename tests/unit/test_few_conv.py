"""The CUDA kernels for convolutions with few channels, run thread by thread on the CPU.

On a GPU they are tested in tests/invariances/test_gpu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_on_cpu import GXX, OnCpu
from fmol.kernels import direct_conv, few_conv, tensor_conv
from fmol.kernels.few_conv import DIRECT, TENSOR, Way

SHAPES = [
    # lanes, images, channels, height, width, filters, kernel, padding
    (2, 3, 1, 20, 36, 10, (5, 5), (0, 0)),
    (1, 5, 10, 16, 16, 20, (5, 5), (0, 0)),
    (2, 9, 10, 16, 16, 20, (5, 5), (0, 0)),
    (2, 2, 3, 9, 13, 7, (3, 6), (1, 0)),
    (1, 1, 4, 3, 70, 29, (1, 17), (0, 2)),
    (1, 2, 2, 5, 5, 3, (4, 4), (5, 5)),
]
TENSOR_SHAPES = [
    # With how many KB of shared memory a block may take.
    (48, (2, 3, 10, 16, 16, 20, (5, 5), (0, 0))),  # LeNet's.
    (24, (1, 2, 1, 12, 36, 10, (5, 5), (0, 0))),  # Several warps sum up the same taps.
    (24, (1, 2, 11, 8, 10, 20, (5, 5), (2, 2))),  # Pixels two at a time, runs that are not full.
    (6, (1, 2, 4, 14, 22, 4, (4, 5), (3, 4))),  # Strips, the last of which is not full.
    (6, (1, 2, 5, 11, 13, 9, (4, 4), (3, 2))),  # Some of the channels at a time.
    *((48, shape) for shape in SHAPES[-2:]),
]
CASES = [(DIRECT, 48, shape, True) for shape in SHAPES]
CASES += [(TENSOR, kilobytes, shape, True) for kilobytes, shape in TENSOR_SHAPES]
CASES += [(DIRECT, 48, SHAPES[0], False)]  # Parts are summed up without a kernel.


@pytest.mark.skipif(GXX is None, reason="needs g++ to compile the kernels for the CPU")
@pytest.mark.parametrize(
    ("way", "kilobytes", "shape", "adding"),
    CASES,
    ids=[f"{way.file}-{shape}{'' if adding else '-torch'}" for way, _, shape, adding in CASES],
)
def test_kernels_compute_a_convolution_and_its_gradients(
    way: Way,
    kilobytes: int,
    shape: Any,
    adding: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(
        way: Way, name: str, sizes: tuple[tuple[str, int], ...], device: torch.device
    ) -> OnCpu:
        return OnCpu(name, way.text(name, dict(sizes)), tmp_path)

    add_parts = OnCpu("add_parts", few_conv.adding_text(), tmp_path) if adding else None
    monkeypatch.setattr(few_conv, "_kernel", build)
    monkeypatch.setattr(few_conv, "_adding", lambda device: add_parts)
    monkeypatch.setattr(few_conv, "_ways", lambda x, shape: (way,))
    monkeypatch.setattr(few_conv, "_tiles", lambda divide, shape: divide(dict(shape)))
    monkeypatch.setattr(tensor_conv, "SHARED", 1024 * kilobytes)
    monkeypatch.setattr(few_conv, "SPLIT_BLOCKS", 4)  # Several images are summed up by a block.
    lanes, images, channels, height, width, filters, kernel, padding = shape
    torch.manual_seed(0)
    x, w = (
        torch.randn(lanes, images, channels, height, width),
        torch.randn(lanes, filters, channels, *kernel),
    )
    b = torch.randn(lanes, filters)
    if way is TENSOR:  # Of what needs no rounding the sums are as exact.
        x, w = x.bfloat16().float(), w.bfloat16().float()
    if lanes > 1:  # As parameters lie: parts of rows that hold all of a lane's.
        before, taps = images, w[0].numel()
        rows = torch.cat([torch.randn(lanes, before), w.reshape(lanes, -1), b], dim=1)
        w, b = rows[:, before : before + taps].view(w.shape), rows[:, before + taps :]
    leaves = [t.double().requires_grad_() for t in (x, w, b)]
    want = torch.stack(
        [torch.conv2d(one[0], one[1], one[2], 1, padding) for one in zip(*leaves, strict=True)]
    )
    g = torch.randn(want.shape).bfloat16().float()
    right = torch.autograd.grad(want, leaves, g.double())
    sizes = {
        "C": channels, "H": height, "W": width, "F": filters, "OH": want.shape[3],
        "OW": want.shape[4], "KH": kernel[0], "KW": kernel[1], "PH": padding[0], "PW": padding[1],
    }  # fmt: skip
    back = sizes | {
        "C": filters, "H": sizes["OH"], "W": sizes["OW"], "F": channels, "OH": height, "OW": width,
        "PH": kernel[0] - 1 - padding[0], "PW": kernel[1] - 1 - padding[1],
    }  # fmt: skip
    out = few_conv.convolve(x, w, b, sizes)
    dx = few_conv.convolve(g, w, None, back, turned=True)
    found = few_conv.correlate(x, g, sizes)
    assert out is not None
    assert dx is not None
    assert found is not None
    for got, wanted in zip((out, dx, *found), (want.detach(), *right), strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()
    # What is compiled takes every result to lie in a row, in memory of its own.
    assert all(got.is_contiguous() for got in (out, dx, *found))
    assert found[0].untyped_storage().data_ptr() != found[1].untyped_storage().data_ptr()


def test_many_channels_and_small_kernels_are_left_to_products_of_matrices() -> None:
    sizes = dict.fromkeys(("H", "W", "OH", "OW"), 8) | dict.fromkeys(("PH", "PW"), 0)
    for channels, kernel in ((64, 5), (8, 3)):
        sizes |= {"C": channels, "F": channels, "KH": kernel, "KW": kernel}
        x, w = torch.zeros(1, 1, channels, 8, 8), torch.zeros(1, channels, channels, kernel, kernel)
        assert few_conv.convolve(x, w, None, sizes) is None
        assert few_conv.correlate(x, x, sizes) is None


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
        assert direct_conv.correlate_threads(sizes, tiles) <= 2 * 512
    tiles = tensor_conv.convolve_tiles(sizes)
    if tiles is not None:
        assert 1 <= tiles["CT"] <= channels
        assert 1 <= tiles["YT"] <= out
        assert tensor_conv.convolve_threads(sizes, tiles) <= 32 * tensor_conv.MOST_WARPS
    tiles = tensor_conv.correlate_tiles(sizes)
    if tiles is not None:
        assert 1 <= tiles["YT"] <= out
        assert tensor_conv.correlate_threads(sizes, tiles) <= 32 * tensor_conv.MOST_WARPS


def test_lenet_has_tiles_on_tensor_cores() -> None:
    for channels, side, filters in ((1, 36, 10), (10, 16, 20)):
        out = side - 4
        sizes = {"C": channels, "H": side, "W": side, "F": filters, "OH": out, "OW": out}
        sizes |= {"KH": 5, "KW": 5, "PH": 0, "PW": 0}
        assert tensor_conv.convolve_tiles(sizes) is not None
        assert tensor_conv.correlate_tiles(sizes) is not None
