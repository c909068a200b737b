"""Tables: reading ARFF and CSV files, columns to model inputs, and what tabular problems share.

Every statistic (means, deviations, the levels of a category) is fitted on training rows and then
applied to all rows, so that nothing of the held-out data reaches the model.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import lzma
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fmol.problems.loading import find_folder, not_found
from fmol.rng import torch_stream

__all__ = [
    "AreaUnderCurve",
    "BinaryAccuracy",
    "BinaryCrossEntropy",
    "Columns",
    "Encoding",
    "Numbers",
    "RootMeanSquare",
    "SquaredError",
    "Standard",
    "area_under_curve",
    "fetch_openml",
    "fetch_uci",
    "find_files",
    "fit_encoding",
    "fit_standard",
    "merge_rare",
    "mlp",
    "numbers",
    "read_arff",
    "read_csv",
    "read_lines",
    "tensor",
    "truths",
]

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""A table: name -> column `[n]`, float64 with NaN for what is missing, or text with `?` for it."""

Numbers: TypeAlias = npt.NDArray[np.float64]

_ATTRIBUTE = re.compile(
    r"""@attribute\s+(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<bare>\S+))\s+(?P<kind>\S.*)""",
    re.IGNORECASE,
)


# ---- files -----------------------------------------------------------------------------------


def find_files(
    folder: str, files: Sequence[str], data_dir: str | os.PathLike[str] | None
) -> list[Path] | None:
    """The paths of `files`, each with `.xz` or all as published; None if they are nowhere."""
    for suffix in (".xz", ""):
        names = [file + suffix for file in files]
        found = find_folder(folder, names, data_dir)
        if found is not None:
            return [found / name for name in names]
    return None


def read_csv(path: Path, names: Sequence[str] | None = None, comment: str | None = None) -> Columns:
    """The columns of a CSV file as text, stripped; xz-compressed if its name ends so.

    `names` are the columns of a file without a header line. Blank lines and lines that begin with
    `comment` are left out.
    """
    numbered = (
        (number, line)
        for number, line in enumerate(read_lines(path), 1)
        if line.strip() and not (comment is not None and line.startswith(comment))
    )
    if names is None:
        header = next(numbered, None)
        if header is None:
            raise ValueError(f"`{path.name}` is empty. Fetch the file anew.")
        names = _fields(header[1], '"')
    return _columns(path, names, numbered, '"')


def read_arff(path: Path) -> Columns:
    """The columns of a dense ARFF file: numeric ones as numbers, all others as text."""
    kinds: dict[str, bool] = {}
    lines = enumerate(read_lines(path), 1)
    for number, line in lines:
        word = line.split(maxsplit=1)[0].lower() if line.strip() else ""
        if word == "@data":
            break
        if word == "@attribute":
            match = _ATTRIBUTE.match(line.strip())
            if match is None:
                raise ValueError(
                    f"line {number} of `{path.name}` is not an attribute as ARFF knows it, got "
                    f"{line.strip()!r}. Fetch the file anew."
                )
            name = next(match[g] for g in ("single", "double", "bare") if match[g] is not None)
            kinds[name] = match["kind"].strip().lower() in {"numeric", "real", "integer"}
    else:
        raise ValueError(f"`{path.name}` has no line `@data`. Fetch the file anew.")
    rows = ((n, line) for n, line in lines if line.strip() and not line.startswith("%"))
    columns = _columns(path, list(kinds), rows, "'")
    return {
        name: numbers(column, f"column `{name}` of `{path.name}`") if kinds[name] else column
        for name, column in columns.items()
    }


def numbers(column: npt.NDArray[Any], what: str = "a column") -> Numbers:
    """A column as float64; NaN where it is empty or `?`."""
    if column.dtype.kind in "biuf":
        return column.astype(np.float64)
    text = column.astype(np.str_)
    try:
        return np.where((text == "?") | (text == ""), "nan", text).astype(np.float64)
    except ValueError as error:
        raise ValueError(f"{what} must hold numbers: {error}. Fetch the file anew.") from error


