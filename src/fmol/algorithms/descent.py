"""Lines 6–7: from one update per objective to a direction and a step, whatever the rule."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmol.aggregate import gramian
from fmol.errors import RefusedError
from fmol.layout import all_finite, squared_norm
from fmol.minnorm import certificate
from fmol.rules import Context, Normalize, Rule, scales

__all__ = ["Angles", "Direction", "find_direction", "measure_angles", "step"]


@dataclass(frozen=True)
class Angles:
    """The Gramian `[S, S]` of some updates, their lengths `[S]` and pairwise cosines `[S, S]`."""

    gramian: Tensor
    norms: Tensor
    cosines: Tensor


def measure_angles(deltas: Tensor, shared: Tensor | None = None) -> Angles:
    """Gramian, lengths and cosines of `deltas` `[S, d]`, over the `shared` parameters `[d]` alone."""
    gram = gramian(deltas if shared is None else deltas[:, shared])
    norms = gram.diagonal().clamp(min=0).sqrt()
    lengths = norms[:, None] * norms[None, :]
    return Angles(gram, norms, torch.where(lengths > 0, gram / lengths, torch.nan).clamp(-1, 1))


@dataclass(frozen=True, kw_only=True)
class Direction:
    """`d = Σ_s w_s Δ_s` and what there is to say about it. Vectors are `[S]` over the rows given."""

    vector: Tensor
    weights: Tensor
    """`w_s` divided by their sum: the paper's λ where nothing is normalised or protected. Where a rule
    lets them sum to nothing, or to less, the `w_s` themselves."""
    scale: float
    """The factor that turns `weights` into the applied `w_s`: the sum of those, 1 for the paper's step
    and more for a rule such as UPGrad."""
    norm_squared: float
    gap: float
    min_cosine: float
    stationary: bool


def find_direction(
    deltas: Tensor,
    names: Sequence[str],
    *,
    rule: Rule,
    normalize: Normalize = "none",
    shared: Tensor | None = None,
    angles: Angles | None = None,
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
    `angles` are those of `measure_angles(deltas, shared)`, where they are known already.
    """
    angles = angles or measure_angles(deltas, shared)
    gram, norms = angles.gramian, angles.norms
    rows = _rows_for_the_rule(norms, normalize, protected)
    active = torch.ones_like(rows) if protected is None else ~protected
    c = scales(normalize, norms, losses, names, round)
    scaled = gram
    if normalize != "none":
        scaled = (gram / (c[:, None] * c[None, :]))[rows][:, rows]
    guarded = None if protected is None or not bool(protected[rows].any()) else protected[rows]
    context = Context(
        names=tuple(name for name, kept in zip(names, rows.tolist(), strict=True) if kept),
        round=round,
        losses=None if losses is None else losses[rows],
        protected=guarded,
        memory={} if memory is None else memory,
    )
    mu = _checked(rule(scaled, context), len(context.names), rule)
    proof = certificate(scaled, mu, guarded)
    applied = torch.zeros_like(norms)
    applied[rows] = mu / c[rows]
    if normalize != "none":
        spent = float((applied * norms)[active].sum())
        if spent > 0:
            applied = applied * (float(norms[active].mean()) / spent)
    vector = applied.to(deltas) @ deltas
    if shared is not None:
        vector = torch.where(shared, vector, deltas.sum(0))
    total = float(applied.sum())
    # Weights of either sign may cancel; then they stay as they are.
    total = total if total > 0 else 1.0
    return Direction(
        vector=vector,
        weights=applied / total,
        scale=total,
        norm_squared=max(float(applied @ gram @ applied), 0.0),
        gap=proof.gap,
        min_cosine=proof.min_cosine,
        stationary=proof.stationary,
    )


def _rows_for_the_rule(norms: Tensor, normalize: Normalize, protected: Tensor | None) -> Tensor:
    """Which rows `[S]` enter the rule: all, but when normalising those of length zero stay out.

    No `c_s` makes a zero vector longer: it would be the shortest of the hull, and the remedy would
    fail just when an objective is solved exactly. Nothing can hurt it, to first order.
    """
    everyone = torch.ones_like(norms, dtype=torch.bool)
    if normalize == "none":
        return everyone
    moving = norms > 0
    pulling = moving if protected is None else moving & ~protected
    return moving if bool(pulling.any()) else everyone


def _checked(weights: Tensor, size: int, rule: Rule) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float64).cpu()
    if weights.shape != (size,) or not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"the rule {rule!r} returned {weights.tolist()} for {size} objectives. "
            f"A rule must return {size} finite weights."
        )
    return weights


def step(x: Tensor, direction: Tensor, lr: float, round: int) -> Tensor:
    """`x − lr · direction` as a new vector, refused where it is not finite."""
    moved = torch.add(x, direction, alpha=-lr)
    if not all_finite(moved):
        raise RefusedError(
            f"round {round}: a direction of length {squared_norm(direction) ** 0.5:g} times "
            f"`server_lr` {lr:g} gives parameters that are not finite. The model stays what it was "
            "before this round; take smaller steps."
        )
    return moved
