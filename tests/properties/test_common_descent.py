"""Every way of normalising keeps common descent, on random problems of many kinds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmol.algorithms.descent import find_direction, measure_angles
from fmol.rules import MinNorm, Normalize

NORMALIZE: list[Normalize] = ["none", "l2", "loss", "loss+"]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Deltas `[S, d]` of very different lengths that mostly have a common descent direction, losses."""
    size = draw(st.integers(2, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    common = torch.randn(1, 12, generator=generator, dtype=torch.float64)
    pull = draw(st.sampled_from([0.0, 0.5, 2.0]))
    rows = torch.randn(size, 12, generator=generator, dtype=torch.float64) + pull * common
    decades = draw(st.sampled_from([0.0, 2.0, 4.0]))
    exponents = decades * (2 * torch.rand(size, 1, generator=generator, dtype=torch.float64) - 1)
    losses = torch.rand(size, generator=generator, dtype=torch.float64) * 10 ** -torch.rand(
        size, generator=generator, dtype=torch.float64
    )
    return rows * 10**exponents, losses


@pytest.mark.parametrize("normalize", NORMALIZE)
@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_no_objective_is_hurt_whatever_the_normalisation(
    normalize: Normalize, problem: tuple[Tensor, Tensor]
) -> None:
    deltas, losses = problem
    names = [str(s) for s in range(len(deltas))]
    found = find_direction(deltas, names, rule=MinNorm(), normalize=normalize, losses=losses)
    lengths = deltas.norm(dim=1)
    if float(lengths.max() / lengths.min()) < 1e3:  # Beyond, rounding of the Gramian shows.
        assert found.gap <= 1e-8
    if found.stationary:
        return
    cosines = (deltas @ found.vector) / (deltas.norm(dim=1) * found.vector.norm())
    assert float(cosines.min()) > -1e-9
    assert float(cosines.min()) == pytest.approx(found.min_cosine, abs=1e-6)
    assert found.norm_squared == pytest.approx(float(found.vector.square().sum()), rel=1e-6)
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(problem=problems())
def test_a_normalised_step_spends_the_mean_length_of_the_updates(
    problem: tuple[Tensor, Tensor],
) -> None:
    deltas, losses = problem
    names = [str(s) for s in range(len(deltas))]
    for normalize in NORMALIZE[1:]:
        found = find_direction(deltas, names, rule=MinNorm(), normalize=normalize, losses=losses)
        spent = float((found.scale * found.weights * deltas.norm(dim=1)).sum())
        assert spent == pytest.approx(float(deltas.norm(dim=1).mean()), rel=1e-9)


def test_weights_of_unit_vectors_on_the_raw_updates_would_hurt_somebody() -> None:
    """Why the coefficients are μ/c: μ on the raw updates, as published code has it, fails often."""
    generator = torch.Generator().manual_seed(0)
    hurt = ours = 0
    for _ in range(200):
        deltas = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        deltas *= 10 ** torch.randn(3, 1, generator=generator, dtype=torch.float64)
        unit = deltas / deltas.norm(dim=1, keepdim=True)
        mu = find_direction(unit, "abc", rule=MinNorm()).weights
        hurt += bool((deltas @ (mu @ deltas) < 0).any())
        right = find_direction(deltas, "abc", rule=MinNorm(), normalize="l2")
        ours += bool((deltas @ right.vector < -1e-9 * deltas.norm(dim=1)).any())
    assert hurt > 40
    assert ours == 0


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_a_protected_objective_is_not_hurt_and_does_not_pull(
    problem: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    deltas, losses = problem
    size = len(deltas)
    mask = data.draw(
        st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda m: not all(m))
    )
    protected = torch.tensor(mask)
    names = [str(s) for s in range(size)]
    for normalize in NORMALIZE:
        found = find_direction(
            deltas, names, rule=MinNorm(), normalize=normalize, losses=losses, protected=protected
        )
        spent = float((found.scale * found.weights * deltas.norm(dim=1))[~protected].sum())
        if normalize != "none":
            assert spent == pytest.approx(float(deltas[~protected].norm(dim=1).mean()), rel=1e-9)
        else:
            assert float((found.scale * found.weights)[~protected].sum()) == pytest.approx(1)
        if found.stationary:
            continue
        lengths = deltas.norm(dim=1)
        cosines = (deltas @ found.vector) / (lengths * found.vector.norm())
        assert float(cosines.min()) > -1e-7
        free = find_direction(deltas, names, rule=MinNorm(), normalize=normalize, losses=losses)
        if normalize == "none":  # Being let off, the protected ones can only leave more room.
            assert found.norm_squared >= free.norm_squared * (1 - 1e-9)
            if float(lengths.max() / lengths.min()) < 1e3:
                falls = deltas @ found.vector
                assert float(falls[~protected].min()) >= found.norm_squared * (1 - 1e-7)


def test_the_certificate_asks_of_a_protected_objective_only_that_it_is_not_hurt() -> None:
    deltas = torch.eye(2, dtype=torch.float64)
    guarded = torch.tensor([False, True])
    found = find_direction(deltas, "ab", rule=MinNorm(), protected=guarded)
    assert found.gap == pytest.approx(0, abs=1e-12)
    assert found.min_cosine == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(found.vector, deltas[0])


def test_outside_the_shared_parameters_the_direction_is_the_plain_sum() -> None:
    deltas = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shared = torch.arange(10) < 6
    found = find_direction(deltas, "abc", rule=MinNorm(), shared=shared)
    trunk = find_direction(deltas[:, :6], "abc", rule=MinNorm())
    torch.testing.assert_close(found.vector[:6], trunk.vector)
    torch.testing.assert_close(found.vector[6:], deltas[:, 6:].sum(0))
    assert found.norm_squared == pytest.approx(trunk.norm_squared)
    angles = measure_angles(deltas, shared)
    torch.testing.assert_close(angles.norms, deltas[:, :6].norm(dim=1))


def test_a_negative_loss_cannot_be_normalised_by() -> None:
    with pytest.raises(ValueError, match="not negative"):
        find_direction(
            torch.eye(2, dtype=torch.float64),
            "ab",
            rule=MinNorm(),
            normalize="loss",
            losses=torch.tensor([1.0, -0.1]),
        )


def test_a_solved_objective_steps_aside_under_normalisation_by_loss() -> None:
    """The stall: plain min-norm gives the tiny update all the weight, "loss" lets the others move."""
    deltas = torch.tensor([[1e-4, 0.0], [0.0, 1.0]], dtype=torch.float64)
    losses = torch.tensor([1e-4, 1.0], dtype=torch.float64)
    plain = find_direction(deltas, "ab", rule=MinNorm())
    freed = find_direction(deltas, "ab", rule=MinNorm(), normalize="loss", losses=losses)
    assert float(plain.vector.norm()) < 2e-4
    assert float(freed.vector[1]) == pytest.approx(0.25, rel=1e-3)
