"""What a round costs through Flower, beside Flower's own FedAvg: seconds, and the server's memory.

Three ways of getting there: simulated by Flower with 10 and with 100 clients, and deployed with three
SuperNodes on this machine, with TLS and node keys. FedAvg sends one model each way; FSMGDA one down and
one update per objective up. Each case is a run of its own; a number is the median of its rounds after
the first.
Run: python benchmarks/flower.py [--only deployed] [--sizes 10k 1M] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # The deployment on loopback is the tests'.

SIZES = {"10k": 10_000, "1M": 1_000_000, "25M": 25_000_000}
OBJECTIVES = (2, 8, 40)
PLACES = {"simulated, 10 clients": 10, "simulated, 100 clients": 100, "deployed, 3 nodes": 3}
MOST_BYTES = 4e9
"""Of all messages of a round: Flower holds them in memory, some of them several times."""
SECONDS = 1200.0
HEAD = """\
| where | d | strategy | MB a round | seconds a round | beside FedAvg | sites' work, s | server's GB |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """What is run: FedAvg where there are no objectives, and `warm` only where sites are deployed."""

    place: str
    size: str
    objectives: int = 0
    warm: bool = True

    @property
    def name(self) -> str:
        if not self.objectives:
            return "FedAvg of Flower"
        return f"FSMGDA, S = {self.objectives}" + ("" if self.warm else ", not warm")

    @property
    def bytes(self) -> int:
        """Of the tensors of a round, down and up."""
        return PLACES[self.place] * (1 + (self.objectives or 1)) * 4 * SIZES[self.size]

    def settings(self, rounds: int) -> dict[str, int]:
        return {
            "parameters": SIZES[self.size],
            "objectives": self.objectives,
            "sites": PLACES[self.place],
            "rounds": rounds,
        }


@dataclass(frozen=True)
class Measured:
    """A case's numbers; None and why where there are none."""

    case: Case
    seconds: float | None = None
    """Of a round."""
    work: float | None = None
    """Of it, what the sites computed: seconds of all of them together."""
    memory: float | None = None
    """Bytes that the server's process took."""
    ratio: float | None = None
    why: str = ""


def cases(places: list[str], sizes: list[str]) -> Iterator[Case]:
    for place in places:
        for size in sizes:
            yield Case(place, size)
            for objectives in OBJECTIVES:
                yield Case(place, size, objectives)
                if place.startswith("deployed") and objectives == 2:
                    yield Case(place, size, objectives, warm=False)


def read(case: Case, text: str, why: str) -> Measured:
    """What the server said: medians over the rounds after the first. `why` is said without them."""
    from flower_apps import SAID

    said: dict[str, list[float]] = {}
    for line in text.splitlines():
        if SAID in line:
            each = json.loads(line.partition(SAID)[2])
            said.setdefault(each["what"], []).append(each["value"])
    gaps = [b - a for a, b in pairwise(said.get("round", []))][1:]
    if "memory" not in said:
        print(*text.splitlines()[-30:], sep="\n", file=sys.stderr, flush=True)
        why = f"{len(said.get('work', []))} rounds, then {why}"
    if not gaps:
        return Measured(case, why=why)
    memory = said["memory"][0] if "memory" in said else None
    return Measured(
        case, median(gaps), median(said["work"][1:]), memory, why="" if memory is not None else why
    )


# ---- simulated -------------------------------------------------------------------------------


