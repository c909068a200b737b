"""Small problems and an independent reference, shared by the tests."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmol import Client, Federation, Objective


def squared_error(column: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Per-sample loss of one output column: smooth, and zero can be reached."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs[:, column] - targets[:, column]) ** 2

    return loss


def masked_error(column: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The same where NaN targets mean that there is no label."""

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        valid = ~targets[:, column].isnan()
        error = outputs[:, column] - targets[:, column].nan_to_num()
        return 0.5 * error**2, valid

    return loss


class Net(nn.Module):
    """A smooth trunk and one head per objective; no ReLU, so that rounding stays rounding."""

    def __init__(self, features: int = 5, width: int = 6, heads: int = 3, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.trunk = nn.Linear(features, width)
            self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(heads))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return torch.cat([head(hidden) for head in self.heads], dim=1)


def data(n: int, features: int = 5, outputs: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs `[n, features]` and targets `[n, outputs]`, float64."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, features, generator=generator, dtype=torch.float64)
    mixing = torch.randn(features, outputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs @ mixing) + 0.1 * noise


def federation(
    holdings: Sequence[Sequence[str]] = (("a", "b", "c"),) * 4,
    *,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] = ("a", "b", "c"),
    model: nn.Module | None = None,
    targets: Mapping[str, float] | None = None,
    held_out: Any = None,
    seed: int = 0,
) -> Federation:
    """A float64 federation on `Net`; client `i` holds `holdings[i]` and has `sizes[i]` samples."""
    sizes = sizes or [12] * len(holdings)
    clients = [
        Client(
            f"c{i}", data=data(n, outputs=len(names), seed=100 * seed + i), objectives=tuple(held)
        )
        for i, (held, n) in enumerate(zip(holdings, sizes, strict=True))
    ]
    objectives = [
        Objective(name, squared_error(s), target=(targets or {}).get(name))
        for s, name in enumerate(names)
    ]
    net = model if model is not None else Net(heads=len(names)).double()
    return Federation(model=net, objectives=objectives, clients=clients, held_out=held_out)


def flat(model: nn.Module) -> Tensor:
    """All trainable parameters of a module as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float((a - b).norm() / b.norm())


def brute_force_min_norm(vectors: Tensor) -> Tensor:
    """λ of the shortest vector in the hull of the rows, by trying every support: slow and sure."""
    gram = (vectors.double() @ vectors.double().T).numpy()
    size = len(gram)
    best, best_norm = np.zeros(size), np.inf
    for count in range(1, size + 1):
        for support in itertools.combinations(range(size), count):
            part = gram[np.ix_(support, support)]
            border = np.ones((count + 1, count + 1))
            border[:count, :count], border[count, count] = part, 0.0
            rhs = np.zeros(count + 1)
            rhs[count] = 1.0
            solution = np.linalg.lstsq(border, rhs, rcond=None)[0][:count]
            if (solution < -1e-12).any() or abs(solution.sum() - 1) > 1e-9:
                continue
            norm = float(solution @ part @ solution)
            if norm < best_norm - 1e-15:
                best, best_norm = np.zeros(size), norm
                best[list(support)] = solution
    return torch.from_numpy(best)


def reference_fmgda(
    problem: Federation,
    rounds: int,
    *,
    local_steps: int,
    local_lr: float,
    server_lr: float,
    accumulate: str = "sum",
    weighting: str = "uniform",
    batches: Callable[[int, str, int, int], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 as one would write it by hand: deep copies, SGD objects, brute-force QP.

    Returns `x_T` and the weights `[rounds, S]`. `batches(round, client, step, n)` gives the indices
    of a batch; left out, all data are used.
    """
    model = copy.deepcopy(problem.model)
    names = problem.names
    loss_of = {o.name: o.loss for o in problem.objectives}
    all_weights = []
    for t in range(rounds):
        per_objective: dict[str, list[tuple[float, list[Tensor]]]] = {name: [] for name in names}
        for client_id in problem.population.ids():
            client = problem.population.get(client_id)
            inputs, targets = client.data
            for name in client.objectives:
                local = copy.deepcopy(model)
                optimizer = torch.optim.SGD(local.parameters(), lr=local_lr)
                total = [torch.zeros_like(p) for p in local.parameters()]
                for k in range(local_steps):
                    rows = torch.arange(len(inputs))
                    if batches is not None:
                        rows = batches(t, client_id, k, len(inputs))
                    optimizer.zero_grad()
                    values = loss_of[name](local(inputs[rows]), targets[rows])
                    assert isinstance(values, Tensor)
                    values.mean().backward()
                    for gathered, p in zip(total, local.parameters(), strict=True):
                        if p.grad is not None:
                            gathered += p.grad
                    optimizer.step()
                if accumulate == "mean":
                    total = [g / local_steps for g in total]
                weight = float(len(inputs)) if weighting == "samples" else 1.0
                per_objective[name].append((weight, total))
        rows_flat = []
        for name in names:
            share = sum(w for w, _ in per_objective[name])
            mean = sum(
                w / share * torch.cat([g.reshape(-1) for g in gathered])
                for w, gathered in per_objective[name]
            )
            assert isinstance(mean, Tensor)
            rows_flat.append(mean)
        deltas = torch.stack(rows_flat)
        weights = brute_force_min_norm(deltas)
        all_weights.append(weights)
        step = server_lr * (weights @ deltas)
        with torch.no_grad():
            offset = 0
            for p in model.parameters():
                p.sub_(step[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
    return flat(model), torch.stack(all_weights)
