"""What users of any trainer expect of `fit`."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fmol
from fmol import FMGDA, FSMGDA, MGD, SMGD, Alone, Client, FedAvg, Federation, Objective, fit
from fmol.engines import EngineFactory, SequentialEngine
from fmol.engines.seam import Engine
from fmol.participation import Fraction, Number
from fmol.rules import Context, Fixed, MinNorm
from fmol.schedules import InverseSqrt
from support import Net, data, federation, flat, squared_error


def test_the_shapes_of_a_result() -> None:
    result = fit(federation(), FSMGDA(local_steps=1), rounds=3)
    assert result.losses.shape == (4, 3)
    assert result.weights.shape == (3, 3)
    assert result.losses.dtype == result.weights.dtype == torch.float64
    assert [r.round for r in result.reports] == [0, 1, 2]
    assert result.final.round == 3
    torch.testing.assert_close(result.weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_zero_rounds_give_the_untrained_model_and_its_losses() -> None:
    problem = federation()
    result = fit(problem, FSMGDA(local_steps=1), rounds=0)
    assert result.losses.shape == (1, 3)
    assert result.weights.shape == (0, 3)
    assert torch.equal(flat(result.model), flat(problem.model))


def test_row_t_is_the_loss_at_x_t_in_evaluation_mode() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    problem = federation(model=net, sizes=[5, 9, 12, 7])
    models: list[nn.Module] = [net]
    result = fit(
        problem,
        FSMGDA(local_steps=2, batch_size=4),
        rounds=3,
        callbacks=[lambda report, snapshot: models.append(snapshot.model())],
    )
    for t, model in enumerate(models):
        model.eval()
        for s in range(3):
            means = []
            for client in problem.population.ids():
                inputs, targets = problem.population.get(client).data
                means.append(squared_error(s)(model(inputs), targets).mean().detach())
            assert float(result.losses[t, s]) == pytest.approx(torch.stack(means).mean().item())


def test_losses_weighted_by_samples_are_those_of_the_pooled_data() -> None:
    problem = federation(sizes=[3, 9, 12, 20])
    result = fit(problem, FMGDA(local_steps=1, weighting="samples"), rounds=1)
    pooled = [problem.population.get(c).data for c in problem.population.ids()]
    inputs, targets = (torch.cat(parts) for parts in zip(*pooled, strict=True))
    for s in range(3):
        mean = squared_error(s)(problem.model(inputs), targets).mean().item()
        assert float(result.losses[0, s]) == pytest.approx(mean, rel=1e-12)


def test_stop_at_returns_the_first_model_that_is_good_enough() -> None:
    problem = federation()
    algorithm = FSMGDA(local_steps=5, batch_size=6)
    full = fit(problem, algorithm, rounds=30)
    goal = float(full.losses[12].max())
    stopped = fit(problem, algorithm, rounds=30, stop_at=goal)
    first = next(t for t in range(31) if bool((full.losses[t] <= goal).all()))
    assert len(stopped.reports) == first
    assert bool((stopped.losses[-1] <= goal).all())
    assert not bool((stopped.losses[-2] <= goal).all())
    assert torch.equal(stopped.losses, full.losses[: first + 1])
    reached = fit(problem, algorithm, rounds=first)
    assert torch.equal(flat(stopped.model), flat(reached.model))
    assert "stop_at" in stopped.stopped


def test_rounds_until_a_loss_are_those_of_the_first_model_that_has_it() -> None:
    result = fit(federation(), FSMGDA(local_steps=5, batch_size=6), rounds=12)
    goal = float(result.losses[7, 1])
    first = result.rounds_until(goal)
    for s, name in enumerate("abc"):
        reached = [t for t in range(13) if float(result.losses[t, s]) <= goal]
        assert first[name] == (reached[0] if reached else None)
    assert result.rounds_until(0.0) == dict.fromkeys("abc")


def test_stop_at_can_name_some_objectives() -> None:
    problem = federation()
    goal = float(fit(problem, FSMGDA(local_steps=5), rounds=5).losses[-1, 1])
    result = fit(problem, FSMGDA(local_steps=5), rounds=50, stop_at={"b": goal})
    assert len(result.reports) == 5
    with pytest.raises(ValueError, match="`nobody`"):
        fit(problem, FSMGDA(local_steps=5), rounds=50, stop_at={"nobody": goal})


def test_a_callback_can_stop_training_and_sees_the_state_after_its_round() -> None:
    seen: list[int] = []

    def watch(report: fmol.RoundReport, snapshot: Any) -> bool:
        seen.append(report.round)
        return report.round == 2

    problem = federation()
    result = fit(problem, FSMGDA(local_steps=1), rounds=9, callbacks=[watch])
    assert seen == [0, 1, 2]
    assert result.losses.shape == (4, 3)
    assert "callback" in result.stopped


def test_training_can_start_from_another_model() -> None:
    problem = federation()
    first = fit(problem, MGD(0.1), rounds=3)
    straight = fit(problem, MGD(0.1), rounds=6)
    for start in (first.model, first.model.state_dict(), flat(first.model)):
        rest = fit(problem, MGD(0.1), rounds=3, start=start)
        assert torch.equal(flat(rest.model), flat(straight.model))
    with pytest.raises(ValueError, match=r"trunk\.weight"):
        fit(problem, MGD(0.1), rounds=1, start=Net(width=9))
    with pytest.raises(ValueError, match="shape"):
        fit(problem, MGD(0.1), rounds=1, start=torch.zeros(3))


def test_evaluate_every_leaves_the_other_rows_nan() -> None:
    result = fit(federation(), FSMGDA(local_steps=1), rounds=5, evaluate_every=2)
    measured = ~torch.isnan(result.losses).any(1)
    assert measured.tolist() == [True, False, True, False, True, True]


def test_a_rule_that_needs_losses_does_not_fill_rows_that_were_not_asked_for() -> None:
    algorithm = FSMGDA(local_steps=1, normalize="loss")
    sparse = fit(federation(), algorithm, rounds=4, evaluate_every=3)
    dense = fit(federation(), algorithm, rounds=4)
    assert torch.isnan(sparse.losses).any(1).tolist() == [False, True, True, False, False]
    assert torch.equal(flat(sparse.model), flat(dense.model))


def test_evaluate_says_over_whom() -> None:
    problem = federation(sizes=[5, 9, 12, 7])
    run: Callable[..., Any] = lambda how: fit(  # noqa: E731
        problem, FSMGDA(local_steps=1), rounds=2, evaluate=how, participation=Number(2)
    )
    everyone, cohort, panel = run("all"), run("cohort"), run(3)
    assert everyone.reports[0].evaluated == "all 4 clients"
    assert cohort.reports[0].evaluated == "the cohort"
    assert panel.reports[0].evaluated == "3 of 4 clients"
    assert everyone.reports[0].losses != cohort.reports[0].losses
    assert len({r.client for r in cohort.final.clients}) == 2
    assert {r.client for r in panel.final.clients} == {r.client for r in run(3).final.clients}
    with pytest.raises(ValueError, match="`evaluate`"):
        run("some")


def test_a_cohorts_evaluation_rides_along_without_further_messages() -> None:
    problem = federation()
    asked: list[tuple[int, bool]] = []

    class Spy(fmol.engines.SequentialEngine):
        def map(self, asks: Any, fold: Any = None, **rest: Any) -> Any:
            asked.append((len(asks), any(ask.lanes for ask in asks)))
            return super().map(asks, fold, **rest)

    fit(problem, FSMGDA(local_steps=1), rounds=2, engine=Spy, evaluate="cohort")
    assert asked == [(4, True), (4, True), (4, False)]


def test_frozen_parameters_stay_and_heads_are_trained() -> None:
    problem = federation()
    problem.model.get_submodule("trunk").requires_grad_(False)
    frozen = federation(model=problem.model)
    result = fit(frozen, FSMGDA(local_steps=2), rounds=2)
    before, after = dict(problem.model.named_parameters()), dict(result.model.named_parameters())
    assert torch.equal(before["trunk.weight"], after["trunk.weight"])
    assert not torch.equal(before["heads.0.weight"], after["heads.0.weight"])
    assert frozen.layout.size == 21


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.second(torch.tanh(self.first(inputs)))
        return outputs


def test_tied_parameters_stay_tied_and_move_once() -> None:
    torch.manual_seed(0)
    problem = federation(model=Tied().double())
    result = fit(problem, FMGDA(local_steps=2), rounds=2)
    trained = result.model
    assert isinstance(trained, Tied)
    assert trained.second.weight is trained.first.weight
    assert problem.layout.size == 25 + 5 + 5
    loss = squared_error(0)(problem.model(data(12)[0]), data(12)[1]).mean()
    (gradient,) = torch.autograd.grad(loss, [problem.model.get_parameter("first.weight")])
    one = Federation(problem.model, problem.objectives[:1], [Client("c", data(12), ("a",))])
    step = fit(one, MGD(0.1), rounds=1).model
    assert isinstance(step, Tied)
    moved = problem.model.get_parameter("first.weight") - step.first.weight
    torch.testing.assert_close(moved.detach(), 0.1 * gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_models_of_other_dtypes_train_in_their_own(dtype: torch.dtype) -> None:
    problem = federation(model=Net().to(dtype))
    clients = [
        Client(c, tuple(part.to(dtype) for part in problem.population.get(c).data), ("a", "b", "c"))
        for c in problem.population.ids()
    ]
    typed = Federation(problem.model, problem.objectives, clients)
    result = fit(typed, FSMGDA(local_steps=3, batch_size=4, local_lr=0.2, server_lr=0.2), rounds=8)
    assert all(p.dtype == dtype for p in result.model.parameters())
    assert result.losses.dtype == torch.float64
    assert float(result.losses[-1].sum()) < float(result.losses[0].sum())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(3, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": self.a(left) + self.b(right)}


def test_dict_inputs_dict_outputs_and_tuple_targets_work() -> None:
    torch.manual_seed(0)
    inputs = {"left": torch.randn(10, 2), "right": torch.randn(10, 3)}
    targets = (torch.randn(10), torch.randn(10))
    objectives = [
        Objective("first", lambda out, y: (out["sum"][:, 0] - y[0]) ** 2),
        Objective("second", lambda out, y: (out["sum"][:, 1] - y[1]) ** 2),
    ]
    problem = Federation(
        TwoInputs(), objectives, [Client("c", (inputs, targets), ("first", "second"))]
    )
    result = fit(problem, FSMGDA(local_steps=3, batch_size=4), rounds=5)
    assert bool((result.losses[-1] < result.losses[0]).all())


def test_a_scalar_loss_is_that_of_the_whole_set() -> None:
    def spread(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0].var()

    problem = federation([("a",)], names=("a",))
    scalar = Federation(problem.model, [Objective("a", spread)], [problem.population.get("c0")])
    result = fit(scalar, FMGDA(local_steps=3), rounds=3)
    inputs = problem.population.get("c0").data[0]
    assert float(result.losses[0, 0]) == pytest.approx(problem.model(inputs)[:, 0].var().item())
    assert float(result.losses[-1, 0]) < float(result.losses[0, 0])


def test_schedules_move_both_step_sizes() -> None:
    algorithm = FSMGDA(local_steps=1, local_lr=lambda t: 0.1 / (t + 1), server_lr=InverseSqrt(0.2))
    result = fit(federation(), algorithm, rounds=3)
    assert [r.local_lr for r in result.reports] == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert [r.server_lr for r in result.reports] == pytest.approx(
        [0.2 / math.sqrt(t + 1) for t in range(3)]
    )
    with pytest.raises(ValueError, match="`server_lr` is nan"):
        fit(federation(), FSMGDA(local_steps=1, server_lr=lambda t: math.nan), rounds=1)


def test_a_target_protects_an_objective_once_it_is_reached() -> None:
    problem = federation()
    free = fit(problem, FMGDA(local_steps=3, server_lr=0.3), rounds=40)
    goal = float(free.losses[5, 0])
    guarded = federation(targets={"a": goal})
    result = fit(guarded, FMGDA(local_steps=3, server_lr=0.3), rounds=40)
    assert result.reports[0].protected == ()
    assert any(report.protected == ("a",) for report in result.reports)
    assert all(report.min_cosine > -1e-9 for report in result.reports)
    assert float(result.losses[-1, 1:].sum()) < float(free.losses[-1, 1:].sum())


def test_training_ends_when_every_objective_has_reached_its_target() -> None:
    problem = federation()
    goals = fit(problem, FMGDA(local_steps=3), rounds=8).losses[-1] * 1.0001
    guarded = federation(targets=dict(zip("abc", goals.tolist(), strict=True)))
    result = fit(guarded, FMGDA(local_steps=3), rounds=2000)
    assert len(result.reports) < 2000
    assert "target" in result.stopped
    assert bool((result.losses[-1] <= goals).all())


def test_a_users_own_rule_is_a_function_passed_in() -> None:
    def only_the_worst(gramian: Tensor, context: Context) -> Tensor:
        assert context.losses is not None
        context.memory["calls"] = context.memory.get("calls", torch.zeros(())) + 1
        return torch.nn.functional.one_hot(context.losses.argmax(), len(context.names)).double()

    only_the_worst.needs_losses = True  # type: ignore[attr-defined]
    result = fit(federation(), FSMGDA(local_steps=1, rule=only_the_worst), rounds=4)
    assert torch.equal(result.weights.argmax(1), result.losses[:-1].argmax(1))
    assert float(result.state.memory["rule.calls"]) == 4


def test_fixed_weights_on_separate_lanes() -> None:
    rule = Fixed({"a": 1.0, "b": 1.0, "c": 2.0})
    result = fit(federation(), FSMGDA(local_steps=1, rule=rule), rounds=2)
    assert result.reports[1].weights == {"a": 0.25, "b": 0.25, "c": 0.5}


def test_a_rule_that_returns_nonsense_is_named() -> None:
    with pytest.raises(ValueError, match="finite weights"):
        fit(
            federation(),
            FSMGDA(local_steps=1, rule=lambda gramian, context: torch.full((2,), math.nan)),
            rounds=1,
        )


def test_true_gradients_bound_one_another() -> None:
    """‖d̄_t‖ ≥ ‖d*_t‖ always: the second has the best weights for the same gradients."""
    result = fit(
        federation(),
        FSMGDA(local_steps=5, batch_size=3, local_lr=0.3),
        rounds=10,
        true_gradients_every=3,
        optimum=dict.fromkeys("abc", 0.0),
    )
    measured = [r for r in result.reports if not math.isnan(r.stationarity)]
    assert [r.round for r in measured] == [0, 3, 6, 9]
    for report in measured:
        assert report.true_direction_norm_squared >= report.stationarity * (1 - 1e-9)
    first = result.reports[0]
    gap = sum(first.weights[n] * first.losses[n] for n in "abc")
    assert first.optimality_gap == pytest.approx(gap)


def test_only_the_shared_parameters_enter_the_qp() -> None:
    problem = federation([("a", "b", "c")] * 2)
    result = fit(problem, FMGDA(local_steps=1, server_lr=0.1, shared="trunk.*"), rounds=1)
    gradient = []
    inputs_targets = [problem.population.get(c).data for c in problem.population.ids()]
    for s in range(3):
        losses = [squared_error(s)(problem.model(x), y).mean() for x, y in inputs_targets]
        mean = torch.stack(losses).mean()
        head = problem.model.get_parameter(f"heads.{s}.weight")
        (grad,) = torch.autograd.grad(mean, [head])
        gradient.append(grad)
    for s in range(3):
        name = f"heads.{s}.weight"
        moved = problem.model.get_parameter(name) - result.model.get_parameter(name)
        torch.testing.assert_close(moved.detach(), 0.1 * gradient[s], rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match=r"pattern `nothing\.\*`"):
        fit(problem, FMGDA(local_steps=1, shared="nothing.*"), rounds=1)


def wrong(**options: Any) -> Any:
    """Options that a type checker would not let through."""
    return options


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FSMGDA, "exactly one of `local_steps` and `local_epochs`"),
        (lambda: FSMGDA(local_steps=1, local_epochs=1), "exactly one"),
        (lambda: FSMGDA(local_steps=0), "`local_steps`"),
        (lambda: FSMGDA(local_steps=1, batch_size=0), "`batch_size`"),
        (lambda: FSMGDA(local_steps=1, **wrong(accumulate="max")), "`accumulate`.*'max'"),
        (lambda: FSMGDA(local_steps=1, **wrong(normalize="l1")), "`normalize`.*'l1'"),
        (lambda: FSMGDA(local_steps=1, **wrong(on_missing_objective="zero")), "`on_missing_obj"),
        (lambda: FSMGDA(local_steps=1, **wrong(weighting="size")), "`weighting`"),
        (lambda: FSMGDA(local_steps=1, local_momentum=1.0), "`local_momentum`"),
        (lambda: FSMGDA(local_steps=1, clip_norm=0.0), "`clip_norm`"),
        (lambda: FSMGDA(local_steps=1, server_lr=-1), "`server_lr`"),
        (lambda: SMGD(0, 0.1), "`batch_size`"),
        (lambda: fit(federation(), FedAvg({"a": 1.0}, local_steps=1), rounds=1), "`weights`"),
        (lambda: FedAvg(3, local_steps=1), "`weights` must be a mapping"),  # type: ignore[arg-type]
        (lambda: FSMGDA(local_steps=1, **wrong(rule=MinNorm)), "`rule` is the class"),
        (lambda: fit(federation(), MGD, rounds=1), "`algorithm` is the class MGD"),  # type: ignore[arg-type]
        (lambda: fit(federation(), "fsmgda", rounds=1), "`algorithm` must be one such as FSMGDA"),  # type: ignore[arg-type]
        (
            lambda: fit(federation(), MGD(0.1), rounds=1, **wrong(participation=0.5)),
            "`participation` must be one such as Fraction",
        ),
        (lambda: fit(federation(), MGD(0.1), rounds=-1), "`rounds`"),
        (lambda: fit(federation(), MGD(0.1), rounds=1, engine="warp"), "`engine`.*'warp'"),
        (lambda: fit(federation(), MGD(0.1), rounds=1, device="abacus"), "'abacus'"),
        (lambda: fit(federation(), Alone(local_steps=1), rounds=1, evaluate_every=0), "at least 1"),
    ],
)
def test_bad_options_get_one_clear_sentence(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_all_wrong_options_are_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"`normalize`.*`weight_decay`.*`batch_size`.*exactly one"):
        FSMGDA(batch_size=-1, normalize="x", weight_decay=-1)  # type: ignore[arg-type]


def test_a_round_that_held_has_no_direction_but_says_what_arrived() -> None:
    problem = federation([("a",), ("b",), ("c",)])
    result = fit(
        problem,
        FMGDA(local_steps=1, on_missing_objective="hold"),
        rounds=4,
        participation=Number(1),
        true_gradients_every=1,
        optimum=dict.fromkeys("abc", 0.0),
    )
    for report in result.reports:
        (present,) = {"a", "b", "c"} - set(report.missing)
        assert report.held
        assert report.delta_norms[present] > 0
        assert math.isnan(report.true_direction_norm_squared)
        assert math.isnan(report.optimality_gap)
        assert report.stationarity > 0


def test_with_one_exact_step_the_true_direction_is_the_one_taken() -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c")], sizes=[5, 9, 7])
    result = fit(problem, MGD(0.1), rounds=3, true_gradients_every=1)
    for report in result.reports:
        taken = report.direction_norm_squared
        assert report.true_direction_norm_squared == pytest.approx(taken, rel=1e-9)
        assert report.stationarity == pytest.approx(taken, rel=1e-9)


def test_true_gradients_are_those_of_the_reported_losses_whatever_the_dropout() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    still = FSMGDA(local_steps=1, local_lr=0.0, server_lr=0.0)
    result = fit(federation(model=net), still, rounds=3, true_gradients_every=1)
    assert len({report.stationarity for report in result.reports}) == 1
    with pytest.raises(ValueError, match="Alone has no model of all"):
        fit(federation(), Alone(local_steps=1), rounds=1, true_gradients_every=1)


def test_targets_reached_in_a_round_that_was_not_measured_still_give_final_losses() -> None:
    goal = float(fit(federation(), FMGDA(local_steps=3), rounds=3).losses[-1].max())
    near = fit(
        federation(targets=dict.fromkeys("abc", goal)),
        FMGDA(local_steps=3),
        rounds=50,
        evaluate_every=40,
    )
    assert 0 < len(near.reports) < 40
    assert "target" in near.stopped
    assert bool((near.losses[-1] <= goal).all())


def test_centralised_methods_leave_nobody_out_whatever_the_cohort() -> None:
    problem = federation(sizes=[5, 9, 12, 7])
    sampled = fit(problem, SMGD(4, 0.1), rounds=3, participation=Number(1))
    everyone = fit(problem, SMGD(4, 0.1), rounds=3)
    assert torch.equal(flat(sampled.model), flat(everyone.model))
    assert len(sampled.reports[0].cohort) == 4


def test_an_evaluated_subset_has_a_holder_of_every_objective() -> None:
    problem = federation([("a", "b")] * 9 + [("c",)])
    for seed in range(5):
        result = fit(problem, FSMGDA(local_steps=1), rounds=1, evaluate=1, seed=seed)
        assert bool(torch.isfinite(result.losses).all())


@pytest.mark.parametrize("normalize", ["l2", "loss", "loss+"])
def test_an_objective_solved_exactly_does_not_freeze_the_others(normalize: str) -> None:
    """A hinge that is zero has an update of exactly zero; the others still descend."""

    def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - 100).clamp(min=0)

    base = federation([("a", "b", "c")] * 2)
    objectives = [Objective("a", hinge), *base.objectives[1:]]
    clients = [base.population.get(c) for c in base.population.ids()]
    problem = Federation(base.model, objectives, clients)
    frozen = fit(problem, FMGDA(local_steps=2), rounds=5)
    assert torch.equal(frozen.losses[0], frozen.losses[-1])
    freed = fit(problem, FMGDA(local_steps=2, **wrong(normalize=normalize)), rounds=5)
    assert bool((freed.losses[-1, 1:] < freed.losses[0, 1:]).all())
    assert freed.weights[:, 0].tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": "3"}, "`rounds`"),
        ({"rounds": 2.5}, "`rounds`"),
        ({"rounds": 1, "evaluate_every": 1.5}, "`evaluate_every`"),
        ({"rounds": 1, "engine": 3}, "`engine`"),
        ({"rounds": 1, "callbacks": print}, "`callbacks`"),
        ({"rounds": 1, "stop_at": math.nan}, "`stop_at`"),
        ({"rounds": 1, "stop_at": {"a": "x"}}, "`stop_at` for objective `a`"),
        ({"rounds": 1, "start": "x"}, "`start` is a str"),
        ({"rounds": 1, "start": torch.full((57,), math.nan)}, "not finite"),
    ],
)
def test_bad_arguments_of_fit_get_one_clear_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(federation(), MGD(0.1), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": True},
        {"local_lr": "0.1", "local_steps": 1},
        {"local_steps": 1, "clip_norm": math.inf},
    ],
)
def test_options_of_a_wrong_kind_are_refused(options: dict[str, Any]) -> None:
    (name,) = {"local_lr", "clip_norm"} & set(options) or {"local_steps"}
    with pytest.raises(ValueError, match=f"`{name}`"):
        FSMGDA(**options)


def test_numbers_from_numpy_are_numbers() -> None:
    algorithm = FSMGDA(local_steps=np.int64(2), batch_size=np.int32(4), local_lr=np.float32(0.1))  # type: ignore[arg-type]
    result = fit(federation(), algorithm, rounds=np.int64(2), evaluate=np.int64(2))  # type: ignore[arg-type]
    assert len(result.reports) == 2


def test_tensors_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        inputs, targets = data(8)
    problem = federation([("a",)], names=("a",))
    one = Federation(problem.model, problem.objectives, [Client("c", (inputs, targets), ("a",))])
    copied = Client("c", (inputs.clone(), targets.clone()), ("a",))
    same = Federation(problem.model, problem.objectives, [copied])
    ours, other = (fit(p, FSMGDA(local_steps=2, batch_size=4), rounds=2) for p in (one, same))
    assert torch.equal(flat(ours.model), flat(other.model))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_without_a_label_is_named_once(engine: str) -> None:
    def masked(column: int) -> Callable[[Tensor, Any], tuple[Tensor, Tensor]]:
        return lambda out, y: ((out[:, column] - y[0][:, column]) ** 2, y[1][:, column])

    x, y = torch.randn(6, 3), torch.randn(6, 2)
    every = torch.ones(6, 2, dtype=torch.bool)
    few = every.clone()
    few[:, 1] = False
    names = ("p", "q")
    clients = [Client("a", (x, (y, every)), names), Client("b", (x, (y, few)), names)]
    objectives = [Objective(name, masked(i)) for i, name in enumerate(names)]
    problem = Federation(nn.Linear(3, 2), objectives, clients)
    algorithm = FSMGDA(local_steps=2, batch_size=4)
    result = fit(problem, algorithm, rounds=2, device="cpu", engine=engine)
    assert [report.notes for report in result.reports] == [
        ("no label for objective `q`, so no part in it: client `b`",),
        (),
    ]


def metric(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0]


@pytest.mark.parametrize("held_out", ["nowhere", "at a client", "at the server"])
def test_metrics_that_nothing_is_there_to_be_measured_on_are_named(held_out: str) -> None:
    some = data(4, outputs=2)
    objectives = [
        Objective("p", squared_error(0), metrics={"first": metric}),
        Objective("q", squared_error(1)),
    ]
    clients = [
        Client("a", some, ("p", "q"), held_out=some if held_out == "at a client" else None),
        Client("b", some, ("p",)),
    ]
    server = some if held_out == "at the server" else None
    problem = Federation(Net(heads=2).double(), objectives, clients, held_out=server)
    result = fit(problem, FMGDA(local_steps=1), rounds=2)
    told = "metrics of `p` were not computed: no held-out data"
    if held_out == "nowhere":
        assert result.notes == (told,)
        assert told in repr(result)
    else:
        assert result.notes == ()
    alone = fit(problem, Alone(local_steps=1), rounds=1).notes
    assert bool(alone) == (held_out != "at a client")


def test_a_result_says_at_first_sight_what_was_done_otherwise_than_asked() -> None:
    result = fit(federation(), FMGDA(local_steps=1), rounds=1, engine="auto", device="cpu")
    assert "; note: engine " in repr(result)
    assert repr(result).startswith("Result(FMGDA, 1 round, 1 round done; ")
    assert "note" not in repr(fit(federation(), FMGDA(local_steps=1), rounds=2))


def test_a_record_has_what_the_run_was_asked_for_and_how_to_ask_again() -> None:
    def halve(round: int) -> float:
        return 0.1 / (1 + round)

    algorithm = FSMGDA(local_steps=2, batch_size=4, local_lr=halve, normalize="loss")
    result = fit(federation(), algorithm, 2, 3, participation=Fraction(0.5), stop_at={"a": 1e-9})
    record = result.record()
    assert record.command == (
        "fit(federation, FSMGDA(normalize='loss', local_steps=2, local_lr=halve, batch_size=4), "
        "rounds=2, seed=3, participation=Fraction(share=0.5), stop_at={'a': 1e-09})"
    )
    config = record.config
    assert (config["rounds"], config["seed"], config["stop_at"]) == (2, 3, {"a": 1e-9})
    assert config["participation"]["name"] == "fraction"
    assert config["algorithm"]["local_lr"] == "halve"
    assert {"torch", "device", "started"} <= set(record.environment)


def test_a_record_names_the_engine_as_it_was_given() -> None:
    def told(engine: Any) -> tuple[str, str]:
        record = fit(federation(), FMGDA(local_steps=1), rounds=1, engine=engine).record()
        return record.config["engine"], record.command.rpartition(", ")[2]

    assert told("vectorized") == ("vectorized", "engine='vectorized')")
    assert told(SequentialEngine) == ("SequentialEngine", "engine=SequentialEngine)")
    found, call = told(partial(SequentialEngine, cache_bytes=9))
    assert found == "partial(SequentialEngine, cache_bytes=9)"
    assert call == "cache_bytes=9))"


def test_a_result_does_not_keep_the_engine_that_made_it() -> None:
    """Which has all data in the memory of the device; also where others share the engine."""

    def given(engine: Engine) -> EngineFactory:
        return lambda *_, **__: engine

    machine = SequentialEngine(federation())
    result = fit(machine.federation, FMGDA(local_steps=1), rounds=1, engine=given(machine))
    kept = weakref.ref(machine)
    del machine
    gc.collect()
    assert kept() is None
    assert result.record().config["engine"].startswith("lambda in test_training.py")


def test_a_record_of_an_algorithm_of_ones_own_has_its_options() -> None:
    class Mine(FMGDA):
        pass

    problem = federation()
    begin = torch.ones(problem.layout.size)
    started = fit(problem, Mine(local_steps=1), rounds=1, start=begin)
    config = started.record().config
    assert config["algorithm"]["name"] == "Mine"
    assert config["start"].startswith("Tensor [")
    assert "start=…" in started.record().command
