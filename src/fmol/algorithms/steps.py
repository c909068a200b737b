"""The server's step: what it makes of the updates before the rule, and of the direction after it.

Before the rule, each objective by itself: its update stretched (FedExP) and smoothed over the rounds.
What a rule promises, it keeps for the vectors it is given: stretched ones point as before, smoothed
ones need not. After the rule, a `ServerStep` turns the direction into what is applied; momentum and
Adam promise nothing for this round's objectives, and the report says what became of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor

from fmol.aggregate import Means
from fmol.algorithms.descent import Angles, measure_angles
from fmol.algorithms.missing import Rows
from fmol.layout import Layout
from fmol.options import Positive, Range, check_options

__all__ = [
    "Adam",
    "Momentum",
    "Plain",
    "Pulls",
    "ServerStep",
    "Units",
    "apply_step",
    "least_cosine",
    "prepare",
    "room_for_momenta",
    "room_for_step",
    "stretch",
    "stretch_units",
    "units_of",
]

STEP = "step."
"""Before the names of what a server's step keeps in the state's memory."""
MOMENTA = "objective_momentum"
"""The name under which the smoothed update of each objective is kept, `[S, d]`."""


class ServerStep(Protocol):
    """What the server makes of a direction `[d]` before `x` moves along it.

    State in, state out: `memory` is what it kept in the last round that moved, and what it gives back
    goes into checkpoints. A round that leaves `x` as it is does not call it.

    >>> step: ServerStep = Momentum(beta=0.5)
    >>> sorted(step.start(torch.zeros(3)))
    ['m']
    """

    def start(self, x: Tensor, /) -> dict[str, Tensor]:
        """What it keeps before the first round."""

    def __call__(
        self, direction: Tensor, memory: Mapping[str, Tensor], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is applied, `[d]`, and what is kept."""


