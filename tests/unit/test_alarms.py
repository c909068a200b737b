"""Alarms tell a stall's two causes apart, name names, and keep quiet otherwise."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fmol import FMGDA, Client, FedAvg, Federation, Objective, fit
from fmol.alarms import find_alarms
from fmol.federation import ClientList
from fmol.problems.quadratic import Quadratic
from fmol.rounds import RoundReport
from fmol.rules import Context, Fixed
from support import federation


def report(
    round: int,
    weights: Mapping[str, float],
    norms: Mapping[str, float],
    losses: Mapping[str, float],
    spread: Mapping[str, float] | None = None,
    protected: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
) -> RoundReport:
    return RoundReport(
        round=round,
        cohort=("x",),
        losses=losses,
        delta_norms=norms,
        weights=weights,
        spread=spread or dict.fromkeys(weights, 1.0),
        protected=protected,
        missing=missing,
    )


PLAIN = FMGDA(local_steps=1)
CLIENTS = ClientList(Client(f"site-{i}", None, ("a", "b")) for i in range(7))


def stalled(rounds: int, spread: float = 1.0, improvement: float = 0.0) -> list[RoundReport]:
    return [
        report(
            t,
            {"a": 0.99, "b": 0.01},
            {"a": 0.01, "b": 1.0},
            {"a": 0.001, "b": 0.2 * (1 - improvement) ** t},
            {"a": spread, "b": 1.5},
        )
        for t in range(rounds)
    ]


def test_a_stall_is_said_after_ten_rounds_and_not_before() -> None:
    assert find_alarms(stalled(9), CLIENTS, PLAIN) == ()
    (alarm,) = find_alarms(stalled(10), CLIENTS, PLAIN)
    assert (alarm.kind, alarm.objective, alarm.since, alarm.cause) == ("stall", "a", 0, "solved")


def test_a_stall_alarm_names_the_numbers_the_holders_and_the_remedy() -> None:
    (alarm,) = find_alarms(stalled(10), CLIENTS, PLAIN)
    for part in (
        "`a`",
        "99.0%",
        "round 0",
        "0.01",
        "`b`",
        "`site-0`",
        "2 more",
        "normalize",
        "target",
    ):
        assert part in alarm.message


def test_clients_that_cancel_one_another_are_told_from_a_solved_objective() -> None:
    (alarm,) = find_alarms(stalled(10, spread=10_000.0), CLIENTS, PLAIN)
    assert alarm.cause == "cancelled"
    assert "cancel" in alarm.message


def lengths(own: float, agree: float, others: float = 3.0) -> list[RoundReport]:
    """Ten rounds of a stall by `a`: its clients' own updates and how often as long they are as their
    mean, which goes up and down with the batches; those of `b` have length 6."""
    reports = []
    for t in range(10):
        times = agree * (1.5 if t % 2 else 0.7)
        reports.append(
            report(
                t,
                {"a": 0.99, "b": 0.01},
                {"a": own / times, "b": 6 / others},
                {"a": 0.058, "b": 0.2},
                {"a": times**2, "b": others**2},
            )
        )
    return reports


def causes(reports: list[RoundReport]) -> list[str]:
    """Of the stall after each round, as in a run, which knows the alarms of the rounds before."""
    known: list[RoundReport] = []
    for i, each in enumerate(reports):
        known.append(replace(each, round=i))
        known[-1] = replace(known[-1], alarms=find_alarms(known, CLIENTS, PLAIN))
    return [alarm.cause for each in known for alarm in each.alarms]


def test_a_nearly_solved_objective_is_not_called_cancelled_because_batches_differ() -> None:
    """Noise of batches alone makes ρ large: what tells is by how much the others' is smaller."""
    (alarm,) = find_alarms(lengths(0.76, agree=8), CLIENTS, PLAIN)
    assert alarm.cause == "solved"
    assert "of length 0.76 beside the others' 6" in alarm.message
    assert "large" not in alarm.message


def test_a_cancelled_update_is_told_by_numbers_that_can_be_compared() -> None:
    (alarm,) = find_alarms(lengths(3.0, agree=40), CLIENTS, PLAIN)
    assert alarm.cause == "cancelled"
    assert "of length 3 beside the others' 6" in alarm.message
    assert re.search(
        r"are 3[0-9.]+ times as long as their mean \(the others' 3 times\)", alarm.message
    )


def test_the_cause_does_not_change_from_round_to_round_with_the_batches() -> None:
    for own, agree in ((0.76, 8), (3.0, 40)):
        assert len(set(causes(2 * lengths(own, agree)))) == 1


def test_the_cause_changes_where_the_other_clearly_tells_more() -> None:
    nearly_even = causes(lengths(0.76, agree=8) + 2 * lengths(1.0, agree=18))
    assert set(nearly_even) == {"solved"}
    assert causes(lengths(0.76, agree=8) + 2 * lengths(3.0, agree=40))[-1] == "cancelled"


