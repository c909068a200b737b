"""What must hold of every rule: one acceptance test for all, on problems that break careless ones."""

from __future__ import annotations

import itertools
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fmol import FSMGDA, Objective, RoundReport, fit, rules
from fmol.algorithms.descent import find_direction
from fmol.bounded import BoundedSolution, min_norm_within
from fmol.cli.commands import fmol as command_line
from fmol.config import CHOICES, ConfigError, read_config
from fmol.errors import LossError
from fmol.minnorm import min_norm
from fmol.options import OptionsError
from fmol.participation import Number
from fmol.problems.min_norm_families import families
from fmol.result import Snapshot
from fmol.rounds import Checkpoint
from fmol.rules import (
    Capped,
    Context,
    Fixed,
    MinNorm,
    NearPrior,
    Rule,
    Smoothed,
    SmoothTchebycheff,
    TorchJD,
    UpGrad,
)
from support import federation, flat

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
FAMILIES = families()
MILD = ["random", "wide", "half active", "orthogonal", "conflicting"]


@dataclass(frozen=True)
class Case:
    """A rule and what is claimed of it."""

    rule: Rule
    descends: bool = False
    sums_to_one: bool = True


CASES: dict[str, Case] = {
    "min-norm": Case(MinNorm(), descends=True),
    "upgrad": Case(UpGrad(), descends=True, sums_to_one=False),
    "capped": Case(Capped()),
    "near-prior": Case(NearPrior()),
    "fixed": Case(Fixed(default=1.0)),
    "tchebycheff": Case(SmoothTchebycheff(smoothing=1.0)),
    "smoothed": Case(Smoothed(keep=0.5)),
    "smoothed upgrad": Case(Smoothed(UpGrad(), keep=0.5), sums_to_one=False),
    "torchjd": Case(TorchJD("mgda")),
}
every_rule = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
sizes = st.integers(2, 40)
seeds = st.integers(0, 2**32)
problems = st.builds(
    lambda name, S, seed: FAMILIES[name](np.random.default_rng(seed), S),
    st.sampled_from(sorted(FAMILIES)),
    sizes,
    seeds,
)
mild_problems = st.builds(
    lambda name, S, seed: FAMILIES[name](np.random.default_rng(seed), S),
    st.sampled_from(MILD),
    st.integers(2, 12),
    seeds,
)


def gramian_of(deltas: Array) -> Tensor:
    return torch.from_numpy(deltas @ deltas.T)


def context_for(size: int, **fields: Any) -> Context:
    """Objectives 0, 1, … with losses that fall; equal weights in the memory of those that have one."""
    losses = torch.linspace(1, 0.5, size, dtype=torch.float64)
    memory = {f"weight.{s}": torch.tensor(1 / size, dtype=torch.float64) for s in range(size)}
    memory["total"] = torch.tensor(1.0, dtype=torch.float64)
    names = tuple(map(str, range(size)))
    return Context(**{"names": names, "losses": losses, "memory": memory, **fields})


def rounding(gramian: Tensor, weights: Tensor) -> Array:
    """What a float64 Gramian excuses of each `⟨Δ_s, d⟩`."""
    lengths = gramian.diagonal().sqrt().numpy()
    whole = float(np.abs(weights.numpy()) @ lengths)
    return 16 * len(lengths) * EPS * lengths * whole


def hurts(gramian: Tensor, weights: Tensor) -> Array:
    """By how much each objective rises along `−d`, beyond rounding."""
    falls = gramian.numpy().astype(np.longdouble) @ weights.numpy().astype(np.longdouble)
    return np.asarray(-falls - rounding(gramian, weights), dtype=np.float64)


# ---- what holds of all -----------------------------------------------------------------------


def test_every_rule_that_can_be_named_is_in_this_test() -> None:
    assert {type(case.rule) for case in CASES.values()} == set(CHOICES[Rule].values())


@every_rule
@settings(max_examples=60, deadline=None)
@given(deltas=problems)
def test_a_rule_gives_one_finite_weight_per_objective(case: Case, deltas: Array) -> None:
    gramian = gramian_of(deltas)
    weights = case.rule(gramian, context_for(len(deltas)))
    assert weights.shape == (len(deltas),)
    assert weights.dtype == torch.float64
    assert weights.device.type == "cpu"
    assert bool(torch.isfinite(weights).all())
    assert float(weights.min()) >= 0
    if case.sums_to_one:
        assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    else:
        assert float(weights.sum()) >= 1 - 1e-9


