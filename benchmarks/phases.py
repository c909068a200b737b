"""Where a round on a GPU goes: the host before the device begins, the device, and the host after it.

    python benchmarks/phases.py [--only lenet-10-64 …] [--precision tf32] [--out phases.json]

Rounds of FSMGDA by the vectorized engine with compiled steps, whose local steps are one CUDA graph.
Medians of rounds, each waited for, after as many as it takes for graphs to be recorded and checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import set_precision
from growth import WARM_ROUNDS
from profiling import print_profile, profiled
from rivals import SEED
from workloads import Workload, workloads

from fmol.engines import BUILT_IN, make_engine
from fmol.engines.graphs import StepGraph
from fmol.rounds import Plan

USUAL = ("lenet-10-64", "lenet-100-16", "mlp-16")
PHASES = ("round", "before", "graph", "after")
"""All of it; until the graph is told to begin; on the device; and from its end on."""


@contextmanager
def watched(marks: dict[str, Any]) -> Iterator[None]:
    """Within it every replay of a graph notes when it was started, and events around it."""
    replay = StepGraph.__call__

    def noted(self: StepGraph, *arguments: Any, **named: Any) -> Any:
        marks["started"] = time.perf_counter()
        marks["begin"], marks["end"] = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        marks["begin"].record()
        found = replay(self, *arguments, **named)
        marks["end"].record()
        return found

    StepGraph.__call__ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepGraph.__call__ = replay  # type: ignore[method-assign]


def measure(workload: Workload, precision: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of each phase, and a profile of one round."""
    set_precision(precision)
    device = torch.device("cuda")
    federation = workload.federation()
    options = {"precision": precision, "compile": "always"}
    engine = make_engine(
        partial(BUILT_IN["vectorized"], **options), federation, seed=SEED, device=device
    )
    algorithm = workload.algorithm()
    x = federation.layout.flatten(dict(federation.model.named_parameters())).to(device)
    state, cohort = algorithm.init(federation, x), tuple(federation.population.ids())

    def round(t: int) -> None:
        algorithm.round(state, Plan(t, cohort, evaluate=False), engine)
        torch.cuda.synchronize(device)

    for t in range(WARM_ROUNDS):
        round(t)
    marks: dict[str, Any] = {}
    found: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with watched(marks):
        for t in range(rounds):
            marks.clear()
            begun = time.perf_counter()
            round(100 + t)
            whole = 1e3 * (time.perf_counter() - begun)
            if not marks:
                raise SystemExit(f"{workload.name}: its steps are no CUDA graph on this device.")
            before = 1e3 * (marks["started"] - begun)
            graph = marks["begin"].elapsed_time(marks["end"])
            for phase, spent in zip(
                PHASES, (whole, before, graph, whole - before - graph), strict=True
            ):
                found[phase].append(spent)
    profile = profiled(lambda: round(1000), device)
    engine.close()
    return {
        "milliseconds": {phase: statistics.median(each) for phase, each in found.items()},
        "profile": profile,
    }


def main() -> None:
    known = {workload.name: workload for workload in workloads()}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(known), default=USUAL)
    parser.add_argument("--precision", choices=["fp32", "tf32"], default="fp32")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="the kernels of a round as well")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs a CUDA device. On a CPU, `engines.py --profile` says it.")
    found = {name: measure(known[name], options.precision, options.rounds) for name in options.only}
    print(f"ms, {options.precision}     " + "".join(f"{phase:>10}" for phase in PHASES))
    for name, each in found.items():
        cells = "".join(f"{each['milliseconds'][phase]:>10.2f}" for phase in PHASES)
        print(f"{name:13}{cells}")
        if options.profile:
            print_profile(name, each["profile"])
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
