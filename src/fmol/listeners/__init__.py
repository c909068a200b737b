"""Who follows a run while it goes on: a progress line, TensorBoard, MLflow.

A listener is a callback of `fit` that also hears the end. Importing this package imports neither
TensorBoard nor MLflow; making one of theirs does.
"""

from __future__ import annotations

from typing import Protocol

from fmol.listeners.mlflow import MLflow
from fmol.listeners.progress import Progress
from fmol.listeners.tensorboard import TensorBoard
from fmol.result import Result, Snapshot
from fmol.rounds import RoundReport

__all__ = ["Listener", "MLflow", "Progress", "TensorBoard"]


class Listener(Protocol):
    """A callback of `fit` that is told how the run ended."""

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        """After each round."""

    def finish(self, result: Result) -> None:
        """After a run that came to its end, before `close`."""

    def close(self, error: BaseException | None = None) -> None:
        """At last, with what broke the run if something did; a second time does nothing."""