@every_rule
@settings(max_examples=40, deadline=None)
@given(deltas=mild_problems, seed=seeds)
def test_the_order_of_the_objectives_changes_nothing_but_the_order_of_the_weights(
    case: Case, deltas: Array, seed: int
) -> None:
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(deltas)))
    gramian, context = gramian_of(deltas), context_for(len(deltas))
    assert context.losses is not None
    other = context_for(
        len(deltas),
        names=tuple(context.names[i] for i in order.tolist()),
        losses=context.losses[order],
    )
    weights = case.rule(gramian, context)
    permuted = case.rule(gramian[order][:, order], other)
    # As directions: where copies or a stationary point leave a choice of weights, any will do. And
    # TorchJD's MGDA stops early, where depends on the order.
    loose = 1e-2 if isinstance(case.rule, TorchJD) else 1e-6
    found, other_way = weights[order].numpy() @ deltas[order], permuted.numpy() @ deltas[order]
    np.testing.assert_allclose(other_way, found, atol=loose * np.linalg.norm(deltas, axis=1).max())


@every_rule
@pytest.mark.parametrize("size", [1, 2, 5])
def test_updates_that_are_all_zero_have_equal_weights(case: Case, size: int) -> None:
    losses = torch.ones(size, dtype=torch.float64)
    context = context_for(size, losses=losses)
    weights = case.rule(torch.zeros(size, size, dtype=torch.float64), context)
    torch.testing.assert_close(weights, torch.full((size,), 1 / size, dtype=torch.float64))


@every_rule
@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-20, 2.0**80])
@settings(max_examples=20, deadline=None)
@given(deltas=mild_problems)
def test_the_unit_of_the_updates_does_not_matter(case: Case, scale: float, deltas: Array) -> None:
    gramian = gramian_of(deltas)
    weights = case.rule(gramian, context_for(len(deltas)))
    scaled = case.rule(gramian * scale**2, context_for(len(deltas)))
    torch.testing.assert_close(scaled, weights, atol=1e-9, rtol=1e-9)


@every_rule
@settings(max_examples=40, deadline=None)
@given(deltas=problems, data=st.data())
def test_a_protected_objective_does_not_pull_and_is_not_hurt(
    case: Case, deltas: Array, data: st.DataObject
) -> None:
    size = len(deltas)
    mask = data.draw(
        st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda m: not all(m))
    )
    protected, gramian = torch.tensor(mask), gramian_of(deltas)
    weights = case.rule(gramian, context_for(size, protected=protected))
    assert bool(torch.isfinite(weights).all())
    assert (hurts(gramian, weights)[protected.numpy()] <= 0).all()
    if case.sums_to_one:
        assert float(weights[~protected].sum()) == pytest.approx(1, abs=1e-9)
    if case.descends:
        assert (hurts(gramian, weights) <= 0).all()


@every_rule
def test_a_protected_objective_that_is_not_in_the_way_has_no_weight(case: Case) -> None:
    context = context_for(3, protected=torch.tensor([False, True, False]))
    assert float(case.rule(torch.eye(3, dtype=torch.float64), context)[1]) == 0


@every_rule
def test_a_rule_trains(case: Case) -> None:
    result = fit(federation(), FSMGDA(local_steps=2, rule=case.rule), rounds=4)
    assert bool((result.losses[-1] < result.losses[0]).any())
    assert all(sum(report.weights.values()) == pytest.approx(1) for report in result.reports)


# ---- common descent --------------------------------------------------------------------------

DESCENDING = {name: case for name, case in CASES.items() if case.descends}


@pytest.mark.parametrize("case", DESCENDING.values(), ids=DESCENDING)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_objective_is_hurt_by_a_rule_that_claims_common_descent(case: Case, family: str) -> None:
    for size, seed in itertools.product((2, 3, 5, 8, 17, 40), range(2)):
        deltas = FAMILIES[family](np.random.default_rng([size, seed]), size)
        gramian = gramian_of(deltas)
        weights = case.rule(gramian, context_for(size))
        assert (hurts(gramian, weights) <= 0).all(), (size, seed)


