"""One live line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TextIO

from fmol.listeners.closing import Closing
from fmol.listeners.scalars import Beginnings
from fmol.result import Result, Snapshot
from fmol.rounds import RoundReport

__all__ = ["Progress"]

REDRAW = 0.1
"""Seconds between two states of the live line: a run of a thousand rounds a second is not slowed."""
EVERY = 10.0
"""Seconds between two plain lines that no tenth of the run asks for."""
WINDOW = 50
"""Rounds over which the pace is taken."""
MOST_NAMED = 4
"""With more objectives than this, losses are summed up as worst, median and best."""
MOST_REFUSALS = 3
"""Refusals of one round that are said one by one."""
ERASE = "\r\x1b[2K"
ZERO_WIDTH_JOINER = "\u200d"


class Progress(Closing):
    """A callback of `fit` that shows how far a run is, how fast, and with which losses.

    On a terminal it is one line that is rewritten, elsewhere a line at the first round, at each
    tenth, every ten seconds and at the last; `live` says which, where a guess is not wanted.
    Alarms and refusals are printed once, when they begin. `start` is how many rounds a resumed run
    has done before. Use it as a context manager, so that the line is finished whatever happens.

    >>> import io
    >>> from fmol import FMGDA, fit
    >>> from fmol.problems.quadratic import Quadratic
    >>> problem, out = Quadratic().build(), io.StringIO()
    >>> with Progress(problem.names, 20, stream=out) as progress:
    ...     result = fit(problem, FMGDA(local_steps=1), rounds=20, callbacks=[progress])
    >>> out.getvalue().startswith("round 1/20")
    True
    """

    # Without `rich`: a carriage return and one escape sequence are all that one line needs.

    def __init__(
        self,
        names: Sequence[str],
        rounds: int,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: int = 0,
    ) -> None:
        self._names, self._rounds, self._quiet, self._clock = tuple(names), rounds, quiet, clock
        self._stream = sys.stderr if stream is None else stream
        self._live = _is_terminal(self._stream) if live is None else live
        self._marks: deque[tuple[float, int]] = deque([(clock(), start)], maxlen=WINDOW + 1)
        self._anchored = True
        self._losses: dict[str, float] = {}
        self._beginnings = Beginnings()
        self._line = ""
        """The state after the last round, in words; empty when no round came since a phase."""
        self._shown = ""
        """What the reader saw last: a state, perhaps an earlier one, or a phase."""
        self._written_at = -math.inf
        self._open = False
        """Whether the cursor stands behind a live line."""

    def __call__(self, report: RoundReport, snapshot: Snapshot | None = None) -> None:
        """Shows a round's numbers, if it is time to."""
        now, done = self._clock(), report.round + 1
        first = not self._line
        before = self._marks[-1][1]
        if self._anchored and not first:
            # What came before the first round, as building the problem, says nothing on the pace.
            self._marks.popleft()
            self._anchored = False
        self._marks.append((now, done))
        self._losses |= {n: v for n, v in report.losses.items() if not math.isnan(v)}
        self._line = "  ".join(self._parts(report, done))
        alarms, refused = self._beginnings.of(report)
        for alarm in alarms:
            self._print(f"{alarm.kind}: {alarm.message}")
        for refusal in refused[:MOST_REFUSALS]:
            self._print(f"refused: {refusal}")
        if len(refused) > MOST_REFUSALS:
            self._print(f"refused: {len(refused) - MOST_REFUSALS} more in round {report.round}")
        tenth = done * 10 // max(self._rounds, 1) > before * 10 // max(self._rounds, 1)
        wait = REDRAW if self._live else EVERY
        due = now - self._written_at >= wait or (tenth and not self._live)
        if first or due or done >= self._rounds:
            self._show(self._line)

    def say(self, text: str) -> None:
        """Shows what goes on outside the rounds, as `evaluating`."""
        self._settle()
        self._show(text)
        self._marks, self._anchored = deque([(self._clock(), self._marks[-1][1])], WINDOW + 1), True

    def finish(self, result: Result) -> None:
        """Nothing: the last round has been shown, and a summary is for others to give."""

    def close(self, error: BaseException | None = None) -> None:
        """Finishes the live line with the last state, so that what follows has a line of its own."""
        self._settle()

    def _parts(self, report: RoundReport, done: int) -> list[str]:
        """What there is to say, the most important first: the end is what a narrow terminal cuts."""
        parts = [f"round {done}/{self._rounds}"]
        (earlier, from_round), (now, _) = self._marks[0], self._marks[-1]
        if now > earlier and done > from_round:
            pace = (done - from_round) / (now - earlier)
            if done < self._rounds:
                parts.append(f"{_duration((self._rounds - done) / pace)} left")
            parts.append(f"{pace:.3g} rounds/s" if pace >= 1 else f"{1 / pace:.3g} s/round")
        parts += self._loss_parts()
        if not math.isnan(report.direction_norm_squared):
            parts.append(f"‖d‖ {math.sqrt(max(report.direction_norm_squared, 0.0)):.3g}")
        weights = {n: w for n, w in report.weights.items() if w > 0}
        if report.held:
            parts.append("held")
        elif weights and len(self._names) > 1:
            name = max(weights, key=weights.__getitem__)
            parts.append(f"λ {name} {weights[name]:.2f}")
        return parts

    def _loss_parts(self) -> list[str]:
        losses = {n: self._losses[n] for n in self._names if n in self._losses}
        if len(losses) <= MOST_NAMED:
            return [f"{name} {loss:.4g}" for name, loss in losses.items()]
        worst, best = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
        return [
            f"worst {worst} {losses[worst]:.4g}",
            f"median {median(losses.values()):.4g}",
            f"best {best} {losses[best]:.4g}",
        ]

    def _settle(self) -> None:
        """Brings the last round's state up to date and leaves it standing; a phase is wiped."""
        if self._line and self._shown != self._line:
            self._show(self._line)
        if self._open:
            self._write("\n" if self._line else ERASE)
            self._open = False
        self._line = ""

    def _show(self, text: str) -> None:
        self._written_at, self._shown = self._clock(), text
        text = _printable(text)
        if self._live:
            self._write(ERASE + _cut(text, _columns(self._stream) - 1))
            self._open = True
        else:
            self._write(text + "\n")

    def _print(self, text: str) -> None:
        """A line that stays, above the live one."""
        self._write(f"{ERASE if self._open else ''}{_printable(text)}\n")
        if self._open:
            self._show(self._shown)

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads any more, as behind `| head`: no reason to stop a run.
            self._quiet = True


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _columns(stream: TextIO) -> int:
    """The width of the terminal behind `stream`; of standard output's where it has none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def _duration(seconds: float) -> str:
    whole = math.ceil(seconds)
    if whole >= 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _printable(text: str) -> str:
    """Without what would move the cursor: names may hold anything."""
    return "".join(c if c.isprintable() or c == ZERO_WIDTH_JOINER else " " for c in text)


def _cut(text: str, columns: int) -> str:
    """The beginning of `text` that fits, with `…` where something is missing."""
    if sum(map(_width, text)) <= columns:
        return text
    kept, used = "", 0
    for character in text:
        used += _width(character)
        if used > columns - 1:
            break
        kept += character
    return f"{kept}…" if columns > 0 else ""


def _width(character: str) -> int:
    """Columns a terminal gives to a character: 2 for wide ones, 0 for those that join another."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
