"""How far a given model is from a point where no step helps every objective any more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fmol.aggregate import Weighting, gramian
from fmol.engines import EngineFactory, make_engine
from fmol.engines.seam import Engine
from fmol.errors import FmolError
from fmol.federation import Federation
from fmol.measurement import choose_panel, measure_gradients
from fmol.minnorm import NOISE, min_norm
from fmol.training import read_vector

__all__ = ["Stationarity", "measure_stationarity", "stationarity"]

MOST_NAMED = 6
"""Objectives that are told one by one; of more, the largest weights."""


@dataclass(frozen=True, eq=False)
class Stationarity:
    """What the true gradients of all objectives at one model say about trade-offs from there.

    Two numbers are free of the losses' common unit, and both are zero where the model is Pareto
    stationary, one at the most. `relative` shrinks as training comes to rest, and also where one
    objective alone is solved. `common_cosine` looks at angles only, so an objective's own unit does not
    matter either: some step makes at least that cosine with every objective's descent.
    """

    objectives: tuple[str, ...]
    """Those that have a gradient, in the order of every `[S]` here."""
    norm_squared: float
    """`‖d*‖²`, the squared length of the shortest convex combination of the gradients."""
    relative: float
    """`‖d*‖` divided by the mean length of the gradients; 0 where all of those are zero."""
    common_cosine: float
    """The largest cosine one direction can have with all gradients that are not zero, to rounding."""
    weights: Tensor
    """λ of that combination `[S]`, float64."""
    gap: float
    """The certificate: `(‖d*‖² − ⟨∇f_s, d*⟩)/‖d*‖²` at the worst, zero to rounding."""
    stationary: bool
    """Whether `‖d*‖` is zero as far as gradients of this precision can tell."""
    norms: Tensor
    """`‖∇f_s‖` `[S]`, float64."""
    cosines: Tensor
    """Between gradients `[S, S]`, float64; NaN beside one that is zero."""
    gramian: Tensor
    """Of the gradients `[S, S]`, float64."""
    missing: tuple[str, ...]
    """Objectives for which nobody has a label, and so no gradient."""
    measured: str
    """Over whom, in words."""

    def __str__(self) -> str:
        pairs = list(zip(self.objectives, self.weights.tolist(), self.norms.tolist(), strict=True))
        shown = sorted(pairs, key=lambda each: -each[1])[:MOST_NAMED]
        shown = pairs if len(pairs) <= MOST_NAMED else shown
        lines = [
            f"‖d*‖² {self.norm_squared:.4g}, ‖d*‖ is {self.relative:.2%} of the mean gradient, over "
            f"{self.measured}",
            "stationary: no step helps every objective, to rounding"
            if self.stationary
            else f"one step helps every objective: cosine {self.common_cosine:.3g} with each descent",
            "λ        " + "  ".join(f"{name} {weight:.3g}" for name, weight, _ in shown),
            "length   " + "  ".join(f"{name} {norm:.3g}" for name, _, norm in shown),
        ]
        if len(pairs) > len(shown):
            lines.append(f"         and {len(pairs) - len(shown)} objectives of less weight")
        if len(self.objectives) > 1:
            lowest = self.cosines.nan_to_num(nan=2.0).fill_diagonal_(2.0)
            i, j = divmod(int(lowest.argmin()), len(self.objectives))
            if float(lowest[i, j]) <= 1:
                lines.append(
                    f"furthest apart: {self.objectives[i]} and {self.objectives[j]}, cosine "
                    f"{round(float(lowest[i, j]), 3) + 0.0:g}"
                )
        if self.missing:
            lines.append(f"no gradient for {', '.join(self.missing)}")
        return "\n".join(lines)


def stationarity(
    federation: Federation,
    model: nn.Module | Mapping[str, Tensor] | Tensor | None = None,
    *,
    engine: str | EngineFactory = "sequential",
    device: str | torch.device = "auto",
    weighting: Weighting = "uniform",
    evaluate: str | int | None = None,
    seed: int = 0,
) -> Stationarity:
    """How far `model` is from Pareto stationarity, with true gradients over all of the clients' data.

    `model` is a module of the federation's architecture, a state dict or a vector `[d]`; left out, the
    federation's own. `evaluate` says over whom, as in `fit`: all clients up to 1000, a fixed random
    subset of that many drawn with `seed`. `weighting` is what `f_s` is the mean of.

    >>> from fmol.problems.quadratic import Quadratic
    >>> problem = Quadratic()
    >>> there = stationarity(problem.build(), problem.pareto_point([0.3, 0.7]))
    >>> there.stationary, [round(each, 3) for each in there.weights.tolist()]
    (True, [0.3, 0.7])
    >>> print(stationarity(problem.build()))
    ‖d*‖² 0.5, ‖d*‖ is 70.71% of the mean gradient, over all 10 clients
    one step helps every objective: cosine 0.707 with each descent
    λ        f1 0.5  f2 0.5
    length   f1 1  f2 1
    furthest apart: f1 and f2, cosine 0
    """
    x = read_vector(federation, model, "model")
    machine = make_engine(engine, federation, seed=seed, device=device)
    try:
        return measure_stationarity(machine, x, weighting, evaluate, seed)
    finally:
        machine.close()


def measure_stationarity(
    engine: Engine,
    x: Tensor,
    weighting: Weighting,
    evaluate: str | int | None = None,
    seed: int = 0,
) -> Stationarity:
    """The same at `x` `[d]`, with an engine that is there already."""
    federation = engine.federation
    who, words = choose_panel(federation, seed, evaluate)
    if who is None:
        raise ValueError(
            "`evaluate` is the cohort, and a model by itself has none. Give 'all' or a number of "
            "clients."
        )
    gradients, receipt = measure_gradients(engine, sorted(who), x.to(engine.device), weighting)
    if not gradients.slots:
        why = f", the first: {receipt.refused[0]}" if receipt.refused else ""
        raise FmolError(f"no client gave a gradient at this model{why}. Look at its parameters.")
    return _described(gramian(gradients.deltas), gradients.slots, federation.names, words)


def _described(
    gram: Tensor, present: tuple[str, ...], names: tuple[str, ...], measured: str
) -> Stationarity:
    solution = min_norm(gram)
    norms = gram.diagonal().clamp(min=0).sqrt()
    lengths = norms[:, None] * norms[None, :]
    cosines = torch.where(lengths > 0, gram / lengths, torch.nan).clamp(-1, 1)
    # Beside the others a gradient that is solved is rounding, and points nowhere.
    moving = norms > (NOISE * len(norms)) ** 0.5 * float(norms.max())
    # The shortest vector in the hull of unit vectors is as long as the best cosine with all of them.
    angles = min_norm(cosines[moving][:, moving]).norm_squared if bool(moving.any()) else 0.0
    mean = float(norms.mean())
    relative = solution.norm_squared**0.5 / mean if mean > 0 else 0.0
    return Stationarity(
        objectives=present,
        norm_squared=solution.norm_squared,
        relative=relative,
        common_cosine=angles**0.5,
        weights=solution.weights,
        gap=solution.gap,
        stationary=solution.stationary or relative**2 <= NOISE * len(norms),
        norms=norms,
        cosines=cosines,
        gramian=gram,
        missing=tuple(name for name in names if name not in present),
        measured=measured,
    )