@pytest.mark.parametrize(
    "case",
    [each for each in CASES.values() if not each.descends],
    ids=[name for name, each in CASES.items() if not each.descends],
)
def test_a_rule_that_does_not_claim_it_hurts_somebody_somewhere(case: Case) -> None:
    """A short update and a long one, nearly opposite; for TorchJD's MGDA many of them, badly scaled."""
    gramian = torch.tensor([[1.0, -9.0], [-9.0, 100.0]], dtype=torch.float64)
    if isinstance(case.rule, TorchJD):
        gramian = gramian_of(FAMILIES["row scales, conflicting"](np.random.default_rng(0), 8))
    weights = case.rule(gramian, context_for(len(gramian)))
    assert hurts(gramian, weights).max() > 0
    assert hurts(gramian, MinNorm()(gramian, context_for(len(gramian)))).max() <= 0


@settings(max_examples=60, deadline=None)
@given(deltas=mild_problems)
def test_upgrad_improves_everyone_where_that_is_possible(deltas: Array) -> None:
    gramian = gramian_of(deltas)
    best = min_norm(gramian)
    lengths = gramian.diagonal().sqrt()
    if best.stationary or best.norm_squared < 1e-6 * float(lengths.min()) ** 2:
        return
    assert float((gramian @ rules.upgrad(gramian) / lengths).min()) > 0


@settings(max_examples=60, deadline=None)
@given(deltas=problems)
def test_upgrads_direction_is_never_longer_than_the_mean_update(deltas: Array) -> None:
    """However large its weights: a projection does not lengthen."""
    gramian = gramian_of(deltas)
    weights = rules.upgrad(gramian)
    lengths = gramian.diagonal().sqrt()
    rounded = 1e-13 * len(deltas) * float(weights @ lengths) ** 2
    assert float(weights @ gramian @ weights) <= float(lengths.mean()) ** 2 * (1 + 1e-9) + rounded


# ---- copies ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(deltas=mild_problems)
def test_a_copy_of_an_objective_does_not_bend_the_min_norm_direction(deltas: Array) -> None:
    both = np.concatenate([deltas, deltas[:1]])
    once, twice = rules.min_norm(gramian_of(deltas)), rules.min_norm(gramian_of(both))
    length = float(np.linalg.norm(deltas, axis=1).max())
    found = twice.weights.numpy() @ both
    np.testing.assert_allclose(found, once.weights.numpy() @ deltas, atol=1e-7 * length)


@pytest.mark.parametrize("copies", [2, 7])
def test_copies_share_what_one_of_them_would_have(copies: int) -> None:
    gramian = torch.ones(copies, copies, dtype=torch.float64)
    for name, case in CASES.items():
        context = context_for(copies, losses=torch.ones(copies, dtype=torch.float64))
        weights = case.rule(gramian, context)
        assert float(weights.sum()) == pytest.approx(1), name


# ---- UPGrad, exactly -------------------------------------------------------------------------


def test_upgrad_of_two_in_closed_form() -> None:
    """Each loses its part along the other: Δ_1 − ⟨Δ_1, Δ_2⟩/‖Δ_2‖²·Δ_2, and alike."""
    weights = rules.upgrad([[1.0, -0.5], [-0.5, 4.0]])
    torch.testing.assert_close(weights, torch.tensor([0.75, 0.5625], dtype=torch.float64))


def nearest_in_the_dual_cone(deltas: Array, s: int) -> Array:
    """The shortest `Δ_s + Σ μ_j Δ_j`, `μ ≥ 0` over all rows, the row itself too: every support."""
    best: Array = deltas[s]
    for rows in itertools.chain.from_iterable(
        itertools.combinations(range(len(deltas)), k) for k in range(1, len(deltas) + 1)
    ):
        multipliers = np.linalg.lstsq(deltas[list(rows)].T, -deltas[s], rcond=None)[0]
        if (multipliers >= 0).all():
            found: Array = deltas[s] + multipliers @ deltas[list(rows)]
            best = found if found @ found < best @ best else best
    return best


@settings(max_examples=40, deadline=None)
@given(
    deltas=st.builds(
        lambda name, S, seed: FAMILIES[name](np.random.default_rng(seed), S),
        st.sampled_from(MILD),
        st.integers(2, 5),
        seeds,
    )
)
def test_a_row_is_projected_onto_the_dual_cone_as_by_brute_force(deltas: Array) -> None:
    """With the row itself among the constraints or not, the nearest point of the cone is the same."""
    rows = rules.project_rows(gramian_of(deltas)).numpy()
    length = float(np.linalg.norm(deltas, axis=1).max())
    for s, row in enumerate(rows):
        assert row[s] == pytest.approx(1, abs=1e-9)
        nearest = nearest_in_the_dual_cone(deltas, s)
        np.testing.assert_allclose(row @ deltas, nearest, atol=1e-6 * length)


