"""Adult: foretelling income from a census, against two notions of fairness between the sexes.

A real conflict: in the data 11 % of women and 31 % of men earn more than 50 000 dollars, so whoever
predicts well treats the groups differently.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fmol.federation import Federation
from fmol.objectives import Objective, whole_set
from fmol.options import Count, Range, check_options
from fmol.partition import Indices, all_objectives, by_group, dirichlet, iid, make_clients
from fmol.problems.loading import DataSet
from fmol.problems.tables import (
    BinaryAccuracy,
    BinaryCrossEntropy,
    Columns,
    fetch_openml,
    find_files,
    fit_encoding,
    merge_rare,
    mlp,
    numbers,
    read_csv,
    tensor,
)

__all__ = ["OBJECTIVES", "Adult", "odds_gap", "odds_loss", "parity_gap", "parity_loss"]

OBJECTIVES = ("accuracy", "parity", "odds")
"""The objectives in their order."""

_NAMES = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
_FILES = ("adult.data", "adult.test")
_NUMERIC = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_CATEGORICAL = (
    "workclass",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "native-country",
)
_TEST_ROWS = 16281
_FIRST_OF_TEST, _FIRST_OF_TRAIN = 226802, 77516


@dataclass(frozen=True, kw_only=True)
class Adult:
    """Income from a census: accuracy against demographic parity and equalised odds.

    `accuracy` is the cross entropy of income, `parity` and `odds` are `parity_loss` and `odds_loss`.
    An untrained model treats all alike and is perfectly fair, so plain min-norm would stay there for
    ever: hence `tolerance`, a gap up to which fairness no longer pulls but may not be hurt.

    Inputs are standardised and one-hot by the training file; what is unknown (`?`) is a level of
    its own. The census weight `fnlwgt` is no input, nor is `education`, the words for
    `education-num`. The published test file is held out at the server.
    """

    clients: Annotated[int, Range(least=1, below=1000)] = 10
    """How many clients there are; `partition="by-group"` has as many as there are groups."""
    partition: Literal["iid", "by-group", "dirichlet"] = "iid"
    """People dealt at random, a client per group, or shares of each income from Dirichlet."""
    group: Literal["occupation", "education", "workclass"] = "occupation"
    """The column whose values are the clients of `partition="by-group"`."""
    min_group: Annotated[int, Range(least=10)] = 500
    """Groups with fewer people than this are merged into one client called `other`."""
    alpha: Annotated[float, Range(least=1e-3)] = 0.5
    """How alike the clients of `partition="dirichlet"` are: 0.1 very different, 100 nearly alike."""
    sex_as_input: bool = False
    """Whether the model sees a person's sex; without it, other inputs still tell much of it."""
    tolerance: Annotated[float, Range(least=0, below=1)] = 0.05
    """The gap between the sexes at which fairness is reached (a `target`); 0 lets it pull always."""
    width: Count = 32
    """Units in each of the two hidden layers."""
    seed: int = 0
    """What the model's first parameters and every random split are drawn from."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 100,
        "local_steps": 10,
        "batch_size": 256,
        "local_lr": 1.0,
        "server_lr": 1.0,
    }
    """What to train it with, where nothing else is said."""
    data_sets: ClassVar[tuple[DataSet, ...]] = (DataSet("adult", _FILES, "OpenML 1590"),)
    """What is read."""

    def __post_init__(self) -> None:
        check_options(self)

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation, from files in `data_dir` (or `FMOL_DATA`), else from OpenML."""
        train, test = _load(data_dir)
        categorical = (*_CATEGORICAL, "sex") if self.sex_as_input else _CATEGORICAL
        encoding = fit_encoding(train, _NUMERIC, categorical, np.arange(len(train["sex"])))
        inputs, targets = tensor(encoding(train)), _targets(train)
        parts = self._parts(train, targets[:, 0])
        target = self.tolerance**2 or None
        return Federation(
            model=mlp([inputs.shape[1], self.width, self.width, 1], self.seed),
            objectives=[
                Objective("accuracy", BinaryCrossEntropy(0), {"accuracy": BinaryAccuracy(0)}),
                Objective("parity", parity_loss, {"gap": whole_set(parity_gap)}, target),
                # Two squared gaps, of those with low and of those with high income.
                Objective("odds", odds_loss, {"gap": whole_set(odds_gap)}, target and 2 * target),
            ],
            clients=make_clients(
                inputs,
                targets,
                parts,
                all_objectives(OBJECTIVES, len(parts)),
                prefix=f"{self.group}-" if self.partition == "by-group" else "client-",
            ),
            held_out=(tensor(encoding(test)), _targets(test)),
        )

    def _parts(self, train: Columns, labels: Tensor) -> Sequence[Indices] | Mapping[str, Indices]:
        if self.partition == "iid":
            return iid(len(labels), self.clients, self.seed)
        if self.partition == "dirichlet":
            return dirichlet(labels, self.clients, self.alpha, self.seed, min_samples=10)
        column = train[self.group]
        return by_group(merge_rare(np.where(column == "?", "unknown", column), self.min_group))


