"""Dominance and hypervolume, beside what brute force says."""

from __future__ import annotations

import builtins
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fmol.tradeoffs import dominates, exact_limit, hypervolume, non_dominated

# Few different values, so that ties and copies are common.
POINTS = st.tuples(st.integers(1, 12), st.integers(1, 4)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.integers(0, 3).map(float))
)


def beaten(points: np.ndarray[Any, Any], i: int) -> bool:
    return any(
        all(a <= b for a, b in zip(other, points[i], strict=True))
        and any(a < b for a, b in zip(other, points[i], strict=True))
        for other in points
    )


@given(POINTS)
def test_what_is_kept_is_what_no_other_point_beats(points: np.ndarray[Any, Any]) -> None:
    kept = non_dominated(points)
    assert kept.tolist() == [not beaten(points, i) for i in range(len(points))]
    for i, j in itertools.product(range(len(points)), repeat=2):
        if dominates(points[i], points[j]):
            assert not kept[j]


@given(POINTS)
def test_maximising_is_minimising_the_negative(points: np.ndarray[Any, Any]) -> None:
    turned = [s % 2 == 0 for s in range(points.shape[1])]
    signs = np.where(turned, -1.0, 1.0)
    assert non_dominated(points * signs, turned).tolist() == non_dominated(points).tolist()
    assert non_dominated(-points, True).tolist() == non_dominated(points).tolist()


def test_many_points_are_compared_in_parts_with_the_same_outcome() -> None:
    points = np.random.default_rng(0).integers(0, 30, (3000, 3)).astype(float)
    kept = non_dominated(points)
    some = np.random.default_rng(1).integers(0, 3000, 60)
    assert [bool(kept[i]) for i in some] == [not beaten(points, i) for i in some]


def test_copies_do_not_dominate_one_another() -> None:
    assert not dominates([1.0, 2.0], [1.0, 2.0])
    assert non_dominated([[1.0, 2.0]] * 3).all()


def union_of_boxes(points: np.ndarray[Any, Any], corner: np.ndarray[Any, Any]) -> float:
    """The volume by inclusion and exclusion over all subsets of the boxes."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for chosen in itertools.combinations(points, size):
            sides = np.maximum(corner - np.max(chosen, axis=0), 0)
            total += (-1) ** (size + 1) * float(np.prod(sides))
    return total


@pytest.mark.parametrize("objectives", [2, 3, 4, 6])
@given(seed=st.integers(0, 1000), count=st.integers(1, 7))
@settings(max_examples=25)
def test_hypervolume_is_that_of_inclusion_and_exclusion(
    objectives: int, seed: int, count: int
) -> None:
    points = np.random.default_rng(seed).random((count, objectives)) * 1.3
    corner = np.full(objectives, 1.1)
    found = hypervolume(points, corner)
    assert found.exact
    assert math.isclose(float(found), union_of_boxes(points, corner), rel_tol=1e-9, abs_tol=1e-12)
    assert list(found.beyond) == [i for i, p in enumerate(points) if not (p < corner).all()]


def test_more_that_is_better_covers_the_same_turned_around() -> None:
    points = np.random.default_rng(0).random((6, 3))
    plain = hypervolume(points, [1.0, 1.0, 1.0])
    turned = hypervolume(1 - points, [0.0, 0.0, 0.0], maximise=True)
    assert math.isclose(float(plain), float(turned), rel_tol=1e-12)


def test_an_estimate_is_within_a_few_standard_errors_and_the_same_each_time() -> None:
    points = np.random.default_rng(0).random((20, 5))
    exact, estimate = (hypervolume(points, [1.0] * 5, estimate=how) for how in (False, True))
    assert not estimate.exact
    assert abs(float(estimate) - float(exact)) < 4 * estimate.error < 0.05 * float(exact)
    assert estimate == hypervolume(points, [1.0] * 5, estimate=True)
    assert "± " in str(estimate)


def test_points_beyond_the_reference_are_said_and_add_nothing() -> None:
    found = hypervolume([[0.0, 0.0], [2.0, -1.0], [1.0, 0.5]], [1.0, 1.0])
    assert (found.value, found.beyond) == (1.0, (1, 2))
    assert "2 points are beyond the reference and add nothing" in str(found)
    assert hypervolume([[2.0, 2.0]], [1.0, 1.0]).value == 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: non_dominated([[1.0, math.nan]]), r"no number at \[0, 1\] \(NaN\)"),
        (lambda: dominates([1.0, math.nan], [1.0, 2.0]), "NaN"),
        (lambda: non_dominated([1.0, 2.0]), r"a row per point and a column per objective"),
        (lambda: dominates([1.0], [1.0, 2.0]), "the same objectives"),
        (lambda: non_dominated([[1.0, 2.0]], [True]), "`maximise` must be true or false"),
        (lambda: hypervolume([[1.0, 2.0]], [3.0]), "`reference` must be 2 finite numbers"),
        (lambda: hypervolume([[1.0, 2.0]], [3.0, math.inf]), "`reference` must be 2 finite"),
        (lambda: hypervolume([[1.0, -math.inf]], [3.0, 1.0]), "infinitely good"),
        (lambda: hypervolume(np.eye(40), [2.0] * 40), "at most 31 objectives, got 40"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_exact_value_that_would_take_too_long_is_refused_with_the_way_out() -> None:
    rows = np.abs(np.random.default_rng(0).standard_normal((300, 10)))
    points = 1 - rows / np.linalg.norm(rows, axis=1, keepdims=True)
    limit = exact_limit(10)
    assert limit is not None
    with pytest.raises(ValueError, match=f"up to {limit} points it takes seconds. Pass `estimate"):
        hypervolume(points, [1.1] * 10)
    assert hypervolume(points, [1.1] * 10, estimate=True).value > 0


def test_without_moocore_the_way_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **named: Any) -> Any:
        if name == "moocore":
            raise ImportError(name)
        return real(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r'pip install "fmol\[moocore\]"'):
        hypervolume([[1.0, 1.0]], [2.0, 2.0])