@settings(max_examples=40, deadline=None)
@given(deltas=mild_problems)
def test_upgrad_agrees_with_torchjds(deltas: Array) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    linalg = pytest.importorskip("torchjd.linalg")
    if np.linalg.matrix_rank(deltas) < len(deltas):
        return  # Its solver needs a positive definite matrix, and so more of a ridge.
    gramian = gramian_of(deltas)
    projector = linalg.QuadprogProjector(norm_eps=0.0, reg_eps=1e-11)
    theirs = TorchJD(aggregation.UPGradWeighting(projector=projector))
    ours = rules.upgrad(gramian).numpy() @ deltas
    found = theirs(gramian, context_for(len(deltas))).numpy() @ deltas
    np.testing.assert_allclose(found, ours, atol=1e-4 * np.abs(deltas).max())


def test_upgrad_weighs_projections_by_the_preference() -> None:
    gramian = [[1.0, -0.5], [-0.5, 1.0]]
    torch.testing.assert_close(
        rules.upgrad(gramian, [1, 0]), torch.tensor([1.0, 0.5], dtype=torch.float64)
    )
    rule = UpGrad(preference={"0": 1, "1": 0})
    torch.testing.assert_close(
        rule(torch.tensor(gramian), context_for(2)), rules.upgrad(gramian, [1, 0])
    )
    with pytest.raises(ValueError, match="`preference` must have 2 weights"):
        rules.upgrad(gramian, [1.0])


def test_upgrad_of_many_objectives_is_exact() -> None:
    deltas = FAMILIES["row scales, conflicting"](np.random.default_rng(0), 200)
    gramian = gramian_of(deltas)
    assert (hurts(gramian, rules.upgrad(gramian)) <= 0).all()


# ---- bounds ----------------------------------------------------------------------------------


def bounds_for(kind: str, size: int, seed: int) -> tuple[Any, Any]:
    if kind == "cap":
        return 0.0, max(2 / size, 0.3)
    prior = np.random.default_rng(seed).dirichlet(np.ones(size))
    return np.maximum(prior - 0.1, 0), np.minimum(prior + 0.1, 1)


def excess(gramian: Tensor, found: BoundedSolution) -> float:
    """The gap in units of what a float64 Gramian excuses; at most 1 is as good as can be told."""
    if found.stationary:
        return 0.0
    allowed = 1e-9 * found.norm_squared + rounding(gramian, found.weights).max()
    return float(found.gap * found.norm_squared / allowed)


@pytest.mark.parametrize("kind", ["cap", "ball"])
@pytest.mark.parametrize("guarded", [False, True])
@settings(max_examples=120, deadline=None)
@given(deltas=problems, seed=seeds)
def test_nothing_within_the_bounds_is_shorter(
    kind: str, guarded: bool, deltas: Array, seed: int
) -> None:
    gramian, size = gramian_of(deltas), len(deltas)
    protected = None
    if guarded:
        protected = np.random.default_rng(seed).random(size) < 0.4
        protected[0] = False
        kind = "cap"
    active = slice(None) if protected is None else ~protected
    lower, upper = bounds_for(kind, len(np.ones(size)[active]), seed)
    found = min_norm_within(gramian, lower, upper, protected)
    weights = found.weights.numpy()
    assert weights[active].sum() == pytest.approx(1, abs=1e-12)
    assert (weights[active] >= lower).all()
    assert (weights[active] <= upper).all()
    assert (weights >= 0).all()
    assert excess(gramian, found) <= 1


