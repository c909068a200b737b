"""The faster engine for the model and device at hand, found by measuring the first steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fmol import rng
from fmol.engines.gradients import first_line
from fmol.engines.seam import Ask, Fold, Receipt, Transform, Work
from fmol.engines.sequential import SequentialEngine, say_where
from fmol.engines.vectorized import VectorizedEngine
from fmol.engines.worker import Compile, LaneWorker
from fmol.federation import Federation
from fmol.kernels.cpu_conv import missing_libraries
from fmol.local import descend, local_work, pure_forward, step_count

__all__ = ["AutoEngine", "Choice"]

logger = logging.getLogger("fmol")

Choice = Literal["sequential", "vectorized", "compiled"]
"""One lane after the other; side by side; side by side with steps that are compiled at once."""
REPEATS = 2
COMPILE_SECONDS = {"first": 12.0, "later": 0.0}
"""What compiling steps for a CPU takes, about, beside what goes with the size of the model: the first
time in a process, while the compiler is loaded, and later."""
COMPILE_EACH = 1.0
"""And for each tensor of parameters: 6 seconds for an MLP's six, 22 for a small transformer, 30 for
LeNet's ten and 90 for the seventy of a ResNet."""
COMPILE_SHARE = {"dense": 0.2, "norms": 0.1, "convolutions": 0.02}
"""Of what is to come, how much compiling may take. What it wins is known only afterwards: a quarter to
a half with dense layers and attention; as much with convolutions and norms between them; little or
nothing with convolutions alone, which are a library's."""
COMPILE_WINS = {"dense": 1.0, "norms": 1.0, "convolutions": 0.9}
"""Of the time of other steps, how much compiled ones may take at most. Where they win next to nothing,
two timings of a few steps may say either, and the rounds to come were slower by a tenth."""
BUILD_SECONDS = 0.6
"""What compiling a kernel for a CPU takes, about; once on a machine, since it is kept on disk."""
BUILD_GAIN = 0.5
"""How much of the time of a model's steps such kernels save, about: they are for models whose steps are
mostly theirs."""
MOST_PARAMETERS = 2**22
"""Of models whose lanes may be side by side on a CPU. With more, a step is passes over memory, which
take far longer than Python does."""


