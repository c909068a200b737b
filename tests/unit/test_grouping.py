"""Runs that differ in their seed alone belong together, under a name that tells them apart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from fmol import FMGDA, fit
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
