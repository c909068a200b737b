"""Problems whose Pareto set is known in closed form: FMGDA ends on it, in the paper's three cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fmol import FMGDA, FSMGDA, MGD, Client, Federation, Objective, fit

CENTRES = torch.tensor([[0.0, 0.0, 1.0], [4.0, 0.0, 1.0], [0.0, 3.0, 1.0]], dtype=torch.float64)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([5.0, 5.0, -4.0], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.expand(len(inputs), -1)


def bowl(s: int) -> Objective:
    """f_s(x) = ½‖x − c_s‖², with each client's own centres in the targets."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets[:, s]).square().sum(1)

    return Objective("abc"[s], loss)


def problem(holdings: list[tuple[str, ...]], noise: float = 0.0) -> Federation:
    """Targets `[n, S, 3]`; each client's mean is exactly the centre, its samples scatter around it."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for i, held in enumerate(holdings):
        scatter = noise * torch.randn(16, 3, 3, generator=generator, dtype=torch.float64)
        targets = CENTRES + scatter - scatter.mean(0)
        inputs = torch.zeros(16, 1, dtype=torch.float64)
        clients.append(Client(f"c{i}", (inputs, targets), held))
    return Federation(Point(), [bowl(s) for s in range(3)], clients)


def distance_to_triangle(x: Tensor) -> float:
    """How far `x` is from the convex hull of the centres, the Pareto set of these bowls."""
    from support import brute_force_min_norm

    weights = brute_force_min_norm(CENTRES - x)
    return float((weights @ (CENTRES - x)).norm())


CASES: dict[str, list[tuple[str, ...]]] = {
    "one objective each": [("a",), ("b",), ("c",)],
    "all objectives": [("a", "b", "c")] * 3,
    "own subsets": [("a", "b"), ("c",), ("b", "c"), ("a",)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "algorithm",
    [
        FMGDA(local_steps=1, server_lr=0.5),
        FMGDA(local_steps=5, local_lr=0.01, server_lr=0.1),
        FSMGDA(local_steps=5, batch_size=16, local_lr=0.01, server_lr=0.1),
    ],
    ids=["one step", "five steps", "full minibatch"],
)
def test_fmgda_ends_on_the_pareto_set(case: str, algorithm: FSMGDA) -> None:
    result = fit(problem(CASES[case]), algorithm, rounds=80)
    x = dict(result.model.named_parameters())["x"].detach()
    assert distance_to_triangle(x) < 1e-4
    assert (
        result.reports[-1].direction_norm_squared < 1e-6 * result.reports[0].direction_norm_squared
    )
    assert bool((result.losses[-1] <= result.losses[0]).all())


@pytest.mark.parametrize("case", CASES)
def test_every_objective_falls_in_every_round_of_mgd(case: str) -> None:
    """Common descent: with exact gradients and a small step no objective ever rises."""
    result = fit(problem(CASES[case]), MGD(0.2), rounds=40)
    falls = result.losses[:-1] - result.losses[1:]
    assert float(falls.min()) > -1e-12
    for report in result.reports[:10]:
        assert report.gap < 1e-9
        assert report.min_cosine > 0


def test_with_noise_fsmgda_comes_near_the_pareto_set_and_nearer_with_larger_batches() -> None:
    noisy = problem(CASES["all objectives"], noise=2.0)
    distances = []
    for batch in (1, 8, 16):
        algorithm = FSMGDA(local_steps=2, batch_size=batch, local_lr=0.05, server_lr=0.1)
        ends = []
        for seed in range(3):
            result = fit(noisy, algorithm, rounds=60, seed=seed)
            ends.append(distance_to_triangle(dict(result.model.named_parameters())["x"].detach()))
        distances.append(sum(ends) / 3)
    assert distances[2] < 1e-4
    assert distances[2] < distances[1] < 1.0
    assert distances[1] < distances[0]


def test_linear_rate_for_strongly_convex_objectives() -> None:
    """Table 1: FMGDA is linear here; ‖d‖² falls by a constant factor per round (1 − η)²."""
    result = fit(
        problem(CASES["one objective each"]), FMGDA(local_steps=1, server_lr=0.2), rounds=30
    )
    squares = torch.tensor([r.direction_norm_squared for r in result.reports], dtype=torch.float64)
    ratios = squares[1:] / squares[:-1]
    assert float(ratios.max()) < 0.9
    torch.testing.assert_close(
        ratios[5:20], torch.full((15,), 0.64, dtype=torch.float64), rtol=0.05, atol=0
    )
