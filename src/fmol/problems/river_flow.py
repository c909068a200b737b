"""River flow: eight sites of the Mississippi, forecast two days ahead (RF1 of the Mulan collection).

Each row is an hour: the flow at eight sites now and 6 to 60 hours ago (64 inputs), and the flow at
each 48 hours later (8 targets). Two separate series are joined in one file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from fmol.federation import Federation
from fmol.objectives import Objective, whole_set
from fmol.options import Count, Range, check_options
from fmol.partition import (
    Indices,
    all_objectives,
    blocks,
    iid,
    make_clients,
    one_each,
    random_subsets,
)
from fmol.problems.loading import DataSet
from fmol.problems.tables import (
    Columns,
    Numbers,
    RootMeanSquare,
    SquaredError,
    fetch_openml,
    find_files,
    fit_standard,
    mlp,
    read_arff,
    tensor,
)
from fmol.rng import stream

__all__ = ["HORIZON", "JOINT", "LAG", "ROWS", "SITES", "RiverFlow", "blocked_split"]

SITES = ("CHSI2", "NASI2", "EADM7", "SCLM7", "CLKM7", "VALI2", "NAPM7", "DLDI4")
"""The sites in the file's order, which is that of the objectives and of the model's outputs."""
HORIZON = 48
"""A row's targets lie this many rows ahead: they are the inputs `SITE__0` of that later row."""
LAG = 60
"""A row's inputs reach this many rows back."""
ROWS, JOINT = 9125, 4108
"""The number of rows, and the row (from 0) at which the second series begins, its lags missing anew."""