def truths(column: npt.NDArray[Any], what: str = "a column") -> npt.NDArray[np.bool_]:
    """A column of 0/1 or of true/false in any spelling as booleans."""
    text = np.char.lower(column.astype(np.str_))
    yes, no = np.isin(text, ("1", "true", "1.0")), np.isin(text, ("0", "false", "0.0"))
    if not (yes | no).all():
        raise ValueError(
            f"{what} must hold true and false, got {str(text[~(yes | no)][0])!r}. "
            "Fetch the file anew."
        )
    return yes


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, xz-compressed if its name ends so."""
    try:
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                yield from file
        else:
            with path.open(encoding="utf-8") as file:
                yield from file
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`{path.name}` is damaged: {str(error).rstrip('.')}. Fetch the file anew."
        ) from error


def _fields(line: str, quote: str) -> list[str]:
    row = next(csv.reader([line], quotechar=quote, skipinitialspace=True))
    return [field.strip() for field in row]


def _columns(
    path: Path, names: Sequence[str], rows: Iterable[tuple[int, str]], quote: str
) -> Columns:
    values: list[list[str]] = []
    for number, line in rows:
        row = _fields(line, quote)
        if len(row) != len(names):
            raise ValueError(
                f"line {number} of `{path.name}` has {len(row)} values for {len(names)} columns. "
                "Fetch the file anew."
            )
        values.append(row)
    if not values:
        raise ValueError(f"`{path.name}` has no rows. Fetch the file anew.")
    return {
        name: np.array(column, dtype=np.str_)
        for name, column in zip(names, zip(*values, strict=True), strict=True)
    }


# ---- downloads -------------------------------------------------------------------------------


def fetch_openml(folder: str, files: Sequence[str], data_id: int) -> Columns:
    """All columns of an OpenML data set, by scikit-learn; an error that says how to get them."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        otherwise = 'install scikit-learn, which downloads it: pip install "scikit-learn"'
        raise not_found(folder, files, otherwise) from error
    try:
        # liac-arff reads without pandas, and keeps what is missing apart from what is text.
        found = datasets.fetch_openml(
            data_id=data_id, target_column=None, as_frame=False, parser="liac-arff"
        )
    except OSError as error:
        raise not_found(folder, files, f"let OpenML ({data_id}) be reached: {error}") from error
    data, levels = np.asarray(found.data), getattr(found, "categories", None) or {}
    columns: Columns = {}
    for i, name in enumerate(found.feature_names):
        values = data[:, i].astype(np.float64)
        if name in levels:
            # Categories come as positions in the list of levels.
            known = np.append(np.array(levels[name], dtype=np.str_), "?")
            columns[name] = known[np.where(np.isnan(values), -1, values).astype(np.int64)]
        else:
            columns[name] = values
    return columns


def fetch_uci(folder: str, files: Sequence[str], data_id: int) -> Columns:
    """All columns of a UCI data set, by ucimlrepo; an error that says how to get them."""
    try:
        repository = importlib.import_module("ucimlrepo")
    except ImportError as error:
        otherwise = 'install ucimlrepo, which downloads it: pip install "ucimlrepo"'
        raise not_found(folder, files, otherwise) from error
    try:
        frame = repository.fetch_ucirepo(id=data_id).data.original
    except OSError as error:
        otherwise = f"let the UCI repository ({data_id}) be reached: {error}"
        raise not_found(folder, files, otherwise) from error
    return {str(name): np.asarray(frame[name]).astype(np.str_) for name in frame.columns}


# ---- from columns to inputs ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Standard:
    """Means and standard deviations `[F]` of training rows; made by `fit_standard`."""

    mean: Numbers
    deviation: Numbers

    def __call__(self, values: Numbers) -> Numbers:
        """`values` `[n, F]` in standard units; what is missing becomes 0, the training mean."""
        scaled = (values - self.mean) / self.deviation
        return np.where(np.isnan(scaled), 0.0, scaled)


def fit_standard(values: Numbers) -> Standard:
    """The means and deviations of `values` `[n, F]`, over what is not missing.

    A column that does not vary has deviation 1, one that is missing everywhere also mean 0.

    >>> fit_standard(np.array([[1.0, 5.0], [3.0, np.nan]]))(np.array([[4.0, np.nan]])).tolist()
    [[2.0, 0.0]]
    """
    known = ~np.isnan(values)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, values, 0.0).sum(0) / count
    deviation = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(0) / count)
    # Rounding leaves a constant column a deviation of about 1e-16 of its mean, not zero.
    varies = deviation > 1e-12 * np.maximum(1.0, np.abs(mean))
    return Standard(mean, np.where(varies, deviation, 1.0))


