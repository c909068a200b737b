"""Data that the model cannot take are said in a sentence: whose, of which shape, and at which layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import FSMGDA, Client, Federation, FedLS, Objective, fit
from fmol.data import as_samples
from fmol.errors import FmolError, MisfitError
from fmol.layout import FlatModel
from fmol.misfit import check_fit

ENGINES = ["sequential", "vectorized", "auto"]


def error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).mean(1) - targets) ** 2


def client(name: str, *shape: int, held_out: tuple[int, ...] | None = None) -> Client:
    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        return torch.ones(shape), torch.zeros(shape[0])

    return Client(
        name, pair(*shape), ("a",), held_out=None if held_out is None else pair(*held_out)
    )


def train(model: nn.Module, *clients: Client, engine: str = "sequential", **options: Any) -> None:
    problem = Federation(model, [Objective("a", error)], list(clients), **options)
    fit(problem, FSMGDA(local_steps=1), rounds=1, engine=engine, device="cpu")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_data_are_too_narrow_is_named_with_shapes_and_layer(engine: str) -> None:
    with pytest.raises(MisfitError) as caught:
        train(network(), client("c0", 6, 5), client("c1", 8, 3), engine=engine)
    assert str(caught.value) == (
        "the model cannot take `data` of client `c1`, inputs of shape [8, 3]: its layer `0` (Linear) "
        "wants 5 features and got 3. Give inputs as the model takes them, or mend the model."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "mat1 and mat2" in str(caught.value.__cause__)
    assert caught.value.result is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_where_all_clients_are_alike_the_first_is_named(engine: str) -> None:
    with pytest.raises(MisfitError, match=r"`data` of client `c0`, inputs of shape \[6, 3\]"):
        train(network(), client("c0", 6, 3), client("c1", 8, 3), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_held_out_data_are_told_from_training_data(engine: str) -> None:
    clients = client("c0", 6, 5), client("c1", 6, 5, held_out=(2, 7))
    with pytest.raises(MisfitError, match=r"`held_out` of client `c1`, inputs of shape \[2, 7\]"):
        train(network(), *clients, engine=engine)
    clients = client("c0", 6, 5), client("c1", 6, 5)
    with pytest.raises(
        MisfitError, match=r"`held_out` of the federation, inputs of shape \[3, 4\]"
    ):
        train(network(), *clients, engine=engine, held_out=(torch.ones(3, 4), torch.zeros(3)))


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_bring_their_data_later_are_named_too(engine: str) -> None:
    late = [
        Client(f"c{i}", lambda width=width: (torch.ones(6, width), torch.zeros(6)), ("a",))
        for i, width in enumerate([5, 5, 3])
    ]
    with pytest.raises(MisfitError, match="client `c2`"):
        train(network(), *late, engine=engine)


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (nn.Linear(5, 1), (6, 3), ": Linear wants 5 features and got 3."),
        (nn.Linear(5, 1), (6,), ": Linear wants 5 features and got samples of shape []."),
        (nn.Conv2d(1, 2, 3), (6, 3, 8, 8), ": Conv2d wants 1 channels and got 3."),
        (nn.Conv2d(1, 2, 3), (6, 8, 8), "wants 1 channels and got samples of shape [8, 8]."),
        (nn.Conv2d(1, 2, 3), (6, 1, 1, 8, 8), "1 channels and got samples of shape [1, 1, 8, 8]."),
        (nn.GroupNorm(2, 4), (6, 2, 3), ": GroupNorm wants 4 channels and got 2."),
        (nn.LayerNorm(4), (6, 3), ": LayerNorm wants 4 features and got 3."),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 1)),
            (6, 1, 9, 9),
            ": its layer `2` (Linear) wants 72 features and got 98.",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_layers_of_many_kinds_say_what_they_want(
    model: nn.Module, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(MisfitError) as caught:
        train(model, client("c0", *shape))
    assert said in str(caught.value)


def test_data_of_another_dtype_are_said_to_be_of_one() -> None:
    data = torch.ones(6, 5, dtype=torch.float64), torch.zeros(6)
    with pytest.raises(MisfitError, match=r"wants torch.float32 and got torch.float64"):
        train(network(), Client("c0", data, ("a",)))


def test_every_input_of_a_model_with_several_is_shown() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 1), nn.Linear(3, 1)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return torch.as_tensor(self.left(left) + self.right(right))

    data = {"left": torch.ones(6, 2), "right": torch.ones(6, 4)}, torch.zeros(6)
    with pytest.raises(
        MisfitError, match=r"inputs of shape \[6, 2\] and \[6, 4\]: its layer `right`"
    ):
        train(Two(), Client("c0", data, ("a",)))


def test_works_beside_the_usual_one_say_it_too() -> None:
    problem = Federation(network(), [Objective("a", error)], [client("c0", 6, 3)])
    with pytest.raises(MisfitError, match="client `c0`"):
        fit(problem, FedLS(local_steps=1), rounds=1, device="cpu")


# ---- what is something else ------------------------------------------------------------------


class Buggy(nn.Module):
    """Fails after a layer that took its inputs well."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.first, self.error = nn.Linear(5, 4), error

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.error is not None:
            raise self.error
        return torch.as_tensor(hidden @ torch.zeros(3, 1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "error", [None, RuntimeError("of my own"), TypeError("of my own"), KeyError("of my own")]
)
def test_a_bug_of_the_model_itself_is_raised_as_it_is_with_the_client(
    engine: str, error: Exception | None
) -> None:
    with pytest.raises(Exception, match=r"of my own|mat1 and mat2") as caught:
        train(Buggy(error), client("c0", 6, 5), engine=engine)
    assert not isinstance(caught.value, FmolError)
    assert "at client `c0`" in caught.value.__notes__[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_fails_is_raised_as_it_is(engine: str) -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs @ torch.zeros(7, 1)

    problem = Federation(network(), [Objective("a", wrong)], [client("c0", 6, 5)])
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        fit(problem, FSMGDA(local_steps=1), rounds=1, engine=engine, device="cpu")
    assert not isinstance(caught.value, FmolError)


def test_memory_that_runs_out_is_no_matter_of_widths() -> None:
    samples = as_samples((torch.ones(6, 3), torch.zeros(6)), "it")
    model = FlatModel(network(), torch.device("cpu"))
    check_fit(torch.OutOfMemoryError("no more"), model, samples, "it")
    check_fit(FmolError("said already"), model, samples, "it")
    check_fit(ValueError("no error of torch"), model, samples, "it")
    with pytest.raises(MisfitError):
        check_fit(RuntimeError("shapes"), model, samples, "it")


def test_a_model_that_was_tried_again_is_left_as_it_was() -> None:
    samples = as_samples((torch.ones(6, 3), torch.zeros(6)), "it")
    model = FlatModel(network(), torch.device("cpu"))
    with pytest.raises(MisfitError):
        check_fit(RuntimeError("shapes"), model, samples, "it")
    assert model.module.training
    assert not any(module._forward_pre_hooks for module in model.module.modules())
