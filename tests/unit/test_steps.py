"""What the server keeps of steps and drift: missing objectives, rounds that hold, reports, warnings."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fmol import FMGDA, FSMGDA, SMGD, Client, FedAvg, Federation, FedLS, Objective, fit
from fmol.aggregate import MeanFold
from fmol.algorithms import Adam, Momentum
from fmol.algorithms.steps import MOMENTA, least_cosine, stretch
from fmol.algorithms.trouble import known_trouble
from fmol.config import read_config
from fmol.engines.seam import Ask, Lane, Reply, Site
from fmol.federation import Population
from fmol.rules import Fixed
from fmol.runs import resume, start
from support import data, federation, flat, masked_error, relative

STEPS: dict[str, Any] = {"local_steps": 3, "batch_size": 4}


@dataclass(frozen=True)
class Script:
    """The cohort of every round, as written down."""

    cohorts: Sequence[tuple[str, ...]]

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        return self.cohorts[min(round, len(self.cohorts) - 1)]


@dataclass(frozen=True)
class Same:
    """A transform that changes nothing."""

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        return reply

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return reply


def split() -> Federation:
    return federation([("a",), ("b",), ("c",)])


ALL = ("c0", "c1", "c2")


# ---- memory ----------------------------------------------------------------------------------


def test_an_objective_that_is_missing_keeps_its_smoothed_update() -> None:
    algorithm = FMGDA(local_steps=1, objective_momentum=0.5)
    two = fit(split(), algorithm, rounds=2, participation=Script([ALL, ("c1", "c2")]))
    one = fit(split(), algorithm, rounds=1, participation=Script([ALL]))
    before, after = one.state.memory[MOMENTA], two.state.memory[MOMENTA]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])
    assert two.reports[1].missing == ("a",)


def test_an_old_update_that_stands_in_is_not_added_twice() -> None:
    algorithm = FMGDA(
        local_steps=1,
        objective_momentum=0.5,
        extrapolate=True,
        on_missing_objective="reuse",
        rule=Fixed(default=1.0),
    )
    result = fit(split(), algorithm, rounds=2, participation=Script([ALL, ("c1", "c2")]))
    once = fit(split(), algorithm, rounds=1, participation=Script([ALL]))
    assert result.reports[1].reused == {"a": 1}
    assert result.reports[1].extrapolation["a"] == 1.0
    assert torch.equal(result.state.memory[MOMENTA][0], once.state.memory[MOMENTA][0])


@pytest.mark.parametrize("step", [Momentum(0.5), Adam()], ids=str)
def test_a_round_that_holds_leaves_every_memory_of_steps_as_it_was(step: Any) -> None:
    algorithm = FMGDA(
        local_steps=1, server_step=step, objective_momentum=0.5, on_missing_objective="hold"
    )
    held = fit(split(), algorithm, rounds=2, participation=Script([ALL, ("c1", "c2")]))
    once = fit(split(), algorithm, rounds=1, participation=Script([ALL]))
    assert held.reports[1].held
    assert math.isnan(held.reports[1].step_norm_squared)
    assert set(held.state.memory) == set(once.state.memory)
    for name, tensor in once.state.memory.items():
        assert torch.equal(tensor, held.state.memory[name]), name


def test_control_variates_follow_the_clients_also_in_a_round_that_holds() -> None:
    """The clients' own are committed with the round, so the server's must go along."""
    algorithm = FMGDA(local_steps=2, drift_correction="scaffold", on_missing_objective="hold")
    result = fit(split(), algorithm, rounds=2, participation=Script([ALL, ("c1", "c2")]))
    assert result.reports[1].held
    for row, (client, slot) in enumerate(zip(ALL, "abc", strict=True)):
        own = result.client_state[client][f"control.{slot}"]
        assert relative(result.state.memory["controls"][row], own) < 1e-12


def controls_agree(result: Any, weights: dict[str, float] | None = None) -> bool:
    """Whether the server's control variates are the means of those that the clients keep."""
    for row, slot in enumerate(result.federation.names):
        kept = {c: s for c, s in result.client_state.items() if f"control.{slot}" in s}
        mine = [s[f"control.{slot}"] for s in kept.values()]
        if not mine:
            if bool(result.state.memory["controls"][row].any()):
                return False
            continue
        share = torch.tensor([1.0 if weights is None else weights[c] for c in kept]).double()
        mean = (share[:, None] * torch.stack(mine)).sum(0) / share.sum()
        if relative(result.state.memory["controls"][row], mean) > 1e-12:
            return False
    return True


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("accumulate", ["sum", "mean"])
def test_the_servers_control_variate_is_the_mean_of_the_clients_whoever_takes_part(
    engine: str, weighting: Any, accumulate: Any
) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    algorithm = FSMGDA(
        local_epochs=2,
        batch_size=4,
        local_momentum=0.5,
        weighting=weighting,
        accumulate=accumulate,
        drift_correction="scaffold",
    )
    cohorts = Script([("c0", "c1"), ("c0", "c2"), ("c3",), ("c1", "c2", "c3"), ("c0",)])
    result = fit(problem, algorithm, rounds=6, participation=cohorts, engine=engine, device="cpu")
    sizes = {"c0": 5.0, "c1": 9.0, "c2": 12.0, "c3": 7.0}
    assert controls_agree(result, sizes if weighting == "samples" else None)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_clients_without_labels_have_no_control_variate(engine: str) -> None:
    clients = []
    for i, n in enumerate((6, 9, 7)):
        inputs, targets = data(n, seed=i)
        targets[:: i + 1, 0] = torch.nan  # The first client has no label for `a` at all.
        clients.append(Client(f"c{i}", (inputs, targets), ("a", "b")))
    objectives = [Objective(name, masked_error(s)) for s, name in enumerate("ab")]
    problem = Federation(federation().model, objectives, clients)
    algorithm = FSMGDA(local_steps=4, batch_size=2, drift_correction="scaffold")
    result = fit(problem, algorithm, rounds=4, engine=engine, device="cpu")
    assert "control.a" not in result.client_state["c0"]
    assert "control.b" in result.client_state["c0"]
    assert controls_agree(result)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_is_refused_leaves_no_trace_and_what_is_let_in_does(engine: str) -> None:
    problem = federation([("a", "b"), ("a", "b"), ("c",)])
    clients = [problem.client(id) for id in problem.population.ids()]
    broken = clients[1].data[1].clone()
    broken[0, 0] = torch.inf
    clients[1] = replace(clients[1], data=(clients[1].data[0], broken))
    problem = Federation(problem.model, problem.objectives, clients)
    result = fit(
        problem,
        FMGDA(local_steps=2, drift_correction="scaffold"),
        rounds=4,
        engine=engine,
        device="cpu",
    )
    assert {(r.client, r.objective) for r in result.reports[0].refused} == {("c1", "a")}
    assert set(result.client_state["c1"]) == {"control.b"}
    assert controls_agree(result)


