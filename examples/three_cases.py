"""The paper's three kinds of assignment of objectives to clients, on one regression problem.

python examples/three_cases.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fmol import FMGDA, Federation, Objective, fit, partition

NAMES = ("price", "demand", "delay")


def objective(name: str) -> Objective:
    column = NAMES.index(name)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, column] - targets[:, column]) ** 2

    return Objective(name, loss)


def problem(holdings: list[tuple[str, ...]], x: Tensor, y: Tensor) -> Federation:
    """The same model and data, dealt out to as many clients as there are `holdings`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, len(NAMES)))
    parts = partition.iid(len(x), clients=len(holdings))
    clients = partition.make_clients(x, y, parts, holdings)
    return Federation(model, [objective(name) for name in NAMES], clients)


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(600, 6, generator=generator)
    y = torch.tanh(x @ torch.randn(6, len(NAMES), generator=generator))
    cases = {
        "one objective each (A = I)": partition.one_each(NAMES, clients=3),
        "all objectives everywhere": partition.all_objectives(NAMES, clients=6),
        "each its own subset": partition.random_subsets(NAMES, clients=6, size=(1, 2), seed=2),
    }
    for title, holdings in cases.items():
        federation = problem(holdings, x, y)
        result = fit(federation, FMGDA(local_steps=5, local_lr=0.1, server_lr=0.2), rounds=60)
        print(title)
        for name, row, before, after, weight in zip(
            NAMES,
            federation.assignment().tolist(),
            result.losses[0],
            result.losses[-1],
            result.weights.mean(0),
            strict=True,
        ):
            print(f"  {name:8} A {row}  loss {before:.3f} → {after:.3f}  mean λ {weight:.2f}")


if __name__ == "__main__":
    main()
