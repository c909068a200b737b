"""The server's steps and drift correction, where they must equal something simpler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import FMGDA, FSMGDA, MGD, Client, FedAvg, Federation, Objective, Result, fit
from fmol.algorithms import Adam, Momentum, Plain
from fmol.rounds import Algorithm
from support import federation, flat, relative

STEPS: dict[str, Any] = {"local_steps": 3, "batch_size": 4}
PROBLEM = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])


def run(algorithm: Algorithm, problem: Federation = PROBLEM, rounds: int = 6) -> Result:
    return fit(problem, algorithm, rounds=rounds, seed=3, device="cpu")


def alike(problem: Federation) -> Federation:
    """The same problem with the first client's data at every client."""
    clients = [problem.client(id) for id in problem.population.ids()]
    same = [replace(client, data=clients[0].data) for client in clients]
    return Federation(problem.model, problem.objectives, same)


@pytest.mark.parametrize("kind", [FSMGDA, FedAvg])
def test_momentum_of_zero_is_the_plain_step(kind: Any) -> None:
    plain = run(kind(**STEPS, server_step=Plain()))
    assert torch.equal(flat(run(kind(**STEPS, server_step=Momentum(0.0))).model), flat(plain.model))
    assert torch.equal(flat(run(kind(**STEPS)).model), flat(plain.model))


def test_with_one_objective_momentum_is_the_same_before_and_after_the_rule() -> None:
    one = federation([("a",), ("a",)], names=("a",))
    after = run(FSMGDA(**STEPS, server_step=Momentum(0.7)), one)
    before = run(FSMGDA(**STEPS, objective_momentum=0.7), one)
    assert relative(flat(before.model), flat(after.model)) < 1e-12


@pytest.mark.parametrize("step", [Momentum(0.6), Adam(tau=0.1)], ids=str)
def test_a_step_on_top_of_mgd_is_torchs_own_optimiser(step: Any) -> None:
    """SGD with momentum; and Adam, whose start torch corrects and FedOpt does not."""
    problem = federation([("a",)], names=("a",))
    ours = run(MGD(0.05, server_step=step), problem)
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    m, v = torch.zeros_like(x), torch.full_like(x, 0.1**2)
    plain = run(MGD(0.0), problem, rounds=1)
    assert torch.equal(flat(plain.model), x)
    for _ in range(6):
        x.requires_grad_()
        named = problem.layout.split(x)
        inputs, targets = problem.client("c0").data
        outputs = torch.func.functional_call(problem.model, named, (inputs,))
        (g,) = torch.autograd.grad((0.5 * (outputs[:, 0] - targets[:, 0]) ** 2).mean(), x)
        x = x.detach()
        if isinstance(step, Momentum):
            m = 0.6 * m + g
            x = x - 0.05 * m
        else:
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            x = x - 0.05 * m / (v.sqrt() + 0.1)
    assert relative(flat(ours.model), x) < 1e-12


@pytest.mark.parametrize("by", ["objective", "unit"])
@pytest.mark.parametrize("kind", [FMGDA, FedAvg])
def test_where_clients_are_alike_there_is_nothing_to_extrapolate_or_correct(
    kind: Any, by: Any
) -> None:
    problem = alike(federation([("a", "b", "c")] * 4))
    options: dict[str, Any] = {"local_steps": 4}
    if kind is FedAvg:
        options["batch_size"] = None
    plain = run(kind(**options), problem)
    stretched = run(kind(**options, extrapolate=True, extrapolate_by=by), problem)
    corrected = run(kind(**options, drift_correction="scaffold"), problem)
    assert torch.equal(flat(stretched.model), flat(plain.model))
    assert set(stretched.reports[-1].extrapolation.values()) == {1.0}
    assert relative(flat(corrected.model), flat(plain.model)) < 1e-12


@pytest.mark.parametrize("accumulate", ["sum", "mean"])
def test_one_client_has_nothing_to_correct(accumulate: Any) -> None:
    problem = federation([("a", "b", "c")])
    options: dict[str, Any] = {**STEPS, "accumulate": accumulate}
    plain = run(FSMGDA(**options), problem)
    corrected = run(FSMGDA(**options, drift_correction="scaffold"), problem)
    assert relative(flat(corrected.model), flat(plain.model)) < 1e-12


def test_one_local_step_is_the_same_with_and_without_correction() -> None:
    """Corrections sum to zero over all clients, and one step is over before they bend it."""
    plain = run(FMGDA(local_steps=1))
    corrected = run(FMGDA(local_steps=1, drift_correction="scaffold"))
    assert relative(flat(corrected.model), flat(plain.model)) < 1e-12


