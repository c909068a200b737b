"""Quadratic bowls in closed form: how strongly objectives conflict, and on what scales, are dials."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fmol.federation import Client, Federation
from fmol.minnorm import min_norm
from fmol.objectives import Objective
from fmol.options import Count, NotNegative, Range, check_options
from fmol.partition import all_objectives, one_each, random_subsets
from fmol.rng import stream

__all__ = [
    "Assignment",
    "Bowl",
    "Point",
    "Quadratic",
    "angle_problems",
    "batch_share",
    "deal_objectives",
    "directions",
    "rotation",
]

Assignment = Literal["all", "one-each", "subsets"]


class Point(nn.Module):
    """A model that is nothing but its parameters `x` `[d]`: every sample is answered with them."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.expand(len(inputs), -1)


@dataclass(frozen=True, eq=False)
class Bowl:
    """The loss of objective `s`, `½ (x − c)ᵀ H (x − c)`, with samples that scatter around `c`.

    Sample `i` has its centre at `c + e_i` and, as its loss, the bowl around that centre less the
    constant `½ e_iᵀ H e_i`. So the mean over samples whose `e_i` sum to zero is the bowl around `c`
    itself, in value and in gradient. A single sample's loss may be negative; that mean is not.
    """

    index: int
    # Out of the repr: `torch.func` names what it maps over by it, every time.
    centre: Tensor = field(repr=False)
    hessian: Tensor = field(repr=False)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # To where the outputs are: a loss is not moved to a device as models and data are.
        centre, hessian = self.centre.to(outputs.device), self.hessian.to(outputs.device)
        away = outputs - centre
        scatter = targets[:, self.index] - centre
        return ((0.5 * away - scatter) @ hessian * away).sum(1)


