"""A run in TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fmol.listeners.closing import Closing
from fmol.listeners.scalars import Beginnings, Traffic, final_scalars, scalars
from fmol.result import Result, Snapshot
from fmol.rounds import RoundReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoard"]


class TensorBoard(Closing):
    """A callback of `fit` that writes each round's numbers to `folder` for TensorBoard.

    The step is the round: a loss at step `t` is the loss at `x_t`, and `finish` writes the trained
    model's at the last one. A run that goes on in the same folder goes on in the same curves: what
    was there from its first round on is taken back. TensorBoard keeps float32.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        _writer_class()  # What is missing is said before training, not after its first round.
        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None
        self._traffic, self._beginnings = Traffic(), Beginnings()

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        """Writes one round."""
        writer = self._open(report.round)
        for name, value in (scalars(report) | self._traffic.add(report, snapshot)).items():
            writer.add_scalar(name, value, report.round)
        alarms, refused = self._beginnings.of(report)
        for alarm in alarms:
            writer.add_text(f"alarm/{alarm.kind}", alarm.message, report.round)
        if refused:
            writer.add_text("refused", "\n".join(f"- {each}" for each in refused), report.round)

    def finish(self, result: Result) -> None:
        """Writes how the trained model stands, and why training ended."""
        writer = self._open(result.final.round)
        for name, value in final_scalars(result.final).items():
            writer.add_scalar(name, value, result.final.round)
        writer.add_text("stopped", result.stopped, result.final.round)
        writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Closes the file; what broke the run, if something did, is written as text."""
        if self._writer is not None:
            if error is not None:
                self._writer.add_text("stopped", f"{type(error).__name__}: {error}")
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            # Opened only now: which steps are to be taken back is known from the first round alone.
            self._writer = _writer_class()(self._folder, purge_step=step)
        return self._writer


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            '`TensorBoard` needs tensorboard. Install it with: pip install "fmol[tensorboard]".'
        ) from error
    return SummaryWriter