def test_protected_objectives_shared_parameters_and_normalisation_go_with_every_step() -> None:
    problem = federation(targets={"a": 10.0})
    for step in (Momentum(0.5), Adam()):
        algorithm = FSMGDA(
            **STEPS,
            normalize="loss",
            shared="trunk.*",
            server_step=step,
            objective_momentum=0.5,
            extrapolate=True,
            drift_correction="scaffold",
            server_lr=0.01,
        )
        result = fit(problem, algorithm, rounds=4, device="cpu")
        assert result.reports[0].protected == ("a",)
        assert bool(torch.isfinite(flat(result.model)).all())
        assert bool((result.losses[-1][1:] < result.losses[0][1:]).all())


def test_smgd_takes_steps_too() -> None:
    result = fit(federation(), SMGD(4, 0.05, server_step=Momentum(0.5)), rounds=3, device="cpu")
    assert "step.m" in result.state.memory


# ---- reports ---------------------------------------------------------------------------------


def test_the_plain_steps_report_says_the_same_of_the_rule_and_of_what_was_applied() -> None:
    for report in fit(federation(), FSMGDA(**STEPS), rounds=3, device="cpu").reports:
        assert report.step_norm_squared == pytest.approx(report.direction_norm_squared)
        assert report.step_min_cosine == pytest.approx(report.min_cosine)
        assert report.extrapolation == {}


