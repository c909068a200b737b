"""What a client does with `x_t` and its own data."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import Client, Objective, rng
from fmol.data import as_samples
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply, Site
from fmol.evaluation import evaluate
from fmol.layout import FlatModel
from fmol.local import batches, descend, local_work, step_count
from support import Net, data, flat, masked_error, relative, squared_error

CPU = torch.device("cpu")
NAMES = ("a", "b", "c")
PLAIN = LocalConfig(lr=0.1, steps=4)


def site(
    model: nn.Module | None = None,
    pair: Any = None,
    *,
    masked: bool = False,
    held_out: Any = None,
    client: str = "c",
    seed: int = 0,
) -> Site:
    """One client's own place, with the objectives a, b and c on the columns of its targets."""
    pair = data(7) if pair is None else pair
    loss = masked_error if masked else squared_error
    objectives = {name: Objective(name, loss(s)) for s, name in enumerate(NAMES)}
    flat_model = FlatModel(Net().double() if model is None else model, CPU)
    return Site(
        client=Client(client, pair, NAMES, held_out=held_out),
        objectives=objectives,
        model=flat_model,
        samples=as_samples(pair, "the data"),
        held_out=None if held_out is None else as_samples(held_out, "the held-out data"),
        state={"x_0": flat_model.x.clone()},
        counts={},
        seed=seed,
        evaluation_batch=3,
    )


def lanes(names: Iterable[str]) -> tuple[Lane, ...]:
    return tuple(Lane(name, {name: 1.0}) for name in names)


def ask(here: Site, names: Iterable[str] = "a", local: LocalConfig = PLAIN, **more: Any) -> Ask:
    defaults: dict[str, Any] = {"client": here.client.id, "round": 0, "x": here.state["x_0"]}
    return Ask(lanes=lanes(names), local=local, **{**defaults, **more})


def delta(here: Site, local: LocalConfig = PLAIN, name: str = "a") -> Tensor:
    return descend(ask(here, local=local), Lane(name, {name: 1.0}), here).delta


def drawn(n: int, seed: int = 0, round: int = 0, client: str = "c", **local: Any) -> list[Any]:
    config = LocalConfig(lr=0.1, **local)
    return [
        None if indices is None else indices.tolist()
        for indices in batches(n, config, seed=seed, round=round, client=client)
    ]


# --- steps and batches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "n", "batch_size", "steps"),
    [
        (1, 7, 3, 3),
        (4, 7, 3, 12),
        (2, 6, 3, 4),
        (3, 6, 1, 18),
        (2, 6, 6, 2),
        (2, 6, 7, 2),
        (5, 6, None, 5),
        (3, 1, 64, 3),
    ],
)
def test_an_epoch_is_as_many_steps_as_there_are_batches(
    epochs: int, n: int, batch_size: int | None, steps: int
) -> None:
    local = LocalConfig(lr=0.1, epochs=epochs, batch_size=batch_size)
    assert step_count(local, n) == steps
    assert len(drawn(n, epochs=epochs, batch_size=batch_size)) == steps


def test_steps_are_steps_whatever_the_size_of_the_data() -> None:
    assert [step_count(replace(PLAIN, batch_size=3), n) for n in (1, 3, 1000)] == [4, 4, 4]


def test_batches_are_consecutive_slices_of_one_permutation_drawn_anew_when_used_up() -> None:
    order = rng.stream(5, "batches", 2, "anna")
    first, second, third = (order.permutation(7).tolist() for _ in range(3))
    assert drawn(7, seed=5, round=2, client="anna", steps=8, batch_size=3) == [
        *(first[:3], first[3:6], first[6:]),
        *(second[:3], second[3:6], second[6:]),
        *(third[:3], third[3:6]),
    ]


@pytest.mark.parametrize(("n", "batch_size"), [(7, 3), (6, 3), (5, 1), (9, 8)])
def test_every_pass_over_the_data_takes_each_sample_once(n: int, batch_size: int) -> None:
    per_epoch = math.ceil(n / batch_size)
    each = drawn(n, epochs=5, batch_size=batch_size)
    epochs = [each[i : i + per_epoch] for i in range(0, len(each), per_epoch)]
    orders = [tuple(i for batch in epoch for i in batch) for epoch in epochs]
    assert len(orders) == 5
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(set(orders)) == 5


