"""A million clients, twenty of them a round: nobody exists until it takes part.

python examples/million_clients.py
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from fmol import FSMGDA, Client, Federation, LazyPopulation, Objective, fit
from fmol.participation import Number


@dataclass(frozen=True)
class Phones:
    """The ids, as a sequence that is never written out."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> str:
        return f"phone-{i:07d}"


def make(id: str) -> Client:
    """The phone with this id; here its data are drawn from its number."""
    generator = torch.Generator().manual_seed(int(id.removeprefix("phone-")))
    x = torch.randn(32, 4, generator=generator)
    y = torch.stack([x.sum(1), x[:, 0] - x[:, 1]], dim=1)
    y += 0.1 * torch.randn(32, 2, generator=generator)
    return Client(id, data=(x, y), objectives=("sum", "difference"))


def main() -> None:
    objectives = [
        Objective("sum", lambda out, y: (out[:, 0] - y[:, 0]) ** 2),
        Objective("difference", lambda out, y: (out[:, 1] - y[:, 1]) ** 2),
    ]
    algorithm = FSMGDA(local_steps=5, batch_size=8, local_lr=0.05, server_lr=0.05, normalize="loss")
    print(f"{'clients':>9}  {'CPU ms a round':>14}  final losses over the cohort")
    for count in (1_000, 1_000_000):
        torch.manual_seed(0)
        federation = Federation(nn.Linear(4, 2), objectives, LazyPopulation(Phones(count), make))
        started = time.process_time()
        result = fit(federation, algorithm, 20, participation=Number(20), evaluate="cohort")
        spent = 1000 * (time.process_time() - started) / len(result.reports)
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in result.final.losses.items())
        print(f"{count:9,}  {spent:14.1f}  {losses}")


if __name__ == "__main__":
    main()