def test_extrapolation_keeps_common_descent_and_its_factors_are_those_of_the_spread() -> None:
    algorithm = FMGDA(local_steps=3, extrapolate=True, extrapolation_cap=1.5)
    result = fit(federation(), algorithm, rounds=8, device="cpu")
    for report in result.reports:
        for name, factor in report.extrapolation.items():
            assert factor == pytest.approx(min(max(report.spread[name] / 2, 1), 1.5))
        assert report.step_min_cosine > -1e-9
        assert report.gap < 1e-6
    assert max(f for r in result.reports for f in r.extrapolation.values()) > 1


def test_each_unit_is_stretched_by_the_disagreement_about_it_alone() -> None:
    problem, kept = federation(), FMGDA(local_steps=3)
    options: dict[str, Any] = {"local_steps": 3, "extrapolate": True, "extrapolation_cap": 3.0}
    plain, whole, units = (
        fit(problem, algorithm, rounds=1, device="cpu").reports[0]
        for algorithm in (
            kept,
            FMGDA(**options),
            FMGDA(**options, extrapolate_by="unit"),
        )
    )
    assert units.spread == whole.spread == plain.spread  # Of the updates as they came in.
    assert units.gap < 1e-6
    assert units.extrapolation != whole.extrapolation
    for name, factor in units.extrapolation.items():
        assert 1 <= factor <= 3, name


@pytest.mark.parametrize("fold_rows", [False, True])
def test_a_folds_means_of_units_are_those_of_the_clients(fold_rows: bool) -> None:
    problem = federation()
    layout = problem.layout
    deltas = torch.randn(
        6, layout.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    x = torch.zeros(layout.size, dtype=torch.float64)
    fold = MeanFold(["a", "b"], x, "samples", units=layout)
    slots, weights = ["a", "b", "a", "b", "a", "b"], [3.0, 1.0, 2.0, 2.0, 5.0, 1.0]
    squares = deltas.square().sum(1).tolist()
    if fold_rows:  # In two goes, the second of which finds the first one's.
        for go in (slice(4), slice(4, 6)):
            steps = [1] * len(slots[go])
            fold.add_rows(slots[go], deltas[go], weights[go], steps, squares[go])
    else:
        for slot, delta, weight in zip(slots, deltas, weights, strict=True):
            ask = Ask(client="c", round=0, x=x, lanes=(Lane(slot, {slot: 1.0}),))
            fold.add(Reply(client="c", deltas={slot: delta}, samples={slot: int(weight)}), ask)
    means = fold.result()
    assert means.unit_squares is not None
    for i, slot in enumerate(means.slots):
        mine = [k for k, name in enumerate(slots) if name == slot]
        share = torch.tensor([weights[k] for k in mine], dtype=torch.float64)
        share /= share.sum()
        assert torch.allclose(means.deltas[i], share @ deltas[mine], rtol=1e-12)
        begin, u = 0, 0
        for shape in layout.shapes:
            for part in torch.split(
                deltas[mine][:, begin : begin + math.prod(shape)],
                math.prod(shape[1:]) if len(shape) > 1 else shape[0],
                dim=1,
            ):
                want = share @ part.square().sum(1)
                assert means.unit_squares[i, u] == pytest.approx(float(want))
                u += 1
            begin += math.prod(shape)


def test_momentum_may_walk_against_an_objective_and_the_report_says_so() -> None:
    """First only `a` is there to be served, then only `b`, which pulls the other way."""

    def towards(centre: float) -> Any:
        return lambda out, y: (out[:, 0] - centre) ** 2

    model = torch.nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.zero_()
    one = torch.ones(4, 1).double()
    problem = Federation(
        model,
        [Objective("a", towards(1.0)), Objective("b", towards(-1.0))],
        [Client("c0", (one, one), ("a",)), Client("c1", (one, one), ("b",))],
    )
    algorithm = FMGDA(local_steps=1, server_lr=0.05, server_step=Momentum(0.9))
    result = fit(problem, algorithm, rounds=2, participation=Script([("c0",), ("c1",)]))
    first, second = result.reports
    assert first.step_min_cosine == pytest.approx(1.0)
    assert second.min_cosine == pytest.approx(1.0)  # The rule's direction is `b`'s own.
    longer = 0.9 * first.step_norm_squared**0.5 > second.direction_norm_squared**0.5
    assert second.step_min_cosine == pytest.approx(-1.0 if longer else 1.0)


@pytest.mark.parametrize("by", ["objective", "unit"])
def test_fedavg_reports_its_factor_and_the_length_of_its_step(by: Any) -> None:
    algorithm = FedAvg(**STEPS, extrapolate=True, extrapolate_by=by, server_step=Momentum(0.5))
    report = fit(federation(), algorithm, rounds=3, device="cpu").reports[-1]
    assert len(set(report.extrapolation.values())) == 1
    assert report.step_norm_squared > report.direction_norm_squared > 0
    assert math.isnan(report.step_min_cosine)


def test_stretching_is_bounded_by_one_and_the_cap() -> None:
    assert [stretch(rho, 3.0) for rho in (0.5, 4.0, math.inf)] == [1.0, 2.0, 3.0]


def test_a_zero_update_has_no_angle() -> None:
    products, norms = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])
    assert least_cosine(products, norms, 2.0) == pytest.approx(0.5)
    assert math.isnan(least_cosine(products[:1], norms[:1], 2.0))
    assert math.isnan(least_cosine(products, norms, 0.0))


