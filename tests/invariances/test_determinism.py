"""One seed, one result: whatever the order, the cohort's history or the number of clients."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from fmol import FMGDA, FSMGDA, SMGD, Alone, FedAvg, Federation, fit
from fmol.participation import Fraction, Number, Stratified
from fmol.rounds import Algorithm
from support import federation, flat

ALGORITHMS: list[Algorithm] = [
    FMGDA(local_steps=2),
    FSMGDA(local_steps=3, batch_size=4),
    FSMGDA(local_epochs=2, batch_size=5, normalize="loss", accumulate="mean"),
    SMGD(4, 0.1),
    FedAvg(local_steps=3, batch_size=4),
    Alone(local_steps=3, batch_size=4),
]


def shuffled(problem: Federation, seed: int) -> Federation:
    clients = [problem.population.get(client) for client in problem.population.ids()]
    random.Random(seed).shuffle(clients)
    return Federation(problem.model, problem.objectives, clients)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_two_runs_from_one_seed_are_equal_to_the_last_bit(algorithm: Algorithm) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    one = fit(problem, algorithm, rounds=4, seed=5, participation=Number(3))
    two = fit(problem, algorithm, rounds=4, seed=5, participation=Number(3))
    assert torch.equal(flat(one.model), flat(two.model))
    assert torch.equal(one.losses.nan_to_num(-1), two.losses.nan_to_num(-1))
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_shuffling_the_list_of_clients_changes_not_a_bit(algorithm: Algorithm) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    one = fit(problem, algorithm, rounds=4, participation=Stratified(3))
    for seed in range(3):
        two = fit(shuffled(problem, seed), algorithm, rounds=4, participation=Stratified(3))
        assert torch.equal(flat(one.model), flat(two.model))
        assert torch.equal(one.losses, two.losses)


def test_another_seed_gives_another_result() -> None:
    problem = federation()
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    one, two = (flat(fit(problem, algorithm, rounds=2, seed=s).model) for s in (0, 1))
    assert not torch.equal(one, two)


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    problem = federation(
        model=nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    )
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = fit(problem, algorithm, rounds=2, participation=Fraction(0.5))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    two = fit(problem, algorithm, rounds=2, participation=Fraction(0.5))
    assert torch.equal(flat(one.model), flat(two.model))


def test_measuring_more_changes_nothing() -> None:
    """Evaluation, true gradients and callbacks look; they do not touch."""
    problem = federation(sizes=[5, 9, 12, 7])
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    plain = fit(problem, algorithm, rounds=4, evaluate="cohort", evaluate_every=3)
    watched = fit(
        problem,
        algorithm,
        rounds=4,
        evaluate="all",
        true_gradients_every=1,
        callbacks=[lambda report, snapshot: snapshot.model() and None],
    )
    assert torch.equal(flat(plain.model), flat(watched.model))


def test_the_users_model_is_never_modified() -> None:
    problem = federation()
    before = flat(problem.model).clone()
    grads = [p.grad for p in problem.model.parameters()]
    result = fit(problem, FSMGDA(local_steps=3, batch_size=4), rounds=2)
    assert torch.equal(before, flat(problem.model))
    assert [p.grad for p in problem.model.parameters()] == grads
    assert not torch.equal(before, flat(result.model))
    assert result.model is result.model