@dataclass(frozen=True, kw_only=True)
class RiverFlow:
    """Eight forecasts of one river's flow, an objective each, held out without leakage.

    The last `test_share` of each of the two series is held out and the `gap` rows before it belong
    to nobody. A row touches the hours from 60 before it to 48 after it, so with the default gap of
    108 no measured value is on both sides. Missing inputs (the first 60 rows of each series) become
    training means; inputs and targets are in standard units of the training rows, without which the
    sites' scales (40-fold apart), not their difficulty, would make the min-norm weights.
    """

    # The upper bounds leave each series training rows enough for its share of clients.
    clients: Annotated[int, Range(least=1, below=1000)] = 10
    """How many clients there are."""
    partition: Literal["blocks", "iid"] = "blocks"
    """Each client a stretch of time of one series, or rows dealt at random."""
    assignment: Literal["all", "one-each", "subsets"] = "all"
    """Every site's forecast at every client, one each, or a random two to four."""
    width: Count = 64
    """Units in each of the two hidden layers."""
    test_share: Annotated[float, Range(least=0.01, below=0.8)] = 0.2
    """The share of each series, at its end, that is held out."""
    gap: Annotated[int, Range(least=HORIZON, below=500)] = LAG + HORIZON
    """Rows left out between training and held-out rows; under 48 a held-out target is an input."""
    client_test_samples: Annotated[int, Range(least=0)] = 64
    """Held-out rows that each client has of its own, of the series that its rows are of; 0 for none."""
    seed: int = 0
    """What the model's first parameters and every random split are drawn from."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 100,
        "local_steps": 10,
        "batch_size": 64,
        "local_lr": 0.02,
        "server_lr": 0.02,
    }
    """What to train it with, where nothing else is said."""
    data_sets: ClassVar[tuple[DataSet, ...]] = (
        DataSet("mulan_mtr", ("rf1.arff",), "OpenML 41483"),
    )
    """What is read."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        least = {
            '`partition="blocks"`': 2 if self.partition == "blocks" else 1,
            '`assignment="one-each"`': len(SITES) if self.assignment == "one-each" else 1,
            '`assignment="subsets"`': 2 if self.assignment == "subsets" else 1,
        }
        return [
            f"{option} needs {count} `clients`, got {self.clients}."
            for option, count in least.items()
            if self.clients < count
        ]

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation, from files in `data_dir` (or `FMOL_DATA`), else from OpenML."""
        inputs, targets = _load(data_dir)
        train, test = blocked_split(ROWS, (JOINT,), self.test_share, self.gap)
        inputs = fit_standard(inputs[train])(inputs)
        targets = fit_standard(targets[train])(targets)
        parts = (
            iid(len(train), self.clients, self.seed)
            if self.partition == "iid"
            else blocks(len(train), self.clients, [int(np.searchsorted(train, JOINT))])
        )
        held = (
            all_objectives(SITES, self.clients)
            if self.assignment == "all"
            else one_each(SITES, self.clients)
            if self.assignment == "one-each"
            # Two clients can cover eight sites with four each; more clients mostly hold fewer.
            else random_subsets(SITES, self.clients, size=(2, 4), seed=self.seed)
        )
        clients = make_clients(tensor(inputs[train]), tensor(targets[train]), parts, held)
        if self.client_test_samples:
            own = [self._own_test(i, train[part], test) for i, part in enumerate(parts)]
            clients = [
                replace(client, held_out=(tensor(inputs[rows]), tensor(targets[rows])))
                for client, rows in zip(clients, own, strict=True)
            ]
        return Federation(
            model=mlp([inputs.shape[1], self.width, self.width, len(SITES)], self.seed),
            objectives=[
                Objective(site, SquaredError(s), {"rmse": whole_set(RootMeanSquare(s))})
                for s, site in enumerate(SITES)
            ],
            clients=clients,
            held_out=(tensor(inputs[test]), tensor(targets[test])),
        )

    def _own_test(self, client: int, mine: Indices, test: Indices) -> Indices:
        """Held-out rows for a client with the rows `mine`: of its series, or of both if it has both."""
        first, second = bool((mine < JOINT).any()), bool((mine >= JOINT).any())
        rows = test[((test < JOINT) & first) | ((test >= JOINT) & second)]
        generator = stream(self.seed, "problem", "own test", client)
        chosen = generator.permutation(rows)[: self.client_test_samples]
        return np.sort(chosen)


def blocked_split(
    rows: int, joints: tuple[int, ...], test_share: float, gap: int
) -> tuple[Indices, Indices]:
    """Training and held-out rows: the end of each series is held out, `gap` rows before it unused.

    `joints` are the rows at which another series begins; nothing is carried over them.

    >>> train, test = blocked_split(20, (10,), test_share=0.2, gap=3)
    >>> train.tolist(), test.tolist()
    ([0, 1, 2, 3, 4, 10, 11, 12, 13, 14], [8, 9, 18, 19])
    """
    train, test = [], []
    for series in np.split(np.arange(rows, dtype=np.int64), joints):
        held_out = round(test_share * len(series))
        train.append(series[: max(len(series) - held_out - gap, 0)])
        test.append(series[len(series) - held_out :])
    return np.concatenate(train), np.concatenate(test)


def _load(data_dir: str | os.PathLike[str] | None) -> tuple[Numbers, Numbers]:
    """The inputs `[n, 64]`, NaN where missing, and the targets `[n, 8]`."""
    found = find_files("mulan_mtr", ["rf1.arff"], data_dir)
    columns: Columns = (
        read_arff(found[0]) if found else fetch_openml("mulan_mtr", ["rf1.arff.xz"], 41483)
    )
    goals = [f"{site}_48H__0" for site in SITES]
    rows = len(next(iter(columns.values())))
    # The split counts rows, so another edition of the data must not pass unnoticed.
    if list(columns)[-len(SITES) :] != goals or len(columns) != 72 or rows != ROWS:
        raise ValueError(
            f"RF1 must have {ROWS} rows of 64 inputs and then the targets {goals[0]} to {goals[-1]}, "
            f"got {rows} rows of {len(columns)} columns that end with {list(columns)[-1]}. "
            "Use rf1.arff of the Mulan collection (OpenML 41483)."
        )
    table = np.stack(list(columns.values()), axis=1).astype(np.float64)
    return table[:, : -len(SITES)], table[:, -len(SITES) :]