def test_other_seeds_rounds_and_clients_have_other_batches() -> None:
    ways = [
        drawn(50, seed=s, round=t, client=c, steps=1, batch_size=49)[0]
        for s in (0, 1)
        for t in (0, 1)
        for c in ("anna", "ben")
    ]
    assert len({tuple(order) for order in ways}) == 8


def test_nothing_carries_over_from_one_round_to_the_next() -> None:
    """A round's batches are the same however many steps the rounds before it took."""
    for steps in (1, 2, 5, 50):
        drawn(7, round=0, steps=steps, batch_size=3)
        assert (
            drawn(7, round=1, steps=5, batch_size=3) == drawn(7, round=1, steps=9, batch_size=3)[:5]
        )


@pytest.mark.parametrize("batch_size", [None, 7, 8, 1000])
def test_a_batch_of_all_the_data_is_the_data_in_stored_order(batch_size: int | None) -> None:
    assert drawn(7, steps=3, batch_size=batch_size) == [None] * 3


def test_all_lanes_of_a_client_see_the_same_batches() -> None:
    """Two objectives with one and the same loss must then have one and the same delta."""
    here = site(pair=(data(7)[0], data(7)[1][:, :1].expand(-1, 3)))
    objective = here.objectives["a"]
    here.objectives = {name: replace(objective, name=name) for name in NAMES}
    reply = local_work(ask(here, "abc", LocalConfig(lr=0.1, steps=5, batch_size=2)), here)
    assert torch.equal(reply.deltas["a"], reply.deltas["b"])
    assert torch.equal(reply.deltas["a"], reply.deltas["c"])


# --- the descent ----------------------------------------------------------------------------


def by_hand(here: Site, local: LocalConfig, model: nn.Module, name: str = "a") -> Tensor:
    """The same with torch's optimiser: the way it went, or to the mean of the last iterates."""
    model = copy.deepcopy(model)
    start = flat(model).clone()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
    )
    inputs, targets = here.samples.batch(None)
    iterates = []
    for indices in batches(len(inputs), local, seed=0, round=0, client="c"):
        rows = torch.arange(len(inputs)) if indices is None else indices
        optimizer.zero_grad()
        values = here.objectives[name].loss(model(inputs[rows]), targets[rows])
        assert isinstance(values, Tensor)
        values.mean().backward()
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if local.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, local.clip_norm)
        offset = 0
        for p in parameters:
            assert p.grad is not None
            origin = start[offset : offset + p.numel()].view_as(p)
            p.grad += local.proximal * (p.detach() - origin)
            offset += p.numel()
        optimizer.step()
        iterates.append(flat(model).clone())
    steps = len(iterates)
    last = max(1, round(local.average * steps))
    total = (start - torch.stack(iterates[-last:]).mean(0)) / local.lr
    return total / steps if local.accumulate == "mean" else total


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.2},
    "proximal": {"proximal": 0.7},
    "clipping": {"clip_norm": 0.05},
    "averaging": {"average": 0.6},
    "averaging all": {"average": 1.0},
    "all but clipping": {"momentum": 0.5, "weight_decay": 0.1, "proximal": 0.3},
    "everything": {
        "momentum": 0.5,
        "weight_decay": 0.1,
        "proximal": 0.3,
        "clip_norm": 0.05,
        "average": 0.4,
    },
}


@pytest.mark.parametrize("accumulate", ["sum", "mean"])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_descent_is_what_torchs_own_optimiser_does(
    options: str, batch_size: int | None, accumulate: Any
) -> None:
    local = LocalConfig(
        lr=0.2, steps=5, batch_size=batch_size, accumulate=accumulate, **OPTIONS[options]
    )
    model = Net().double()
    here = site(model)
    # torch divides by the norm plus 1e−6 when it clips; that is the whole difference.
    tolerance = 1e-4 if "clip_norm" in OPTIONS[options] else 1e-12
    assert relative(delta(here, local), by_hand(here, local, model)) < tolerance


@pytest.mark.parametrize("options", [o for o in OPTIONS if o != "plain"])
def test_every_option_makes_a_difference(options: str) -> None:
    local = LocalConfig(lr=0.2, steps=5)
    assert relative(delta(site(), replace(local, **OPTIONS[options])), delta(site(), local)) > 1e-3


