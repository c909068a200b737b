"""What is run: for each entry of Table 1 a problem, the corollary's steps and the theorem's measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from fmol.algorithms import FMGDA, FSMGDA, MGD
from fmol.federation import Federation
from fmol.problems.quadratic import Quadratic
from fmol.problems.waves import Waves
from fmol.result import Snapshot
from fmol.rounds import RoundReport
from fmol.theory import (
    Bound,
    Steps,
    Version,
    fmgda_nonconvex_bound,
    fmgda_nonconvex_steps,
    fmgda_strongly_convex_bound,
    fmgda_strongly_convex_steps,
    fsmgda_nonconvex_bound,
    fsmgda_nonconvex_steps,
    fsmgda_strongly_convex_bound,
    fsmgda_strongly_convex_steps,
    mean_gap,
    output_weights,
)
from fmol.training import fit

__all__ = ["CASES", "SETTINGS", "Case", "Measured", "Point"]

LOCAL_STEPS = 2
SIZES: Mapping[str, Any] = {"objectives": 3, "dimension": 6, "clients": 3}
CONFLICT: Mapping[str, Any] = {**SIZES, "angle": 90.0, "curvature": 2.0, "heterogeneity": 0.5}
# With one minimum of all, and so one Pareto optimum: Δ_Q is never negative, whatever noise does.
SHARED: Mapping[str, Any] = {
    **SIZES, "angle": 0.0, "scale_ratio": 2.0, "heterogeneity": 0.5, "noise": 0.5, "samples": 256,
}  # fmt: skip
NOISY: Mapping[str, Any] = {**CONFLICT, "noise": 0.5, "samples": 256}
WAVES: Mapping[str, Any] = {**SIZES, "angle": 90.0, "distance": 4.0, "heterogeneity": 0.5}
NOISY_WAVES: Mapping[str, Any] = {**WAVES, "noise": 0.5, "samples": 256}
CONVEX_BATCH, WAVES_BATCH = 0.5, 2.0
"""A batch has this many samples divided by η."""
WAVES_SCALE = 4.0
"""η√T of FSMGDA on waves: the largest step allowed at T = 64, and 1/√T from there on."""
FIXED_BATCH = 1
REFERENCE_ROUNDS = 200
WHERE: Mapping[str, Any] = {"engine": "sequential", "device": "cpu"}
"""Tensors of a few numbers are fastest there, and the same bits come out on one machine."""

SETTINGS: Mapping[str, Any] = {
    "local_steps": LOCAL_STEPS,
    "conflict": dict(CONFLICT),
    "shared": dict(SHARED),
    "noisy": dict(NOISY),
    "waves": dict(WAVES),
    "noisy_waves": dict(NOISY_WAVES),
    "batches": [CONVEX_BATCH, WAVES_BATCH, FIXED_BATCH],
    "waves_scale": WAVES_SCALE,
    "reference_rounds": REFERENCE_ROUNDS,
}
"""All that the numbers depend on beside `T` and the seed: results of others are not mixed in."""


@dataclass(frozen=True)
class Measured:
    """What one run of `T` rounds gave."""

    value: float
    """The theorem's left-hand side: a mean over the run's rounds."""
    steps: Steps
    beside: Mapping[str, float] = field(default_factory=dict)
    """Other measures of the same run, by name."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """The theorem's right-hand side for this run, `printed` and `repaired`."""
    expected: float | None = None
    """The slope of theory where it depends on the step size."""


@dataclass(frozen=True)
class Point:
    """`Measured` with what it was measured for."""

    case: str
    rounds: int
    seed: int
    measured: Measured


@dataclass(frozen=True)
class Case:
    """An entry of Table 1, or something to see beside one."""

    name: str
    title: str
    rate: str
    """The rate as Table 1 has it; empty for what it does not have."""
    measure: str
    """What is measured, in the paper's signs."""
    run: Callable[[int, int], Measured] = field(repr=False)
    """From `T` and a seed to the measurement."""
    slope: float | None
    """The slope that the rate means; None where it depends on the step size, or none is known."""
    rounds: Sequence[int]
    small: Sequence[int]
    axes: Literal["log-log", "log-linear"] = "log-log"


class _Reach:
    """A callback that keeps how far from the start a run has been."""

    def __init__(self, start: Tensor) -> None:
        self.start, self.radius = start, 0.0

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        away = float((snapshot.state.x.detach().cpu().double() - self.start).norm())
        self.radius = max(self.radius, away)


def _algorithm(steps: Steps) -> FSMGDA:
    options: dict[str, Any] = {
        "local_steps": LOCAL_STEPS,
        "local_lr": steps.local_lr,
        "server_lr": steps.server_lr,
        "accumulate": "mean",
    }
    if steps.batch_size is None:
        return FMGDA(**options)
    return FSMGDA(batch_size=steps.batch_size, **options)


def _run(federation: Federation, steps: Steps, seed: int, **options: Any) -> Sequence[RoundReport]:
    return fit(federation, _algorithm(steps), steps.rounds, seed=seed, **WHERE, **options).reports


