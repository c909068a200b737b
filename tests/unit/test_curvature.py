"""Least squares in what heads make of a layer: what clients send for it, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol import Client, FedALS, Federation, Objective, fit
from fmol.algorithms import curvature
from fmol.algorithms.curvature import CurvedFold, CurvedSums, OutputMoments, read_by
from fmol.algorithms.merging import MOMENTS, MergeFold, Sums, packed_rows, unpacked
from fmol.dense import Dense, dense_layers
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply
from fmol.errors import RefusedError
from fmol.layout import Layout
from fmol.problems.multidigits import MultiDigits


class Net(nn.Module):
    """A hidden layer and two heads."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, hidden)
        self.left, self.right = nn.Linear(hidden, 3), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(x))
        return self.left(hidden), self.right(hidden)


def left(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return functional.cross_entropy(out[0], y[:, 0], reduction="none")


def right(out: tuple[Tensor, Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """Squares, and no label where it is below zero."""
    return (out[1] - y[:, 1:]).square().sum(1), y[:, 1] >= 0


def problem(loss: Any = right, model: nn.Module | None = None) -> Federation:
    generator = torch.Generator().manual_seed(1)

    def data(size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, 4, generator=generator)
        labels = torch.randint(2, (size, 2), generator=generator)
        labels[0, 1] = -1
        return inputs, labels

    sites = [Client(f"c{i}", data(6 + i), ("left", "right")) for i in range(3)]
    return Federation(model or Net(), [Objective("left", left), Objective("right", loss)], sites)


TRANSFORM = OutputMoments(
    ("body",), (5,), 0.5, read=0, heads=("left", "right"), outputs=(3, 2), softness=2.0
)


def sent_by(federation: Federation, moved: float = 0.0, **mixture: float) -> list[Tensor]:
    """The matrices that client c0 sends, of a lane that came from `x` to `x` and `moved` everywhere."""
    engine = SequentialEngine(federation)
    x = federation.layout.flatten(dict(federation.model.named_parameters()))
    lane = Lane("mixture", mixture or {"left": 0.5, "right": 0.5})
    local = LocalConfig(lr=1.0, steps=1)
    ask = Ask(client="c0", round=0, x=x, lanes=(lane,), local=local)
    reply = Reply(client="c0", deltas={"mixture": torch.full_like(x, -moved)}, steps={"mixture": 1})
    taken = TRANSFORM.client(reply, ask, engine._site("c0"))
    return list(unpacked(TRANSFORM.server(taken, ask).extra[MOMENTS + "mixture"], [5] * 6))


# ---- at a client -----------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [0.0, 0.2])
def test_outputs_count_by_the_losses_second_derivatives_half_way_and_softened(
    moved: float,
) -> None:
    federation = problem()
    inputs, labels = federation.client("c0").data
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(moved / 2)
        shares = torch.softmax(net(inputs)[0] / 2, dim=1)
    rows = torch.cat([inputs, torch.ones(6, 1)], dim=1)
    has = (labels[:, 1] >= 0).float()
    # Of a cross-entropy p (1 − p), of a square 2 where there is a label; each has half of the lane.
    wanted = [*(0.5 * shares * (1 - shares)).T, has, has]
    found = sent_by(federation, moved)
    for matrix, each in zip(found[1:], wanted, strict=True):
        torch.testing.assert_close(matrix, (each[:, None] * rows).T @ rows / 6)


def test_heads_of_objectives_that_a_lane_does_not_descend_count_nothing() -> None:
    found = sent_by(problem(), left=1.0)
    assert all(bool(each.any()) for each in found[:4])
    assert not any(bool(each.any()) for each in found[4:])


def test_a_loss_of_one_number_is_that_of_each_sample() -> None:
    each = sent_by(problem(lambda out, y: (out[1] - y[:, 1:]).square().sum(1)), right=1.0)
    mean = sent_by(problem(lambda out, y: (out[1] - y[:, 1:]).square().sum(1).mean()), right=1.0)
    for one, other in zip(each[4:], mean[4:], strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_that_are_no_numbers_are_sent_as_they_are() -> None:
    """So that the update is refused by its client's name, and not taken for one of no curvature."""
    found = sent_by(problem(lambda out, y: (0 * out[1]).sum(1).sqrt()), right=1.0)
    assert not any(bool(each.isfinite().all()) for each in found[4:])


def test_a_loss_without_curvature_and_one_that_bends_down_count_nothing() -> None:
    straight = sent_by(problem(lambda out, y: out[1].sum(1)), right=1.0)
    bent = sent_by(problem(lambda out, y: -out[1].square().sum(1)), right=1.0)
    assert not any(bool(each.any()) for each in (*straight[1:], *bent[1:]))


def test_shares_are_taken_for_parts_of_their_sum() -> None:
    for one, other in zip(sent_by(problem(), left=0.5), sent_by(problem(), left=1.0), strict=True):
        torch.testing.assert_close(one, other)


class Deep(nn.Module):
    """Two hidden layers, of which heads read the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Linear(4, 4), nn.Linear(4, 5)
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(torch.tanh(self.first(x))))
        return self.left(hidden), self.right(hidden)


def test_inputs_are_those_at_the_end_of_the_steps_and_outputs_those_half_way() -> None:
    federation = problem(model=Deep())
    inputs, _ = federation.client("c0").data
    half, end = Deep(), Deep()
    with torch.no_grad():
        for net, moved in ((half, 0.1), (end, 0.2)):
            for parameter in net.parameters():
                parameter.add_(moved)
        shares = torch.softmax(half(inputs)[0] / 2, dim=1)
        rows = torch.cat([torch.tanh(end.first(inputs)), torch.ones(6, 1)], dim=1)
    found = sent_by(federation, 0.2, left=1.0)
    for matrix, each in zip(found[1:4], (shares * (1 - shares)).T, strict=True):
        torch.testing.assert_close(matrix, (each[:, None] * rows).T @ rows / 6)


def test_the_second_of_two_hidden_layers_is_the_one_that_heads_see() -> None:
    report = fit(problem(model=Deep()), told(), rounds=2).reports[1]
    assert any("`first`, `body` are merged" in note for note in report.notes)
    assert any("; `body` by what `left` and `right` make of it" in note for note in report.notes)
    first, body, *heads = dense_layers(Deep(), Layout.of(Deep()))
    rows = torch.randn(5, 5)
    fold = CurvedFold(
        ["s"], torch.zeros(72), "uniform",
        layers=(first, body), ridge=1.0, read=body, rows=rows, strength=1.0,
    )  # fmt: skip
    numbers = torch.arange(15.0 * 7)
    plain, seen = fold.moments(numbers)
    assert plain.shape == (5, 5)
    assert torch.equal(seen[0], next(unpacked(numbers[15:30], [5])))
    assert seen.shape == (6, 5, 5)
    transform = told().merging(problem(model=Deep()), 1).transform
    assert isinstance(transform, OutputMoments)
    assert transform.sent == [("first", 5), ("body", 5), *[("body", 5)] * 5]
    assert [head.name for head in heads] == ["left", "right"]


def test_hidden_layers_before_the_last_are_held_from_the_third_round_on() -> None:
    federation = problem(model=Deep())
    algorithm = told(local_epochs=1)
    moving = [algorithm.merging(federation, round).layers for round in range(4)]
    assert [[layer.name for layer in layers] for layers in moving] == [
        ["first", "body", "left", "right"], ["first", "body"], ["body"], ["body"]
    ]  # fmt: skip
    longer = told(local_epochs=1, deep_rounds=3).merging(federation, 3)
    assert [layer.name for layer in longer.layers] == ["first", "body"]
    twice, thrice = (fit(federation, algorithm, rounds=n).model for n in (2, 3))
    for name, moves in (("first", False), ("body", True)):
        one, other = (net.get_submodule(name).get_parameter("weight") for net in (twice, thrice))
        assert bool((one != other).any()) == moves


def test_towers_of_different_heads_go_on_moving() -> None:
    class Towers(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(torch.relu(self.body(x))), self.right(torch.relu(self.other(x)))

    layers = told().merging(problem(model=Towers()), 5).layers
    assert [layer.name for layer in layers] == ["body", "other"]


def test_a_head_whose_outputs_are_changed_in_place_is_looked_at_as_any_other() -> None:
    class Changed(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            one, other = super().forward(x)
            one += 1.0
            return one, other.clamp_(-50, 50)

    for one, other in zip(sent_by(problem()), sent_by(problem(model=Changed())), strict=True):
        torch.testing.assert_close(one, other)


def test_all_calls_of_a_head_count() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.body(x))
            outputs = self.left(hidden)
            self.left(-hidden)  # Of which nothing is made.
            return outputs, self.right(hidden)

    for one, other in zip(sent_by(problem()), sent_by(problem(model=Twice())), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_a_sequence_count_by_their_mean_and_others_by_that_of_all() -> None:
    class Sequence(Net):
        """Every sample as a sequence of itself and its opposite."""

        turned = False

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            over = 0 if self.turned else 1
            hidden = torch.relu(self.body(torch.stack([x, -x], dim=over)))
            return self.left(hidden).mean(over), self.right(hidden).mean(over)

    class Turned(Sequence):
        turned = True

    def losses(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return y[:, 0] * out[1].square().sum(1)  # Which counts some samples and others not.

    federation = problem(losses, Sequence())
    inputs, labels = federation.client("c0").data
    shares = labels[:, 0].float()
    ones = torch.ones(6, 1)
    pairs = [torch.cat([sign * inputs, ones], dim=1) for sign in (1, -1)]
    known = torch.stack([(shares[:, None] * rows).T @ rows for rows in pairs]).sum(0)
    unknown = shares.mean() * torch.stack([rows.T @ rows for rows in pairs]).sum(0)
    torch.testing.assert_close(sent_by(federation, right=1.0)[4], known / 6)
    torch.testing.assert_close(sent_by(problem(losses, Turned()), right=1.0)[4], unknown / 6)


def test_losses_without_second_derivatives_are_named() -> None:
    def margin(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        classes = y[:, 1].clamp(min=0)
        return functional.multi_margin_loss(out[1], classes, reduction="none").square()

    with pytest.raises(ValueError, match=r"`left`, `right` have no second .* Set it to 0\."):
        sent_by(problem(margin))


def test_a_head_that_nobody_calls_counts_nothing() -> None:
    class Silent(Net):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.body(x))
            return self.left(hidden), hidden[:, :2]

    found = sent_by(problem(model=Silent()))
    assert all(bool(each.any()) for each in found[:4])
    assert not any(bool(each.any()) for each in found[4:])


def test_classes_beyond_doubt_count_nothing() -> None:
    """Their second derivatives are below what single precision can tell, and would be refused as no
    moments for their lost digits."""
    net = Net()
    with torch.no_grad():
        net.left.bias.copy_(torch.tensor([0.0, -180.0, -182.0]))
    clients = [Client("c0", (torch.randn(6, 4), torch.zeros(6, 2).long()), ("left", "right"))]
    objectives = [Objective("left", left), Objective("right", right)]
    found = sent_by(Federation(net, objectives, clients), left=1.0)
    assert not any(bool(each.any()) for each in found[1:4])


def test_what_is_too_short_is_not_taken_in() -> None:
    x = torch.zeros(4)
    reply = Reply(client="c0", deltas={"s": x}, extra={"moments.s": torch.zeros(15)})
    with pytest.raises(ValueError, match=r"moments \[15\] of torch.float32, and \[90\] were asked"):
        TRANSFORM.server(reply, Ask(client="c0", round=0, x=x))


# ---- at the server ---------------------------------------------------------------------------


def moments(width: int, count: int, generator: torch.Generator, samples: int = 9) -> Tensor:
    """Second moments of one client `[1 + count, width, width]`, each sample with weights of its own."""
    rows = torch.randn(samples, width, generator=generator, dtype=torch.float64)
    weights = torch.rand(1 + count, samples, generator=generator, dtype=torch.float64)
    return torch.stack([(each[:, None] * rows).T @ rows for each in weights])


@pytest.mark.parametrize(("outputs", "seen"), [(6, 3), (3, 5), (1, 1)])
@pytest.mark.parametrize("samples", [9, 2])
def test_the_solution_is_that_of_the_whole_system(outputs: int, seen: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    width, strength, ridge = 4, 7.0, 1e-3
    rows = torch.randn(seen, outputs, generator=generator, dtype=torch.float64)
    plain = Sums.of(Dense("layer", outputs, width, 0, None), torch.device("cpu"))
    sums = CurvedSums(plain.deltas, plain.products, plain.moments, rows=rows, strength=strength)
    size = outputs * width
    system, right = torch.zeros(size, size).double(), torch.zeros(size).double()
    mean, total = torch.zeros(size).double(), torch.zeros(1 + seen, width, width).double()
    sides = [torch.eye(outputs).double(), *(strength * torch.outer(j, j) for j in rows)]
    for share in (0.2, 0.8):
        own = moments(width, seen, generator, samples)
        delta = torch.randn(outputs, width, generator=generator, dtype=torch.float64)
        sums.add(delta, own, share)
        part = sum(
            (torch.kron(side, each) for side, each in zip(sides, own, strict=True)),
            torch.zeros(size, size).double(),
        )
        system, right = system + share * part, right + share * part @ delta.flatten()
        mean, total = mean + share * delta.flatten(), total + share * own
    for side, each in zip(sides, total, strict=True):
        added = ridge * each.diagonal().mean() * torch.kron(side, torch.eye(width).double())
        system, right = system + added, right + added @ mean
    found = sums.merged(ridge)
    assert found is not None
    wanted = torch.linalg.solve(system, right).reshape(outputs, width)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-8)


def test_what_all_clients_agree_on_is_what_comes_out() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    plain = Sums.of(Dense("layer", 3, 4, 0, None), torch.device("cpu"))
    sums = CurvedSums(plain.deltas, plain.products, plain.moments, rows=rows, strength=100.0)
    delta = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    for _ in range(3):
        sums.add(delta, moments(4, 2, generator), 1 / 3)
    found = sums.merged(1e-4)
    assert found is not None
    torch.testing.assert_close(found, delta)


def test_without_any_curvature_it_is_plain_least_squares() -> None:
    generator = torch.Generator().manual_seed(4)
    device = torch.device("cpu")
    layer = Dense("layer", 3, 4, 0, None)
    plain, other = Sums.of(layer, device), Sums.of(layer, device)
    rows = torch.zeros(2, 3, dtype=torch.float64)
    sums = CurvedSums(other.deltas, other.products, other.moments, rows=rows, strength=100.0)
    for _ in range(3):
        own = moments(4, 2, generator)
        own[1:] = 0
        delta = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        plain.add(delta, own[0], 1 / 3)
        sums.add(delta, own, 1 / 3)
    wanted = plain.merged(1e-4)
    assert wanted is not None
    torch.testing.assert_close(sums.merged(1e-4), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("left_over", [0.0, 1e-9, 1e-7, 1e-5])
def test_rows_that_nearly_sum_to_nothing_are_no_trouble(left_over: float) -> None:
    """As those of a softmax's head that began at zero."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    rows[2] = left_over - rows[0] - rows[1]
    plain = Sums.of(Dense("layer", 4, 5, 0, None), torch.device("cpu"))
    sums = CurvedSums(plain.deltas, plain.products, plain.moments, rows=rows, strength=100.0)
    for _ in range(3):
        delta = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        sums.add(delta, moments(5, 3, generator), 1 / 3)
    assert sums.merged(1e-4) is not None
    assert not sums.note


def test_where_the_solution_is_not_come_to_what_is_there_is_taken_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curvature, "MOST_TURNS", 1)
    result = fit(problem(), told(), rounds=2)
    assert any("in 1 turns, and not to 1e-10" in note for note in result.reports[1].notes)
    monkeypatch.undo()
    right = fit(problem(), told(), rounds=2)
    assert not any("turns, and not to" in note for note in right.reports[1].notes)
    plain = fit(problem(), told(head_weight=0.0), rounds=2)
    vectors = [
        nn.utils.parameters_to_vector(run.model.parameters()).detach()
        for run in (result, right, plain)
    ]
    assert (vectors[0] - vectors[1]).norm() < (vectors[2] - vectors[1]).norm()


def test_how_large_a_heads_numbers_are_does_not_matter() -> None:
    def merged(scale: float) -> Tensor:
        x = torch.linspace(-1, 1, 12)
        read, head = Dense("read", 3, 2, 0, None), Dense("head", 2, 3, 6, None)
        rows = scale * head.read(x)
        generator = torch.Generator().manual_seed(5)
        fold = CurvedFold(
            ["s"], x, "uniform", layers=(read,), ridge=1e-3, read=read, rows=rows, strength=9.0
        )
        for name in ("a", "b"):
            packed = torch.cat([packed_rows(each) for each in moments(2, 2, generator)]).float()
            reply = Reply(
                client=name,
                deltas={"s": torch.randn(12, generator=generator)},
                samples={"s": 3},
                steps={"s": 1},
                extra={"moments.s": packed},
            )
            fold.add(reply, Ask(client=name, round=0, x=x, lanes=(Lane("s", {"s": 1.0}),)))
        return fold.result().deltas

    torch.testing.assert_close(merged(1.0), merged(1e3))


def test_curvatures_that_leave_no_solution_end_the_round_with_a_sentence() -> None:
    """As of clients that all lie: each is let in by itself, within rounding."""
    read = Dense("read", 1, 2, 0, None)
    fold = CurvedFold(
        ["s"], torch.zeros(3), "uniform",
        layers=(read,), ridge=1e-9, read=read, rows=torch.ones(1, 1), strength=1e9,
    )  # fmt: skip
    reply = Reply(
        client="c",
        deltas={"s": torch.ones(3)},
        samples={"s": 1},
        steps={"s": 1},
        extra={"moments.s": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, -1e-6])},
    )
    fold.add(reply, Ask(client="c", round=0, x=torch.zeros(3), lanes=(Lane("s", {"s": 1.0}),)))
    with pytest.raises(RefusedError, match=r"layer `read` leaves no solution .* take a larger one"):
        fold.result()


# ---- which layer, and what it is for ---------------------------------------------------------


def test_the_last_layer_as_wide_as_what_heads_take_in_is_what_they_read() -> None:
    def layer(name: str, outputs: int, inputs: int) -> Dense:
        return Dense(name, outputs, inputs, 0, None)

    first, last, other = layer("a", 5, 9), layer("b", 5, 5), layer("c", 4, 5)
    heads = (layer("x", 2, 5), layer("y", 3, 4))
    assert read_by((first, last), heads) == (last, heads[:1])
    assert read_by((first, last, other), heads) == (other, heads[1:])
    assert read_by((first,), heads[1:]) is None


def test_more_numbers_than_anyone_would_send_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(curvature, "MOST_NUMBERS", 5 * 15)
    fits = fit(problem(), told(), rounds=2).reports[1]
    assert any("make of it" in note for note in fits.notes)
    monkeypatch.setattr(curvature, "MOST_NUMBERS", 5 * 15 - 1)
    more = fit(problem(), told(), rounds=2).reports[1]
    assert any("left out, since its second moments would be 75 numbers" in n for n in more.notes)
    assert more.bytes_up < fits.bytes_up


def told(**options: Any) -> FedALS:
    given = {"local_epochs": 4, "batch_size": 4, "heads": "left,right", "temperature": 3.0}
    return FedALS(**{**given, **options})


def test_the_note_says_what_is_read_by_what() -> None:
    notes = fit(problem(), told(), rounds=2).reports[1].notes
    assert any("; `body` by what `left` and `right` make of it" in note for note in notes)
    notes = fit(problem(), told(head_weight=0.0), rounds=2).reports[1].notes
    assert not any("make of it" in note for note in notes)


def test_without_curvature_nothing_more_is_sent() -> None:
    more, less = (fit(problem(), told(head_weight=k), rounds=2).reports for k in (1.0, 0.0))
    assert more[0].bytes_up == less[0].bytes_up
    # Five outputs, and 15 numbers of single precision for each.
    assert more[1].bytes_up == less[1].bytes_up + 3 * 5 * 15 * 4


def test_a_network_whose_heads_read_something_else_is_merged_without_it() -> None:
    class Between(Net):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(10, 3), nn.Linear(10, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x)
            both = torch.cat([hidden.relu(), hidden.tanh()], dim=1)
            return self.left(both), self.right(both)

    algorithm = told()
    federation = problem(model=Between())
    (note,) = fit(federation, algorithm, rounds=2).reports[1].notes
    assert (
        "`head_weight` is left out, since no merged layer is as wide as what heads take in" in note
    )
    assert (
        type(algorithm.merging(federation, 1).fold(["m"], torch.zeros(90), "uniform")) is MergeFold
    )
    hidden = [each.name for each in dense_layers(federation.model, federation.layout)]
    assert hidden == ["body", "left", "right"]


class Digits(nn.Module):
    """One hidden layer, and a head for each of two digits."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.ReLU())
        self.left, self.right = nn.Linear(32, 10), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.left(hidden), self.right(hidden)


def test_clients_with_unlike_labels_are_nearer_after_three_rounds() -> None:
    digits = MultiDigits(partition="both-shards", samples=64, client_test_samples=0).build()
    clients = [digits.client(id) for id in digits.population.ids()]
    federation = Federation(Digits(clients[0].data[0][0].numel()), digits.objectives, clients)
    algorithm = told(local_epochs=20, batch_size=16, temperature=4.0)
    with_it, without = (
        fit(federation, replace(algorithm, head_weight=k), rounds=3, engine="vectorized").losses[-1]
        for k in (100.0, 0.0)
    )
    assert float(with_it.max()) < 0.25 * float(without.max())
