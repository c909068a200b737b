"""MultiDigits: two of scikit-learn's bundled 8×8 digits in one image; nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fmol.federation import Federation
from fmol.problems.digits import SUITED, DigitOptions, Digits, digit_federation
from fmol.rng import stream

__all__ = ["MultiDigits", "bundled_digits"]

TRAIN_DIGITS = 1400
"""Of the 1797 bundled digits, those of which clients' pairs are made."""

SHIFT = 4
"""How far the second digit is moved: a canvas of 12×12, with a corner of 4×4 shared by both."""


@dataclass(frozen=True, kw_only=True)
class MultiDigits(DigitOptions):
    """Left and right digit of 12×12 images, two objectives: the problem to start with.

    A random 1400 of the 1797 digits go to the clients, the others into the pairs held out, so no test
    digit was trained on. A digit may be in several pairs.

    >>> MultiDigits(clients=5, partition="both-shards").build()
    Federation(Mlp with 21,428 trainable parameters, 2 objectives, 5 clients)
    """

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 40,
        "local_steps": 20,
        "batch_size": 32,
        "local_lr": 0.2,
        "server_lr": 0.2,
        **SUITED,
    }
    """What to train it with, where nothing else is said."""

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation. The digits come with scikit-learn: `data_dir` is not looked at."""
        train, test = bundled_digits(self.seed)
        return digit_federation(self, train, test, SHIFT)


def bundled_digits(seed: int = 0) -> tuple[Digits, Digits]:
    """scikit-learn's digits, 8×8 with brightness up to 16, split at random: to train and to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the bundled digits come with scikit-learn, which is not installed. "
            'Run: pip install "fmol[digits]"'
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8)
    labels = torch.from_numpy(digits.target).long()
    order = torch.from_numpy(stream(seed, "problem", "split").permutation(len(images)))
    train, test = (
        Digits(images[rows], labels[rows], brightest=16)
        for rows in (order[:TRAIN_DIGITS], order[TRAIN_DIGITS:])
    )
    return train, test
