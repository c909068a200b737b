"""Dense layers merged by least squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import Client, FedAvg, Federation, FedLS, Objective, fit
from fmol.algorithms import Momentum
from fmol.algorithms.merging import InputMoments, MergeFold
from fmol.dense import MOST_INPUTS, Dense, dense_layers
from fmol.engines import SequentialEngine
from fmol.engines.checks import check_reply
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply
from fmol.errors import RefusedError
from fmol.layout import Layout
from fmol.problems.multidigits import MultiDigits


def squared(out: Tensor, y: Tensor) -> Tensor:
    return ((out - y) ** 2).mean(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)
    )


def federation(model: nn.Module | None = None, clients: int = 3) -> Federation:
    generator = torch.Generator().manual_seed(1)

    def data(size: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(size, 1, 4, 4, generator=generator),
            torch.randn(size, 3, generator=generator),
        )

    sites = [Client(f"c{i}", data(6 + i), ("near",)) for i in range(clients)]
    return Federation(net() if model is None else model, [Objective("near", squared)], sites)


def merged(**options: Any) -> FedLS:
    told = {"local_epochs": 3, "batch_size": 4, "local_lr": 0.1, "mean_rounds": 0}
    return FedLS(**{**told, **options})


# ---- which layers ----------------------------------------------------------------------------


def test_layers_that_are_shared_frozen_too_wide_or_not_dense_are_left_out() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.frozen = nn.Linear(2, 3), nn.Linear(3, 3)
            self.wide, self.one, self.two = (
                nn.Linear(MOST_INPUTS, 1),
                *(nn.Linear(3, 3) for _ in range(2)),
            )
            self.two.weight = self.one.weight
            self.frozen.bias.requires_grad_(False)
            self.conv = nn.Conv1d(1, 1, 1)

    model = Model()
    layers = dense_layers(model, Layout.of(model))
    assert [layer.name for layer in layers] == ["good"]
    x = torch.arange(float(Layout.of(model).size))
    (layer,) = layers
    assert torch.equal(layer.read(x)[:, :2].reshape(-1), x[:6])
    spare = torch.zeros_like(x)
    layer.write(spare, layer.read(x))
    assert torch.equal(spare[:9], x[:9])
    assert not spare[9:].any()


# ---- what comes out --------------------------------------------------------------------------


def fold_of(deltas: list[Tensor], inputs: list[Tensor], ridge: float) -> Tensor:
    """The merged update `[o, i]` of a layer without bias, from each client's own and its inputs."""
    outputs, width = deltas[0].shape
    layer = Dense("layer", outputs, width, 0, None)
    x = torch.zeros(outputs * width)
    fold = MergeFold(["s"], x, "uniform", layers=[layer], ridge=ridge)
    above = torch.triu_indices(width, width)
    for i, (delta, rows) in enumerate(zip(deltas, inputs, strict=True)):
        moments = rows.T @ rows
        reply = Reply(
            client=f"c{i}",
            deltas={"s": delta.reshape(-1)},
            steps={"s": 1},
            extra={"moments.s": moments[above[0], above[1]]},
        )
        fold.add(reply, Ask(client=f"c{i}", round=0, x=x, lanes=(Lane("s", {"s": 1.0}),)))
    return fold.result().deltas[0].reshape(outputs, width)


def test_the_merged_update_is_the_solution_of_the_least_squares_problem() -> None:
    generator = torch.Generator().manual_seed(3)
    deltas = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    inputs = [torch.randn(5, 4, generator=generator) for _ in range(3)]
    wanted = torch.linalg.lstsq(
        torch.cat(inputs).double(),
        torch.cat([a @ d.T for a, d in zip(inputs, deltas, strict=True)]).double(),
    ).solution.T
    found = fold_of(deltas, inputs, ridge=1e-9)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_what_only_one_client_has_seen_is_not_divided_by_their_number() -> None:
    """Each client's inputs lie in a direction of their own: all that each has learnt is kept."""
    deltas = [torch.zeros(2, 3) for _ in range(3)]
    inputs = [torch.zeros(4, 3) for _ in range(3)]
    for i in range(3):
        deltas[i][:, i], inputs[i][:, i] = torch.tensor([1.0, 2.0]), 1.0
    found = fold_of(deltas, inputs, ridge=1e-6)
    torch.testing.assert_close(found, sum(deltas, torch.zeros(2, 3)), rtol=1e-4, atol=1e-4)


