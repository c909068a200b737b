"""Losses and metrics over a batch and over a whole data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import FSMGDA, Client, Federation, Objective, fit, whole_set
from fmol.data import as_samples
from fmol.evaluation import Score, batch_mean, evaluate, score_of
from fmol.layout import FlatModel
from fmol.stationarity import stationarity
from support import Net, data, masked_error, squared_error

CPU = torch.device("cpu")
N = 7
X, Y = data(N)
GAPS = Y.clone()
GAPS[[0, 3, 4], 0] = float("nan")
NET = Net().double()
NUMBERS = [torch.tensor([1, 0, 1]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.3, 0.3, 1.0])]


def scores(
    objectives: Objective | list[Objective],
    *,
    model: nn.Module = NET,
    pair: Any = (X, Y),
    batch_size: int = 100,
    metrics: bool = True,
) -> dict[str, dict[str, Score]]:
    wanted = [objectives] if isinstance(objectives, Objective) else objectives
    samples = as_samples(pair, "the data")
    flat = FlatModel(model, CPU)
    return evaluate(flat, samples, wanted, batch_size=batch_size, metrics=metrics)


def root_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """A scalar that is not the mean of its parts."""
    return (outputs - targets).square().mean().sqrt()


def rank_score(outputs: Tensor, targets: Tensor) -> float:
    """The share of pairs in the right order: needs all samples at once, as AUC does."""
    right = (outputs[:, None, 0] - outputs[None, :, 0]) * (
        targets[:, None, 0] - targets[None, :, 0]
    )
    return float((right > 0).double().mean())


def is_close(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 1] - targets[:, 1]).abs() < 0.5


# --- the numbers ----------------------------------------------------------------------------


def test_a_loss_per_sample_is_averaged_over_the_samples() -> None:
    score = scores(Objective("a", squared_error(0)))["a"]["loss"]
    expected = (0.5 * (NET(X)[:, 0] - Y[:, 0]) ** 2).mean()
    assert score.value == pytest.approx(float(expected.detach()), rel=1e-14)
    assert score.samples == N


def test_a_masked_loss_is_averaged_over_the_samples_that_have_a_label() -> None:
    score = scores(Objective("a", masked_error(0)), pair=(X, GAPS))["a"]["loss"]
    there = [1, 2, 5, 6]
    expected = (0.5 * (NET(X)[there, 0] - Y[there, 0]) ** 2).mean()
    assert score.value == pytest.approx(float(expected.detach()), rel=1e-14)
    assert score.samples == 4


def test_over_no_labels_there_is_no_loss_and_no_sample() -> None:
    nothing = torch.full_like(Y, float("nan"))
    score = scores(Objective("a", masked_error(0)), pair=(X, nothing), batch_size=3)["a"]["loss"]
    assert math.isnan(score.value)
    assert score.samples == 0


def test_what_an_unlabelled_sample_would_have_lost_does_not_matter_even_if_not_finite() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * (outputs[:, 0] - targets[:, 0]) ** 2, ~targets[:, 0].isnan()

    score = scores(Objective("a", loss), pair=(X, GAPS))["a"]["loss"]
    assert score == scores(Objective("a", masked_error(0)), pair=(X, GAPS))["a"]["loss"]


def test_a_scalar_loss_is_that_of_the_whole_set_and_not_a_mean_over_batches() -> None:
    score = scores(Objective("a", root_mean_square), batch_size=2)["a"]["loss"]
    assert score.value == pytest.approx(float(root_mean_square(NET(X), Y).detach()), rel=1e-14)
    assert score.samples == N


class Told(Tensor):
    """A tensor that counts how often its number is read."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Told.reads += func is Tensor.__float__
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("how", ["of a model", "of outputs"])
@pytest.mark.parametrize(("batch_size", "reads"), [(100, 1), (N, 1), (2, 2)])
def test_a_scalar_loss_is_read_once_where_one_batch_is_the_whole_set(
    how: str, batch_size: int, reads: int
) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return root_mean_square(outputs, targets).as_subclass(Told)

    before = Told.reads
    if how == "of a model":
        score = scores(Objective("a", loss), batch_size=batch_size)["a"]["loss"]
    else:
        score = score_of(loss, NET(X), Y, N, batch_size, "the loss")
    assert score.value == pytest.approx(float(root_mean_square(NET(X), Y).detach()), rel=1e-14)
    assert score.samples == N
    assert Told.reads - before == reads


