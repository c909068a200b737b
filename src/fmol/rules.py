"""Rules: a Gramian of the objectives' updates in, the objectives' weights out.

A rule is any callable `rule(gramian, context) -> weights`. It sees the S×S Gramian and never the
vectors, so a new one is a function of a few lines, passed to an algorithm as `rule=`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from fmol.errors import LossError
from fmol.minnorm import min_norm

__all__ = ["Context", "Fixed", "MinNorm", "Normalize", "Rule", "needs_losses", "scales"]

Normalize = Literal["none", "l2", "loss", "loss+"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rule may know beside the Gramian. Vectors are `[S]`, in the Gramian's order."""

    names: tuple[str, ...]
    round: int = 0
    losses: Tensor | None = None
    """f_s(x_t) over the cohort, float64; None unless the rule sets `needs_losses`."""
    protected: Tensor | None = None
    """True for objectives at or below their target: not to pull, not to be hurt."""
    memory: MutableMapping[str, Tensor] = field(default_factory=dict)
    """The rule's own, kept from round to round and in checkpoints; write to it freely."""


class Rule(Protocol):
    """Gramian `[S, S]` float64 in, weights `[S]` float64 out.

    A rule with an attribute `needs_losses = True` finds the losses in its context.
    """

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor: ...


def needs_losses(rule: Rule) -> bool:
    """Whether the rule asks for the losses at `x_t`."""
    return bool(getattr(rule, "needs_losses", False))


@dataclass(frozen=True)
class MinNorm:
    """The paper's rule: the weights of the shortest vector in the convex hull of the updates.

    Common descent: yes, for every objective, by at least ‖d‖². At a solved objective: the shortest
    vector is (nearly) that one, and the others stall; see `normalize` and `Objective(target=…)`.
    """

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        return min_norm(gramian, protected=context.protected).weights


@dataclass(frozen=True)
class Fixed:
    """The same weights in every round, renormalised over the objectives that are present.

    Common descent: no. At a solved objective: it steps aside by itself.
    """

    weights: Mapping[str, float]

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        missing = [name for name in context.names if name not in self.weights]
        if missing:
            raise ValueError(
                f"`Fixed` has no weight for objective `{missing[0]}`. Give one to every objective."
            )
        weights = torch.tensor([self.weights[n] for n in context.names], dtype=torch.float64)
        if not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
            raise ValueError(
                f"`Fixed` needs weights that are not negative and not all zero, got {self.weights}."
            )
        return weights / weights.sum()


def scales(
    normalize: Normalize, norms: Tensor, losses: Tensor | None, names: Sequence[str], round: int = 0
) -> Tensor:
    """`c_s > 0` `[S]` by which each update is divided before the rule: `u_s = Δ_s/c_s`.

    Floored far below the largest, so that a solved objective's vector grows and steps aside without
    leaving the range of numbers.
    """
    if normalize == "none":
        return torch.ones_like(norms)
    if normalize == "l2":
        values = norms
    else:
        for name, loss in zip(names, [] if losses is None else losses.tolist(), strict=True):
            if not loss >= 0:
                raise LossError(
                    f"round {round}: objective `{name}` has a training loss of {loss:g}, and "
                    f'`normalize="{normalize}"` needs losses that are known and not negative. Add a '
                    'constant to that loss or use `normalize="l2"`.'
                )
        assert losses is not None
        values = losses if normalize == "loss" else losses * norms
    top = float(values.max())
    return values.clamp(min=1e-8 * top) if top > 0 else torch.ones_like(norms)