def test_where_there_were_no_inputs_it_is_the_mean() -> None:
    deltas = [torch.full((2, 3), float(i)) for i in (1, 2, 3)]
    inputs = [torch.zeros(4, 3) for _ in range(3)]
    assert torch.equal(fold_of(deltas, inputs, ridge=0.01), torch.full((2, 3), 2.0))
    inputs = [torch.tensor([[1.0, 0.0, 0.0]])] * 3
    found = fold_of(deltas, inputs, ridge=0.01)  # Alike for all: the mean as well.
    torch.testing.assert_close(found, torch.full((2, 3), 2.0))


def test_one_client_alone_gets_its_own_update() -> None:
    problem = federation(clients=1)
    one = fit(problem, merged(server_lr=0.1), rounds=1).model
    frozen = net()
    frozen.get_submodule("0").requires_grad_(False)
    plain = FedAvg(local_epochs=3, batch_size=4, local_lr=0.1, server_lr=0.1)
    other = fit(federation(frozen, clients=1), plain, rounds=1).model
    for name, parameter in other.named_parameters():
        start = problem.model.get_parameter(name)
        assert torch.equal(parameter, start) == name.startswith("0."), name
        torch.testing.assert_close(one.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def test_layers_may_have_any_name() -> None:
    torch.manual_seed(0)
    names = ("age[years]", "a,b", "plain*")

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(16, 3) for name in names})

        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([part(images.flatten(1)) for part in self.parts.values()]).sum(0)

    problem = federation(Sum())
    result = fit(problem, merged(), rounds=2)
    for name, parameter in result.model.named_parameters():
        assert not torch.equal(parameter, problem.model.get_parameter(name)), name


def test_weight_decay_is_refused_where_clients_hold_some_objectives_only() -> None:
    x, y = torch.randn(6, 1, 4, 4), torch.randn(6, 3)
    sites = [Client("a", (x, y), ("near", "far")), Client("b", (x, y), ("near",))]
    objectives = [Objective("near", squared), Objective("far", squared)]
    problem = Federation(net(), objectives, sites)
    with pytest.raises(ValueError, match=r"`weight_decay` is 0\.1, and some clients do not hold"):
        fit(problem, merged(weight_decay=0.1), rounds=1)
    assert fit(federation(), merged(weight_decay=0.1), rounds=1).reports


def test_why_an_update_is_refused_is_said_before_what_stands_and_falls_with_it() -> None:
    problem = federation(clients=2)
    x, _ = problem.client("c0").data
    x[0] = torch.nan
    refused = fit(problem, merged(), rounds=1).reports[0].refused
    (update,) = (each for each in refused if each.objective == "mixture")
    assert "its update has 80 non-finite of 80 values" in update.reason


def test_parameters_of_other_layers_are_held_once_layers_are_merged() -> None:
    problem = federation()
    result = fit(problem, merged(mean_rounds=1), rounds=2)
    before = fit(problem, merged(mean_rounds=1), rounds=1).model
    for name, parameter in result.model.named_parameters():
        moved = not torch.equal(parameter, before.get_parameter(name))
        assert moved == (not name.startswith("0.")), name
        assert not torch.equal(before.get_parameter(name), problem.model.get_parameter(name))
    assert result.reports[0].notes == ()
    assert result.reports[1].notes == (
        "the dense layers `2`, `4` are merged by least squares; the other 20 parameters are held",
    )


