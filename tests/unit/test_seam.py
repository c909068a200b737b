"""The seam between algorithms and engines carries more than FMGDA."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import FMGDA, FSMGDA, Alone, FedAvg, Federation, fit, min_norm
from fmol.aggregate import MeanFold, gramian
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Engine, Lane, LocalConfig, Reply, Site, Work
from fmol.local import local_work
from fmol.metrics import mean_losses
from fmol.rounds import Plan, RoundReport, State
from support import federation, flat, relative

# A two-phase algorithm: clients keep their deltas; the server first asks for Gramians of single
# clients' own deltas, answers with weights, and clients send one vector each.


def descend_and_keep(ask: Ask, site: Site) -> Reply:
    if ask.phase == 0:
        reply = local_work(ask, site)
        names = sorted(reply.deltas)
        stacked = torch.stack([reply.deltas[name] for name in names])
        site.state["kept"] = stacked
        return replace(reply, deltas={}, extra={"gramian": stacked @ stacked.T})
    weights = ask.payload["weights"]
    return Reply(client=site.client.id, deltas={"mixed": weights @ site.state.pop("kept")})


class Gramians:
    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def add(self, reply: Reply, ask: Ask) -> None:
        self.seen[reply.client] = reply.extra["gramian"]

    def result(self) -> Mapping[str, Tensor]:
        return self.seen


@dataclass(frozen=True)
class TwoPhase:
    """Every client weighs its own objectives by min-norm on its own deltas; one vector goes up."""

    local: LocalConfig
    server_lr: float = 0.1
    weighting: Any = "uniform"
    shares_model: bool = True
    fail_in_round: int | None = None

    @property
    def work(self) -> Work:
        return local_work

    def init(self, problem: Federation, x: Tensor) -> State:
        return State(x)

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        problem = engine.federation
        asks = [
            plan.ask(
                client,
                state.x,
                lanes=[Lane(name, {name: 1.0}) for name in client.objectives],
                local=self.local,
            )
            for client in map(problem.client, plan.cohort)
        ]
        grams, first = engine.map(asks, Gramians(), work=descend_and_keep)
        if self.fail_in_round == plan.round:
            raise RuntimeError("the server failed between the phases")
        again = [
            Ask(
                client=ask.client,
                round=plan.round,
                phase=1,
                x=state.x,
                lanes=(Lane("mixed", dict.fromkeys(problem.names, 1.0)),),
                payload={"weights": min_norm(grams[ask.client]).weights.to(state.x)},
            )
            for ask in asks
        ]
        means, second = engine.map(
            again, MeanFold(["mixed"], state.x, "uniform"), work=descend_and_keep
        )
        x = state.x - self.server_lr * means.deltas[0]
        return State(x), RoundReport(
            round=plan.round,
            cohort=plan.cohort,
            losses=mean_losses(first.clients, problem.names, "uniform"),
            delta_norms={},
            weights=dict.fromkeys(problem.names, 0.0),
            bytes_up=first.bytes_up + second.bytes_up,
            clients=first.clients,
        )


def test_a_two_phase_algorithm_runs_through_the_seam() -> None:
    problem = federation(sizes=[5, 9, 12, 7])
    local = LocalConfig(lr=0.1, steps=2)
    result = fit(problem, TwoPhase(local), rounds=1)
    directions = []
    for client in problem.population.ids():
        one = Federation(problem.model, problem.objectives, [problem.population.get(client)])
        alone = fit(one, FMGDA(local_steps=2, local_lr=0.1, server_lr=1.0), rounds=1)
        directions.append(flat(problem.model) - flat(alone.model))
    expected = flat(problem.model) - 0.1 * torch.stack(directions).mean(0)
    assert relative(flat(result.model), expected) < 1e-12
    assert bool((result.losses[-1] < result.losses[0]).all())


def test_what_clients_keep_in_a_round_that_fails_is_forgotten() -> None:
    problem = federation()
    engine = SequentialEngine(problem, seed=0)
    algorithm = TwoPhase(LocalConfig(lr=0.1, steps=2), fail_in_round=0)
    state = algorithm.init(problem, flat(problem.model))
    plan = Plan(0, tuple(problem.population.ids()))
    with pytest.raises(RuntimeError, match="between the phases"):
        algorithm.round(state, plan, engine)
    engine.discard()
    assert engine.client_state() == {}
    kept, _ = replace(algorithm, fail_in_round=None).round(state, plan, engine)
    engine.commit()
    assert engine.client_state() == {}  # The second phase took it away again.
    fresh = SequentialEngine(problem, seed=0)
    same, _ = replace(algorithm, fail_in_round=None).round(state, plan, fresh)
    assert torch.equal(kept.x, same.x)


@dataclass(frozen=True)
class ClipThenRescale:
    """Cuts each delta to a length at the client; the server multiplies it back by a factor."""

    length: float
    factor: float

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        cut = {k: d * min(1.0, self.length / float(d.norm())) for k, d in reply.deltas.items()}
        return replace(reply, deltas=cut)

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return replace(reply, deltas={k: d * self.factor for k, d in reply.deltas.items()})


@dataclass(frozen=True)
class Log:
    """Notes in which order the halves are called."""

    name: str
    calls: list[str]

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        self.calls.append(f"{self.name} client")
        return reply

    def server(self, reply: Reply, ask: Ask) -> Reply:
        self.calls.append(f"{self.name} server")
        return reply


def test_transforms_act_at_the_client_in_order_and_at_the_server_in_reverse() -> None:
    problem = federation([("a",)], names=("a",))
    calls: list[str] = []
    algorithm = FMGDA(local_steps=1, transforms=(Log("first", calls), Log("second", calls)))
    fit(problem, algorithm, rounds=1)
    assert calls == ["first client", "second client", "second server", "first server"]


def test_a_clipped_and_rescaled_update_has_the_length_it_should_have() -> None:
    problem = federation([("a",)], names=("a",))
    plain = fit(problem, FMGDA(local_steps=2), rounds=1)
    length = plain.reports[0].delta_norms["a"]
    clipped = fit(
        problem,
        FMGDA(local_steps=2, transforms=(ClipThenRescale(length / 4, 2.0),)),
        rounds=1,
    )
    assert clipped.reports[0].delta_norms["a"] == pytest.approx(length / 2, rel=1e-12)
    moved, full = flat(clipped.model), flat(plain.model)
    start = flat(problem.model)
    torch.testing.assert_close(moved - start, (full - start) / 2, rtol=1e-9, atol=1e-14)


def test_fedavg_is_one_lane_and_one_vector_per_client() -> None:
    problem = federation()
    size = problem.layout.size * 8
    fedavg = fit(problem, FedAvg(local_steps=1), rounds=1).reports[0]
    ours = fit(problem, FSMGDA(local_steps=1), rounds=1).reports[0]
    assert size * 4 <= fedavg.bytes_up < 1.5 * size * 4
    assert 3 * size * 4 <= ours.bytes_up < 3.5 * size * 4
    assert fedavg.bytes_down < 1.2 * size * 4


def test_alone_sends_nothing_and_keeps_each_clients_own_model_at_the_client() -> None:
    problem = federation([("a", "b"), ("c",)], sizes=[6, 9])
    result = fit(problem, Alone(local_steps=3, batch_size=None, local_lr=0.1), rounds=4)
    assert result.reports[0].bytes_up == 0
    assert torch.equal(flat(result.model), flat(problem.model))
    for client in ("c0", "c1"):
        model = copy.deepcopy(problem.model)
        holder = problem.population.get(client)
        inputs, targets = holder.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            optimizer.zero_grad()
            held = [o for o in problem.objectives if o.name in holder.objectives]
            values = [o.loss(model(inputs), targets) for o in held]
            torch.stack([v.mean() for v in values if isinstance(v, Tensor)]).mean().backward()
            optimizer.step()
        assert relative(flat(result.client_model(client)), flat(model)) < 1e-12
    assert bool((result.losses[-1] < result.losses[0]).all())
    with pytest.raises(ValueError, match="no model of its own"):
        fit(problem, FMGDA(local_steps=1), rounds=1).client_model("c0")


def test_an_error_at_a_client_says_where_it_happened() -> None:
    problem = federation()
    broken = Federation(
        problem.model,
        problem.objectives,
        [replace(problem.population.get("c0"), data=lambda: 1 / 0)],
    )
    with pytest.raises(ZeroDivisionError) as caught:
        fit(broken, FMGDA(local_steps=1), rounds=1)
    assert any("round 0" in note and "`c0`" in note for note in caught.value.__notes__)


def test_client_state_survives_a_round_trip_through_a_checkpoint() -> None:
    problem = federation([("a", "b"), ("c",)])
    algorithm = Alone(local_steps=2, batch_size=4)
    engine = SequentialEngine(problem, seed=0)
    state = algorithm.init(problem, flat(problem.model))
    cohort = tuple(problem.population.ids())
    for t in range(2):
        algorithm.round(state, Plan(t, cohort), engine)
        engine.commit()
    fresh = SequentialEngine(problem, seed=0)
    fresh.load_client_state(engine.client_state())
    algorithm.round(state, Plan(2, cohort), engine)
    algorithm.round(state, Plan(2, cohort), fresh)
    engine.commit()
    fresh.commit()
    for client, kept in engine.client_state().items():
        assert torch.equal(kept["own.x"], fresh.client_state()[client]["own.x"])


def test_the_gramian_of_kept_deltas_is_that_of_the_vectors() -> None:
    rows = torch.randn(3, 50, dtype=torch.float64)
    torch.testing.assert_close(gramian(rows), rows @ rows.T)


def test_a_refusal_in_a_later_phase_takes_back_what_the_client_kept_in_an_earlier_one() -> None:
    problem = federation([("a",)], names=("a",))
    engine = SequentialEngine(problem, seed=0)
    x = flat(problem.model)

    def work(ask: Ask, site: Site) -> Reply:
        site.state["kept"] = torch.ones(1)
        value = 0.0 if ask.phase == 0 else float("nan")
        return Reply(client="c0", losses={"a": value})

    for phase in (0, 1):
        engine.map([Ask(client="c0", round=0, phase=phase, x=x)], work=work)
    engine.commit()
    assert engine.client_state() == {}
    engine.map([Ask(client="c0", round=1, phase=0, x=x)], work=work)
    engine.commit()
    assert set(engine.client_state()) == {"c0"}


@dataclass(frozen=True)
class ErrorFeedback:
    """Sends the large entries only and keeps the rest at the client for the next round."""

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        sent = {}
        for slot, delta in reply.deltas.items():
            whole = delta + site.state.get(f"rest.{slot}", torch.zeros_like(delta))
            keep = whole.abs() >= whole.abs().median()
            sent[slot] = torch.where(keep, whole, 0)
            site.state[f"rest.{slot}"] = whole - sent[slot]
        return replace(reply, deltas=sent)

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


def test_a_transform_can_keep_something_at_the_client() -> None:
    problem = federation([("a",)], names=("a",))
    algorithm = FMGDA(local_steps=1, transforms=(ErrorFeedback(),))
    result = fit(problem, algorithm, rounds=3)
    assert float(result.client_state["c0"]["rest.a"].abs().max()) > 0
    plain = fit(problem, FMGDA(local_steps=1), rounds=1)
    first = fit(problem, algorithm, rounds=1)
    rest = first.client_state["c0"]["rest.a"]
    moved = flat(plain.model) - flat(first.model)
    torch.testing.assert_close(moved, -0.1 * rest, rtol=1e-9, atol=1e-14)