@pytest.mark.parametrize("kind", [FSMGDA, FedAvg])
def test_scaffold_is_its_authors_pseudo_code_written_by_hand(kind: Any) -> None:
    """Option II with one objective: `c_i⁺ = c_i − c + (x − y)/(Kη)`, and `c` follows the mean."""
    problem = federation([("a",)] * 3, names=("a",), sizes=[6, 9, 12])
    lr, steps = 0.1, 4
    options: dict[str, Any] = {"local_steps": steps, "local_lr": lr, "batch_size": None}
    ours = run(kind(**options, server_lr=lr, drift_correction="scaffold"), problem)
    x = problem.layout.flatten(dict(problem.model.named_parameters()))
    c, own = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(3)]
    for _ in range(6):
        moves, changes = [], []
        for i in range(3):
            inputs, targets = problem.client(f"c{i}").data
            y = x.clone()
            for _ in range(steps):
                at = y.clone().requires_grad_()
                outputs = torch.func.functional_call(
                    problem.model, problem.layout.split(at), (inputs,)
                )
                loss = (0.5 * (outputs[:, 0] - targets[:, 0]) ** 2).mean()
                (g,) = torch.autograd.grad(loss, at)
                y = y - lr * (g - own[i] + c)
            new = own[i] - c + (x - y) / (steps * lr)
            moves.append(y - x)
            changes.append(new - own[i])
            own[i] = new
        x = x + torch.stack(moves).mean(0)
        c = c + torch.stack(changes).mean(0)
    assert relative(flat(ours.model), x) < 1e-12
    assert relative(ours.state.memory["controls"][0], c) < 1e-12


class Shift(nn.Module):
    """`x` `[2]` itself, for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((2,), 2.0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.expand(len(inputs), -1)


def bowls(curvatures: list[list[float]], centres: list[list[float]]) -> Federation:
    """Clients whose bowls `½ Σ_j h_j (x_j − c_j)²` differ in curvature and centre."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (0.5 * targets[:, :2] * (outputs - targets[:, 2:]) ** 2).sum(1)

    clients = [
        Client(
            f"c{i}", (torch.zeros(3, 1).double(), torch.tensor([[*h, *c]] * 3).double()), ("bowl",)
        )
        for i, (h, c) in enumerate(zip(curvatures, centres, strict=True))
    ]
    return Federation(Shift(), [Objective("bowl", loss)], clients)


@pytest.mark.parametrize("kind", [FMGDA, FedAvg])
@pytest.mark.parametrize("accumulate", ["sum", "mean"])
def test_scaffold_ends_where_the_mean_is_smallest_and_the_plain_step_does_not(
    kind: Any, accumulate: Any
) -> None:
    curvatures, centres = (
        [[1.0, 0.2], [0.1, 2.0], [0.5, 0.5]],
        [[1.0, -1.0], [-2.0, 0.5], [0.0, 3.0]],
    )
    problem = bowls(curvatures, centres)
    h, c = torch.tensor(curvatures).double(), torch.tensor(centres).double()
    best = (h * c).sum(0) / h.sum(0)
    options: dict[str, Any] = {
        "local_steps": 10,
        "local_lr": 0.3,
        "server_lr": 0.2 if accumulate == "sum" else 1.0,
        "accumulate": accumulate,
    }
    if kind is FedAvg:
        options["batch_size"] = None
    plain = run(kind(**options), problem, rounds=400)
    corrected = run(kind(**options, drift_correction="scaffold"), problem, rounds=400)
    assert float((flat(corrected.model) - best).norm()) < 1e-8
    assert float((flat(plain.model) - best).norm()) > 0.1


def test_what_is_sent_has_the_mean_of_bare_gradients_where_everyone_takes_part() -> None:
    """Σ_i (c_s − c_{s,i}) = 0: the rule sees what it would see without the correction, from the
    corrected trajectories."""
    result = run(FSMGDA(**STEPS, drift_correction="scaffold"))
    held = {
        slot: [s[f"control.{slot}"] for s in result.client_state.values() if f"control.{slot}" in s]
        for slot in PROBLEM.names
    }
    for row, slot in enumerate(PROBLEM.names):
        mean = torch.stack(held[slot]).mean(0)
        assert relative(result.state.memory["controls"][row], mean) < 1e-12
