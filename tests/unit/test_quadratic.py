"""Quadratic: the dials do what they say, and the closed forms are right."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, MGD, Federation, fit
from fmol.problems.quadratic import Quadratic
from support import brute_force_min_norm, flat

WIDEST = math.degrees(math.acos(-1 / 3))
NARROW = Quadratic(objectives=3, dimension=6, angle=70, scale_ratio=20, curvature=30, seed=3)


def client_losses(federation: Federation, client: str, x: Tensor) -> dict[str, Tensor]:
    """The per-sample losses of one client at `x`."""
    inputs, targets = federation.client(client).data
    outputs = x.expand(len(inputs), -1)
    found = {}
    for objective in federation.objectives:
        values = objective.loss(outputs, targets)
        assert isinstance(values, Tensor)
        found[objective.name] = values
    return found


def point(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("curvature", [1.0, 50.0])
@pytest.mark.parametrize(
    ("objectives", "angle", "dimension"),
    [(2, 0, 1), (2, 180, 1), (2, 37, 2), (3, 120, 2), (4, WIDEST, 3), (4, 10, 9), (6, 95, 6)],
)
def test_pulls_at_the_start_enclose_the_angle(
    objectives: int, angle: float, dimension: int, curvature: float
) -> None:
    problem = Quadratic(
        objectives=objectives, angle=angle, dimension=dimension, curvature=curvature, scale_ratio=5
    )
    pulls = -problem.gradients(problem.start)
    unit = pulls / pulls.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T)[~torch.eye(objectives, dtype=torch.bool)]
    expected = torch.full_like(cosines, math.cos(math.radians(angle)))
    assert torch.allclose(cosines, expected, atol=1e-9)


def test_forces_and_curvatures_span_the_ratio_of_scales() -> None:
    forces = NARROW.gradients(NARROW.start).norm(dim=1)
    assert float(forces[0] / forces[-1]) == pytest.approx(20)
    largest = torch.linalg.eigvalsh(NARROW.hessians)[:, -1]
    assert torch.allclose(largest, NARROW.scales)
    assert torch.allclose(NARROW.scales, forces)
    assert float(NARROW.scales[0]) == 1


def test_every_bowl_has_the_condition_number() -> None:
    values = torch.linalg.eigvalsh(NARROW.hessians)
    assert torch.allclose(values[:, -1] / values[:, 0], torch.tensor(30.0, dtype=torch.float64))
    assert torch.allclose(Quadratic().hessians[0], torch.eye(10, dtype=torch.float64), atol=1e-14)


@pytest.mark.parametrize("assignment", ["all", "one-each", "subsets"])
def test_every_clients_mean_loss_and_gradient_are_the_closed_forms(assignment: Any) -> None:
    problem = Quadratic(
        objectives=3, curvature=4, scale_ratio=3, noise=0.7, assignment=assignment, clients=4
    )
    federation = problem.build()
    x = point(10).requires_grad_()
    for client in federation.population.ids():
        losses = client_losses(federation, client, x)
        means = torch.stack([losses[name].mean() for name in problem.names])
        assert torch.allclose(means, problem.losses(x), rtol=1e-12)
        for s in range(3):
            (gradient,) = torch.autograd.grad(means[s], x, retain_graph=True)
            assert torch.allclose(gradient, problem.gradients(x)[s], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("assignment", ["all", "one-each", "subsets"])
def test_clients_that_differ_have_the_closed_forms_in_common(assignment: Any) -> None:
    """Own centres at every client, but over the holders of an objective they are its own."""
    problem = Quadratic(
        objectives=3, curvature=4, noise=0.7, heterogeneity=2.0, assignment=assignment, clients=5
    )
    federation, x = problem.build(), point(10).requires_grad_()
    means: dict[str, list[Tensor]] = {name: [] for name in problem.names}
    for client in federation.population.ids():
        for name, values in client_losses(federation, client, x).items():
            if name in federation.client(client).objectives:
                means[name].append(values.mean())
    for s, name in enumerate(problem.names):
        mean = torch.stack(means[name]).mean()
        assert mean.item() == pytest.approx(float(problem.losses(x)[s]), rel=1e-10)
        (gradient,) = torch.autograd.grad(mean, x, retain_graph=True)
        assert torch.allclose(gradient, problem.gradients(x)[s], rtol=1e-10, atol=1e-12)
        assert len(means[name]) == 1 or torch.stack(means[name]).std().item() > 0.5


def test_the_constants_of_the_theorems_are_those_of_the_bowls() -> None:
    problem = Quadratic(
        objectives=2, dimension=4, curvature=5, scale_ratio=2, clients=3, heterogeneity=1.0
    )
    values = torch.linalg.eigvalsh(problem.hessians)
    assert problem.smoothness == pytest.approx(float(values.max()))
    assert problem.convexity == pytest.approx(float(values.min()))
    federation, largest, spread = problem.build(), 0.0, 0.0
    for seed in range(20):
        x = point(4, seed=seed)
        x = (2 * x / x.norm()).requires_grad_()
        for client in federation.population.ids():
            for losses in client_losses(federation, client, x).values():
                each = torch.stack(
                    [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]
                )
                largest = max(largest, float(each.mean(0).norm()))
                spread = max(spread, float((each - each.mean(0)).square().sum(1).mean()))
    assert 0.5 * problem.gradient_bound(2.0) < largest <= problem.gradient_bound(2.0)
    # The noise of a bowl is the same everywhere.
    assert problem.gradient_variance(1) == pytest.approx(spread, rel=1e-9)
    assert problem.gradient_variance(8) == pytest.approx(spread * 24 / (8 * 31))
    assert problem.gradient_variance(32) == 0


def test_samples_scatter_as_much_as_the_noise_says() -> None:
    problem = Quadratic(noise=0.25, samples=2000, clients=1)
    targets = problem.build().client("client-0").data[1]
    assert float((targets - problem.centres).std()) == pytest.approx(0.25, rel=0.05)
    assert float(client_losses(problem.build(), "client-0", point(10))["f1"].std()) > 0.1


def test_without_noise_all_samples_are_the_centres() -> None:
    problem = Quadratic(noise=0, samples=1)
    targets = problem.build().client("client-3").data[1]
    assert torch.equal(targets[0], problem.centres)


def test_assignments_are_the_papers_cases() -> None:
    everything = Quadratic(objectives=3, clients=4).build().assignment()
    one = Quadratic(objectives=3, clients=3, assignment="one-each").build().assignment()
    subsets = Quadratic(objectives=3, clients=6, assignment="subsets").build().assignment()
    assert bool((everything == 1).all())
    assert torch.equal(one, torch.eye(3, dtype=torch.int64))
    assert bool((subsets.sum(1) >= 1).all())
    assert bool((subsets.sum(0) >= 1).all())
    assert int(subsets.sum()) < 18


def test_distance_to_the_pareto_set_is_that_to_the_hull_of_the_centres() -> None:
    problem = Quadratic(objectives=4, dimension=5, angle=80, scale_ratio=10)
    for seed in range(5):
        x = 2 * point(5, seed=seed)
        away = problem.centres - x
        expected = float((brute_force_min_norm(away) @ away).norm())
        assert problem.pareto_distance(x) == pytest.approx(expected, rel=1e-9)
    inside = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64) @ problem.centres
    assert problem.pareto_distance(inside) < 1e-7
    assert problem.pareto_distance(problem.centres[2]) < 1e-7


def test_two_unit_centres_lie_at_the_cosine_of_half_the_angle() -> None:
    for angle in (0.0, 60.0, 120.0, 180.0):
        problem = Quadratic(angle=angle)
        half = math.cos(math.radians(angle / 2))
        assert problem.pareto_distance(problem.start) == pytest.approx(half, abs=1e-7)


def test_the_pareto_set_of_narrow_bowls_is_not_said_in_closed_form() -> None:
    with pytest.raises(ValueError, match=r"no closed form for `curvature` 30.*`stationarity"):
        NARROW.pareto_distance(NARROW.start)


def test_a_pareto_point_minimises_the_weighted_sum_and_is_stationary() -> None:
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    x = NARROW.pareto_point(weights)
    assert float((weights @ NARROW.gradients(x)).norm()) < 1e-12
    best = float(weights @ NARROW.losses(x))
    for seed in range(5):
        assert float(weights @ NARROW.losses(x + 0.1 * point(6, seed=seed))) > best
    assert NARROW.stationarity(x) < 1e-12
    assert NARROW.stationarity(NARROW.start) > 1e-4


def test_only_the_ratios_of_weights_matter_and_one_weight_alone_is_its_centre() -> None:
    assert torch.allclose(NARROW.pareto_point([1, 2, 3]), NARROW.pareto_point([10, 20, 30]))
    assert torch.allclose(NARROW.pareto_point([0, 1, 0]), NARROW.centres[1])
    assert NARROW.optimum([0, 1, 0])["f2"] == pytest.approx(0, abs=1e-12)


def test_the_optimum_is_the_losses_at_the_pareto_point() -> None:
    values = NARROW.losses(NARROW.pareto_point())
    assert NARROW.optimum() == dict(zip(("f1", "f2", "f3"), values.tolist(), strict=True))


@pytest.mark.parametrize("weights", [[1, 1], [1, -1, 1], [0, 0, 0], [1, math.nan, 1]])
def test_impossible_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="`weights` must be 3 numbers"):
        NARROW.pareto_point(weights)


def test_training_reaches_the_pareto_set() -> None:
    problem = Quadratic(objectives=3, angle=60, scale_ratio=4, clients=3, assignment="one-each")
    result = fit(problem.build(), FMGDA(local_steps=1, server_lr=0.5), rounds=150)
    assert problem.pareto_distance(flat(result.model)) < 1e-3
    assert result.losses[0].tolist() == pytest.approx(problem.losses(problem.start).tolist())


def test_training_on_narrow_bowls_comes_to_a_stationary_point() -> None:
    problem = Quadratic(curvature=5, angle=120)
    result = fit(problem.build(), MGD(server_lr=0.9), rounds=150, optimum=problem.optimum())
    assert problem.stationarity(flat(result.model)) < 1e-6


def test_the_seed_decides_everything_and_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state()
    first, same, other = (Quadratic(seed=seed).build() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    data = [f.client("client-7").data[1] for f in (first, same, other)]
    assert torch.equal(data[0], data[1])
    assert not torch.equal(data[0], data[2])
    assert flat(first.model).dtype == data[0].dtype == torch.float64


def test_all_wrong_options_are_said_at_once() -> None:
    wrong: dict[str, Any] = {
        "objectives": 0, "dimension": 2.5, "angle": -1, "scale_ratio": 0.5, "curvature": math.inf,
        "clients": True, "samples": "many", "noise": -0.1, "assignment": "some", "seed": 1.5,
        "heterogeneity": -1,
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^Quadratic: ") as caught:
        Quadratic(**wrong)
    for name, value in wrong.items():
        assert re.search(rf"`{name}` must [^`]*got {re.escape(repr(value))}\.", str(caught.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objectives": 3, "angle": 121}, "`angle` must be at most 120 for 3 objectives"),
        ({"objectives": 3, "dimension": 2}, "`dimension` must be at least 3"),
        ({"objectives": 3, "clients": 2, "assignment": "one-each"}, "`clients` must be at least 3"),
        ({"samples": 1}, "`noise` must be 0 with one sample"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Quadratic(**options)
