"""What rounding the products of local steps does to a run: the same training in fp32, TF32 and bf16.

    python benchmarks/precision.py [--device cuda] [--rounds 200] [--seeds 3] [--out results.json]

LeNet on pairs of handwritten digits (data that come with scikit-learn), left digits' labels in shards.
Shown are the losses and the held-out accuracy at the end, and how far the model ends from that of
fp32, beside how far two seeds of fp32 are apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch
from torch import Tensor

from fmol import FSMGDA, fit
from fmol.engines import VectorizedEngine
from fmol.precision import Precision
from fmol.problems.multidigits import MultiDigits


def train(seed: int, precision: Precision, rounds: int, device: str) -> dict[str, Any]:
    federation = MultiDigits(seed=seed, model="lenet", partition="left-shards").build()
    algorithm = FSMGDA(local_steps=20, batch_size=32, local_lr=0.1, server_lr=0.1)
    engine = partial(VectorizedEngine, precision=precision, compile="never")
    started = perf_counter()
    result = fit(federation, algorithm, rounds=rounds, seed=seed, engine=engine, device=device)
    seconds = perf_counter() - started
    last = result.reports[-1]
    accuracy = [row["accuracy"] for row in last.held_out.values()]
    return {
        "losses": dict(last.losses),
        "accuracy": statistics.mean(accuracy),
        "seconds": seconds,
        "x": torch.cat([p.detach().cpu().reshape(-1) for p in result.model.parameters()]),
    }


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = {
        p: [train(seed, p, options.rounds, options.device) for seed in range(options.seeds)]
        for p in get_args(Precision)
        if options.device == "cuda" or p != "tf32"
    }
    names = list(runs["fp32"][0]["losses"])
    print(
        f"{'':6}"
        + "".join(f"{n + ' loss':>16}" for n in names)
        + f"{'accuracy':>12}{'x apart':>12}"
    )
    written = {}
    for p, each in runs.items():
        losses = {n: statistics.mean(run["losses"][n] for run in each) for n in names}
        accuracy = statistics.mean(run["accuracy"] for run in each)
        away = statistics.mean(
            apart(run["x"], exact["x"]) for run, exact in zip(each, runs["fp32"], strict=True)
        )
        cells = "".join(f"{losses[n]:16.5f}" for n in names)
        print(f"{p:6}{cells}{accuracy:12.4f}{away:12.2e}")
        written[p] = {"losses": losses, "accuracy": accuracy, "apart": away}
    if options.seeds > 1:
        between = apart(runs["fp32"][0]["x"], runs["fp32"][1]["x"])
        print(f"two seeds of fp32 are {between:.2e} apart")
        written["seeds_apart"] = between
    if options.out:
        options.out.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