@pytest.mark.parametrize("spread", [1.0, 10_000.0])
def test_whatever_the_cause_normalising_is_advised_first(spread: float) -> None:
    (alarm,) = find_alarms(stalled(10, spread), CLIENTS, PLAIN)
    advice = alarm.message.partition("2 more. ")[2]
    assert advice.startswith("Set `normalize=")
    assert '"l2"' in advice
    assert '"loss"' in advice


def test_clients_that_cancel_to_nothing_are_told_so() -> None:
    reports = [
        replace(r, delta_norms={"a": 0.0, "b": 1.0}, spread={"a": math.inf, "b": 1.5})
        for r in stalled(10)
    ]
    (alarm,) = find_alarms(reports, CLIENTS, PLAIN)
    assert alarm.cause == "cancelled"
    assert "cancel to nothing" in alarm.message


def test_no_alarm_while_the_others_still_improve() -> None:
    assert find_alarms(stalled(10, improvement=0.01), CLIENTS, PLAIN) == ()


def test_no_alarm_for_a_dominant_objective_with_a_long_update() -> None:
    reports = [
        report(t, {"a": 0.99, "b": 0.01}, {"a": 0.5, "b": 1.0}, {"a": 0.1, "b": 0.2})
        for t in range(12)
    ]
    assert find_alarms(reports, CLIENTS, PLAIN) == ()


def starving(
    rounds: int, slope: float, protected: tuple[str, ...] = (), missing: tuple[str, ...] = ()
) -> list[RoundReport]:
    weights, norms = {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}
    return [
        report(
            t,
            weights,
            norms,
            {"a": 0.1, "b": 1 + slope * t},
            protected=protected,
            missing=missing,
        )
        for t in range(rounds)
    ]


def test_starvation_is_said_after_twenty_rounds_of_a_rising_loss() -> None:
    assert find_alarms(starving(19, 0.01), CLIENTS, PLAIN) == ()
    (alarm,) = find_alarms(starving(20, 0.01), CLIENTS, PLAIN)
    assert (alarm.kind, alarm.objective) == ("starvation", "b")
    assert "rose from 1 to 1.19" in alarm.message
    assert find_alarms(starving(20, -0.01), CLIENTS, PLAIN) == ()


def test_a_loss_that_rises_by_less_than_a_hundredth_does_not_starve() -> None:
    assert find_alarms(starving(20, 0.0004), CLIENTS, PLAIN) == ()
    assert find_alarms(starving(20, 0.0006), CLIENTS, PLAIN) != ()


def test_a_protected_or_missing_objective_does_not_starve() -> None:
    assert find_alarms(starving(20, 0.01, protected=("b",)), CLIENTS, PLAIN) == ()
    assert find_alarms(starving(20, 0.01, missing=("b",)), CLIENTS, PLAIN) == ()


class Point(nn.Module):
    """The parameters themselves, whatever the input: objectives are functions of x alone."""

    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.x.expand(len(inputs), -1)


def bowl(column: int) -> Objective:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs[:, column] - targets[:, column]) ** 2

    return Objective("ab"[column], loss)


def test_a_real_stall_raises_the_alarm_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """`a` starts solved up to 1e-3, `b` far away: plain FMGDA follows `a` and `b` stands still."""
    data = (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    objectives = [bowl(0), bowl(1)]
    problem = Federation(Point([1e-3, 5.0]), objectives, [Client("only", data, ("a", "b"))])
    with caplog.at_level(logging.WARNING, logger="fmol"):
        plain = fit(problem, FMGDA(local_steps=1, server_lr=0.01), rounds=30)
    assert plain.reports[8].alarms == ()
    alarm = plain.reports[-1].alarms[0]
    assert (alarm.kind, alarm.objective, alarm.cause, alarm.since) == ("stall", "a", "solved", 0)
    assert "`only`" in alarm.message
    assert sum("stall" in message for message in caplog.messages) == 1
    assert float(plain.losses[-1, 1]) > 0.99 * float(plain.losses[0, 1])
    for options in ({"normalize": "loss"}, {"normalize": "l2"}, {"normalize": "loss+"}):
        freed = fit(problem, FMGDA(local_steps=1, server_lr=0.01, **options), rounds=30)  # type: ignore[arg-type]
        assert float(freed.losses[-1, 1]) < 0.95 * float(freed.losses[0, 1])
        assert all(r.min_cosine > 0 for r in freed.reports)


def test_clients_that_cancel_are_found_in_a_real_run() -> None:
    """Two clients pull `a` apart with equal force: its mean update is nearly zero."""
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    left = torch.tensor([[5.0, 0.0]], dtype=torch.float64).expand(2, 2)
    right = torch.tensor([[-5.001, 0.0]], dtype=torch.float64).expand(2, 2)
    clients = [Client("l", (zeros, left), ("a", "b")), Client("r", (zeros, right), ("a", "b"))]
    problem = Federation(Point([0.0, 5.0]), [bowl(0), bowl(1)], clients)
    result = fit(problem, FMGDA(local_steps=1, server_lr=0.01), rounds=12)
    alarm = result.reports[-1].alarms[0]
    assert (alarm.kind, alarm.objective, alarm.cause) == ("stall", "a", "cancelled")
    assert result.reports[-1].spread["a"] > 1000


def test_a_starving_objective_is_found_in_a_real_run() -> None:
    """All the weight on `a`, whose way leads away from what is good for `b`."""
    zeros = torch.zeros(2, 1, dtype=torch.float64)
    targets = torch.zeros(2, 2, dtype=torch.float64)

    def away(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs[:, 0] - 3) ** 2

    objectives = [bowl(0), Objective("b", away)]
    problem = Federation(Point([3.0, 0.0]), objectives, [Client("c", (zeros, targets), ("a", "b"))])

    def rule(gramian: Tensor, context: Context) -> Tensor:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)

    result = fit(problem, FMGDA(local_steps=1, server_lr=0.05, rule=rule), rounds=25)
    assert result.reports[18].alarms == ()
    (alarm,) = result.reports[-1].alarms
    assert (alarm.kind, alarm.objective, alarm.since) == ("starvation", "b", 0)