@dataclass(frozen=True, eq=False)
class Encoding:
    """How columns become inputs: numbers standardised, categories one-hot; by `fit_encoding`."""

    numeric: tuple[str, ...]
    standard: Standard
    levels: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each input, `column` or `column=level`."""
        return (
            *self.numeric,
            *(f"{name}={level}" for name, levels in self.levels.items() for level in levels),
        )

    def __call__(self, columns: Columns) -> Numbers:
        """The inputs `[n, F]`; a level that no training row has is all zeros."""
        parts = [self.standard(np.stack([numbers(columns[n], n) for n in self.numeric], axis=1))]
        for name, levels in self.levels.items():
            text = columns[name].astype(np.str_)
            parts.append((text[:, None] == np.array(levels)[None, :]).astype(np.float64))
        return np.concatenate(parts, axis=1)


def fit_encoding(
    columns: Columns, numeric: Sequence[str], categorical: Sequence[str], rows: npt.NDArray[Any]
) -> Encoding:
    """The encoding fitted on `rows` (positions or a mask) of `columns`: the training rows.

    >>> table = {"age": np.array([20.0, 40.0, 90.0]), "job": np.array(["a", "b", "c"])}
    >>> encoding = fit_encoding(table, ["age"], ["job"], np.array([0, 1]))
    >>> encoding.names, encoding(table)[2].tolist()
    (('age', 'job=a', 'job=b'), [6.0, 0.0, 0.0])
    """
    return Encoding(
        tuple(numeric),
        fit_standard(np.stack([numbers(columns[name], name)[rows] for name in numeric], axis=1)),
        {
            name: tuple(np.unique(columns[name].astype(np.str_)[rows]).tolist())
            for name in categorical
        },
    )


def merge_rare(groups: npt.NDArray[Any], least: int) -> npt.NDArray[np.str_]:
    """`groups` `[n]` with every group of fewer than `least` members renamed to `other`.

    Together they are one group, whatever its size.

    >>> merge_rare(np.array(["a", "a", "b", "c"]), 2).tolist()
    ['a', 'a', 'other', 'other']
    """
    values, codes, counts = np.unique(
        groups.astype(np.str_), return_inverse=True, return_counts=True
    )
    merged: npt.NDArray[np.str_] = np.where(counts < least, "other", values)[codes.reshape(-1)]
    return merged


def tensor(values: npt.NDArray[Any]) -> Tensor:
    """The same numbers as a float32 tensor of its own."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


# ---- model, losses, options ------------------------------------------------------------------


def mlp(sizes: Sequence[int], seed: int) -> nn.Sequential:
    """Linear layers of these sizes with tanh between them, initialised by `seed` alone.

    >>> [tuple(p.shape) for p in mlp([3, 5, 2], seed=0).parameters()]
    [(5, 3), (5,), (2, 5), (2,)]
    """
    cpu = torch.device("cpu")
    with torch_stream(cpu, seed, "problem", "model"):
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(sizes)):
            layers += [nn.Tanh()] if i else []
            layers.append(nn.Linear(before, after, device=cpu))
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class SquaredError:
    """A loss: the squared error of one output column, one value per sample `[B]`."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, self.column] - targets[:, self.column]) ** 2


@dataclass(frozen=True)
class RootMeanSquare:
    """A metric of the whole set: the root of the mean squared error of one output column."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return SquaredError(self.column)(outputs, targets).mean().sqrt()


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """A loss: the cross entropy of one output column, a logit, for targets 0 and 1, `[B]`."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(
            outputs[:, self.column], targets[:, self.column], reduction="none"
        )


@dataclass(frozen=True)
class BinaryAccuracy:
    """A metric: whether one output column, a logit, has the sign of its target, 0 or 1, `[B]`."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs[:, self.column] > 0) == (targets[:, self.column] > 0.5)).float()


@dataclass(frozen=True)
class AreaUnderCurve:
    """A metric of the whole set: `area_under_curve` of one output column."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return area_under_curve(outputs[:, self.column], targets[:, self.column])


def area_under_curve(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of (positive, negative) pairs that `scores` `[n]` rank rightly, ties counting half.

    Without one of the two kinds there is nothing to rank, and it is 0.5, as good as chance.

    >>> area_under_curve(torch.tensor([0.1, 0.4, 0.4]), torch.tensor([0, 0, 1])).item()
    0.75
    """
    values, codes, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    # Ties share the mean of their ranks.
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[codes]
    positive = labels > 0.5
    p, n = int(positive.sum()), int((~positive).sum())
    if p == 0 or n == 0:
        return torch.full((), 0.5, dtype=values.dtype, device=values.device)
    pairs: Tensor = ranks[positive].sum() - p * (p + 1) / 2
    return pairs / (p * n)
