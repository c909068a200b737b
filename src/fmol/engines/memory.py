"""How much memory there is for lanes in flight, and how much one of them takes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fmol import rng
from fmol.data import tree_leaves, tree_map
from fmol.engines.gradients import LaneGradients
from fmol.engines.lanes import Batch
from fmol.engines.pool import make_pool
from fmol.engines.schedule import pulls_of
from fmol.engines.seam import Ask, LocalConfig, Site
from fmol.engines.trajectories import LaneSteps

__all__ = ["LargestTensor", "free_memory", "lane_bytes"]


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


def lane_bytes(ask: Ask, site: Site, gradients: LaneGradients, width: int) -> tuple[int, int]:
    """What a lane with batches of `width` takes, from what one of them keeps for its gradient; and on a
    CPU the largest part of it, else none."""
    pool = make_pool([ask.client], [site.samples])
    assert pool is not None
    kept = [0]

    def count(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() * tensor.element_size()
        return tensor

    # Copies: a model may write to what it is given.
    inputs, targets = tree_map(lambda leaf: leaf.clone()[None], pool.span(0, width))
    one = Batch(inputs, targets, (width,))
    local = ask.local or LocalConfig(lr=0.0)
    steps = LaneSteps(gradients, pulls_of(ask.lanes[:1], site), local, ask.x[None])
    with (
        rng.torch_stream(site.model.x.device, site.seed, "model", "probe"),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        LargestTensor() if site.model.x.is_cpu else contextlib.nullcontext() as largest,
    ):
        steps.gradients(steps.X, steps.pulls, one)
    row = ask.x.numel() * ask.x.element_size()
    batch = sum(t.numel() * t.element_size() for t in tree_leaves((inputs, targets)))
    # Parameters, Δ, gradient, direction and what is on the way between them.
    return 2 * kept[0] + 2 * batch + 6 * row, 0 if largest is None else largest.bytes


class LargestTensor(TorchDispatchMode):
    """Within it the largest tensor that is made is looked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        made = [storage for storage in _storages(out) if storage.data_ptr() not in given]
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in made)])
        return out


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    leaves, _ = tree_flatten(nest)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
