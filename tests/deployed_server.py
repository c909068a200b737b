"""The server of deployed tests: FSMGDA over whichever sites there are."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from deployed_sites import make_problem
from fmol.flower import FSMGDA
from fmol.result import Snapshot
from fmol.rounds import RoundReport

ALGORITHM: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "local_lr": 0.1, "server_lr": 0.5}
SEED = 3

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    problem = make_problem()
    strategy = FSMGDA(
        problem.model,
        problem.objectives,
        out=str(config["out"]) or None,
        min_sites=int(str(config["min-sites"])),
        patience=float(str(config["patience"])),
        on_missing_objective=config["on-missing-objective"],
        seed=SEED,
        device="cpu",
        **ALGORITHM,
    )

    def say(report: RoundReport, snapshot: Snapshot) -> None:
        print(f"ROUND {report.round} DONE AT {time.time():.3f}", flush=True)  # noqa: T201

    strategy.start(
        grid,
        num_rounds=int(str(config["num-server-rounds"])),
        timeout=float(str(config["timeout"])),
        callbacks=[say],
    )
    print("TRAINING DONE", flush=True)  # noqa: T201