def simulate(case: Case, rounds: int) -> Measured:
    """One case in a process of its own, so that its peak of memory is its own."""
    from flower_apps import SETTINGS

    env = {**os.environ, SETTINGS: json.dumps(case.settings(rounds)), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    kind = "fmol" if case.objectives else "stock"
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--simulate", kind, str(PLACES[case.place])],
            env=env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Measured(case, why=f"over {SECONDS:g} s")
    return read(case, done.stdout, done.stderr[-300:])


def run_simulation(kind: str, clients: int) -> None:
    """Flower's own simulation, in this process."""
    import flower_apps
    from flwr.simulation import run_simulation as run

    server, client = (
        (flower_apps.fmol_server, flower_apps.fmol_client)
        if kind == "fmol"
        else (flower_apps.stock_server, flower_apps.stock_client)
    )
    cores = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run(server, client, num_supernodes=clients, backend_config=cores)


# ---- deployed --------------------------------------------------------------------------------


class Deployed:
    """Three nodes that stay for all cases; they are started when the first case needs them."""

    def __init__(self, stack: ExitStack) -> None:
        from flower_deployment import deployment

        self._folder = Path(stack.enter_context(TemporaryDirectory(prefix="fmol-bench-")))
        # A fair race: both poll for tasks as often, and neither computes with more than one thread.
        env = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
        env["PYTHONPATH"] = str(Path(__file__).parent)
        self._deployment = stack.enter_context(deployment(self._folder / "d", env=env))
        self._deployment.start_nodes({f"n{i}": {"partition-id": i} for i in range(3)})
        self._apps: dict[str, Path] = {}

    def measure(self, case: Case, rounds: int) -> Measured:
        from flower_deployment import DeploymentError

        run = self._deployment.run(self._app(case), case.settings(rounds))
        try:
            status = self._deployment.wait(run, seconds=SECONDS)
        except DeploymentError:
            return Measured(case, why=f"over {SECONDS:g} s")
        return read(case, run.text(), status)

    def _app(self, case: Case) -> Path:
        from flower_deployment import write_app

        kind = "fmol" if case.objectives else "stock"
        name = f"bench{kind}" + ("warm" if case.objectives and case.warm else "")
        if name not in self._apps:
            warm = (
                "from fmol.flower.warm import keep_warm\n\n"
                'app = keep_warm("flower_apps:fmol_client")\n'
            )
            cold = f"import flower_apps\n\napp = flower_apps.{kind}_client\n"
            self._apps[name] = write_app(
                self._folder / name,
                server=f"import flower_apps\n\napp = flower_apps.{kind}_server\n",
                client=warm if name.endswith("warm") else cold,
                config=case.settings(0),
                name=name,
            )
        return self._apps[name]


# ---- the table -------------------------------------------------------------------------------


def with_ratio(measured: Measured, stock: dict[tuple[str, str], float]) -> Measured:
    case = measured.case
    if measured.seconds is None:
        return measured
    if not case.objectives:
        stock[case.place, case.size] = measured.seconds
    beside = stock.get((case.place, case.size))
    return measured if beside is None else replace(measured, ratio=measured.seconds / beside)


def row(measured: Measured) -> str:
    case = measured.case
    cells = [
        "–" if measured.seconds is None else f"{measured.seconds:.2f}",
        "" if measured.ratio is None else f"{measured.ratio:.2f}",
        "" if measured.work is None else f"{measured.work:.2f}",
        "" if measured.memory is None else f"{measured.memory / 1e9:.2f}",
    ]
    bytes = f"{case.bytes / 1e6:,.1f}"
    start = f"| {case.place} | {case.size} | {case.name} | {bytes} | "
    return start + " | ".join(cells) + f" | {measured.why}".rstrip(" |") + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = ["simulated", "deployed", *PLACES]
    parser.add_argument("--only", choices=ways, metavar="WAY", help=f"one of {'; '.join(ways)}")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    parser.add_argument("--simulate", nargs=2, metavar=("KIND", "CLIENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate:
        run_simulation(options.simulate[0], int(options.simulate[1]))
        return
    places = [place for place in PLACES if place.startswith(options.only or "")]
    done: list[Measured] = []
    stock: dict[tuple[str, str], float] = {}
    print(HEAD, flush=True)
    with ExitStack() as stack:
        deployed: Deployed | None = None
        for case in cases(places, options.sizes):
            if case.bytes > MOST_BYTES:
                why = f"{case.bytes / 1e9:.0f} GB of messages in a round: left out"
                measured = Measured(case, why=why)
            elif case.place.startswith("deployed"):
                deployed = deployed or Deployed(stack)
                measured = deployed.measure(case, options.rounds)
            else:
                measured = simulate(case, options.rounds)
            done.append(with_ratio(measured, stock))
            print(row(done[-1]), flush=True)
    if options.json:
        rows: list[dict[str, Any]] = [
            {**asdict(each), "name": each.case.name, "bytes": each.case.bytes} for each in done
        ]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