def parity_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared gap between the sexes' mean predicted probabilities: a scalar of the set.

    `outputs` `[B, 1]` are logits; `targets` `[B, 2]` are income and sex (1 for women). A set without
    one of the groups has no gap: it gives zero, with a gradient of zero.

    >>> targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> parity_loss(torch.tensor([[100.0], [-100.0]]), targets).item()
    1.0
    """
    probability = torch.sigmoid(outputs[:, 0])
    return _difference(probability, targets[:, 1], torch.ones_like(probability)) ** 2


def odds_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared gap among those with low income plus that among those with high: a scalar.

    As `parity_loss`, given the label: zero for equalised odds. An income at which a set has one of
    the sexes only adds zero.
    """
    probability, income = torch.sigmoid(outputs[:, 0]), targets[:, 0]
    return sum(
        (_difference(probability, targets[:, 1], given) ** 2 for given in (1 - income, income)),
        start=torch.zeros_like(probability[:0].sum()),
    )


def parity_gap(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute difference between the shares of each sex for whom high income is predicted."""
    decision = (outputs[:, 0] > 0).double()
    return _difference(decision, targets[:, 1].double(), torch.ones_like(decision)).abs()


def odds_gap(outputs: Tensor, targets: Tensor) -> Tensor:
    """The larger of the two such differences, among those with low and those with high income."""
    decision, income, sex = (outputs[:, 0] > 0).double(), *targets.double().unbind(1)
    gaps = [_difference(decision, sex, given).abs() for given in (1 - income, income)]
    return torch.stack(gaps).max()


def _difference(values: Tensor, group: Tensor, given: Tensor) -> Tensor:
    """The mean of `values` `[B]` in group 1 less that in group 0, over samples with `given` 1."""
    ones, zeros = group * given, (1 - group) * given
    means = [(values * member).sum() / member.sum().clamp(min=1) for member in (ones, zeros)]
    # A product and no early return: an absent group must not cut the loss off from the model.
    present = (ones.sum() > 0) & (zeros.sum() > 0)
    return (means[0] - means[1]) * present.to(values.dtype)


def _load(data_dir: str | os.PathLike[str] | None) -> tuple[Columns, Columns]:
    """The training and the test table, with gains and losses of capital as log(1 + x)."""
    found = find_files("adult", _FILES, data_dir)
    if found:
        tables = [read_csv(path, _NAMES, comment="|") for path in found]
    else:
        tables = _parted(fetch_openml("adult", [f"{file}.xz" for file in _FILES], 1590))
    for table in tables:
        for name in ("capital-gain", "capital-loss"):
            table[name] = np.log1p(numbers(table[name], f"column `{name}`"))
    return tables[0], tables[1]


def _parted(table: Columns) -> list[Columns]:
    """OpenML's one table as the two published ones: there the test rows come first."""
    names = dict(zip(table, _NAMES, strict=False))
    weights = table.get("fnlwgt", np.zeros(0))
    if len(table) != len(_NAMES) or not (
        len(weights) > _TEST_ROWS
        and weights[0] == _FIRST_OF_TEST
        and weights[_TEST_ROWS] == _FIRST_OF_TRAIN
    ):
        raise ValueError(
            f"OpenML's table of Adult must have {len(_NAMES)} columns with the published test rows "
            f"first, got {len(table)} columns and {len(weights)} rows in another order. "
            "Use the files adult.data and adult.test."
        )
    return [
        {names[name]: column[rows] for name, column in table.items()}
        for rows in (slice(_TEST_ROWS, None), slice(None, _TEST_ROWS))
    ]


def _targets(table: Columns) -> Tensor:
    """Income (1 above 50 000 dollars) and sex (1 for women), `[n, 2]`."""
    # The test file ends its labels with a dot.
    income = np.char.rstrip(table["income"].astype(np.str_), ".")
    return tensor(
        np.stack(
            [_is(income, ">50K", "<=50K", "income"), _is(table["sex"], "Female", "Male", "sex")], 1
        )
    )


def _is(column: npt.NDArray[np.str_], one: str, zero: str, name: str) -> npt.NDArray[np.bool_]:
    known = (column == one) | (column == zero)
    if not known.all():
        raise ValueError(
            f"column `{name}` must hold {one!r} and {zero!r}, got {str(column[~known][0])!r}. "
            "Fetch the file anew."
        )
    return np.asarray(column == one)
