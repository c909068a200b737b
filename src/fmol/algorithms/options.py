"""Options that several algorithms share, each with its checks; mixed in, so that they stay flat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from fmol.aggregate import Weighting
from fmol.algorithms.missing import OnMissing, room_for_reuse
from fmol.algorithms.steps import Plain, ServerStep, room_for_momenta, room_for_step
from fmol.algorithms.trouble import warn_of_trouble
from fmol.engines.seam import LocalConfig, Transform, Work
from fmol.federation import Federation
from fmol.layout import Layout
from fmol.local import local_work
from fmol.options import Count, NotNegative, Positive, Range, check_options
from fmol.rounds import State
from fmol.rules import MinNorm, Normalize, Rule
from fmol.rules.seam import check_names
from fmol.schedules import Schedule, at

__all__ = ["LocalOptions", "ServerOptions", "StepOptions"]


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """How clients descend."""

    local_steps: Count | None = None
    """K gradient steps a round. Exactly one of `local_steps` and `local_epochs` is given."""
    local_epochs: Count | None = None
    """E passes over the client's own data a round, so E·⌈n/b⌉ gradient steps."""
    local_lr: Schedule = 0.1
    """η_L, a number or a callable of the round."""
    accumulate: Literal["sum", "mean"] = "sum"
    """Whether Δ is the sum (Algorithm 1) or the mean (the proofs) over the K steps."""
    weight_decay: NotNegative = 0.0
    """Adds this times the parameters to every local gradient."""
    local_momentum: Annotated[float, Range(least=0, below=1)] = 0.0
    """Momentum of the local steps; starts at zero in every round."""
    clip_norm: Positive | None = None
    """Local gradients longer than this are cut to it."""
    proximal: NotNegative = 0.0
    """Pulls local steps back to `x_t` with this strength (FedProx)."""
    local_average: Annotated[float, Range(least=0, most=1)] = 0.0
    """Clients come to the mean of their last iterates, of this share of the steps, and not to the last
    one: less noise where steps are long."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        if (self.local_steps is None) != (self.local_epochs is None):
            return []
        return [
            f"exactly one of `local_steps` and `local_epochs` must be given, got "
            f"{self.local_steps} and {self.local_epochs}."
        ]

    def local(self, round: int, batch_size: int | None) -> LocalConfig:
        """What a lane is told in this round."""
        return LocalConfig(
            lr=at(self.local_lr, round, "local_lr"),
            steps=self.local_steps,
            epochs=self.local_epochs,
            batch_size=batch_size,
            accumulate=self.accumulate,
            momentum=self.local_momentum,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            proximal=self.proximal,
            average=self.local_average,
        )


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How long the server's step is, and what of older ones is in it."""

    server_step: ServerStep = field(default_factory=Plain)
    """What the server makes of a direction before it moves: plain, or with options, as in
    momentum,beta=0.5 or adam,tau=0.001."""
    extrapolate: bool = False
    """Takes updates the longer, the more the clients disagree (FedExP), each objective by itself."""
    extrapolation_cap: Annotated[float, Range(least=1)] = 10.0
    """How many times as long at most."""
    extrapolate_by: Literal["objective", "unit"] = "objective"
    """What has a factor of its own: an objective's whole update, or each unit in it (a row of a matrix
    of weights, a filter of a convolution, a vector of biases)."""

    def unit_layout(self, federation: Federation) -> Layout | None:
        """By what updates are divided into units; None where no unit has a factor of its own."""
        by_unit = self.extrapolate and self.extrapolate_by == "unit"
        return federation.layout if by_unit else None

    @property
    def cap(self) -> float | None:
        """How many times as long an update may be taken; None where it is taken as it is."""
        return self.extrapolation_cap if self.extrapolate else None


@dataclass(frozen=True, kw_only=True)
class ServerOptions(StepOptions):
    """How the server makes one step of the clients' updates."""

    weighting: Weighting = "uniform"
    """What Δ_s and f_s are means of: every holder alike, or by its number of labelled samples."""
    rule: Rule = field(default_factory=MinNorm)
    """How the objectives are weighed: by name, or with options, as in capped,cap=0.6 or
    near-prior,radius=0.2 or smoothed,rule=upgrad,keep=0.8."""
    normalize: Normalize = "none"
    """What each Δ_s is divided by before the rule: nothing, its length, its loss, or both."""
    objective_momentum: Annotated[float, Range(least=0, below=1)] = 0.0
    """How much of an objective's last smoothed update is in the next, before the rule; 0 is none."""
    shared: str | Sequence[str] | None = None
    """Shell-style patterns of the parameters that enter the QP; None is all of them."""
    on_missing_objective: OnMissing = "skip"
    """For an objective without an update in this round: leave it out, reuse its last update, leave
    the model as it is, or raise."""
    reuse_rounds: Count = 10
    """How old an update may be that `on_missing_objective="reuse"` takes."""
    transforms: tuple[Transform, ...] = ()
    """What is done to each reply on its way to the server."""

    shares_model: ClassVar[bool] = True
    work: ClassVar[Work] = staticmethod(local_work)

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, federation: Federation, x: Tensor) -> State:
        """`x_0`, and room for what is kept of old updates and steps."""
        if self.shared is not None:
            federation.layout.matching(self.shared)  # Raises where a pattern matches nothing.
        check_names(self.rule, federation.names)
        warn_of_trouble(self)
        size = len(federation.names)
        memory = room_for_reuse(self.on_missing_objective, size, x)
        memory |= room_for_momenta(self.objective_momentum, size, x)
        return State(x, memory | room_for_step(self.server_step, x))
