"""The rules beside one another: how often each hurts an objective, what its weights sum to, its time.

    python benchmarks/rules.py [--problems N] [--out results.json]

Every rule sees the float64 Gramians that `benchmarks/solver.py` judges solvers by, those that are
stationary left out. TorchJD's weightings that are not installed are left out by name;
`pip install "fmol[bench]"` brings most of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from solver import EPS, TIMED, format_seconds, judge, measure_seconds, versions
from torch import Tensor

from fmol import rules
from fmol.algorithms.descent import find_direction
from fmol.minnorm import min_norm
from fmol.problems.min_norm_families import families
from fmol.rng import stream
from fmol.rules.adapter import CLASSES

Array = NDArray[np.float64]
Weigh = Callable[[Tensor, Tensor], Tensor]
"""A Gramian `[S, S]` and losses `[S]` in, weights `[S]` out."""

SIZES = (2, 8, 40, 200)
SOLVED = (
    1e-3  # the length, and the loss, of the objective that is solved; the others' are about one
)
OPTIONS: dict[str, dict[str, Any]] = {
    "cagrad": {"c": 0.5},
    "fairgrad": {"alpha": 1.0},
    "krum": {"n_byzantine": 0},
}
"""For those of TorchJD's weightings that cannot do without."""


def ours() -> dict[str, rules.Rule]:
    """Every rule of fmol with its default options, as an algorithm would be given it."""
    return {
        "min-norm": rules.MinNorm(),
        "upgrad": rules.UpGrad(),
        "capped 0.75": rules.Capped(),
        "near-prior 0.1": rules.NearPrior(),
        "fixed, equal": rules.Fixed(default=1.0),
        "tchebycheff 0.1": rules.SmoothTchebycheff(),
        "smoothed 0.9": rules.Smoothed(),
    }


def theirs() -> dict[str, rules.Rule]:
    """TorchJD's weightings that are installed, through the adapter."""
    found: dict[str, rules.Rule] = {}
    for name in CLASSES:
        try:
            found[f"torchjd {name}"] = rules.TorchJD(name, OPTIONS.get(name, {}))  # type: ignore[arg-type]
        except ValueError as error:
            print(f"torchjd {name} is left out: {error}")
    return found


def weigh_by(rule: rules.Rule, gramian: Tensor, losses: Tensor) -> Tensor:
    """One round of a rule; one with a memory had equal weights in the round before."""
    if isinstance(rule, rules.Smoothed):
        equal = torch.full((len(gramian),), 1 / len(gramian), dtype=torch.float64)
        return rules.smoothed(gramian, equal, rule.keep)
    names = tuple(map(str, range(len(gramian))))
    return rule(gramian, rules.Context(names=names, losses=losses))


def hurts(gramian: Array, weights: Array) -> bool:
    """Whether some objective rises along `−d`, beyond what rounding of the Gramian excuses."""
    G, w = gramian.astype(np.longdouble), weights.astype(np.longdouble)
    lengths = np.sqrt(G.diagonal())
    rounding = 16 * len(w) * EPS * lengths * (np.abs(w) @ lengths)
    return bool((G @ w < -rounding).any())


def measure_harm(weighers: dict[str, Weigh], problems: int, most: int) -> dict[str, Any]:
    """Per rule: on how many problems it fails or hurts, by family too, and what its weights sum to."""
    table: dict[str, Any] = {
        name: {"fails": 0, "hurts": 0, "families": {}, "sums": []} for name in weighers
    }
    count = 0
    for family, make in families().items():
        for i in range(problems):
            generator = stream(0, "benchmark", family, i)
            S = round(math.exp(generator.uniform(math.log(2), math.log(most))))
            deltas = make(generator, S)
            gramian = deltas @ deltas.T
            if judge(gramian, min_norm(gramian).weights.numpy())[0]:
                continue
            count += 1
            losses = torch.from_numpy(stream(0, "losses", family, i).random(S))
            for name, weigh in weighers.items():
                row = table[name]
                try:
                    weights = weigh(torch.from_numpy(gramian.copy()), losses).numpy()
                except Exception:  # noqa: BLE001 - whatever a rule raises, it has failed
                    row["fails"] += 1
                    continue
                row["sums"].append(float(weights.sum()))
                if hurts(gramian, weights):
                    row["hurts"] += 1
                    row["families"][family] = row["families"].get(family, 0) + 1
    for row in table.values():
        sums = row.pop("sums")
        row["least_sum"], row["largest_sum"] = (min(sums), max(sums)) if sums else (None, None)
    return {"problems": count, "rules": table}


