"""How a round's time and memory grow, and what the server's step costs beside reading its input."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from workloads import SquaredError, perceptron, rivers

from fmol import FSMGDA, Client, Federation, LazyPopulation, Objective, min_norm
from fmol.aggregate import MeanFold, gramian
from fmol.algorithms.descent import step
from fmol.engines import make_engine
from fmol.kernels.fallbacks import Fallbacks
from fmol.rounds import Plan

WARM_STEPS = 50
"""Local steps before the vectorized engine is as fast as it gets: it records what is repeated."""
WARM_ROUNDS = 18
"""On a GPU, rounds before it is: a graph is checked at its first, second, fourth, … use."""
PATIENCE = 20.0
"""Seconds of warming up, and of timed rounds, after which one is not asked for more."""


@dataclass(frozen=True)
class Point:
    """A round of an MLP 64-width-width-S, of which all but one number stay the same."""

    clients: int = 10
    objectives: int = 2
    steps: int = 5
    width: int = 16
    lazy: bool = False
    """A million clients, `clients` of them in the round, data made when they are asked for."""


def curves(quick: bool) -> dict[str, list[Point]]:
    longest = 1_000 if quick else 10_000
    return {
        "M": [Point(clients=m) for m in (10, 100, 1_000, 10_000) if m <= longest],
        "M = 100 of 1 000 000": [Point(clients=100, lazy=True)],
        "S": [Point(objectives=s) for s in (2, 8, 40, 200)],
        "K": [Point(steps=k) for k in (1, 10, 100)],
        "d": [Point(width=w) for w in (16, 128, 512, 512 if quick else 2048)],
    }


class Numbered(Sequence[str]):
    """The ids of a million clients, none of which is stored."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: Any) -> Any:
        return f"c{i:07d}"


def federation_of(point: Point) -> Federation:
    torch.manual_seed(0)
    samples = 32
    if not point.lazy:
        return rivers(point.clients, point.objectives, point.width, samples)
    names = tuple(f"s{s:03d}" for s in range(point.objectives))

    def client(id: str) -> Client:
        def data() -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(int(id[1:]))
            inputs = torch.randn(samples, 64, generator=generator)
            return inputs, torch.randn(samples, point.objectives, generator=generator)

        return Client(id, data, names)

    objectives = [Objective(name, SquaredError(s)) for s, name in enumerate(names)]
    model = perceptron(64, point.width, point.objectives)
    return Federation(model, objectives, LazyPopulation(Numbered(), client))


