"""Fixed weights on objectives: one lane that descends several of them at once."""

from __future__ import annotations

from collections.abc import Mapping

from fmol.engines.seam import Lane
from fmol.federation import Client, Federation

__all__ = ["MIXTURE", "mixture_lanes", "objective_weights"]

MIXTURE = "mixture"
"""The slot of a lane that descends several objectives."""


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
