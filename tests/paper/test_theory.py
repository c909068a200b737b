"""The four theorems: their right-hand sides, what is sound in them, and what the proofs lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, MGD, SMGD, Federation, Result, fit, min_norm
from fmol.problems.quadratic import Quadratic
from fmol.problems.waves import Waves
from fmol.result import Snapshot
from fmol.rounds import RoundReport
from fmol.theory import (
    OutputClock,
    fit_slope,
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
from support import flat

STEPS: dict[str, Any] = {
    "rounds": 200, "server_lr": 0.25, "local_lr": 0.02, "local_steps": 3, "objectives": 2,
}  # fmt: skip
NOISE: dict[str, Any] = {"alpha": 4.0, "beta": 0.25, "sigma_squared": 0.8}


class Path:
    """A callback that keeps every `x_t`."""

    def __init__(self, start: Tensor) -> None:
        self.points = [start]

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        self.points.append(snapshot.state.x.clone())

    def radius(self) -> float:
        return max(float((x - self.points[0]).norm()) for x in self.points)


def mean(reports: Sequence[RoundReport], name: str) -> float:
    return fmean(getattr(report, name) for report in reports)


def run(federation: Federation, rounds: int, **options: Any) -> Result:
    """FSMGDA as in the proofs, with true gradients in every round and losses only where wanted."""
    own = ("seed", "start", "optimum", "callbacks")
    more: dict[str, Any] = {name: options.pop(name) for name in own if name in options}
    if "optimum" not in more:
        more |= {"true_gradients_every": 1, "evaluate_every": rounds}
    algorithm = FSMGDA(accumulate="mean", **options)
    return fit(federation, algorithm, rounds, device="cpu", **more)


# ---- the right-hand sides ----------------------------------------------------------------------


def test_the_printed_bounds_are_the_papers_formulas() -> None:
    """Each evaluated by hand: T = 200, η = ¼, η_L K = 0.06, S = 2, L = 2, G = D = 5, μ = ½."""
    first = fmgda_nonconvex_bound(**STEPS, L=2.0, G=5.0, initial_gap=3.0, version="printed")
    assert first.start == pytest.approx(16 * 3 / 50)
    assert first.delta == pytest.approx(16 * 0.06**2 * 4 * 25 * 5 / 0.25)
    second = fmgda_strongly_convex_bound(
        **{**STEPS, "server_lr": 0.2}, L=2.0, mu=0.5, G=5.0, initial_distance_squared=7.0,
        version="printed",
    )  # fmt: skip
    assert second.start == pytest.approx(7 * 0.5 * math.exp(-10))
    assert second.delta == pytest.approx(0.06**2 * 4 * 25 * (8 * 4 / 0.5 + 2))
    third = fsmgda_nonconvex_bound(
        **STEPS, **NOISE, L=2.0, D=5.0, initial_gap=3.0, version="printed"
    )
    assert third.start == pytest.approx(8 * 3 / 50)
    assert third.delta == pytest.approx(12 * (4 * 0.06**2 * 25 + 0.2))
    fourth = fsmgda_strongly_convex_bound(
        **STEPS, **NOISE, mu=0.5, D=5.0, initial_distance_squared=7.0, version="printed"
    )
    assert fourth.start == pytest.approx(7 * 0.5 * math.exp(-12.5))
    assert fourth.delta == pytest.approx(4 * (4 * 0.06**2 * 25 + 0.2) / 0.5 + 0.25 * 4 * 25 / 2)
    assert fourth.total == fourth.start + fourth.delta


@pytest.mark.parametrize("local_steps", [1, 2, 10])
@pytest.mark.parametrize("objectives", [1, 2, 40])
def test_the_repaired_bounds_of_theorems_one_three_and_four_are_below_the_printed_ones(
    local_steps: int, objectives: int
) -> None:
    steps: dict[str, Any] = {**STEPS, "local_steps": local_steps, "objectives": objectives}
    cases: list[Callable[[Any], Any]] = [
        lambda v: fmgda_nonconvex_bound(**steps, L=2.0, G=5.0, initial_gap=3.0, version=v),
        lambda v: fsmgda_nonconvex_bound(
            **steps, **NOISE, L=2.0, D=5.0, initial_gap=3.0, version=v
        ),
        lambda v: fsmgda_strongly_convex_bound(
            **steps, **NOISE, mu=0.5, D=5.0, initial_distance_squared=7.0, version=v
        ),
    ]
    for bound in cases:
        assert bound("repaired").start <= bound("printed").start
        assert bound("repaired").delta <= bound("printed").delta


def test_with_one_local_step_nothing_drifts_once_repaired() -> None:
    one = {**STEPS, "local_steps": 1, "local_lr": 100.0}
    assert fmgda_nonconvex_bound(**one, L=2.0, G=5.0, initial_gap=3.0).delta == 0
    still: dict[str, Any] = {"alpha": 4.0, "beta": 0.0, "sigma_squared": 0.0}
    assert fsmgda_nonconvex_bound(**one, **still, L=2.0, D=5.0, initial_gap=3.0).delta == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server_lr": 0.26}, r"`server_lr` is 0.26, .* `server_lr` ≤ 1/\(2L\), at most 0.25"),
        ({"server_lr": 0.6, "version": "printed"}, r"`server_lr` ≤ 3/\(2\(1 \+ L\)\)"),
        ({"rounds": 0}, "`rounds` must be a whole number of at least 1, got 0"),
        ({"local_steps": 1.5}, "`local_steps` must be a whole number"),
        ({"L": 0.0}, "`L` must be a finite number above 0, got 0.0"),
        ({"G": math.nan}, "`G` must be a finite number of at least 0, got nan"),
        ({"initial_gap": -1.0}, "`initial_gap` must be a finite number of at least 0, got -1.0"),
        ({"version": "better"}, "`version` must be 'repaired' or 'printed', got 'better'"),
    ],
)
def test_numbers_that_a_theorem_does_not_allow_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fmgda_nonconvex_bound(**{**STEPS, "L": 2.0, "G": 5.0, "initial_gap": 3.0, **change})


def test_too_short_a_run_has_no_printed_bound() -> None:
    options: dict[str, Any] = {"mu": 0.5, "D": 5.0, "initial_distance_squared": 7.0, **NOISE}
    short = {**STEPS, "rounds": 7}
    assert fsmgda_strongly_convex_bound(**short, **options).start > 0
    with pytest.raises(ValueError, match=r"`rounds` is 7, .* at least 8 rounds"):
        fsmgda_strongly_convex_bound(**short, **options, version="printed")


# ---- the inequalities, where the argument is sound ---------------------------------------------


@pytest.mark.parametrize("assignment", ["all", "one-each", "subsets"])
def test_theorem_one_repaired_bounds_the_mean_and_needs_its_drift(assignment: Any) -> None:
    """From the minimum of one objective the first part is zero: all that is left is the drift."""
    problem = Waves(objectives=3, clients=4, samples=8, heterogeneity=1.2, assignment=assignment)
    L, G = problem.smoothness, problem.gradient_bound
    steps: dict[str, Any] = {"local_steps": 6, "local_lr": 0.2, "server_lr": 1 / (2 * L)}
    for start in (problem.start, problem.minima[0]):
        reports = run(problem.build(), 40, batch_size=None, start=start, **steps).reports
        gap = float((problem.losses(start) - problem.infimum).min().clamp(min=0))
        bound = fmgda_nonconvex_bound(rounds=40, objectives=3, L=L, G=G, initial_gap=gap, **steps)
        measured = mean(reports, "true_direction_norm_squared")
        assert measured <= bound.total
    assert bound.start < 1e-9 < measured


def test_a_round_drifts_no_further_than_the_lemma_says() -> None:
    """With one objective d_t is Δ: its distance from the gradient at x_t is seen directly."""
    problem = Waves(objectives=1, clients=4, samples=8, heterogeneity=1.0)
    for local_steps, server_lr in [(1, 0.3), (2, 0.3), (8, 0.3)]:
        path = Path(problem.start)
        run(
            problem.build(), 15, batch_size=None, local_steps=local_steps, local_lr=0.1,
            server_lr=server_lr, callbacks=[path],
        )  # fmt: skip
        allowed = problem.smoothness * 0.1 * problem.gradient_bound * (local_steps - 1) / 2
        drifts = [
            float(((x - after) / server_lr - problem.gradients(x)[0]).norm())
            for x, after in zip(path.points, path.points[1:], strict=False)
        ]
        assert max(drifts) <= allowed + 1e-12
        assert max(drifts) > 0.1 * allowed


def test_theorem_three_repaired_bounds_the_mean_and_needs_its_noise() -> None:
    problem = Waves(objectives=3, clients=3, samples=32, noise=1.0)
    federation, L = problem.build(), problem.smoothness
    for batch in (1, 8):
        noise: dict[str, Any] = {
            "alpha": L**2,
            "beta": problem.gradient_variance(batch) / problem.gradient_variance(1),
            "sigma_squared": 2 * problem.gradient_variance(1),
        }
        steps: dict[str, Any] = {"local_steps": 2, "local_lr": 0.1, "server_lr": 1 / (2 * L)}
        runs = [
            run(federation, 25, batch_size=batch, start=problem.minima[0], seed=seed, **steps)
            for seed in range(2)
        ]
        measured = sum(mean(r.reports, "true_direction_norm_squared") for r in runs) / 2
        bound = fsmgda_nonconvex_bound(
            rounds=25, objectives=3, L=L, D=problem.stochastic_gradient_bound, initial_gap=0.0,
            **noise, **steps,
        )  # fmt: skip
        assert bound.start < measured <= bound.total


def pareto_weights(problem: Quadratic) -> list[Tensor]:
    """λ of some Pareto optima, the first of them where exact descent from the start ends."""
    end = fit(problem.build(), MGD(0.4), rounds=150, device="cpu", evaluate_every=150).weights[-1]
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(3, problem.objectives, generator=generator, dtype=torch.float64)
    return [end, *drawn]


@pytest.mark.parametrize("local_lr", [0.0, 0.15])
def test_theorem_two_repaired_bounds_the_weighted_mean_for_every_pareto_optimum(
    local_lr: float,
) -> None:
    problem = Quadratic(objectives=3, dimension=5, curvature=3, clients=3, noise=0, samples=2)
    L, mu = problem.smoothness, problem.convexity
    steps: dict[str, Any] = {"local_steps": 4, "local_lr": local_lr, "server_lr": 1 / (2 * L + mu)}
    found = []
    for weights in pareto_weights(problem):
        path, best = Path(problem.start), problem.pareto_point(weights)
        reports = run(
            problem.build(), 40, batch_size=None, optimum=problem.optimum(weights),
            callbacks=[path], **steps,
        ).reports  # fmt: skip
        # Local steps of a convex function do not lengthen its gradient, so x_t's are the longest.
        G = problem.gradient_bound(path.radius())
        away = float((problem.start - best).square().sum())
        measured = mean_gap(reports, server_lr=steps["server_lr"], mu=mu)
        found.append(measured)
        for version in ("repaired", "printed"):
            bound = fmgda_strongly_convex_bound(
                rounds=40, objectives=3, L=L, mu=mu, G=G, initial_distance_squared=away,
                version=version, **steps,
            )  # fmt: skip
            assert measured <= bound.total
    assert found[0] > 0 > min(found)


def test_theorem_four_repaired_bounds_the_weighted_mean() -> None:
    """In the mean over seeds, and for steps at which the noise is far above the first part."""
    problem = Quadratic(
        objectives=2, dimension=4, angle=0, scale_ratio=2, clients=2, noise=2.0, samples=32
    )
    mu, rounds, batch = problem.convexity, 80, 2
    steps: dict[str, Any] = {"local_steps": 2, "local_lr": 0.05, "server_lr": 0.3}
    values, reach = [], 0.0
    for seed in range(4):
        path = Path(problem.start)
        result = run(
            problem.build(), rounds, batch_size=batch, seed=seed, optimum=problem.optimum(),
            callbacks=[path], **steps,
        )  # fmt: skip
        values.append(mean_gap(result.reports, server_lr=0.3, mu=mu))
        reach = max(reach, path.radius())
    variance = problem.gradient_variance(batch)
    D = math.sqrt(problem.gradient_bound(1.1 * reach) ** 2 + variance)
    bound = fsmgda_strongly_convex_bound(
        rounds=rounds, objectives=2, mu=mu, D=D, alpha=problem.smoothness**2, beta=1.0,
        sigma_squared=2 * variance, initial_distance_squared=1.0, **steps,
    )  # fmt: skip
    assert bound.start < sum(values) / 4 <= bound.total


@pytest.mark.parametrize(
    "algorithm",
    [
        FMGDA(local_steps=5, local_lr=0.2, server_lr=0.3),
        FSMGDA(local_steps=2, batch_size=2, local_lr=0.1, server_lr=0.2),
        FSMGDA(local_steps=2, batch_size=2, local_lr=0.1, server_lr=0.2, normalize="l2"),
        SMGD(batch_size=1, server_lr=0.4),
        MGD(server_lr=0.5),
    ],
    ids=["FMGDA", "FSMGDA", "FSMGDA l2", "SMGD", "MGD"],
)
@pytest.mark.parametrize(
    "problem",
    [
        Waves(objectives=3, clients=3, samples=8, assignment="subsets"),
        Quadratic(objectives=3, clients=3, samples=8, scale_ratio=5, noise=1.0, heterogeneity=1.0),
    ],
    ids=["waves", "quadratic"],
)
def test_the_papers_measure_is_never_below_the_one_with_the_best_weights(
    problem: Any, algorithm: Any
) -> None:
    result = fit(problem.build(), algorithm, rounds=25, device="cpu", true_gradients_every=1)
    for report in result.reports:
        slack = 1e-9 * report.stationarity + 1e-14
        assert report.true_direction_norm_squared >= report.stationarity - slack
    exact = [r.true_direction_norm_squared / r.stationarity for r in result.reports]
    # With exact gradients the two are one; with others they are not.
    assert (max(exact) < 1 + 1e-6) == isinstance(algorithm, MGD)


# ---- what was found in the proofs --------------------------------------------------------------


def descend_with_errors(
    L: float, server_lr: float, errors: Sequence[float], start: float
) -> tuple[float, float]:
    """(mean of d², f_0) for `f = ½Lx²`, one objective, where `Δ_t = Lx_t + e_t`."""
    x, squares = start, []
    for error in errors:
        d = L * x + error
        squares.append(d * d)
        x -= server_lr * d
    return sum(squares) / len(squares), 0.5 * L * start**2


def test_theorem_threes_proof_loses_a_factor_when_it_divides_by_the_step() -> None:
    """From (η/4)‖d‖² ≤ f_t − f_{t+1} + ½H the paper has 2H, where dividing by η/4 gives 2H/η."""
    L, rounds, H = 40.0, 4000, 1.0
    server_lr = 3 / (2 * (1 + L))
    errors = [(-1.0) ** t for t in range(rounds)]
    squares, gap = descend_with_errors(L, server_lr, errors, 2 * server_lr)
    first = 4 * gap / (server_lr * rounds)
    assert squares > 5 * (first + 2 * H)
    assert squares <= first + 2 * H / server_lr


@pytest.mark.parametrize("L", [0.3, 1.0, 40.0])
def test_with_a_step_of_half_the_inverse_smoothness_no_factor_is_lost(L: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rounds, server_lr = 2000, 1 / (2 * L)
    kinds = {
        "alternating": [(-1.0) ** t for t in range(rounds)],
        "constant": [1.0] * rounds,
        "drawn": (2 * torch.rand(rounds, generator=generator) - 1).tolist(),
    }
    for errors in kinds.values():
        for start in (0.0, 3.0):
            squares, gap = descend_with_errors(L, server_lr, errors, start)
            assert squares <= 4 * gap / (server_lr * rounds) + 2.0


def test_at_the_corollarys_steps_what_the_printed_proof_gives_does_not_vanish() -> None:
    """δ is of the order of η there, so that δ/η, which is what the division leaves, stays."""
    printed, honest = [], []
    for rounds in (10**4, 10**6, 10**8):
        steps = fsmgda_nonconvex_steps(rounds=rounds, local_steps=3, L=1.0)
        options: dict[str, Any] = {
            "rounds": rounds, "server_lr": steps.server_lr, "local_lr": steps.local_lr,
            "local_steps": 3, "objectives": 2, "L": 1.0, "D": 2.0, "alpha": 1.0,
            "beta": steps.server_lr, "sigma_squared": 1.0, "initial_gap": 1.0,
        }  # fmt: skip
        bound = fsmgda_nonconvex_bound(**options, version="printed")
        printed.append(bound.total)
        honest.append(bound.start + bound.delta / steps.server_lr)
        assert fsmgda_nonconvex_bound(**options).total < bound.total
    assert printed[1] / printed[0] == pytest.approx(0.1, rel=1e-6)
    assert honest[2] > 0.9 * honest[0]


def test_theorem_two_takes_the_absolute_value_of_a_one_sided_lemma() -> None:
    """|f(x_{t+1}) − f(x_t)| ≤ (η/4)‖d‖² + 2(η_L K L G)² fails on a bowl: losses fall faster."""
    problem = Quadratic(objectives=1, dimension=3, clients=1, noise=0, samples=1)
    server_lr = 1 / (2 * problem.smoothness + problem.convexity)
    result = fit(problem.build(), MGD(server_lr), rounds=5, device="cpu")
    for t, report in enumerate(result.reports):
        fall = float(result.losses[t, 0] - result.losses[t + 1, 0])
        # The lemma itself, one-sided, holds.
        assert fall >= server_lr / 4 * report.direction_norm_squared
        assert fall > 3 * server_lr / 4 * report.direction_norm_squared


def test_weights_and_the_sample_they_were_computed_from_are_not_independent() -> None:
    """In one dimension, gradients 1 + ξ and −1 with ξ = ±½: E[λ g] is not E[λ] E[g]."""
    weighted, weights = [], []
    for noise in (-0.5, 0.5):
        gradients = torch.tensor([[1 + noise], [-1.0]], dtype=torch.float64)
        weight = float(min_norm(gradients @ gradients.T).weights[0])
        weights.append(weight)
        weighted.append(weight * (1 + noise))
    assert sum(weighted) / 2 == pytest.approx(7 / 15)
    assert sum(weights) / 2 == pytest.approx(8 / 15)


def test_the_gap_is_negative_where_a_run_ends_at_another_pareto_optimum() -> None:
    """On spheres, at a Pareto optimum x, it is −½‖x − x*‖²: to be below every bound is no merit."""
    problem = Quadratic(objectives=2, dimension=2, clients=2, noise=0, samples=1)
    elsewhere = [0.9, 0.1]
    result = run(
        problem.build(), 200, local_steps=1, server_lr=0.5, optimum=problem.optimum(elsewhere)
    )
    away = flat(result.model) - problem.pareto_point(elsewhere)
    expected = -0.5 * float(away.square().sum())
    assert expected < -0.1
    assert result.reports[-1].optimality_gap == pytest.approx(expected, rel=1e-6)
    assert mean_gap(result.reports, server_lr=0.5, mu=1.0) < 0


def test_the_strongly_convex_corollary_needs_twice_the_step_it_names() -> None:
    """exp(−μηT/2) is (μ²T)^{−scale/2}: with the factor 1 that Θ leaves open it falls like 1/√T."""

    def first_part(scale: float) -> dict[int, list[float]]:
        found = {}
        for rounds in (10**3, 10**4, 10**5, 10**6):
            steps = fsmgda_strongly_convex_steps(
                rounds=rounds, local_steps=1, L=1.0, mu=0.5, scale=scale
            )
            bound = fsmgda_strongly_convex_bound(
                rounds=rounds, server_lr=steps.server_lr, local_lr=0.0, local_steps=1,
                objectives=1, mu=0.5, D=0.0, alpha=0.0, beta=0.0, sigma_squared=0.0,
                initial_distance_squared=1.0, version="printed",
            )  # fmt: skip
            found[rounds] = [bound.start]
        return found

    assert fit_slope(first_part(1.0)).value == pytest.approx(-0.5, abs=1e-6)
    assert fit_slope(first_part(2.0)).value == pytest.approx(-1.0, abs=1e-6)


def test_beta_times_sigma_squared_is_twice_the_variance_and_so_depends_on_the_batch() -> None:
    """Assumption 4 at x = y, with two independent batches of one client, measured."""
    problem = Quadratic(objectives=1, dimension=3, clients=1, samples=64, noise=1.0)
    targets = problem.build().client("client-0").data[1]
    loss = problem.build().objectives[0].loss
    generator = torch.Generator().manual_seed(1)

    def gradient(size: int) -> Tensor:
        rows = torch.randperm(64, generator=generator)[:size]
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        values = loss(x.expand(size, -1), targets[rows])
        assert isinstance(values, Tensor)
        return torch.autograd.grad(values.mean(), x)[0]

    for size in (1, 4, 16):
        squares = [(gradient(size) - gradient(size)).square().sum() for _ in range(800)]
        measured = float(torch.stack(squares).mean())
        assert measured == pytest.approx(2 * problem.gradient_variance(size), rel=0.12)
    ratio = problem.gradient_variance(16) / problem.gradient_variance(1)
    assert ratio == pytest.approx(48 / (16 * 63))


# ---- step sizes --------------------------------------------------------------------------------


def test_the_corollaries_steps_fall_with_the_powers_they_name() -> None:
    def ratios(make: Callable[..., Any], **options: Any) -> tuple[float, float, float]:
        short, long = (make(rounds=T, local_steps=2, L=1.0, **options) for T in (10**4, 10**6))
        batches = (long.batch_size or 1) / (short.batch_size or 1)
        return long.server_lr / short.server_lr, long.local_lr / short.local_lr, batches

    assert ratios(fmgda_nonconvex_steps) == pytest.approx((1, 0.1, 1))
    assert ratios(fsmgda_nonconvex_steps) == pytest.approx((0.1, 100**-0.25, 10))
    logs = math.log(10**6) / math.log(10**4)
    assert ratios(fsmgda_strongly_convex_steps, mu=1.0) == pytest.approx(
        (0.01 * logs, 0.1, 100 / logs), rel=2e-3
    )
    short, long = (
        fmgda_strongly_convex_steps(rounds=T, local_steps=2, L=1.0, mu=0.5) for T in (50, 60)
    )
    assert long.server_lr == short.server_lr == 0.4
    assert long.local_lr / short.local_lr == pytest.approx(math.exp(-0.5 * 0.4 * 10 / 4))


@pytest.mark.parametrize("L", [0.05, 0.5, 1.0, 30.0])
@pytest.mark.parametrize("rounds", [1, 10, 10**6])
def test_the_corollaries_steps_are_ones_that_the_theorems_allow(L: float, rounds: int) -> None:
    mu = L / 3
    most = min(1 / (2 * L), 3 / (2 * (1 + L)))
    for steps in (
        fmgda_nonconvex_steps(rounds=rounds, local_steps=4, L=L),
        fsmgda_nonconvex_steps(rounds=rounds, local_steps=4, L=L, scale=9.0),
        fmgda_strongly_convex_steps(rounds=rounds, local_steps=4, L=L, mu=mu),
        fsmgda_strongly_convex_steps(rounds=rounds, local_steps=4, L=L, mu=mu),
    ):
        assert 0 < steps.server_lr <= most
        assert 0 <= steps.local_lr <= 1 / (4 * L)
        assert steps.batch_size is None or steps.batch_size >= 1


def test_where_the_papers_step_is_zero_ours_is_not() -> None:
    """log(max(1, μ²T)) is zero for μ²T ≤ 1."""
    steps = fsmgda_strongly_convex_steps(rounds=50, local_steps=1, L=1.0, mu=0.1)
    assert math.log(max(1, 0.1**2 * 50)) == 0
    assert steps.server_lr == pytest.approx(2 / (0.1 * 50))


def test_more_convex_than_smooth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`mu` is 2.0 and `L` is 1.0"):
        fsmgda_strongly_convex_steps(rounds=10, local_steps=1, L=1.0, mu=2.0)


# ---- the output --------------------------------------------------------------------------------


def test_weights_of_the_output_grow_by_the_papers_factor_and_do_not_overflow() -> None:
    weights = output_weights(rounds=50, server_lr=0.2, mu=0.5)
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((49,), 1 / 0.95).double())
    long = output_weights(rounds=200_000, server_lr=0.5, mu=1.0)
    assert bool(torch.isfinite(long).all())
    assert float(long.sum()) == pytest.approx(1)


def test_the_clock_is_drawn_with_these_weights() -> None:
    problem, draws = Quadratic(clients=1, noise=0, samples=1).build(), 4000
    weights = output_weights(rounds=6, server_lr=0.5, mu=1.0)
    counts = torch.zeros(6, dtype=torch.float64)
    for seed in range(draws):
        counts[OutputClock(problem, rounds=6, server_lr=0.5, mu=1.0, seed=seed).round] += 1
    chi_squared = float(((counts - draws * weights).square() / (draws * weights)).sum())
    assert chi_squared < 20.5  # One in a thousand for 5 degrees of freedom.
    even = torch.full((6,), 1 / 6, dtype=torch.float64)
    assert float(((counts - draws * even).square() / (draws * even)).sum()) > 20.5


def test_the_clock_keeps_one_copy_of_the_iterate_at_which_a_shorter_run_would_end() -> None:
    problem = Quadratic(clients=2, samples=8).build()
    algorithm = FSMGDA(local_steps=2, batch_size=2, server_lr=0.3)
    seen = set()
    for seed in range(8):
        clock = OutputClock(problem, rounds=6, server_lr=0.3, mu=1.0, seed=seed)
        same = OutputClock(problem, rounds=6, server_lr=0.3, mu=1.0, seed=seed)
        assert same.round == clock.round
        held: list[int] = []

        def count(
            report: RoundReport, snapshot: Snapshot, clock: Any = clock, held: Any = held
        ) -> None:
            held.append(sum(isinstance(each, Tensor) for each in vars(clock).values()))
            assert not any(isinstance(each, list | dict) for each in vars(clock).values())

        fit(problem, algorithm, 6, device="cpu", callbacks=[clock, count])
        stopped = fit(problem, algorithm, rounds=clock.round, device="cpu")
        assert torch.equal(clock.x, flat(stopped.model))
        assert max(held) <= 1
        seen.add(clock.round)
    assert len(seen) > 2


def test_the_start_can_be_the_output_too() -> None:
    problem = Quadratic(clients=2, samples=8).build()
    drawn = (OutputClock(problem, rounds=3, server_lr=0.1, mu=0.1, seed=s) for s in range(20))
    clock = next(each for each in drawn if each.round == 0)
    fit(problem, MGD(0.1), rounds=3, device="cpu", callbacks=[clock])
    assert torch.equal(clock.x, flat(problem.model))


def test_a_clock_that_was_not_there_says_so() -> None:
    problem = Quadratic(clients=2, samples=8).build()
    drawn = (OutputClock(problem, rounds=9, server_lr=0.5, mu=1.0, seed=s) for s in range(20))
    clock = next(each for each in drawn if each.round > 0)
    with pytest.raises(ValueError, match=r"has not seen. Pass it to `fit` in `callbacks`"):
        _ = clock.x


def test_the_mean_gap_is_that_of_the_clock_and_asks_for_what_it_needs() -> None:
    problem = Quadratic(clients=2, samples=8)
    reports = run(
        problem.build(), 12, local_steps=1, server_lr=0.3, optimum=problem.optimum()
    ).reports
    weights = output_weights(rounds=12, server_lr=0.3, mu=1.0)
    expected = sum(float(w) * r.optimality_gap for w, r in zip(weights, reports, strict=True))
    assert mean_gap(reports, server_lr=0.3, mu=1.0) == pytest.approx(expected)
    without = fit(problem.build(), MGD(0.3), rounds=2, device="cpu").reports
    with pytest.raises(ValueError, match=r"no `optimality_gap` in round 0. Train with `optimum"):
        mean_gap(without, server_lr=0.3, mu=1.0)
    with pytest.raises(ValueError, match="`reports` is empty"):
        mean_gap([], server_lr=0.3, mu=1.0)
