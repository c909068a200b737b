"""What an experiment is: the runs it takes, and what they come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from fmol.record import RunRecord
from fmol.theory.slopes import student

__all__ = [
    "Cell",
    "Claim",
    "Cost",
    "Dots",
    "Experiment",
    "Line",
    "Outcome",
    "Panel",
    "Place",
    "Radar",
    "Records",
    "Reproduction",
    "Size",
    "Table",
    "Trial",
    "loss_cell",
]

Records = Mapping[str, RunRecord]
"""The runs that are done, by their trial's name."""


@dataclass(frozen=True)
class Size:
    """How much is run: all of it or a first look, and with how many seeds."""

    small: bool
    seeds: int


@dataclass(frozen=True)
class Place:
    """Where an experiment writes, and whom it tells how far it is."""

    folder: Path
    say: Callable[[str], None] = field(repr=False)


@dataclass(frozen=True)
class Trial:
    """One run: its name within the experiment, and its options as a config file has them."""

    name: str
    tables: Mapping[str, Any]
    race: str = ""
    """Runs of one race end when one of them has reached what they are to stop at: the others can
    only be later."""
    hopeful: bool = False
    """Whether it is given up where its losses say that it will not get to what it is to stop at."""


# ---- what comes out ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A number for each seed, infinite where it was never reached, and the paper's.

    It is not a number where there is nothing to measure.
    """

    values: tuple[float, ...]
    paper: float | None = None
    infinite: str = "never"
    """What is said where no seed has a finite number."""

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else math.nan

    @property
    def reached(self) -> tuple[float, ...]:
        """The numbers of those seeds that have one."""
        return tuple(value for value in self.values if math.isfinite(value))

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean; infinite for a single seed."""
        if len(self.values) < 2 or len(self.reached) < len(self.values):
            return math.inf
        return student(len(self.values) - 1) * stdev(self.values) / math.sqrt(len(self.values))

    def __str__(self) -> str:
        reached = self.reached
        if all(map(math.isnan, self.values)):
            text = "–"
        elif not reached:
            text = self.infinite
        elif len(reached) < len(self.values):
            text = f"{fmean(reached):.3g} in {len(reached)} of {len(self.values)}"
        else:
            text = f"{self.mean:.3g}"
            if math.isfinite(self.half_width):
                text += f" ± {self.half_width:.2g}"
        return text if self.paper is None else f"{text} [{self.paper:g}]"


def loss_cell(values: Iterable[float]) -> Cell:
    """A cell of losses, or of what is computed from them: infinite where a run failed.

    >>> str(loss_cell([math.inf, math.inf]))
    'diverged'
    """
    return Cell(tuple(values), infinite="diverged")


@dataclass(frozen=True)
class Table:
    """Numbers by row and column; the paper's are in brackets."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Sequence[Cell]]


@dataclass(frozen=True)
class Claim:
    """A sentence that the numbers bear out, or do not."""

    text: str
    holds: bool
    evidence: str
    whose: Literal["paper", "ours"] = "paper"

    @property
    def verdict(self) -> str:
        """Whether it holds, in words."""
        if self.holds:
            return "holds"
        return "not reproduced" if self.whose == "paper" else "does not hold"


@dataclass(frozen=True)
class Line:
    """A number over another, once for each seed: `y` is `[seeds][points]`."""

    label: str
    x: Sequence[float]
    y: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Panel:
    """Lines with axes in common."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    log: bool = True


@dataclass(frozen=True)
class Radar:
    """A closed line for each setting, over the objectives."""

    title: str
    axes: tuple[str, ...]
    rings: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Dots:
    """Numbers around 1, the less the better: one for each of many things, a column for each method."""

    title: str
    ylabel: str
    columns: Mapping[str, Mapping[str, Sequence[float]]]
    """Method → thing → a number for each seed; not a number where a seed has no such thing."""


@dataclass(frozen=True)
class Outcome:
    """All that an experiment came to."""

    tables: Sequence[Table] = ()
    claims: Sequence[Claim] = ()
    panels: Sequence[Panel] = ()
    radars: Sequence[Radar] = ()
    dots: Sequence[Dots] = ()
    figures: Sequence[Path] = ()
    """Those that the experiment drew itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What its numbers were computed with, beyond what its runs say."""


@dataclass(frozen=True)
class Cost:
    """How long an experiment takes, in words."""

    small: str
    """On two CPU cores."""
    gpu: str
    """In full on one H200."""
    cpu: str
    """In full on two CPU cores."""


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper, or one beside it."""

    name: str
    title: str
    own_reading: str
    """How what the paper leaves open was read in this experiment."""
    stages: Sequence[Callable[[Size, Records | None], Sequence[Trial]]] = field(repr=False)
    """Each gives runs, seeing those of the stages before it: tuning comes before what is tuned.
    Without records it gives as many with whatever may be chosen, so that they can be counted."""
    conclude: Callable[[Size, Records, Place], Outcome] = field(repr=False)
    """What the runs come to. Of runs that are not there it leaves out what they would tell."""
    seeds: int = 3
    small_seeds: int = 2
    cost: Cost | None = None
    shared_reading: str = ""
    """What it has in common with others."""
    data: tuple[str, ...] = ()
    """Problems whose data the full version reads."""
    small_data: tuple[str, ...] = ()

    @property
    def reading(self) -> str:
        """How all that the paper leaves open was read."""
        return f"{self.shared_reading} {self.own_reading}".strip()


@dataclass(frozen=True)
class Reproduction:
    """What an experiment came to, and where it is written."""

    experiment: Experiment
    size: Size
    outcome: Outcome
    records: Records
    files: tuple[Path, ...]
    lacking: tuple[str, ...] = ()
    """Runs that are not there; what they would tell is left out of the outcome."""
    unnamed: int = 0
    """So many more have no name yet: what they are run with is chosen by runs that are lacking."""

    @property
    def gap(self) -> str:
        """What is to be said of runs that are not there; empty where all are."""
        if not self.lacking:
            return ""
        some = len(self.records)
        all_ = some + len(self.lacking) + self.unnamed
        return f"From {some} of {all_} runs; tables and claims that need the others are left out."
