"""Nothing broken gets in: the model before a failing round is intact."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, Alone, Client, FedAvg, Federation, Objective, RefusedError, fit
from fmol.engines.seam import Ask, Reply, Site
from fmol.errors import LossError
from fmol.rounds import Algorithm
from support import Net, data, federation, flat, squared_error


@dataclass(frozen=True)
class Corrupt:
    """Spoils what one client sends for one slot, from some round on."""

    client_id: str
    slot: str
    value: str
    from_round: int = 0

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        hit = reply.client == self.client_id and self.slot in reply.deltas
        if not hit or ask.round < self.from_round:
            return reply
        delta = reply.deltas[self.slot].clone()
        if self.value == "nan":
            delta[3] = float("nan")
        elif self.value == "inf":
            delta[0] = float("inf")
        elif self.value == "short":
            delta = delta[:-1]
        elif self.value == "broadcastable":
            delta = delta[:1]
        elif self.value == "integers":
            delta = delta.long()
        return replace(reply, deltas={**reply.deltas, self.slot: delta})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


@pytest.mark.parametrize("value", ["nan", "inf", "short", "broadcastable", "integers"])
def test_a_broken_update_is_refused_by_name_and_the_round_goes_on(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    problem = federation()
    algorithm = FMGDA(local_steps=2, transforms=(Corrupt("c2", "b", value, from_round=1),))
    with caplog.at_level(logging.WARNING, logger="fmol"):
        result = fit(problem, algorithm, rounds=3)
    assert result.reports[0].refused == ()
    refusal = result.reports[1].refused[0]
    assert (refusal.round, refusal.client, refusal.objective) == (1, "c2", "b")
    assert "round 1, client `c2`, objective `b`" in caplog.text
    assert bool(torch.isfinite(flat(result.model)).all())
    assert bool(torch.isfinite(result.losses).all())


def test_refusing_an_update_is_the_same_as_its_sender_not_holding_the_objective() -> None:
    problem = federation()
    spoiled = FMGDA(local_steps=2, transforms=(Corrupt("c2", "b", "nan"),))
    result = fit(problem, spoiled, rounds=2)
    without = federation([("a", "b", "c")] * 2 + [("a", "c")] + [("a", "b", "c")])
    same = fit(without, FMGDA(local_steps=2), rounds=2)
    torch.testing.assert_close(flat(result.model), flat(same.model), rtol=1e-12, atol=1e-14)


ALL_BAD: list[Algorithm] = [FMGDA(local_steps=2), FedAvg(local_steps=2)]


@pytest.mark.parametrize("algorithm", ALL_BAD, ids=lambda a: type(a).__name__)
def test_when_nothing_can_be_let_in_the_run_stops_and_keeps_the_model(algorithm: Algorithm) -> None:
    calls = {"n": 0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls["n"] += 1
        factor = 1.0 if calls["n"] < 8 else float("nan")
        return factor * squared_error(0)(outputs, targets)

    problem = Federation(Net().double(), [Objective("a", loss)], [Client("only", data(6), ("a",))])
    with pytest.raises(RefusedError, match=r"round \d+, client `only`, objective `\w+`") as caught:
        fit(problem, algorithm, rounds=10)
    result = caught.value.result
    assert result is not None
    assert 0 < len(result.reports) < 10
    assert bool(torch.isfinite(flat(result.model)).all())
    assert not torch.equal(flat(result.model), flat(problem.model))


def test_a_step_that_would_break_the_model_is_refused() -> None:
    problem = federation(model=Net())

    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e30 * (outputs[:, 0] - targets[:, 0].float()) ** 2

    objectives = [Objective(name, steep) for name in "abc"]
    clients = [Client("c", (data(6)[0].float(), data(6)[1]), ("a", "b", "c"))]
    broken = Federation(problem.model, objectives, clients)
    with pytest.raises(RefusedError, match="server_lr") as caught:
        fit(broken, FMGDA(local_steps=1, server_lr=1e30), rounds=2)
    assert caught.value.result is not None
    assert torch.equal(flat(caught.value.result.model), flat(problem.model))


def test_a_claim_of_too_many_samples_is_refused() -> None:
    problem = federation([("a", "b", "c")] * 2)
    clients = [
        replace(problem.population.get("c0"), max_samples=5),
        replace(problem.population.get("c1"), max_samples=12),
    ]
    bounded = Federation(problem.model, problem.objectives, clients)
    result = fit(bounded, FSMGDA(local_steps=1, weighting="samples"), rounds=1)
    refused = {(r.client, r.objective) for r in result.reports[0].refused}
    assert refused == {("c0", name) for name in "abc"}
    assert "12 samples" in result.reports[0].refused[0].reason


def test_a_result_says_at_first_sight_that_something_was_refused_or_stalled() -> None:
    algorithm = FMGDA(local_steps=2, transforms=(Corrupt("c2", "b", "nan"),))
    result = fit(federation(), algorithm, rounds=3)
    assert "3 refused, the last: round 2, client `c2`, objective `b`" in repr(result)
    assert "refused" not in repr(fit(federation(), FMGDA(local_steps=2), rounds=3))


def test_a_reply_under_another_clients_name_is_refused() -> None:
    class Impostor:
        def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
            return replace(reply, client="c0") if reply.client == "c1" else reply

        def server(self, reply: Reply, ask: Ask) -> Reply:
            return reply

    result = fit(federation(), FMGDA(local_steps=1, transforms=(Impostor(),)), rounds=1)
    assert {refusal.client for refusal in result.reports[0].refused} == {"c1"}
    assert "`c0`" in result.reports[0].refused[0].reason


def test_a_loss_that_was_detached_is_not_taken_for_a_solved_one() -> None:
    detached = Objective("a", lambda out, y: squared_error(0)(out, y).mean().item())  # type: ignore[arg-type, return-value]
    problem = Federation(Net().double(), [detached], [Client("c", data(6), ("a",))])
    with pytest.raises(ValueError, match=r"objective `a` does not depend.*`\.item\(\)`"):
        fit(problem, FMGDA(local_steps=1), rounds=1)


def test_a_refused_client_still_counts_nothing_towards_the_losses() -> None:
    """Its loss is not let in either, so one NaN does not make the mean NaN."""
    problem = federation()
    bad = (data(6)[0] * float("inf"), data(6)[1])
    clients = [problem.population.get("c0"), Client("z", bad, ("a", "b", "c"))]
    result = fit(
        Federation(problem.model, problem.objectives, clients), FMGDA(local_steps=1), rounds=2
    )
    assert bool(torch.isfinite(result.losses).all())
    assert {r.client for r in result.reports[0].refused} == {"z"}


def nan_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    """A finite loss with a gradient of NaN, as a square root at zero has."""
    return squared_error(0)(outputs, targets) + torch.sqrt((outputs[:, 0] - outputs[:, 0]).abs())


def test_a_client_alone_whose_model_would_break_keeps_the_one_it_had() -> None:
    clients = [Client("good", data(6), ("a",)), Client("bad", data(6), ("b",))]
    objectives = [Objective("a", squared_error(0)), Objective("b", nan_gradient)]
    problem = Federation(Net().double(), objectives, clients)
    result = fit(problem, Alone(local_steps=2), rounds=3)
    assert bool(torch.isfinite(result.losses).all())
    assert {refusal.client for refusal in result.reports[0].refused} == {"bad"}
    assert bool(torch.isfinite(flat(result.client_model("good"))).all())
    with pytest.raises(ValueError, match="no model of its own"):
        result.client_model("bad")


def test_what_else_a_reply_carries_must_be_finite_too() -> None:
    class Extra:
        def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
            return replace(reply, extra={"c": torch.tensor([float("nan")])})

        def server(self, reply: Reply, ask: Ask) -> Reply:
            return reply

    result = fit(federation(), FMGDA(local_steps=1, transforms=(Extra(),)), rounds=1)
    assert {refusal.objective for refusal in result.reports[0].refused} == {"c"}
    assert not result.reports[0].held


@dataclass(frozen=True)
class Boast:
    """Claims a thousand samples."""

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        return replace(reply, samples=dict.fromkeys(reply.samples, 1000))

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


def test_a_count_beyond_what_the_server_itself_knows_is_refused_without_any_bound_set() -> None:
    algorithm = FMGDA(local_steps=1, weighting="samples", transforms=(Boast(),))
    with pytest.raises(RefusedError, match="claims 1000 samples and the server knows of 12"):
        fit(federation(), algorithm, rounds=1)


def test_a_refused_client_is_not_asked_for_its_losses_again() -> None:
    problem = federation()
    bad = (data(6)[0] * float("inf"), data(6)[1])
    clients = [problem.population.get("c0"), Client("z", bad, ("a", "b", "c"))]
    result = fit(
        Federation(problem.model, problem.objectives, clients), FMGDA(local_steps=1), rounds=1
    )
    assert sorted(r.objective for r in result.reports[0].refused) == ["a", "b", "c"]


def test_refusals_of_the_last_evaluation_are_not_lost() -> None:
    """The loss of one client overflows at x_1 only: the last row is over the other, and says so."""

    def fragile(outputs: Tensor, targets: Tensor) -> Tensor:
        values = squared_error(0)(outputs, targets)
        return values * (float("inf") if float(values.detach().mean()) != initial else 1.0)

    problem = federation([("a",), ("b",)], names=("a", "b"))
    inputs, targets = problem.population.get("c0").data
    initial = float(squared_error(0)(problem.model(inputs), targets).mean().detach())
    objectives = [Objective("a", fragile), problem.objectives[1]]
    clients = [problem.population.get(c) for c in ("c0", "c1")]
    result = fit(Federation(problem.model, objectives, clients), FMGDA(local_steps=1), rounds=1)
    assert [(r.client, r.objective) for r in result.final.refused] == [("c0", "a")]
    assert "1 refused" in repr(result)


def test_a_server_half_that_fails_says_for_whom() -> None:
    class Broken:
        def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
            return reply

        def server(self, reply: Reply, ask: Ask) -> Reply:
            raise RuntimeError("cannot unpack")

    with pytest.raises(RuntimeError, match="unpack") as caught:
        fit(federation(), FMGDA(local_steps=1, transforms=(Broken(),)), rounds=1)
    assert any("client `c0`" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("normalize", ["loss", "loss+"])
def test_a_negative_loss_ends_the_run_with_what_was_reached(normalize: str) -> None:
    """The loss falls below zero after some rounds; the rounds before it are not lost."""
    base = federation([("a", "b", "c")] * 2)
    level = float(fit(base, FMGDA(local_steps=3), rounds=6).losses[-1, 0])
    objectives = [
        Objective("a", lambda out, y: squared_error(0)(out, y) - level),
        *base.objectives[1:],
    ]
    clients = [base.population.get(c) for c in base.population.ids()]
    algorithm = FMGDA(local_steps=3, server_lr=0.3, normalize=normalize)  # type: ignore[arg-type]
    with pytest.raises(
        LossError, match=r"round \d+: objective `a` has a training loss of -"
    ) as caught:
        fit(Federation(base.model, objectives, clients), algorithm, rounds=200)
    assert caught.value.result is not None
    assert len(caught.value.result.reports) > 0


def test_losses_that_did_not_arrive_are_not_silently_done_without() -> None:
    class Mute:
        def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
            return replace(reply, losses={})

        def server(self, reply: Reply, ask: Ask) -> Reply:
            return reply

    algorithm = FMGDA(local_steps=1, normalize="loss", transforms=(Mute(),))
    with pytest.raises(LossError, match="objective `a` has a training loss of nan"):
        fit(federation(), algorithm, rounds=1)
