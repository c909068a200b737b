"""Rules that look for the shortest vector of the hull, with or without bounds on the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmol.bounded import min_norm_within
from fmol.minnorm import min_norm, read_gramian, read_protected
from fmol.options import NotNegative, Range, check_options
from fmol.rules.seam import Context, Gramian, Protected, by_name

__all__ = ["Capped", "MinNorm", "NearPrior", "capped", "near_prior"]


@dataclass(frozen=True)
class MinNorm:
    """The paper's rule: the weights of the shortest vector in the convex hull of the updates.

    Common descent: yes, for every objective, by at least ‖d‖². At a solved objective: the shortest
    vector is (nearly) that one, and the others stall; see `normalize` and `Objective(target=…)`.

    >>> MinNorm()(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), Context(names=("a", "b")))
    tensor([0.8000, 0.2000], dtype=torch.float64)
    """

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        return min_norm(gramian, protected=context.protected).weights


def capped(gramian: Gramian, cap: float, protected: Protected = None) -> Tensor:
    """The weights `[S]` of the shortest vector of the hull with `λ_s ≤ cap`, exactly.

    No objective can be all of the direction, so that none that is solved stops the others. A cap of 1
    is the min-norm rule, one of 1/S equal weights; less than that cannot sum to one.

    >>> capped([[1e-6, 0.0], [0.0, 1.0]], cap=0.7)
    tensor([0.7000, 0.3000], dtype=torch.float64)
    """
    active = _count_active(gramian, protected)
    if not cap * active >= 1 - 1e-9:
        raise ValueError(
            f"`cap` is {cap:g}, and {active} weights of at most that cannot sum to one. "
            f"Use at least {1 / active:g}."
        )
    return min_norm_within(gramian, 0.0, max(cap, 1 / active), protected).weights


@dataclass(frozen=True)
class Capped:
    """The shortest vector of the hull with no weight above `cap`: `λ_s ≤ cap`.

    Common descent: not where the cap is met. At a solved objective: it has at most `cap` of the weight,
    and the others share the rest. Where fewer than 1/`cap` objectives are active, all count alike.

    >>> Capped(cap=0.5)(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), Context(names=("a", "b")))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    cap: Annotated[float, Range(above=0)] = 0.75
    """The largest weight that an objective may have; 1 and above is the min-norm rule."""

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        active = _count_active(gramian, context.protected)
        return capped(gramian, max(self.cap, 1 / active), context.protected)


def near_prior(
    gramian: Gramian,
    prior: Tensor | ArrayLike | None = None,
    radius: float = 0.1,
    protected: Protected = None,
) -> Tensor:
    """The weights `[S]` of the shortest vector of the hull with `|λ_s − λ⁰_s| ≤ radius`, exactly.

    `prior` `[S]` is λ⁰ up to its sum, equal weights unless given. This is the rule of FedMGDA+, whose
    ball is that of the largest difference; FedMGDA+ also divides updates by their lengths, which is
    `normalize="l2"`. A radius of 0 is the prior itself, one of 1 the min-norm rule.

    >>> near_prior([[1e-6, 0.0], [0.0, 1.0]], prior=[1.0, 1.0], radius=0.1)
    tensor([0.6000, 0.4000], dtype=torch.float64)
    """
    _, norms = read_gramian(gramian)
    mask = read_protected(protected, len(norms))
    center = torch.ones(len(norms), dtype=torch.float64)
    if prior is not None:
        center = torch.as_tensor(prior).detach().cpu().double()
    if mask is not None:
        center = torch.where(torch.from_numpy(mask), 0.0, center)
    if center.shape != (len(norms),) or not bool((center >= 0).all()) or not center.sum() > 0:
        raise ValueError(
            f"`prior` must have {len(norms)} weights that are not negative and, where nothing is "
            f"protected, not all zero, got {center.tolist()}. Give one to every objective."
        )
    if not radius >= 0:
        raise ValueError(f"`radius` must be of at least 0, got {radius}. 0 is the prior itself.")
    center = center / center.sum()
    # Neither bound may be beyond what the simplex allows.
    lower, upper = (center - radius).clamp(min=0), (center + radius).clamp(max=1)
    return min_norm_within(gramian, lower, upper, protected).weights


@dataclass(frozen=True)
class NearPrior:
    """The shortest vector of the hull within `radius` of a prior: FedMGDA+'s rule.

    Common descent: not where the ball is met. At a solved objective: its weight grows by `radius` at
    most, and the others keep the rest. The prior is renormalised over the objectives present.

    >>> rule = NearPrior(prior={"a": 3, "b": 1}, radius=0.1)
    >>> rule(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), Context(names=("a", "b")))
    tensor([0.8000, 0.2000], dtype=torch.float64)
    """

    prior: Mapping[str, NotNegative] | None = None
    """Weights around which to look, by objective; none is equal ones."""
    radius: NotNegative = 0.1
    """How far each weight may be from its prior."""

    by_objective: ClassVar[tuple[str, ...]] = ("prior",)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        prior = None
        if self.prior is not None:
            prior = by_name("NearPrior", "prior", self.prior, context.names)
        return near_prior(gramian, prior, self.radius, context.protected)


def _count_active(gramian: Gramian, protected: Protected) -> int:
    size = len(torch.as_tensor(gramian))
    mask = read_protected(protected, size)
    return size if mask is None else int((~mask).sum())
