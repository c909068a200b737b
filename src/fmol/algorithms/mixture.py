"""Fixed weights on objectives: one lane that descends several of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fmol.aggregate import Weighting
from fmol.engines.seam import Lane
from fmol.federation import Client, Federation
from fmol.options import Count
from fmol.rounds import State
from fmol.schedules import Schedule, at

__all__ = ["MIXTURE", "MixtureOptions", "mixture_lanes", "objective_weights"]

MIXTURE = "mixture"
"""The slot of a lane that descends several objectives."""


@dataclass(frozen=True)
class MixtureOptions:
    """Options of algorithms that descend a fixed weighting of the objectives."""

    weights: Mapping[str, float] | None = None
    """Objective → w_s; equal weights if left out."""
    batch_size: Count | None = 64
    """Samples per local step; None is all of the client's data."""
    server_lr: Schedule | None = None
    """Factor on a round's accumulated gradients; None is the round's `local_lr`: plain descent."""
    weighting: Weighting = "uniform"
    """Whether clients count alike or by their number of labelled samples."""

    def init(self, federation: Federation, x: Tensor) -> State:
        objective_weights(self.weights, federation)  # Raises where they do not fit.
        return State(x)

    def step_size(self, round: int, local_lr: float) -> float:
        """What a round's accumulated gradients are multiplied by."""
        return local_lr if self.server_lr is None else at(self.server_lr, round, "server_lr")


def objective_weights(
    weights: Mapping[str, float] | None, federation: Federation
) -> dict[str, float]:
    """`w_s` for every objective, checked; equal and summing to one for None."""
    names = federation.names
    if weights is None:
        return dict.fromkeys(names, 1.0 / len(names))
    unknown = sorted(set(weights) - set(names))
    absent = [name for name in names if name not in weights]
    if unknown or absent:
        raise ValueError(
            f"`weights` must name every objective once: {list(names)}, got {list(weights)}. "
            f"{f'Take out `{unknown[0]}`.' if unknown else f'Add `{absent[0]}`.'}"
        )
    if any(not 0 <= w < float("inf") for w in weights.values()) or not any(weights.values()):
        raise ValueError(
            f"`weights` must be finite, not negative and not all zero, got {dict(weights)}."
        )
    return {name: float(weights[name]) for name in names}


def mixture_lanes(client: Client, weights: Mapping[str, float], *, sum_to_one: bool) -> list[Lane]:
    """The client's one lane, or none where all it holds has weight zero."""
    own = {name: weights[name] for name in client.objectives if weights[name] > 0}
    if sum_to_one:
        total = sum(own.values())
        own = {name: weight / total for name, weight in own.items()}
    return [Lane(MIXTURE, own)] if own else []
