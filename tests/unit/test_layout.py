"""A model's trainable parameters as one flat vector, and back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol.layout import FlatModel, Layout
from support import Net, data, squared_error

CPU = torch.device("cpu")
X, Y = data(7)


class Tied(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.encoder = nn.Linear(5, 5, dtype=torch.float64)
            self.decoder = nn.Linear(5, 5, dtype=torch.float64)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.decoder(torch.tanh(self.encoder(inputs)))
        return out


class Mixed(nn.Module):
    """A wide trunk and a narrow head in one module."""

    def __init__(self, wide: torch.dtype, narrow: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(4, 3, dtype=narrow)
            self.trunk = nn.Linear(5, 4, dtype=wide)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs.to(self.trunk.weight.dtype)))
        out: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return out


class Odd(nn.Module):
    """A scalar parameter, an empty one, a frozen one, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.fixed = nn.Parameter(torch.full((2,), 5.0, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gain * inputs * self.fixed[0]


def own_gradient(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """By plain autograd on a copy; zero where the loss does not depend on a parameter."""
    model = copy.deepcopy(model)
    model(inputs).square().mean().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }


MODELS: dict[str, nn.Module] = {
    "net": Net().double(),
    "tied": Tied(),
    "odd": Odd(),
    "convolution": nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)
    ).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_flat_model_computes_what_the_module_computes(name: str) -> None:
    model = MODELS[name]
    flat = FlatModel(model, CPU)
    assert torch.equal(flat(X), model(X))
    gradient = flat.gradient(flat(X).square().mean())
    assert gradient.shape == (flat.layout.size,)
    for part, expected in own_gradient(model, X).items():
        assert torch.equal(flat.layout.split(gradient)[part], expected), part


@pytest.mark.parametrize("name", MODELS)
def test_loading_and_stepping_move_the_forward_pass(name: str) -> None:
    model = MODELS[name]
    flat = FlatModel(model, CPU)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(flat.layout.size, dtype=torch.float64, generator=generator)
    direction = torch.randn(flat.layout.size, dtype=torch.float64, generator=generator)
    flat.load(x)
    flat.step(direction, 0.25)
    moved = copy.deepcopy(model)
    named = dict(moved.named_parameters())
    with torch.no_grad():
        for part, value in flat.layout.split(x - 0.25 * direction).items():
            named[part].copy_(value)
    assert torch.equal(flat(X), moved(X))
    assert not torch.equal(flat(X), model(X))


@pytest.mark.parametrize("name", MODELS)
def test_flattening_and_splitting_are_inverse_to_one_another(name: str) -> None:
    model = MODELS[name]
    layout = Layout.of(model)
    named = dict(model.named_parameters())
    x = layout.flatten(named)
    assert x.shape == (layout.size,)
    parts = layout.split(x)
    assert list(parts) == [n for n, p in named.items() if p.requires_grad]
    assert all(torch.equal(parts[part], named[part]) for part in parts)
    assert torch.equal(layout.flatten(parts), x)


def test_splitting_gives_views_and_flattening_a_copy() -> None:
    layout = Layout.of(Net().double())
    x = torch.zeros(layout.size, dtype=torch.float64)
    layout.split(x)["trunk.bias"].fill_(3.0)
    assert float(x.sum()) == 18.0
    again = layout.flatten(layout.split(x))
    again.zero_()
    assert float(x.sum()) == 18.0


def test_tied_parameters_stand_in_x_once() -> None:
    layout = Layout.of(Tied())
    assert layout.names == ("encoder.weight", "encoder.bias", "decoder.bias")
    assert layout.size == 25 + 5 + 5


def test_tied_parameters_stay_tied_through_a_load() -> None:
    flat = FlatModel(Tied(), CPU)
    flat.load(torch.arange(35, dtype=torch.float64))
    module: Any = flat.module
    assert module.encoder.weight is module.decoder.weight
    assert torch.equal(
        module.decoder.weight.detach().reshape(-1), torch.arange(25, dtype=torch.float64)
    )


def test_frozen_parameters_are_no_part_of_x_and_keep_their_values() -> None:
    model = Net().double()
    model.trunk.requires_grad_(False)
    flat = FlatModel(model, CPU)
    assert not any(name.startswith("trunk") for name in flat.layout.names)
    flat.load(torch.zeros(flat.layout.size, dtype=torch.float64))
    module: Any = flat.module
    assert torch.equal(module.trunk.weight, model.trunk.weight)
    assert torch.equal(flat(X), torch.zeros(7, 3, dtype=torch.float64))


def test_the_heads_of_other_objectives_have_gradient_zero() -> None:
    flat = FlatModel(Net().double(), CPU)
    gradient = flat.layout.split(flat.gradient(squared_error(1)(flat(X), Y).mean()))
    assert float(gradient["heads.0.weight"].abs().max()) == 0
    assert float(gradient["heads.1.weight"].abs().max()) > 0
    assert float(gradient["trunk.weight"].abs().max()) > 0


def test_every_gradient_is_a_new_vector() -> None:
    """Local steps work on it in place; neither the next gradient nor x may change with it."""
    flat = FlatModel(nn.Linear(5, 3, bias=False, dtype=torch.float64), CPU)
    x = flat.x.clone()
    first = flat.gradient(flat(X).square().mean())
    expected = first.clone()
    first.fill_(7.0)
    assert torch.equal(flat.x, x)
    assert torch.equal(flat.gradient(flat(X).square().mean()), expected)


def test_gradients_that_are_zero_can_be_written_to_without_harm() -> None:
    flat = FlatModel(nn.Linear(5, 3, bias=False, dtype=torch.float64), CPU)
    unrelated = nn.Parameter(torch.ones((), dtype=torch.float64))
    flat.gradient(unrelated * 2).fill_(9.0)
    assert float(flat.gradient(unrelated * 2).abs().max()) == 0


DTYPES = [
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.float64, torch.float32, torch.float64),
    (torch.float16, torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(("wide", "narrow", "widest"), DTYPES, ids=str)
def test_with_mixed_dtypes_x_has_the_widest_and_each_parameter_its_own(
    wide: torch.dtype, narrow: torch.dtype, widest: torch.dtype
) -> None:
    model = Mixed(wide, narrow)
    flat = FlatModel(model, CPU)
    assert flat.x.dtype == flat.layout.dtype == widest
    module: Any = flat.module
    assert (module.trunk.weight.dtype, module.head.weight.dtype) == (wide, narrow)
    assert torch.equal(flat(X), model(X))
    gradient = flat.gradient(flat(X).square().mean())
    assert gradient.dtype == widest
    for part, expected in own_gradient(model, X).items():
        assert torch.equal(flat.layout.split(gradient)[part], expected.to(widest)), part


@pytest.mark.parametrize(("wide", "narrow", "widest"), DTYPES, ids=str)
def test_a_narrow_parameter_follows_x_which_keeps_the_digits_it_cannot(
    wide: torch.dtype, narrow: torch.dtype, widest: torch.dtype
) -> None:
    flat = FlatModel(Mixed(wide, narrow), CPU)
    flat.load(torch.ones(flat.layout.size, dtype=widest))
    module: Any = flat.module
    nudge = torch.full_like(flat.x, float(torch.finfo(narrow).eps) / 8)
    for _ in range(8):
        flat.step(nudge, -1.0)
    # No single nudge can be seen in the narrow dtype; together they can.
    assert float(flat.x[0]) == 1.0 + float(torch.finfo(narrow).eps)
    assert float(module.head.weight.detach()[0, 0]) == 1.0 + float(torch.finfo(narrow).eps)


def test_the_users_model_is_never_modified() -> None:
    model = nn.Sequential(Net().double(), nn.Dropout(0.5)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    storage = {name: p.data_ptr() for name, p in model.named_parameters()}
    flat = FlatModel(model, CPU)
    flat.module.train()
    flat.gradient(flat(X).square().mean())
    flat.step(torch.ones_like(flat.x), 10.0)
    flat.load(torch.zeros_like(flat.x))
    assert not any(module.training for module in model.modules())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.data_ptr() == storage[name]
        assert p.grad is None
        assert p.requires_grad


def test_two_flat_models_of_one_module_do_not_share_anything() -> None:
    model = Net().double()
    one, other = FlatModel(model, CPU), FlatModel(model, CPU)
    one.load(torch.zeros_like(one.x))
    assert torch.equal(other(X), model(X))


def test_load_copies_so_that_x_t_survives_the_steps_taken_from_it() -> None:
    flat = FlatModel(Net().double(), CPU)
    x = torch.ones_like(flat.x)
    flat.load(x)
    flat.step(torch.ones_like(x), 0.5)
    assert torch.equal(x, torch.ones_like(x))


def test_inputs_that_are_a_dict_are_passed_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, text: Tensor, image: Tensor) -> Mapping[str, Tensor]:
            return {"sum": self.scale * (image - text)}

    outputs = FlatModel(Two(), CPU)({"image": torch.tensor([5.0]), "text": torch.tensor([1.0])})
    assert outputs["sum"].tolist() == [12.0]


def test_patterns_choose_parameters_by_name() -> None:
    layout = Layout.of(Net(features=5, width=6, heads=3))
    trunk = layout.matching("trunk.*")
    assert (trunk.dtype, trunk.shape) == (torch.bool, (layout.size,))
    chosen = layout.split(trunk.double())
    assert {n for n, part in chosen.items() if bool(part.all())} == {"trunk.weight", "trunk.bias"}
    assert {n for n, part in chosen.items() if not bool(part.any())} == set(layout.names[2:])
    several = layout.matching(["trunk.bias", "heads.?.bias"])
    assert int(several.sum()) == 6 + 3
    assert bool(layout.matching("*").all())


def test_patterns_mind_capitals() -> None:
    layout = Layout.of(nn.ModuleDict({"Trunk": nn.Linear(2, 3), "trunk": nn.Linear(2, 1)}))
    assert int(layout.matching("trunk.*").sum()) == 3
    with pytest.raises(ValueError, match=r"`TRUNK\.\*`"):
        layout.matching("TRUNK.*")


def test_a_pattern_that_matches_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"pattern `body\.\*` matches no trainable parameter"
    ) as error:
        Layout.of(Net(heads=9)).matching(["trunk.*", "body.*"])
    assert "trunk.weight, trunk.bias, heads.0.weight" in str(error.value)
    assert str(error.value).endswith("….")


def test_a_pattern_for_frozen_parameters_alone_is_refused() -> None:
    model = Net()
    model.trunk.requires_grad_(False)
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        Layout.of(model).matching("trunk.*")


def test_the_digest_tells_apart_what_may_not_be_mixed_up() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(2, 3)

    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(False)
    models = [
        nn.Linear(2, 3),
        nn.Linear(3, 2),
        nn.Linear(2, 3).double(),
        nn.Linear(2, 3, bias=False),
        Renamed(),
    ]
    digests = [Layout.of(model).digest for model in models]
    assert len(set(digests)) == len(models)
    assert Layout.of(frozen).digest == digests[3]
    assert Layout.of(nn.Linear(2, 3)).digest == digests[0]


def test_a_buffer_that_was_written_can_be_told() -> None:
    class Counting(nn.Module):
        calls: Tensor
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("calls", torch.zeros(1), persistent=False)
            self.register_buffer("table", torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            return inputs * self.weight * self.table

    flat = FlatModel(Counting(), CPU)
    before = flat.buffer_versions()
    flat(torch.ones(1))
    after = flat.buffer_versions()
    assert before["calls"] != after["calls"]
    assert before["table"] == after["table"]


# ---- modes -----------------------------------------------------------------------------------


class Counting(nn.Sequential):
    """Counts how often its layers are gone through."""

    changes = 0

    def train(self, mode: bool = True) -> Counting:
        self.changes += 1
        super().train(mode)
        return self


def test_a_mode_holds_for_all_layers_and_ends_with_its_block_whatever_happens() -> None:
    flat = FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), CPU)
    with flat.mode(training=False):
        assert not any(layer.training for layer in flat.module.modules())
        with flat.mode(training=True):
            assert all(layer.training for layer in flat.module.modules())
        assert not any(layer.training for layer in flat.module.modules())
    with pytest.raises(ZeroDivisionError), flat.mode(training=False):
        1 / 0  # noqa: B018
    assert all(layer.training for layer in flat.module.modules())


def test_layers_are_gone_through_only_where_their_mode_changes() -> None:
    module = Counting(nn.Linear(2, 2))
    flat = FlatModel(module, CPU)
    assert isinstance(flat.module, Counting)
    before = flat.module.changes
    with flat.mode(training=True):
        pass
    assert flat.module.changes == before
    with flat.mode(training=False):
        pass
    assert flat.module.changes == before + 2
