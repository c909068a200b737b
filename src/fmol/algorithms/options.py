"""Options that several algorithms share, each with its checks; mixed in, so that they stay flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, get_args, get_origin

from torch import Tensor

from fmol.aggregate import Weighting
from fmol.algorithms.missing import OnMissing, room_for_reuse
from fmol.engines.seam import LocalConfig, Transform, Work
from fmol.federation import Federation
from fmol.local import local_work
from fmol.rounds import State
from fmol.rules import MinNorm, Normalize, Rule
from fmol.schedules import Schedule, at

__all__ = ["LocalOptions", "ServerOptions", "check_options"]


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """How clients descend."""

    local_steps: int | None = None
    """K gradient steps a round. Exactly one of `local_steps` and `local_epochs` is given."""
    local_epochs: int | None = None
    """E passes over the client's own data a round, so E·⌈n/b⌉ gradient steps."""
    local_lr: Schedule = 0.1
    """η_L, a number or a callable of the round."""
    accumulate: Literal["sum", "mean"] = "sum"
    """Whether Δ is the sum (Algorithm 1) or the mean (the proofs) over the K steps."""
    weight_decay: float = 0.0
    """Adds this times the parameters to every local gradient."""
    local_momentum: float = 0.0
    """Momentum of the local steps; starts at zero in every round."""
    clip_norm: float | None = None
    """Local gradients longer than this are cut to it."""
    proximal: float = 0.0
    """Pulls local steps back to `x_t` with this strength (FedProx)."""

    def __post_init__(self) -> None:
        check_options(self)

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
        )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server makes one step of the clients' updates."""

    weighting: Weighting = "uniform"
    """What Δ_s and f_s are means of: every holder alike, or by its number of labelled samples."""
    rule: Rule = field(default_factory=MinNorm)
    """Gramian in, weights out; the paper's min-norm rule unless another is passed."""
    normalize: Normalize = "none"
    """What each Δ_s is divided by before the rule: nothing, its length, its loss, or both."""
    shared: str | Sequence[str] | None = None
    """Shell-style patterns of the parameters that enter the QP; None is all of them."""
    on_missing_objective: OnMissing = "skip"
    """For an objective without an update in this round: leave it out, reuse its last update, leave
    the model as it is, or raise."""
    reuse_rounds: int = 10
    """How old an update may be that `on_missing_objective="reuse"` takes."""
    transforms: tuple[Transform, ...] = ()
    """What is done to each reply on its way to the server."""

    shares_model: ClassVar[bool] = True
    work: ClassVar[Work] = staticmethod(local_work)

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, federation: Federation, x: Tensor) -> State:
        """`x_0` and, where old updates may be reused, room for them."""
        if self.shared is not None:
            federation.layout.matching(self.shared)  # Raises where a pattern matches nothing.
        return State(x, room_for_reuse(self.on_missing_objective, len(federation.names), x))


def check_options(options: Any) -> None:
    """Raises one ValueError that lists all that is wrong with an algorithm's options."""
    problems = [*_literal_problems(options), *_number_problems(options)]
    if isinstance(options, LocalOptions) and (options.local_steps is None) == (
        options.local_epochs is None
    ):
        problems.append(
            f"exactly one of `local_steps` and `local_epochs` must be given, got "
            f"{options.local_steps} and {options.local_epochs}."
        )
    rule = getattr(options, "rule", None)
    if isinstance(rule, type):
        problems.append(f"`rule` is the class {rule.__name__} itself: make one of it.")
    weights = getattr(options, "weights", None)
    if weights is not None and not isinstance(weights, Mapping):
        problems.append(f"`weights` must map objectives to numbers, got {weights!r}.")
    if problems:
        raise ValueError(f"{type(options).__name__}: " + " ".join(problems))


def _literal_problems(options: Any) -> list[str]:
    allowed = {
        "accumulate": Literal["sum", "mean"],
        "weighting": Weighting,
        "normalize": Normalize,
        "on_missing_objective": OnMissing,
    }
    problems = []
    for name, kind in allowed.items():
        assert get_origin(kind) is Literal
        value = getattr(options, name, None)
        if hasattr(options, name) and value not in get_args(kind):
            problems.append(f"`{name}` must be one of {list(get_args(kind))}, got {value!r}.")
    return problems


def _number_problems(options: Any) -> list[str]:
    at_least_one = {"local_steps", "local_epochs", "batch_size", "reuse_rounds"}
    not_negative = {"weight_decay", "proximal", "local_momentum", "local_lr", "server_lr"}
    schedules = {"local_lr", "server_lr"}
    problems = []
    for name in (f.name for f in fields(options)):
        value = getattr(options, name)
        if value is None or (name in schedules and callable(value)):
            continue
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        number = isinstance(value, Real) and not isinstance(value, bool)
        if name in at_least_one and not (whole and value >= 1):
            problems.append(f"`{name}` must be a whole number of at least 1, got {value!r}.")
        if name in not_negative and not (number and 0 <= value < float("inf")):
            problems.append(f"`{name}` must be finite and not negative, got {value!r}.")
        elif name == "local_momentum" and value >= 1:
            problems.append(f"`{name}` must be below 1, got {value!r}.")
        if name == "clip_norm" and not (number and 0 < value < float("inf")):
            problems.append(f"`{name}` must be positive, got {value!r}; leave it out for none.")
    return problems