class AutoEngine(VectorizedEngine):
    """Lanes side by side where that is faster, one after the other where it is not.

    On a CUDA device side by side, always. Elsewhere a few steps of the first round are timed both
    ways before it begins, in a long run compiled ones too; what was chosen, and why, is in the notes of
    that round. Which it is changes results in their last bits: `choice` settles it beforehand, and
    `decided` is told.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        choice: Choice | None = None,
        decided: Callable[[Choice], None] = lambda choice: None,
        **options: Any,
    ) -> None:
        super().__init__(federation, seed=seed, device=device, **options)
        self.choice = choice
        self._decided = decided
        if choice is None and self.device.type == "cuda":
            self._settle("vectorized")
        if choice == "compiled":
            self._compile("always")

    def _settle(self, choice: Choice) -> None:
        self.choice = choice
        self._decided(choice)

    def _compile(self, when: Compile) -> None:
        for worker in self._workers:
            worker.compile = when

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        note = None
        if self.choice is None and any(ask.lanes for ask in asks):
            started = perf_counter()
            note = self._choose(sorted(asks, key=lambda ask: ask.client), work)
            logger.info("%s; finding out took %.2f s", note, perf_counter() - started)
        if self.choice == "sequential":
            result, receipt = SequentialEngine.map(
                self, asks, fold, work=work, transforms=transforms
            )
        else:
            result, receipt = super().map(asks, fold, work=work, transforms=transforms)
        return result, receipt if note is None else replace(receipt, notes=(note, *receipt.notes))

    def _choose(self, asks: Sequence[Ask], work: Work | None) -> str:
        """Settles which engine it is; gives the reason in words."""
        usual = work is None or work is local_work
        if usual and self._too_short_for_kernels(asks):
            self._settle("sequential")
            return "engine sequential: the run is too short for kernels to be compiled first"
        reason = self._why_not(asks, work)
        if reason is not None:
            self._settle("sequential")
            return f"engine sequential: {reason}"
        size = self.federation.layout.size
        if size > MOST_PARAMETERS:
            self._settle("sequential")
            return f"engine sequential: steps of {size} parameters are bound by memory"
        try:
            apart, together, lanes = self._time(asks)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - what truly fails fails one after the other too.
            self._settle("sequential")
            return f"engine sequential: steps side by side failed ({first_line(error)})"
        told = (
            f"a lane's step takes {1e3 * apart:.2f} ms by itself and {1e3 * together:.2f} ms beside "
            f"{lanes - 1} others"
        )
        best: Choice = "vectorized" if together < apart else "sequential"
        if self._may_compile(asks, min(apart, together)):
            compiled, why_not = self._time_compiled(asks)
            told += f"; {why_not}" if why_not else f", compiled {1e3 * compiled:.2f} ms"
            wins = COMPILE_WINS[_kind_of(self.federation.model)]
            if compiled < wins * min(apart, together):
                best = "compiled"
            else:
                self._compile("never")
                self._gradients.forget()
        self._settle(best)
        return f"engine {best}: {told}"

    def _too_short_for_kernels(self, asks: Sequence[Ask]) -> bool:
        """Whether compiling the kernels that steps are to be tried with takes longer than they save."""
        if self.device.type != "cpu" or self.precision == "bf16":  # Which has none of them.
            return False
        missing = len(missing_libraries(self.federation.model))
        if not missing:
            return False
        saved = BUILD_GAIN * self._seconds_left(asks, self._time_apart(asks))
        return saved < BUILD_SECONDS * missing

    def _may_compile(self, asks: Sequence[Ask], step: float) -> bool:
        """Whether a run is so long that trying it costs next to nothing; a lane's `step` in seconds."""
        if self._workers[0].compile != "auto" or self.device.type != "cpu":
            return False
        cost = COMPILE_SECONDS["later" if LaneWorker.has_compiled else "first"]
        cost += COMPILE_EACH * len(self.federation.layout.names)
        share = COMPILE_SHARE[_kind_of(self.federation.model)]
        return self._seconds_left(asks, step) * share > cost

    def _seconds_left(self, asks: Sequence[Ask], step: float) -> float:
        """What all rounds to come take, about, where a lane's step takes so long."""
        first = next(ask for ask in asks if ask.lanes)
        assert first.local is not None
        # As many for all as for the first: others' data may have to be made before they are known.
        each = step_count(first.local, len(self._site(first.client).samples))
        steps = each * sum(len(ask.lanes) for ask in asks)
        return self._workers[0].rounds_left * steps * step

    def _time_compiled(self, asks: Sequence[Ask]) -> tuple[float, str]:
        """Seconds for one step of one lane beside others, compiled, and why it cannot be, if so."""
        self._compile("always")
        self._notes = []
        _, together, _ = self._time(asks)
        why_not = next((note for note in self._notes if "not compiled" in note), "")
        return math.inf if why_not else together, why_not

    def _time(self, asks: Sequence[Ask]) -> tuple[float, float, int]:
        """Seconds for one step of one lane: by itself, side by side, and beside how many."""
        first = next(ask for ask in asks if ask.lanes)
        assert first.local is not None
        local = replace(first.local, steps=2, epochs=None)
        chunk = next(self._chunks(asks))
        sites = {ask.client: self._site(ask.client) for ask in chunk}
        jobs = self._jobs(chunk, sites, local)[: self._most]
        pool = self._pool_for(sites)
        if pool is None:
            return 0.0, math.inf, len(jobs)  # Such clients are computed one by one anyway.

        def together() -> None:
            self._steps(jobs, pool)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        apart = self._time_apart(asks)
        with rng.torch_stream(self.device, self.seed, "model", "probe"):
            return apart, _best(together) / 2 / len(jobs), len(jobs)

    def _time_apart(self, asks: Sequence[Ask]) -> float:
        """Seconds for one step of one lane by itself."""
        first = next(ask for ask in asks if ask.lanes)
        assert first.local is not None
        ask = replace(first, local=replace(first.local, steps=2, epochs=None))
        try:
            site = self._site(ask.client)
            with (
                pure_forward(site),
                rng.torch_stream(self.device, self.seed, "model", "probe"),
            ):
                return _best(lambda: descend(ask, ask.lanes[0], site)) / 2
        except Exception as error:  # It may be the first to look at data and model.
            say_where(error, ask)
            raise


def _kind_of(model: nn.Module) -> str:
    """What most of its steps are.

    >>> _kind_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)))
    'norms'
    """
    layers = list(model.modules())
    if not any(isinstance(layer, _ConvNd) for layer in layers):
        return "dense"
    norms = any(isinstance(layer, nn.GroupNorm | nn.LayerNorm) for layer in layers)
    return "norms" if norms else "convolutions"


def _best(function: Callable[[], object]) -> float:
    """The shortest of some calls, after one that does not count."""
    function()
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        function()
        times.append(perf_counter() - started)
    return min(times)
