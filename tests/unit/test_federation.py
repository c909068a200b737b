"""Clients, populations, and what a federation checks before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pytest
import torch
from torch import nn

from fmol import Client, Federation, LazyPopulation, Objective
from fmol.federation import ClientList, Population
from support import Net, data, squared_error

DATA = data(3)
A, B, C = (Objective(name, squared_error(s)) for s, name in enumerate("abc"))


def client(id: str = "c", objectives: Any = ("a",), **more: Any) -> Client:
    return Client(id, more.pop("data", DATA), objectives, **more)


def problems_of(**arguments: Any) -> str:
    """What the federation says is wrong with these arguments."""
    defaults: dict[str, Any] = {"model": Net(), "objectives": [A], "clients": [client()]}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the callers look at the message
        Federation(**{**defaults, **arguments})
    return str(error.value)


class Numbered(Sequence[str]):
    """Ids that support `len` and indexing, and object to being walked through."""

    def __init__(self, size: int, prefix: str = "phone") -> None:
        self.size, self.prefix, self.asked = size, prefix, 0

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        assert isinstance(i, int)
        assert 0 <= i < self.size, f"asked for number {i} of {self.size}"
        self.asked += 1
        return f"{self.prefix}-{i:07d}"

    def __iter__(self) -> Any:
        raise AssertionError("walked through")

    def __contains__(self, id: object) -> bool:
        raise AssertionError("walked through")


# --- what is refused ------------------------------------------------------------------------


def test_a_model_whose_layers_keep_running_statistics_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    said = problems_of(model=model)
    assert "layer `1` is a BatchNorm1d" in said
    assert "GroupNorm" in said


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_every_kind_of_running_statistics_is_refused(layer: nn.Module) -> None:
    said = problems_of(model=nn.Sequential(nn.Linear(5, 4), nn.ModuleDict({"deep": layer})))
    assert "`1.deep`" in said
    assert type(layer).__name__ in said


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.LayerNorm(4)],
    ids=["BatchNorm without statistics", "GroupNorm", "LayerNorm"],
)
def test_normalisation_without_running_statistics_is_welcome(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(5, 4), layer)
    assert Federation(model, [A], [client()]).layout.size == sum(
        p.numel() for p in model.parameters()
    )


def test_a_model_with_nothing_to_train_is_refused() -> None:
    assert "no trainable parameters" in problems_of(model=Net().requires_grad_(False))
    assert "no trainable parameters" in problems_of(model=nn.ReLU())


def test_a_model_with_some_frozen_parameters_is_welcome() -> None:
    model = Net()
    model.trunk.requires_grad_(False)
    assert not any(
        name.startswith("trunk") for name in Federation(model, [A], [client()]).layout.names
    )


def test_complex_parameters_are_refused_by_name() -> None:
    said = problems_of(model=nn.Linear(5, 3, dtype=torch.complex64))
    assert "`weight` is complex" in said
    assert "`bias` is complex" in said


def test_frozen_complex_parameters_do_no_harm() -> None:
    model = nn.ModuleDict({"net": Net(), "other": nn.Linear(2, 2, dtype=torch.complex64)})
    model["other"].requires_grad_(False)
    assert Federation(model, [A], [client()]).layout.dtype == torch.float32


def test_a_lazy_module_that_has_no_shapes_yet_is_refused_in_words() -> None:
    assert "parameter `0.weight`" in problems_of(model=nn.Sequential(nn.LazyLinear(3)))


def test_no_objectives_no_clients_are_refused() -> None:
    assert "`objectives` is empty" in problems_of(objectives=[])
    assert "`clients` is empty" in problems_of(clients=[])


def test_an_objective_listed_twice_is_refused_by_name() -> None:
    assert "objective `a` is listed 2 times" in problems_of(objectives=[A, Objective("a", B.loss)])


def test_an_objective_that_nobody_holds_is_refused_by_name() -> None:
    said = problems_of(objectives=[A, B])
    assert said == (
        "objective `b` is held by no client. Give it to at least one client, "
        "or leave it out of `objectives`."
    )


@pytest.mark.parametrize("id", ["", None, 7])
def test_a_client_without_a_proper_id_is_refused(id: Any) -> None:
    said = problems_of(clients=[client(id)])
    assert "`id` must be a non-empty string" in said
    assert repr(id) in said


def test_an_id_that_is_no_string_is_refused_in_words_beside_those_that_are() -> None:
    wrong: Any = 7
    assert "`id` must be a non-empty string, got 7" in problems_of(
        clients=[client("c"), client(wrong)]
    )


def test_two_clients_with_one_id_are_refused_by_it() -> None:
    said = problems_of(clients=[client("c"), client("d"), client("c")])
    assert said == "client id `c` is used more than once. Give each client its own."


def test_a_client_without_an_objective_is_refused() -> None:
    assert "client `d` holds no objective" in problems_of(clients=[client(), client("d", ())])


def test_a_client_with_an_unknown_objective_is_refused_with_the_known_ones() -> None:
    said = problems_of(clients=[client(), client("d", ("a", "z"))])
    assert "client `d` holds objective `z`" in said
    assert "['a']" in said


def test_a_client_that_lists_an_objective_twice_is_refused() -> None:
    said = problems_of(clients=[client("d", ("a", "a"))])
    assert "client `d` lists objective `a` twice" in said


def test_an_objective_listed_twice_by_a_client_is_said_once() -> None:
    said = problems_of(clients=[client("d", ("a", "a"))])
    assert said == "client `d` lists objective `a` twice. List it once."


@pytest.mark.parametrize("bound", [0, -3])
def test_a_bound_on_samples_below_one_is_refused(bound: int) -> None:
    said = problems_of(clients=[client("d", max_samples=bound)])
    assert "`max_samples` of client `d`" in said
    assert str(bound) in said


def test_data_that_do_not_fit_are_refused_with_whose_they_are() -> None:
    wrong = (DATA[0], DATA[1][:2])
    assert problems_of(clients=[client("d", data=wrong)]).startswith("`data` of client `d` holds")
    assert problems_of(clients=[client("d", held_out=wrong)]).startswith("`held_out` of client `d`")
    assert problems_of(held_out=wrong).startswith("`held_out` of the federation")


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = problems_of(
        model=nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)),
        objectives=[A, A, B, C],
        clients=[
            client("c", ("a", "z")),
            client("c", ()),
            client("e", data=(DATA[0], DATA[1][:1])),
            client("f", held_out=3),
        ],
        held_out=(),
    )
    lines = said.splitlines()
    assert lines[0] == "10 things are wrong with this federation:"
    assert len(lines) == 11
    for words in (
        "BatchNorm1d",
        "`a` is listed 2 times",
        "client `c` holds objective `z`",
        "client id `c` is used more than once",
        "client `c` holds no objective",
        "`data` of client `e`",
        "`held_out` of client `f`",
        "objective `b` is held by no client",
        "objective `c` is held by no client",
        "`held_out` of the federation",
    ):
        assert any(words in line for line in lines[1:]), words


def test_data_that_are_brought_later_are_not_asked_for_now() -> None:
    def never() -> Any:
        raise AssertionError("called before training")

    problem = Federation(Net(), [A], [client(data=never, held_out=never)], held_out=never)
    assert problem.client("c").data is never


# --- what is there --------------------------------------------------------------------------


def test_the_assignment_matrix_has_a_row_per_objective_and_a_column_per_client_by_id() -> None:
    problem = Federation(
        Net(), [C, A, B], [client("y", ("a", "b")), client("x", ("c",)), client("z", ("b", "c"))]
    )
    assert problem.population.ids() == ("x", "y", "z")
    assert problem.assignment().tolist() == [[1, 0, 1], [0, 1, 0], [0, 1, 1]]


def test_the_assignment_of_a_population_can_be_had_too() -> None:
    ids = [f"p{i}" for i in range(4)]
    held = {"a": ids, "b": [ids[2]]}
    population = LazyPopulation(ids, client, held)
    assert Federation(Net(), [A, B], population).assignment().tolist() == [
        [1, 1, 1, 1],
        [0, 0, 1, 0],
    ]


def test_the_assignment_of_a_population_asks_for_no_more_than_len_and_indexing() -> None:
    problem = Federation(Net(), [A], LazyPopulation(Numbered(3), client))
    assert problem.assignment().tolist() == [[1, 1, 1]]


def test_one_objective_may_be_given_as_a_plain_string() -> None:
    assert client(objectives="left").objectives == ("left",)


def test_objectives_of_a_client_may_come_in_any_iterable() -> None:
    assert client(objectives=["b", "a"]).objectives == ("b", "a")


def test_names_keep_the_order_of_the_objectives() -> None:
    problem = Federation(Net(), [C, A], [client("c", ("a", "c"))])
    assert problem.names == ("c", "a")


def test_the_order_of_the_list_of_clients_changes_nothing() -> None:
    clients = [client(id, held) for id, held in [("b", "a"), ("a", ("b", "a")), ("c", "b")]]
    one, other = ClientList(clients), ClientList(clients[::-1])
    assert one.ids() == other.ids() == ("a", "b", "c")
    assert one.holders("a") == other.holders("a") == ("a", "b")
    assert one.holders("b") == ("a", "c")
    assert one.holders("nobody's") == ()


def test_a_client_is_found_by_its_id_and_an_unknown_one_is_said_to_be() -> None:
    mine = client("mine")
    problem = Federation(Net(), [A], [mine, client("yours")])
    assert problem.client("mine") is mine
    with pytest.raises(ValueError, match="there is no client `hers`"):
        problem.client("hers")


def test_a_federation_says_what_it_is_in_one_line() -> None:
    model = nn.Linear(1000, 3, bias=False)
    problem = Federation(model, [A, B], LazyPopulation(Numbered(1_000_000), client))
    assert repr(problem) == (
        "Federation(Linear with 3,000 trainable parameters, 2 objectives, 1,000,000 clients)"
    )


def test_a_federation_leaves_the_model_alone() -> None:
    model = Net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    problem = Federation(model, [A], [client()])
    assert problem.model is model
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# --- populations ----------------------------------------------------------------------------


def test_a_million_clients_cost_nothing_until_one_is_asked_for() -> None:
    names, made = Numbered(1_000_000), []

    def make(id: str) -> Client:
        made.append(id)
        return client(id)

    problem = Federation(Net(), [A], LazyPopulation(names, make))
    assert len(problem.population) == 1_000_000
    assert (names.asked, made) == (0, [])
    assert problem.client(names[999_999]).id == "phone-0999999"
    assert made == ["phone-0999999"]


def test_everyone_in_a_population_holds_everything_unless_it_is_said_who() -> None:
    names = Numbered(5)
    assert LazyPopulation(names, client).holders("a") is names
    some = Numbered(2, "tablet")
    population = LazyPopulation(names, client, {"a": some})
    assert population.holders("a") is some
    assert len(population.holders("b")) == 0


def test_an_objective_held_by_nobody_in_a_population_is_refused() -> None:
    population = LazyPopulation(Numbered(5), client, {"a": Numbered(5)})
    assert "objective `b` is held by no client" in problems_of(
        objectives=[A, B], clients=population
    )


def test_a_population_without_clients_is_refused() -> None:
    assert "held by no client" in problems_of(clients=LazyPopulation([], client))


def test_a_population_that_brings_another_client_than_asked_for_is_found_out() -> None:
    problem = Federation(Net(), [A], LazyPopulation(["x", "y"], lambda _: client("x")))
    with pytest.raises(ValueError, match="asked for client `y` and gave `x`"):
        problem.client("y")


def test_a_client_made_on_demand_with_an_unknown_objective_is_found_out() -> None:
    problem = Federation(Net(), [A], LazyPopulation(["x"], lambda id: client(id, ("a", "z"))))
    with pytest.raises(ValueError, match="client `x` holds objective `z`"):
        problem.client("x")


@pytest.mark.parametrize("objectives", [(), ("a", "a")], ids=["none", "one twice"])
def test_a_client_made_on_demand_is_checked_like_one_in_a_list(objectives: Any) -> None:
    problem = Federation(Net(), [A], LazyPopulation(["x"], lambda id: client(id, objectives)))
    with pytest.raises(ValueError, match="client `x`"):
        problem.client("x")


def test_any_object_with_the_four_methods_is_a_population() -> None:
    class Two:
        def __len__(self) -> int:
            return 2

        def ids(self) -> Sequence[str]:
            return ("x", "y")

        def holders(self, objective: str) -> Sequence[str]:
            return ("y",)

        def get(self, client: str) -> Client:
            return Client(client, DATA, ("a",))

    population = Two()
    assert isinstance(population, Population)
    problem = Federation(Net(), [A], population)
    assert problem.assignment().tolist() == [[0, 1]]