# ---- from files and flags --------------------------------------------------------------------


def test_files_and_flags_reach_every_step() -> None:
    table = {
        "name": "fsmgda",
        "server_step": {"name": "momentum", "beta": 0.3},
        "extrapolate": True,
        "extrapolation_cap": 4.0,
        "extrapolate_by": "unit",
        "drift_correction": "scaffold",
        "objective_momentum": 0.2,
    }
    config = read_config({"problem": "multidigits", "algorithm": table})
    options = config.algorithm_options
    assert options.server_step == Momentum(0.3)  # type: ignore[attr-defined]
    again = read_config(tomllib.loads(config.to_toml()))
    assert again.algorithm_options == options
    flags = {"problem": "multidigits", "server_step": "adam,tau=0.01", "algorithm": "fedavg"}
    config = read_config({}, {**flags, "extrapolate": "true"})
    assert config.algorithm_options.server_step == Adam(tau=0.01)  # type: ignore[attr-defined]
    assert config.algorithm_options.extrapolate is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("server_step", {"name": "momentum", "beta": 1.0}, "`beta` must be a finite number"),
        ("server_step", "momentun", "Did you mean 'momentum'"),
        ("extrapolation_cap", 0.5, "`extrapolation_cap` must be a finite number of at least 1"),
        ("drift_correction", "scafold", "Did you mean 'scaffold'"),
        ("objective_momentum", -0.1, "`objective_momentum` must be a finite number of at least 0"),
        ("local_average", 1.5, "must be a finite number of at least 0 and at most 1, got 1.5"),
    ],
)
def test_what_is_wrong_with_a_step_is_said(option: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match="configuration") as error:
        read_config({"problem": "multidigits", "algorithm": {"name": "fsmgda", option: value}})
    assert words in str(error.value)


@pytest.mark.parametrize("algorithm", ["fsmgda", "fedavg"])
def test_averaged_iterates_and_control_variates_are_not_for_one_another(algorithm: str) -> None:
    table = {"name": algorithm, "local_average": 0.5, "drift_correction": "scaffold"}
    with pytest.raises(
        ValueError, match=r"`local_average` is 0\.5 and `drift_correction` 'scaffold'"
    ):
        read_config({"problem": "multidigits", "algorithm": table})


