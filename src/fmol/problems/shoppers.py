"""Shoppers: visits to an online shop, with groups of customers as clients.

The paper's motivating case: groups that care about different things. 12 330 sessions (UCI Online
Shoppers Purchasing Intention), and three things to foretell of each: whether it ends in a purchase,
its bounce rate, and the value of the pages it saw.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fmol.federation import Federation
from fmol.objectives import Objective, whole_set
from fmol.options import Count, Range, check_options
from fmol.partition import Indices, all_objectives, by_group, make_clients
from fmol.problems.loading import DataSet
from fmol.problems.tables import (
    AreaUnderCurve,
    BinaryAccuracy,
    BinaryCrossEntropy,
    Columns,
    Numbers,
    RootMeanSquare,
    SquaredError,
    area_under_curve,
    fetch_uci,
    find_files,
    fit_encoding,
    fit_standard,
    merge_rare,
    mlp,
    numbers,
    read_csv,
    tensor,
    truths,
)
from fmol.rng import stream

__all__ = ["OBJECTIVES", "Shoppers", "area_under_curve"]

OBJECTIVES = ("conversion", "bounce", "value")
"""The objectives in the order of the targets' columns and of the model's outputs."""

_COUNTS = ("Administrative", "Informational", "ProductRelated")
_NUMERIC = (*_COUNTS, *(f"{name}_Duration" for name in _COUNTS), "SpecialDay")
_CATEGORICAL = (
    "Month",
    "OperatingSystems",
    "Browser",
    "Region",
    "TrafficType",
    "VisitorType",
    "Weekend",
)
_GROUPS = {"region": "Region", "traffic": "TrafficType", "visitor": "VisitorType"}
_SOURCES = ("Revenue", "BounceRates", "PageValues")


@dataclass(frozen=True, kw_only=True)
class Shoppers:
    """Sessions of an online shop: customer groups with objectives of their own.

    `conversion` is the cross entropy of `Revenue`, `bounce` the squared error of `BounceRates` and
    `value` that of log(1 + `PageValues`), both in standard units of the training sessions. None of
    the three is an input: page values are computed from purchases and would give `conversion` away.
    Nor is `ExitRates`, which is `BounceRates` but for a little (correlation 0.9). Counts and
    durations enter as log(1 + x).

    A share of each group is held out, for the server and at the group's own client. Sessions that
    are alike in every column stay on one side, so that no held-out session was seen in training.
    """

    group: Literal["region", "traffic", "visitor"] = "region"
    """What makes a customer group, and so a client: region, source of traffic or kind of visitor."""
    min_group: Annotated[int, Range(least=10)] = 200
    """Groups with fewer sessions than this are merged into one client called `other`."""
    assignment: Literal["all", "one-each", "subsets"] = "subsets"
    """Every objective at every client, or at each the one or two in which its group stands out most."""
    width: Count = 32
    """Units in each of the two hidden layers."""
    test_share: Annotated[float, Range(least=0.01, below=0.9)] = 0.2
    """The share of each group that is held out."""
    seed: int = 0
    """What the model's first parameters and the held-out sessions are drawn from."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 100,
        "local_steps": 10,
        "batch_size": 64,
        "local_lr": 0.1,
        "server_lr": 0.1,
    }
    """What to train it with, where nothing else is said."""
    data_sets: ClassVar[tuple[DataSet, ...]] = (
        DataSet("online_shoppers", ("online_shoppers_intention.csv",), "UCI 468"),
    )
    """What is read."""

    def __post_init__(self) -> None:
        check_options(self)

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation, from files in `data_dir` (or `FMOL_DATA`), else from the UCI repository."""
        columns = _load(data_dir)
        groups = by_group(merge_rare(_group_names(columns, self.group), self.min_group))
        train, test = _split(columns, groups, self.test_share, self.seed)
        rows = np.concatenate(list(train.values()))
        inputs = tensor(fit_encoding(columns, _NUMERIC, _CATEGORICAL, rows)(columns))
        raw = _raw_targets(columns)
        standard = fit_standard(raw[rows])
        targets = standard(raw)
        targets[:, 0] = raw[:, 0]
        held = (
            all_objectives(OBJECTIVES, len(groups))
            if self.assignment == "all"
            else _outstanding(standard(raw), train, 1 if self.assignment == "one-each" else 2)
        )
        goals = tensor(targets)
        clients = make_clients(inputs, goals, train, held, prefix=f"{self.group}-")
        return Federation(
            model=mlp([inputs.shape[1], self.width, self.width, len(OBJECTIVES)], self.seed),
            objectives=[
                Objective(
                    OBJECTIVES[0],
                    BinaryCrossEntropy(0),
                    {"accuracy": BinaryAccuracy(0), "auc": whole_set(AreaUnderCurve(0))},
                ),
                *(
                    Objective(
                        OBJECTIVES[s], SquaredError(s), {"rmse": whole_set(RootMeanSquare(s))}
                    )
                    for s in (1, 2)
                ),
            ],
            clients=[
                replace(client, held_out=(inputs[mine], goals[mine]))
                for client, mine in zip(clients, test.values(), strict=True)
            ],
            held_out=_joined(inputs, goals, test),
        )


def _load(data_dir: str | os.PathLike[str] | None) -> Columns:
    """The table, with counts and durations as log(1 + x) and truths as 0 and 1."""
    file = "online_shoppers_intention.csv"
    found = find_files("online_shoppers", [file], data_dir)
    columns = read_csv(found[0]) if found else fetch_uci("online_shoppers", [f"{file}.xz"], 468)
    missing = [n for n in (*_NUMERIC, *_CATEGORICAL, *_SOURCES) if n not in columns]
    if missing:
        raise ValueError(
            f"the table of shoppers has no columns {missing}, got {list(columns)}. "
            "Use online_shoppers_intention.csv as the UCI repository has it (468)."
        )
    columns = dict(columns)
    for name in _NUMERIC:
        values = numbers(columns[name], f"column `{name}`")
        # Downloads of other editions mark unknown durations with −1.
        columns[name] = values if name == "SpecialDay" else np.log1p(np.maximum(values, 0.0))
    for name in ("Weekend", "Revenue"):
        columns[name] = truths(columns[name], f"column `{name}`").astype(np.int64)
    return columns


def _group_names(columns: Columns, group: str) -> npt.NDArray[np.str_]:
    text = columns[_GROUPS[group]].astype(np.str_)
    # Padded, so that clients in the order of their ids are in the order of their numbers.
    return np.char.zfill(text, 2) if group == "traffic" else text


def _raw_targets(columns: Columns) -> Numbers:
    """Revenue, bounce rate and log(1 + page value), `[n, 3]`."""
    return np.stack(
        [
            columns["Revenue"].astype(np.float64),
            numbers(columns["BounceRates"], "column `BounceRates`"),
            np.log1p(numbers(columns["PageValues"], "column `PageValues`")),
        ],
        axis=1,
    )


def _split(
    columns: Columns, groups: Mapping[str, Indices], share: float, seed: int
) -> tuple[dict[str, Indices], dict[str, Indices]]:
    """Each group's training and held-out sessions; sessions alike in every column stay together."""
    session: dict[tuple[str, ...], int] = {}
    texts = zip(*(column.astype(np.str_).tolist() for column in columns.values()), strict=True)
    codes = np.array([session.setdefault(row, len(session)) for row in texts], dtype=np.int64)
    train, test = {}, {}
    for name, members in groups.items():
        distinct = np.unique(codes[members])
        order = stream(seed, "partition", "held_out", name).permutation(distinct)
        count = min(max(round(share * len(distinct)), 1), len(distinct) - 1)
        out = np.isin(codes[members], order[:count])
        train[name], test[name] = members[~out], members[out]
    return train, test


