"""Stationarity of a given model: zero on the Pareto set, positive off it, the same on every engine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmol import FMGDA, Alone, fit
from fmol.problems.quadratic import Quadratic
from fmol.stationarity import stationarity
from support import federation


@given(
    seed=st.integers(0, 50),
    shares=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3),
    curvature=st.sampled_from([1.0, 4.0]),
)
@settings(max_examples=15, deadline=None)
def test_it_is_zero_on_the_pareto_set_and_finds_the_weights_there(
    seed: int, shares: list[float], curvature: float
) -> None:
    problem = Quadratic(
        objectives=3, dimension=5, clients=3, samples=4, curvature=curvature, seed=seed
    )
    there = stationarity(problem.build(), problem.pareto_point(shares))
    assert there.stationary
    assert there.relative < 1e-7
    assert there.common_cosine < 1e-6
    expected = torch.tensor(shares, dtype=torch.float64)
    assert torch.allclose(there.weights, expected / expected.sum(), atol=1e-6)


@given(seed=st.integers(0, 50), away=st.floats(0.01, 3.0))
@settings(max_examples=15, deadline=None)
def test_off_the_pareto_set_it_is_the_closed_form_and_positive(seed: int, away: float) -> None:
    problem = Quadratic(objectives=3, dimension=6, clients=3, samples=4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = problem.start - away * torch.rand(6, generator=generator, dtype=torch.float64)
    found = stationarity(problem.build(), x)
    assert math.isclose(found.norm_squared, problem.stationarity(x), rel_tol=1e-7, abs_tol=1e-12)
    assert found.stationary == (problem.pareto_distance(x) < 1e-7)
    assert 0 <= found.relative <= 1
    assert 0 <= found.common_cosine <= 1


def test_an_objectives_own_unit_does_not_matter_to_the_common_cosine() -> None:
    plain = stationarity(Quadratic().build())
    scaled = stationarity(Quadratic(scale_ratio=100).build())
    assert math.isclose(plain.common_cosine, math.sqrt(0.5), rel_tol=1e-9)
    assert math.isclose(scaled.common_cosine, plain.common_cosine, rel_tol=1e-9)
    assert scaled.relative < 0.1 * plain.relative


def test_every_engine_gives_the_same_number() -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    one, other = (stationarity(problem, engine=name) for name in ("sequential", "vectorized"))
    assert math.isclose(one.norm_squared, other.norm_squared, rel_tol=1e-9)
    assert torch.allclose(one.weights, other.weights, atol=1e-9)


def test_a_result_knows_how_stationary_its_model_is() -> None:
    problem = Quadratic()
    algorithm = FMGDA(local_steps=2, local_lr=0.1, server_lr=0.5)
    result = fit(problem.build(), algorithm, rounds=2, true_gradients_every=1)
    found = result.stationarity()
    assert math.isclose(found.norm_squared, problem.stationarity(result.state.x), rel_tol=1e-6)
    assert found.norm_squared < result.reports[0].stationarity
    assert torch.equal(
        found.weights, stationarity(result.federation, result.model, seed=result.seed).weights
    )
    assert "of the mean gradient, over all 10 clients" in str(found)


def test_a_model_of_each_client_has_no_stationarity_of_all() -> None:
    result = fit(Quadratic(clients=2).build(), Alone(local_steps=1), rounds=1)
    with pytest.raises(ValueError, match="Alone has no model of all"):
        result.stationarity()


def test_a_solved_objective_is_said_in_words() -> None:
    problem = Quadratic()
    there = stationarity(problem.build(), problem.centres[0])
    assert there.stationary
    assert there.common_cosine == pytest.approx(1.0, abs=1e-6)
    assert "no step helps every objective" in str(there)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.zeros(3), r"`model` has shape \[3\]"),
        (torch.full((10,), math.nan), "the parameters in `model` are not finite"),
        (7, "`model` is a int"),
    ],
)
def test_a_model_that_is_none_is_refused(model: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stationarity(Quadratic().build(), model)  # type: ignore[arg-type]


def test_a_cohort_is_nobody_without_a_run() -> None:
    with pytest.raises(ValueError, match="`evaluate` is the cohort"):
        stationarity(Quadratic().build(), evaluate="cohort")
