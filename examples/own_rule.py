"""A rule and a participation of one's own: plain objects, passed in.

python examples/own_rule.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fmol import FSMGDA, Federation, Objective, fit, partition


@dataclass(frozen=True)
class WorstFirst:
    """Weights that grow with the loss: λ = softmax(losses / temperature)."""

    temperature: float = 0.2
    needs_losses = True  # So that `context.losses` is there.

    def __call__(self, gramian: Tensor, context) -> Tensor:
        return torch.softmax(context.losses / self.temperature, dim=0)


@dataclass(frozen=True)
class Shifts:
    """Clients take turns: in each round every third one is on."""

    shifts: int = 3

    def cohort(self, population, objectives, round, seed) -> tuple[str, ...]:
        ids = population.ids()
        return tuple(ids[i] for i in range(round % self.shifts, len(ids), self.shifts))


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 6)
    y = torch.sin(x @ torch.randn(6, 2)) * torch.tensor([1.0, 3.0])  # The second one is harder.
    names = ("small", "large")
    parts = partition.iid(len(x), clients=9)
    clients = partition.make_clients(x, y, parts, partition.all_objectives(names, clients=9))
    objectives = [
        Objective("small", lambda out, y: (out[:, 0] - y[:, 0]) ** 2),
        Objective("large", lambda out, y: (out[:, 1] - y[:, 1]) ** 2),
    ]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    federation = Federation(model, objectives, clients)
    for title, options in {"min-norm": {}, "worst first": {"rule": WorstFirst()}}.items():
        algorithm = FSMGDA(local_steps=5, batch_size=32, **options)
        result = fit(federation, algorithm, rounds=60, participation=Shifts())
        hurt = sum(report.gap >= 1 for report in result.reports)
        losses = "  ".join(f"{name} {loss:.3f}" for name, loss in result.final.losses.items())
        print(f"{title:12} losses {losses}  rounds without common descent: {hurt} of 60")


if __name__ == "__main__":
    main()
