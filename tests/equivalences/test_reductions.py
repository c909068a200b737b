"""What FMGDA and FSMGDA must reduce to, to 1e−12 relative in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, MGD, SMGD, Client, FedAvg, Federation, fit
from fmol.engines.seam import LocalConfig
from fmol.local import batches
from support import data, federation, flat, reference_fmgda, relative, squared_error

TIGHT = 1e-12

CASES: dict[str, list[tuple[str, ...]]] = {
    "one objective each (A = I)": [("a",), ("b",), ("c",)],
    "all objectives everywhere": [("a", "b", "c")] * 4,
    "own subsets": [("a", "b"), ("c",), ("b", "c"), ("a",), ("a", "b", "c")],
}


def fsmgda_batches(round: int, client: str, step: int, n: int, size: int = 5) -> Tensor:
    """The batches that the specification prescribes, drawn independently of the engine."""
    local = LocalConfig(lr=0.0, steps=step + 1, batch_size=size)
    indices = list(batches(n, local, seed=0, round=round, client=client))[step]
    return torch.arange(n) if indices is None else indices


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulate", ["sum", "mean"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fmgda_is_algorithm_one_written_by_hand(case: str, accumulate: str, weighting: str) -> None:
    problem = federation(CASES[case], sizes=[7, 12, 5, 9, 11][: len(CASES[case])])
    x, weights = reference_fmgda(
        problem, 4, local_steps=3, local_lr=0.1, server_lr=0.2,
        accumulate=accumulate, weighting=weighting,
    )  # fmt: skip
    result = fit(
        problem,
        FMGDA(
            local_steps=3, local_lr=0.1, server_lr=0.2,
            accumulate=accumulate, weighting=weighting,  # type: ignore[arg-type]
        ),
        rounds=4,
    )  # fmt: skip
    assert relative(flat(result.model), x) < TIGHT
    assert float((result.weights - weights).abs().max()) < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_fsmgda_is_algorithm_one_written_by_hand_on_the_same_batches(case: str) -> None:
    problem = federation(CASES[case], sizes=[7, 12, 5, 9, 11][: len(CASES[case])])
    x, weights = reference_fmgda(
        problem, 3, local_steps=4, local_lr=0.1, server_lr=0.2, batches=fsmgda_batches
    )
    result = fit(
        problem, FSMGDA(local_steps=4, batch_size=5, local_lr=0.1, server_lr=0.2), rounds=3, seed=0
    )
    assert relative(flat(result.model), x) < TIGHT
    assert float((result.weights - weights).abs().max()) < 1e-10


def test_with_one_objective_fmgda_is_fedavg() -> None:
    problem = federation([("a",)] * 4, names=("a",), sizes=[4, 9, 6, 12])
    ours = fit(problem, FSMGDA(local_steps=5, batch_size=4, local_lr=0.1, server_lr=0.3), rounds=5)
    fedavg = fit(
        problem, FedAvg(local_steps=5, batch_size=4, local_lr=0.1, server_lr=0.3), rounds=5
    )
    assert relative(flat(ours.model), flat(fedavg.model)) < TIGHT


def test_with_one_objective_and_equal_steps_it_is_plain_averaging_of_the_clients_models() -> None:
    problem = federation([("a",)] * 3, names=("a",), sizes=[4, 9, 6])
    result = fit(problem, FMGDA(local_steps=5, local_lr=0.1, server_lr=0.1), rounds=1)
    trained = []
    for client_id in problem.population.ids():
        inputs, targets = problem.population.get(client_id).data
        local = copy.deepcopy(problem.model)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            squared_error(0)(local(inputs), targets).mean().backward()
            optimizer.step()
        trained.append(flat(local))
    assert relative(flat(result.model), torch.stack(trained).mean(0)) < TIGHT


def test_fedavg_descends_one_trajectory_of_the_weighted_objectives() -> None:
    problem = federation([("a", "b"), ("b", "c")], sizes=[6, 8])
    weights = {"a": 0.2, "b": 0.5, "c": 0.3}
    result = fit(problem, FedAvg(weights, local_steps=4, batch_size=None, local_lr=0.1), rounds=1)
    trained = []
    for client_id in problem.population.ids():
        client = problem.population.get(client_id)
        inputs, targets = client.data
        local = copy.deepcopy(problem.model)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = sum(
                weights[name] * squared_error("abc".index(name))(local(inputs), targets).mean()
                for name in client.objectives
            )
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()
        trained.append(flat(local))
    assert relative(flat(result.model), torch.stack(trained).mean(0)) < TIGHT


@pytest.mark.parametrize("batch_size", [None, 5])
def test_one_client_and_one_step_is_centralised_mgd_or_smgd(batch_size: int | None) -> None:
    problem = federation([("a", "b", "c")], sizes=[12])
    ours = fit(
        problem,
        FSMGDA(local_steps=1, batch_size=batch_size, local_lr=0.7, server_lr=0.1),
        rounds=6,
        seed=3,
    )
    central = MGD(0.1) if batch_size is None else SMGD(batch_size, 0.1)
    assert relative(flat(ours.model), flat(fit(problem, central, rounds=6, seed=3).model)) < TIGHT


def test_mgd_descends_the_gradients_of_the_pooled_objectives() -> None:
    """Against one autograd graph over all data in one place, for unequal clients."""
    problem = federation([("a", "b"), ("b", "c"), ("a", "c")], sizes=[3, 8, 5])
    model = copy.deepcopy(problem.model)
    from support import brute_force_min_norm

    for _ in range(3):
        gradients = []
        for s, name in enumerate(problem.names):
            means = []
            for client_id in problem.population.holders(name):
                inputs, targets = problem.population.get(client_id).data
                means.append(squared_error(s)(model(inputs), targets).mean())
            grads = torch.autograd.grad(
                torch.stack(means).mean(), list(model.parameters()), allow_unused=True,
                materialize_grads=True,
            )  # fmt: skip
            gradients.append(torch.cat([g.reshape(-1) for g in grads]))
        stacked = torch.stack(gradients)
        step = 0.1 * brute_force_min_norm(stacked) @ stacked
        with torch.no_grad():
            offset = 0
            for p in model.parameters():
                p.sub_(step[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
    assert relative(flat(fit(problem, MGD(0.1), rounds=3).model), flat(model)) < TIGHT


def test_with_one_objective_each_and_one_step_it_is_centralised_mgd() -> None:
    problem = federation([("a",), ("b",), ("c",)], sizes=[5, 9, 7])
    ours = fit(problem, FMGDA(local_steps=1, local_lr=0.5, server_lr=0.1), rounds=6)
    central = fit(problem, MGD(0.1), rounds=6)
    assert relative(flat(ours.model), flat(central.model)) < TIGHT


def test_a_batch_of_all_the_data_is_fmgda_bit_for_bit() -> None:
    problem = federation([("a", "b", "c")] * 3, sizes=[4, 9, 6])
    full = fit(problem, FMGDA(local_steps=3), rounds=4)
    for size in (9, 1000):
        same = fit(problem, FSMGDA(local_steps=3, batch_size=size), rounds=4)
        assert torch.equal(flat(same.model), flat(full.model))


def test_permuting_objectives_changes_only_the_order_of_the_weights() -> None:
    problem = federation([("a", "b", "c"), ("b", "c"), ("a", "c")], sizes=[5, 9, 7])
    order = [2, 0, 1]
    permuted = Federation(
        model=problem.model,
        objectives=[problem.objectives[i] for i in order],
        clients=[problem.population.get(c) for c in problem.population.ids()],
    )
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one, other = fit(problem, algorithm, rounds=5), fit(permuted, algorithm, rounds=5)
    assert relative(flat(other.model), flat(one.model)) < TIGHT
    assert float((other.weights - one.weights[:, order]).abs().max()) < 1e-10


def test_permuting_clients_changes_nothing_but_rounding() -> None:
    """Other ids, so another order of summation; full batches, so no other random numbers."""
    holdings, sizes = [("a", "b", "c"), ("b", "c"), ("a", "c")], [5, 9, 7]
    problem = federation(holdings, sizes=sizes)
    clients = [problem.population.get(c) for c in problem.population.ids()]
    renamed = Federation(
        model=problem.model,
        objectives=problem.objectives,
        clients=[Client(f"z{9 - i}", c.data, c.objectives) for i, c in enumerate(clients)],
    )
    algorithm = FMGDA(local_steps=3)
    one, other = fit(problem, algorithm, rounds=5), fit(renamed, algorithm, rounds=5)
    assert relative(flat(other.model), flat(one.model)) < TIGHT


def test_sum_and_mean_differ_by_the_step_alone_when_all_take_equally_many_steps() -> None:
    problem = federation([("a", "b", "c")] * 3, sizes=[4, 9, 6])
    total = fit(problem, FMGDA(local_steps=4, server_lr=0.05, accumulate="sum"), rounds=4)
    mean = fit(problem, FMGDA(local_steps=4, server_lr=0.2, accumulate="mean"), rounds=4)
    assert relative(flat(total.model), flat(mean.model)) < TIGHT
    assert float((total.weights - mean.weights).abs().max()) < 1e-10


def test_with_epochs_on_unequal_clients_sum_and_mean_differ() -> None:
    problem = federation([("a",), ("b",), ("c",)], sizes=[4, 24, 6])
    total = fit(problem, FSMGDA(local_epochs=1, batch_size=4, accumulate="sum"), rounds=1)
    mean = fit(problem, FSMGDA(local_epochs=1, batch_size=4, accumulate="mean"), rounds=1)
    assert float((total.weights - mean.weights).abs().max()) > 1e-3


def test_the_data_of_a_test_problem_are_not_trivial() -> None:
    inputs, targets = data(50)
    assert float(targets.std()) > 0.3
    assert inputs.shape == (50, 5)
