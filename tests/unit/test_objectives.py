"""What is to be learned."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fmol import Objective, whole_set
from fmol.objectives import WholeSet
from support import squared_error

LOSS = squared_error(0)


@pytest.mark.parametrize("name", ["", None, 3, ("left",)])
def test_a_name_that_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"`name` must be a non-empty string") as error:
        Objective(name, LOSS)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("loss", [None, 0.5, "mse", torch.zeros(3)])
def test_a_loss_that_cannot_be_called_is_refused_by_name(loss: Any) -> None:
    with pytest.raises(ValueError, match="`loss` of objective `left` must be callable"):
        Objective("left", loss)


def test_a_metric_that_cannot_be_called_is_refused_with_both_names() -> None:
    wrong: Any = {"fine": LOSS, "accuracy": 0.9}
    with pytest.raises(ValueError, match="metric `accuracy` of objective `left`"):
        Objective("left", LOSS, metrics=wrong)


def test_a_metric_may_not_take_the_name_under_which_the_loss_is_reported() -> None:
    with pytest.raises(ValueError, match="objective `left` has a metric called `loss`"):
        Objective("left", LOSS, metrics={"loss": LOSS})


@pytest.mark.parametrize("target", [float("nan"), float("inf"), float("-inf")])
def test_a_target_that_can_never_or_always_be_reached_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=r"`target` of objective `left` must be a finite number"):
        Objective("left", LOSS, target=target)


def test_a_target_that_is_no_number_is_refused_by_name() -> None:
    wrong: Any = "0.1"
    with pytest.raises(ValueError, match="`target` of objective `left`"):
        Objective("left", LOSS, target=wrong)


@pytest.mark.parametrize("target", [0, 0.0, -1.5, np.float32(0.25)])
def test_any_finite_target_is_kept_as_given(target: float) -> None:
    assert Objective("left", LOSS, target=target).target == target


def test_without_a_target_there_is_none() -> None:
    assert Objective("left", LOSS).target is None


def test_metrics_added_to_the_callers_dict_later_do_not_appear_in_the_objective() -> None:
    metrics: dict[str, Any] = {"error": LOSS}
    objective = Objective("left", LOSS, metrics=metrics)
    metrics["another"] = LOSS
    assert list(objective.metrics) == ["error"]


def test_two_objectives_do_not_share_their_default_metrics() -> None:
    assert Objective("a", LOSS).metrics is not Objective("b", LOSS).metrics


def test_an_objective_cannot_be_changed_behind_the_back_of_a_run() -> None:
    objective = Objective("left", LOSS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.target = 0.5  # type: ignore[misc]


def test_whole_set_marks_a_metric_and_leaves_its_values_alone() -> None:
    def largest(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().max()

    marked = whole_set(largest)
    assert isinstance(marked, WholeSet)
    outputs, targets = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 1.0])
    assert marked(outputs, targets) == 4.0
    assert Objective("left", LOSS, metrics={"largest": marked}).metrics["largest"] is marked


def test_a_module_or_a_class_with_call_can_be_a_loss() -> None:
    objective = Objective("left", torch.nn.MSELoss(reduction="none"))
    value = objective.loss(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]))
    assert isinstance(value, Tensor)
    assert value.tolist() == [1.0, 9.0]
