"""Losses and metrics: one batch for a gradient, or a whole data set in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmol.data import Samples, tree_map
from fmol.layout import FlatModel
from fmol.objectives import Objective, WholeSet

__all__ = ["EVALUATION_BATCH", "Score", "batch_mean", "check_mask", "evaluate", "score_of"]

EVALUATION_BATCH = 1024
"""Samples in one forward pass of an evaluation."""


class Score(NamedTuple):
    """A mean and the number of samples it is over; NaN over none."""

    value: float
    samples: int


def batch_mean(value: Any, size: int, what: str) -> tuple[Tensor, int]:
    """The mean of what a loss or metric returned for `size` samples, and over how many it is.

    The mean is differentiable and is zero over no samples.
    """
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(
                f"{what} returned a tuple of {len(value)}. Return one value per sample [B], "
                "(values [B], valid [B]), or a scalar."
            )
        values, valid = (v.reshape(1) if _lonely(v, size) else v for v in value)
        _check_shape(values, size, what)
        _check_shape(valid, size, what)
        check_mask(valid, what)
        count = int(valid.sum())
        values = values if values.is_floating_point() else values.double()
        # In single precision at least: a sum of many halves overflows. And where, not a product: an
        # unlabelled sample may have any loss (its gradient must be finite, though: 0 · NaN is NaN).
        wide = torch.promote_types(values.dtype, torch.float32)
        return torch.where(valid, values, 0).sum(dtype=wide) / max(count, 1), count
    if not isinstance(value, Tensor):
        value = torch.as_tensor(_number(value, what), dtype=torch.float64)
    if value.dim() == 0:
        return value, size
    _check_shape(value, size, what)
    return (value if value.is_floating_point() else value.double()).mean(), size


def check_mask(valid: Any, what: str) -> None:
    """Raises where what should mark the samples with a label is not truth values.

    Numbers would be taken for true wherever they are not zero, NaN and small weights included.
    """
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
        seen = valid.dtype if isinstance(valid, Tensor) else type(valid).__name__
        raise ValueError(
            f"{what} returned (values, valid) with `valid` of {seen}. Return truth values [B], as "
            "`~targets.isnan()` or `mask > 0`; what weighs samples belongs into their values."
        )


def _lonely(value: Any, size: int) -> bool:
    """Whether a squeeze has taken the sample dimension from a batch of one."""
    return isinstance(value, Tensor) and value.dim() == 0 and size == 1


def _check_shape(value: Any, size: int, what: str) -> None:
    if not isinstance(value, Tensor) or value.shape != (size,):
        seen = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{what} returned {seen} for {size} samples. Return one value per sample [{size}] "
            "(`reduction='none'`; index the column, or average over further dimensions), or a scalar."
        )


def evaluate(
    model: FlatModel,
    samples: Samples,
    objectives: Iterable[Objective],
    *,
    batch_size: int,
    metrics: bool,
) -> dict[str, dict[str, Score]]:
    """Objective → `"loss"` and, if asked for, each metric → `Score` over all samples.

    In evaluation mode and without gradients, in batches. A loss that is a scalar is defined on the
    whole set, as a metric marked with `whole_set` is: those are called once, on all outputs.
    """
    functions = {
        (o.name, name): function
        for o in objectives
        for name, function in [("loss", o.loss), *(o.metrics.items() if metrics else ())]
    }
    tallies = {k: _Tally(isinstance(f, WholeSet)) for k, f in functions.items()}
    kept: list[tuple[Any, Any]] = []
    n = len(samples)
    with model.mode(training=False), torch.no_grad():
        for start in range(0, n, batch_size):
            stop = min(start + batch_size, n)
            inputs, targets = samples.span(start, stop)
            outputs = model(inputs)
            for (objective, name), function in functions.items():
                tally = tallies[objective, name]
                if not tally.whole_set:
                    what = f"the {name} of objective `{objective}`"
                    tally.add(function(outputs, targets), stop - start, what)
            if any(tally.whole_set for tally in tallies.values()):
                kept.append((outputs, targets))
        if kept:
            first = next(k for k in functions if tallies[k].whole_set)
            what = f"the {first[1]} of objective `{first[0]}`"
            outputs, targets = kept[0] if len(kept) == 1 else _join(kept, what)
            for k, function in functions.items():
                if tallies[k].whole_set:
                    what = f"the {k[1]} of objective `{k[0]}`"
                    tallies[k].ask(function, outputs, targets, n, what)
    scores: dict[str, dict[str, Score]] = {}
    means = iter(_fetch([mean for tally in tallies.values() for mean, _ in tally.parts]))
    for (objective, name), tally in tallies.items():
        scores.setdefault(objective, {})[name] = tally.score(islice(means, len(tally.parts)))
    return scores


@torch.no_grad()
def score_of(
    function: Callable[[Any, Any], Any],
    outputs: Any,
    targets: Any,
    size: int,
    batch_size: int,
    what: str,
) -> Score:
    """What `evaluate` gives for one loss or metric, of outputs that are there already."""
    tally = _Tally(isinstance(function, WholeSet))
    start = stop = 0
    while stop < size and not tally.whole_set:
        start, stop = stop, min(stop + batch_size, size)
        value = function(*tree_map(itemgetter(slice(start, stop)), (outputs, targets)))
        tally.add(value, stop - start, what)
    if tally.whole_set:
        tally.ask(function, outputs, targets, size, what)
    return tally.score(_fetch([mean for mean, _ in tally.parts]))


def _fetch(means: Sequence[Tensor]) -> list[float]:
    """The numbers, those on another device in one transfer: each waits for it."""
    away = [mean for mean in means if mean.device.type != "cpu"]
    fetched = iter(torch.stack(away).tolist() if away else [])
    return [float(mean) if mean.device.type == "cpu" else next(fetched) for mean in means]


@dataclass
class _Tally:
    whole_set: bool
    parts: list[tuple[Tensor, int]] = field(default_factory=list)
    """The mean of each batch, in double precision, and over how many samples it is."""
    first: Score | None = None
    """What was said of the first batch, where that is one number."""

    def add(self, value: Any, size: int, what: str) -> None:
        if not isinstance(value, tuple) and (not isinstance(value, Tensor) or value.dim() == 0):
            # The first batch tells of which kind a loss is. Later on a single value for a single
            # sample is that sample's (a squeeze does this); for more it is of the other kind.
            if not self.parts:
                self.whole_set, self.first = True, Score(_number(value, what), size)
                return
            if size > 1:
                raise ValueError(
                    f"{what} returned a scalar for {size} samples after one value per sample for "
                    "others. Return the same kind always."
                )
        mean, count = batch_mean(_double(value), size, what)
        self.parts.append((mean.double(), count))

    def score(self, means: Iterable[float]) -> Score:
        """The mean over all samples, from those of the batches."""
        counts = [count for _, count in self.parts]
        total = sum(mean * count for mean, count in zip(means, counts, strict=True))
        return Score(total / sum(counts) if sum(counts) else float("nan"), sum(counts))

    def ask(
        self, function: Callable[[Any, Any], Any], outputs: Any, targets: Any, size: int, what: str
    ) -> None:
        """Takes what a function says of the whole set, which the first batch may have been."""
        if self.first is not None and self.first.samples == size:
            value = self.first.value  # To read it again is to wait for the device again.
        else:
            value = _number(function(outputs, targets), what)
        self.parts = [(torch.tensor(value, dtype=torch.float64), size)]


def _join(parts: Any, what: str) -> Any:
    """The nests of several batches as one, joined along the samples."""
    first = parts[0]
    if isinstance(first, Tensor) and first.dim() > 0:
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts], what) for name in first}
    if isinstance(first, tuple | list) and not all(isinstance(v, str) for v in first):
        joined = [_join(list(column), what) for column in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, tuple | list):
        return [value for part in parts for value in part]
    if first is None:
        return None
    raise ValueError(
        f"{what} needs the whole set, and a {type(first).__name__} without a sample dimension "
        "cannot be put together from batches. Return tensors with one row per sample."
    )


def _number(value: Any, what: str) -> float:
    """What should be a single number, as one."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    if isinstance(value, float | int | np.number):
        return float(value)
    seen = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(f"{what} returned {seen}. Return a number, or one value per sample.")


def _double(value: Any) -> Any:
    """Values in float64, so that a mean does not depend on how samples were cut into batches."""
    return tree_map(lambda v: v.double() if v.is_floating_point() else v, value)