def measure_times(weighers: dict[str, Weigh]) -> dict[str, Any]:
    """Median seconds of a call per rule and size, over some families; None where it fails."""
    table: dict[str, Any] = {name: {} for name in weighers}
    for S in SIZES:
        gramians = []
        for family in TIMED:
            for i in range(5):
                deltas = families()[family](stream(1, "benchmark", family, S, i), S)
                gramians.append(deltas @ deltas.T)
        losses = torch.from_numpy(stream(1, "losses", S).random(S))
        for name, weigh in weighers.items():

            def solve(gramian: Array, weigh: Weigh = weigh, losses: Tensor = losses) -> Array:
                return weigh(torch.from_numpy(gramian), losses).numpy()

            try:
                table[name][S] = measure_seconds(solve, gramians)
            except Exception:  # noqa: BLE001 - whatever a rule raises, it has failed
                table[name][S] = None
    return table


def measure_solved(
    chosen: dict[str, rules.Rule], problems: int = 200, S: int = 8
) -> dict[str, Any]:
    """What is left of the others' progress where one objective is solved, relative to equal weights.

    Rows are Gaussian in 20·S dimensions, of length one, nearly orthogonal; the first one's length and
    loss are a thousandth. An objective's progress is `⟨Δ_s, d⟩`, to first order what its loss falls by.
    """
    table: dict[str, Any] = {}
    cases: dict[str, tuple[rules.Rule, rules.Normalize]] = {
        n: (r, "none") for n, r in chosen.items()
    }
    for normalize in ("l2", "loss", "loss+"):
        cases[f"min-norm, {normalize}"] = (rules.MinNorm(), normalize)
    names = tuple(map(str, range(S)))
    losses = torch.ones(S, dtype=torch.float64)
    losses[0] = SOLVED
    equal = rules.Fixed(default=1.0)
    for name, (rule, normalize) in cases.items():
        others, solved, sums = [], [], []
        for i in range(problems):
            deltas = torch.from_numpy(
                stream(2, "benchmark", "solved", i).standard_normal((S, 20 * S))
            )
            deltas = deltas / deltas.norm(dim=1, keepdim=True)
            deltas[0] *= SOLVED
            plain = find_direction(deltas, names, rule=equal).vector
            memory: dict[str, Tensor] = {}
            for _ in range(50 if isinstance(rule, rules.Smoothed) else 1):
                try:
                    found = find_direction(
                        deltas,
                        names,
                        rule=rule,
                        normalize=normalize,
                        losses=losses,
                        memory=memory,
                    )
                except ValueError:
                    break
            else:
                others.append(float((deltas[1:] @ found.vector).sum() / (deltas[1:] @ plain).sum()))
                length = float(found.vector.norm())
                solved.append(
                    float(deltas[0] @ found.vector) / (SOLVED * length) if length else 0.0
                )
                sums.append(found.scale)
        if others:
            table[name] = {
                "others": statistics.median(others),
                "solved_cosine": statistics.median(solved),
                "sum": statistics.median(sums),
            }
    return table


def print_rules(harm: dict[str, Any], times: dict[str, Any]) -> None:
    print(
        f"\n{harm['problems']} problems that are not stationary: on how many a rule fails, on how many "
        "it hurts an objective, what its weights sum to, and its median time by S\n"
    )
    print(
        f"{'rule':<22}{'fails':>6}{'hurts':>6}{'sum':>20}"
        + "".join(f"{f'S = {S}':>10}" for S in SIZES)
    )
    for name, row in harm["rules"].items():
        least, largest = row["least_sum"], row["largest_sum"]
        span = "–" if least is None else f"{least:.3g} … {largest:.3g}"
        if least is not None and largest - least < 1e-9:
            span = f"{least:.3g}"
        seconds = (times[name][S] for S in SIZES)
        cells = ("–" if each is None else format_seconds(each) for each in seconds)
        print(
            f"{name:<22}{row['fails']:>6}{row['hurts']:>6}{span:>20}"
            + "".join(f"{cell:>10}" for cell in cells)
        )


def print_solved(table: dict[str, Any]) -> None:
    print(
        "\nOne of 8 objectives is solved (a thousandth of the others' length and loss): the others' "
        "progress\nbeside that under equal weights, the cosine of the solved one's update with the "
        "direction, the sum\n"
    )
    print(f"{'rule':<22}{'others':>10}{'cosine':>10}{'sum':>10}")
    for name, row in table.items():
        print(f"{name:<22}{row['others']:>10.1%}{row['solved_cosine']:>10.3f}{row['sum']:>10.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=30, help="per family (default 30)")
    parser.add_argument("--most", type=int, default=200, help="largest S of those (default 200)")
    parser.add_argument("--out", type=Path, help="write the tables to this JSON file, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {**ours(), **theirs()}
    found = versions({"torchjd": None} if len(chosen) > len(ours()) else {})  # type: ignore[dict-item]
    print(", ".join(f"{package} {version}" for package, version in found.items()))
    weighers: dict[str, Weigh] = {name: partial(weigh_by, rule) for name, rule in chosen.items()}
    solved = measure_solved(chosen)
    print_solved(solved)
    times = measure_times(weighers)
    harm = measure_harm(weighers, arguments.problems, arguments.most)
    print_rules(harm, times)
    if arguments.out:
        results = {"versions": found, "harm": harm, "seconds": times, "solved": solved}
        arguments.out.write_text(json.dumps(results, indent=2))
        print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
