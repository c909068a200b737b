"""A run as it is written down: a line per round and checkpoints, and where it goes on from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmol.config import RunOptions
from fmol.result import Result, Snapshot
from fmol.rounds import Checkpoint, RoundReport
from fmol.runs.checkpoints import SavedState, remove_old, save_checkpoint
from fmol.runs.folder import RunError, RunFolder, writing
from fmol.runs.metrics_log import MetricsLog, read_metrics

__all__ = ["Keeper", "read_checkpoint"]

EVERY_ROUNDS, EVERY_SECONDS = 10, 60.0
"""Between two checkpoints, where nothing else is asked for: whichever comes first."""


@dataclass
class Keeper:
    """The callback that writes a run down: a line per round, and checkpoints."""

    folder: RunFolder
    identity: Mapping[str, Any]
    options: RunOptions
    saved: SavedState | None
    log: MetricsLog = field(init=False)
    latest: tuple[Checkpoint, int, str] | None = None
    """The state after the last round that was written to the log, and how much of the log that is."""

    def __post_init__(self) -> None:
        keep = 0 if self.saved is None else self.saved.metrics_bytes
        with writing(self.folder):
            self.log = MetricsLog(self.folder.metrics, keep)
        self.last_rounds = 0 if self.saved is None else self.saved.rounds
        self.last_time = time.monotonic()

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        with writing(self.folder):
            self.log.add(report)
            # One assignment: an interrupt may come between any two.
            self.latest = (snapshot.checkpoint(), self.log.bytes, self.log.sha256)
            if self._due():
                self.save()

    def _due(self) -> bool:
        assert self.latest is not None
        rounds = len(self.latest[0].reports) - self.last_rounds
        if self.options.checkpoint_every is not None:
            return rounds >= self.options.checkpoint_every
        return rounds >= EVERY_ROUNDS or time.monotonic() - self.last_time >= EVERY_SECONDS

    def save(self) -> int:
        """Writes a checkpoint of the latest round, unless it has one; how many rounds are done."""
        if self.latest is None or len(self.latest[0].reports) <= self.last_rounds:
            return self.last_rounds
        kept, size, sha256 = self.latest
        self.log.sync()  # A checkpoint may only speak of metrics that are on the disk.
        rounds = len(kept.reports)
        save_checkpoint(
            self.folder.checkpoints,
            SavedState(
                rounds, kept.state, kept.client_state, kept.seed, size, sha256, self.identity
            ),
        )
        self.last_rounds, self.last_time = rounds, time.monotonic()
        return rounds

    def finish(self, result: Result) -> None:
        """Writes the last checkpoint, and how the run ended behind the rounds of the log."""
        # Before the last line of the log: whoever goes on with more rounds cuts it off again.
        self.save()
        remove_old(self.folder.checkpoints)  # A killed run may have left one more.
        self.log.finish(result.final, result.stopped)

    def close(self) -> None:
        """Lets go of the log."""
        self.log.close()


def read_checkpoint(folder: RunFolder, saved: SavedState) -> Checkpoint:
    """What `fit` goes on from: the saved state, and the reports of the rounds before it."""
    reports, _, _ = read_metrics(folder.metrics, saved.metrics_bytes)
    if len(reports) != saved.rounds:
        raise RunError(
            f"the checkpoint is of {saved.rounds} rounds and `{folder.metrics.name}` holds "
            f"{len(reports)} of them. Start the run anew in another folder."
        )
    return Checkpoint(saved.state, tuple(reports), saved.client_state, saved.seed)