@pytest.mark.parametrize("kind", ["cap", "ball"])
@settings(max_examples=60, deadline=None)
@given(deltas=mild_problems, seed=seeds)
def test_bounded_weights_are_those_of_quadprog(kind: str, deltas: Array, seed: int) -> None:
    quadprog = pytest.importorskip("quadprog")
    gramian, size = gramian_of(deltas), len(deltas)
    lower, upper = bounds_for(kind, size, seed)
    matrix = gramian.numpy() / gramian.trace().item() + 1e-10 * np.eye(size)
    identity = np.eye(size)
    limits = np.concatenate([[1.0], np.full(size, lower), -np.full(size, upper)])
    constraints = np.hstack([np.ones((size, 1)), identity, -identity])
    theirs = quadprog.solve_qp(matrix, np.zeros(size), constraints, limits, 1)[0]
    ours = min_norm_within(gramian, lower, upper)
    # In length: where several weights make the same vector, any of them will do.
    assert ours.norm_squared <= float(theirs @ gramian.numpy() @ theirs) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gramian_of_single_precision_has_bounded_weights_too(family: str) -> None:
    """Its noise makes it indefinite: there may be no shortest vector, but there are weights."""
    deltas = FAMILIES[family](np.random.default_rng(3), 30)
    deltas = deltas / np.abs(deltas).max()
    gramian = torch.from_numpy(deltas.astype(np.float32) @ deltas.astype(np.float32).T)
    for weights in (rules.capped(gramian, 0.3), rules.near_prior(gramian), rules.upgrad(gramian)):
        assert bool(torch.isfinite(weights).all())
        assert float(weights.min()) >= 0
        assert float(weights.sum()) >= 1 - 1e-9


@settings(max_examples=60, deadline=None)
@given(deltas=problems)
def test_bounds_that_do_not_bind_leave_the_min_norm_step(deltas: Array) -> None:
    gramian = gramian_of(deltas)
    plain, bounded = min_norm(gramian), min_norm_within(gramian, 0.0, 1.0)
    if not plain.stationary and not bounded.stationary:
        slack = float(rounding(gramian, plain.weights).max())
        assert bounded.norm_squared <= plain.norm_squared * (1 + 1e-8) + slack


def test_a_cap_of_one_part_is_equal_weights_and_less_is_refused() -> None:
    gramian = torch.diag(torch.tensor([1.0, 4.0, 9.0, 1e-6]))
    torch.testing.assert_close(rules.capped(gramian, 0.25), torch.full((4,), 0.25).double())
    with pytest.raises(ValueError, match=r"`cap` is 0.2, and 4 weights of at most that"):
        rules.capped(gramian, 0.2)
    # In a round with few objectives a cap cannot hold; then they count alike.
    few = Capped(cap=0.2)(gramian[:2, :2], context_for(2))
    torch.testing.assert_close(few, torch.full((2,), 0.5).double())


def test_the_prior_is_renormalised_over_the_objectives_present() -> None:
    rule = NearPrior(prior={"0": 1.0, "1": 1.0, "2": 2.0}, radius=0.0)
    there = context_for(2, names=("0", "2"))
    found = rule(torch.eye(2, dtype=torch.float64), there)
    torch.testing.assert_close(found, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    with pytest.raises(ValueError, match="has no prior for objective `3`"):
        rule(torch.eye(2, dtype=torch.float64), context_for(2, names=("0", "3")))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: min_norm_within(np.eye(2), 0.6, 1.0), "leave no weights"),
        (lambda: min_norm_within(np.eye(2), 0.0, 0.4), "leave no weights"),
        (lambda: min_norm_within(np.eye(2), -0.5, 1.0), "leave no weights"),
        (lambda: min_norm_within(np.eye(2), 0.0, np.ones(3)), "`upper` must be one number or 2"),
        (lambda: min_norm_within(np.eye(2), np.nan, 1.0), "`lower` must be one number or 2"),
        (lambda: rules.near_prior(np.eye(2), radius=-1.0), "`radius` must be of at least 0"),
        (lambda: rules.near_prior(np.eye(2), [0.0, 0.0]), "`prior` must have 2 weights"),
        (lambda: rules.fixed(np.eye(2), [1.0]), "`weights` must be 2"),
        (lambda: rules.fixed(np.eye(2), [0.0, 0.0]), "`weights` are all zero"),
        (lambda: rules.smoothed(np.eye(2), [0.5]), "`previous` must have a finite weight"),
        (lambda: rules.smoothed(np.eye(2), [0.5, 0.5], keep=2.0), "`keep` must be from 0 to 1"),
        (lambda: rules.smooth_tchebycheff(np.eye(2), [1.0]), "`losses` must be 2 finite numbers"),
        (lambda: rules.smooth_tchebycheff(np.eye(2), [1, 1], [0, 0]), "`preference` must be"),
        (
            lambda: rules.smooth_tchebycheff(np.eye(2), [1, 1], smoothing=0.0),
            "`smoothing` must be above 0",
        ),
        (lambda: Fixed({}), "`weights` must name an objective"),
        (lambda: Fixed({"a": -1.0}), "`weights` must be a mapping"),
        (lambda: Capped(cap=0.0), "`cap` must be a finite number above 0"),
        (lambda: Smoothed(keep=1.0), "`keep` must be a finite number of at least 0 and below 1"),
    ],
)
def test_what_cannot_be_is_said_with_the_value(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


# ---- weights from losses ---------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 8), seed=seeds, smoothing=st.sampled_from([0.05, 0.5, 5.0]))
def test_tchebycheff_weights_are_the_gradient_of_the_scalarisation(
    size: int, seed: int, smoothing: float
) -> None:
    generator = np.random.default_rng(seed)
    losses, ideal = torch.from_numpy(generator.random((2, size)))
    preference = torch.from_numpy(generator.random(size) + 0.1)
    losses.requires_grad_(True)
    scaled = preference / preference.mean()
    (smoothing * torch.logsumexp(scaled * (losses - ideal) / smoothing, dim=0)).backward()
    assert losses.grad is not None
    found = rules.smooth_tchebycheff(torch.eye(size), losses, preference, ideal, smoothing)
    torch.testing.assert_close(found, losses.grad / losses.grad.sum())


def test_little_smoothing_gives_the_worst_objective_everything() -> None:
    found = rules.smooth_tchebycheff(torch.eye(3), [0.1, 0.5, 0.4], smoothing=1e-4)
    torch.testing.assert_close(found, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    # Neither a huge loss nor a preference of zero leaves the range of numbers.
    found = rules.smooth_tchebycheff(
        torch.eye(3), [1e9, 2e9, -1e9], [1.0, 0.0, 1.0], smoothing=1e-4
    )
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))


