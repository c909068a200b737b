"""The steps of many lanes on one device: as they come, compiled, or as one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fmol import rng
from fmol.anchors import anchored_layers
from fmol.data import upload
from fmol.engines.gradients import DEPENDS, LaneGradients, count_use, first_line
from fmol.engines.graphs import GraphMemory, StepGraph
from fmol.engines.lanes import Batch, LaneModel, Pull
from fmol.engines.pool import Pool
from fmol.engines.schedule import (
    BatchTables,
    Job,
    RowStage,
    Schedule,
    Stage,
    plan_steps,
    pulls_of,
    stage_bytes,
    stage_of,
    walk,
)
from fmol.engines.seam import LocalConfig
from fmol.engines.trajectories import EARLY, Additions, LaneSteps
from fmol.layout import FlatModel
from fmol.local import shares_of, step_count

__all__ = ["Compile", "LaneWorker"]

logger = logging.getLogger("fmol")

Compile = Literal["auto", "always", "never"]
"""When steps are compiled: once it pays within the run, at once, or never.

On a CPU the first is a matter of the engine `auto`, which settles it before the first step: what is
compiled differs in its last bits, and a run that goes on after a break is to be the same run.
"""

GRAPH_AT = 2
"""The use of a round's shape at which it becomes a CUDA graph."""
WRONG_ONCE = "a graph of steps gave other numbers than they do, and is recorded anew"
MOST_GRAPHS, STALE = 32, 128
"""How many are kept, and after how many rounds or blocks without it one makes room for another."""
CHECK_EVERY = 128
"""Replays after which a graph is checked again, at the latest; in the beginning it is more often."""
MOST_WRONG = 2
"""Checks that fail until graphs are given up: one may be chance, where a lane is about to overflow."""
GRAPH_SHARE = 0.1
"""Of the device's memory, how much lanes may take whose steps become a graph: it keeps a part of it,
and steps of large models are not held up by Python anyway."""
COMPILE_SECONDS = {"first": 9.0, "later": 0.2}
"""What compiling steps takes, about, beside what goes with the size of the model: the first time in a
process, and later."""
COMPILE_EACH = {"dense": 0.33, "convolutions": 0.5}
"""And for each tensor of parameters: 2 seconds for an MLP's six, 4 to 6 for LeNet's ten, 9 to 10 for
the 28 of a small transformer, 80 for the 140 of ResNet-18 with forty heads."""
COMPILE_GAIN = 0.4
"""How much of a round's time it saves, about."""


