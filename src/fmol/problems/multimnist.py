"""MultiMNIST: two MNIST digits in one image, from local files or torchvision's download."""

from __future__ import annotations

import gzip
import importlib
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fmol.federation import Federation
from fmol.problems.digits import SUITED, DigitOptions, Digits, Network, digit_federation
from fmol.problems.loading import DATA_VARIABLE, DataSet, find_folder, not_found

__all__ = ["MultiMNIST", "mnist_digits"]

SHIFT = 8
"""How far the second digit is moved: a canvas of 36×36, digits at 0:28 and 8:36."""

FILES = tuple(
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)


@dataclass(frozen=True, kw_only=True)
class MultiMNIST(DigitOptions):
    """Left and right digit of 36×36 images, two objectives: the paper's main experiment.

    Clients' pairs are made of MNIST's 60 000 training digits, the pairs held out of its 10 000 test
    digits. A digit may be in several pairs. The paper does not say which model it used; LeNet with
    a head for each digit is the usual one.
    """

    model: Network = "lenet"
    """The network: fully connected, or two convolutions; either has one linear head a digit."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 100,
        "local_epochs": 1,
        "batch_size": 16,
        "local_lr": 0.1,
        "server_lr": 0.1,
        **SUITED,
    }
    """What to train it with, where nothing else is said."""
    data_sets: ClassVar[tuple[DataSet, ...]] = (
        DataSet("mnist", FILES, "torchvision.datasets.MNIST"),
    )
    """What is read."""

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation, of the files in `data_dir` or where `FMOL_DATA` says, else downloaded."""
        train, test = mnist_digits(data_dir)
        return digit_federation(self, train, test, SHIFT)


def mnist_digits(data_dir: str | os.PathLike[str] | None = None) -> tuple[Digits, Digits]:
    """MNIST's digits, 28×28 with brightness up to 255: to train and to test."""
    folder = find_folder("mnist", FILES, data_dir)
    if folder is None:
        return _downloaded(data_dir)
    arrays = [_read_idx(folder / file) for file in FILES]
    return _digits(arrays[0], arrays[1]), _digits(arrays[2], arrays[3])


def _digits(images: Tensor, labels: Tensor) -> Digits:
    return Digits(images, labels.long(), brightest=255)


def _read_idx(path: Path) -> Tensor:
    """The bytes of one idx file as a tensor: the header says how many dimensions, and which."""
    try:
        content = gzip.decompress(path.read_bytes())
        dimensions = content[3]
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
        values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions)
        good = content[:3] == b"\0\0\x08" and len(values) == math.prod(shape)
    except (EOFError, gzip.BadGzipFile, IndexError, ValueError, struct.error, zlib.error):
        good = False
    if not good:
        raise ValueError(f"`{path}` is not a whole idx file of bytes. Fetch it anew.")
    return torch.from_numpy(values.reshape(shape).copy())


def _downloaded(data_dir: str | os.PathLike[str] | None) -> tuple[Digits, Digits]:
    try:
        datasets = importlib.import_module("torchvision.datasets")
    except ImportError as error:
        raise not_found(
            "mnist", FILES, "run `pip install torchvision`, which can download it"
        ) from error
    root = data_dir or os.environ.get(DATA_VARIABLE) or Path.home() / ".cache" / "fmol"
    try:
        train, test = (datasets.MNIST(root, train=part, download=True) for part in (True, False))
    except (OSError, RuntimeError) as error:
        raise not_found(
            "mnist", FILES, f"see to it that torchvision can download it ({error})"
        ) from error
    return _digits(train.data, train.targets), _digits(test.data, test.targets)
