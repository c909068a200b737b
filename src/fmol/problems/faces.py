"""CelebA's files: which images are at hand, what is known of each, and how to read them."""

from __future__ import annotations

import importlib
import io
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fmol.partition import Indices
from fmol.problems.loading import DATA_VARIABLE, find_folder, not_found
from fmol.problems.tables import read_lines

__all__ = ["ATTRIBUTES", "FULL", "PEOPLE", "SMALL", "TABLE", "Faces", "find_faces"]

ATTRIBUTES = (
    "5_o_Clock_Shadow", "Arched_Eyebrows", "Attractive", "Bags_Under_Eyes", "Bald", "Bangs",
    "Big_Lips", "Big_Nose", "Black_Hair", "Blond_Hair", "Blurry", "Brown_Hair", "Bushy_Eyebrows",
    "Chubby", "Double_Chin", "Eyeglasses", "Goatee", "Gray_Hair", "Heavy_Makeup",
    "High_Cheekbones", "Male", "Mouth_Slightly_Open", "Mustache", "Narrow_Eyes", "No_Beard",
    "Oval_Face", "Pale_Skin", "Pointy_Nose", "Receding_Hairline", "Rosy_Cheeks", "Sideburns",
    "Smiling", "Straight_Hair", "Wavy_Hair", "Wearing_Earrings", "Wearing_Hat",
    "Wearing_Lipstick", "Wearing_Necklace", "Wearing_Necktie", "Young",
)  # fmt: skip
"""The attributes in the order of the data set's table."""

_ZIP = "img_align_celeba_half_10k.zip"
TABLE, _SPLIT, PEOPLE = "list_attr_celeba.txt", "list_eval_partition.txt", "identity_CelebA.txt"
SMALL = (_ZIP, f"{TABLE}.xz", f"{_SPLIT}.xz")
"""The files of the first 10 000 images."""
_IMAGES = "img_align_celeba"
# The first image stands for all of them.
FULL = (f"{_IMAGES}/000001.jpg", TABLE, _SPLIT)
"""The files of all images."""

_Read: TypeAlias = Callable[[str], bytes]


@dataclass(frozen=True, eq=False)
class Faces:
    """What is known of the images at hand, in the order of `files` `[n]`, and how to read one."""

    files: tuple[str, ...]
    attributes: npt.NDArray[np.bool_]
    """`[n, 40]`."""
    part: npt.NDArray[np.int64]
    """The official part, 0 to train, 1 to validate, 2 to test, `[n]`."""
    people: npt.NDArray[np.int64] | None
    """A number for who is on the image, `[n]`, where that is known."""
    archive: Path
    """The zip file or folder with the images."""

    def images(self, wanted: Sequence[Indices], size: int) -> list[Tensor]:
        """The images at each of `wanted`, `[m, 3, size, size]` uint8."""
        with _reader(self.archive) as read:
            return [_decode([self.files[i] for i in part], read, size) for part in wanted]


def find_faces(data_dir: str | os.PathLike[str] | None) -> Faces:
    """The first 10 000 images where they lie, else all of them, else what can be downloaded."""
    folder = find_folder("celeba_10k", SMALL, data_dir)
    if folder is not None:
        return _read_faces(folder, folder / _ZIP, ".xz")
    folder = find_folder("celeba", FULL, data_dir) or _downloaded(data_dir)
    return _read_faces(folder, folder / _IMAGES, "")


def _read_faces(folder: Path, archive: Path, suffix: str) -> Faces:
    known = {Path(file).name for file in _members(archive) if file.endswith(".jpg")}
    files = tuple(sorted(known))
    table = folder / (TABLE + suffix)
    lines = read_lines(table)
    next(lines, "")  # How many rows there are.
    if tuple(next(lines, "").split()) != ATTRIBUTES:
        raise ValueError(
            f"the second line of `{table.name}` must name CelebA's {len(ATTRIBUTES)} attributes. Fetch "
            "the file anew."
        )
    values = _rows(table, lines, files, len(ATTRIBUTES))
    if not np.isin(values, (-1, 1)).all():
        raise ValueError(f"`{table.name}` must hold −1 and 1 only. Fetch the file anew.")
    split = folder / (_SPLIT + suffix)
    people = folder / (PEOPLE + suffix)
    return Faces(
        files,
        values > 0,
        _rows(split, read_lines(split), files, 1)[:, 0],
        _rows(people, read_lines(people), files, 1)[:, 0] if people.is_file() else None,
        archive,
    )


def _rows(
    path: Path, lines: Iterator[str], files: Sequence[str], columns: int
) -> npt.NDArray[np.int64]:
    """The numbers beside each of `files`, `[n, columns]`, from lines of a file's name and numbers."""
    place = {file: i for i, file in enumerate(files)}
    found = np.zeros((len(files), columns), dtype=np.int64)
    missing = set(files)
    for line in lines:
        if not missing:
            break  # A table of all images may stand beside the first of them.
        file, *numbers = line.split() or [""]
        if file not in missing:
            continue
        try:
            found[place[file]] = np.array(numbers, dtype=np.int64).reshape(columns)
        except ValueError as error:
            raise ValueError(
                f"the line of {file} in `{path.name}` must have {columns} whole numbers, got "
                f"{len(numbers)} words. Fetch the file anew."
            ) from error
        missing.remove(file)
    if missing:
        raise ValueError(
            f"`{path.name}` has no line for {min(missing)} and {len(missing) - 1} more of the "
            f"{len(files)} images. Fetch the file anew."
        )
    return found


def _members(archive: Path) -> list[str]:
    if archive.is_dir():
        return [path.name for path in archive.iterdir()]
    with _opened(archive) as opened:
        return opened.namelist()


@contextmanager
def _reader(archive: Path) -> Iterator[_Read]:
    """How to read an image by its file name, from a folder or a zip file."""
    if archive.is_dir():
        yield lambda file: (archive / file).read_bytes()
        return
    with _opened(archive) as opened:
        member = {Path(name).name: name for name in opened.namelist()}
        yield lambda file: opened.read(member[file])


def _opened(archive: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise ValueError(f"`{archive}` is not a whole zip file. Fetch it anew.") from error


def _decode(files: Sequence[str], read: _Read, size: int) -> Tensor:
    """The images `[n, 3, size, size]` uint8, each scaled as a whole, whatever its proportions."""
    try:
        pillow = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(
            "CelebA's images are read with Pillow, which is not installed. "
            'Run: pip install "fmol[celeba]"'
        ) from error
    images = np.empty((len(files), size, size, 3), dtype=np.uint8)
    for i, file in enumerate(files):
        try:
            with pillow.open(io.BytesIO(read(file))) as image:
                scaled = image.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR)
        except (OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"`{file}` is not a whole image. Fetch it anew.") from error
        images[i] = np.asarray(scaled)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _downloaded(data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder into which torchvision has put the whole data set."""
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except ImportError as error:
        raise not_found(
            "celeba", FULL, "run `pip install torchvision gdown`, which can download it"
        ) from error
    root = Path(data_dir or os.environ.get(DATA_VARIABLE) or Path.home() / ".cache" / "fmol")
    otherwise = "see to it that torchvision can download it"
    try:
        datasets.CelebA(root, split="all", target_type="attr", download=True)
    # gdown, with which it is downloaded, has errors of its own kind.
    except Exception as error:
        raise not_found("celeba", FULL, f"{otherwise} ({error})") from error
    folder = root / "celeba"
    if not all((folder / file).is_file() for file in FULL):
        raise not_found("celeba", FULL, otherwise)
    return folder