def test_a_protected_objective_does_not_stall_anybody() -> None:
    reports = [
        report(
            t, {"a": 0.99, "b": 0.01}, {"a": 0.01, "b": 1.0}, {"a": 0.001, "b": 0.2},
            protected=("a",),
        )
        for t in range(12)
    ]  # fmt: skip
    assert find_alarms(reports, CLIENTS, PLAIN) == ()


def test_a_fixed_weighting_raises_no_alarm() -> None:
    assert find_alarms(starving(20, 0.01), CLIENTS, FedAvg(local_steps=1)) == ()


def test_the_advice_is_not_what_is_set_already() -> None:
    for normalize in ("loss", "l2"):
        algorithm = FMGDA(local_steps=1, normalize=normalize)
        reports = [
            report(t, {"a": 0.9999, "b": 1e-4}, {"a": 0.01, "b": 1.0}, {"a": 0.001, "b": 0.2})
            for t in range(10)
        ]
        (alarm,) = find_alarms(reports, CLIENTS, algorithm)
        assert f'normalize="{normalize}"' not in alarm.message
        assert "target" in alarm.message
    (alarm,) = find_alarms(starving(20, 0.01), CLIENTS, FMGDA(local_steps=1, normalize="loss"))
    assert "normalize" not in alarm.message


def test_a_short_update_with_its_fair_share_of_the_step_is_no_stall_when_normalised() -> None:
    """Two unit vectors share the step evenly: the shorter one then has nearly all the weight."""
    reports = [
        report(t, {"a": 0.99, "b": 0.01}, {"a": 0.01, "b": 1.0}, {"a": 0.001, "b": 0.2})
        for t in range(12)
    ]
    assert find_alarms(reports, CLIENTS, FMGDA(local_steps=1, normalize="l2")) == ()


@pytest.mark.parametrize("every", [1, 5, 9, 10, 20])
def test_a_stall_is_found_however_seldom_losses_are_measured(every: int) -> None:
    data = (torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    problem = Federation(Point([1e-3, 5.0]), [bowl(0), bowl(1)], [Client("c", data, ("a", "b"))])
    algorithm = FMGDA(local_steps=1, server_lr=0.01)
    result = fit(problem, algorithm, rounds=45, evaluate_every=every)
    assert [alarm.kind for alarm in result.reports[-1].alarms] == ["stall"]


def test_an_objective_whose_updates_are_all_refused_raises_an_alarm_that_says_why() -> None:
    problem = federation([("a", "b"), ("a", "b", "c")])
    clients = [problem.client(id) for id in problem.population.ids()]
    inputs, targets = clients[1].data
    targets = targets.clone()
    targets[0, 2] = torch.nan
    clients[1] = replace(clients[1], data=(inputs, targets))
    broken = Federation(problem.model, problem.objectives, clients)
    for algorithm in (FMGDA(local_steps=1), FMGDA(local_steps=1, normalize="l2")):
        result = fit(broken, algorithm, rounds=5, device="cpu")
        assert not result.reports[1].alarms
        (alarm,) = result.reports[-1].alarms
        assert (alarm.kind, alarm.objective, alarm.since) == ("refused", "c", 0)
        assert "client `c1`" in alarm.message
        assert "non-finite" in alarm.message


def test_weights_that_somebody_fixed_neither_stall_nor_starve() -> None:
    problem = Quadratic(objectives=2).build()
    weights = Fixed({problem.names[0]: 1.0, problem.names[1]: 0.0})
    fixed = fit(problem, FMGDA(local_steps=1, rule=weights), rounds=30, device="cpu")
    assert fixed.reports[-1].weights[problem.names[1]] == 0
    assert not any(report.alarms for report in fixed.reports)