def test_a_loss_that_is_not_known_is_refused_by_name() -> None:
    losses = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    with pytest.raises(LossError, match=r"round 0: objective `1` has a training loss of nan"):
        SmoothTchebycheff()(torch.eye(2), context_for(2, losses=losses))


def test_objectives_without_a_weight_of_their_own_have_the_default() -> None:
    rule = Fixed({"0": 3.0}, default=1.0)
    found = rule(torch.eye(2, dtype=torch.float64), context_for(2))
    torch.testing.assert_close(found, torch.tensor([0.75, 0.25], dtype=torch.float64))
    with pytest.raises(ValueError, match="`Fixed` has no weight for objective `1`"):
        Fixed({"0": 3.0})(torch.eye(2), context_for(2))


def test_an_objective_that_there_is_not_is_named_before_training() -> None:
    rule = Smoothed(Fixed({"a": 1.0, "bb": 1.0}, default=1.0))
    with pytest.raises(
        ValueError, match=r"names objective `bb`, which there is not\. Did you mean `b`"
    ):
        fit(federation(), FSMGDA(local_steps=1, rule=rule), rounds=1)


# ---- memory ----------------------------------------------------------------------------------


def test_smoothed_weights_follow_the_rule_slowly() -> None:
    rule, memory = Smoothed(keep=0.75), dict[str, Tensor]()
    context = Context(names=("a", "b"), memory=memory)
    gramians = [torch.diag(torch.tensor(each).double()) for each in ([1.0, 1.0], [1.0, 4.0])]
    expected = torch.full((2,), 0.5, dtype=torch.float64)
    for gramian in [gramians[0], gramians[1], gramians[1]]:
        weights = rule(gramian, context)
        expected = 0.75 * expected + 0.25 * min_norm(gramian).weights
        torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        rules.smoothed(gramians[1], [0.5, 0.5], keep=0.75), torch.tensor([0.575, 0.425]).double()
    )


def test_who_is_missing_keeps_its_weight_and_the_sum_stays_one() -> None:
    rule, memory = Smoothed(keep=0.5), dict[str, Tensor]()
    gramian = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    names = ("a", "b", "c")
    first = rule(gramian, Context(names=names, memory=memory))
    for there in ([0, 1], [2], [0, 1, 2], [1, 2]):
        own = tuple(names[i] for i in there)
        kept = {name: float(memory[f"weight.{name}"]) for name in names if name not in own}
        weights = rule(gramian[there][:, there], Context(names=own, memory=memory))
        assert float(weights.sum()) == pytest.approx(1)
        assert {name: float(memory[f"weight.{name}"]) for name in kept} == kept
    late = rule(torch.eye(4, dtype=torch.float64), Context(names=(*names, "d"), memory=memory))
    assert float(late.sum()) == pytest.approx(1)
    assert float(first.sum()) == pytest.approx(1)


