"""The progress line: what it says, when, and that it leaves a terminal as it should."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fmol import FMGDA, fit
from fmol.alarms import Alarm
from fmol.engines.seam import Refusal
from fmol.listeners import Progress
from fmol.rounds import RoundReport
from support import federation

ERASE = "\r\x1b[2K"
NAN = float("nan")


class Terminal(io.StringIO):
    """Looks like a terminal, and knows what stands on it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a reader sees: each line as it was last written."""
        return [line.split(ERASE)[-1] for line in self.getvalue().split("\n")]

    def states(self) -> list[str]:
        """All that the live line ever was."""
        return self.getvalue().split(ERASE)[1:]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def report(
    round: int,
    losses: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    norm_squared: float = 0.25,
) -> RoundReport:
    losses = {"left": 0.5, "right": 0.25} if losses is None else losses
    return RoundReport(
        round=round,
        cohort=("c0",),
        losses=losses,
        delta_norms={},
        weights={"left": 0.25, "right": 0.75} if weights is None else weights,
        direction_norm_squared=norm_squared,
    )


def play(
    stream: io.StringIO,
    rounds: int,
    seconds: float,
    *,
    start: int = 0,
    stop: int | None = None,
    names: Sequence[str] = ("left", "right"),
) -> None:
    clock = Clock()
    with Progress(names, rounds, stream=stream, clock=clock, start=start) as progress:
        for t in range(start, rounds if stop is None else stop):
            clock.now += seconds
            progress(report(t))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")


def test_the_line_says_round_time_left_pace_losses_direction_and_weight() -> None:
    terminal, clock = Terminal(), Clock()
    progress = Progress(("left", "right"), 100, stream=terminal, clock=clock)
    clock.now += 0.5
    progress(report(0))
    assert terminal.lines() == [
        "round 1/100  0:50 left  2 rounds/s  left 0.5  right 0.25  ‖d‖ 0.5  λ right 0.75"
    ]


def test_the_line_is_rewritten_in_place_and_finished_with_the_last_round() -> None:
    terminal = Terminal()
    play(terminal, rounds=3, seconds=1.0)
    assert terminal.getvalue().count("\n") == 1
    assert [state.split("  ")[0] for state in terminal.states()] == [
        "round 1/3",
        "round 2/3",
        "round 3/3",
    ]
    assert terminal.lines()[1] == ""
    assert "left " not in terminal.lines()[0].split("left 0.5")[0]  # No time is left.


def test_a_thousand_rounds_a_second_are_drawn_ten_times_a_second() -> None:
    terminal = Terminal()
    play(terminal, rounds=1000, seconds=0.001)
    assert 10 <= len(terminal.states()) <= 12
    assert terminal.lines()[0].startswith("round 1000/1000")


def test_elsewhere_there_are_lines_at_the_first_at_tenths_and_at_the_last() -> None:
    stream = io.StringIO()
    play(stream, rounds=1000, seconds=0.001)
    shown = [line.split("  ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["round 1/1000"] + [f"round {100 * i}/1000" for i in range(1, 11)]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_elsewhere_a_slow_run_gives_a_sign_of_life_every_ten_seconds() -> None:
    stream = io.StringIO()
    play(stream, rounds=10_000, seconds=1.0, stop=60)
    shown = [int(line[6:].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert shown == [1, 11, 21, 31, 41, 51, 60]


def test_every_line_is_flushed() -> None:
    class Watched(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    stream = Watched()
    play(stream, rounds=5, seconds=1.0)
    assert stream.flushed == stream.getvalue() != ""


def test_quiet_writes_nothing() -> None:
    terminal = Terminal()
    with Progress(("left",), 2, stream=terminal, quiet=True) as progress:
        progress.say("building the problem")
        progress(report(0))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "pace"), [(0.25, "4 rounds/s"), (1.0, "1 rounds/s"), (8.0, "8 s/round")]
)
def test_slow_runs_count_seconds_per_round(seconds: float, pace: str) -> None:
    stream = io.StringIO()
    play(stream, rounds=10, seconds=seconds)
    assert all(line.split("  ")[-5] == pace for line in stream.getvalue().splitlines())


def test_the_pace_is_that_of_the_last_fifty_rounds() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(("left", "right"), 200, stream=stream, clock=clock)
    for t in range(200):
        clock.now += 10.0 if t < 100 else 1.0
        progress(report(t))
        if t == 159:
            progress.close()
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("round 160/"))
    assert line.startswith("round 160/200  0:40 left  1 rounds/s")


def test_what_came_before_the_first_round_does_not_slow_the_pace() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(("left", "right"), 10, stream=stream, clock=clock)
    progress.say("building the problem")
    clock.now += 60.0
    for t in range(10):
        clock.now += 2.0
        progress(report(t))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "building the problem"
    assert lines[2].startswith("round 2/10  0:16 left  2 s/round")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_resumed_run_knows_how_much_is_left(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    play(stream, rounds=100, seconds=2.0, start=90, stop=91)
    assert stream.getvalue().removeprefix(ERASE).startswith("round 91/100  0:18 left  2 s/round")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.0, "0:59"), (3599.5, "1:00:00"), (7325.0, "2:02:05"), (90_000.0, "1 d 1 h")],
)
def test_time_left_is_readable(seconds: float, text: str) -> None:
    stream = io.StringIO()
    play(stream, rounds=2, seconds=seconds, stop=1)
    assert f"  {text} left  " in stream.getvalue()


def test_with_many_objectives_the_worst_the_median_and_the_best_are_named() -> None:
    names = [f"task {i}" for i in range(9)]
    stream = io.StringIO()
    progress = Progress(names, 1, stream=stream, clock=Clock())
    progress(report(0, {name: 1.0 + i for i, name in enumerate(names)}, {"task 3": 1.0}))
    assert "  worst task 8 9  median 5  best task 0 1  ‖d‖ 0.5  λ task 3 1.00" in stream.getvalue()


def test_a_loss_that_was_not_measured_stays_the_last_known_one() -> None:
    stream = io.StringIO()
    progress = Progress(("left", "right"), 2, stream=stream, clock=Clock())
    progress(report(0))
    progress(report(1, {"left": NAN, "right": 0.125}))
    assert "  left 0.5  right 0.125  " in stream.getvalue().splitlines()[1]


def test_what_a_round_does_not_have_is_not_shown() -> None:
    stream = io.StringIO()
    progress = Progress(("left", "right"), 2, stream=stream, clock=Clock())
    progress(report(0, {"left": NAN, "right": NAN}, {"left": NAN, "right": NAN}, NAN))
    progress(replace(report(1, weights={"left": 0.0, "right": 0.0}), held=True))
    first, second = stream.getvalue().splitlines()
    assert first == "round 1/2"
    assert second.endswith("held")


@pytest.mark.parametrize("columns", [1, 10, 40, 79])
@pytest.mark.parametrize("name", ["left", "左の数字", "é́" * 9, "👩‍🔬" * 4])
def test_the_live_line_never_wraps(
    monkeypatch: pytest.MonkeyPatch, columns: int, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    progress = Progress([name, "b"], 100, stream=terminal, clock=Clock())
    progress(report(0, {name: 0.1, "b": 0.2}, {name: 1.0}))
    (line,) = terminal.lines()
    wide = sum(
        1 + (unicodedata.east_asian_width(c) in "WF")
        for c in line
        if unicodedata.category(c)[0] not in "MC"
    )
    assert wide <= columns - 1
    if columns == 10:
        assert line == "round 1/…"


def test_names_cannot_move_the_cursor() -> None:
    terminal = Terminal()
    progress = Progress(["a\n\x1b[2Jb"], 2, stream=terminal, clock=Clock())
    progress(report(0, {"a\n\x1b[2Jb": 1.0}, {}))
    assert terminal.getvalue().count("\x1b") == 1
    assert "\n" not in terminal.getvalue()
    assert "a  [2Jb 1" in terminal.getvalue()


ALARM = Alarm("stall", "left", 3, "solved", "objective `left` holds 99 % of the weight")


def test_alarms_and_refusals_are_printed_once_above_the_line_when_they_begin() -> None:
    terminal, clock = Terminal(), Clock()
    refusal = Refusal(1, "c3", "left", "the update is not finite")
    with Progress(("left", "right"), 5, stream=terminal, clock=clock) as progress:
        for t in range(5):
            clock.now += 1.0
            trouble = t in (1, 2, 4)
            progress(
                replace(
                    report(t),
                    alarms=(ALARM,) if trouble else (),
                    refused=(refusal,) if trouble else (),
                )
            )
    lines = terminal.lines()
    alarm = "stall: objective `left` holds 99 % of the weight"
    refused = "refused: round 1, client `c3`, objective `left`: the update is not finite"
    assert lines[:4] == [alarm, refused, alarm, refused]
    assert lines[4].startswith("round 5/5")
    assert len(lines) == 6


def test_many_refusals_at_once_are_counted() -> None:
    stream = io.StringIO()
    refused = tuple(Refusal(0, f"c{i}", "left", "no") for i in range(50))
    Progress(("left",), 1, stream=stream, clock=Clock())(replace(report(0), refused=refused))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[3] == "refused: 47 more in round 0"


def test_phases_are_wiped_on_a_terminal_and_the_rounds_stay() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress(("left", "right"), 1, stream=terminal, clock=clock) as progress:
        progress.say("building the problem")
        assert terminal.lines() == ["building the problem"]
        progress(report(0))
        progress.say("evaluating")
        progress.say("writing the report")
        assert terminal.lines()[1] == "writing the report"
    first, last = terminal.lines()
    assert first.startswith("round 1/1")
    assert last == ""


def test_elsewhere_phases_are_lines() -> None:
    stream = io.StringIO()
    with Progress(("left", "right"), 1, stream=stream, clock=Clock()) as progress:
        progress.say("building the problem")
        progress(report(0))
        progress.say("evaluating")
    lines = stream.getvalue().splitlines()
    assert [lines[0], lines[1][:9], lines[2]] == ["building the problem", "round 1/1", "evaluating"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_leaves_its_last_round_and_a_fresh_line(
    error: type[BaseException],
) -> None:
    terminal, clock = Terminal(), Clock()
    with pytest.raises(error), Progress(("a",), 9, stream=terminal, clock=clock) as progress:  # noqa: PT012
        for t in range(3):
            clock.now += 0.01  # Too fast to be drawn each time.
            progress(report(t))
        raise error
    first, last = terminal.lines()
    assert first.startswith("round 3/9")
    assert last == ""


def test_closing_twice_does_nothing_more() -> None:
    terminal = Terminal()
    progress = Progress(("left",), 1, stream=terminal, clock=Clock())
    progress(report(0))
    progress.close()
    before = terminal.getvalue()
    progress.close()
    assert terminal.getvalue() == before


def test_a_stream_that_nobody_reads_any_more_does_not_stop_the_run() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    play(Broken(), rounds=3, seconds=1.0)
    closed = io.StringIO()
    closed.close()
    play(closed, rounds=3, seconds=1.0)


def test_a_stream_that_knows_no_greek_gets_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Progress(("left", "right"), 1, stream=stream, clock=Clock())(report(0))
    assert b"?d? 0.5  ? right 0.75" in raw.getvalue()


def test_a_dumb_terminal_gets_plain_lines_and_live_overrules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    dumb, live = Terminal(), io.StringIO()
    play(dumb, rounds=2, seconds=1.0)
    assert "\x1b" not in dumb.getvalue()
    Progress(("left",), 1, stream=live, live=True, clock=Clock())(report(0))
    assert live.getvalue().startswith(ERASE)


def test_it_follows_a_real_run() -> None:
    stream, problem = io.StringIO(), federation()
    with Progress(problem.names, 4, stream=stream) as progress:
        result = fit(problem, FMGDA(local_steps=1), rounds=4, callbacks=[progress])
        progress.finish(result)
    assert stream.getvalue().splitlines()[-1].startswith("round 4/4")
    assert f"a {result.losses[3, 0]:.4g}" in stream.getvalue().splitlines()[-1]
