"""Alarms: what goes wrong quietly in multi-objective training, said in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from fmol.federation import Population
from fmol.rules import Fixed

if TYPE_CHECKING:
    from fmol.rounds import RoundReport

__all__ = ["Alarm", "find_alarms"]

STALL_ROUNDS = 10
STALL_WEIGHT = 0.9
STALL_LENGTH = 0.1
STALL_PROGRESS = 0.01
CAUSE_CHANGES = 1.5
"""How many times as much the other cause must tell before a stall's is another than it was."""
REFUSED_ROUNDS = 3
STARVATION_ROUNDS = 20
STARVATION_WEIGHT = 1e-3
STARVATION_RISE = 0.01


@dataclass(frozen=True)
class Alarm:
    """Something a user should know, with what to do about it."""

    kind: str
    """`"stall"`, `"starvation"` or `"refused"`."""
    objective: str
    since: int
    """The first round of those in which it was seen without a break."""
    cause: str
    """For a stall `"solved"` or `"cancelled"`; for what is refused, why."""
    message: str


def find_alarms(
    reports: Sequence[RoundReport], population: Population, algorithm: object
) -> tuple[Alarm, ...]:
    """The alarms that stand after the last of `reports`; only the last few are looked at.

    Stall and starvation are for algorithms that choose weights, those with an option `normalize`;
    under weights that somebody fixed they are what was asked for.
    """
    if not reports:
        return ()
    alarms = [alarm for name in reports[-1].losses if (alarm := _refused(reports, name))]
    normalize = getattr(algorithm, "normalize", None)
    if normalize is None or isinstance(getattr(algorithm, "rule", None), Fixed):
        return tuple(alarms)
    for name in reports[-1].weights:
        for find in (_stall, _starvation):
            alarm = find(reports, name, population, normalize)
            if alarm is not None:
                alarms.append(alarm)
    return tuple(alarms)


def _refused(reports: Sequence[RoundReport], name: str) -> Alarm | None:
    """An objective takes no part in training, because all that was sent for it was refused."""
    count = 0
    for report in reversed(reports):
        if name not in report.missing or not any(r.objective == name for r in report.refused):
            break
        count += 1
    if count < REFUSED_ROUNDS:
        return None
    last = next(r for r in reports[-1].refused if r.objective == name)
    return Alarm(
        kind="refused",
        objective=name,
        since=reports[-count].round,
        cause=last.reason,
        message=(
            f"objective `{name}` has had no update since round {reports[-count].round}: all were "
            f"refused, in the last round that of client `{last.client}`, because {last.reason}. "
            "Look at the data and the loss of that objective."
        ),
    )


def _stall(
    reports: Sequence[RoundReport], name: str, population: Population, normalize: str
) -> Alarm | None:
    """One objective's tiny update is all of the direction, and the others stand still."""
    window, now = reports[-STALL_ROUNDS:], reports[-1]
    if len(window) < STALL_ROUNDS:
        return None
    if not all(_dominates_with_little(r, name, normalize) for r in window):
        return None
    stuck = [
        other
        for other in now.losses
        if other != name and _improvement(reports, STALL_ROUNDS, other) < STALL_PROGRESS
    ]
    if not stuck:
        return None
    lengths = _lengths(window, name)
    standing = _standing("stall", name, window)
    cause = lengths.cause(standing.cause if standing else "")
    since = standing.since if standing else window[0].round
    return Alarm(
        kind="stall",
        objective=name,
        since=since,
        cause=cause,
        message=(
            f"objective `{name}` has held {now.weights[name]:.1%} of the weight since round {since} "
            f"with an update of length {lengths.mean:.3g}, where the others' median is "
            f"{lengths.their_mean:.3g}; {lengths.because(cause)}. Meanwhile {_list(stuck)} improved by "
            f"less than {STALL_PROGRESS:.0%} in {STALL_ROUNDS} rounds. "
            f"Held by {_holders(name, population)}. {_advice(normalize, cause)}."
        ),
    )


@dataclass(frozen=True)
class _Lengths:
    """How long updates were over some rounds, an objective's and the others': medians."""

    mean: float
    """‖Δ_s‖, of the mean over its clients."""
    their_mean: float
    own: float
    """‖Δ_{s,i}‖ of its clients, by their root mean square, ‖Δ_s‖ √ρ_s."""
    their_own: float

    def cause(self, before: str) -> str:
        """Why the mean is short beside the others': each client's update is, or they cancel.

        ‖Δ_s‖ is the clients' own length times how far they agree, 1/√ρ_s: the cause is the factor in
        which the objective falls further behind the others. Clients never agree in full, since their
        batches differ. Where both are nearly the same it is the cause of the round `before`.
        """
        behind = self.own / self.their_own
        apart = (self.mean / self.own) / (self.their_mean / self.their_own) if self.own else 1.0
        if before and behind < CAUSE_CHANGES * apart and apart < CAUSE_CHANGES * behind:
            return before
        return "solved" if behind <= apart else "cancelled"

    def because(self, cause: str) -> str:
        """The cause in words, with the numbers it is told by."""
        if not self.mean:
            return "its clients' own updates cancel to nothing" if self.own else "all are zero"
        return (
            f"its clients' own updates, of length {self.own:.3g} beside the others' "
            f"{self.their_own:.3g}, are {self.own / self.mean:.3g} times as long as their mean (the "
            f"others' {self.their_own / self.their_mean:.3g} times): "
            + (
                "they are short by themselves, so it is solved, or its loss small by its scale"
                if cause == "solved"
                else "they partly cancel"
            )
        )


