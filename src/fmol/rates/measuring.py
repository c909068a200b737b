"""Every case at every `T` and seed, kept in a file as it is measured; and the slopes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fmol import __version__
from fmol.errors import MisuseError
from fmol.files import write_whole
from fmol.rates.cases import CASES, SETTINGS, Case, Measured, Point
from fmol.theory import Slope, Steps, fit_slope
from fmol.theory.checks import check_counts
from fmol.theory.slopes import seed_slopes

__all__ = ["POINTS", "RatesResult", "measure_rates"]

POINTS = "points.json"


@dataclass(frozen=True)
class RatesResult:
    """What was measured, point by point."""

    points: tuple[Point, ...]

    @property
    def cases(self) -> tuple[Case, ...]:
        """Those that were measured, in the order of `CASES`."""
        found = {point.case for point in self.points}
        return tuple(case for name, case in CASES.items() if name in found)

    def of(self, case: str) -> dict[int, list[Measured]]:
        """`T` → the measurements of that case, in the order of the seeds."""
        found: dict[int, list[Measured]] = {}
        for point in sorted(self.points, key=lambda each: (each.rounds, each.seed)):
            if point.case == case:
                found.setdefault(point.rounds, []).append(point.measured)
        return found

    def values(self, case: str, beside: str = "") -> dict[int, list[float]]:
        """`T` → the case's own measure for each seed, or another one that was taken beside it."""
        return {
            rounds: [each.beside[beside] if beside else each.value for each in row]
            for rounds, row in self.of(case).items()
        }

    def slope(self, case: str, beside: str = "") -> Slope:
        """How fast it falls, with a 95 % interval over the seeds."""
        return fit_slope(self.values(case, beside), CASES[case].axes)

    def slopes(self, case: str) -> list[float]:
        """The slope of each seed by itself, in the order of the seeds."""
        return seed_slopes(self.values(case), CASES[case].axes)

    def expected(self, case: str) -> float | None:
        """The slope of theory; None where there is none."""
        if CASES[case].slope is not None:
            return CASES[case].slope
        known = [p.measured.expected for p in self.points if p.case == case]
        given = [each for each in known if each is not None]
        return fmean(given) if given else None

    def margins(self, case: str, version: str = "repaired") -> dict[int, float]:
        """`T` → how many times the mean over the seeds the theorem's right-hand side is."""
        found = {}
        for rounds, row in self.of(case).items():
            if all(version in each.bounds for each in row):
                bound = fmean(each.bounds[version] for each in row)
                found[rounds] = bound / fmean(each.value for each in row)
        return found


def measure_rates(
    *,
    small: bool = False,
    seeds: int | None = None,
    cases: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> RatesResult:
    """Table 1 measured: each of `cases` (all) for several `T`, with `seeds` problems and runs each.

    Every `T` is a run of its own with the corollary's step sizes for that `T`. `small` takes fewer
    `T`, three seeds in place of five, and Table 1 alone. With `out` each point is written to
    `points.json` there as soon as it is known, and those that are there already are not run again.
    `say` is told of each.

    >>> result = measure_rates(cases=["fmgda-strongly-convex"], small=True, seeds=1)
    >>> sorted(result.values("fmgda-strongly-convex"))
    [16, 32, 48, 64]
    """
    seeds = (3 if small else 5) if seeds is None else seeds
    check_counts(seeds=seeds)
    wanted = _plan(cases, small, seeds)
    path = None if out is None else Path(out) / POINTS
    known = {} if path is None else _read(path)
    missing = [each for each in wanted if each not in known]
    work, began, done = sum(rounds for _, rounds, _ in missing), time.monotonic(), 0
    for number, (name, rounds, seed) in enumerate(missing, 1):
        measured = CASES[name].run(rounds, seed)
        known[name, rounds, seed] = Point(name, rounds, seed, measured)
        done += rounds
        left = (time.monotonic() - began) * (work - done) / done
        say(
            f"{number}/{len(missing)}  {CASES[name].title}: T = {rounds}, seed {seed}, "
            f"{CASES[name].measure} {measured.value:.3g}, about {left:.0f} s left"
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, list(known.values()))
    return RatesResult(tuple(known[each] for each in wanted))


def _plan(cases: Sequence[str] | None, small: bool, seeds: int) -> list[tuple[str, int, int]]:
    """(case, T, seed) of all that is wanted; short runs first, so that a first picture comes soon."""
    names = [name for name in CASES if cases is None or name in cases]
    unknown = sorted(set(cases or ()) - set(CASES))
    if unknown:
        raise ValueError(f"`cases` must be among {list(CASES)}, got {unknown[0]!r}.")
    planned = []
    for name in names:
        # What is asked for by name is measured, small or not.
        chosen = CASES[name].small if small else CASES[name].rounds
        if small and not chosen and cases is not None:
            chosen = CASES[name].rounds[:3]
        planned += [(name, rounds, seed) for rounds in chosen for seed in range(seeds)]
    return planned


def _write(path: Path, points: Sequence[Point]) -> None:
    result = RatesResult(tuple(points))
    slopes: dict[str, Any] = {}
    for case in result.cases:
        counts = {len(row) for row in result.values(case.name).values()}
        if len(result.values(case.name)) > 1 and len(counts) == 1:
            slopes[case.name] = {
                "measured": _finite(asdict(result.slope(case.name))),
                "expected": result.expected(case.name),
            }
    content = {
        "fmol": __version__,
        "settings": dict(SETTINGS),
        "slopes": slopes,
        "points": [asdict(point) for point in points],
    }
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """One seed has no interval: null, which every JSON reader knows."""
    return {name: None if abs(value) == float("inf") else value for name, value in values.items()}


def _read(path: Path) -> dict[tuple[str, int, int], Point]:
    """The points that `path` has; raises where they are not ones of these settings."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        same = content["settings"] == json.loads(json.dumps(dict(SETTINGS)))
        found = [_point(each) for each in content["points"]]
    except (ValueError, KeyError, TypeError) as error:
        raise MisuseError(
            f"`{path}` is not what was written there ({error}). Name another folder, or remove it."
        ) from error
    if not same:
        raise MisuseError(
            f"`{path}` holds points of other settings, which cannot be gone on with. Name another "
            "folder."
        )
    return {(point.case, point.rounds, point.seed): point for point in found}


def _point(content: Mapping[str, Any]) -> Point:
    measured = dict(content["measured"])
    measured["steps"] = Steps(**measured["steps"])
    return Point(content["case"], content["rounds"], content["seed"], Measured(**measured))