def _outstanding(
    standardised: Numbers, train: Mapping[str, Indices], count: int
) -> list[tuple[str, ...]]:
    """For each group the `count` objectives whose targets differ most from those of all sessions.

    What nobody would hold goes to the group that stands out most in it; with one each, to such a
    group that gives up what another has too.
    """
    # [M, S]: how many deviations a group's mean is from that of all. Relative to the other groups',
    # or the objective in which groups differ most would be everyone's.
    distance = np.abs(np.stack([standardised[rows].mean(0) for rows in train.values()]))
    distance /= np.maximum(distance.mean(0), 1e-12)
    held = [set(np.argsort(-row, kind="stable")[:count].tolist()) for row in distance]
    for s in range(len(OBJECTIVES)):
        if any(s in mine for mine in held):
            continue
        if count > 1:
            held[int(distance[:, s].argmax())].add(s)
            continue
        free = [m for m, mine in enumerate(held) if sum(mine == other for other in held) > 1]
        if free:
            held[max(free, key=lambda m: float(distance[m, s]))] = {s}
    return [tuple(OBJECTIVES[s] for s in sorted(mine)) for mine in held]


def _joined(inputs: Tensor, targets: Tensor, parts: Mapping[str, Indices]) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.sort(np.concatenate(list(parts.values()))))
    return inputs[rows], targets[rows]
