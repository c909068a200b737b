"""Sums of waves: smooth, bounded and not convex, with every constant of the theorems in closed form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmol.federation import Client, Federation
from fmol.minnorm import min_norm
from fmol.objectives import Objective
from fmol.options import Count, NotNegative, check_options
from fmol.problems.quadratic import (
    Assignment,
    Point,
    angle_problems,
    batch_share,
    deal_objectives,
    directions,
    rotation,
)
from fmol.rng import stream

__all__ = ["Wave", "Waves"]


@dataclass(frozen=True, eq=False, repr=False)
class Wave:
    """The loss of objective `s`: `Σ_j (1 − cos(⟨q_j, x⟩ − θ_j))`, with a sample's phases `θ` `[d]`."""

    index: int
    axes: Tensor
    """The directions `q_j`, orthonormal columns `[d, d]`."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # To where the outputs are: a loss is not moved to a device as models and data are.
        along = outputs @ self.axes.to(outputs.device)
        return (1 - torch.cos(along - targets[:, self.index])).sum(1)

    def __repr__(self) -> str:
        return f"Wave({self.index})"


@dataclass(frozen=True, kw_only=True)
class Waves:
    """`S` sums of waves along axes of their own: smooth, bounded and not convex.

    Sample `i` of a client has a phase `θ_ij` for each of the `d` axes `q_j` of an objective, and the
    loss `Σ_j (1 − cos(⟨q_j, x⟩ − θ_ij))`. A mean of such waves is one wave: with
    `R_j e^{iφ_j} = mean_i e^{iθ_ij}` over a client's samples, or over all clients' means,

        f_s(x) = Σ_j (1 − R_j cos(⟨q_j, x⟩ − φ_j)).

    So its infimum, its gradients, their bounds and the noise of batches are known exactly, although
    clients differ in phase and in curvature. Training starts at zero; the objectives' minima lie
    around points at `distance` from there, any two of which enclose `angle`.

    >>> problem = Waves(objectives=3)
    >>> problem.build()
    Federation(Point with 10 trainable parameters, 3 objectives, 10 clients)
    >>> bool((problem.losses(problem.start) > problem.infimum).all())
    True
    """

    objectives: Count = 2
    """S, how many objectives there are."""
    dimension: Count = 10
    """d, the length of x."""
    angle: NotNegative = 90.0
    """Degrees between any two objectives' minima, seen from the start."""
    distance: NotNegative = 4.0
    """How far from the start the objectives' minima are; beyond π/2 along an axis it is not convex."""
    clients: Count = 10
    """M, how many clients there are."""
    samples: Count = 64
    """Samples of each client."""
    noise: NotNegative = 0.5
    """The standard deviation of the phases of a client's samples around its own, in radians."""
    heterogeneity: NotNegative = 0.5
    """The standard deviation of clients' phases around the objectives', in radians."""
    assignment: Assignment = "all"
    """Who holds what: everyone everything, one objective a client in turn, or random subsets."""
    seed: int = 0
    """Decides the axes, the phases and the subsets."""

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
        problems = angle_problems(self.objectives, self.dimension, self.angle)
        if self.assignment == "one-each" and self.clients < self.objectives:
            problems.append(
                f'`clients` must be at least {self.objectives} with `assignment` "one-each", got '
                f"{self.clients}."
            )
        return problems

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation. No files are needed: `data_dir` is there as with every problem."""
        width = len(str(self.clients - 1))
        inputs = torch.zeros(self.samples, 1, dtype=torch.float64)
        clients = [
            Client(f"client-{i:0{width}d}", (inputs, self._phases[i]), held)
            for i, held in enumerate(self._holdings)
        ]
        objectives = [Objective(name, Wave(s, self.axes[s])) for s, name in enumerate(self.names)]
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
    def axes(self) -> Tensor:
        """The directions of the waves as columns, `[S, d, d]`."""
        each = [rotation(self.dimension, self.seed, "axes", s) for s in range(self.objectives)]
        return torch.stack(each)

    def losses(self, x: Tensor) -> Tensor:
        """Every `f_s(x)`, `[S]`."""
        away = self._along(x) - self._mean.angle()
        return (1 - self._mean.abs() * torch.cos(away)).sum(1)

    def gradients(self, x: Tensor) -> Tensor:
        """Every `∇f_s(x)`, `[S, d]`."""
        away = self._along(x) - self._mean.angle()
        return torch.einsum("sij,sj->si", self.axes, self._mean.abs() * torch.sin(away))

    def stationarity(self, x: Tensor) -> float:
        """`‖Σ_s λ_s ∇f_s(x)‖²` with min-norm λ: zero exactly where `x` is Pareto stationary."""
        gradients = self.gradients(x)
        weights = min_norm(gradients @ gradients.T).weights
        return float((weights @ gradients).square().sum())

    @property
    def infimum(self) -> Tensor:
        """The least value of every `f_s`, `[S]`, taken at `minima`."""
        return (1 - self._mean.abs()).sum(1)

    @property
    def minima(self) -> Tensor:
        """For each objective a point where it is least, `[S, d]`; others are 2π off along an axis."""
        return torch.einsum("sij,sj->si", self.axes, self._mean.angle())

    @property
    def smoothness(self) -> float:
        """L, the largest curvature of any client's objective; at most 1."""
        return float(self._held(self._client_means.abs().amax(2)).max())

    @property
    def gradient_bound(self) -> float:
        """G, the largest `‖∇f_{s,i}(x)‖` of any client and objective, at any `x`."""
        return float(self._held(self._client_means.abs().square().sum(2)).max().sqrt())

    @property
    def stochastic_gradient_bound(self) -> float:
        """D: `E‖∇f_{s,i}(x, ξ)‖²` is at most `D²` for a sample, and so for a batch, at any `x`."""
        # sin² a = ½ (1 − cos 2a), and the mean of cos 2a is a wave as well.
        squares = 0.5 * (1 + self._doubled_means.abs()).sum(2)
        return float(self._held(squares).max().sqrt())

    def gradient_variance(self, batch_size: int) -> float:
        """The largest `E‖∇f_{s,i}(x, ξ) − ∇f_{s,i}(x)‖²` with batches of that size, at any `x`."""
        means, doubled = self._client_means, self._doubled_means
        # Per axis the mean of sin² less the square of the mean, again a wave plus a constant.
        axis = 0.5 * (1 - means.abs().square() + (doubled - means.square()).abs())
        return float(self._held(axis.sum(2)).max()) * batch_share(batch_size, self.samples)

    @cached_property
    def _holdings(self) -> list[tuple[str, ...]]:
        return deal_objectives(self.assignment, self.names, self.clients, self.seed)

    @cached_property
    def _phases(self) -> Tensor:
        """Every sample's phases `[M, n, S, d]`."""
        S, d = self.objectives, self.dimension
        centres = self.distance * directions(S, d, self.angle, self.seed)
        common = torch.einsum("sij,si->sj", self.axes, centres)
        each = []
        for i in range(self.clients):
            generator = stream(self.seed, "problem", "phases", i)
            own = self.heterogeneity * generator.standard_normal((S, d))
            scatter = self.noise * generator.standard_normal((self.samples, S, d))
            each.append(common + torch.from_numpy(own) + torch.from_numpy(scatter))
        return torch.stack(each)

    @cached_property
    def _client_means(self) -> Tensor:
        """`R e^{iφ}` of each client, complex `[M, S, d]`."""
        return torch.polar(torch.ones_like(self._phases), self._phases).mean(1)

    @cached_property
    def _doubled_means(self) -> Tensor:
        """The mean of `e^{2iθ}` of each client, complex `[M, S, d]`."""
        return torch.polar(torch.ones_like(self._phases), 2 * self._phases).mean(1)

    @cached_property
    def _mean(self) -> Tensor:
        """`R e^{iφ}` of each `f_s`, the mean over its holders, complex `[S, d]`."""
        held = self._assignment.to(self._client_means)
        total = torch.einsum("ms,msj->sj", held, self._client_means)
        return total / held.sum(0)[:, None]

    @cached_property
    def _assignment(self) -> Tensor:
        """Whether client `m` holds objective `s`, `[M, S]`."""
        return torch.tensor([[name in held for name in self.names] for held in self._holdings])

    def _held(self, values: Tensor) -> Tensor:
        """`values` `[M, S]` of the pairs that there are."""
        return values[self._assignment]

    def _along(self, x: Tensor) -> Tensor:
        """`⟨q_j, x⟩` for each objective and axis, `[S, d]`."""
        return torch.einsum("sij,i->sj", self.axes, x.detach().cpu().double())