def test_a_gradient_longer_than_the_bound_is_cut_to_it_and_keeps_its_direction() -> None:
    gradient = delta(site(), LocalConfig(lr=0.1, steps=1))
    length = float(gradient.norm())
    cut = delta(site(), LocalConfig(lr=0.1, steps=1, clip_norm=length / 4))
    assert relative(cut, gradient / 4) < 1e-14
    spared = delta(site(), LocalConfig(lr=0.1, steps=1, clip_norm=length * 4))
    assert torch.equal(spared, gradient)


def test_a_gradient_of_zero_survives_clipping() -> None:
    here = site()
    here.objectives = {"a": Objective("a", lambda outputs, targets: 0 * outputs[:, 0])}
    assert not delta(here, LocalConfig(lr=0.1, steps=2, clip_norm=1.0)).any()


def test_with_a_step_size_of_zero_the_delta_is_steps_times_the_gradient() -> None:
    once = delta(site(), LocalConfig(lr=0.0, steps=1))
    assert relative(delta(site(), LocalConfig(lr=0.0, steps=5)), 5 * once) < 1e-14


def test_the_mean_is_the_sum_divided_by_the_steps() -> None:
    total = delta(site(), LocalConfig(lr=0.2, epochs=2, batch_size=3))
    mean = delta(site(), LocalConfig(lr=0.2, epochs=2, batch_size=3, accumulate="mean"))
    assert torch.equal(mean, total / 6)


def test_one_full_step_is_the_gradient_at_x_whatever_the_step_size() -> None:
    model = Net().double()
    here = site(model)
    inputs, targets = here.samples.batch(None)
    squared_error(0)(model(inputs), targets).mean().backward()
    gradient = torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
            for p in model.parameters()
        ]
    )
    for lr in (0.0, 0.1, 100.0):
        assert torch.equal(delta(here, LocalConfig(lr=lr, steps=1)), gradient)


def test_every_lane_starts_from_x_and_leaves_nothing_behind() -> None:
    here = site()
    asked = ask(here, "abc", LocalConfig(lr=0.5, steps=3, momentum=0.9))
    x = asked.x.clone()
    together = local_work(asked, here).deltas
    backwards = local_work(replace(asked, lanes=asked.lanes[::-1]), here).deltas
    for name in NAMES:
        alone = local_work(replace(asked, lanes=lanes(name)), site()).deltas
        assert torch.equal(together[name], alone[name])
        assert torch.equal(together[name], backwards[name])
    assert torch.equal(asked.x, x)


def test_a_mixture_descends_the_weighted_sum_of_its_losses() -> None:
    one_step = LocalConfig(lr=0.1, steps=1)
    mixed = descend(ask(site(), local=one_step), Lane("m", {"a": 0.25, "c": 1.0}), site()).delta
    expected = 0.25 * delta(site(), one_step, "a") + delta(site(), one_step, "c")
    assert relative(mixed, expected) < 1e-14


def test_a_client_with_fewer_samples_than_a_batch_takes_its_steps_and_ends() -> None:
    here = site(pair=data(2))
    full = delta(here, LocalConfig(lr=0.1, steps=6, batch_size=64))
    assert torch.equal(full, delta(here, LocalConfig(lr=0.1, steps=6)))


# --- labels ---------------------------------------------------------------------------------


def with_labels(rows: list[int], n: int = 6) -> tuple[Tensor, Tensor]:
    """Data of which only `rows` carry a label for objective a; b and c have all of theirs."""
    inputs, targets = data(n)
    gone = torch.ones(n, dtype=torch.bool)
    gone[rows] = False
    targets[gone, 0] = float("nan")
    return inputs, targets