@dataclass(frozen=True, kw_only=True)
class Quadratic:
    """`S` bowls `f_s(x) = ½ (x − c_s)ᵀ H_s (x − c_s)` whose Pareto set is known.

    Training starts at zero. There each objective pulls (`−∇f_s`) with a force equal to its scale, and
    any two pulls enclose `angle`. The scales fall geometrically from 1, the first objective's, to
    `1/scale_ratio`; the eigenvalues of each `H_s` from its scale to `1/curvature` of it, along axes
    of its own. So no curvature exceeds 1, and full gradient steps below 2 are stable.

    >>> problem = Quadratic(objectives=3, dimension=5, angle=60)
    >>> problem.build()
    Federation(Point with 5 trainable parameters, 3 objectives, 10 clients)
    >>> round(problem.pareto_distance(torch.zeros(5)), 6)  # √((1 + 2 cos 60°)/3)
    0.816497
    """

    objectives: Count = 2
    """S, how many objectives there are."""
    dimension: Count = 10
    """d, the length of x."""
    angle: NotNegative = 90.0
    """Degrees between any two objectives' pulls at the start; the larger, the more they conflict."""
    scale_ratio: Annotated[float, Range(least=1)] = 1.0
    """The largest objective's scale divided by the smallest's."""
    curvature: Annotated[float, Range(least=1)] = 1.0
    """The condition number of every bowl; 1 is a sphere."""
    clients: Count = 10
    """M, how many clients there are."""
    samples: Count = 32
    """Samples of each client."""
    noise: NotNegative = 0.1
    """The standard deviation, in each coordinate, of a client's samples around its centres."""
    heterogeneity: NotNegative = 0.0
    """The standard deviation, in each coordinate, of clients' centres around the objectives'."""
    assignment: Assignment = "all"
    """Who holds what: everyone everything, one objective a client in turn, or random subsets."""
    seed: int = 0
    """Decides the bowls' axes, the samples and the subsets."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 60,
        "local_steps": 5,
        "batch_size": 16,
        "local_lr": 0.1,
        "server_lr": 0.1,
    }
    """What to train it with, where nothing else is said."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        return _joint_problems(self)

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation. No files are needed: `data_dir` is there as with every problem."""
        width = len(str(self.clients - 1))
        clients = [
            Client(f"client-{i:0{width}d}", self._samples(i), held)
            for i, held in enumerate(self._holdings)
        ]
        objectives = [
            Objective(name, Bowl(s, self.centres[s], self.hessians[s]))
            for s, name in enumerate(self.names)
        ]
        return Federation(Point(self.start), objectives, clients)

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives' names, `f1`, `f2`, … in the order of every `[S]` here."""
        return tuple(f"f{s + 1}" for s in range(self.objectives))

    @property
    def start(self) -> Tensor:
        """Where training starts, `[d]`."""
        return torch.zeros(self.dimension, dtype=torch.float64)

    @cached_property
    def scales(self) -> Tensor:
        """The objectives' scales, the largest eigenvalues of the `H_s`, `[S]`."""
        steps = torch.arange(self.objectives, dtype=torch.float64) / max(1, self.objectives - 1)
        return torch.pow(float(self.scale_ratio), -steps)

    @property
    def smoothness(self) -> float:
        """L, the largest curvature of any objective, at any client too."""
        return float(self.scales.max())

    @property
    def convexity(self) -> float:
        """μ, the smallest curvature of any objective."""
        return float(self.scales.min() * self._eigenvalues.min())

    def gradient_bound(self, radius: float) -> float:
        """G: no client's `‖∇f_{s,i}(x)‖` is larger within `radius` of the start."""
        own = self.centres + self._offsets  # [M, S, d]
        at_start = torch.einsum("sij,msj->msi", self.hessians, self.start - own)
        return float((at_start.norm(dim=2) + self.scales * radius).max())

    def gradient_variance(self, batch_size: int) -> float:
        """The largest `E‖∇f_{s,i}(x, ξ) − ∇f_{s,i}(x)‖²` with batches of that size, at any `x`."""
        largest = 0.0
        for client in range(self.clients):
            noise = torch.einsum("sij,nsj->nsi", self.hessians, self._scatter(client))
            largest = max(largest, float(noise.square().sum(2).mean(0).max()))
        return largest * batch_share(batch_size, self.samples)

    @cached_property
    def hessians(self) -> Tensor:
        """The matrices `H_s`, `[S, d, d]`."""
        shapes = []
        for s in range(self.objectives):
            axes = rotation(self.dimension, self.seed, "axes", s)
            shapes.append(axes * self._eigenvalues @ axes.T)
        return self.scales[:, None, None] * torch.stack(shapes)

    @cached_property
    def centres(self) -> Tensor:
        """Each objective's own minimiser `c_s`, where it is zero, `[S, d]`."""
        towards = directions(self.objectives, self.dimension, self.angle, self.seed)
        pulls = self.scales[:, None] * towards
        away: Tensor = torch.linalg.solve(self.hessians, pulls)
        return self.start + away

    def losses(self, x: Tensor) -> Tensor:
        """Every `f_s(x)`, `[S]`."""
        away = x.detach().cpu().double() - self.centres
        return 0.5 * torch.einsum("si,sij,sj->s", away, self.hessians, away)

    def gradients(self, x: Tensor) -> Tensor:
        """Every `∇f_s(x)`, `[S, d]`."""
        away = x.detach().cpu().double() - self.centres
        return torch.einsum("sij,sj->si", self.hessians, away)

    def stationarity(self, x: Tensor) -> float:
        """`‖Σ_s λ_s ∇f_s(x)‖²` with min-norm λ: zero exactly where `x` is Pareto optimal."""
        gradients = self.gradients(x)
        weights = min_norm(gradients @ gradients.T).weights
        return float((weights @ gradients).square().sum())

    def pareto_distance(self, x: Tensor) -> float:
        """How far `x` is from the Pareto set, which for spheres is the convex hull of the centres."""
        if self.curvature != 1:
            raise ValueError(
                f"the Pareto set has no closed form for `curvature` {self.curvature}. Use "
                "`stationarity(x)`, which is zero on it, or set `curvature` to 1."
            )
        away = self.centres - x.detach().cpu().double()
        weights = min_norm(away @ away.T).weights
        return float((weights @ away).norm())

    def pareto_point(self, weights: Sequence[float] | Tensor | None = None) -> Tensor:
        """The minimiser of `Σ_s λ_s f_s`, `[d]`, a Pareto optimum if all λ are positive.

        `weights` are λ `[S]`, of which only the ratios matter; left out, all are the same.

        >>> problem = Quadratic()
        >>> bool(torch.allclose(problem.pareto_point(), problem.centres.mean(0)))
        True
        """
        given = [1.0] * self.objectives if weights is None else weights
        shares = torch.as_tensor(given, dtype=torch.float64)
        wrong = shares.shape != (self.objectives,) or not bool(shares.isfinite().all())
        if wrong or bool((shares < 0).any()) or float(shares.sum()) <= 0:
            raise ValueError(
                f"`weights` must be {self.objectives} numbers that are not negative nor all zero, "
                f"got {shares.tolist()}. Give one per objective."
            )
        weighted = shares[:, None, None] / shares.sum() * self.hessians
        pull = torch.einsum("sij,sj->i", weighted, self.centres)
        point: Tensor = torch.linalg.solve(weighted.sum(0), pull)
        return point

    def optimum(self, weights: Sequence[float] | Tensor | None = None) -> dict[str, float]:
        """The losses at `pareto_point(weights)` by name, as `fit(optimum=…)` takes them."""
        values = self.losses(self.pareto_point(weights)).tolist()
        return dict(zip(self.names, values, strict=True))

    @property
    def _eigenvalues(self) -> Tensor:
        """From 1 to `1/curvature`, `[d]`; with one dimension there is nothing to be narrow in."""
        steps = torch.arange(self.dimension, dtype=torch.float64) / max(1, self.dimension - 1)
        return torch.pow(float(self.curvature), -steps)

    @cached_property
    def _holdings(self) -> list[tuple[str, ...]]:
        return deal_objectives(self.assignment, self.names, self.clients, self.seed)

    @cached_property
    def _offsets(self) -> Tensor:
        """Clients' centres less the objectives', `[M, S, d]`; over an objective's holders zero."""
        shape = (self.clients, self.objectives, self.dimension)
        generator = stream(self.seed, "problem", "heterogeneity")
        offsets = torch.from_numpy(self.heterogeneity * generator.standard_normal(shape))
        for s, name in enumerate(self.names):
            holders = torch.tensor([name in held for held in self._holdings])
            # Less their mean: clients differ, and what they have in common is the bowl around `c_s`.
            offsets[holders, s] -= offsets[holders, s].mean(0)
        return offsets

    def _scatter(self, client: int) -> Tensor:
        """The samples' centres less their client's, `[n, S, d]`."""
        generator = stream(self.seed, "problem", "scatter", client)
        shape = (self.samples, self.objectives, self.dimension)
        scatter = torch.from_numpy(self.noise * generator.standard_normal(shape))
        # Less their mean: so every client's objectives are exactly its own, and only batches are not.
        return scatter - scatter.mean(0)

    def _samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Inputs that say nothing `[n, 1]`, and the samples' centres `[n, S, d]`."""
        targets = self.centres + self._offsets[client] + self._scatter(client)
        return torch.zeros(self.samples, 1, dtype=torch.float64), targets


