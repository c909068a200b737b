"""A run that was interrupted ends as one that was not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fmol import (
    FMGDA,
    FSMGDA,
    MGD,
    Alone,
    Client,
    FedAvg,
    Federation,
    Objective,
    RoundReport,
    fit,
)
from fmol.algorithms import Adam, Momentum
from fmol.engines import gradients
from fmol.participation import Number
from fmol.result import Snapshot
from fmol.rounds import Algorithm, Checkpoint
from fmol.rules import Context
from support import federation, flat


def remembering(gramian: Tensor, context: Context) -> Tensor:
    """A rule with a memory: a running mean of the lengths."""
    lengths = gramian.diagonal().sqrt()
    for name, length in zip(context.names, lengths, strict=True):
        context.memory[name] = 0.5 * context.memory.get(name, length) + 0.5 * length
    weights = torch.stack([context.memory[name] for name in context.names])
    return weights / weights.sum()


ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=3, batch_size=4, local_lr=lambda t: 0.1 / (1 + t)),
    FMGDA(local_steps=2, on_missing_objective="reuse", normalize="loss"),
    FSMGDA(local_steps=2, batch_size=4, rule=remembering),
    FSMGDA(local_steps=2, batch_size=4, drift_correction="scaffold", server_step=Momentum(0.5)),
    FMGDA(local_steps=2, objective_momentum=0.5, server_step=Adam(), server_lr=0.01),
    MGD(0.1),
    FedAvg(local_steps=3, batch_size=4),
    Alone(local_steps=3, batch_size=4),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_resuming_gives_the_same_model_as_not_stopping(algorithm: Algorithm) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    options = {"seed": 3, "participation": Number(2)}
    straight = fit(problem, algorithm, rounds=7, **options)  # type: ignore[arg-type]
    for stop in (0, 1, 4):
        kept: list[Checkpoint] = []

        def interrupt(report: RoundReport, snapshot: Snapshot, at: int = stop) -> bool:
            kept.append(snapshot.checkpoint())  # noqa: B023
            return report.round == at

        fit(problem, algorithm, rounds=7, callbacks=[interrupt], **options)  # type: ignore[arg-type]
        resumed = fit(problem, algorithm, rounds=7, resume=kept[-1], **options)  # type: ignore[arg-type]
        assert torch.equal(flat(resumed.model), flat(straight.model))
        assert torch.equal(resumed.losses.nan_to_num(-1), straight.losses.nan_to_num(-1))
        assert torch.equal(resumed.weights, straight.weights)
        assert [r.round for r in resumed.reports] == list(range(7))
        for client, state in straight.client_state.items():
            for name, tensor in state.items():
                assert torch.equal(tensor, resumed.client_state[client][name])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_resuming_gives_the_same_model_with_dropout_too(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 5)  # Once before the break, and once after it.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, generator=generator)
    clients = [Client(f"c{i}", (x + i, x.sum(1, keepdim=True)), ("a",)) for i in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    loss = Objective("a", lambda out, y: ((out - y) ** 2)[:, 0])
    problem = Federation(model, [loss], clients)
    algorithm = FSMGDA(local_steps=3, batch_size=4, local_lr=0.01)
    kept: list[Checkpoint] = []

    def keep(report: RoundReport, snapshot: Snapshot) -> None:
        if report.round == 2:
            kept.append(snapshot.checkpoint())

    whole = fit(problem, algorithm, rounds=6, device="cpu", engine=engine, callbacks=[keep])
    rest = fit(problem, algorithm, rounds=6, device="cpu", engine=engine, resume=kept[0])
    assert torch.equal(flat(rest.model), flat(whole.model))


def test_a_finished_run_can_go_on() -> None:
    problem, algorithm = federation(), FSMGDA(local_steps=3, batch_size=4)
    half = fit(problem, algorithm, rounds=3)
    whole = fit(problem, algorithm, rounds=6, resume=half.checkpoint())
    assert torch.equal(flat(whole.model), flat(fit(problem, algorithm, rounds=6).model))


def test_a_checkpoint_of_another_run_is_refused() -> None:
    problem, algorithm = federation(), FSMGDA(local_steps=1)
    checkpoint = fit(problem, algorithm, rounds=1).checkpoint()
    with pytest.raises(ValueError, match="seed 0, and `seed` is 1"):
        fit(problem, algorithm, rounds=2, seed=1, resume=checkpoint)
    with pytest.raises(ValueError, match="another model or algorithm"):
        fit(
            federation(names=("a", "b"), holdings=[("a", "b")]),
            algorithm,
            rounds=2,
            resume=checkpoint,
        )
    reuse = FSMGDA(local_steps=1, on_missing_objective="reuse")
    with pytest.raises(ValueError, match="another model or algorithm"):
        fit(problem, reuse, rounds=2, resume=checkpoint)
    with pytest.raises(ValueError, match="`start` and `resume`"):
        fit(problem, algorithm, rounds=2, resume=checkpoint, start=problem.model)