def _lengths(window: Sequence[RoundReport], name: str) -> _Lengths:
    """Over the whole window, since batches make ρ_s of a single round jump about."""

    def own(report: RoundReport, objective: str) -> float:
        spread = report.spread.get(objective, 1.0)
        return math.inf if spread == math.inf else report.delta_norms[objective] * spread**0.5

    return _Lengths(
        mean=median(r.delta_norms[name] for r in window),
        their_mean=median(median(r.delta_norms[o] for o in _others(r, name)) for r in window),
        own=median(own(r, name) for r in window),
        their_own=median(median(own(r, o) for o in _others(r, name)) for r in window),
    )


def _starvation(
    reports: Sequence[RoundReport], name: str, population: Population, normalize: str
) -> Alarm | None:
    """An objective without weight whose loss rises, and not by rounding alone."""
    window = reports[-STARVATION_ROUNDS:]
    if len(window) < STARVATION_ROUNDS or not all(_starves(r, name) for r in window):
        return None
    before, after = _first_and_last(reports, STARVATION_ROUNDS, name)
    if not after > before + STARVATION_RISE * abs(before):
        return None
    standing = _standing("starvation", name, window)
    since = standing.since if standing else window[0].round
    return Alarm(
        kind="starvation",
        objective=name,
        since=since,
        cause="",
        message=(
            f"objective `{name}` has had a weight below {STARVATION_WEIGHT:g} since round {since} "
            f"while its loss rose from {before:.4g} to {after:.4g}. Held by "
            f"{_holders(name, population)}. {_advice(normalize, 'starved')}."
        ),
    )


def _advice(normalize: str, cause: str) -> str:
    """What to set, given what is set already."""
    target = "give it a target with `Objective(target=…)`"
    agree = "larger batches, data divided more evenly, or fewer local steps"
    if cause == "cancelled":
        if normalize == "none":
            return (
                'Set `normalize="l2"` or `"loss"`. Where that does not do, what may let its clients '
                f"agree more: {agree}"
            )
        return f"{_capital(target)}; what may let its clients agree more: {agree}"
    if normalize in ("loss", "loss+"):
        return _capital(target) if cause == "solved" else "Give the others targets"
    change = 'Set `normalize="loss"`' + (' or `"l2"`' if normalize == "none" else "")
    return f"{change}, or {target}" if cause == "solved" else change


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _dominates_with_little(report: RoundReport, name: str, normalize: str) -> bool:
    others = _others(report, name)
    if not others or name in report.protected or report.held:
        return False
    share = report.weights[name]
    if normalize != "none":
        # Weights on raw updates are large for short ones as such: what counts is the length spent.
        spent = {n: w * report.delta_norms[n] for n, w in report.weights.items() if w > 0}
        total = sum(spent.values())
        share = spent.get(name, 0.0) / total if total > 0 else 0.0
    if not share > STALL_WEIGHT:
        return False
    length = report.delta_norms[name]
    return length < STALL_LENGTH * median(report.delta_norms[o] for o in others)


def _others(report: RoundReport, name: str) -> list[str]:
    norms = report.delta_norms
    return [o for o in norms if o != name and norms[o] == norms[o]]


def _starves(report: RoundReport, name: str) -> bool:
    present = name not in report.missing and name not in report.protected and not report.held
    return present and report.weights[name] < STARVATION_WEIGHT


def _standing(kind: str, name: str, window: Sequence[RoundReport]) -> Alarm | None:
    """The alarm that stood after the round before, and that goes on."""
    before = window[-2].alarms
    return next((a for a in before if (a.kind, a.objective) == (kind, name)), None)


def _improvement(reports: Sequence[RoundReport], rounds: int, name: str) -> float:
    """Relative decrease of a loss over the last `rounds`; infinite where it was not measured."""
    before, after = _first_and_last(reports, rounds, name)
    decrease = (before - after) / abs(before) if before else math.nan
    return math.inf if math.isnan(decrease) else decrease


def _first_and_last(reports: Sequence[RoundReport], rounds: int, name: str) -> tuple[float, float]:
    """The loss as it was known when the last `rounds` began, and as it is known now; else NaN.

    Losses may be measured more seldom than that: then the first one is older.
    """
    known = _last_known(reports, len(reports) - 1, name)
    if known is None:
        return math.nan, math.nan
    first = _last_known(reports, min(len(reports) - rounds, known - 1), name)
    if first is None:  # Measured for the first time within the window.
        return math.nan, math.nan
    return reports[first].losses[name], reports[known].losses[name]


def _last_known(reports: Sequence[RoundReport], at: int, name: str) -> int | None:
    return next((i for i in range(at, -1, -1) if not math.isnan(reports[i].losses[name])), None)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _holders(name: str, population: Population) -> str:
    ids = population.holders(name)
    shown = ", ".join(f"`{ids[i]}`" for i in range(min(len(ids), 5)))
    return shown + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
