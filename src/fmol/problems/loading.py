"""Where data files are looked for, and what is said when they are not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DATA_VARIABLE", "DataSet", "find_data", "find_folder", "not_found"]

DATA_VARIABLE = "FMOL_DATA"
"""The environment variable that names the folder with data sets, one folder each."""


def find_folder(
    name: str, files: Sequence[str], data_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """The folder that holds all of `files` of the data set `name`, None if there is none.

    Looked at are `data_dir`, then the folder that `FMOL_DATA` names; each may be the data set's own
    folder or the one above it. A `data_dir` that does not exist is an error: it was meant.
    """
    given = [data_dir] if data_dir is not None else [os.environ.get(DATA_VARIABLE)]
    for root in (Path(place) for place in given if place):
        if not root.is_dir():
            raise FileNotFoundError(
                f"the data folder `{root}` does not exist. Name one that does, with `data_dir` or in "
                f"the environment variable {DATA_VARIABLE}."
            )
        for folder in (root / name, root):
            if all((folder / file).is_file() for file in files):
                return folder
    return None


@dataclass(frozen=True)
class DataSet:
    """What a problem reads: a folder's name, its files, and how else they can be had."""

    folder: str
    files: tuple[str, ...]
    """As published; each may also end in `.xz`."""
    otherwise: str


def find_data(data: DataSet, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder that holds a problem's files, None if there is none."""
    for suffix in (".xz", ""):
        found = find_folder(data.folder, [file + suffix for file in data.files], data_dir)
        if found is not None:
            return found
    return None


def not_found(name: str, files: Sequence[str], otherwise: str) -> FileNotFoundError:
    """The error for a data set that is nowhere; `otherwise` says how else it can be had."""
    return FileNotFoundError(
        f"the data set `{name}` ({', '.join(files)}) was not found. Name the folder that holds it with "
        f"`data_dir` (`--data-dir`) or in the environment variable {DATA_VARIABLE}, or {otherwise}."
    )