def test_a_whole_set_metric_is_called_once_with_everything() -> None:
    seen = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        seen.append((outputs, targets))
        return 0.25

    row = scores(Objective("a", squared_error(0), {"m": whole_set(metric)}), batch_size=2)["a"]
    assert row["m"] == Score(0.25, N)
    ((outputs, targets),) = seen
    assert torch.allclose(outputs, NET(X), rtol=1e-14)
    assert torch.equal(targets, Y)


def test_a_metric_of_truth_values_is_the_share_that_is_true() -> None:
    row = scores(Objective("a", squared_error(0), {"close": is_close}), batch_size=3)["a"]
    assert row["close"].value == pytest.approx(
        float(is_close(NET(X), Y).double().mean()), rel=1e-14
    )
    assert 0 < row["close"].value < 1


def test_a_masked_metric_of_truth_values_is_as_exact_as_one_without_a_mask() -> None:
    def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return is_close(outputs, targets), torch.ones(len(outputs), dtype=torch.bool)

    row = scores(Objective("a", squared_error(0), {"plain": is_close, "masked": masked}))["a"]
    assert row["masked"].value == pytest.approx(row["plain"].value, rel=1e-14)


def test_metrics_are_averaged_like_losses_and_stand_beside_them() -> None:
    objectives = [
        Objective("a", squared_error(0), {"double": lambda o, t: 2 * squared_error(0)(o, t)}),
        Objective("b", squared_error(1)),
    ]
    rows = scores(objectives, batch_size=3)
    assert {name: list(row) for name, row in rows.items()} == {
        "a": ["loss", "double"],
        "b": ["loss"],
    }
    assert rows["a"]["double"].value == pytest.approx(2 * rows["a"]["loss"].value, rel=1e-14)
    assert rows["a"]["loss"].value != rows["b"]["loss"].value


def test_metrics_that_are_not_asked_for_are_not_computed() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("computed")

    objective = Objective("a", squared_error(0), {"m": metric, "w": whole_set(metric)})
    assert list(scores(objective, metrics=False)["a"]) == ["loss"]


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net().double()

    def forward(self, inputs: Tensor) -> Mapping[str, Any]:
        out = self.net(inputs)
        return {"first": out[:, :1], "rest": (out[:, 1:], None)}


