"""Weights that follow a rule slowly: smoothed over the rounds (CR-MOGM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmol.minnorm import min_norm
from fmol.options import Range, check_options
from fmol.rules.hull import MinNorm
from fmol.rules.seam import Context, Gramian, Protected, Rule, needs_losses, protect

__all__ = ["Smoothed", "smoothed"]

WEIGHT, TOTAL, INNER = "weight.", "total", "of."
"""Names in the memory: of an objective's last weight, of their last sum, of what the rule keeps."""


def smoothed(
    gramian: Gramian,
    previous: Tensor | ArrayLike,
    keep: float = 0.9,
    of: Callable[[Tensor], Tensor] | None = None,
    protected: Protected = None,
) -> Tensor:
    """`keep·previous + (1 − keep)·λ̂`, `[S]`, with the weights λ̂ that `of` gives; min-norm unless given.

    >>> smoothed([[1.0, 0.0], [0.0, 4.0]], previous=[0.5, 0.5], keep=0.5)
    tensor([0.6500, 0.3500], dtype=torch.float64)
    """
    if not 0 <= keep <= 1:
        raise ValueError(f"`keep` must be from 0 to 1, got {keep}. 0 forgets, 1 never learns.")
    before = torch.as_tensor(previous).detach().cpu().double()
    if before.shape != (len(torch.as_tensor(gramian)),) or not bool(torch.isfinite(before).all()):
        raise ValueError(
            f"`previous` must have a finite weight per row of the Gramian, got {before.tolist()}. "
            "Give the weights of the round before."
        )

    def weigh(own: Tensor, rows: Tensor) -> Tensor:
        new = min_norm(own).weights if of is None else of(own)
        return keep * before[rows] + (1 - keep) * new

    return protect(gramian, protected, weigh)


@dataclass(frozen=True)
class Smoothed:
    """Another rule's weights, smoothed over the rounds: `keep·λ_{t−1} + (1 − keep)·λ̂_t` (CR-MOGM).

    With noisy updates the weights of a single round are noisy too, and biased by the noise they were
    found from; the mean over rounds is less so. Common descent: no, even if the rule's own weights have
    it. At a solved objective: what the rule does, some rounds later. It starts with the first round's
    weights. An objective that is missing keeps its last weight for when it is back; the remembered
    weights of those present are rescaled to the last round's sum.

    >>> rule, context = Smoothed(keep=0.5), Context(names=("a", "b"))
    >>> rule(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), context)
    tensor([0.5000, 0.5000], dtype=torch.float64)
    >>> rule(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), context)
    tensor([0.6500, 0.3500], dtype=torch.float64)
    """

    rule: Rule = field(default_factory=MinNorm)
    """Whose weights are smoothed."""
    keep: Annotated[float, Range(least=0, below=1)] = 0.9
    """The share of the old weights in the new ones; 0 is the rule itself."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def needs_losses(self) -> bool:
        """Whether the smoothed rule asks for losses."""
        return needs_losses(self.rule)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        def weigh(own: Tensor, rows: Tensor) -> Tensor:
            return self._smooth(own, rows, context)

        # The rule sees the active objectives alone: multipliers of protected ones must not lag behind.
        return protect(gramian, context.protected, weigh)

    def _smooth(self, own: Tensor, rows: Tensor, context: Context) -> Tensor:
        memory = context.memory
        names = tuple(context.names[row] for row in rows.tolist())
        kept = {k.removeprefix(INNER): v for k, v in memory.items() if k.startswith(INNER)}
        losses = None if context.losses is None else context.losses[rows]
        inside = Context(names=names, round=context.round, losses=losses, memory=kept)
        new = torch.as_tensor(self.rule(own, inside)).detach().cpu().double()
        before = torch.stack(
            [memory.get(f"{WEIGHT}{name}", new[i]).cpu() for i, name in enumerate(names)]
        )
        total = float(memory.get(TOTAL, before.sum()))
        known = float(before.sum())
        before = before * (total / known) if known > 0 else new
        weights = self.keep * before + (1 - self.keep) * new
        memory.update({f"{INNER}{k}": v for k, v in kept.items()})
        memory.update(
            {f"{WEIGHT}{name}": w.clone() for name, w in zip(names, weights, strict=True)}
        )
        memory[TOTAL] = weights.sum()
        return weights