def cost(point: Point, engine_name: str, device_name: str) -> dict[str, Any]:
    """Seconds of a round, bytes at its peak beyond what the process had to begin with, and what rounds
    noted: that steps are not one graph, say."""
    device = torch.device(device_name)
    before = peak_bytes(device)
    federation = federation_of(point)
    engine = make_engine(engine_name, federation, seed=0, device=device)
    algorithm = FSMGDA(local_steps=point.steps, batch_size=16, local_lr=0.01, server_lr=0.01)
    x = federation.layout.flatten(dict(federation.model.named_parameters())).to(device)
    state = algorithm.init(federation, x)
    ids = federation.population.ids()
    notes: dict[str, None] = {}
    fallbacks = Fallbacks()

    def round(t: int) -> float:
        every = len(ids) // point.clients
        # Another cohort each round, where there are more clients than it takes.
        cohort = tuple(ids[i * every + (t % every)] for i in range(point.clients))
        started = time.perf_counter()
        _, report = algorithm.round(state, Plan(t, cohort, evaluate=False), engine)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        notes.update(dict.fromkeys((*report.notes, *fallbacks.take())))
        return time.perf_counter() - started

    began, t = time.perf_counter(), 1
    first = round(0)
    least = WARM_ROUNDS if device.type == "cuda" else -(-WARM_STEPS // point.steps)
    while t < least and time.perf_counter() - began < PATIENCE:
        round(t)
        t += 1
    seconds = sorted(round(t + i) for i in range(1 if first > 5 else 3))
    return {
        "first_seconds": first,
        "seconds": seconds[len(seconds) // 2],
        "peak_bytes": peak_bytes(device) - before,
        "parameters": len(x),
        "notes": list(notes),
    }


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # Of this program alone; the other also knows its parent's peak.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cost_alone(point: Point, engine: str, device: torch.device) -> dict[str, Any]:
    """`cost`; on the CPU in a process of its own, which is how its peak can be told."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return cost(point, engine, str(device))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(cost, point, engine, str(device)).result()


def growth(
    device: torch.device,
    quick: bool,
    out_of_time: Callable[[], bool],
    engines: Sequence[str],
    only: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """A row for every point, of all curves or of `only` some, printed as it comes."""
    head = f"{'M':>8}{'S':>5}{'K':>5}{'d':>10}"
    print(f"\ngrowth\n{head}" + "".join(f"{name:>14}{'peak':>10}" for name in engines))
    rows: list[dict[str, Any]] = []
    for curve, points in curves(quick).items():
        if only and curve not in only:
            continue
        print(curve)
        for point in points:
            row: dict[str, Any] = {"curve": curve, "point": asdict(point), "engines": {}}
            cells = []
            for name in engines:
                if out_of_time():
                    cells.append(f"{'out of time':>24}")
                    continue
                found = cost_alone(point, name, device)
                row["engines"][name] = found
                cells.append(f"{found['seconds']:12.4f} s{found['peak_bytes'] / 2**20:6.0f} MiB")
            rows.append(row)
            d = next((int(e["parameters"]) for e in row["engines"].values()), 0)
            numbers = f"{point.clients:8}{point.objectives:5}{point.steps:5}{d:10}"
            print(numbers + "".join(cells), flush=True)
            for name, found in row["engines"].items():
                for note in found["notes"]:
                    print(f"        {name}: {note}")
    return rows


def server(device: torch.device, quick: bool, objectives: int = 40) -> dict[str, float]:
    """Seconds of each part of the server's step on `[S, d]`, beside a copy of as many bytes.

    A copy reads all bytes once and writes as many: two passes.
    """
    d = 10**6 if quick else 10**7
    deltas = torch.randn(objectives, d, device=device)
    x = torch.zeros(d, device=device)
    slots = [f"s{s:03d}" for s in range(objectives)]
    best: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - started)
        return result

    for _ in range(3):
        spare = torch.zeros_like(deltas)
        timed("two passes", lambda to=spare: to.copy_(deltas))
        del spare
    squares = torch.linalg.vector_norm(deltas, dim=1, dtype=torch.float64).square().tolist()
    for _ in range(3):
        fold = MeanFold(slots, x, "uniform")
        timed(
            "fold in",
            lambda f=fold: f.add_rows(slots, deltas, [1.0] * len(slots), [1] * len(slots), squares),
        )
        means = timed("means", fold.result)
        gram = timed("Gramian", lambda m=means: gramian(m.deltas))
        weights = timed("solve", lambda g=gram: min_norm(g).weights)
        direction = timed("direction", lambda m=means, w=weights: w.to(m.deltas) @ m.deltas)
        timed("update", lambda v=direction: step(x, v, 0.1, 0))
        del fold, means

    def whole(fold: MeanFold) -> torch.Tensor:
        means = fold.result()
        weights = min_norm(gramian(means.deltas)).weights
        return step(x, weights.to(means.deltas) @ means.deltas, 0.1, 0)

    for _ in range(5):
        fold = MeanFold(slots, x, "uniform")
        fold.add_rows(slots, deltas, [1.0] * len(slots), [1] * len(slots), squares)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timed("server step", lambda f=fold: whole(f))
        del fold
    parts = ("means", "Gramian", "solve", "direction", "update")
    best["ratio"] = best["server step"] / best["two passes"]
    print(
        f"\nthe server's step, S = {objectives}, d = {d}: its parts, each waited for, and in one go"
    )
    for name in ("two passes", "fold in", *parts, "server step"):
        print(f"{name:12}{1e3 * best[name]:10.2f} ms{best[name] / best['two passes']:8.2f}×")
    return best
