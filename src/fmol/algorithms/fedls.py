"""FedLS: FedAvg whose dense layers are merged by least squares, for clients that take many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fmol.algorithms.fedavg import FedAvg
from fmol.algorithms.merging import Merging
from fmol.dense import MOST_INPUTS, dense_layers
from fmol.federation import Federation
from fmol.options import Positive, Range
from fmol.rounds import State

__all__ = ["FedLS"]


@dataclass(frozen=True)
class FedLS(FedAvg):
    """FedAvg, but that dense layers take the update that does to all clients' inputs most nearly what
    their own did; the other parameters are trained in the first round and held after it.

    For many local steps on unlike data, where means of updates arrive nowhere.

    >>> FedLS({"left": 0.5, "right": 0.5}, local_epochs=20, batch_size=16, local_lr=0.1).ridge
    0.01
    """

    mean_rounds: Annotated[int, Range(least=0)] = 1
    """Rounds of means, in which everything is trained, before least squares."""
    solved_weight: Positive = 0.01
    """How much a sample counts whose loss is zero; one whose loss is large counts 1 more."""
    ridge: Annotated[float, Range(least=1e-4)] = 0.01
    """How much directions count that no input has, beside those that inputs have on average: there
    it is the mean."""

    def joint_problems(self) -> list[str]:
        """What is not for least squares among the options of FedAvg."""
        # Not `super()`: it is also asked about values that no FedLS has been made of yet.
        found = FedAvg.joint_problems(self)
        if self.drift_correction != "none":
            found.append(
                f"`drift_correction` is {self.drift_correction!r}, which follows means, and FedLS "
                "takes none. Leave it out, or use FedAvg."
            )
        if self.extrapolate:
            found.append(
                "`extrapolate` is on, which makes means longer, and FedLS takes none. Leave it out, or "
                "use FedAvg."
            )
        return found

    def init(self, federation: Federation, x: Tensor) -> State:
        self._check(federation)
        return super().init(federation, x)

    def merging(self, federation: Federation, round: int) -> Merging | None:
        if round < self.mean_rounds:
            return None
        layers = dense_layers(federation.model, federation.layout)
        return Merging(layers, federation.layout, self.solved_weight, self.ridge)

    def _check(self, federation: Federation) -> None:
        """Raises where least squares cannot be: without a dense layer, or with decay here and there."""
        if self.transforms:
            raise ValueError(
                f"`transforms` has {self.transforms[0]!r}, and what it does to updates would not be "
                "done to the moments that clients send beside them with FedLS. Leave it out, or use "
                "FedAvg."
            )
        population = federation.population
        if self.weight_decay and any(
            len(population.holders(name)) < len(population) for name in federation.names
        ):
            raise ValueError(
                f"`weight_decay` is {self.weight_decay:g}, and some clients do not hold every "
                "objective: it would move layers that their losses do not reach, and FedLS would count "
                "that as something they learnt. Leave it out, or use FedAvg."
            )
        if not dense_layers(federation.model, federation.layout):
            raise ValueError(
                "the model has no trainable `nn.Linear` of fewer than "
                f"{MOST_INPUTS} inputs for FedLS to merge. Use FedAvg."
            )