def test_a_batch_without_labels_is_a_step_that_does_not_move() -> None:
    here = site(pair=with_labels([1, 4]), masked=True)
    model, loss = Net().double(), here.objectives["a"].loss
    local = LocalConfig(lr=0.3, epochs=1, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    start = flat(model).clone()
    inputs, targets = here.samples.batch(None)
    for (row,) in drawn(6, epochs=1, batch_size=1):
        if row in (1, 4):
            optimizer.zero_grad()
            values, _ = loss(model(inputs[[row]]), targets[[row]])
            values.mean().backward()
            optimizer.step()
    descent = descend(ask(here, local=local), Lane("a", {"a": 1.0}), here)
    assert descent.moved == 2
    assert relative(descent.delta, (start - flat(model)) / 0.3) < 1e-12


def test_a_batch_without_labels_does_not_move_by_momentum_or_decay_either() -> None:
    """One labelled sample in six batches: one step, so neither has anything to act on."""
    here = site(pair=with_labels([3]), masked=True)
    local = LocalConfig(lr=0.3, epochs=1, batch_size=1)
    assert torch.equal(delta(here, replace(local, momentum=0.9, proximal=0.5)), delta(here, local))


def test_the_gradient_of_a_batch_is_the_mean_over_its_labelled_samples() -> None:
    rows = [0, 2, 3]
    inputs, targets = with_labels(rows)
    one_step = LocalConfig(lr=0.1, steps=1)
    some = delta(site(pair=(inputs, targets), masked=True), one_step)
    assert relative(some, delta(site(pair=(inputs[rows], targets[rows])), one_step)) < 1e-13


@pytest.mark.parametrize("evaluated", [(), ("a", "b")])
def test_a_client_without_a_label_sends_nothing_for_that_objective(
    evaluated: tuple[str, ...],
) -> None:
    here = site(pair=with_labels([]), masked=True)
    reply = local_work(ask(here, "ab", evaluate=evaluated), here)
    assert set(reply.deltas) == set(reply.steps) == {"b"}
    assert set(reply.losses) == set(evaluated) - {"a"}
    assert reply.samples == {"a": 0, "b": 6}


@pytest.mark.parametrize("evaluated", [(), ("a", "b")])
def test_samples_are_those_that_carry_a_label(evaluated: tuple[str, ...]) -> None:
    here = site(pair=with_labels([1, 2, 5]), masked=True)
    reply = local_work(ask(here, "ab", evaluate=evaluated), here)
    assert reply.samples == {"a": 3, "b": 6}


def test_a_client_whose_labels_were_in_no_batch_says_that_it_did_not_move() -> None:
    first = drawn(6, steps=1, batch_size=2)[0]
    here = site(pair=with_labels([i for i in range(6) if i not in first]), masked=True)
    reply = local_work(ask(here, "ab", LocalConfig(lr=0.1, steps=1, batch_size=2)), here)
    assert reply.steps == {"a": 0, "b": 1}
    assert not reply.deltas["a"].any()


def test_a_mixture_goes_on_with_the_objectives_that_have_labels() -> None:
    here = site(pair=with_labels([]), masked=True)
    mixed = Lane("m", {"a": 0.5, "b": 0.5})
    reply = local_work(replace(ask(here), lanes=(mixed,)), here)
    alone = descend(ask(site()), Lane("m", {"b": 0.5}), site(pair=data(6))).delta
    assert relative(reply.deltas["m"], alone) < 1e-14


# --- what comes back ------------------------------------------------------------------------


def test_losses_are_those_at_x_before_any_step() -> None:
    model = Net().double()
    here = site(model)
    reply = local_work(ask(here, "a", evaluate=("a", "c")), here)
    inputs, targets = here.samples.batch(None)
    for s, name in [(0, "a"), (2, "c")]:
        expected = squared_error(s)(model(inputs), targets).mean().detach()
        assert reply.losses[name] == pytest.approx(float(expected), rel=1e-12)
    assert set(reply.losses) == {"a", "c"}


def test_held_out_metrics_come_only_where_they_are_asked_for_and_there_are_data() -> None:
    with_data, without = site(held_out=data(5, seed=9)), site()
    for here, wanted, expected in [
        (with_data, True, {"a"}),
        (with_data, False, set()),
        (without, True, set()),
    ]:
        reply = local_work(ask(here, "", evaluate=("a",), held_out=wanted), here)
        assert set(reply.held_out) == expected
    assert reply.deltas == {}
    row = local_work(ask(with_data, "", evaluate=("a",), held_out=True), with_data).held_out["a"]
    scores = evaluate(
        site().model,
        as_samples(data(5, seed=9), "the held-out data"),
        [with_data.objectives["a"]],
        batch_size=5,
        metrics=True,
    )
    assert row["loss"] == pytest.approx(scores["a"]["loss"].value, rel=1e-12)


# --- randomness in the model ----------------------------------------------------------------


def with_dropout() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()


def dropped(names: str = "a", **more: Any) -> Reply:
    client, seed = more.pop("client", "c"), more.pop("seed", 0)
    here = site(with_dropout(), client=client, seed=seed)
    return local_work(ask(here, names, **more), here)


def test_a_lane_drops_the_same_units_whichever_lanes_ran_before_it() -> None:
    alone = dropped("b").deltas["b"]
    assert torch.equal(dropped("abc").deltas["b"], alone)
    assert torch.equal(dropped("cab").deltas["b"], alone)
    assert torch.equal(dropped("b", evaluate=NAMES).deltas["b"], alone)


def test_what_is_dropped_does_not_depend_on_the_global_generator() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        one = dropped().deltas["a"]
        torch.manual_seed(2)
        assert torch.equal(dropped().deltas["a"], one)


def test_the_global_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    dropped("abc", evaluate=NAMES)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_round_phase_client_and_seed_drops_other_units() -> None:
    deltas = [
        dropped().deltas["a"],
        dropped(round=1).deltas["a"],
        dropped(phase=1).deltas["a"],
        dropped(client="d").deltas["a"],
        dropped(seed=1).deltas["a"],
    ]
    for i, one in enumerate(deltas):
        assert all(relative(one, other) > 1e-3 for other in deltas[:i])


def test_lanes_with_one_loss_drop_different_units() -> None:
    here = site(with_dropout())
    here.objectives = {n: replace(here.objectives["a"], name=n) for n in NAMES}
    reply = local_work(ask(here, "ab"), here)
    assert relative(reply.deltas["a"], reply.deltas["b"]) > 1e-3


def test_training_is_in_training_mode_whatever_mode_the_users_model_is_in() -> None:
    here = site(with_dropout().eval())
    assert torch.equal(local_work(ask(here), here).deltas["a"], dropped().deltas["a"])


class AlwaysNoisy(nn.Module):
    """Draws in evaluation mode too, as a model that samples does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = with_dropout()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        return out + 0.1 * torch.randn_like(out)


def test_a_model_that_draws_while_it_is_evaluated_is_evaluated_reproducibly() -> None:
    here = site(AlwaysNoisy())
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        one = local_work(ask(here, evaluate=NAMES), here)
        assert torch.equal(torch.get_rng_state(), before)
        assert local_work(ask(here, evaluate=NAMES), here).losses == one.losses


# --- state in the model ---------------------------------------------------------------------


class Remembering(nn.Module):
    """Writes a buffer in its forward pass, in place or by putting a new tensor there."""

    seen: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.net, self.in_place = Net().double(), in_place
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs)
        if self.in_place:
            self.seen += out.detach().mean(0)
        else:
            self.seen = self.seen + out.detach().mean(0)
        return out - self.seen


@pytest.mark.parametrize("evaluated", [(), NAMES], ids=["trained", "evaluated first"])
def test_a_model_that_writes_a_buffer_in_its_forward_pass_is_refused_by_its_name(
    evaluated: tuple[str, ...],
) -> None:
    here = site(Remembering(in_place=True))
    with pytest.raises(ValueError, match="changes its buffer `seen`") as error:
        local_work(ask(here, evaluate=evaluated), here)
    assert "GroupNorm" in str(error.value)


def test_a_model_that_replaces_a_buffer_in_its_forward_pass_is_refused_too() -> None:
    here = site(Remembering(in_place=False))
    with pytest.raises(ValueError, match="changes its buffer `seen`"):
        local_work(ask(here, evaluate=NAMES), here)


def test_buffers_that_are_only_read_are_welcome() -> None:
    model = nn.Sequential(Net().double())
    model.register_buffer("table", torch.ones(3))
    here = site(model)
    assert torch.equal(local_work(ask(here), here).deltas["a"], delta(site()))


class InPlace(nn.Module):
    """Changes its inputs where they stand, which is harmless to a copied batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net().double()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.net(inputs.sub_(0.5))
        return out


def test_a_model_that_works_on_its_inputs_in_place_leaves_the_clients_data_alone() -> None:
    inputs, targets = data(7)
    before = inputs.clone()
    here = site(InPlace(), (inputs, targets))
    try:
        local_work(ask(here, evaluate=NAMES), here)
    except ValueError:
        return  # Refusing it in words would do as well.
    assert torch.equal(inputs, before)
