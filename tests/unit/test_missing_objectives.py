"""A cohort without some objective, under each policy; never a zero vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from fmol import FMGDA, FSMGDA, Client, Federation, MissingObjectiveError, Objective, fit
from fmol.algorithms.missing import OnMissing
from fmol.federation import Population
from support import Net, data, federation, flat, masked_error


@dataclass(frozen=True)
class Scripted:
    """The cohort of each round, given beforehand; the last goes on."""

    cohorts: Sequence[tuple[str, ...]]

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        return self.cohorts[min(round, len(self.cohorts) - 1)]


HOLDINGS: list[tuple[str, ...]] = [("a",), ("b",), ("c", "b")]
ALL, WITHOUT_A = ("c0", "c1", "c2"), ("c1", "c2")


def run(policy: OnMissing, cohorts: Sequence[tuple[str, ...]], **options: int):  # type: ignore[no-untyped-def]
    algorithm = FMGDA(local_steps=2, on_missing_objective=policy, **options)  # type: ignore[arg-type]
    return fit(
        federation(HOLDINGS), algorithm, rounds=len(cohorts), participation=Scripted(cohorts)
    )


def test_skip_leaves_the_objective_out_of_the_qp_and_says_so() -> None:
    result = run("skip", [WITHOUT_A])
    report = result.reports[0]
    assert report.missing == ("a",)
    assert report.weights["a"] == 0.0
    assert sum(report.weights.values()) == pytest.approx(1, abs=1e-12)
    assert report.direction_norm_squared > 0
    assert bool(torch.isnan(report.cosines[0]).all())
    whole = federation(HOLDINGS)
    smaller = Federation(
        whole.model,
        whole.objectives[1:],
        [whole.population.get(c) for c in WITHOUT_A],
    )
    same = fit(smaller, FMGDA(local_steps=2), rounds=1)
    torch.testing.assert_close(flat(result.model), flat(same.model), rtol=1e-12, atol=1e-14)


def test_hold_leaves_the_model_as_it_was_for_that_round_only() -> None:
    result = run("hold", [WITHOUT_A, ALL])
    assert result.reports[0].held
    assert not result.reports[1].held
    assert result.reports[0].weights == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert torch.equal(result.losses[0], result.losses[1])
    assert not torch.equal(result.losses[1], result.losses[2])


def test_reuse_takes_the_last_update_up_to_its_age() -> None:
    result = run("reuse", [ALL, WITHOUT_A, WITHOUT_A, WITHOUT_A], reuse_rounds=2)
    assert [dict(r.reused) for r in result.reports] == [{}, {"a": 1}, {"a": 2}, {}]
    assert all(r.missing == ("a",) for r in result.reports[1:])
    assert result.reports[1].weights["a"] > 0
    assert result.reports[1].delta_norms["a"] == result.reports[0].delta_norms["a"]
    assert result.reports[3].weights["a"] == 0


def test_reuse_without_an_earlier_update_is_as_skip() -> None:
    reused, skipped = run("reuse", [WITHOUT_A]), run("skip", [WITHOUT_A])
    assert torch.equal(flat(reused.model), flat(skipped.model))
    assert reused.reports[0].reused == {}


@pytest.mark.parametrize("normalize", ["l2", "loss", "loss+"])
def test_reuse_works_with_normalised_updates(normalize: str) -> None:
    algorithm = FMGDA(local_steps=2, on_missing_objective="reuse", normalize=normalize)  # type: ignore[arg-type]
    cohorts = Scripted([ALL, WITHOUT_A])
    result = fit(federation(HOLDINGS), algorithm, rounds=2, participation=cohorts)
    assert result.reports[1].reused == {"a": 1}
    assert sum(result.reports[1].weights.values()) == pytest.approx(1)


def test_fail_raises_with_the_round_and_the_objective_and_what_was_reached() -> None:
    with pytest.raises(MissingObjectiveError, match=r"round 1.*objective `a`") as caught:
        run("fail", [ALL, WITHOUT_A])
    assert caught.value.result is not None
    assert len(caught.value.result.reports) == 1
    before = run("fail", [ALL])
    assert torch.equal(flat(caught.value.result.model), flat(before.model))


def test_an_empty_cohort_leaves_the_model_as_it_was() -> None:
    result = run("skip", [(), ALL])
    assert result.reports[0].held
    assert result.reports[0].missing == ("a", "b", "c")
    assert torch.equal(result.losses[0], result.losses[1])


def labelled(fraction: float, n: int = 10) -> Federation:
    """Client 0 has labels for `a` in the first `fraction` of its samples only; client 1 has all."""
    inputs, targets = data(n, seed=1)
    targets = targets.clone()
    targets[int(fraction * n) :, 0] = float("nan")
    objectives = [Objective(name, masked_error(s)) for s, name in enumerate("abc")]
    clients = [
        Client("c0", (inputs, targets), ("a", "b", "c")),
        Client("c1", data(n, seed=2), ("a", "b", "c")),
    ]
    return Federation(Net().double(), objectives, clients)


def test_the_mean_is_over_labelled_samples() -> None:
    problem = labelled(0.5)
    result = fit(problem, FMGDA(local_steps=1), rounds=1)
    record = next(r for r in result.reports[0].clients if (r.client, r.objective) == ("c0", "a"))
    inputs, targets = problem.population.get("c0").data
    values = 0.5 * (problem.model(inputs)[:5, 0] - targets[:5, 0]) ** 2
    assert record.samples == 5
    assert record.loss == pytest.approx(values.mean().item(), rel=1e-12)


@pytest.mark.parametrize("evaluate_every", [1, 100])
def test_a_client_without_any_label_does_not_hold_the_objective(evaluate_every: int) -> None:
    problem = labelled(0.0)
    result = fit(problem, FMGDA(local_steps=2), rounds=2, evaluate_every=evaluate_every)
    alone = Federation(
        problem.model,
        problem.objectives,
        [
            Client("c0", problem.population.get("c0").data, ("b", "c")),
            problem.population.get("c1"),
        ],
    )
    same = fit(alone, FMGDA(local_steps=2), rounds=2)
    assert torch.equal(flat(result.model), flat(same.model))
    record = next(r for r in result.reports[1].clients if (r.client, r.objective) == ("c0", "a"))
    assert record.samples == 0


def test_an_objective_nobody_has_a_label_for_is_missing_and_not_zero() -> None:
    problem = labelled(0.0)
    one = Federation(problem.model, problem.objectives, [problem.population.get("c0")])
    result = fit(one, FMGDA(local_steps=2), rounds=1)
    assert result.reports[0].missing == ("a",)
    assert result.reports[0].direction_norm_squared > 0
    assert bool(torch.isnan(result.losses[:, 0]).all())


def test_a_batch_without_labels_is_a_step_that_does_not_move() -> None:
    """One labelled sample among ten, batches of one: nine of ten steps stand still."""
    problem = labelled(0.1)
    one = Federation(problem.model, problem.objectives, [problem.population.get("c0")])
    epoch = fit(one, FSMGDA(local_epochs=1, batch_size=1, local_lr=0.3), rounds=1)
    inputs, targets = problem.population.get("c0").data
    loss = 0.5 * (problem.model(inputs[:1])[0, 0] - targets[0, 0]) ** 2
    grads = torch.autograd.grad(loss, list(problem.model.parameters()), allow_unused=True)
    length = torch.cat([g.reshape(-1) for g in grads if g is not None]).norm()
    assert epoch.reports[0].delta_norms["a"] == pytest.approx(float(length), rel=1e-12)


def test_an_objective_whose_batches_all_lack_labels_is_missing_in_that_round() -> None:
    problem = labelled(0.1)
    one = Federation(problem.model, problem.objectives, [problem.population.get("c0")])
    result = fit(one, FSMGDA(local_steps=1, batch_size=1), rounds=12)
    missing = [("a" in report.missing) for report in result.reports]
    assert any(missing)
    assert not all(missing)
    assert all(report.direction_norm_squared > 0 for report in result.reports)


def test_a_mean_is_over_all_steps_those_without_a_label_included() -> None:
    problem = labelled(0.1)
    one = Federation(problem.model, problem.objectives, [problem.population.get("c0")])
    total = fit(one, FSMGDA(local_epochs=1, batch_size=1, local_lr=0.3), rounds=1)
    mean = fit(one, FSMGDA(local_epochs=1, batch_size=1, local_lr=0.3, accumulate="mean"), rounds=1)
    for name in "abc":
        tenth = total.reports[0].delta_norms[name] / 10
        assert mean.reports[0].delta_norms[name] == pytest.approx(tenth, rel=1e-12)


def test_a_reused_update_is_normalised_by_the_loss_of_its_own_round() -> None:
    algorithm = FMGDA(local_steps=2, on_missing_objective="reuse", normalize="loss")
    result = fit(
        federation(HOLDINGS), algorithm, rounds=3, participation=Scripted([ALL, ALL, WITHOUT_A])
    )
    last = result.state.memory["last_losses"]
    assert float(last[0]) == result.reports[1].losses["a"]
    assert float(last[1]) == pytest.approx(result.reports[2].losses["b"])