def batch_share(batch_size: int, samples: int) -> float:
    """The variance of a batch's mean as a share of a sample's, drawn without replacement from all."""
    if batch_size >= samples:
        return 0.0
    return (samples - batch_size) / (batch_size * (samples - 1))


def deal_objectives(
    assignment: Assignment, names: Sequence[str], clients: int, seed: int
) -> list[tuple[str, ...]]:
    """Who holds what, client by client."""
    if assignment == "all":
        return all_objectives(names, clients)
    if assignment == "one-each":
        return one_each(names, clients)
    return random_subsets(names, clients, size=(1, len(names)), seed=seed)


def rotation(dimension: int, seed: int, *name: str | int) -> Tensor:
    """A random orthogonal matrix `[d, d]`."""
    gaussian = stream(seed, "problem", *name).standard_normal((dimension, dimension))
    return torch.from_numpy(np.linalg.qr(gaussian)[0])


def directions(objectives: int, dimension: int, angle: float, seed: int) -> Tensor:
    """Unit vectors `[S, d]`, any two of which enclose `angle` degrees."""
    cosine = math.cos(math.radians(angle))
    gram = torch.full((objectives, objectives), cosine, dtype=torch.float64).fill_diagonal_(1.0)
    # Ascending, so the last columns carry it; those cut off where d < S are zero, as was checked.
    values, vectors = torch.linalg.eigh(gram)
    rows = (vectors * values.clamp(min=0).sqrt())[:, -dimension:]
    rows = rows / rows.norm(dim=1, keepdim=True)
    padded = torch.nn.functional.pad(rows, (0, dimension - rows.shape[1]))
    return padded @ rotation(dimension, seed, "directions").T


def angle_problems(objectives: int, dimension: int, angle: float) -> list[str]:
    """Why so many directions at this angle do not fit into so few dimensions."""
    S, problems = objectives, []
    widest = math.degrees(math.acos(-1 / (S - 1))) if S > 1 else 180.0
    if angle > widest + 1e-9:
        problems.append(
            f"`angle` must be at most {widest:g} for {S} objectives (more cannot lie between any two "
            f"of them), got {angle}."
        )
    # At its widest the directions cancel, and at zero they are one: then fewer dimensions hold them.
    flat = angle > widest - 1e-6
    needed = 1 if angle == 0 or S == 1 else S - 1 if flat else S
    if dimension < needed:
        problems.append(
            f"`dimension` must be at least {needed} for {S} objectives at this `angle`, got "
            f"{dimension}."
        )
    return problems


def _joint_problems(problem: Quadratic) -> list[str]:
    """What is wrong with options that are right by themselves."""
    S = problem.objectives
    problems = angle_problems(S, problem.dimension, problem.angle)
    if problem.assignment == "one-each" and problem.clients < S:
        problems.append(
            f'`clients` must be at least {S} with `assignment` "one-each", got {problem.clients}.'
        )
    if problem.noise > 0 and problem.samples == 1:
        problems.append(
            f"`noise` must be 0 with one sample a client, which is its own mean, got {problem.noise}."
        )
    return problems