def test_a_rule_within_smoothing_has_a_memory_of_its_own() -> None:
    inner = Smoothed(SmoothTchebycheff(), keep=0.5)
    assert inner.needs_losses
    assert not Smoothed().needs_losses
    memory: dict[str, Tensor] = {}
    losses = torch.ones(2, dtype=torch.float64)
    context = Context(names=("a", "b"), losses=losses, memory=memory)
    Smoothed(inner, keep=0.5)(torch.eye(2, dtype=torch.float64), context)
    assert set(memory) == {
        *("weight.a", "weight.b", "total"),
        *("of.weight.a", "of.weight.b", "of.total"),
    }


@pytest.mark.parametrize("rule", [Smoothed(UpGrad()), Smoothed(Smoothed(keep=0.5))], ids=repr)
def test_memory_survives_a_break(rule: Rule) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    algorithm = FSMGDA(local_steps=2, batch_size=4, rule=rule)
    participation = Number(2)  # So that objectives are missing in some rounds.
    straight = fit(problem, algorithm, rounds=6, seed=3, participation=participation)
    assert any(report.missing for report in straight.reports)
    kept: list[Checkpoint] = []

    def interrupt(report: RoundReport, snapshot: Snapshot) -> bool:
        kept.append(snapshot.checkpoint())
        return report.round == 2

    fit(problem, algorithm, rounds=6, seed=3, participation=participation, callbacks=[interrupt])
    resumed = fit(
        problem, algorithm, rounds=6, seed=3, participation=participation, resume=kept[-1]
    )
    assert torch.equal(flat(resumed.model), flat(straight.model))
    assert torch.equal(resumed.weights, straight.weights)
    names = {name for name in straight.state.memory if name.startswith("rule.")}
    assert {"rule.total", "rule.weight.a", "rule.weight.b", "rule.weight.c"} <= names


# ---- TorchJD ---------------------------------------------------------------------------------


def test_torchjd_sees_a_trace_of_s() -> None:
    seen: list[Tensor] = []

    def spy(gramian: Tensor) -> Tensor:
        seen.append(gramian)
        return torch.ones(len(gramian))

    for scale in (1e-60, 1.0, 1e60):
        TorchJD(spy)(scale * torch.diag(torch.tensor([1.0, 2.0, 5.0]).double()), context_for(3))
        assert float(seen[-1].trace()) == pytest.approx(3)
        assert seen[-1].dtype == torch.float64


def test_below_a_small_trace_torchjd_alone_would_be_the_mean() -> None:
    """Why the Gramian is scaled before the call."""
    aggregation = pytest.importorskip("torchjd.aggregation")
    gramian = 1e-6 * torch.tensor([[1.0, -2.0], [-2.0, 9.0]], dtype=torch.float64)
    alone = aggregation.UPGradWeighting()(gramian)
    torch.testing.assert_close(alone, torch.full((2,), 0.5).double(), atol=1e-6, rtol=0)
    assert hurts(gramian, alone).max() > 0
    assert hurts(gramian, rules.torchjd(gramian, "mgda")).max() <= 0
    found = rules.torchjd(gramian, "upgrad")
    torch.testing.assert_close(found, rules.upgrad(gramian), atol=2e-3, rtol=0)


