"""Two digits in one image, ten clients, two objectives: FSMGDA beside FedAvg.

    python examples/demo.py [--rounds 40]

Each image shows two of scikit-learn's bundled 8×8 digits, one up left and one down right, with a
corner of overlap. "left" and "right" are the two objectives; one small network with two heads learns
both. Every client sees at most two left labels (all right ones), so on "left" the clients disagree.
All numbers are measured in this run: losses on the clients' data, accuracies on pairs made of digit
images that no client has.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

from fmol import FSMGDA, FedAvg, Federation, Result, RoundReport, fit
from fmol.problems.multidigits import MultiDigits

NAMES = ("left", "right")
TARGET = 0.5
COLUMNS = f"{'loss left':>11} {'right':>7} {'accuracy left':>14} {'right':>7}"
WHY = """
Why: clients with other left labels pull "left" other ways, and their updates partly cancel
(mean ‖Δ_i‖² / ‖mean Δ_i‖²: left {left:.1f}, right {right:.1f}). So the mean update of left is short,
and the shortest vector of the hull lies close to it: mean λ of left {weight:.2f}; right is slow.
normalize="loss" weighs each update against its loss and keeps the step as long as the mean
update (median factor {scale:.1f}). FedAvg follows the longer updates: right first, left later.
FSMGDA descends and sends each objective by itself: twice the work and the upload of FedAvg.
"""


def numbers(losses, held_out) -> str:
    left, right = (held_out[name]["accuracy"] for name in NAMES)
    return f"{losses['left']:11.3f} {losses['right']:7.3f} {left:14.1%} {right:7.1%}"


def run(title: str, federation: Federation, algorithm, rounds: int, every: int) -> Result:
    """Trains; prints a line every few rounds while it does, and each alarm when it begins."""
    print(f"\n{title}\nround{COLUMNS}")
    rung = set()

    def listen(report: RoundReport, _: object) -> None:
        if report.round % every == 0:
            print(f"{report.round:5d}{numbers(report.losses, report.held_out)}", flush=True)
        for alarm in report.alarms:
            if (alarm.kind, alarm.objective) not in rung:
                print(f"alarm, {alarm.kind}: {alarm.message}")
                rung.add((alarm.kind, alarm.objective))

    result = fit(federation, algorithm, rounds, seed=0, device="cpu", callbacks=[listen])
    print(f"{rounds:5d}{numbers(result.final.losses, result.final.held_out)}")
    print(f"alarms: {len(rung) or 'none'}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run (40)")
    rounds = parser.parse_args().rounds
    started = time.perf_counter()
    torch.set_num_threads(1)  # The products are tiny: more threads would only slow them down.
    federation = MultiDigits(partition="left-shards").build()
    print(federation)

    budget = {"local_steps": 20, "batch_size": 32, "local_lr": 0.2, "server_lr": 0.2}
    algorithms = {
        "FSMGDA": FSMGDA(**budget),
        'FSMGDA, normalize="loss"': FSMGDA(normalize="loss", **budget),
        "FedAvg, weights ½ and ½": FedAvg(**budget),
    }
    results = [
        run(title, federation, algorithm, rounds, every=10 if i else 1)
        for i, (title, algorithm) in enumerate(algorithms.items())
    ]
    print(f"\nAfter {rounds} rounds of 20 local steps; rounds until a loss of {TARGET}; MB sent.")
    print(f"{'':24}{COLUMNS} {f'to {TARGET} left':>12} {'right':>7} {'MB':>6}")
    for title, result in zip(algorithms, results, strict=True):
        left, right = ("never" if t is None else t for t in result.rounds_until(TARGET).values())
        sent = sum(report.bytes_up + report.bytes_down for report in result.reports) / 1e6
        line = numbers(result.final.losses, result.final.held_out)
        print(f"{title:24}{line} {left:>12} {right:>7} {sent:6.1f}")
    left, right = (median(r.spread[name] for r in results[0].reports) for name in NAMES)
    scale = median(report.scale for report in results[1].reports)
    print(WHY.format(left=left, right=right, weight=results[0].weights[:, 0].mean(), scale=scale))
    print(f"{time.perf_counter() - started:.0f} seconds in all. How it works: docs/algorithm.md.")


if __name__ == "__main__":
    main()
