"""One round of FSMGDA by every engine, a plain loop, `vmap`, Flower and JAX, side by side in one run.

    python benchmarks/engines.py [--device cuda] [--only lenet-10-16 …] [--growth] [--out results.json]

All compute whole rounds from the same `x` on the same batches: local steps, means per objective,
min-norm step. Before anything is timed, each must come to the plain loop's next `x`. Rounds are timed
in turns, and the figures are medians. The first round of each, with whatever it finds out or compiles,
is reported by itself. The allocator is told to keep freed memory: otherwise page faults after heap
trimming, a matter of luck, are larger than what is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from growth import PATIENCE, WARM_ROUNDS, WARM_STEPS, curves, growth, server
from profiling import print_profile, profiled
from rivals import SEED, Round, plain, with_vmap
from torch import Tensor
from workloads import Workload, workloads

from fmol import Federation
from fmol.engines import BUILT_IN, make_engine
from fmol.rounds import Plan

OURS = ("sequential", "vectorized", "compiled", "auto", "flower")
"""Engines of fmol; `compiled` is the vectorized one whose steps are compiled in its first round, and
`flower` Flower's simulation with Ray's processes."""
NAMES = ("plain", "sequential", "vmap", "vectorized", "compiled", "auto", "flower", "jax")
RUN = 1000
"""Of how many rounds engines are told that this is the first: `auto` compiles where that pays in so
many."""
TOLERANCE = {"fp32": 1e-2, "tf32": 1e-1}
"""How far the step `x' − x` may be from the plain loop's, relative to its length.

LeNet has pools and ReLUs, where rounding may decide which way a gradient goes: differences of 9e-4
were seen there, near 1e-6 elsewhere.
"""


class OneByOneError(RuntimeError):
    """The vectorized engine did what the sequential one does: there is nothing to time."""


def ours(
    name: str, workload: Workload, federation: Federation, device: torch.device, precision: str
) -> Round:
    """A round by one of fmol's engines."""
    options: dict[str, Any] = {"precision": precision}
    if name in ("vectorized", "compiled"):
        options["compile"] = "always" if name == "compiled" else "never"
    if name == "flower":
        options["backend"] = "ray"
    kind = "vectorized" if name == "compiled" else name
    engine = make_engine(partial(BUILT_IN[kind], **options), federation, seed=SEED, device=device)
    if hasattr(engine, "expect"):
        engine.expect(RUN)
    algorithm = workload.algorithm()
    x = federation.layout.flatten(dict(federation.model.named_parameters())).to(device)
    state = algorithm.init(federation, x)
    cohort = tuple(federation.population.ids())

    def round(t: int) -> Tensor:
        after, report = algorithm.round(state, Plan(t, cohort, evaluate=False), engine)
        if kind == "vectorized" and any("one by one" in note for note in report.notes):
            raise OneByOneError(report.notes[0])
        return after.x

    round.close = engine.close  # type: ignore[attr-defined]
    return round


def make(
    name: str, workload: Workload, federation: Federation, device: torch.device, precision: str
) -> Round:
    if name in OURS:
        return ours(name, workload, federation, device, precision)
    if name == "jax":
        from jax_rival import with_jax

        return with_jax(workload, federation, device)
    return (plain if name == "plain" else with_vmap)(workload, federation, device)


# ---- measuring -------------------------------------------------------------------------------


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result


def measure(
    workload: Workload,
    names: Sequence[str],
    device: torch.device,
    repeats: int,
    precision: str,
    profile: bool,
) -> dict[str, Any]:
    """What a round of this work costs each of `names`; one that disagrees is not timed."""
    federation = workload.federation()
    flops, moved = workload.flops(federation), workload.bytes(federation)
    start = federation.layout.flatten(dict(federation.model.named_parameters()))
    results: dict[str, dict[str, Any]] = {}
    row = {"flops": flops, "bytes": moved, "parameters": len(start), "lanes": workload.lanes}
    row["engines"] = results
    right: Tensor | None = None
    # JAX keeps the GPU memory that it once had, so there it comes when the others are done.
    last = [name for name in names if name == "jax" and device.type == "cuda"]
    for group in ([name for name in names if name not in last], last):
        rounds: dict[str, Round] = {}
        for name in group:
            result, right = _first(name, workload, federation, device, start, right, precision)
            results[name] = result["row"]
            if "round" in result:
                rounds[name] = result["round"]
        # What takes long is as warm as it gets, and is timed once; ours may have been probing.
        long = [
            name
            for name in rounds
            if name not in OURS and results[name]["first_seconds"] > PATIENCE
        ]
        times = {name: [results[name]["first_seconds"]] for name in long}
        times |= _in_turns({n: r for n, r in rounds.items() if n not in long}, device, repeats)
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(f"  {name} {seconds_text(median)}", file=sys.stderr, flush=True)
            results[name] |= {
                "seconds": median,
                "all_seconds": seconds,
                "flops_per_second": flops / median,
                "bytes_per_second": moved / median,
            }
        for name, round in rounds.items():
            if not profile or name not in OURS:
                continue
            found = profiled(lambda round=round: round(200), device)
            print_profile(f"{workload.name}, {name}", found)
            results[name]["profile"] = found
        for round in rounds.values():  # Ray's processes would keep the cores from the next ones.
            getattr(round, "close", lambda: None)()
        rounds.clear()
        free(device)
    if "seconds" in results.get("plain", {}):
        for result in results.values():
            if "seconds" in result:
                result["ratio"] = results["plain"]["seconds"] / result["seconds"]
    return row