def test_momentum_of_the_rounds_before_does_not_move_what_is_held() -> None:
    problem = federation()
    told = {"mean_rounds": 1, "server_step": Momentum(0.9)}
    one, two = (fit(problem, merged(**told), rounds=rounds).model for rounds in (1, 2))
    assert torch.equal(one.get_parameter("0.weight"), two.get_parameter("0.weight"))
    assert not torch.equal(one.get_parameter("2.weight"), two.get_parameter("2.weight"))


def test_gradients_of_what_is_held_are_not_clipped_for() -> None:
    """With the convolution held, the longest step of the dense layers is the one that is allowed."""
    problem = federation(clients=1)
    told = {"local_epochs": None, "local_steps": 1, "batch_size": None, "clip_norm": 1e-3}
    for engine in ("sequential", "vectorized"):
        result = fit(problem, merged(**told, local_lr=1.0), rounds=1, engine=engine)
        moved = torch.cat(
            [
                (p - problem.model.get_parameter(name)).detach().reshape(-1)
                for name, p in result.model.named_parameters()
            ]
        )
        assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_a_client_that_does_not_hold_an_objective_does_not_hold_back_its_head() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.two(input=x)

    def loss(head: int) -> Any:
        return lambda out, y: ((out[head] - y) ** 2)[:, 0]

    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(2)
    ]
    objectives = [Objective(name, loss(head)) for head, name in enumerate(("one", "two"))]
    both = [Client("a", data[0], ("one", "two")), Client("b", data[1], ("one",))]
    problem = Federation(Heads(), objectives, both)
    alone = Federation(Heads(), objectives, both[:1])
    options = {"weights": {"one": 0.5, "two": 0.5}, "batch_size": None}
    one, other = (fit(p, merged(**options), rounds=1).model for p in (problem, alone))
    wanted = other.get_parameter("two.weight")
    torch.testing.assert_close(one.get_parameter("two.weight"), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(one.get_parameter("one.weight"), other.get_parameter("one.weight"))


def test_the_same_seed_gives_the_same_where_a_model_draws() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            noisy: Tensor = self.layer(nn.functional.dropout(x.flatten(1), 0.5, training=True))
            return noisy

    one, other = (fit(federation(Draws()), merged(), rounds=2, seed=3).model for _ in range(2))
    assert torch.equal(one.get_parameter("layer.weight"), other.get_parameter("layer.weight"))


def test_a_layer_that_is_never_called_is_named() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.flatten(1), self.layer.weight, self.layer.bias)

    with pytest.raises(ValueError, match="a layer `layer` that its forward pass does not call"):
        fit(federation(Hidden()), merged(), rounds=1)


def test_moments_are_counted_as_sent() -> None:
    reports = fit(federation(), merged(mean_rounds=1), rounds=2).reports
    moments = 9 * 10 // 2 + 5 * 6 // 2
    assert reports[1].bytes_up - reports[0].bytes_up == 3 * 4 * moments


@pytest.mark.parametrize("engine", ["vectorized", "auto"])
def test_engines_agree(engine: str) -> None:
    problem = federation()
    one = fit(problem, merged(), rounds=3)
    other = fit(problem, merged(), rounds=3, engine=engine)
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-4, atol=1e-5)
    assert [r.bytes_up for r in one.reports] == [r.bytes_up for r in other.reports]


