"""The min-norm solver beside others: how often each is wrong, and how long each takes.

    python benchmarks/solver.py [--problems N] [--out results.json]

Every solver sees the same float64 Gramians, with its default settings. Solvers that are not installed
are left out by name; `pip install "fmol[bench]"` brings them all.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fmol.minnorm import min_norm
from fmol.problems.min_norm_families import families
from fmol.rng import stream

Array = NDArray[np.float64]
Solver = Callable[[Array], Array]

EPS = float(np.finfo(np.float64).eps)
SIZES = (2, 8, 40, 200, 1000)
TIMED = ("wide", "half active", "conflicting")
PATIENCE = 10.0  # seconds: a solver that would need longer for one problem is not asked


def load_fmol() -> Solver:
    return lambda gramian: min_norm(torch.from_numpy(gramian)).weights.numpy()


def load_quadprog() -> Solver:
    import quadprog

    @functools.cache  # what does not depend on the Gramian is not timed
    def simplex(S: int) -> tuple[Array, Array, Array]:
        return np.zeros(S), np.hstack([np.ones((S, 1)), np.eye(S)]), np.eye(S + 1)[0]

    def solve(gramian: Array) -> Array:
        linear, constraints, bounds = simplex(len(gramian))
        return np.asarray(quadprog.solve_qp(gramian, linear, constraints, bounds, 1)[0])

    return solve


def load_clarabel() -> Solver:
    import clarabel
    from scipy import sparse

    settings = clarabel.DefaultSettings()
    settings.verbose = False

    @functools.cache
    def simplex(S: int) -> tuple[Any, ...]:
        constraints = sparse.csc_matrix(np.vstack([np.ones(S), -np.eye(S)]))
        cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(S)]
        return np.zeros(S), constraints, np.eye(S + 1)[0], cones, settings

    def solve(gramian: Array) -> Array:
        quadratic = sparse.csc_matrix(np.triu(gramian))
        solver = clarabel.DefaultSolver(quadratic, *simplex(len(gramian)))
        return np.asarray(solver.solve().x)

    return solve


def load_torchjd() -> Solver:
    from torchjd.aggregation import MGDAWeighting

    weighting = MGDAWeighting()
    return lambda gramian: weighting(torch.from_numpy(gramian)).numpy()


LOADERS = {
    "fmol": load_fmol,
    "quadprog": load_quadprog,
    "clarabel": load_clarabel,
    "torchjd": load_torchjd,
}


def load_solvers() -> dict[str, Solver]:
    """Every solver that is installed, ready and warm."""
    solvers = {}
    for name, load in LOADERS.items():
        try:
            solvers[name] = load()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        for S in (2, 8):
            solvers[name](np.eye(S))
    return solvers


def judge(gramian: Array, weights: Array) -> tuple[bool, bool, bool]:
    """Whether the direction is stationary, hurts an objective, misses the bound the proof needs.

    In long doubles, with what rounding of a float64 Gramian excuses: `⟨Δ_s, d⟩ ≥ ‖d‖²` but for
    `1e−9·‖d‖² + 16·S·ε·‖Δ_s‖·Σ_j λ_j‖Δ_j‖`.
    """
    G, w = gramian.astype(np.longdouble), weights.astype(np.longdouble)
    falls = G @ w
    squared = w @ falls
    lengths = np.sqrt(G.diagonal())
    total = w @ lengths
    noise = 16 * len(w) * EPS
    rounding = noise * lengths * total
    return (
        bool(squared <= noise * total**2),
        bool((falls < -rounding).any()),
        bool((squared - falls > 1e-9 * squared + rounding).any()),
    )


def solve_fairly(solver: Solver, gramian: Array) -> Array | None:
    """The weights put on the simplex, None when there are none."""
    try:
        weights = np.maximum(solver(gramian.copy()), 0.0)
    except Exception:  # noqa: BLE001 - whatever a solver raises, it has failed
        return None
    total = weights.sum()
    return weights / total if math.isfinite(total) and total > 0 else None


def measure_accuracy(solvers: dict[str, Solver], problems: int, most: int) -> dict[str, Any]:
    """Per family: how many problems are not stationary, and on how many of them each went wrong."""
    table: dict[str, Any] = {}
    for family, make in families().items():
        row: dict[str, Any] = {"problems": 0}
        row |= {name: {"fails": 0, "hurts": 0, "misses": 0} for name in solvers}
        for i in range(problems):
            generator = stream(0, "benchmark", family, i)
            S = round(math.exp(generator.uniform(math.log(2), math.log(most))))
            deltas = make(generator, S)
            gramian = deltas @ deltas.T
            answers = {name: solve_fairly(solver, gramian) for name, solver in solvers.items()}
            verdicts = {n: judge(gramian, w) for n, w in answers.items() if w is not None}
            # The shortest direction is as good as zero: there is nothing to be right about.
            if any(stationary for stationary, _, _ in verdicts.values()):
                continue
            row["problems"] += 1
            for name in solvers:
                if name not in verdicts:
                    row[name]["fails"] += 1
                    continue
                _, hurts, misses = verdicts[name]
                row[name]["hurts"] += hurts
                row[name]["misses"] += misses
        table[family] = row
    return table


def measure_seconds(solver: Solver, gramians: list[Array]) -> float:
    """Median over the Gramians of the best of some repetitions."""
    best = []
    for gramian in gramians:
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 0.02 and len(times) < 200):
            start = time.perf_counter()
            solver(gramian)
            times.append(time.perf_counter() - start)
            if sum(times) > 1.0:
                break
        best.append(min(times))
    return statistics.median(best)


def measure_times(solvers: dict[str, Solver]) -> dict[str, Any]:
    """Seconds per family, size and solver; None where a solver fails or is too slow to be asked."""
    table: dict[str, Any] = {}
    for family in TIMED:
        table[family] = {}
        lost: set[str] = set()
        for S in SIZES:
            gramians = []
            for i in range(3 if S >= 1000 else 15):
                deltas = families()[family](stream(1, "benchmark", family, S, i), S)
                gramians.append(deltas @ deltas.T)
            row: dict[str, float | None] = {}
            for name, solver in solvers.items():
                row[name] = None
                if name in lost:
                    continue
                try:
                    row[name] = seconds = measure_seconds(solver, gramians)
                except Exception:  # noqa: BLE001 - whatever a solver raises, it has failed
                    continue
                if seconds * 5**3 > PATIENCE:  # the next size, for a cubic cost
                    lost.add(name)
            table[family][S] = row
    return table


def print_accuracy(table: dict[str, Any], solvers: dict[str, Solver]) -> None:
    print(
        "\nNon-stationary problems on which a solver fails / hurts an objective / misses the bound\n"
    )
    print(f"{'family':<30}{'problems':>10}" + "".join(f"{name:>18}" for name in solvers))
    totals = {name: [0, 0, 0] for name in solvers}
    count = 0
    for family, row in table.items():
        line = f"{family:<30}{row['problems']:>10}"
        count += row["problems"]
        for name in solvers:
            numbers = list(row[name].values())
            totals[name] = [a + b for a, b in zip(totals[name], numbers, strict=True)]
            line += f"{' / '.join(map(str, numbers)):>18}"
        print(line)
    line = f"{'all':<30}{count:>10}"
    print(line + "".join(f"{' / '.join(map(str, totals[name])):>18}" for name in solvers))


def format_seconds(seconds: float) -> str:
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def print_times(table: dict[str, Any], solvers: dict[str, Solver]) -> None:
    print("\nMedian time of a solve, and how many times that of quadprog\n")
    print(f"{'family':<16}{'S':>6}" + "".join(f"{name:>20}" for name in solvers))
    for family, sizes in table.items():
        for S, row in sizes.items():
            line = f"{family:<16}{S:>6}"
            reference = row.get("quadprog")
            for name in solvers:
                seconds = row[name]
                cell = "–" if seconds is None else format_seconds(seconds)
                if seconds is not None and reference:
                    ratio = seconds / reference
                    cell += f" ({ratio:.1f}×)" if ratio >= 0.1 else f" ({ratio:.3f}×)"
                line += f"{cell:>20}"
            print(line)


def versions(solvers: dict[str, Solver]) -> dict[str, str]:
    packages = ["numpy", "torch", *(name for name in solvers if name != "fmol")]
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=30, help="per family (default 30)")
    parser.add_argument("--most", type=int, default=200, help="largest S of those (default 200)")
    parser.add_argument("--out", type=Path, help="write the tables to this JSON file, too")
    arguments = parser.parse_args()
    solvers = load_solvers()
    print(", ".join(f"{package} {version}" for package, version in versions(solvers).items()))
    times = measure_times(solvers)
    print_times(times, solvers)
    accuracy = measure_accuracy(solvers, arguments.problems, arguments.most)
    print_accuracy(accuracy, solvers)
    if arguments.out:
        results = {"versions": versions(solvers), "seconds": times, "accuracy": accuracy}
        arguments.out.write_text(json.dumps(results, indent=2))
        print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
