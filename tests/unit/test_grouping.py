"""Runs that differ in their seed alone belong together, under a name that tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from fmol import FMGDA, FSMGDA, fit
from fmol.grouping import group_records
from fmol.record import RunRecord
from support import federation


@cache
def trained() -> RunRecord:
    return fit(federation(), FMGDA(local_steps=1), rounds=1).record()


def record(name: str, seed: int = 0, config: Mapping[str, Any] | None = None) -> RunRecord:
    base = trained()
    return RunRecord(
        name=name,
        algorithm="fsmgda",
        portrait=base.portrait,
        reports=base.reports,
        final=base.final,
        stopped=base.stopped,
        seed=seed,
        config=config or {},
    )


def config(seed: int, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "algorithm": {"name": "fsmgda", "local_lr": lr}, **more}


def groups(*records: RunRecord) -> list[tuple[str, tuple[int, ...]]]:
    return [(group.label, group.members) for group in group_records(records)]


def test_runs_that_differ_in_their_seed_alone_are_one_group_called_as_they_are() -> None:
    runs = [record(f"slow {lr}, seed {s}", s, config(s, lr)) for lr in (0.1, 0.2) for s in range(3)]
    assert groups(*runs) == [("slow 0.1", (0, 1, 2)), ("slow 0.2", (3, 4, 5))]


def test_runs_of_a_sweep_lose_the_seed_of_their_names() -> None:
    runs = [
        record(f"local_lr={lr},seed={s}", s, config(s, lr)) for lr in (0.1, 0.2) for s in (0, 1)
    ]
    assert groups(*runs) == [("local_lr=0.1", (0, 1)), ("local_lr=0.2", (2, 3))]


def test_runs_that_nobody_named_are_told_apart_by_their_options() -> None:
    runs = [
        record(f"digits-fsmgda-seed{s}-20260101-00000{s}", s, config(s, lr))
        for lr in (0.1, 0.2)
        for s in (0, 1)
    ]
    labels = [label for label, _ in groups(*runs)]
    assert labels == ["FSMGDA, local_lr=0.1", "FSMGDA, local_lr=0.2"]


def test_where_and_how_it_was_computed_makes_no_other_setting() -> None:
    runs = [record(f"seed{s}", s, config(s, data_dir=f"/data{s}", threads=s + 1)) for s in (0, 1)]
    assert groups(*runs) == [("FSMGDA", (0, 1))]


def test_the_seed_of_a_problem_makes_another_setting() -> None:
    runs = [
        record("x", s, config(s, problem={"name": "digits", "seed": data}))
        for data in (0, 1)
        for s in (0, 1)
    ]
    assert groups(*runs) == [("FSMGDA, seed=0", (0, 1)), ("FSMGDA, seed=1", (2, 3))]
    assert len(groups(runs[1], runs[2])) == 2


def test_seeds_that_have_data_of_their_own_are_one_group() -> None:
    runs = [
        record(f"k{k}-seed{s}", s, config(s, k / 10, problem={"name": "digits", "seed": s}))
        for k in (1, 5)
        for s in (0, 1, 2)
    ]
    assert groups(*runs) == [("k1", (0, 1, 2)), ("k5", (3, 4, 5))]


def test_without_a_config_the_name_tells_which_runs_belong_together() -> None:
    assert groups(record("x", 0), record("y", 0), record("x", 1)) == [("x", (0, 2)), ("y", (1,))]


def test_two_runs_of_one_seed_are_never_averaged_and_have_labels_of_their_own() -> None:
    assert groups(record("x"), record("x")) == [("FSMGDA (1)", (0,)), ("FSMGDA (2)", (1,))]


def run(seed: int = 0, rounds: int = 1, name: str = "", **options: Any) -> RunRecord:
    """A run as from Python, of the same federation each time."""
    algorithm = FSMGDA(local_steps=1, batch_size=4, **options)
    return fit(federation(), algorithm, rounds=rounds, seed=seed).record(name)


def test_runs_from_python_with_other_options_are_no_seeds_of_one_setting() -> None:
    runs = [run(s, normalize=n) for n in ("none", "loss") for s in (0, 1)]
    assert groups(*runs) == [("FSMGDA, normalize=none", (0, 1)), ("FSMGDA, normalize=loss", (2, 3))]
    assert groups(runs[0], runs[3]) == [
        ("FSMGDA, normalize=none", (0,)),
        ("FSMGDA, normalize=loss", (1,)),
    ]
    assert groups(run(0), run(1, rounds=2)) == [
        ("FSMGDA, rounds=1", (0,)),
        ("FSMGDA, rounds=2", (1,)),
    ]


def test_runs_from_python_that_differ_in_a_function_are_no_seeds_of_one_setting() -> None:
    def slow(round: int) -> float:
        return 0.01

    def fast(round: int) -> float:
        return 0.1

    runs = [run(s, local_lr=lr) for s, lr in enumerate((slow, fast))]
    assert groups(*runs) == [("FSMGDA, local_lr=slow", (0,)), ("FSMGDA, local_lr=fast", (1,))]
    assert groups(run(0, local_lr=slow), run(1, local_lr=slow)) == [("FSMGDA", (0, 1))]


def test_runs_from_python_on_other_federations_are_no_seeds_of_one_setting() -> None:
    algorithm = FMGDA(local_steps=1)
    other = federation([("a", "b", "c")] * 2)
    runs = [
        fit(f, algorithm, rounds=1, seed=s).record() for s, f in enumerate((federation(), other))
    ]
    assert [members for _, members in groups(*runs)] == [(0,), (1,)]


@pytest.mark.parametrize("names", [("iid", "sharded"), ("iid, seed 0", "sharded, seed 1")])
def test_runs_from_python_that_are_called_otherwise_are_no_seeds_of_one_setting(
    names: tuple[str, str],
) -> None:
    runs = [run(s, name=name) for s, name in enumerate(names)]
    assert groups(*runs) == [("iid", (0,)), ("sharded", (1,))]
