"""The two apps that `benchmarks/flower.py` runs beside each other: Flower's own FedAvg, and FSMGDA.

Both train the same network on made-up numbers, one local step on sixteen samples in each round: what
is left is what messages cost. The server tells when each round was done, and at the end how much memory
it took.
"""

from __future__ import annotations

import json
import os
import resource
import time
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fmol import Client, Federation, Objective
from fmol.flower import FSMGDA, QUERY, answer, introduce
from fmol.result import Snapshot
from fmol.rounds import RoundReport

INPUTS, OUTPUTS, SAMPLES, LR = 64, 40, 16, 1e-6
SAID = "BENCHMARK "
"""Before every line that is meant for the benchmark."""
SETTINGS = "FMOL_BENCHMARK"
"""What a simulation is told, whose apps have no config: a table in JSON."""


def settings(context: Context) -> dict[str, Any]:
    """`parameters`, `objectives`, `rounds` and `sites`."""
    given = json.loads(os.environ.get(SETTINGS, "{}"))
    return {**given, **context.run_config}


def make_model(parameters: int) -> nn.Module:
    """A network with about so many parameters in four tensors."""
    width = max(1, round(parameters / (INPUTS + 1 + OUTPUTS)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, OUTPUTS))


def make_data(site: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(site)
    x = torch.randn(SAMPLES, INPUTS, generator=generator)
    return x, torch.sin(x[:, :OUTPUTS])


class ColumnLoss:
    """The squared error of one output."""

    def __init__(self, column: int) -> None:
        self.column = column

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, self.column] - targets[:, self.column]) ** 2


def make_objectives(count: int) -> list[Objective]:
    return [Objective(f"s{i:02d}", ColumnLoss(i)) for i in range(count)]


@cache
def make_site(site: int, parameters: int, objectives: int) -> Federation:
    held = make_objectives(objectives)
    client = Client(f"site-{site:03d}", make_data(site), tuple(each.name for each in held))
    return Federation(make_model(parameters), held, [client])


def say(what: str, value: float) -> None:
    print(f"{SAID}{json.dumps({'what': what, 'value': value})}", flush=True)


def say_memory() -> None:
    say("memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


# ---- Flower's own ----------------------------------------------------------------------------

stock_server = ServerApp()
stock_client = ClientApp()


@stock_server.main()
def run_stock(grid: Grid, context: Context) -> None:
    told = settings(context)
    sites = int(told["sites"])
    strategy = FedAvg(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=sites,
        min_available_nodes=sites,
    )

    def done(round: int, arrays: ArrayRecord) -> None:
        say("round", time.time())

    arrays = ArrayRecord(make_model(int(told["parameters"])).state_dict())
    result = strategy.start(grid, arrays, num_rounds=int(told["rounds"]), evaluate_fn=done)
    for metrics in result.train_metrics_clientapp.values():
        say("work", sites * float(str(metrics["seconds"])))
    say_memory()


@stock_client.train()
def train_stock(message: Message, context: Context) -> Message:
    told = settings(context)
    model = make_model(int(told["parameters"]))
    arrays = message.content.array_records["arrays"]
    model.load_state_dict(arrays.to_torch_state_dict())
    inputs, targets = make_data(int(str(context.node_config["partition-id"])))
    began = time.perf_counter()
    losses = [loss(model(inputs), targets).mean() for loss in map(ColumnLoss, range(2))]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    with torch.no_grad():  # No optimizer: importing one takes seconds in a process of its own.
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= LR * gradient
    seconds = time.perf_counter() - began
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        # Flower gives the mean of these over the sites.
        "metrics": MetricRecord({"num-examples": SAMPLES, "seconds": seconds}),
    }
    return Message(RecordDict(content), reply_to=message)


# ---- fmol ------------------------------------------------------------------------------------

fmol_server = ServerApp()
fmol_client = ClientApp()


@fmol_server.main()
def run_fmol(grid: Grid, context: Context) -> None:
    told = settings(context)
    strategy = FSMGDA(
        make_model(int(told["parameters"])),
        make_objectives(int(told["objectives"])),
        min_sites=int(told["sites"]),
        local_steps=1,
        batch_size=SAMPLES,
        local_lr=LR,
        server_lr=LR,
        device="cpu",
    )

    def done(report: RoundReport, snapshot: Snapshot) -> None:
        say("round", time.time())
        say("work", sum({each.client: each.seconds for each in report.clients}.values()))

    say("round", time.time())
    strategy.start(grid, num_rounds=int(told["rounds"]), callbacks=[done])
    say_memory()


def _site(context: Context) -> Federation:
    told = settings(context)
    number = int(str(context.node_config["partition-id"]))
    return make_site(number, int(told["parameters"]), int(told["objectives"]))


@fmol_client.query(QUERY)
def query(message: Message, context: Context) -> Message:
    return introduce(message, context, _site)


@fmol_client.train()
def train(message: Message, context: Context) -> Message:
    return answer(message, context, _site, device="cpu")


@fmol_client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return answer(message, context, _site, device="cpu")