def _first(
    name: str,
    workload: Workload,
    federation: Federation,
    device: torch.device,
    start: Tensor,
    right: Tensor | None,
    precision: str,
) -> tuple[dict[str, Any], Tensor | None]:
    """The first rounds of one: what the first cost, if it is right, and the memory of a later one."""
    row: dict[str, Any] = {"warm_up_rounds": 0, "warm_up_seconds": 0.0}
    try:
        row["build_seconds"], round = timed(
            lambda: make(name, workload, federation, device, precision), device
        )
        row["first_seconds"], x = timed(lambda: round(0), device)
    except torch.OutOfMemoryError:
        free(device)
        return {"row": {"failed": "out of memory"}}, right
    except OneByOneError as error:
        return {"row": {"failed": "one by one", "reason": str(error)}}, right
    x = x.cpu()
    if right is None:
        right = x
    row["difference"] = float((x - right).norm() / (right - start).norm())
    if not row["difference"] <= TOLERANCE[precision]:
        row["failed"] = f"off by {row['difference']:.1e}"
        return {"row": row}, right
    if name not in OURS and row["first_seconds"] > PATIENCE:
        return {"row": row, "round": round}, right
    warm = -(-WARM_STEPS // workload.steps) if name in ("vectorized", "compiled", "auto") else 0
    if warm and device.type == "cuda":
        warm = max(warm, WARM_ROUNDS)
    begun, done = time.perf_counter(), 0
    while done < warm and time.perf_counter() - begun < PATIENCE:
        done += 1
        timed(lambda t=done: round(t), device)
    row |= {"warm_up_rounds": done, "warm_up_seconds": time.perf_counter() - begun}
    if device.type == "cuda" and name != "jax":
        torch.cuda.reset_peak_memory_stats(device)
        round(0)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return {"row": row, "round": round}, right


def _in_turns(
    rounds: dict[str, Round], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Seconds of `repeats` rounds of each, fewer of those that take long."""
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for t in range(repeats):
        # Each goes first in every other turn: what runs second finds a warmer cache.
        for name in sorted(rounds, reverse=bool(t % 2)):
            if sum(times[name]) < PATIENCE:
                seconds, _ = timed(lambda name=name, t=t: rounds[name](100 + t), device)
                times[name].append(seconds)
    return times


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device can do: FLOP/s of a large product, bytes read and written by a large copy."""
    cuda = device.type == "cuda"
    n, size = (8192, 2**30) if cuda else (2048, 2**28)
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    source = torch.zeros(size // 4, device=device)
    target = torch.zeros_like(source)

    def best(function: Callable[[], Any]) -> float:
        return min(timed(function, device)[0] for _ in range(8))

    before = torch.get_float32_matmul_precision()
    found = {"copy_bytes": 2 * size / best(lambda: target.copy_(source))}
    for name, precision in [("fp32", "highest"), ("tf32", "high")]:
        if name == "fp32" or cuda:
            torch.set_float32_matmul_precision(precision)
            found[f"{name}_flops"] = 2 * n**3 / best(lambda: a @ b)
    torch.set_float32_matmul_precision(before)
    return found


def keep_freed_memory() -> None:
    """Tells glibc's allocator not to hand memory back between steps; elsewhere does nothing."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 2**25)


def set_precision(name: str) -> None:
    """For all torch contestants alike; JAX is told the same."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"


# ---- tables ----------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _round_cell(result: dict[str, Any]) -> str:
    ratio = f" ({result['ratio']:.3g}×)" if "ratio" in result else ""
    return seconds_text(result["seconds"]) + ratio


def _run_cell(result: dict[str, Any]) -> str:
    """Its first rounds as they were, with all that was probed, recorded and compiled in them."""
    begun = result["first_seconds"] + result["warm_up_seconds"]
    return seconds_text(begun + (RUN - 1 - result["warm_up_rounds"]) * result["seconds"])


TABLES: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("a round, and how many times as fast as the plain loop", _round_cell),
    ("the first round", lambda result: seconds_text(result["first_seconds"])),
    (f"a run of {RUN} rounds", _run_cell),
    ("GFLOP/s", lambda result: f"{result['flops_per_second'] / 1e9:.4g}"),
    (
        "GB/s, of what the plain loop's operations read and write",
        lambda result: f"{result['bytes_per_second'] / 1e9:.4g}",
    ),
    ("peak memory", lambda result: f"{result['peak_bytes'] / 2**20:.0f} MiB"),
    ("difference from the plain loop's step", lambda result: f"{result['difference']:.0e}"),
]


def print_tables(rows: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
    for title, cell in TABLES:
        lines = []
        for workload, row in rows.items():
            cells = []
            for name in names:
                result = row["engines"].get(name, {})
                try:
                    cells.append(cell(result))
                except KeyError:
                    cells.append(result.get("failed", "–"))
            lines.append(f"{workload:14}" + "".join(f"{text:>19}" for text in cells))
        if any(text.strip(" –") != workload for text, workload in zip(lines, rows, strict=True)):
            print(f"\n{title}\n{'':14}" + "".join(f"{name:>19}" for name in names))
            print("\n".join(lines))


def main() -> None:
    known = workloads()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[w.name for w in known], default=[],
        help=f"workloads by name: {', '.join(w.name for w in known)}",
    )  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--precision", choices=["fp32", "tf32"], default="fp32")
    parser.add_argument(
        "--threads",
        type=int,
        help="of torch on the CPU (one per core); one where others compute too",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds of each (7)")
    parser.add_argument("--quick", action="store_true", help="few repeats of small work")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no further workload after this time")  # fmt: skip
    parser.add_argument("--growth", action="store_true",
                        help="instead: growth with M, S, K and d, and the server's step")  # fmt: skip
    parser.add_argument("--curves", nargs="+", choices=list(curves(False)), default=[],
                        help="of growth, in place of all")  # fmt: skip
    parser.add_argument("--profile", action="store_true",
                        help="tell by kernel where one more round of our engines goes")  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the numbers as JSON to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
        if hasattr(os, "sched_setaffinity"):  # JAX goes by this.
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    logging.getLogger("fmol").setLevel(logging.ERROR)
    device = torch.device(options.device)
    set_precision(options.precision)
    written = describe(device, options.precision)

    def out_of_time() -> bool:
        return time.perf_counter() - began > options.budget

    if options.growth:
        engines = [name for name in ("sequential", "vectorized") if name in options.engines]
        written["growth"] = growth(device, options.quick, out_of_time, engines, options.curves)
        written["server"] = server(device, options.quick)
    else:
        names, left_out = list(options.engines), []
        if "jax" in names and importlib.util.find_spec("jax") is None:
            names.remove("jax")
            left_out.append("jax, which is not installed")
        if "flower" in names and device.type == "cuda":
            names.remove("flower")
            left_out.append("Flower's simulation, which here computes on CPUs alone")
        elif "flower" in names and not all(map(importlib.util.find_spec, ("flwr", "ray"))):
            names.remove("flower")
            left_out.append("Flower's simulation, which is not installed")
        rows: dict[str, Any] = {}
        for workload in known:
            if options.only and workload.name not in options.only:
                continue
            if not options.only and device.type not in workload.devices:
                left_out.append(f"{workload.name} (not on this device unless asked for)")
                continue
            if options.quick and not options.only and workload.clients > 10:
                left_out.append(f"{workload.name} (large)")
                continue
            if out_of_time():
                left_out.append(f"{workload.name} (out of time)")
                continue
            repeats = 2 if options.quick else options.repeats
            print(f"{workload.name} …", file=sys.stderr, flush=True)
            rows[workload.name] = measure(
                workload, names, device, repeats, options.precision, options.profile
            )
            written |= {"workloads": rows, "left_out": left_out}
            write(options.out, written)
        print_tables(rows, names)
        print("\nleft out: " + "; ".join(left_out))
    write(options.out, written)


def describe(device: torch.device, precision: str) -> dict[str, Any]:
    """The device and its ceilings, printed and returned."""
    found = ceilings(device)
    free(device)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    limits = [f"{k.split('_')[0]} {v / 1e9:.4g} GFLOP/s" for k, v in found.items() if "fl" in k]
    limits.append(f"copy {found['copy_bytes'] / 1e9:.4g} GB/s")
    print(f"{name}, torch {torch.__version__}, {precision}; ceilings: {', '.join(limits)}")
    return {
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "precision": precision,
        "ceilings": found,
    }


def write(path: Path | None, written: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
