"""Rules whose weights are given, or follow from losses: they do not look for common descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmol.errors import LossError
from fmol.options import NotNegative, Positive, check_options
from fmol.rules.seam import Context, Gramian, Protected, by_name, protect

__all__ = ["Fixed", "SmoothTchebycheff", "fixed", "smooth_tchebycheff"]


def fixed(
    gramian: Gramian, weights: Tensor | ArrayLike | None = None, protected: Protected = None
) -> Tensor:
    """`weights` `[S]` divided by their sum; equal ones unless given.

    >>> fixed([[1.0, 0.0], [0.0, 4.0]], [1, 3])
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    def weigh(own: Tensor, rows: Tensor) -> Tensor:
        given = torch.ones(len(torch.as_tensor(gramian))) if weights is None else weights
        values = torch.as_tensor(given).detach().cpu().double()
        if values.shape != (len(torch.as_tensor(gramian)),) or not bool((values >= 0).all()):
            raise ValueError(
                f"`weights` must be {len(torch.as_tensor(gramian))} that are not negative, got "
                f"{values.tolist()}. Give one to every row of the Gramian."
            )
        values = values[rows]
        if not float(values.sum()) > 0:
            raise ValueError(
                f"`weights` are all zero for the {len(rows)} objectives that are active. Give a "
                "positive one to at least one of them."
            )
        return values / values.sum()

    return protect(gramian, protected, weigh)


@dataclass(frozen=True)
class Fixed:
    """The same weights in every round, renormalised over the objectives that are present.

    Common descent: no. At a solved objective: it steps aside by itself.

    >>> Fixed({"a": 1.0, "b": 3.0})(torch.eye(2), Context(names=("a", "b")))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    >>> Fixed(default=1.0)(torch.eye(2), Context(names=("a", "b")))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    weights: Mapping[str, NotNegative] = field(default_factory=dict)
    """By objective."""
    default: NotNegative | None = None
    """The weight of objectives that `weights` does not name; none asks for all of them."""

    by_objective: ClassVar[tuple[str, ...]] = ("weights",)

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong where nothing has a weight."""
        if any(value > 0 for value in self.weights.values()) or self.default:
            return []
        return [
            f"`weights` must name an objective with a positive weight, got {dict(self.weights)}. "
            "Or give a `default` for all that are not named."
        ]

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        weights = by_name("Fixed", "weight", self.weights, context.names, self.default)
        return fixed(gramian, weights, context.protected)


def smooth_tchebycheff(
    gramian: Gramian,
    losses: Tensor | ArrayLike,
    preference: Tensor | ArrayLike | None = None,
    ideal: Tensor | ArrayLike | None = None,
    smoothing: float = 0.1,
    protected: Protected = None,
) -> Tensor:
    """The weights `[S]` of the gradient of `μ·log Σ_s exp(p_s(f_s − z_s)/μ)`, divided by their sum.

    The worst objective, seen from the ideal point `z` and through the preference `p`, gets most; with a
    `smoothing` μ near zero, all. The gradient's weights are `p_s·softmax(p(f − z)/μ)_s`; their sum
    depends on how `p` is scaled, so it is taken out, and `p` is scaled to a mean of one.

    >>> smooth_tchebycheff([[1.0, 0.0], [0.0, 1.0]], losses=[0.2, 0.1], smoothing=0.1)
    tensor([0.7311, 0.2689], dtype=torch.float64)
    """
    size = len(torch.as_tensor(gramian))
    vectors = []
    for name, values, otherwise in (
        ("losses", losses, 0.0),
        ("preference", preference, 1.0),
        ("ideal", ideal, 0.0),
    ):
        vector = torch.full((size,), otherwise, dtype=torch.float64)
        if values is not None:
            vector = torch.as_tensor(values).detach().cpu().double()
        if vector.shape != (size,) or not bool(torch.isfinite(vector).all()):
            raise ValueError(
                f"`{name}` must be {size} finite numbers, one per row of the Gramian, got "
                f"{vector.tolist()}. Give one to every objective."
            )
        vectors.append(vector)
    if not smoothing > 0:
        raise ValueError(f"`smoothing` must be above 0, got {smoothing}. Use a small number.")

    def weigh(own: Tensor, rows: Tensor) -> Tensor:
        above, wanted = (vectors[0] - vectors[2])[rows], vectors[1][rows]
        if not bool((wanted >= 0).all()) or not float(wanted.sum()) > 0:
            raise ValueError(
                f"`preference` must be not negative and not all zero for active objectives, got "
                f"{wanted.tolist()}. Give a positive one to at least one of them."
            )
        wanted = wanted / wanted.mean()
        exponents = torch.where(wanted > 0, wanted * above / smoothing, -torch.inf)
        weights = wanted * torch.softmax(exponents, dim=0)
        return weights / weights.sum()

    return protect(gramian, protected, weigh)


@dataclass(frozen=True)
class SmoothTchebycheff:
    """Smooth Tchebycheff scalarisation: most weight to the objective that is worst off.

    Common descent: no. At a solved objective: its weight vanishes with its loss, whatever its update.
    It reaches points of a Pareto front that no fixed weights reach. `smoothing` and `ideal` are in the
    unit of the losses.

    >>> context = Context(names=("a", "b"), losses=torch.tensor([0.2, 0.1]))
    >>> SmoothTchebycheff(smoothing=0.1)(torch.eye(2), context)
    tensor([0.7311, 0.2689], dtype=torch.float64)
    """

    preference: Mapping[str, NotNegative] | None = None
    """How much each objective's distance from the ideal counts; none is alike."""
    ideal: Mapping[str, float] | None = None
    """The losses that would be perfect, by objective; none is zero, and so are those not named."""
    smoothing: Positive = 0.1
    """How far below the worst a loss may be and still count, in the unit of the losses."""

    needs_losses: ClassVar[bool] = True
    by_objective: ClassVar[tuple[str, ...]] = ("preference", "ideal")

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        losses = torch.tensor([]) if context.losses is None else context.losses
        for name, loss in zip(context.names, losses.tolist(), strict=True):
            if not abs(loss) < torch.inf:
                raise LossError(
                    f"round {context.round}: objective `{name}` has a training loss of {loss:g}, and "
                    "`SmoothTchebycheff` needs losses that are known. Use another rule."
                )
        preference = None
        if self.preference is not None:
            preference = by_name("SmoothTchebycheff", "preference", self.preference, context.names)
        ideal = by_name("SmoothTchebycheff", "ideal", self.ideal or {}, context.names, 0.0)
        return smooth_tchebycheff(
            gramian, losses, preference, ideal, self.smoothing, context.protected
        )
