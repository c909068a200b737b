"""The faster engine for the model and device at hand, found by measuring the first steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal

import torch

from fmol import rng
from fmol.engines.seam import Ask, Fold, Receipt, Transform, Work
from fmol.engines.sequential import SequentialEngine
from fmol.engines.vectorized import VectorizedEngine
from fmol.federation import Federation
from fmol.local import descend

__all__ = ["AutoEngine", "Choice"]

logger = logging.getLogger("fmol")

Choice = Literal["sequential", "vectorized"]
REPEATS = 2
MOST_PARAMETERS = 2**22
"""Of models whose lanes may be side by side on a CPU. With more, a step is passes over memory, which
take far longer than Python does."""


class AutoEngine(VectorizedEngine):
    """Lanes side by side where that is faster, one after the other where it is not.

    On a CUDA device side by side, always. Elsewhere a few steps of the first round are timed both
    ways before it begins; what was chosen, and why, is in the notes of that round. Which of the two
    it is changes results in their last bits: `choice` settles it beforehand, and `decided` is told.
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

    def _settle(self, choice: Choice) -> None:
        self.choice = choice
        self._decided(choice)

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
        reason = self._why_not(asks, work)
        if reason is not None:
            self._settle("sequential")
            return f"engine sequential: {reason}"
        size = self.federation.layout.size
        if size > MOST_PARAMETERS:
            self._settle("sequential")
            return f"engine sequential: steps of {size} parameters are bound by memory"
        apart, together, lanes = self._time(asks)
        self._settle("vectorized" if together < apart else "sequential")
        return (
            f"engine {self.choice}: a lane's step takes {1e3 * apart:.2f} ms by itself and "
            f"{1e3 * together:.2f} ms beside {lanes - 1} others"
        )

    def _time(self, asks: Sequence[Ask]) -> tuple[float, float, int]:
        """Seconds for one step of one lane: by itself, side by side, and beside how many."""
        first = next(ask for ask in asks if ask.lanes)
        assert first.local is not None
        local = replace(first.local, steps=2, epochs=None)
        site = self._site(first.client)
        chunk = next(self._chunks(asks))
        sites = {ask.client: self._site(ask.client) for ask in chunk}
        jobs = self._jobs(chunk, sites, local)[: self._most]
        pool = self._pool_for(sites)
        if pool is None:
            return 0.0, float("inf"), len(jobs)  # Such clients are computed one by one anyway.

        def apart() -> None:
            descend(replace(first, local=local), first.lanes[0], site)

        def together() -> None:
            self._steps(jobs, pool)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        with rng.torch_stream(self.device, self.seed, "model", "probe"):
            return _best(apart) / 2, _best(together) / 2 / len(jobs), len(jobs)


def _best(function: Callable[[], object]) -> float:
    """The shortest of some calls, after one that does not count."""
    function()
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        function()
        times.append(perf_counter() - started)
    return min(times)
