"""What hypervolume costs: seconds by objectives and points, and the error of an estimate.

    python benchmarks/hypervolume.py [--limit 25] [--out results.json]

Points lie on a sphere, so that none dominates another: the hardest case. Sizes grow until one takes
longer than the limit; larger ones of as many objectives are not tried.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from fmol.tradeoffs import exact_limit, hypervolume

COUNTS = (20, 50, 100, 200, 500, 1000, 2000)
OBJECTIVES = (2, 4, 5, 6, 7, 8, 9, 10, 11, 12)


def sphere(points: int, objectives: int) -> np.ndarray:
    """Points on the part of the unit sphere that faces the origin, `[n, S]`."""
    drawn = np.abs(np.random.default_rng(0).standard_normal((points, objectives)))
    return 1 - drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def exact_seconds(points: int, objectives: int) -> float:
    """Of moocore itself, beyond our own limit too."""
    import moocore

    values = sphere(points, objectives)
    moocore.hypervolume(values, ref=np.ones(objectives))  # The first call loads and warms up.
    started = time.perf_counter()
    moocore.hypervolume(values, ref=np.ones(objectives))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--limit", type=float, default=25.0, help="seconds after which to stop (25)"
    )
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'S':>3}" + "".join(f"{n:>10}" for n in COUNTS) + f"{'limit':>8}{'estimate':>20}")
    for objectives in OBJECTIVES:
        row: dict[str, Any] = {"objectives": objectives, "exact": {}}
        cells, slow = [], False
        for count in COUNTS:
            if slow:
                cells.append(f"{'':>10}")
                continue
            seconds = exact_seconds(count, objectives)
            row["exact"][count] = seconds
            told = f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
            cells.append(f"{told:>10}")
            # The next one would take several times as long.
            slow = seconds > options.limit / 8
        values = sphere(50, objectives)
        started = time.perf_counter()
        estimate = hypervolume(values, reference=[1.0] * objectives, estimate=True)
        row["estimate_seconds"] = time.perf_counter() - started
        row["relative_error"] = estimate.error / estimate.value
        row["limit"] = exact_limit(objectives)
        rows.append(row)
        told = f"{100 * row['relative_error']:.3f} %, {row['estimate_seconds']:.2f} s"
        print(
            f"{objectives:>3}" + "".join(cells) + f"{row['limit'] or 'any':>8}{told:>20}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