class LaneWorker:
    """Steps lanes on one device, with a model of its own."""

    has_compiled = False
    """Whether one in this process has: the compiler is loaded then."""

    def __init__(
        self,
        model: FlatModel,
        *,
        seed: int,
        compile: Compile,
        batched: Callable[[str], bool],
        note: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.model, self.device = model, model.x.device
        self.gradients = LaneGradients(LaneModel(model, say), batched, note)
        self.rounds_left = 0
        """How many rounds are to come, as far as it is known."""
        self.lane_bytes = 0
        """What a lane takes of memory, as far as it is known."""
        self.single_losses = False
        """Whether some loss is computed lane by lane."""
        self.compile: Compile = compile
        self._seed, self._note, self._say = seed, note, say
        self._memory = 0
        if self.device.type == "cuda":
            self._memory = torch.cuda.get_device_properties(self.device).total_memory
        self.batches = BatchTables(seed)
        """Which samples clients take in which step."""
        self._uses: dict[Any, int] = {}
        self._graphs: dict[Any, StepGraph | None] = {}
        self._graph_memory = GraphMemory()
        self._wrong = 0
        """How many checks of graphs have failed."""
        self._taken = 0
        self._used: dict[Any, int] = {}
        """The last of as many rounds or blocks that took each graph."""
        self._compiled: set[Any] = set()
        self._took: dict[Any, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._draws = any(
            isinstance(layer, nn.modules.dropout._DropoutNd | nn.RReLU)
            for layer in model.module.modules()
        )
        convolves = any(isinstance(layer, _ConvNd) for layer in model.module.modules())
        self._kind = "convolutions" if convolves else "dense"

    def steps(self, jobs: Sequence[Job], pool: Pool) -> tuple[Tensor, Tensor]:
        """Δ of every job `[L, d]`, and how many of its steps moved `[L]`; waits for neither."""
        first, pulls = jobs[0].ask, pulls_of([job.lane for job in jobs], jobs[0].site)
        local = first.local
        assert local is not None
        schedule = plan_steps(jobs, pool, self.batches)
        if all(job.ask.x is first.x for job in jobs):
            starts = first.x.to(self.device).expand(len(jobs), -1)
        else:
            starts = torch.stack([job.ask.x.to(self.device) for job in jobs])
        added = _additions(jobs, starts)
        rates = _step_sizes(jobs, starts)
        name = ("model", first.round, first.phase, "lanes", first.client, first.lanes[0].slot)
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        stream = rng.torch_stream(self.device, self._seed, *name)
        with device, stream, self.model.mode(training=local.training):
            delta, moved = self._take(schedule, pulls, local, rates, starts, pool, added)
        if local.accumulate == "mean":
            counts = [step_count(local, len(job.site.samples)) for job in jobs]
            delta /= torch.tensor(counts, device=self.device)[:, None]
        return delta, moved

    def draw_ahead(self) -> None:
        """Draws the batches of the next round, while the device is busy with this one's."""
        if self.device.type == "cuda":
            self.batches.draw_ahead()
        else:
            self.batches.begin()

    def _take(
        self,
        schedule: Schedule,
        pulls: Sequence[Pull],
        local: LocalConfig,
        rates: float | Tensor,
        starts: Tensor,
        pool: Pool,
        added: Additions,
    ) -> tuple[Tensor, Tensor]:
        shape = (
            tuple(starts.shape),
            tuple(schedule.rows.shape),
            schedule.lanes.tobytes(),
            None if schedule.even else tuple(schedule.widths),
            tuple((pull.objective.name, pull.lanes, pull.weights) for pull in pulls),
            replace(local, lr=0.0),
            added.correction is not None,
            pool.kind,
        )
        count_use(self._uses, shape)
        self._taken += 1

        def by_itself(source: Pool | Stage | RowStage = pool) -> LaneSteps:
            lr = rates if isinstance(rates, Tensor) else None
            steps = LaneSteps(self.gradients, pulls, local, starts, lr, added)
            walk(steps, schedule, source)
            return steps

        by_sizes = self.gradients.goes_by_sizes(pulls, schedule.even)
        one_by_one = self._draws or self.single_losses or by_sizes or self._wrong >= MOST_WRONG
        if self.device.type != "cuda" or one_by_one:
            if not one_by_one and self._wants_compiled(shape):
                self._compile_steps(shape, schedule, pulls, starts, pool)
            steps = by_itself()
            return steps.delta, steps.moved
        stage = None
        if self._wants_compiled(shape):
            stage = stage_of(schedule, pool)
            self._compile_steps(shape, schedule, pulls, starts, stage)
        if not self._wants_graph(shape, len(starts), stage_bytes(schedule, pool)):
            steps = by_itself()
            return steps.delta, steps.moved
        stage = stage or stage_of(schedule, pool)
        graph = self._graph(shape, schedule, pulls, local, starts, stage, added)
        if graph is None:
            steps = by_itself(stage)
            return steps.delta, steps.moved
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        replayed = graph(starts, stage, rates, added)
        events[1].record()
        self._took[shape] = events
        # The graph's own tensors are written to again when it is replayed.
        delta, moved = replayed.delta.clone(), replayed.moved.clone()
        if graph.calls & (graph.calls - 1) == 0 or graph.calls % CHECK_EVERY == 0:

            def begin(starts: Tensor) -> Tensor:
                lr = rates if isinstance(rates, Tensor) else None
                steps = LaneSteps(self.gradients, pulls, local, starts, lr, added)
                walk(steps, schedule, stage, EARLY)
                return steps.early

            with self.gradients.afresh():
                right = self.gradients.explains(replayed.early, begin, starts)
            if not right:
                self._give_up(shape)
                with self.gradients.afresh():
                    steps = by_itself(stage)
                return steps.delta, steps.moved
        return delta, moved

    def _give_up(self, shape: Any) -> None:
        """After a check that failed: lets go of that graph, and the second time of all that was
        recorded or compiled."""
        self._wrong += 1
        kind = "compiled" if shape in self._compiled else "not compiled"
        logger.info("a graph of steps (%s) is not what they are one by one", kind)
        torch.cuda.synchronize(self.device)  # What is let go of may still be at work.
        if self._wrong < MOST_WRONG:
            del self._graphs[shape]
            self._note(WRONG_ONCE)
            return
        self._graphs.clear()
        self.gradients.forget()
        self._note(DEPENDS)

    def close(self) -> None:
        """Lets go of what was recorded, once the device is done with all that it was told."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # Of something before, which has been raised there.
                logger.warning("the device could not be waited for: %s", first_line(error))
        self._graphs.clear()

    # ---- compiled ----------------------------------------------------------------------------

    def _wants_compiled(self, shape: Any) -> bool:
        if self.compile == "never" or shape in self._compiled:
            return False
        if self.compile == "always":
            return True
        events = self._took.get(shape)
        if events is None or not events[1].query():
            return False
        seconds = 1e-3 * events[0].elapsed_time(events[1])
        cost = COMPILE_SECONDS["later" if LaneWorker.has_compiled else "first"]
        cost += COMPILE_EACH[self._kind] * len(self.model.layout.names)
        return bool(self.rounds_left * seconds * COMPILE_GAIN > cost)

    def _compile_steps(
        self,
        shape: Any,
        schedule: Schedule,
        pulls: Sequence[Pull],
        starts: Tensor,
        source: Pool | Stage | RowStage,
    ) -> None:
        self._compiled.add(shape)
        if len(set(schedule.widths)) > 2:
            self._note("steps are not compiled: their batches have more than two sizes")
            return
        LaneWorker.has_compiled = True
        self._say("compiling")
        logger.info("compiling steps of %d lanes", len(starts))
        X = starts.clone(memory_format=torch.contiguous_format)
        for batch in _distinct(schedule, source):
            if not self.gradients.compile(X, pulls, batch):
                return
        self._graphs.pop(shape, None)  # One of compiled steps takes its place.

    # ---- as a graph --------------------------------------------------------------------------

    def _wants_graph(self, shape: Any, lanes: int, staged: int) -> bool:
        if self._uses[shape] < GRAPH_AT:
            return False
        if lanes * self.lane_bytes + staged > GRAPH_SHARE * self._memory:
            return False
        if shape not in self._graphs and not self._has_room():
            return False
        self._used[shape] = self._taken
        return True

    def _has_room(self) -> bool:
        """Whether another graph may be kept; the one that was not used for longest makes room for it,
        if that is long enough for its lanes not to come back."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._graphs, key=lambda shape: self._used[shape])
        if self._taken - self._used[oldest] <= STALE:
            return False
        torch.cuda.synchronize(self.device)  # It may still be at work.
        del self._graphs[oldest], self._used[oldest]
        return True

    def _graph(
        self,
        shape: Any,
        schedule: Schedule,
        pulls: Sequence[Pull],
        local: LocalConfig,
        starts: Tensor,
        stage: Stage | RowStage,
        added: Additions,
    ) -> StepGraph | None:
        """The steps as a CUDA graph; None where they cannot be one."""
        if shape not in self._graphs:

            def body(
                start: Tensor,
                stage: Stage | RowStage,
                lr: Tensor,
                added: Additions,
                most: int | None,
            ) -> LaneSteps:
                steps = LaneSteps(self.gradients, pulls, local, start, lr, added)
                walk(steps, schedule, stage, most)
                return steps

            try:
                self._graphs[shape] = StepGraph(body, starts, stage, added, self._graph_memory)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._graphs[shape] = None
                note = f"steps are started one by one: no CUDA graph ({first_line(error)})"
                logger.info(note)
                self._note(note)
        return self._graphs[shape]


def _additions(jobs: Sequence[Job], starts: Tensor) -> Additions:
    """What goes into the steps of each job beside their gradients."""
    local = jobs[0].ask.local
    assert local is not None
    correction, shares = None, _shares(jobs, local, starts)
    if any(job.correction is not None for job in jobs):
        none = torch.zeros_like(starts[0])
        parts = [none if job.correction is None else job.correction.to(none) for job in jobs]
        correction = torch.stack(parts)
    if not jobs[0].anchors:
        return Additions(correction, shares=shares)
    anchors = zip(*(job.anchors for job in jobs), strict=True)
    return Additions(
        correction,
        anchored_layers(jobs[0].site, local),
        tuple(torch.stack([each.to(starts) for each in own]) for own in anchors),
        shares,
    )


def _shares(jobs: Sequence[Job], local: LocalConfig, starts: Tensor) -> Tensor | None:
    """How much of each step's direction is in Δ, `[K, L, 1]`; None where it is all of each."""
    if not local.average:
        return None
    counts = [step_count(local, len(job.site.samples)) for job in jobs]
    table = np.zeros((max(counts), len(jobs)))
    for lane, count in enumerate(counts):
        table[:count, lane] = shares_of(local, count)
    return upload(table, starts.device).to(starts.dtype)[..., None]


def _step_sizes(jobs: Sequence[Job], starts: Tensor) -> float | Tensor:
    """The step size of all jobs, or those of each, `[L, 1]`, where they differ."""
    rates = [job.ask.local.lr for job in jobs if job.ask.local is not None]
    if len(set(rates)) == 1:
        return rates[0]
    return upload(np.array(rates), starts.device).to(starts.dtype)[:, None]


def _distinct(schedule: Schedule, source: Pool | Stage | RowStage) -> list[Batch]:
    """A batch of each width that occurs, as the steps see them."""
    found: dict[int, Batch] = {}

    class Look:
        def step(self, batch: Batch, active: Tensor | None, last: bool) -> None:
            found.setdefault(batch.width, batch)

    walk(Look(), schedule, source)
    return list(found.values())
