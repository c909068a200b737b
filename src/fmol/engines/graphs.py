"""K steps of many lanes as one CUDA graph: recorded once, replayed with other numbers.

On a GPU a step of small models is hundreds of kernels of a few microseconds each, and starting them
from Python takes ten times as long as running them. A graph starts them all at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fmol.engines.lanes import LaneSteps
from fmol.engines.schedule import Stage

__all__ = ["StepGraph"]

WARM_UP = 2
"""Runs before recording: libraries choose their kernels and take their memory in the first ones."""

Body = Callable[[Tensor, Stage, Tensor, Tensor | None], LaneSteps]
"""From the lanes' starts `[L, d]`, the samples of every step, the step size, and what is added to every
step `[L, d]`, None for nothing."""


class StepGraph:
    """What `body` does, as a graph over buffers of its own."""

    def __init__(
        self, body: Body, start: Tensor, stage: Stage, lr: float, correction: Tensor | None = None
    ) -> None:
        self._body = body  # What it refers to is read by the graph, and must stay.
        self._start, self._stage = start.clone(memory_format=torch.contiguous_format), stage
        self._lr = torch.tensor(lr, dtype=start.dtype, device=start.device)
        self._correction = None if correction is None else correction.clone()
        aside = torch.cuda.Stream(start.device)
        aside.wait_stream(torch.cuda.current_stream(start.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                body(self._start, self._stage, self._lr, self._correction)
        torch.cuda.current_stream(start.device).wait_stream(aside)
        self.calls = 0
        """How often it was replayed."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._steps = body(self._start, self._stage, self._lr, self._correction)

    def __call__(
        self, start: Tensor, stage: Stage, lr: float, correction: Tensor | None = None
    ) -> LaneSteps:
        """The steps from here; their tensors hold until the next call."""
        self._start.copy_(start)
        self._stage.copy_(stage)
        self._lr.fill_(lr)
        if self._correction is not None:
            assert correction is not None
            self._correction.copy_(correction)
        self._graph.replay()
        self.calls += 1
        return self._steps
