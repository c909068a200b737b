"""How much memory there is for lanes in flight."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

__all__ = ["free_memory"]


def free_memory(device: torch.device) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(free + held)
    return _available_memory()


def _available_memory() -> float:
    """What is free on this machine, and within the limits that a container sets it."""
    found = [4.0 * 2**30]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        found = [1024.0 * int(line.split()[1])]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # No limit is written as `max`.
            most, now = (int(Path(file).read_text(encoding="ascii")) for file in (limit, used))
            found.append(float(max(most - now, 0)))
    return min(found)
