"""Lines in the record that are written without replies say what those of the replies say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fmol import FSMGDA, Client, FedAvg, Federation, Objective, fit
from fmol.engines import VectorizedEngine, replies
from fmol.engines.lines import Lines, lines_of
from fmol.engines.seam import Ask
from fmol.result import Result
from fmol.rounds import Algorithm
from support import data, masked_error, squared_error

ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=3, batch_size=4),
    FSMGDA(local_epochs=1, batch_size=5, weighting="samples", accumulate="mean"),
    FedAvg(local_steps=3, batch_size=4),
]


def problem(
    *,
    labels: bool = True,
    loss_of: int | None = None,
    claims: int | None = None,
    scale: float = 1.0,
) -> Federation:
    """Clients that hold some objectives each, with what may be wrong with one of them."""
    loss: Any = squared_error if labels else masked_error
    objectives = [
        Objective(name, loss(s), metrics={"error": loss(s)}) for s, name in enumerate("abc")
    ]
    clients = []
    for i, held in enumerate(["abc", "ab", "c", "bc", "abc"]):
        inputs, targets = data(6 + 3 * i, seed=i)
        if not labels:
            targets[torch.arange(len(targets)) % 3 == i % 3] = math.nan
            targets[:, 0] = math.nan if i == 1 else targets[:, 0]
        if i == loss_of:
            targets[0, 2] = math.inf
        if i == 3:
            inputs = scale * inputs
        most = claims if i == 4 else None
        held_out = data(4, seed=10 + i) if i != 2 else None
        clients.append(Client(f"c{i}", (inputs, targets), tuple(held), held_out, most))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(5, 3).double()
    return Federation(model, objectives, clients)


PROBLEMS: dict[str, tuple[dict[str, Any], bool]] = {
    "all is well": ({}, True),
    "labels are missing": ({"labels": False}, False),
    "a loss is not finite": ({"loss_of": 0}, False),
    "a client claims too much": ({"claims": 3}, False),
    "a client claims what it may": ({"claims": 40}, True),
    "an update is not finite": ({"scale": 1e150}, True),
}
"""What is wrong, and whether lines are written until steps have been taken."""


REFUSED = {"a loss is not finite", "a client claims too much", "an update is not finite"}


def run(federation: Federation, algorithm: Algorithm) -> Result:
    return fit(federation, algorithm, rounds=3, engine=VectorizedEngine, device="cpu")


def told(result: Result) -> str:
    """All that the rounds said, but for times."""
    reports = [
        replace(
            report,
            seconds={},
            cosines=torch.empty(0),
            clients=tuple(record._replace(seconds=0.0) for record in report.clients),
        )
        for report in result.reports
    ]
    return repr((reports, [report.cosines.tolist() for report in result.reports]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["steps", "epochs", "mixture"])
@pytest.mark.parametrize("wrong", PROBLEMS)
def test_lines_say_what_replies_say(
    wrong: str, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, expected = PROBLEMS[wrong]
    written: list[bool] = []

    def watched(chunk: Sequence[Ask], *others: Any) -> Lines | None:
        lines = lines_of(chunk, *others)
        if chunk[0].lanes:
            written.append(lines is not None)
        return lines

    with monkeypatch.context() as patch:
        patch.setattr(replies, "lines_of", watched)
        without = run(problem(**options), algorithm)
    with monkeypatch.context() as patch:
        patch.setattr(replies, "lines_of", lambda *arguments: None)
        with_replies = run(problem(**options), algorithm)
    if isinstance(algorithm, FSMGDA):  # A mixture goes on with those that have labels.
        assert written[0] == expected
    assert bool(without.reports[0].refused) == (wrong in REFUSED)
    assert told(without) == told(with_replies)
    assert torch.equal(without.state.x, with_replies.state.x)
