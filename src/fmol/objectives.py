"""What is to be learned: a name, a loss, metrics, optionally a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["Loss", "Objective", "WholeSet", "whole_set"]

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]
"""`loss(outputs, targets)`, with `outputs` whatever the module returns and `B` samples:

- one value per sample `[B]`, or
- `(values [B], valid [B])` where some samples carry no label for this objective: `valid` are truth
  values (`torch.bool`), or
- a scalar, for what is defined on a set of samples only.
"""


@dataclass(frozen=True)
class WholeSet:
    """A metric that needs all samples at once; made by `whole_set`."""

    function: Callable[[Any, Any], Tensor | float]

    def __call__(self, outputs: Any, targets: Any) -> Tensor | float:
        return self.function(outputs, targets)


def whole_set(function: Callable[[Any, Any], Tensor | float]) -> WholeSet:
    """The same metric, marked as one that is called once with the whole set, as AUC must be.

    An unmarked metric with one value per sample is called batch by batch and averaged over samples.

    >>> largest = whole_set(lambda outputs, targets: (outputs - targets).abs().max())
    >>> Objective("price", lambda out, y: (out - y) ** 2, metrics={"worst": largest}).name
    'price'
    """
    return WholeSet(function)


@dataclass(frozen=True)
class Objective:
    """One thing to learn.

    `loss` is described at `Loss`; a metric has the same signature and is averaged in the same way,
    unless it is marked with `whole_set`. Once the training loss is at or below `target` the
    objective is *protected*: it no longer pulls, and no step may hurt it (to first order).

    >>> import torch
    >>> Objective("price", lambda out, y: (out[:, 0] - y[:, 0]) ** 2, target=0.01).name
    'price'
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Loss | WholeSet] = field(default_factory=dict)
    target: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"an objective's `name` must be a non-empty string, got {self.name!r}. Name it."
            )
        if not callable(self.loss):
            raise ValueError(
                f"the `loss` of objective `{self.name}` must be callable as loss(outputs, targets), "
                f"got {self.loss!r}. Pass a function."
            )
        for name, metric in self.metrics.items():
            if not callable(metric):
                raise ValueError(
                    f"metric `{name}` of objective `{self.name}` must be callable as "
                    f"metric(outputs, targets), got {metric!r}. Pass a function."
                )
        if "loss" in self.metrics:
            raise ValueError(
                f"objective `{self.name}` has a metric called `loss`, the name under which its own "
                "loss is reported. Give the metric another name."
            )
        if self.target is not None and not (
            isinstance(self.target, float | int | np.number) and math.isfinite(self.target)
        ):
            raise ValueError(
                f"the `target` of objective `{self.name}` must be a finite number, "
                f"got {self.target!r}. Leave it out for no target."
            )
        object.__setattr__(self, "metrics", dict(self.metrics))
