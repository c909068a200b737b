"""Waves: the closed forms are those of the federation, and the constants are the least ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, fit
from fmol.problems.waves import Waves
from support import flat

SMALL = Waves(objectives=3, dimension=4, clients=5, samples=12, assignment="subsets", seed=2)


def point(size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(size, generator=generator, dtype=torch.float64)


def sample_gradients(problem: Waves, client: int, s: int, x: Tensor) -> Tensor:
    """Of each sample by itself, `[n, d]`."""
    federation = problem.build()
    inputs, targets = federation.client(federation.population.ids()[client]).data
    each = []
    for row in range(len(inputs)):
        at = x.clone().requires_grad_()
        values = federation.objectives[s].loss(at[None], targets[row : row + 1])
        assert isinstance(values, Tensor)
        each.append(torch.autograd.grad(values.sum(), at)[0])
    return torch.stack(each)


def held(problem: Waves) -> list[tuple[int, int]]:
    """(client, objective) of all that there are."""
    matrix = problem.build().assignment()  # [S, M]
    return [(i, s) for s in range(matrix.shape[0]) for i in range(matrix.shape[1]) if matrix[s, i]]


@pytest.mark.parametrize("assignment", ["all", "one-each", "subsets"])
def test_losses_and_gradients_in_closed_form_are_those_of_the_federation(assignment: Any) -> None:
    problem = Waves(objectives=3, dimension=4, clients=5, samples=12, assignment=assignment)
    x = point(4)
    result = fit(
        problem.build(), FMGDA(local_steps=1), 1, device="cpu", start=x, true_gradients_every=1
    )
    assert result.losses[0].tolist() == pytest.approx(problem.losses(x).tolist(), rel=1e-12)
    assert result.reports[0].stationarity == pytest.approx(problem.stationarity(x), rel=1e-9)
    norms = problem.gradients(x).norm(dim=1).tolist()
    assert list(result.reports[0].delta_norms.values()) == pytest.approx(norms, rel=1e-9)


def test_each_objective_is_least_at_its_minimum_and_nowhere_below_its_infimum() -> None:
    for s, x in enumerate(SMALL.minima):
        assert float(SMALL.losses(x)[s]) == pytest.approx(float(SMALL.infimum[s]), rel=1e-12)
        assert float(SMALL.gradients(x)[s].norm()) < 1e-12
    for seed in range(50):
        assert bool((SMALL.losses(point(4, seed)) >= SMALL.infimum).all())
    assert bool((SMALL.infimum > 0).all())


def test_it_is_not_convex_where_training_starts() -> None:
    problem = Waves()

    def value(x: Tensor) -> Tensor:
        away = torch.einsum("sij,i->sj", problem.axes, x) - problem._mean.angle()
        return (1 - problem._mean.abs() * torch.cos(away)).sum()

    curvatures = torch.linalg.eigvalsh(torch.autograd.functional.hessian(value, problem.start))
    assert float(curvatures.min()) < -0.05


def test_no_gradient_changes_faster_than_the_smoothness_and_some_client_does() -> None:
    L, most = SMALL.smoothness, 0.0
    for client, s in held(SMALL):
        phases = SMALL._client_means[client, s]
        # Around the client's own minimum its wave is steepest in change.
        x = SMALL.axes[s] @ phases.angle()
        for j in range(4):
            step = 1e-4 * SMALL.axes[s][:, j]
            change = sample_gradients(SMALL, client, s, x + step).mean(0)
            most = max(most, float(change.norm()) / 1e-4)
    assert most == pytest.approx(L, rel=1e-6)
    assert L <= 1


def test_gradients_are_bounded_by_the_bounds_and_reach_them() -> None:
    reached, squares = 0.0, 0.0
    for client, s in held(SMALL):
        means, doubled = SMALL._client_means[client, s], SMALL._doubled_means[client, s]
        steepest = SMALL.axes[s] @ (means.angle() + math.pi / 2)
        reached = max(reached, float(sample_gradients(SMALL, client, s, steepest).mean(0).norm()))
        loudest = SMALL.axes[s] @ ((doubled.angle() + math.pi) / 2)
        each = sample_gradients(SMALL, client, s, loudest)
        squares = max(squares, float(each.square().sum(1).mean()))
    assert reached == pytest.approx(SMALL.gradient_bound, rel=1e-9)
    assert squares == pytest.approx(SMALL.stochastic_gradient_bound**2, rel=1e-9)
    for seed in range(5):
        for client, s in held(SMALL):
            each = sample_gradients(SMALL, client, s, point(4, seed))
            assert float(each.mean(0).norm()) <= SMALL.gradient_bound
            assert float(each.square().sum(1).mean()) <= SMALL.stochastic_gradient_bound**2


def test_the_variance_of_a_sample_is_at_most_what_is_said_and_reaches_it() -> None:
    largest = 0.0
    for client, s in held(SMALL):
        means, doubled = SMALL._client_means[client, s], SMALL._doubled_means[client, s]
        noisiest = SMALL.axes[s] @ (((doubled - means.square()).angle() + math.pi) / 2)
        each = sample_gradients(SMALL, client, s, noisiest)
        largest = max(largest, float((each - each.mean(0)).square().sum(1).mean()))
        elsewhere = sample_gradients(SMALL, client, s, point(4, client))
        spread = float((elsewhere - elsewhere.mean(0)).square().sum(1).mean())
        assert spread <= SMALL.gradient_variance(1)
    assert largest == pytest.approx(SMALL.gradient_variance(1), rel=1e-9)
    assert SMALL.gradient_variance(3) == pytest.approx(largest * 9 / (3 * 11))
    assert SMALL.gradient_variance(12) == 0


def test_clients_differ_and_without_heterogeneity_only_by_noise() -> None:
    assert float((SMALL._client_means[0] - SMALL._client_means[1]).abs().max()) > 0.3
    same = Waves(heterogeneity=0, noise=0, clients=3)
    assert torch.allclose(same._client_means[0], same._client_means[2])
    assert torch.allclose(same.infimum, torch.zeros(2, dtype=torch.float64), atol=1e-12)


def test_training_comes_to_a_pareto_stationary_point() -> None:
    problem = Waves(objectives=3, clients=3, samples=8)
    result = fit(problem.build(), FMGDA(local_steps=1, server_lr=0.5), 150, device="cpu")
    assert problem.stationarity(flat(result.model)) < 1e-4 * problem.stationarity(problem.start)


def test_the_seed_decides_everything() -> None:
    first, same, other = (Waves(seed=seed).build() for seed in (1, 1, 2))
    data = [f.client("client-7").data[1] for f in (first, same, other)]
    assert torch.equal(data[0], data[1])
    assert not torch.equal(data[0], data[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objectives": 3, "angle": 121}, "`angle` must be at most 120 for 3 objectives"),
        ({"objectives": 3, "clients": 2, "assignment": "one-each"}, "`clients` must be at least 3"),
        ({"noise": -1}, "`noise` must be a finite number of at least 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Waves(**options)
