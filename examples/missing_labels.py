"""Missing labels, a stall, the alarm that names it, and a target that ends it.

python examples/missing_labels.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fmol import FSMGDA, Federation, Objective, fit, partition

NAMES = ("weight", "height", "age")


def masked_error(column: int):
    """Squared error where NaN means "not measured": values, and which of them count."""

    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        known = ~targets[:, column].isnan()
        # The NaN must not enter the computation: even multiplied by 0 its gradient is NaN.
        error = outputs[:, column] - targets[:, column].nan_to_num()
        return error**2, known

    return loss


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets of which 30 % are missing. "weight" is linear, so it is soon solved."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 6, generator=generator)
    y = torch.sin(2 * x @ torch.randn(6, 3, generator=generator)) + 2 * x[:, :3]
    y[:, 0] = x[:, 0]
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < 0.3, torch.nan)


def main() -> None:
    x, y = data()
    clients = partition.make_clients(
        x, y, partition.iid(len(x), 6), partition.random_subsets(NAMES, 6, size=2)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    for title, target in {"the paper's step": None, "with a target of 0.01": 0.01}.items():
        objectives = [
            Objective(name, masked_error(column), target=target if name == "weight" else None)
            for column, name in enumerate(NAMES)
        ]
        federation = Federation(model, objectives, clients)
        result = fit(federation, FSMGDA(local_steps=5, batch_size=32), rounds=60)
        print(f"{title}: {result}")
        for alarm in result.reports[-1].alarms:
            print(f"  alarm, {alarm.kind}: {alarm.message}")
        rows = result.to_pandas().query("round == 0 and name == 'samples'")
        print(f"  labels: {rows.groupby('objective').value.sum().astype(int).to_dict()}")


if __name__ == "__main__":
    main()
