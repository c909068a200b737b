"""Where a round's time goes, by torch's profiler."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LINES = 14
"""How many kernels are printed; the others are one line."""


def profiled(function: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """The seconds of a call, and those of every kernel in it with how often it ran.

    On a CPU the kernels are torch's operations, each without those that it calls.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    started = time.perf_counter()
    with profile(activities=activities) as seen:
        begun = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, count, spent in _on_device(seen) if cuda else _on_cpu(seen):
        found = kernels[short(name)]
        found[0] += count
        found[1] += spent
    return {
        "seconds": seconds,
        "with_profiler": time.perf_counter() - started,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1][1])),
    }


def _on_device(seen: Any) -> Iterator[tuple[str, int, float]]:
    """Name, 1 and seconds of each kernel.

    As they were recorded: torch's own tables of a round of large models take minutes to make.
    """
    for event in seen.profiler.kineto_results.events():
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        if on_device and not event.is_user_annotation():
            yield event.name(), 1, event.duration_ns() / 1e9


def _on_cpu(seen: Any) -> Iterator[tuple[str, int, float]]:
    """Name, how often and seconds of each operation."""
    for event in seen.key_averages():
        if event.self_cpu_time_total:
            yield event.key, event.count, event.self_cpu_time_total / 1e6


def short(name: str) -> str:
    """A kernel's name without its arguments and templates' insides.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::Add<float>>(int, float)")
    'at::native::vectorized_elementwise_kernel'
    >>> short("void at::native::(anonymous namespace)::max_pool_forward_nchw<float>(int)")
    'at::native::max_pool_forward_nchw'
    """
    name = name.replace("(anonymous namespace)::", "")
    return re.sub(r"^void ", "", re.split(r"[<(]", name, maxsplit=1)[0]) or name[:60]


def print_profile(title: str, found: dict[str, Any]) -> None:
    kernels = found["kernels"]
    total = sum(seconds for _, seconds in kernels.values())
    print(f"\n{title}: {1e3 * found['seconds']:.4g} ms, kernels {1e3 * total:.4g} ms")
    lines = list(kernels.items())
    rest = lines[LINES:]
    for name, (calls, seconds) in lines[:LINES]:
        print(f"{1e3 * seconds:10.3f} ms {seconds / total:6.1%} {calls:8}  {name[:90]}")
    if rest:
        seconds, calls = sum(s for _, (_, s) in rest), sum(c for _, (c, _) in rest)
        print(f"{1e3 * seconds:10.3f} ms {seconds / total:6.1%} {calls:8}  {len(rest)} others")
