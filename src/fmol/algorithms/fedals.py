"""FedALS: FedLS whose clients stay near the model in what it does; few rounds of many local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from fmol.algorithms.curvature import merge_curved
from fmol.algorithms.fedls import FedLS
from fmol.algorithms.merging import Merging
from fmol.dense import Dense, dense_layers
from fmol.engines.seam import LocalConfig
from fmol.federation import Federation
from fmol.options import NotNegative, Positive, Range, nearest
from fmol.schedules import Schedule

__all__ = ["FedALS"]


@dataclass(frozen=True)
class FedALS(FedLS):
    """FedLS, anchored: after the first rounds only hidden dense layers move, and each client pays for
    changing what they give for its own inputs.

    What a client changes beyond need is what merging has to undo. `heads`, the layers that give the
    outputs, are held as well: two layers that both move are merged each by itself, and do not fit one
    another after it. Fields that are not told here are those of `FedLS`.

    >>> FedALS(local_epochs=20, batch_size=16, heads="left,right", temperature=4).anchor
    0.1
    """

    heads: str = ""
    """The dense layers that give the outputs, by name, divided by commas; `*` stands for anything."""
    anchor: NotNegative = 0.1
    """What it costs, beside the loss, to change what a hidden layer gives by 1 in the mean square."""
    temperature: Annotated[float, Range(least=1)] = 1.0
    """τ: after the first rounds clients descend `τ loss(outputs / τ)`, which asks for larger margins.
    For cross-entropies and their like, about 4; for other losses leave it at 1."""
    pace: Positive = 5.0
    """How many times as long steps are after the first rounds, at the clients and at the server."""
    mean_rounds: Annotated[int, Range(least=0)] = 1
    """The first rounds, in which everything is trained: dense layers are merged with all samples alike,
    and the rest becomes a mean."""
    deep_rounds: Annotated[int, Range(least=0)] = 1
    """For how many rounds after the first ones all hidden layers move; then those alone that are as
    wide as what heads take in: of two that both move, each is merged as if the other stood still."""
    first_ridge: Annotated[float, Range(least=1e-4)] = 0.1
    """`ridge` in the first rounds."""
    solved_weight: Positive = 0.03
    ridge: Annotated[float, Range(least=1e-4)] = 1e-4
    head_weight: NotNegative = 100.0
    """How much what heads make of the last hidden layer counts in its merging, beside what the layer
    gives. Clients send second moments for each of the heads' outputs for it; with 0 they do not."""
    local_lr: Schedule = 0.02
    local_momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    local_average: Annotated[float, Range(least=0, most=1)] = 0.1

    own_options: ClassVar[tuple[str, ...]] = ("local_lr", "server_lr", "local_momentum")
    """What a problem recommends is not for it: its steps go with its momentum and its pace."""

    def merging(self, federation: Federation, round: int) -> Merging:
        layout = federation.layout
        if round < self.mean_rounds:
            layers = dense_layers(federation.model, layout)
            return Merging(layers, layout, None, self.first_ridge, holds=False)
        hidden, heads = self._divide(federation)
        if round >= self.mean_rounds + self.deep_rounds:
            last = tuple(each for each in hidden if any(each.outputs == h.inputs for h in heads))
            hidden = last or hidden
        softened = ",".join(layer.pattern for layer in heads)
        descent = {"anchor": self.anchor, "softened": softened, "temperature": self.temperature}
        merging = Merging(hidden, layout, self.solved_weight, self.ridge, descent=descent)
        if not self.head_weight:
            return merging
        # Half as soft as while clients descend, for what they come to is less certain than that.
        softness = (1 + self.temperature) / 2
        return merge_curved(merging, heads, strength=self.head_weight, softness=softness)

    def local(self, round: int, batch_size: int | None) -> LocalConfig:
        local = super().local(round, batch_size)
        return replace(local, lr=local.lr * self._times(round))

    def step_size(self, round: int, local_lr: float) -> float:
        lr = super().step_size(round, local_lr)
        return lr if self.server_lr is None else lr * self._times(round)

    def _times(self, round: int) -> float:
        return 1.0 if round < self.mean_rounds else self.pace

    def _divide(self, federation: Federation) -> tuple[tuple[Dense, ...], tuple[Dense, ...]]:
        """The hidden dense layers, and those that give the outputs."""
        layers = dense_layers(federation.model, federation.layout)
        heads = tuple(layer for layer in layers if layer.matches(self.heads))
        return tuple(layer for layer in layers if layer not in heads), heads

    def _check(self, federation: Federation) -> None:
        super()._check(federation)
        hidden, heads = self._divide(federation)
        known = [layer.name for layer in (*hidden, *heads)]
        names = ", ".join(f"`{name}`" for name in known)
        for pattern in (each.strip() for each in self.heads.split(",")):
            if pattern and not any(layer.matches(pattern) for layer in heads):
                meant = nearest(pattern, known)
                raise ValueError(
                    f"`heads` has `{pattern}`, which is none of the dense layers that can be merged, "
                    f"{names}. " + (f"Did you mean `{meant}`?" if meant else "Name one of them.")
                )
        if hidden and heads:
            return
        raise ValueError(
            f"`heads` is {self.heads!r}, and so {'all' if heads else 'none'} of the model's dense "
            f"layers, {names}. Name those that give the outputs"
            + (", or use FedLS where there is no other." if heads else ".")
        )
