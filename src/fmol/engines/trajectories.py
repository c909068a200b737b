"""The steps of many lanes, one after the other: what `fmol.local.descend` does for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fmol.anchors import pull_back
from fmol.dense import Dense
from fmol.engines.gradients import LaneGradients
from fmol.engines.lanes import Batch, Pull
from fmol.engines.seam import LocalConfig

__all__ = ["EARLY", "Additions", "LaneSteps"]

EARLY = 4
"""The steps of a round by which a graph of it is checked: later ones do the same, and what rounding
does to the first of them has grown beyond comparing after hundreds."""


@dataclass(frozen=True)
class Additions:
    """What goes into the steps of lanes beside their gradients and what all lanes are told alike."""

    correction: Tensor | None = None
    """`[L, d]`; None where drift is not corrected."""
    layers: tuple[Dense, ...] = ()
    anchors: tuple[Tensor, ...] = ()
    """What the change of each of these layers is multiplied by, `[L, width, width]`."""
    shares: Tensor | None = None
    """How much of each step's direction is in Δ, `[K, L, 1]`; None where it is all of each."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            *(each for each in (self.correction, self.shares) if each is not None),
            *self.anchors,
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Additions:
        """The same with every tensor changed."""
        return replace(
            self,
            correction=None if self.correction is None else change(self.correction),
            anchors=tuple(change(each) for each in self.anchors),
            shares=None if self.shares is None else change(self.shares),
        )


@dataclass
class LaneSteps:
    """The trajectories of `L` lanes from `start` `[L, d]`: what `fmol.local.descend` does for one."""

    gradients: LaneGradients
    pulls: Sequence[Pull]
    local: LocalConfig
    start: Tensor
    lr: Tensor | None = None
    """The step size as a tensor, one or `[L, 1]`, where it must be one; None is that of `local`."""
    added: Additions = field(default_factory=Additions)

    def __post_init__(self) -> None:
        self._softer = self.gradients.softening(self.local, self.start)
        self.X = self.start.clone() if self._softer is None else self.start * self._softer
        self.delta = torch.zeros_like(self.X)
        self.moved = torch.zeros(len(self.X), dtype=torch.int64, device=self.X.device)
        self.velocity = torch.zeros_like(self.X) if self.local.momentum else None
        self.moving = self.gradients.moving(self.local.trained, self.X)
        self.early = self.delta
        """Δ after the first steps, `EARLY` of them where there are as many."""
        self._taken = self._everyone = 0
        if self.lr is None and self.X.is_cuda and self.X.dtype == torch.float32:
            self.lr = self.X.new_full((1,), self.local.lr)  # As the kernel for it wants it.

    def step(self, batch: Batch, active: Tensor | None, last: bool) -> None:
        """One step of the lanes that are `active` `[L]`, None for all; the `last` moves Δ alone."""
        local = self.local
        direction, moves = self.gradients(self.X, self.pulls, batch)
        if active is not None:
            moves = active if moves is None else moves & active
        if self._softer is not None:
            direction = direction * local.temperature
        if self.moving is not None:
            direction = direction * self.moving
        if local.clip_norm is not None:
            norm = torch.linalg.vector_norm(direction, dim=1)
            direction *= (local.clip_norm / norm.clamp(min=local.clip_norm))[:, None]
        if local.weight_decay:
            direction.add_(self.X, alpha=local.weight_decay)
        if local.proximal:
            direction.add_(self.X - self.start, alpha=local.proximal)
        if self.added.layers:
            pull_back(direction, self.X - self.start, self.added.layers, self.added.anchors)
        if self.velocity is not None:
            moving = self.velocity * local.momentum + direction
            if moves is not None:
                moving = torch.where(moves[:, None], moving, self.velocity)
            self.velocity = direction = moving
        if self.added.correction is not None:
            direction = direction + self.added.correction
        if self.moving is not None:
            direction = direction * self.moving
        if moves is not None:
            direction = torch.where(moves[:, None], direction, 0)
        self._advance(direction, last)
        if moves is None:
            self._everyone += 1
        else:
            self.moved += moves
        if last and self._everyone:
            self.moved += self._everyone
        self._taken += 1
        if self._taken == EARLY:
            self.early = self.delta.clone()

    def _advance(self, direction: Tensor, last: bool) -> None:
        """Adds the direction to Δ, or its share, and, but for the `last`, takes the step along it."""
        shares = self.added.shares
        if shares is None and not last and self.lr is not None and self.X.is_cuda:
            from fmol.kernels.advance import advance

            if advance(self.X, self.delta, direction, self.lr):
                return
        if shares is None:
            self.delta += direction
        else:
            self.delta.addcmul_(direction, shares[self._taken])
        if last:
            return
        if self.lr is None:
            self.X.add_(direction, alpha=-self.local.lr)
        else:
            self.X.addcmul_(direction, self.lr, value=-1)
