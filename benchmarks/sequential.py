"""The sequential engine against a plain PyTorch loop on the same work, side by side in one run.

    python benchmarks/sequential.py [--repeats 12] [--out results.json]

Both compute whole rounds of FSMGDA from the same `x` with batches of the same sizes: local steps,
means per objective, min-norm step. The plain loop is what one writes by hand: a deep copy and an
SGD object per trajectory, gradients added up, vectors flattened at the end. Rounds of the two are
timed alternately, and the ratio is that of the medians. The allocator is told to keep freed memory:
otherwise page faults after heap trimming, a matter of luck, are larger than what is measured.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol import FSMGDA, Client, Federation, Objective, min_norm
from fmol.engines import SequentialEngine
from fmol.problems.digits import LeNet
from fmol.rounds import Plan


def digits(clients: int, samples: int) -> Federation:
    def loss(task: int) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
        return lambda out, y: functional.cross_entropy(out[task], y[:, task], reduction="none")

    return Federation(
        model=LeNet(side=36),
        objectives=[Objective("left", loss(0)), Objective("right", loss(1))],
        clients=[
            Client(
                f"c{i:02d}",
                data=(torch.randn(samples, 1, 36, 36), torch.randint(10, (samples, 2))),
                objectives=("left", "right"),
            )
            for i in range(clients)
        ],
    )


def rivers(clients: int, samples: int, tasks: int = 8) -> Federation:
    def loss(task: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda out, y: (out[:, task] - y[:, task]) ** 2

    net = nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, tasks)
    )
    return Federation(
        model=net,
        objectives=[Objective(f"site{s}", loss(s)) for s in range(tasks)],
        clients=[
            Client(
                f"c{i:02d}",
                data=(torch.randn(samples, 64), torch.randn(samples, tasks)),
                objectives=tuple(f"site{s}" for s in range(tasks)),
            )
            for i in range(clients)
        ],
    )


def plain_round(federation: Federation, model: nn.Module, algorithm: FSMGDA) -> nn.Module:
    """One round as written by hand, on the same federation and with the same options."""
    sums: dict[str, list[Tensor]] = {}
    holders: dict[str, int] = {}
    for client_id in federation.population.ids():
        client = federation.population.get(client_id)
        inputs, targets = client.data
        order = torch.randperm(len(inputs))
        for objective in federation.objectives:
            if objective.name not in client.objectives:
                continue
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=algorithm.local_lr)
            total = [torch.zeros_like(p) for p in local.parameters()]
            used = 0
            for _ in range(algorithm.local_steps):
                if used >= len(order):
                    order, used = torch.randperm(len(inputs)), 0
                rows = order[used : used + algorithm.batch_size]
                used += algorithm.batch_size
                optimizer.zero_grad()
                objective.loss(local(inputs[rows]), targets[rows]).mean().backward()
                for g, p in zip(total, local.parameters(), strict=True):
                    if p.grad is not None:
                        g += p.grad
                optimizer.step()
            if objective.name in sums:
                sums[objective.name] = [
                    a + b for a, b in zip(sums[objective.name], total, strict=True)
                ]
            else:
                sums[objective.name] = total
            holders[objective.name] = holders.get(objective.name, 0) + 1
    deltas = torch.stack(
        [torch.cat([g.reshape(-1) for g in sums[name]]) / holders[name] for name in sums]
    )
    weights = min_norm((deltas @ deltas.T).double()).weights
    direction = weights.to(deltas) @ deltas
    moved = copy.deepcopy(model)
    with torch.no_grad():
        offset = 0
        for p in moved.parameters():
            p -= algorithm.server_lr * direction[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
    return moved


def keep_freed_memory() -> None:
    """Tells glibc's allocator not to hand memory back between steps; elsewhere does nothing."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)


def compare(federation: Federation, algorithm: FSMGDA, repeats: int) -> dict[str, float]:
    engine = SequentialEngine(federation, seed=0)
    x = federation.layout.flatten(dict(federation.model.named_parameters()))
    state = algorithm.init(federation, x)
    cohort = tuple(federation.population.ids())
    times: dict[str, list[float]] = {"plain": [], "fmol": []}
    work: dict[str, Callable[[int], object]] = {
        "plain": lambda t: plain_round(federation, federation.model, algorithm),
        "fmol": lambda t: algorithm.round(state, Plan(t, cohort, evaluate=False), engine),
    }
    for t in range(repeats + 2):
        # Each goes first in every other round: what runs second finds a warmer cache.
        for name in sorted(work, reverse=bool(t % 2)):
            started = time.perf_counter()
            work[name](t)
            if t >= 2:  # The first two warm up.
                times[name].append(time.perf_counter() - started)
    plain, ours = (statistics.median(times[name]) for name in ("plain", "fmol"))
    return {"plain_seconds": plain, "fmol_seconds": ours, "ratio": plain / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=12, help="timed rounds of each (12)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this file")
    options = parser.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    rows = {}
    print(f"{'work':42} {'plain loop':>12} {'fmol':>12} {'plain/fmol':>11}")
    for name, federation, batch in [
        ("LeNet 36×36, M=10, S=2, K=5, batch 16", digits(10, 256), 16),
        ("LeNet 36×36, M=10, S=2, K=5, batch 64", digits(10, 256), 64),
        ("MLP 64-64-64-8, M=10, S=8, K=5, batch 16", rivers(10, 256), 16),
        ("MLP 64-64-64-8, M=10, S=8, K=5, batch 256", rivers(10, 512), 256),
    ]:
        algorithm = FSMGDA(local_steps=5, batch_size=batch, local_lr=0.1, server_lr=0.1)
        row = compare(federation, algorithm, options.repeats)
        rows[name] = row
        print(
            f"{name:42} {row['plain_seconds']:10.3f} s {row['fmol_seconds']:10.3f} s "
            f"{row['ratio']:10.2f}×"
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
