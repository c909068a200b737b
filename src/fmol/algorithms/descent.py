"""Steps 6–7: from one update per objective to a direction, whatever the rule."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmol.aggregate import gramian
from fmol.minnorm import certificate
from fmol.rules import Context, Normalize, Rule, scales

__all__ = ["Direction", "find_direction"]


@dataclass(frozen=True, kw_only=True)
class Direction:
    """`d = Σ_s w_s Δ_s` and what there is to say about it. Vectors are `[S]` over the rows given."""

    vector: Tensor
    weights: Tensor
    """`w_s` divided by their sum: the paper's λ where nothing is normalised or protected."""
    scale: float
    """The factor that turns `weights` into the applied `w_s`; 1 for the paper's step."""
    norm_squared: float
    gap: float
    min_cosine: float
    stationary: bool
    norms: Tensor
    cosines: Tensor


def find_direction(
    deltas: Tensor,
    names: Sequence[str],
    *,
    rule: Rule,
    normalize: Normalize = "none",
    shared: Tensor | None = None,
    losses: Tensor | None = None,
    protected: Tensor | None = None,
    round: int = 0,
    memory: MutableMapping[str, Tensor] | None = None,
) -> Direction:
    """The direction that `rule` makes of `deltas` `[S, d]`.

    The rule sees `u_s = Δ_s/c_s`; the coefficients on the raw updates are then `μ_s/c_s` (μ itself
    would not be a descent direction), stretched so that the step spends the mean length of the
    updates. `shared` `[d]` restricts Gramian, norms and certificate to some parameters; outside it
    the direction is the plain sum, which for a head of one objective is that objective's own update.
    """
    gram = gramian(deltas if shared is None else deltas[:, shared])
    norms = gram.diagonal().clamp(min=0).sqrt()
    c = scales(normalize, norms, losses)
    scaled = gram / (c[:, None] * c[None, :])
    context = Context(
        names=tuple(names),
        round=round,
        losses=losses,
        protected=protected,
        memory={} if memory is None else memory,
    )
    mu = _checked(rule(scaled, context), len(names), rule)
    proof = certificate(scaled, mu, protected)
    applied = mu / c
    if normalize != "none":
        pulling = torch.ones_like(norms, dtype=torch.bool) if protected is None else ~protected
        spent = float((applied * norms)[pulling].sum())
        if spent > 0:
            applied = applied * (float(norms[pulling].mean()) / spent)
    coefficients = applied.to(deltas)
    vector = coefficients @ deltas
    if shared is not None:
        vector = torch.where(shared, vector, deltas.sum(0))
    total = float(applied.sum())
    lengths = norms[:, None] * norms[None, :]
    return Direction(
        vector=vector,
        weights=applied / total if total > 0 else applied,
        scale=total,
        norm_squared=max(float(applied @ gram @ applied), 0.0),
        gap=proof.gap,
        min_cosine=proof.min_cosine,
        stationary=proof.stationary,
        norms=norms,
        cosines=torch.where(lengths > 0, gram / lengths, torch.nan).clamp(-1, 1),
    )


def _checked(weights: Tensor, size: int, rule: Rule) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float64).cpu()
    if weights.shape != (size,) or not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"the rule {rule!r} returned {weights.tolist()} for {size} objectives. "
            f"A rule must return {size} finite weights."
        )
    return weights