EVERY_KIND: dict[str, Objective] = {
    "per sample": Objective("a", squared_error(0)),
    "masked": Objective("a", masked_error(0)),
    "scalar": Objective("a", root_mean_square),
    "metrics": Objective(
        "a",
        squared_error(0),
        {"close": is_close, "rank": whole_set(rank_score), "rms": root_mean_square},
    ),
}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_numbers_do_not_depend_on_the_batches(kind: str, batch_size: int) -> None:
    pair = (X, GAPS if kind == "masked" else Y)
    at_once = scores(EVERY_KIND[kind], pair=pair, batch_size=N)["a"]
    in_parts = scores(EVERY_KIND[kind], pair=pair, batch_size=batch_size)["a"]
    assert at_once.keys() == in_parts.keys()
    for name, score in at_once.items():
        assert in_parts[name].samples == score.samples
        assert in_parts[name].value == pytest.approx(score.value, rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_outputs_and_targets_that_are_nests_are_put_together_again(batch_size: int) -> None:
    def metric(outputs: Any, targets: Any) -> Tensor:
        rest, nothing = outputs["rest"]
        assert nothing is None
        error: Tensor = (outputs["first"][:, 0] - targets["y"][0]) + rest.sum(1)
        return error.square().mean().sqrt()

    objective = Objective("a", lambda o, t: o["first"][:, 0] ** 2, {"m": whole_set(metric)})
    pair = (X, {"y": (Y[:, 0],)})
    at_once = scores(objective, model=ManyOutputs(), pair=pair)["a"]["m"].value
    in_parts = scores(objective, model=ManyOutputs(), pair=pair, batch_size=batch_size)
    assert in_parts["a"]["m"].value == pytest.approx(at_once, rel=1e-12)


def test_targets_that_are_no_tensors_are_not_cut_to_the_first_batch() -> None:
    rows = [(X[i], f"name {i}") for i in range(N)]
    objective = Objective(
        "a", lambda o, t: o[:, 0] ** 2, {"named": whole_set(lambda o, t: float(len(t)))}
    )
    assert scores(objective, pair=rows, batch_size=3)["a"]["named"].value == N


def test_a_scalar_loss_on_outputs_without_a_sample_dimension_is_refused_by_name() -> None:
    class WithPenalty(ManyOutputs):
        def forward(self, inputs: Tensor) -> Any:
            return self.net(inputs), self.net.trunk.weight.square().sum()

    objective = Objective("a", lambda o, t: root_mean_square(o[0], t) + o[1])
    with pytest.raises(ValueError, match="objective `a`"):
        scores(objective, model=WithPenalty(), batch_size=3)


def test_a_loss_in_half_precision_does_not_depend_on_the_batches_either() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return targets[:, 0].bfloat16()

    targets = torch.tensor([[1.0], [1.0 + 2**-7]])
    expected = scores(Objective("a", loss), pair=(X[:2], targets), batch_size=1)["a"]["loss"].value
    assert expected == 1.0 + 2**-8
    assert scores(Objective("a", loss), pair=(X[:2], targets))["a"]["loss"].value == expected


# --- the mode -------------------------------------------------------------------------------


class Watching(nn.Module):
    """Adds noise while training, and remembers in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = Net().double(), nn.Dropout(0.5)
        self.modes: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.modes.append(self.training)
        out: Tensor = self.net(self.dropout(inputs))
        return out


def test_evaluation_is_without_dropout() -> None:
    model = Watching().train()
    expected = scores(Objective("a", squared_error(0)), model=model.net)["a"]["loss"].value
    assert scores(Objective("a", squared_error(0)), model=model)["a"]["loss"].value == expected


def test_evaluation_leaves_the_model_in_training_mode_with_all_its_parts() -> None:
    flat = FlatModel(Watching().train(), CPU)
    samples = as_samples((X, Y), "the data")
    evaluate(flat, samples, [Objective("a", squared_error(0))], batch_size=3, metrics=False)
    watching: Any = flat.module
    assert watching.modes == [False] * 3
    assert all(module.training for module in flat.module.modules())


def test_training_mode_is_back_even_when_a_loss_raises() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError("no")

    flat = FlatModel(Watching().train(), CPU)
    samples = as_samples((X, Y), "the data")
    with pytest.raises(ArithmeticError):
        evaluate(flat, samples, [Objective("a", loss)], batch_size=3, metrics=False)
    assert all(module.training for module in flat.module.modules())


def test_evaluation_keeps_no_graph() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        assert not outputs.requires_grad
        return outputs[:, 0]

    assert scores(Objective("a", loss))["a"]["loss"].samples == N


# --- what is refused ------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a column": (lambda o, t: o[:, :1], r"\[7, 1\] for 7 samples"),
    "one value per output": (lambda o, t: o, r"\[7, 3\] for 7 samples"),
    "the wrong length": (lambda o, t: o[:2, 0], r"\[2\] for 7 samples"),
    "one value in brackets": (lambda o, t: o.mean().reshape(1), r"\[1\] for 7 samples"),
    "three things": (lambda o, t: (o[:, 0], o[:, 0], o[:, 0]), "a tuple of 3"),
    "a mask of another shape": (lambda o, t: (o[:, 0], o > 0), r"\[7, 3\] for 7 samples"),
    "a mask that is no tensor": (lambda o, t: (o[:, 0], True), "bool for 7 samples"),
    "a scalar with a mask": (lambda o, t: (o.mean(), o[:, 0] > 0), r"\[\] for 7 samples"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_loss_of_the_wrong_shape_is_refused_with_its_objective_and_what_was_seen(
    case: str,
) -> None:
    function, seen = WRONG[case]
    with pytest.raises(ValueError, match=seen) as error:
        scores(Objective("price", function))
    assert "the loss of objective `price`" in str(error.value)


@pytest.mark.parametrize("case", WRONG)
def test_a_metric_of_the_wrong_shape_is_refused_with_its_name_and_its_objective(case: str) -> None:
    function, seen = WRONG[case]
    with pytest.raises(ValueError, match=seen) as error:
        scores(Objective("price", squared_error(0), {"accuracy": function}))
    assert "the accuracy of objective `price`" in str(error.value)


@pytest.mark.parametrize(
    "function",
    [lambda o, t: None, lambda o, t: [o[:, 0], o[:, 0] > 0], lambda o, t: "0.5"],
    ids=["nothing", "a list", "a string"],
)
def test_a_loss_that_returns_no_number_is_refused_with_its_objective(
    function: Callable[[Tensor, Tensor], Any],
) -> None:
    with pytest.raises(ValueError, match="the loss of objective `price`"):
        batch_mean(function(X, Y), N, "the loss of objective `price`")
    with pytest.raises(ValueError, match="the loss of objective `price`"):
        scores(Objective("price", function))


def test_a_whole_set_metric_that_returns_a_vector_is_refused_with_its_name() -> None:
    wrong: Any = whole_set(lambda o, t: o[:, 0])
    with pytest.raises(ValueError, match="the accuracy of objective `price`"):
        scores(Objective("price", squared_error(0), {"accuracy": wrong}))


# --- one batch ------------------------------------------------------------------------------


def test_the_mean_over_a_batch_can_be_differentiated_and_spares_the_unlabelled() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, requires_grad=True)
    mean, count = batch_mean((values, torch.tensor([True, False, True, False])), 4, "it")
    mean.backward()
    assert (float(mean.detach()), count) == (2.5, 2)
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_the_mean_over_no_labels_is_zero_and_so_is_its_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    mean, count = batch_mean((values, torch.zeros(3, dtype=torch.bool)), 3, "it")
    mean.backward()
    assert (float(mean.detach()), count) == (0.0, 0)
    assert values.grad is not None
    assert not values.grad.any()


@pytest.mark.parametrize("mask", NUMBERS)
def test_a_mask_of_numbers_is_refused_with_what_to_return(mask: Tensor) -> None:
    with pytest.raises(ValueError, match=f"^it returned .* `valid` of {mask.dtype}. Return truth"):
        batch_mean((torch.tensor([1.0, 9.0, 3.0]), mask), 3, "it")


@pytest.mark.parametrize("mask", NUMBERS)
def test_a_mask_of_numbers_is_refused_for_metrics_too(mask: Tensor) -> None:
    metric = {"accuracy": lambda outputs, targets: (outputs[:, 0], mask.expand(N, 3)[:, 0])}
    with pytest.raises(
        ValueError, match=r"^the accuracy of objective `price` returned .*`valid` of"
    ):
        scores(Objective("price", squared_error(0), metric))


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
@pytest.mark.parametrize("evaluate_every", [1, 2])
def test_every_engine_refuses_a_mask_of_numbers(engine: str, evaluate_every: int) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        values, valid = masked_error(0)(outputs, targets)
        return values, valid.double()

    clients = [Client(f"c{i}", (X, GAPS), ("a",)) for i in range(3)]
    problem = Federation(NET, [Objective("a", loss)], clients)
    options: dict[str, Any] = {"engine": engine, "device": "cpu"}
    with pytest.raises(ValueError, match=r"objective `a` returned .*`valid` of torch.float64"):
        fit(problem, FSMGDA(local_steps=1), 2, evaluate_every=evaluate_every, **options)
    with pytest.raises(ValueError, match=r"objective `a` returned .*`valid` of torch.float64"):
        stationarity(problem, **options)


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "auto"])
def test_every_engine_refuses_a_metric_whose_mask_is_of_another_shape(engine: str) -> None:
    metric = {"accuracy": lambda outputs, targets: (outputs[:, 0], outputs[:1, 0] > 0)}
    clients = [Client(f"c{i}", (X, Y), ("a",), held_out=(X, Y)) for i in range(2)]
    problem = Federation(NET, [Objective("a", squared_error(0), metric)], clients)
    with pytest.raises(ValueError, match=r"the accuracy of objective `a` returned \[1\] for 7"):
        fit(problem, FSMGDA(local_steps=1), rounds=1, engine=engine, device="cpu")


def test_a_scalar_counts_for_the_whole_batch() -> None:
    assert batch_mean(torch.tensor(0.5), 6, "it") == (torch.tensor(0.5), 6)
    mean, count = batch_mean(0.1, 6, "it")
    assert (float(mean), count) == (0.1, 6)


def test_a_mean_of_whole_numbers_is_not_rounded() -> None:
    assert float(batch_mean(torch.tensor([1, 2]), 2, "it")[0]) == 1.5


def test_a_mean_in_half_precision_does_not_overflow() -> None:
    values = torch.full((4096,), 20.0, dtype=torch.float16)
    assert float(batch_mean(values, 4096, "it")[0]) == 20.0


def test_a_masked_mean_in_half_precision_does_not_overflow() -> None:
    values = torch.full((4096,), 20.0, dtype=torch.float16)
    assert float(batch_mean((values, torch.ones(4096) > 0), 4096, "it")[0]) == 20.0


def test_a_last_batch_of_one_does_not_turn_a_squeezed_loss_into_that_samples() -> None:
    """1025 samples are a batch of 1024 and one of 1, from which a squeeze takes the dimension."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(1025, 3).double(), torch.randn(1025, 1).double()
    net = nn.Linear(3, 1).double()

    def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze() - targets.squeeze()) ** 2

    def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return squeezed(outputs, targets), targets.squeeze() > -10

    samples = as_samples((inputs, targets), "the data")
    model = FlatModel(net, torch.device("cpu"))
    objectives = [Objective("a", squeezed), Objective("b", masked)]
    scores = evaluate(model, samples, objectives, batch_size=1024, metrics=False)
    mean = ((net(inputs) - targets) ** 2).mean().item()
    assert scores["a"]["loss"].value == pytest.approx(mean, rel=1e-12)
    assert scores["b"]["loss"].value == pytest.approx(mean, rel=1e-12)
    assert scores["a"]["loss"].samples == scores["b"]["loss"].samples == 1025


def test_a_loss_that_changes_its_kind_between_batches_is_named() -> None:
    def fickle(outputs: Tensor, targets: Tensor) -> Tensor:
        values = (outputs[:, 0] - targets[:, 0]) ** 2
        return values if len(values) == 4 else values.mean()

    samples = as_samples((torch.randn(6, 3), torch.randn(6, 1)), "the data")
    model = FlatModel(nn.Linear(3, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match="objective `a` returned a scalar for 2 samples"):
        evaluate(model, samples, [Objective("a", fickle)], batch_size=4, metrics=False)