def test_sum_and_mean_of_the_steps_come_to_the_same() -> None:
    problem = federation(clients=2)
    sizes = [len(problem.client(f"c{i}").data[0]) for i in range(2)]
    assert {-(-size // 4) for size in sizes} == {2}  # As many steps at both.
    one = fit(problem, merged(server_lr=0.1), rounds=2).losses
    other = fit(problem, merged(accumulate="mean", server_lr=0.6), rounds=2).losses
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- how samples count -----------------------------------------------------------------------


def moments_of(problem: Federation, floor: float = 0.5) -> Tensor:
    """What client c0 sends for its one layer, the model as it is at the start."""
    engine = SequentialEngine(problem)
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    lane = Lane("mixture", dict.fromkeys(problem.client("c0").objectives, 1.0))
    local = LocalConfig(lr=0.0, steps=1)
    ask = Ask(client="c0", round=0, x=x, lanes=(lane,), local=local)
    (layer,) = dense_layers(problem.model, problem.layout)
    transform = InputMoments((layer.name,), (layer.width,), floor)
    reply = Reply(client="c0", deltas={"mixture": torch.zeros_like(x)}, steps={"mixture": 1})
    return transform.client(reply, ask, engine._site("c0")).extra["moments.mixture"]


def linear(loss: Any, y: Tensor) -> Federation:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model.get_submodule("0").get_parameter("weight").fill_(1.0)
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    return Federation(model, [Objective("near", loss)], [Client("c0", (x, y), ("near",))])


def test_a_sample_counts_by_how_wrong_the_model_was_on_it() -> None:
    found = moments_of(linear(squared, torch.tensor([[1.0], [4.0]])))
    wrong = 0.5 + 1 - torch.exp(torch.tensor(-4.0))
    torch.testing.assert_close(found, torch.tensor([0.5 * 1 / 2, 0.0, wrong * 4 / 2]))


def test_a_sample_without_a_label_does_not_count() -> None:
    def masked(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return ((out - y.nan_to_num()) ** 2)[:, 0], ~y[:, 0].isnan()

    found = moments_of(linear(masked, torch.tensor([[1.0], [torch.nan]])))
    torch.testing.assert_close(found, torch.tensor([0.5 * 1, 0.0, 0.0]))  # Over the one that does.


def test_a_loss_of_one_number_counts_all_samples_alike() -> None:
    found = moments_of(linear(lambda out, y: ((out - y) ** 2).mean(), torch.zeros(2, 1)))
    torch.testing.assert_close(found, torch.tensor([0.5, 0.0, 2.0]))


# ---- what is refused -------------------------------------------------------------------------


class Doubled:
    def client(self, reply: Reply, ask: Ask, site: Any) -> Reply:
        return reply

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"transforms": (Doubled(),)}, "`transforms` has .*Leave it out"),
        ({"drift_correction": "scaffold"}, "`drift_correction` is 'scaffold'.*Leave it out"),
        ({"extrapolate": True}, "`extrapolate` is on.*Leave it out"),
        ({"ridge": 0.0}, "`ridge` must be"),
        ({"mean_rounds": -1}, "`mean_rounds` must be"),
        ({"solved_weight": 0.0}, "`solved_weight` must be"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fit(federation(), merged(**options), rounds=1)


def test_a_model_without_a_dense_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    with pytest.raises(ValueError, match=r"no trainable `nn\.Linear`.*Use FedAvg"):
        fit(federation(model), merged(), rounds=1)


def test_moments_that_are_not_finite_are_refused_with_their_update() -> None:
    problem = federation()
    x = torch.zeros(problem.layout.size)
    lane = Lane("near", {"near": 1.0})
    reply = Reply(
        client="c0",
        deltas={"near": x},
        steps={"near": 1},
        extra={"moments.near": torch.tensor([torch.inf])},
    )
    ask = Ask(client="c0", round=0, x=x, lanes=(lane,))
    kept, refused = check_reply(reply, ask, problem.client("c0"), problem.layout)
    assert not kept.deltas
    assert [(r.objective, r.reason) for r in refused] == [
        ("near", "what it sent as `moments.near` is not finite")
    ]


@pytest.mark.parametrize("extra", [{}, {"moments.near": torch.zeros(3)}])
def test_an_update_without_its_moments_is_not_taken_in(extra: dict[str, Tensor]) -> None:
    x = torch.zeros(4)
    reply = Reply(client="c0", deltas={"near": x}, extra=extra)
    with pytest.raises(ValueError, match=r"beside the update `near` of client `c0` there are"):
        InputMoments(("0",), (4,), 0.1).server(reply, Ask(client="c0", round=0, x=x))


@pytest.mark.parametrize("moments", [[3.0, 0.0, -1.0], [-5.0, 0.0, -5.0], [1.0, 2.0, 1.0]])
def test_what_cannot_be_moments_is_not_taken_in_and_its_sender_named(moments: list[float]) -> None:
    reply = Reply(
        client="c", deltas={"s": torch.zeros(2)}, extra={"moments.s": torch.tensor(moments)}
    )
    with pytest.raises(ValueError, match=r"what client `c` sent .* layer `layer` are none"):
        InputMoments(("layer",), (2,), 0.1).server(
            reply, Ask(client="c", round=0, x=torch.zeros(2))
        )


def test_moments_beyond_single_precision_are_left_to_the_check_of_finiteness() -> None:
    huge = torch.tensor([1e300, 0.0, 1.0], dtype=torch.float64)
    reply = Reply(client="c", deltas={"s": torch.zeros(2)}, extra={"moments.s": huge})
    transform = InputMoments(("layer",), (2,), 0.1)
    taken = transform.server(reply, Ask(client="c", round=0, x=torch.zeros(2)))
    assert not taken.extra["moments.s"].isfinite().all()


def test_moments_are_exact_but_for_how_they_are_sent() -> None:
    """Inputs that go up and down together, a few far longer than the rest, fewer samples than inputs:
    most directions have nothing, and rounding must not make that less."""
    generator = torch.Generator().manual_seed(0)
    long = torch.where(torch.arange(700) < 5, 1e4, 1.0)
    x = (1 + 1e-6 * torch.randn(200, 700, generator=generator)) * long
    problem = Federation(
        nn.Sequential(nn.Linear(700, 1)),
        [Objective("near", squared)],
        [Client("c0", (x, torch.full((200, 1), 1e9)), ("near",))],  # So each counts as much.
    )
    moments = moments_of(problem)
    rows = torch.cat([x, torch.ones(200, 1)], dim=1).double()
    above = torch.triu_indices(701, 701)
    exact = (1.5 * rows.T @ rows / 200)[above[0], above[1]]
    torch.testing.assert_close(moments, exact.float(), rtol=1.5e-7, atol=0)
    reply = Reply(client="c0", deltas={"s": torch.zeros(701)}, extra={"moments.s": moments})
    InputMoments(("0",), (701,), 0.5).server(reply, Ask(client="c0", round=0, x=torch.zeros(701)))


def test_moments_without_a_solution_end_the_round_with_a_sentence() -> None:
    """As of clients that all lie: each is let in by itself, within rounding."""
    layer = Dense("layer", 1, 2, 0, None)
    fold = MergeFold(["s"], torch.zeros(2), "uniform", layers=[layer], ridge=1e-9)
    reply = Reply(
        client="c",
        deltas={"s": torch.ones(2)},
        samples={"s": 1},
        steps={"s": 1},
        extra={"moments.s": torch.tensor([1.0, 0.0, -1e-6])},
    )
    fold.add(reply, Ask(client="c", round=0, x=torch.zeros(2), lanes=(Lane("s", {"s": 1.0}),)))
    with pytest.raises(
        RefusedError, match=r"layer `layer` leaves no solution .* take a larger one"
    ):
        fold.result()


# ---- what it is for --------------------------------------------------------------------------


def test_many_local_steps_on_two_labels_a_client_need_far_fewer_rounds() -> None:
    """After one round of 20 epochs, least squares are where means of such updates are nowhere near."""
    problem = MultiDigits(partition="both-shards", samples=256, client_test_samples=0).build()
    told: dict[str, Any] = {"local_epochs": 20, "batch_size": 16, "local_lr": 0.1}
    means = fit(problem, FedAvg(**told), rounds=1, engine="vectorized")
    squares = fit(problem, merged(**told), rounds=1, engine="vectorized")
    assert float(means.losses[-1].min()) > 1.5
    assert float(squares.losses[-1].max()) < 0.3
    assert squares.reports[0].notes
