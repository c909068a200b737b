"""What commands say, and where to."""

from __future__ import annotations

from collections.abc import Sequence

import click

from fmol.federation import Federation
from fmol.listeners import Progress
from fmol.training import Callback

__all__ = ["Console"]


class Console:
    """What a person at a terminal sees: progress on stderr, results on stdout; or nothing."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._progress: Progress | None = None

    def watch(self, federation: Federation, done: int, rounds: int) -> Sequence[Callback]:
        """A progress line for a run that begins."""
        self.close()
        self._progress = Progress(federation.names, rounds, quiet=self.quiet, start=done)
        return [self._progress]

    def say(self, text: str) -> None:
        """Something that goes on, or went otherwise than asked for."""
        if self._progress is not None:
            self._progress.say(text)
        elif not self.quiet:
            click.echo(text, err=True)

    def complain(self, text: str) -> None:
        """Something that failed while the rest goes on; said even when quiet."""
        self.close()
        click.echo(text, err=True)

    def print(self, *lines: str) -> None:
        """Results."""
        self.close()
        if not self.quiet:
            click.echo("\n".join(lines))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
