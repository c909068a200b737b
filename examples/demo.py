"""Two digits in one image, ten clients, two objectives: FSMGDA beside FedAvg, and a report.

    python examples/demo.py [--rounds 40] [--out runs/demo-…]

Each image shows two of scikit-learn's bundled 8×8 digits, one up left and one down right, with a
corner of overlap. "left" and "right" are the two objectives; one small network with two heads learns
both. Every client sees at most two left labels (all right ones), so on "left" the clients disagree.
All numbers are measured in this run: losses on the clients' data, accuracies on pairs made of digit
images that no client has. Every run has a folder of its own, as `fmol run` makes them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from fmol.config import read_config
from fmol.listeners import Progress
from fmol.report import write_report
from fmol.result import Result
from fmol.runs import RunFolder, start
from fmol.runs.folder import new_folder

PROBLEM = {
    "problem": "multidigits",
    "partition": "left-shards",
    "engine": "auto",
    "device": "cpu",
    "threads": "1",
}
SETTINGS = {
    "FSMGDA": {"algorithm": "fsmgda"},
    'FSMGDA, normalize="loss"': {"algorithm": "fsmgda", "normalize": "loss"},
    "FedAvg, weights ½ and ½": {"algorithm": "fedavg"},
    "every client alone": {"algorithm": "alone"},
}
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
Alone, a client fits its own two left labels at once, and knows nothing of the other eight (its
accuracies are on held-out pairs with its own labels).
"""


def run(title: str, flags: dict[str, str], rounds: int, folder: Path) -> Result:
    """Trains as `fmol run` would, into a run folder, with a progress line."""
    print(f"\n{title}", flush=True)
    config = read_config({}, {**PROBLEM, **flags, "rounds": str(rounds)})
    with Progress(NAMES, rounds) as progress:
        return start(config, folder, watch=lambda *_: [progress], say=lambda text: None)


def line(title: str, result: Result) -> str:
    losses, held_out = result.final.losses, result.final.held_out
    until = ("never" if t is None else t for t in result.rounds_until(TARGET).values())
    sent = sum(report.bytes_up + report.bytes_down for report in result.reports) / 1e6
    text = f"{title:24}{losses['left']:11.3f} {losses['right']:7.3f}"
    accuracies = [held_out[n]["accuracy"] for n in NAMES if n in held_out]
    text += " {:14.1%} {:7.1%}".format(*accuracies) if accuracies else f" {'–':>14} {'–':>7}"
    return text + "{:>13} {:>7}".format(*until) + f" {sent:6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run (40)")
    parser.add_argument("--out", type=Path, help="where to write (a new folder under runs/)")
    arguments = parser.parse_args()
    rounds, started = arguments.rounds, time.perf_counter()
    out = arguments.out or new_folder("runs", "demo", "fsmgda", 0)
    folders = {title: out / flags["algorithm"] for title, flags in SETTINGS.items()}
    folders['FSMGDA, normalize="loss"'] = out / "fsmgda-loss"
    results = {
        title: run(title, flags, rounds, folders[title]) for title, flags in SETTINGS.items()
    }
    print(f"\nAfter {rounds} rounds of 20 local steps; rounds until a loss of {TARGET}; MB sent.")
    print(f"{'':24}{COLUMNS} {f'to {TARGET} left':>12} {'right':>7} {'MB':>6}")
    for title, result in results.items():
        print(line(title, result))
    plain, normalized = list(results.values())[:2]
    left, right = (median(r.spread[name] for r in plain.reports) for name in NAMES)
    scale = median(report.scale for report in normalized.reports)
    print(WHY.format(left=left, right=right, weight=plain.weights[:, 0].mean(), scale=scale))
    records = [RunFolder(folder).record(title) for title, folder in folders.items()]
    report = write_report(out / "report.html", records, title="Two digits in one image")
    print(f"{time.perf_counter() - started:.0f} seconds in all. Now look at {report}")
    print("How it works: docs/algorithm.md. Your own data: docs/your-own-problem.md.")


if __name__ == "__main__":
    main()
