"""How a command ends when it is stopped or fails: with a sentence and a code."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import click

from fmol.cli.failures import describe, is_foreseen, is_misuse
from fmol.errors import FmolError
from fmol.runs import RunError
from fmol.runs.training import StoppedError

__all__ = ["errors", "stop", "terminable"]

FAILED, MISUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM, by which clusters stop a job, do what Ctrl-C does: checkpoint and stop."""
    if threading.current_thread() is not threading.main_thread():  # Others hear no signals.
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        # Once is enough: a cluster may tell each process, and so does a sweep those it started; the
        # second must not break into the writing of the checkpoint.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt("terminated")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def errors() -> Iterator[None]:
    """Turns what was foreseen into a sentence and an exit code; lets the unforeseen show itself."""
    try:
        yield
    except StoppedError as error:
        stop(str(error), error.__cause__)
    except KeyboardInterrupt as error:
        stop("stopped", error)
    except BrokenPipeError:  # Who reads what is said has had enough; click ends without a word.
        raise
    except (RunError, FmolError, ImportError, OSError, ValueError) as error:
        click.echo("error: " * is_foreseen(error) + describe(error), err=True)
        sys.exit(MISUSED if is_misuse(error) else FAILED)


def stop(text: str, cause: BaseException | None) -> NoReturn:
    """Ends the process with what is to be said, and the code of the signal that stopped it."""
    click.echo(text, err=True)
    terminated = isinstance(cause, KeyboardInterrupt) and cause.args
    sys.exit(TERMINATED if terminated else INTERRUPTED)