@dataclass(frozen=True)
class Plain:
    """The direction as it is: the paper's step. Common descent is the rule's.

    >>> Plain()(torch.tensor([1.0, 2.0]), {})
    (tensor([1., 2.]), {})
    """

    def start(self, x: Tensor, /) -> dict[str, Tensor]:
        return {}

    def __call__(
        self, direction: Tensor, memory: Mapping[str, Tensor], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return direction, {}


@dataclass(frozen=True)
class Momentum:
    """`m ← β m + d`, and `m` is applied: a step up to `1/(1 − β)` times as long.

    Common descent: not kept. Old directions may point against an objective of today; the report's
    `step_min_cosine` says when they do. `objective_momentum` smooths before the rule instead.

    >>> step = Momentum(beta=0.5)
    >>> once, kept = step(torch.tensor([1.0]), step.start(torch.zeros(1)))
    >>> step(torch.tensor([1.0]), kept)[0]
    tensor([1.5000])
    """

    beta: Annotated[float, Range(least=0, below=1)] = 0.5
    """How much of the last step is in the next; 0 is the plain step."""

    def __post_init__(self) -> None:
        check_options(self)

    def start(self, x: Tensor, /) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(x)}

    def __call__(
        self, direction: Tensor, memory: Mapping[str, Tensor], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        m = torch.add(direction, memory["m"], alpha=self.beta)
        return m, {"m": m}


@dataclass(frozen=True)
class Adam:
    """`m ← β₁m + (1 − β₁)d`, `v ← β₂v + (1 − β₂)d²`, and `m/(√v + τ)` is applied (FedOpt's FedAdam).

    As there, without a correction of the start, and `v` begins at `τ²`. Every parameter moves by about
    `server_lr` a round, so that wants to be far smaller than for the other steps, as 0.01. Common
    descent: not kept, not even with β₁ = 0, since parameters are scaled one by one.

    >>> step = Adam()
    >>> applied, kept = step(torch.tensor([1.0, -2.0]), step.start(torch.zeros(2)))
    >>> applied
    tensor([ 0.9901, -0.9950])
    """

    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """How much of the last mean of directions is in the next."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.99
    """The same of their squares."""
    tau: Positive = 1e-3
    """Added to the root of the squares: how small a direction still counts as one."""

    def __post_init__(self) -> None:
        check_options(self)

    def start(self, x: Tensor, /) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(x), "v": torch.full_like(x, self.tau**2)}

    def __call__(
        self, direction: Tensor, memory: Mapping[str, Tensor], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        m = torch.lerp(direction, memory["m"], self.beta1)
        v = torch.lerp(direction.square(), memory["v"], self.beta2)
        return m / (v.sqrt() + self.tau), {"m": m, "v": v}


def room_for_step(step: ServerStep, x: Tensor) -> dict[str, Tensor]:
    """What the step keeps before the first round, by its names in the state's memory."""
    return {f"{STEP}{name}": tensor for name, tensor in step.start(x).items()}


def apply_step(
    step: ServerStep, direction: Tensor, memory: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the step makes of `direction`, `[d]`, and what it keeps, by its names in the memory."""
    own = {k.removeprefix(STEP): v for k, v in memory.items() if k.startswith(STEP)}
    vector, kept = step(direction, own)
    return vector, {f"{STEP}{name}": tensor for name, tensor in kept.items()}


# ---- before the rule -------------------------------------------------------------------------


def stretch(spread: float, cap: float) -> float:
    """`e_s = clip(ρ_s/2, 1, cap)`: how much longer a mean may be taken whose clients disagree.

    FedExP, for one objective: far from a solution that all share, the mean of updates that point
    different ways is shorter than the way that is safe to go.

    >>> stretch(1.0, cap=10), stretch(8.0, cap=10), stretch(float("inf"), cap=10)
    (1.0, 4.0, 10.0)
    """
    return float(min(max(spread / 2, 1.0), cap))


def units_of(means: Means, layout: Layout | None) -> Units | None:
    """What the fold found of every unit, where it was asked to."""
    if layout is None or means.unit_squares is None:
        return None
    return Units(means.slots, means.unit_squares, layout)


def stretch_units(
    deltas: Tensor, unit_squares: Tensor, layout: Layout, cap: float
) -> tuple[Tensor, list[float]]:
    """Means `[n, d]` with each unit stretched by its own factor, and how much longer each became.

    `unit_squares` `[n, U]` are the means of the clients' squared lengths. Along a unit that all
    clients move alike nothing is gained, and with one factor for all it would be overshot; one that
    few of them move is diluted by the others in the mean.

    >>> layout = Layout(("w",), ((2, 2),), (torch.float32,))
    >>> deltas, squares = torch.tensor([[1.0, 0.0, 2.0, 0.0]]), torch.tensor([[1.0, 24.0]])
    >>> stretch_units(deltas, squares.double(), layout, cap=10.0)[0]
    tensor([[1., 0., 6., 0.]])
    """
    own = layout.unit_squares(deltas)
    spread = torch.where(own > 0, unit_squares / own, 1.0)
    factors = (spread / 2).clamp(1.0, cap)
    stretched = deltas * layout.over_units(factors).to(deltas)
    before, after = own.sum(1), (own * factors.square()).sum(1)
    longer = torch.where(before > 0, (after / before).sqrt(), 1.0)
    return stretched, longer.tolist()


@dataclass(frozen=True)
class Pulls:
    """The vectors that a rule is given, `[len(names), d]`, and how they came to be."""

    deltas: Tensor
    angles: Angles
    factors: Mapping[str, float]
    """e_s of the objectives, where updates are stretched: how many times as long they became."""
    memory: Mapping[str, Tensor]
    """What is kept of them, by its names in the state's memory."""


@dataclass(frozen=True)
class Units:
    """The means of the clients' squared lengths, unit by unit: `squares` `[len(slots), U]`."""

    slots: tuple[str, ...]
    squares: Tensor
    layout: Layout


def room_for_momenta(beta: float, objectives: int, x: Tensor) -> dict[str, Tensor]:
    """Memory for the smoothed update of each objective, where they are smoothed."""
    if not beta:
        return {}
    return {MOMENTA: torch.zeros(objectives, x.numel(), dtype=x.dtype, device=x.device)}


def prepare(
    rows: Rows,
    angles: Angles,
    names: Sequence[str],
    *,
    cap: float | None,
    beta: float,
    spread: Mapping[str, float],
    shared: Tensor | None = None,
    units: Units | None = None,
) -> Pulls:
    """The round's updates, stretched up to `cap` (None: not at all) and smoothed with `beta`.

    With `units` each unit of an update has a factor of its own.
    Smoothed is `m_s ← β m_s + e_s Δ_s`. An objective without an update keeps its `m_s` for when it is
    back; one whose old update stands in is neither stretched nor added again: its `m_s` stands in.
    """
    deltas, kept = rows.deltas, {}
    factors = {}
    if cap is not None and units is not None:
        fresh_rows = [i for i, name in enumerate(rows.names) if name not in rows.reused]
        factors = dict.fromkeys(rows.names, 1.0)
        if fresh_rows:
            deltas = deltas.clone()
            mine = units.squares[[units.slots.index(rows.names[i]) for i in fresh_rows]]
            deltas[fresh_rows], longer = stretch_units(deltas[fresh_rows], mine, units.layout, cap)
            factors |= {rows.names[i]: by for i, by in zip(fresh_rows, longer, strict=True)}
            angles = measure_angles(deltas, shared)
    elif cap is not None:
        factors = {n: 1.0 if n in rows.reused else stretch(spread[n], cap) for n in rows.names}
        each = torch.tensor([factors[name] for name in rows.names], dtype=torch.float64)
        if bool((each != 1).any()):
            deltas = deltas * each.to(deltas)[:, None]
            gram = angles.gramian * each[:, None] * each[None, :]
            angles = replace(angles, gramian=gram, norms=angles.norms * each)
    if beta:
        where = [names.index(name) for name in rows.names]
        before = rows.memory[MOMENTA]
        fresh = torch.tensor([name not in rows.reused for name in rows.names]).to(before.device)
        smoothed = torch.add(deltas, before[where], alpha=beta)
        deltas = torch.where(fresh[:, None], smoothed, before[where])
        momenta = before.clone()  # The state before this round stays what it was.
        momenta[where] = deltas
        kept[MOMENTA] = momenta
        angles = measure_angles(deltas, shared)
    return Pulls(deltas, angles, factors, kept)


def least_cosine(products: Tensor, norms: Tensor, length: float) -> float:
    """`min_s cos(Δ_s, v)` from `⟨Δ_s, v⟩` `[S]`, the lengths `‖Δ_s‖` `[S]` and `‖v‖`.

    An update of zero has no angle, and nothing can hurt it. NaN where nothing has one.

    >>> round(least_cosine(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), 2**0.5), 3)
    0.707
    """
    lengths = norms * length
    cosines = (products.double() / lengths)[lengths > 0].clamp(-1, 1)
    return float(cosines.min()) if len(cosines) else float("nan")
