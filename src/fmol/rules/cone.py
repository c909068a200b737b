"""UPGrad: every update is bent until it hurts nobody, and the bent ones are averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmol.blas import one_thread
from fmol.minnorm import read_gramian, read_protected, solve_scaled
from fmol.options import NotNegative, check_options
from fmol.rules.seam import Context, Gramian, Protected, by_name

__all__ = ["UpGrad", "project_rows", "upgrad"]


def upgrad(
    gramian: Gramian,
    preference: Tensor | ArrayLike | None = None,
    protected: Protected = None,
) -> Tensor:
    """The weights `[S]` of the mean of the updates, each projected onto the dual cone of all.

    `preference` `[S]` weighs the projections, equally unless given. A protected objective's own
    projection is not among them, and the others' do not hurt it. The weights sum to one where nobody
    is in conflict, and to more where they are.

    >>> upgrad([[1.0, -0.5], [-0.5, 1.0]])
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """
    rows = project_rows(gramian, protected)
    mask = read_protected(protected, len(rows))
    shares = torch.ones(len(rows), dtype=torch.float64)
    if preference is not None:
        shares = torch.as_tensor(preference).detach().cpu().double()
    if mask is not None:
        shares = torch.where(torch.from_numpy(mask), 0.0, shares)
    if shares.shape != (len(rows),) or not bool((shares >= 0).all()) or not shares.sum() > 0:
        raise ValueError(
            f"`preference` must have {len(rows)} weights that are not negative and, where nothing is "
            f"protected, not all zero, got {shares.tolist()}. Give one to every objective."
        )
    return (shares / shares.sum()) @ rows


def project_rows(gramian: Gramian, protected: Protected = None) -> Tensor:
    """The weights `[S, S]` of each update's projection onto `{v: ⟨Δ_j, v⟩ ≥ 0 for every j}`.

    The nearest point of that cone to `Δ_s` is `Δ_s + Σ_{j≠s} μ_j Δ_j` with the `μ ≥ 0` that make it
    shortest: the min-norm problem with `s` alone active and all others protected. Its own constraint
    needs no multiplier, because `⟨Δ_s, d⟩ = ‖d‖²` there. A protected objective's row is zero.

    >>> project_rows([[1.0, -0.5], [-0.5, 1.0]])
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    correlation, norms = read_gramian(gramian)
    mask = read_protected(protected, len(norms))
    rows = np.eye(len(norms))
    if mask is not None:
        rows[mask] = 0.0
    # Who is in conflict with nobody hurts nobody as it is.
    torn = np.flatnonzero(((correlation < 0).any(1)) & (rows.diagonal() > 0))
    with one_thread(len(norms)):
        for s in torn:
            others = np.ones(len(norms), dtype=bool)
            others[s] = False
            rows[s] = solve_scaled(correlation, norms, others)
    return torch.from_numpy(rows)


@dataclass(frozen=True)
class UpGrad:
    """UPGrad: the mean of the updates after each was projected onto the dual cone of all; exact.

    Common descent: yes, unless `x_t` is Pareto-stationary, but by less than the min-norm rule's ‖d‖²
    for some. At a solved objective: it takes no part in the others' conflicts, which go on. Costs S
    small problems.

    >>> UpGrad()(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), Context(names=("a", "b")))
    tensor([0.7500, 0.7500], dtype=torch.float64)
    """

    preference: Mapping[str, NotNegative] | None = None
    """What the projections are weighed by, by objective; none is equally."""

    by_objective: ClassVar[tuple[str, ...]] = ("preference",)

    def __post_init__(self) -> None:
        check_options(self)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        preference = None
        if self.preference is not None:
            preference = by_name("UpGrad", "preference", self.preference, context.names)
        return upgrad(gramian, preference, context.protected)
