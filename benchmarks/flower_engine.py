"""What Flower's messages cost beside the sequential engine: seconds to start and seconds a round.

Ten clients take three local steps on each of their objectives, and every engine gives the same model.
Run: python benchmarks/flower_engine.py [--ray] [--rounds 20]
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import nn

from fmol import FSMGDA, Client, Federation, Objective, fit
from fmol.engines import BUILT_IN
from fmol.flower import FlowerEngine

SIZES = {"10k × 2": (120, 2, 10), "1M × 8": (12_000, 8, 3)}
"""Parameters × objectives → width of the network, objectives, at most so many rounds of each."""
CLIENTS, SAMPLES, INPUTS = 10, 64, 64


def column_loss(column: int) -> Any:
    return lambda outputs, targets: (outputs[:, column] - targets[:, column]) ** 2


def make_federation(width: int, objectives: int) -> Federation:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, 20))
    names = [f"s{i}" for i in range(objectives)]
    x = torch.randn(CLIENTS, SAMPLES, INPUTS)
    y = torch.sin(x[..., :20])
    clients = [Client(f"c{i}", (x[i], y[i]), tuple(names)) for i in range(CLIENTS)]
    return Federation(model, [Objective(n, column_loss(i)) for i, n in enumerate(names)], clients)


def measure(federation: Federation, engine: Any, rounds: int) -> tuple[float, float, torch.Tensor]:
    """Seconds until the first round is done, the median seconds of each after it, and the model."""
    began, times = perf_counter(), []
    result = fit(
        federation,
        FSMGDA(local_steps=3, batch_size=16, local_lr=0.01, server_lr=0.01),
        rounds=rounds,
        device="cpu",
        engine=engine,
        evaluate="cohort",
        callbacks=[lambda report, snapshot: times.append(perf_counter())],
    )
    gaps = sorted(b - a for a, b in pairwise(times))
    x = nn.utils.parameters_to_vector(result.model.parameters()).detach()
    return times[0] - began, gaps[len(gaps) // 2], x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ray", action="store_true", help="also in Ray's processes")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines: dict[str, Any] = {
        "sequential": BUILT_IN["sequential"],
        "flower, thread": FlowerEngine,
        "flower, thread, half": partial(FlowerEngine, half=True),
    }
    if options.ray:
        engines["flower, ray"] = partial(FlowerEngine, backend="ray")
    print(f"{'parameters × objectives':24} {'engine':22} {'start s':>8} {'round s':>8}  same bits")
    for size, (width, objectives, most) in SIZES.items():
        federation = make_federation(width, objectives)
        reference: torch.Tensor | None = None
        for name, engine in engines.items():
            rounds = min(options.rounds, 2 * most)
            first, each, x = measure(federation, engine, rounds)
            reference = x if reference is None else reference
            same = torch.equal(x, reference)
            print(f"{size:24} {name:22} {max(0.0, first - each):8.2f} {each:8.4f}  {same}")


if __name__ == "__main__":
    main()
