"""Objects are told by what they hold, in the same words in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fmol.wording import in_words


def halve(round: int, rate: float = 0.1) -> float:
    return rate / 2


def scaled(by: float) -> Callable[[int], float]:
    return lambda round: by * round


class Plain:
    def __init__(self, keep: float) -> None:
        self.keep, self.itself = keep, self


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (halve, "halve(rate=0.1)"),
        (functools.partial(halve, rate=0.2), "partial(halve(rate=0.1), rate=0.2)"),
        (Plain(0.5), "Plain(keep=0.5)"),
        (Plain, "Plain"),
        ("text", "'text'"),
        (max, "<built-in function max>"),
    ],
    ids=["function", "partial", "object", "class", "text", "built in"],
)
def test_what_an_object_is_called(value: Any, words: str) -> None:
    assert in_words(value) == words


def test_functions_without_a_name_are_told_apart_by_where_they_stand_and_what_they_hold() -> None:
    assert in_words(scaled(2.0)) == in_words(scaled(2.0))
    assert in_words(scaled(2.0)) != in_words(scaled(3.0))
    assert in_words(scaled(2.0)).startswith("lambda in test_wording.py, line ")
    first = lambda round: 0.1  # noqa: E731
    second = lambda round: 0.2  # noqa: E731
    assert in_words(first) != in_words(second)


def test_tensors_and_models_are_told_apart_by_their_values() -> None:
    assert in_words(torch.ones(3)) == in_words(torch.ones(3))
    assert in_words(torch.ones(3)) != in_words(torch.zeros(3))
    a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    assert in_words(a) != in_words(b)
    b.load_state_dict(a.state_dict())
    assert in_words(a) == in_words(b)


def test_nothing_goes_on_for_pages() -> None:
    assert len(in_words(list(range(10_000)))) == 200
    assert in_words(list(range(10_000))).endswith("…")
