"""Convolutions of many lanes on a GPU, each lane with weights of its own: every way of computing them.

    python benchmarks/convolutions.py [--precision fp32] [--lanes 40] [--out convolutions.json]

Milliseconds of a call for each convolution of ResNet-18 and LeNet: forward, the gradient of the weights
and that of the images. `ours` is what is chosen for the shape; the others are each way by itself where
it can be. Calls are started behind a kernel that keeps the device busy, so that it is timed and not the
host.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import set_precision

from fmol.kernels import few_conv, lane_conv

RESNET = [  # channels, side, filters, kernel, stride, padding, how many of them
    (3, 64, 64, 7, 2, 3, 1), (64, 16, 64, 3, 1, 1, 4), (64, 16, 128, 3, 2, 1, 1),
    (64, 16, 128, 1, 2, 0, 1), (128, 8, 128, 3, 1, 1, 3), (128, 8, 256, 3, 2, 1, 1),
    (128, 8, 256, 1, 2, 0, 1), (256, 4, 256, 3, 1, 1, 3), (256, 4, 512, 3, 2, 1, 1),
    (256, 4, 512, 1, 2, 0, 1), (512, 2, 512, 3, 1, 1, 3),
]  # fmt: skip
LENET = [(1, 36, 10, 5, 1, 0, 1), (10, 16, 20, 5, 1, 0, 1)]
MANY, FEW = ("ours", "windows", "library", "rows", "last"), ("ours", "direct", "tensor")
"""Ways with many channels: windows read where they lie, written out for the library as columns or as
rows, channels last; and with few: on the usual cores, and on tensor cores."""
BUSY = 20_000_000
"""Cycles for which the device is kept busy while calls are started."""


@contextmanager
def only(way: str) -> Iterator[None]:
    """Within it convolutions are computed in one way alone, where they can be."""
    ways_of = (
        (lane_conv, "_by_library"),
        (lane_conv, "_by_rows"),
        (lane_conv, "_lies_better_last"),
    )
    kept = [(*each, getattr(*each)) for each in (*ways_of, (few_conv, "_ways"))]
    if way in MANY[1:]:
        lane_conv._by_library = lambda w, *, tiny=False: way == "library"
        lane_conv._by_rows = lambda w, size: way == "rows"
        lane_conv._lies_better_last = lambda x, filters, size: (
            way == "last" and x.shape[2] % lane_conv.TOGETHER == 0
        )
    if way in FEW[1:]:
        ways = (few_conv.DIRECT,) if way == "direct" else (few_conv.TENSOR,)
        few_conv._ways = lambda x, shape: ways
    try:
        yield
    finally:
        for module, name, chooser in kept:
            setattr(module, name, chooser)


def milliseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def measure(shape: tuple[int, ...], lanes: int, batch: int) -> dict[str, dict[str, float]]:
    """Milliseconds by operation and way."""
    channels, side, filters, kernel, stride, padding, _ = shape
    out = (side + 2 * padding - kernel) // stride + 1
    x = torch.randn(lanes, batch, channels, side, side, device="cuda")
    # As parameters lie: parts of rows that hold all of a lane's, biases after the weights.
    taps = filters * channels * kernel * kernel
    w = torch.randn(lanes, taps + filters, device="cuda")[:, :taps]
    w = w.view(lanes, filters, channels, kernel, kernel)
    g = torch.randn(lanes, batch, filters, out, out, device="cuda")
    how = (stride, stride), (padding, padding), (1, 1)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: lane_conv.lane_conv2d(x, w, None, *how),
        "weights": lambda: lane_conv.lane_conv2d_weight(x, g, w, False, *how),
        "images": lambda: lane_conv.lane_conv2d_input(g, w, x, *how),
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        found[name] = {}
        for way in FEW if max(channels, filters) <= few_conv.MOST_CHANNELS else MANY:
            with only(way):
                found[name][way] = milliseconds(call)
    return found


def show(
    title: str, shapes: list[tuple[int, ...]], ways: tuple[str, ...], lanes: int, batch: int
) -> list[dict[str, Any]]:
    print(f"\n{title}, {lanes} lanes, {batch} images each: milliseconds")
    print(f"{'':36}" + "".join(f"{way:>10}" for way in ways))
    rows: list[dict[str, Any]] = []
    sums: dict[tuple[str, str], float] = {}
    for shape in shapes:
        found = measure(shape, lanes, batch)
        rows.append({"shape": shape, "lanes": lanes, "batch": batch, "milliseconds": found})
        channels, side, filters, kernel, stride, _, count = shape
        label = f"{channels}→{filters}, {side}², {kernel}×{kernel}/{stride}"
        for name, spent in found.items():
            print(f"{label:26}{name:10}" + "".join(f"{spent[way]:>10.3f}" for way in ways))
            for way in ways:
                sums[name, way] = sums.get((name, way), 0.0) + count * spent[way]
    for name in ("forward", "weights", "images"):
        cells = "".join(f"{sums[name, way]:>10.2f}" for way in ways)
        print(f"{'all layers':26}{name:10}{cells}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=["fp32", "tf32"], default="tf32")
    parser.add_argument("--lanes", type=int, default=40, help="of ResNet-18 (40)")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device.")
    set_precision(options.precision)
    rows = show("ResNet-18", RESNET, MANY, options.lanes, 32)
    for lanes, batch in ((20, 64), (200, 16)):
        rows += show("LeNet", LENET, FEW, lanes, batch)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