# ---- what is known to go wrong ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            FSMGDA(**STEPS, drift_correction="scaffold", server_step=Momentum(0.8)),
            "momentum of 0.8",
        ),
        (FSMGDA(**STEPS, drift_correction="scaffold", objective_momentum=0.6), "momentum of 0.6"),
        (
            FedAvg(**STEPS, drift_correction="scaffold", server_lr=0.01, server_step=Adam()),
            "of 0.9",
        ),
        (
            FedAvg(**STEPS, drift_correction="scaffold", local_momentum=0.9),
            "`local_momentum` of 0.9",
        ),
        (FSMGDA(**STEPS, drift_correction="scaffold", transforms=(Same(),)), "`transforms`"),
        (FSMGDA(**STEPS, extrapolate=True, server_step=Momentum(0.8)), "`extrapolate`"),
        (FedAvg(**STEPS, extrapolate=True, server_lr=0.4), "of 4 times `local_lr`"),
        (FedLS(**STEPS, server_lr=0.2), "of 2 times `local_lr`"),
        (SMGD(4, 0.1, server_step=Adam()), "`server_lr` 0.1"),
        (FSMGDA(**STEPS, objective_momentum=0.6, server_step=Momentum(0.6)), "6.25 times as long"),
    ],
    ids=range(10),
)
def test_a_combination_that_is_known_to_diverge_is_named_with_what_to_take(
    algorithm: Any, words: str
) -> None:
    (sentence,) = known_trouble(algorithm)
    assert words in sentence
    assert "Take" in sentence or "Leave" in sentence


@pytest.mark.parametrize(
    "algorithm",
    [
        FSMGDA(**STEPS),
        FSMGDA(**STEPS, drift_correction="scaffold", extrapolate=True, server_step=Momentum(0.5)),
        FedAvg(**STEPS, server_step=Adam(), server_lr=0.01),
        FedAvg(**STEPS, server_step=Momentum(0.9)),
        FedLS(**STEPS),
        SMGD(4, lambda t: 0.05, server_step=Adam()),
    ],
    ids=range(6),
)
def test_what_goes_well_is_not_warned_of(algorithm: Any) -> None:
    assert known_trouble(algorithm) == []


@pytest.mark.parametrize("kind", [FSMGDA, FedAvg])
def test_a_warning_is_logged_once_before_training_and_stays_in_the_first_report(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = kind(**STEPS, drift_correction="scaffold", server_step=Momentum(0.8))
    with caplog.at_level(logging.WARNING, logger="fmol"):
        result = fit(federation(), algorithm, rounds=2, device="cpu")
    (sentence,) = known_trouble(algorithm)
    assert [record.message for record in caplog.records].count(sentence) == 1
    assert result.reports[0].notes == (sentence,)
    assert result.reports[1].notes == ()


TRAINED = {
    "problem": {"name": "multidigits", "clients": 5, "samples": 8},
    "algorithm": {
        "name": "fsmgda",
        "drift_correction": "scaffold",
        "extrapolate": True,
        "objective_momentum": 0.2,
        "server_step": {"name": "momentum", "beta": 0.9},
    },
    "device": "cpu",
}


def test_a_command_says_it_before_it_trains(tmp_path: Path) -> None:
    said: list[str] = []
    start(read_config({**TRAINED, "rounds": 1}), tmp_path / "run", say=said.append)
    assert "momentum of 0.9" in said[0]
    assert "momentum of 0.9" in (tmp_path / "run" / "summary.json").read_text(encoding="utf-8")


def test_a_run_folder_resumes_to_the_same_bits_with_all_of_it(tmp_path: Path) -> None:
    straight = start(read_config({**TRAINED, "rounds": 4}), tmp_path / "straight")
    start(read_config({**TRAINED, "rounds": 2}), tmp_path / "broken")
    resumed = resume(tmp_path / "broken", flags={"rounds": "4"})
    assert torch.equal(flat(resumed.model), flat(straight.model))
    assert resumed.client_state.keys() == straight.client_state.keys()
    for client, state in straight.client_state.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, resumed.client_state[client][name])
