"""K steps of many lanes as one CUDA graph: recorded once, replayed with other numbers.

On a GPU a step of small models is hundreds of kernels of a few microseconds each, and starting them
from Python takes ten times as long as running them. A graph starts them all at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fmol.engines.schedule import RowStage, Stage, copy_stage
from fmol.engines.trajectories import Additions, LaneSteps

__all__ = ["GraphMemory", "StepGraph"]

WARM_UP = 2
"""Runs before recording: libraries choose their kernels and take their memory in the first ones."""

WARM_STEPS = 4
"""Of each of these runs: later steps do what the first ones do."""

Body = Callable[[Tensor, Stage | RowStage, Tensor, Additions, int | None], LaneSteps]
"""From the lanes' starts `[L, d]`, the samples of every step, the step sizes `[L, 1]`, what is added to
every step, and how many steps are taken, None for all."""


ALIGNED = 512
"""Bytes at whose multiples tensors begin, as torch's own do."""


class GraphMemory:
    """What graphs of one device share that are never replayed at the same time: what their steps take
    while they are taken, and the place where they find their samples."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._pool: Any = None
        self._graphs: WeakSet[StepGraph] = WeakSet()
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def lay_out(self, stage: Stage | RowStage) -> Stage | RowStage:
        """The stage in the common place; a larger one is taken where it does not fit, and graphs that
        know the last one keep it."""
        total = sum(_whole(leaf.nbytes) for leaf in stage.tensors)
        if self._room is None or self._room.numel() < total:
            self._room = torch.empty(total, dtype=torch.uint8, device=stage.tensors[0].device)
        room, taken = self._room, 0

        def place(leaf: Tensor) -> Tensor:
            nonlocal taken
            part = room[taken : taken + leaf.nbytes]
            taken += _whole(leaf.nbytes)
            return part.view(leaf.dtype).view(leaf.shape).copy_(leaf)

        return stage.placed(place)

    @contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Within it work is done beside the current stream, after what that has to do."""
        stream, current = self._both(device)[0], torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    @contextmanager
    def recording(
        self, graph: torch.cuda.CUDAGraph, owner: StepGraph, device: torch.device
    ) -> Iterator[None]:
        """Within it what is done becomes part of the graph."""
        # Torch does not take a pool again whose last graph is gone, or whose recording failed. Where it
        # failed, torch also leaves the thread on the stream that it recorded: so that is entered here.
        if self._pool is None or not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        stream, pool = self._both(device)[1], self._pool
        self._pool = None
        with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
        self._pool = pool
        self._graphs.add(owner)

    def _both(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        # Each its own: libraries keep work space by stream, and that of a recording lies in its pool.
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams


def _whole(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Within it no garbage is collected: a graph of before that is let go of spoils the recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraph:
    """What `body` does, as a graph over buffers of its own."""

    def __init__(
        self,
        body: Body,
        start: Tensor,
        stage: Stage | RowStage,
        added: Additions,
        memory: GraphMemory,
    ) -> None:
        self._body = body  # What it refers to is read by the graph, and must stay.
        self._start = start.clone(memory_format=torch.contiguous_format)
        self._stage = memory.lay_out(stage)
        self._lr = start.new_zeros(len(start), 1)
        self._added = added.mapped(torch.clone)
        with memory.aside(start.device):
            for _ in range(WARM_UP):
                body(self._start, self._stage, self._lr, self._added, WARM_STEPS)
        self.calls = 0
        """How often it was replayed."""
        self._graph = torch.cuda.CUDAGraph()
        with _no_garbage(), memory.recording(self._graph, self, start.device):
            self._steps = body(self._start, self._stage, self._lr, self._added, None)

    def __call__(
        self,
        start: Tensor,
        stage: Stage | RowStage,
        lr: float | Tensor,
        added: Additions,
    ) -> LaneSteps:
        """The steps from here, of one size or of sizes `[L, 1]`; their tensors hold until the next
        call of this graph or of another that shares its memory."""
        self._start.copy_(start)
        copy_stage(self._stage, stage)
        if isinstance(lr, Tensor):
            self._lr.copy_(lr)
        else:
            self._lr.fill_(lr)
        for kept, given in zip(self._added.tensors, added.tensors, strict=True):
            kept.copy_(given)
        self._graph.replay()
        self.calls += 1
        return self._steps
