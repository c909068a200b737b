"""The min-norm step on problems whose answer is known, at the edges, and on what it must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fmol import minnorm
from fmol.minnorm import certificate, min_norm

Rows = list[list[float]]


def gramian(rows: Rows) -> Tensor:
    deltas = torch.tensor(rows, dtype=torch.float64)
    return deltas @ deltas.T


TEXTBOOK: dict[str, tuple[Rows, list[float]]] = {
    "one": ([[3.0, 4.0]], [1]),
    "two of the same length": ([[1.0, 0.0], [0.0, 1.0]], [1 / 2, 1 / 2]),
    "two of other lengths": ([[1.0, 0.0], [0.0, 2.0]], [4 / 5, 1 / 5]),
    "the shorter one alone": ([[1.0, 0.0], [2.0, 1.0]], [1, 0]),
    "the shorter one alone, second": ([[2.0, 1.0], [1.0, 0.0]], [0, 1]),
    "two that conflict": ([[1.0, 0.0], [-1.0, 1.0]], [3 / 5, 2 / 5]),
    "two copies": ([[1.0, 2.0], [1.0, 2.0]], [1 / 2, 1 / 2]),
    "three orthogonal": (
        [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]],
        [36 / 49, 9 / 49, 4 / 49],
    ),
    "one beyond the segment": ([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [1 / 2, 1 / 2, 0]),
    "copies share alike": ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [1 / 4, 1 / 2, 1 / 4]),
    "parallel ones": ([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]], [0, 1, 0]),
    "one tiny": ([[1e-6, 0.0], [1.0, 1.0], [1.0, -1.0]], [1, 0, 0]),
    "triangle around a point": (
        [[1.0, 1.0, 0.0], [1.0, -0.5, math.sqrt(3) / 2], [1.0, -0.5, -math.sqrt(3) / 2]],
        [1 / 3, 1 / 3, 1 / 3],
    ),
}


@pytest.mark.parametrize("name", TEXTBOOK)
def test_textbook_weights(name: str) -> None:
    rows, weights = TEXTBOOK[name]
    solution = min_norm(gramian(rows))
    direction = torch.tensor(weights, dtype=torch.float64) @ torch.tensor(rows, dtype=torch.float64)
    assert solution.weights.tolist() == pytest.approx(weights, abs=1e-13)
    assert solution.norm_squared == pytest.approx(float(direction @ direction), rel=1e-13)
    assert solution.gap == pytest.approx(0, abs=1e-13)
    assert not solution.stationary


def test_the_smallest_cosine_is_that_of_the_longest_active_row() -> None:
    # d = (4/5, 2/5), so cos(Δ_2, d) = ‖d‖/‖Δ_2‖.
    assert min_norm(gramian([[1, 0], [0, 2]])).min_cosine == pytest.approx(math.sqrt(1 / 5))


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        ([[1.0], [-3.0]], [3 / 4, 1 / 4]),
        ([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]], [1 / 2, 1 / 4, 1 / 4]),
        ([[0.0, 0.0]], [1]),
        ([[0.0, 0.0], [1.0, 2.0]], [1, 0]),
        ([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [3.0, 1.0]], [0, 1 / 2, 1 / 2, 0]),
    ],
)
def test_no_direction_is_left_at_a_stationary_point(rows: Rows, weights: list[float]) -> None:
    solution = min_norm(gramian(rows))
    assert solution.weights.tolist() == pytest.approx(weights, abs=1e-13)
    assert solution.stationary
    assert solution.norm_squared == pytest.approx(0, abs=1e-14)
    assert solution.gap == 0.0
    assert math.isnan(solution.min_cosine)


@pytest.mark.parametrize(
    ("rows", "protected", "weights"),
    [
        ([[1.0, 0.0], [-1.0, math.sqrt(3)]], [False, True], [1, 1 / 4]),
        ([[1.0, 0.0], [1.0, 5.0]], [False, True], [1, 0]),
        ([[1.0, 0.0], [1.0, 5.0], [0.0, 2.0]], [False, True, False], [4 / 5, 0, 1 / 5]),
        ([[0.0, 0.0], [1.0, 0.0]], [True, False], [0, 1]),
        ([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [True, False, False], [0, 4 / 5, 1 / 5]),
        ([[1.0, 0.0], [0.0, 0.0], [-1.0, math.sqrt(3)]], [False, True, True], [1, 0, 1 / 4]),
    ],
)
def test_protected_objectives_bend_the_direction_only_as_far_as_they_must(
    rows: Rows, protected: list[bool], weights: list[float]
) -> None:
    solution = min_norm(gramian(rows), protected=protected)
    assert solution.weights.tolist() == pytest.approx(weights, abs=1e-13)
    assert solution.gap == pytest.approx(0, abs=1e-13)
    direction = solution.weights @ torch.tensor(rows, dtype=torch.float64)
    assert solution.norm_squared == pytest.approx(float(direction @ direction))


def test_a_protected_opposite_leaves_no_direction() -> None:
    solution = min_norm(gramian([[1.0], [-1.0]]), protected=[False, True])
    assert solution.stationary
    assert solution.weights.tolist() == pytest.approx([1, 1])


def test_an_active_zero_row_stops_even_beside_a_protected_one() -> None:
    solution = min_norm(gramian([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), [True, False, False])
    assert solution.stationary
    assert solution.weights.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda g: g.float(), id="float32"),
        pytest.param(lambda g: g.bfloat16(), id="bfloat16"),
        pytest.param(lambda g: g.long(), id="integers"),
        pytest.param(lambda g: g.clone().requires_grad_(), id="with gradient"),
        pytest.param(lambda g: g.numpy(), id="numpy"),
        pytest.param(lambda g: g.numpy().astype(np.float32), id="numpy float32"),
        pytest.param(lambda g: g.tolist(), id="lists"),
        pytest.param(lambda g: torch.stack([g, g], -1)[..., 0], id="strided"),
    ],
)
def test_any_kind_of_matrix_is_taken(given: Callable[[Tensor], Any]) -> None:
    solution = min_norm(given(gramian([[1, 0, 0], [0, 2, 0], [0, 0, 1]])))
    assert solution.weights.dtype == torch.float64
    assert solution.weights.device.type == "cpu"
    assert not solution.weights.requires_grad
    assert solution.weights.tolist() == pytest.approx([4 / 9, 1 / 9, 4 / 9])


@pytest.mark.gpu
def test_a_matrix_on_a_gpu_is_taken() -> None:
    matrix = gramian([[1, 0], [0, 2]]).cuda()
    assert min_norm(matrix).weights.tolist() == pytest.approx([4 / 5, 1 / 5])
    mask = torch.tensor([False, True], device="cuda")
    assert min_norm(matrix, mask).weights.tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize(
    "mask",
    [
        [False, True],
        (False, True),
        np.array([False, True]),
        torch.tensor([False, True]),
        [np.False_, np.True_],
    ],
)
def test_any_kind_of_mask_is_taken(mask: Any) -> None:
    assert min_norm(gramian([[1, 0], [0, 2]]), mask).weights.tolist() == pytest.approx([1, 0])


def test_the_input_is_left_alone() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 4))
    matrix = rows @ rows.T
    matrix[0, 1] *= 1 + 1e-9  # so that it is symmetrised, too
    mask = np.array([True, False, False, True, False, False])
    before, mask_before = matrix.copy(), mask.copy()
    min_norm(torch.from_numpy(matrix), mask)
    solution = min_norm(matrix, mask)
    certificate(matrix, solution.weights, mask)
    assert np.array_equal(matrix, before)
    assert np.array_equal(mask, mask_before)


def test_an_asymmetry_of_rounding_is_averaged_out() -> None:
    matrix = gramian([[1, 0, 0], [1, 1, 0], [0, 1, 2]])
    skewed = matrix.clone()
    skewed[0, 1] += 1e-7
    skewed[1, 0] -= 1e-7
    assert torch.allclose(
        min_norm(skewed).weights, min_norm(matrix).weights, rtol=1e-12, atol=1e-12
    )


def test_float32_rounding_of_the_gramian_moves_the_answer_by_as_much() -> None:
    rows = np.random.default_rng(1).standard_normal((12, 40))
    exact = min_norm(rows @ rows.T)
    rounded = min_norm((rows @ rows.T).astype(np.float32))
    assert rounded.norm_squared == pytest.approx(exact.norm_squared, rel=1e-6)
    assert rounded.gap < 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_an_indefinite_matrix_still_gives_finite_weights_and_an_honest_certificate(
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((30, 5)) + 0.7 * generator.standard_normal(5)
    matrix = (rows @ rows.T).astype(np.float32)  # eigenvalues down to −1e−6: no vectors have this
    solution = min_norm(matrix)
    weights = solution.weights.numpy()
    assert np.isfinite(weights).all()
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    if not solution.stationary:
        products = matrix.astype(np.float64) @ weights
        gap = (weights @ products - products.min()) / (weights @ products)
        assert solution.gap == pytest.approx(gap, abs=1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("own", "common", "all_active"), [(200, 0, True), (50, 0.2, False), (0, 2, False)]
)
def test_a_thousand_objectives(own: float, common: float, all_active: bool) -> None:
    generator = np.random.default_rng(2)
    rows = own * np.eye(1000, 1200) + generator.standard_normal((1000, 1200))
    rows += common * generator.standard_normal(1200)
    matrix = rows @ rows.T
    solution = min_norm(matrix)
    weights = solution.weights.numpy()
    active = np.count_nonzero(weights)
    assert active == 1000 if all_active else 0 < active < 1000
    assert weights.min() >= 0
    assert abs(weights.sum() - 1) <= 1e-12
    assert solution.gap < 1e-9
    products = matrix @ weights
    assert products.min() >= (weights @ products) * (1 - 1e-9)
    assert products[weights > 0].max() == pytest.approx(products.min(), rel=1e-9)


def test_a_thousand_copies() -> None:
    solution = min_norm(np.full((1000, 1000), 0.3))
    assert solution.norm_squared == pytest.approx(0.3)
    assert float(solution.weights.sum()) == pytest.approx(1, abs=1e-12)
    assert solution.gap == pytest.approx(0, abs=1e-12)


def test_the_active_set_method_agrees_with_block_pivoting(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(4)
    rows = generator.standard_normal((80, 100)) + 0.5 * generator.standard_normal(100)
    pivoted = min_norm(rows @ rows.T)
    monkeypatch.setattr(minnorm, "_pivot_blocks", lambda H, a: None)
    grown = min_norm(rows @ rows.T)
    assert 0 < np.count_nonzero(grown.weights) < 80
    assert torch.allclose(grown.weights, pivoted.weights, rtol=1e-10, atol=1e-14)


def test_the_certificate_is_that_of_the_vectors() -> None:
    generator = np.random.default_rng(5)
    rows, weights = generator.standard_normal((7, 20)), generator.random(7)
    mask = np.array([True, False, False, True, False, False, False])
    direction = weights @ rows
    falls = rows @ direction
    squared = float(direction @ direction)
    proof = certificate(rows @ rows.T, weights, mask)
    assert proof.norm_squared == pytest.approx(squared)
    expected = max(squared - falls[~mask].min(), -falls[mask].min()) / squared
    assert proof.gap == pytest.approx(expected)
    lengths = np.linalg.norm(rows, axis=1)
    assert proof.min_cosine == pytest.approx((falls / lengths).min() / math.sqrt(squared))
    assert not proof.stationary


def test_the_certificate_of_a_solution_is_the_solution_s_own() -> None:
    rows = np.random.default_rng(6).standard_normal((9, 12))
    solution = min_norm(rows @ rows.T)
    proof = certificate(rows @ rows.T, solution.weights)
    assert (proof.norm_squared, proof.gap) == (solution.norm_squared, solution.gap)
    assert (proof.min_cosine, proof.stationary) == (solution.min_cosine, solution.stationary)


def test_equal_weights_that_hurt_an_objective_show_a_gap_above_one() -> None:
    proof = certificate(gramian([[1, 0], [-3, 1]]), [0.5, 0.5])
    assert proof.gap > 1
    assert proof.min_cosine < 0


def test_zero_rows_are_left_out_of_the_smallest_cosine() -> None:
    proof = certificate(gramian([[0, 0], [1, 0], [1, 1]]), [0.0, 0.5, 0.5])
    assert proof.min_cosine == pytest.approx(2 / math.sqrt(5))
    assert proof.gap == pytest.approx(1)


def test_no_weights_are_a_stationary_direction() -> None:
    assert certificate(gramian([[1, 0], [0, 1]]), [0.0, 0.0]).stationary


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((0, 0)), "at least one row, got shape"),
        (np.zeros(3), r"got shape \(3,\)"),
        (np.zeros((2, 3)), r"got shape \(2, 3\)"),
        (np.zeros((2, 2, 2)), r"got shape \(2, 2, 2\)"),
        ([[1.0, math.nan], [math.nan, 1.0]], r"2 entries that are NaN .* nan at \[0, 1\]"),
        ([[1.0, 0.0], [0.0, math.nan]], r"nan at \[1, 1\]"),
        ([[math.inf, 0.0], [0.0, 1.0]], r"inf at \[0, 0\]"),
        ([[1.0, -math.inf], [-math.inf, 1.0]], r"-inf at \[0, 1\]"),
        ([[0.0, math.nan], [math.nan, 1.0]], "NaN"),
        ([[1.0, 0.5], [0.4, 1.0]], r"not symmetric: 0.5 at \[0, 1\] but 0.4 at \[1, 0\]"),
        ([[1.0, 0.0], [0.0, -2.0]], r"-2 at \[1, 1\], but a squared length cannot"),
        ([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, -1e-30]], "cannot be negative"),
        ([[1.0, 2.1], [2.1, 4.0]], r"2.1 at \[0, 1\] is more than vectors"),
        ([[1.0, -2.1], [-2.1, 4.0]], r"-2.1 at \[0, 1\] is more than vectors"),
        ([[0.0, 1.0], [1.0, 1.0]], "is more than vectors of squared lengths 0 and 1"),
        ([[1e-300, 1e300], [1e300, 1e-300]], "is more than vectors"),
    ],
)
def test_what_is_no_gramian_is_refused(matrix: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        min_norm(matrix)
    with pytest.raises(ValueError, match=message):
        min_norm(torch.tensor(matrix, dtype=torch.float64))


@pytest.mark.parametrize(
    ("protected", "message"),
    [
        ([True], r"must be 2 booleans.*of shape \(1,\)"),
        ([[True, False]], r"of shape \(1, 2\)"),
        ([0, 1], "got int64"),
        (torch.tensor([0.0, 1.0]), "got float32"),
        ([True, True], "marks all of the 2 objectives"),
    ],
)
def test_what_is_no_mask_is_refused(protected: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        min_norm(gramian([[1, 0], [0, 1]]), protected)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], r"one entry per row .* got shape \(1,\)"),
        ([0.5, math.nan], "must be finite"),
        ([0.5, math.inf], "must be finite"),
    ],
)
def test_what_are_no_weights_is_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certificate(gramian([[1, 0], [0, 1]]), weights)