def test_what_torchjd_draws_depends_on_the_round_alone() -> None:
    rule, gramian = TorchJD("random"), torch.eye(3, dtype=torch.float64)
    state = torch.get_rng_state()
    first = rule(gramian, context_for(3, round=1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert torch.equal(rule(gramian, context_for(3, round=1)), first)
    assert not torch.equal(rule(gramian, context_for(3, round=2)), first)


def test_a_weighting_that_cannot_be_a_rule_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregation = pytest.importorskip("torchjd.aggregation")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: TorchJD(aggregation.GradVacWeighting()), "keeps a memory that no checkpoint"),
        (lambda: TorchJD("krum"), "`options` {} do not fit `weighting` 'krum'.*n_byzantine"),
        (lambda: TorchJD("krum", {"n_byzantine": -1}), "do not fit `weighting` 'krum'"),
        (lambda: TorchJD("mgdaa"), "Did you mean 'mgda'?"),  # type: ignore[arg-type]
        (
            lambda: TorchJD(torch.diagonal, {"c": 1.0}),
            "`options` are for a weighting that is named",
        ),
    ]
    for wrong, said in cases:
        with pytest.raises(OptionsError, match=said):
            wrong()
    with pytest.raises(ValueError, match=r"returned \[nan, nan\] for 2 objectives"):
        rules.torchjd(torch.eye(2), lambda gramian: torch.full((2,), torch.nan))
    monkeypatch.setitem(sys.modules, "torchjd", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[torchjd\]"'):
        rules.torchjd(torch.eye(2), "mgda")
    with pytest.raises(OptionsError, match=r'pip install "fmol\[torchjd\]"'):
        TorchJD("mgda")


# ---- what is reported, and how they are reached ----------------------------------------------


def test_the_report_has_the_sum_of_the_weights_that_were_applied() -> None:
    deltas = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    found = find_direction(deltas, "ab", rule=UpGrad())
    applied = rules.upgrad(deltas @ deltas.T)
    assert found.scale == pytest.approx(float(applied.sum()))
    assert found.scale > 1
    torch.testing.assert_close(found.scale * found.weights, applied)
    torch.testing.assert_close(found.vector, applied @ deltas)


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.5, -2.0], [0.0, 0.0]])
def test_weights_that_sum_to_nothing_are_reported_as_they_are(weights: list[float]) -> None:
    deltas = torch.eye(2, dtype=torch.float64)
    applied = torch.tensor(weights, dtype=torch.float64)
    found = find_direction(deltas, "ab", rule=lambda gramian, context: applied)
    torch.testing.assert_close(found.scale * found.weights, applied)
    torch.testing.assert_close(found.vector, applied)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("upgrad", UpGrad()),
        ("capped,cap=0.4", Capped(cap=0.4)),
        ("near-prior,radius=0.2,prior={a = 1, b = 2}", NearPrior({"a": 1, "b": 2}, radius=0.2)),
        ("fixed,default=1", Fixed(default=1)),
        ("fixed,weights={a = 1, b = 2}", Fixed({"a": 1, "b": 2})),
        ("tchebycheff,smoothing=0.5", SmoothTchebycheff(smoothing=0.5)),
        ("smoothed,rule=upgrad,keep=0.8", Smoothed(UpGrad(), keep=0.8)),
        ('smoothed,rule={name = "capped", cap = 0.4}', Smoothed(Capped(cap=0.4))),
        ("torchjd,weighting=krum,options={n_byzantine = 1}", TorchJD("krum", {"n_byzantine": 1})),
    ],
)
def test_a_rule_is_reached_from_flags_and_its_config_reads_back(text: str, rule: Rule) -> None:
    config = read_config({"problem": "quadratic"}, {"rule": text})
    options: Any = config.algorithm_options
    assert options.rule == rule
    again = read_config(tomllib.loads(config.to_toml()))
    assert again == config


def test_the_help_of_a_command_shows_the_rules_there_are() -> None:
    shown = " ".join(
        CliRunner().invoke(command_line, ["run", "multidigits", "--help"]).output.split()
    )
    assert "|".join(CHOICES[Rule]) in shown
    assert "capped,cap=0.6" in shown


def test_everything_wrong_with_a_rule_is_said_at_once_and_by_name() -> None:
    rule = {"name": "smoothed", "keep": 1.5, "rule": {"name": "caped"}}
    tables = {"problem": "quadratic", "rounds": -1, "algorithm": {"rule": rule}}
    with pytest.raises(ConfigError) as caught:
        read_config(tables)
    said = " ".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "`rounds` must be" in said
    assert "[algorithm] in `rule`: `keep` must be" in said
    assert "[algorithm] in `rule`: in `rule`: `name` must be one of" in said
    assert "Did you mean `capped`?" in said


def test_a_target_is_kept_by_a_rule_that_knows_nothing_of_targets() -> None:
    """Fixed weights would walk over an objective that is at its target; protected, it is not hurt."""
    problem = federation()
    problem = type(problem)(
        problem.model,
        [
            Objective(o.name, o.loss, target=1e9 if o.name == "a" else None)
            for o in problem.objectives
        ],
        [problem.client(client) for client in problem.population.ids()],
    )
    result = fit(problem, FSMGDA(local_steps=1, rule=Fixed(default=1.0)), rounds=3)
    for report in result.reports:
        assert report.protected == ("a",)
        assert report.gap < 1 + 1e-9 or report.stationary
