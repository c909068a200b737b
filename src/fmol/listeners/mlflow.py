"""A run in MLflow."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from types import ModuleType
from typing import Any

from fmol.listeners.closing import Closing
from fmol.listeners.scalars import Beginnings, Traffic, final_scalars, scalars
from fmol.result import Result, Snapshot
from fmol.rounds import RoundReport

__all__ = ["MLflow"]

logger = logging.getLogger("fmol")

MOST_METRICS = 1000
"""What MLflow takes in one request."""
MOST_PARAMS = 100
MOST_CHARACTERS = 60
"""The length of a name: MLflow allows more in all, and a file system fewer of those beyond ASCII."""
MOST_VALUE = 6000
"""The length of a parameter's value."""
EVERY = 5.0
"""Seconds between two requests, as long as there is room for more in one."""


class MLflow(Closing):
    """A callback of `fit` that logs each round's numbers as a run of MLflow.

    `uri` is where runs are kept: a server (`http://…`), a database (`sqlite:///…`), or a folder;
    left out, what `MLFLOW_TRACKING_URI` says or else MLflow's own default. `params` are logged once.
    `run_id` goes on with an earlier run: rounds that it has already are not logged again. The run
    ends as FINISHED, as FAILED after an error, as KILLED after Ctrl-C.

    A store that cannot be reached is an error when the listener is made. Later on it is a warning:
    numbers wait for the next try, and training goes on.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        experiment: str = "fmol",
        run_name: str | None = None,
        params: Mapping[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        self._mlflow = _import_mlflow()
        self._waiting: list[tuple[str, float, int, int]] = []
        self._sent_at = time.monotonic()
        self._failing = self._closed = False
        self._traffic, self._beginnings = Traffic(), Beginnings()
        self._client = _client(self._mlflow, uri)
        self._last_step: dict[str, int] = {}
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            kept = found.experiment_id if found else self._client.create_experiment(experiment)
            run_id = self._client.create_run(kept, run_name=run_name).info.run_id
        else:
            self._last_step = self._steps_of(run_id)
            self._client.update_run(run_id, status="RUNNING", name=run_name)
        self.run_id: str = run_id
        """Under which MLflow knows the run."""
        self._log_params(params or {})

    def __call__(self, report: RoundReport, snapshot: Snapshot) -> None:
        """Logs one round."""
        values = scalars(report, _spell) | self._traffic.add(report, snapshot)
        self._add(values, report.round)
        alarms, refused = self._beginnings.of(report)
        for alarm in alarms:
            self._tag(f"alarm.{alarm.kind}.{alarm.objective}", alarm.message)
        if refused:
            self._tag("refused", refused[-1])
        if len(self._waiting) >= MOST_METRICS or time.monotonic() - self._sent_at >= EVERY:
            self._send()

    def finish(self, result: Result) -> None:
        """Logs how the trained model stands, and why training ended."""
        self._add(final_scalars(result.final, _spell), result.final.round)
        self._send()
        self._tag("stopped", result.stopped)

    def close(self, error: BaseException | None = None) -> None:
        """Sends what waits and ends the run: FINISHED, or FAILED or KILLED after `error`."""
        if self._closed:
            return
        self._closed = True
        self._send()
        if self._waiting:
            logger.warning("MLflow did not take the last %d numbers.", len(self._waiting))
        status = "FINISHED"
        if error is not None:
            self._tag("stopped", f"{type(error).__name__}: {error}")
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
        with self._warned():
            self._client.set_terminated(self.run_id, status)

    def _add(self, values: Mapping[str, float], step: int) -> None:
        now = time.time_ns() // 1_000_000
        for name, value in values.items():
            if step > self._last_step.get(name, -1):
                self._waiting.append((name, value, now, step))

    def _send(self) -> None:
        metric = self._mlflow.entities.Metric
        self._sent_at = time.monotonic()
        with self._warned():
            while self._waiting:
                part = [metric(*each) for each in self._waiting[:MOST_METRICS]]
                self._client.log_batch(self.run_id, metrics=part)
                del self._waiting[:MOST_METRICS]
            self._failing = False

    def _log_params(self, params: Mapping[str, Any]) -> None:
        param = self._mlflow.entities.Param
        known = self._client.get_run(self.run_id).data.params
        texts = {_spell(key): str(value)[:MOST_VALUE] for key, value in _flat(params)}
        # MLflow keeps a parameter as it was first given; what changed in between is a tag.
        new = [param(key, text) for key, text in texts.items() if key not in known]
        for first in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self.run_id, params=new[first : first + MOST_PARAMS])
        for key, text in texts.items():
            if known.get(key, text) != text:
                self._tag(f"resumed with {key}", text)

    def _tag(self, key: str, text: str) -> None:
        with self._warned():
            self._client.set_tag(self.run_id, _spell(key), text[:MOST_VALUE])

    def _steps_of(self, run_id: str) -> dict[str, int]:
        """Metric → its last step in a run that is gone on with."""
        keys = self._client.get_run(run_id).data.metrics
        history = {key: self._client.get_metric_history(run_id, key) for key in keys}
        return {key: max(each.step for each in values) for key, values in history.items()}

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """A store that does not answer is a warning, once until it answers again."""
        try:
            yield
        except (self._mlflow.exceptions.MlflowException, OSError) as error:
            if not self._failing:
                logger.warning("MLflow does not answer, training goes on: %s", error)
            self._failing = True


def _spell(name: str) -> str:
    """`name` in what MLflow allows: letters and digits of any script, `_`, `-`, `.`, spaces.

    No slash either: in a folder `a` and `a/b` would be a file and a folder of the same name. A name
    that had to be changed ends in a few digits of its hash, so that no two become one.
    """
    clean = re.sub(r"[^\w.\- ]|^\.+$", "_", name)
    if clean == name and 0 < len(name) <= MOST_CHARACTERS:
        return name
    mark = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    return f"{clean[: MOST_CHARACTERS - 7]}-{mark}"


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _import_mlflow() -> ModuleType:
    """The package, with its usage statistics off unless somebody has decided on them.

    MLflow decides when it is imported, for as long as the process lives; so the variable is set for
    the import alone. Where a program imported MLflow before, that program has decided.
    """
    decided = {"MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"} & set(os.environ)
    first = "mlflow" not in sys.modules
    try:
        with _environment({"MLFLOW_DISABLE_TELEMETRY": "true"} if first and not decided else {}):
            import mlflow
            import mlflow.entities
            import mlflow.exceptions
    except ImportError as error:
        raise ImportError(
            '`MLflow` needs mlflow-skinny or mlflow. Install it with: pip install "fmol[mlflow]".'
        ) from error
    return mlflow


def _client(mlflow: ModuleType, uri: str | os.PathLike[str] | None) -> Any:
    where = None if uri is None else os.fspath(uri)
    folder = where is not None and (where.startswith("file:") or "://" not in where)
    # MLflow asks for this variable before it opens a folder; who names a folder has said so.
    with _environment({"MLFLOW_ALLOW_FILE_STORE": "true"} if folder else {}):
        try:
            client = mlflow.MlflowClient(tracking_uri=where)
            client.get_experiment_by_name("fmol")
        except (mlflow.exceptions.MlflowException, ImportError) as error:
            raise ValueError(
                f"`uri` is {where!r}, and MLflow cannot keep runs there: {str(error).strip()} "
                "Give a folder, a server's address, or install the database packages with: "
                'pip install "fmol[mlflow]".'
            ) from error
    return client


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment with `values`, and as it was before afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
