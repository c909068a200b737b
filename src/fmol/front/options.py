"""What a front is asked for beside what a run is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fmol.config import ConfigError
from fmol.front.result import LOSS
from fmol.options import (
    Count,
    OptionsError,
    Range,
    check_options,
    list_options,
    parse_text,
    read_options,
)

__all__ = ["FrontOptions", "read_front_options"]


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """How many models of which kind, and how they are measured.

    >>> FrontOptions(points=5, method=("weights", "tchebycheff,smoothing=0.05")).seeds
    1
    """

    method: tuple[str, ...] = ("weights",)
    """How preferences are trained: weights, tchebycheff, near-prior, upgrad; options behind commas."""
    points: Annotated[int, Range(least=2)] | None = None
    """How many preferences; none is 11 for two objectives, 15 for three, 12 more than objectives."""
    seeds: Count = 1
    """How many seeds each is trained with, from the run's own on."""
    measure: str = LOSS
    """What is compared: loss, held-out-loss, or a held-out metric by its name."""
    reference: float | Mapping[str, float] | None = None
    """The worst values that still count, by objective or for all: where hypervolume ends."""

    def __post_init__(self) -> None:
        check_options(self)


def read_front_options(table: Mapping[str, Any], flags: Mapping[str, Any]) -> FrontOptions:
    """The options that a file's `[front]` and a command line's `flags` make; flags win.

    >>> read_front_options({"points": 5}, {"reference": "left=1,right=2"}).reference
    {'left': 1, 'right': 2}
    """
    known = list_options(FrontOptions)
    given = {name: flags[name] for name in flags if flags[name] not in (None, ())}
    texts = {
        name: parse_text(known[name].kind, value) if isinstance(value, str) else value
        for name, value in given.items()
    }
    try:
        options: FrontOptions = read_options(FrontOptions, {**table, **texts}, called="the front")
    except OptionsError as error:
        raise ConfigError([f"[front] {text}" for text in error.problems]) from error
    return options
