"""Mistakes that public code for this algorithm makes without noticing, each caught here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, Client, Federation, Objective, fit, min_norm
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply
from support import data, federation, flat, squared_error


class Collect:
    """A fold that keeps every reply."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}

    def add(self, reply: Reply, ask: Ask) -> None:
        self.replies[reply.client] = reply

    def result(self) -> dict[str, Reply]:
        return self.replies


def deltas(
    problem: Federation, clients: list[str], slots: list[str], local: LocalConfig, round: int = 0
) -> dict[str, Reply]:
    x = flat(problem.model)
    asks = [
        Ask(
            client=client,
            round=round,
            x=x,
            lanes=tuple(Lane(name, {name: 1.0}) for name in slots),
            local=local,
        )
        for client in clients
    ]
    replies, _ = SequentialEngine(problem, seed=0).map(asks, Collect())
    assert isinstance(replies, dict)
    return replies


LOCAL = LocalConfig(lr=0.1, steps=4, batch_size=5)


def test_each_objective_has_a_trajectory_of_its_own() -> None:
    """The delta of an objective does not depend on which others the client holds."""
    problem = federation()
    alone = deltas(problem, ["c0"], ["b"], LOCAL)["c0"].deltas["b"]
    together = deltas(problem, ["c0"], ["a", "b", "c"], LOCAL)["c0"].deltas["b"]
    assert torch.equal(alone, together)


def test_the_delta_is_the_sum_of_all_gradients_not_the_last_one() -> None:
    problem = federation()
    x, (inputs, targets) = flat(problem.model), problem.population.get("c0").data
    delta = deltas(problem, ["c0"], ["a"], LocalConfig(lr=0.1, steps=3))["c0"].deltas["a"]
    import copy

    model = copy.deepcopy(problem.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        squared_error(0)(model(inputs), targets).mean().backward()
        optimizer.step()
    torch.testing.assert_close(delta, (x - flat(model)) / 0.1, rtol=1e-9, atol=1e-12)


def test_a_client_does_not_inherit_the_model_of_the_one_before() -> None:
    problem = federation()
    first = deltas(problem, ["c1"], ["a", "b", "c"], LOCAL)["c1"]
    after = deltas(problem, ["c0", "c1"], ["a", "b", "c"], LOCAL)["c1"]
    for name in "abc":
        assert torch.equal(first.deltas[name], after.deltas[name])


def test_held_out_metrics_come_from_held_out_data() -> None:
    """A metric that gives the targets away: training targets are 1, held-out ones 2, the client's 3."""
    x = torch.ones(6, 5, dtype=torch.float64)
    problem = federation()
    seen = Objective("a", squared_error(0), metrics={"target": lambda out, y: y[:, 0]})
    client = Client("c", data=(x, x[:, :3]), objectives=("a",), held_out=(x, 3 * x[:, :3]))
    central = Federation(problem.model, [seen], [client], held_out=(x, 2 * x[:, :3]))
    result = fit(central, FMGDA(local_steps=1), rounds=1)
    assert result.final.held_out["a"]["target"] == 2
    assert result.reports[0].held_out["a"]["target"] == 2
    assert result.reports[0].clients[0].held_out["target"] == 3
    local_only = fit(Federation(problem.model, [seen], [client]), FMGDA(local_steps=1), rounds=1)
    assert local_only.final.held_out["a"]["target"] == 3


def test_every_round_shuffles_differently() -> None:
    problem = federation()
    rounds = [deltas(problem, ["c0"], ["a"], LOCAL, round=t)["c0"].deltas["a"] for t in range(3)]
    assert not torch.equal(rounds[0], rounds[1])
    assert not torch.equal(rounds[1], rounds[2])


def test_clients_shuffle_differently_from_one_another() -> None:
    same = data(12)
    problem = federation()
    twins = Federation(
        problem.model,
        problem.objectives,
        [Client(f"c{i}", data=same, objectives=("a", "b", "c")) for i in range(2)],
    )
    replies = deltas(twins, ["c0", "c1"], ["a"], LOCAL)
    assert not torch.equal(replies["c0"].deltas["a"], replies["c1"].deltas["a"])


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_client_with_fewer_samples_than_a_batch_uses_what_it_has(samples: int) -> None:
    problem = federation(sizes=[samples, 12, 12, 12])
    result = fit(problem, FSMGDA(local_steps=5, batch_size=8), rounds=2)
    record = next(r for r in result.reports[0].clients if r.client == "c0")
    assert record.samples == samples
    assert record.delta_norm > 0


def test_weights_are_never_silently_uniform() -> None:
    with pytest.raises(ValueError, match="finite"):
        min_norm(torch.full((3, 3), float("nan"), dtype=torch.float64))
    rows = torch.tensor([[1.0, 0.0], [1.0, 1e-7], [5.0, 3.0]], dtype=torch.float64)
    weights = min_norm(rows @ rows.T).weights
    assert float((weights - 1 / 3).abs().max()) > 0.3


def test_the_mean_is_over_the_holders_and_not_over_all_clients() -> None:
    """Objective a is held by one of four: its update is that client's, not a quarter of it."""
    problem = federation([("a",), ("b",), ("b",), ("b", "c")])
    own = deltas(problem, ["c0"], ["a"], LocalConfig(lr=0.1, steps=2))["c0"].deltas["a"]
    result = fit(problem, FMGDA(local_steps=2, local_lr=0.1), rounds=1)
    assert result.reports[0].delta_norms["a"] == pytest.approx(float(own.norm()), rel=1e-12)


def test_unequal_clients_contribute_their_exact_local_means() -> None:
    """With a full batch every client's own mean counts alike, however many samples it has."""
    problem = federation([("a",)] * 3, names=("a",), sizes=[1, 5, 30])
    result = fit(problem, FMGDA(local_steps=1, server_lr=1.0), rounds=1)
    gradients = []
    for client_id in problem.population.ids():
        inputs, targets = problem.population.get(client_id).data
        loss: Tensor = squared_error(0)(problem.model(inputs), targets).mean()
        grads = torch.autograd.grad(loss, list(problem.model.parameters()))
        gradients.append(torch.cat([g.reshape(-1) for g in grads]))
    expected = flat(problem.model) - torch.stack(gradients).mean(0)
    torch.testing.assert_close(flat(result.model), expected, rtol=1e-12, atol=1e-14)