def _both(bound: Callable[[Version], Bound]) -> dict[str, float]:
    return {"repaired": bound("repaired").total, "printed": bound("printed").total}


def _common(steps: Steps, problem: Quadratic | Waves) -> dict[str, Any]:
    return {
        "rounds": steps.rounds,
        "server_lr": steps.server_lr,
        "local_lr": steps.local_lr,
        "local_steps": LOCAL_STEPS,
        "objectives": problem.objectives,
    }


def _noise(steps: Steps, problem: Quadratic | Waves) -> dict[str, Any]:
    """α, β and σ²: `E‖∇f(x,ξ) − ∇f(y,ξ′)‖² = ‖∇f(x) − ∇f(y)‖²` plus both variances."""
    assert steps.batch_size is not None
    single, batch = problem.gradient_variance(1), problem.gradient_variance(steps.batch_size)
    beta = batch / single
    return {"alpha": problem.smoothness**2, "beta": beta, "sigma_squared": 2 * single}


def _bound_visited(problem: Quadratic, steps: Steps, radius: float) -> float:
    """G, or D with noise: over all points of a run that came `radius` far, local iterates included."""
    variance = 0.0 if steps.batch_size is None else problem.gradient_variance(steps.batch_size)
    reach = (LOCAL_STEPS - 1) * steps.local_lr
    # A local step adds `η_L` times a gradient, which grows by at most `L` times what was added.
    here = math.hypot(problem.gradient_bound(radius), math.sqrt(variance))
    further = radius + reach * here / (1 - reach * problem.smoothness)
    return math.hypot(problem.gradient_bound(further), math.sqrt(variance))


@lru_cache(maxsize=32)
def _end_of_exact_descent(seed: int, server_lr: float) -> tuple[float, ...]:
    """λ at the Pareto optimum where exact descent from the start ends; the same for every `T`."""
    federation = Quadratic(**CONFLICT, seed=seed).build()
    rounds = REFERENCE_ROUNDS
    exact = fit(federation, MGD(server_lr), rounds, evaluate_every=rounds, **WHERE)
    return tuple(exact.weights[-1].tolist())


def _fmgda_strongly_convex(rounds: int, seed: int) -> Measured:
    """On bowls in conflict; `x*` is where exact descent from the same start ends."""
    problem = Quadratic(**CONFLICT, seed=seed)
    federation, L, mu = problem.build(), problem.smoothness, problem.convexity
    steps = fmgda_strongly_convex_steps(rounds=rounds, local_steps=LOCAL_STEPS, L=L, mu=mu)
    best = _end_of_exact_descent(seed, steps.server_lr)
    reach = _Reach(problem.start)
    reports = _run(federation, steps, seed, optimum=problem.optimum(best), callbacks=[reach])
    away = float((problem.start - problem.pareto_point(best)).square().sum())
    G = _bound_visited(problem, steps, reach.radius)
    return Measured(
        mean_gap(reports, server_lr=steps.server_lr, mu=mu),
        steps,
        bounds=_both(
            lambda version: fmgda_strongly_convex_bound(
                **_common(steps, problem), L=L, mu=mu, G=G, initial_distance_squared=away,
                version=version,
            )
        ),
        expected=math.log1p(-mu * steps.server_lr / 2),
    )  # fmt: skip


def _fsmgda_strongly_convex(rounds: int, seed: int) -> Measured:
    """On bowls that share their minimum `x*`, the only Pareto optimum."""
    problem = Quadratic(**SHARED, seed=seed)
    federation, mu = problem.build(), problem.convexity
    steps = fsmgda_strongly_convex_steps(
        rounds=rounds, local_steps=LOCAL_STEPS, L=problem.smoothness, mu=mu, batch=CONVEX_BATCH
    )
    reach = _Reach(problem.start)
    reports = _run(federation, steps, seed, optimum=problem.optimum(), callbacks=[reach])
    away = float((problem.start - problem.pareto_point()).square().sum())
    D = _bound_visited(problem, steps, reach.radius)
    return Measured(
        mean_gap(reports, server_lr=steps.server_lr, mu=mu),
        steps,
        {"last Δ_Q": reports[-1].optimality_gap},
        _both(
            lambda version: fsmgda_strongly_convex_bound(
                **_common(steps, problem), **_noise(steps, problem), mu=mu, D=D,
                initial_distance_squared=away, version=version,
            )
        ),
    )  # fmt: skip


def _fsmgda_strongly_convex_conflict(rounds: int, seed: int) -> Measured:
    """On bowls in conflict, where `Δ_Q` turns negative: `‖d*_t‖²` is zero on the Pareto set alone."""
    problem = Quadratic(**NOISY, seed=seed)
    mu = problem.convexity
    steps = fsmgda_strongly_convex_steps(
        rounds=rounds, local_steps=LOCAL_STEPS, L=problem.smoothness, mu=mu, batch=CONVEX_BATCH
    )
    reports = _run(problem.build(), steps, seed, true_gradients_every=1, evaluate_every=rounds)
    weights = output_weights(rounds=rounds, server_lr=steps.server_lr, mu=mu)
    squares = [report.stationarity for report in reports]
    return Measured(float(weights @ torch.tensor(squares, dtype=torch.float64)), steps)


