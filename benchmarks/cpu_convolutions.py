"""Convolutions of several lanes on a CPU, each lane with weights of its own: ours beside the library's.

    python benchmarks/cpu_convolutions.py [--threads 1] [--images 16] [--out cpu_convolutions.json]

Milliseconds of a convolution with its three gradients, by kernels of our own and by the library lane
by lane, channels last, for shapes among which `kernels/cpu_conv.py` chooses. The least of several
calls, in turns. Ends with how often the choice is the faster way, and what it costs beside the best.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fmol.engines.convolutions import _KernelConv2d, _LoopConv2d
from fmol.kernels import cpu_conv

LANES = 4
CHANNELS = [
    (1, 6), (1, 10), (1, 16), (1, 32), (3, 6), (3, 10), (3, 16), (3, 32), (6, 16), (8, 8), (8, 16),
    (10, 10), (10, 20), (12, 12), (16, 16), (16, 32), (20, 20), (20, 32), (24, 24), (32, 32),
]  # fmt: skip
PLACES = [(36, 5), (28, 5), (16, 5), (14, 5), (8, 5), (5, 5), (12, 4), (14, 7), (28, 7), (16, 11)]
"""Pixels and kernel, a side."""
How = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
HOW: How = ((1, 1), (0, 0), (1, 1))


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """Channels, pixels a side, filters, kernel."""
    for channels, filters in CHANNELS:
        for side, kernel in PLACES:
            yield channels, side, filters, kernel


def measure(shape: tuple[int, int, int, int], images: int, repeats: int) -> dict[str, float]:
    """Milliseconds by either way."""
    channels, side, filters, kernel = shape
    x = torch.randn(LANES, images, channels, side, side, requires_grad=channels > 3)
    w = torch.randn(LANES, filters, channels, kernel, kernel, requires_grad=True)
    b = torch.randn(LANES, filters, requires_grad=True)
    g = torch.randn(LANES, images, filters, side - kernel + 1, side - kernel + 1)
    last = g.movedim(-3, -1).contiguous().movedim(-1, -3)  # As what comes after leaves it.

    def ours() -> None:
        _KernelConv2d.apply(x, w, b, *HOW).backward(g)  # type: ignore[no-untyped-call]

    def library() -> None:
        _LoopConv2d.apply(x, w, b, *HOW).backward(last)  # type: ignore[no-untyped-call]

    calls: dict[str, Callable[[], None]] = {"ours": ours, "library": library}
    assert cpu_conv.has_library(cpu_conv.conv_library(w))
    spent = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            spent[name] = min(spent[name], 1e3 * (time.perf_counter() - started))
    return spent


def chosen(shape: tuple[int, int, int, int]) -> str:
    channels, side, filters, kernel = shape
    x, w = torch.empty(1, channels, side, side), torch.empty(filters, channels, kernel, kernel)
    return "ours" if cpu_conv.fits(x, w, torch.empty(filters), *HOW) else "library"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--images", type=int, default=16, help="of each lane (16)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{LANES} lanes, {options.images} images each, forward and gradients: milliseconds")
    print(f"{'':24}{'ours':>10}{'library':>10}{'':4}chosen")
    rows = []
    for shape in shapes():
        spent, choice = measure(shape, options.images, options.repeats), chosen(shape)
        rows.append({"shape": shape, "milliseconds": spent, "chosen": choice})
        channels, side, filters, kernel = shape
        label = f"{channels}→{filters}, {side}², {kernel}×{kernel}"
        mark = (
            ""
            if spent[choice] <= min(spent.values())
            else f"  {spent[choice] / min(spent.values()):.2f}×"
        )
        print(f"{label:24}{spent['ours']:>10.3f}{spent['library']:>10.3f}{'':4}{choice}{mark}")
    costs = [row["milliseconds"][row["chosen"]] / min(row["milliseconds"].values()) for row in rows]
    right = sum(cost == 1 for cost in costs)
    print(
        f"the faster way is chosen for {right} of {len(rows)}; at worst {max(costs):.2f}× the faster"
    )
    gains = [
        row["milliseconds"]["library"] / row["milliseconds"]["ours"]
        for row in rows
        if row["chosen"] == "ours"
    ]
    if gains:
        print(f"where ours are chosen, they are {min(gains):.2f} to {max(gains):.2f} times as fast")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