def _mean(reports: Sequence[RoundReport], name: str) -> float:
    return fmean(getattr(report, name) for report in reports)


def _directions(reports: Sequence[RoundReport]) -> tuple[float, dict[str, float]]:
    mean = _mean(reports, "true_direction_norm_squared")
    return mean, {"mean of ‖d*_t‖²": _mean(reports, "stationarity")}


def _fmgda_nonconvex(rounds: int, seed: int) -> Measured:
    problem = Waves(**WAVES, seed=seed)
    L = problem.smoothness
    steps = fmgda_nonconvex_steps(rounds=rounds, local_steps=LOCAL_STEPS, L=L)
    reports = _run(problem.build(), steps, seed, true_gradients_every=1, evaluate_every=rounds)
    value, beside = _directions(reports)
    bounds = _both(
        lambda version: fmgda_nonconvex_bound(
            **_common(steps, problem), L=L, G=problem.gradient_bound,
            initial_gap=_initial_gap(problem), version=version,
        )
    )  # fmt: skip
    return Measured(value, steps, beside, bounds)


def _fsmgda_nonconvex(rounds: int, seed: int) -> Measured:
    problem = Waves(**NOISY_WAVES, seed=seed)
    steps = fsmgda_nonconvex_steps(
        rounds=rounds,
        local_steps=LOCAL_STEPS,
        L=problem.smoothness,
        scale=WAVES_SCALE,
        batch=WAVES_BATCH,
    )
    return _stochastic_waves(problem, steps, seed)


def _fsmgda_nonconvex_fixed(rounds: int, seed: int) -> Measured:
    problem = Waves(**NOISY_WAVES, seed=seed)
    # The same steps; all that differs is that β stays what it is.
    grown = fsmgda_nonconvex_steps(
        rounds=rounds, local_steps=LOCAL_STEPS, L=problem.smoothness, scale=WAVES_SCALE
    )
    steps = Steps(rounds, grown.server_lr, grown.local_lr, FIXED_BATCH)
    return _stochastic_waves(problem, steps, seed)


def _stochastic_waves(problem: Waves, steps: Steps, seed: int) -> Measured:
    reports = _run(
        problem.build(), steps, seed, true_gradients_every=1, evaluate_every=steps.rounds
    )
    value, beside = _directions(reports)
    bounds = _both(
        lambda version: fsmgda_nonconvex_bound(
            **_common(steps, problem), **_noise(steps, problem), L=problem.smoothness,
            D=problem.stochastic_gradient_bound, initial_gap=_initial_gap(problem),
            version=version,
        )
    )  # fmt: skip
    return Measured(value, steps, beside, bounds)


def _initial_gap(problem: Waves) -> float:
    """The bound is true of every objective, so of the one that is nearest to its infimum."""
    return float((problem.losses(problem.start) - problem.infimum).min())


LONG, SHORT = (64, 128, 256, 512, 1024), (64, 128, 256)

CASES: Mapping[str, Case] = {
    case.name: case
    for case in [
        Case(
            "fmgda-strongly-convex",
            "FMGDA, strongly convex",
            "O(exp(−μT))",
            "w_t-weighted mean of Δ_Q",
            _fmgda_strongly_convex,
            None,
            (16, 32, 48, 64, 80),
            (16, 32, 48, 64),
            "log-linear",
        ),
        Case(
            "fmgda-nonconvex",
            "FMGDA, non-convex",
            "O(1/T)",
            "mean of ‖d̄_t‖²",
            _fmgda_nonconvex,
            -1.0,
            LONG,
            (32, 64, 128),
        ),
        Case(
            "fsmgda-strongly-convex",
            "FSMGDA, strongly convex",
            "Õ(1/T)",
            "w_t-weighted mean of Δ_Q",
            _fsmgda_strongly_convex,
            -1.0,
            LONG,
            SHORT,
        ),
        Case(
            "fsmgda-nonconvex",
            "FSMGDA, non-convex",
            "O(1/√T)",
            "mean of ‖d̄_t‖²",
            _fsmgda_nonconvex,
            -0.5,
            LONG,
            SHORT,
        ),
        Case(
            "fsmgda-strongly-convex-conflict",
            "FSMGDA, strongly convex, conflict",
            "",
            "w_t-weighted mean of ‖d*_t‖²",
            _fsmgda_strongly_convex_conflict,
            None,
            LONG,
            (),
        ),
        Case(
            "fsmgda-nonconvex-fixed-batch",
            "FSMGDA, non-convex, fixed batch",
            "",
            "mean of ‖d̄_t‖²",
            _fsmgda_nonconvex_fixed,
            None,
            LONG,
            (),
        ),
    ]
}
"""Name → what is run. Those with a rate are Table 1; the others show what it needs, or hides."""
