"""What TensorBoard and MLflow keep of a run is what the run reported."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fmol import FSMGDA, Result, fit
from fmol.alarms import Alarm
from fmol.engines.seam import Refusal
from fmol.listeners import Listener, MLflow, Progress, TensorBoard
from fmol.listeners import mlflow as mlflow_module
from fmol.listeners.scalars import scalars
from fmol.metrics import conflict
from fmol.rounds import Checkpoint, RoundReport
from support import data, federation

ROUNDS = 6
ODD = ("risk / β", "..", "a:b*c?")


def train(
    *listeners: Listener,
    rounds: int = ROUNDS,
    names: Sequence[str] = ("a", "b", "c"),
    resume: Checkpoint | None = None,
    **options: Any,
) -> Result:
    problem = federation([tuple(names)] * 3, names=names, held_out=data(9, seed=7))
    return fit(
        problem,
        FSMGDA(local_steps=2, batch_size=4),
        rounds,
        callbacks=listeners,
        resume=resume,
        **options,
    )


def expected(result: Result, spell: Any = str) -> dict[str, dict[int, float]]:
    """Name → step → value, from the reports alone."""
    curves: dict[str, dict[int, float]] = {}
    up = down = 0
    for report in result.reports:
        up, down = up + report.bytes_up, down + report.bytes_down
        totals = {"communication/bytes_up": float(up), "communication/bytes_down": float(down)}
        for name, value in (scalars(report, spell) | totals).items():
            curves.setdefault(name, {})[report.round] = value
    for name, loss in result.final.losses.items():
        curves[f"loss/train/{spell(name)}"][result.final.round] = loss
        for metric, value in result.final.held_out[name].items():
            curves[f"held_out/{spell(metric)}/{spell(name)}"][result.final.round] = value
    return curves


def test_every_listener_fits_the_protocol() -> None:
    kinds: list[type[Listener]] = [Progress, TensorBoard, MLflow]
    for kind in kinds:
        assert {"__call__", "finish", "close"} <= set(vars(kind)), kind


def test_importing_the_listeners_imports_neither_tensorboard_nor_mlflow() -> None:
    code = "import sys, fmol.listeners; print({'tensorboard', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_rounds_numbers_have_the_names_that_the_documentation_gives() -> None:
    (report,) = train(rounds=1).reports
    found = scalars(report)
    assert found["loss/train/a"] == report.losses["a"]
    assert found["held_out/loss/b"] == report.held_out["b"]["loss"]
    assert found["weight/c"] == report.weights["c"]
    assert found["delta_norm/a"] == report.delta_norms["a"]
    assert found["direction/norm_squared"] == report.direction_norm_squared
    pairs = [report.cosines[0, 1], report.cosines[0, 2], report.cosines[1, 2]]
    assert found["opposed_pairs"] == sum(float(pair) < 0 for pair in pairs) / 3
    assert found["conflict"] == float(conflict(report) or False)
    assert not any(math.isnan(value) for value in found.values())
    assert "direction/stationarity" not in found  # Not measured, so not there.


def with_trouble(report: RoundReport) -> RoundReport:
    alarm = Alarm("stall", "a", 1, "solved", "objective `a` has held all of the weight")
    return replace(report, alarms=(alarm,), refused=(Refusal(report.round, "c0", "a", "is NaN"),))


# ---- TensorBoard -----------------------------------------------------------------------------


def tensorboard_curves(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Tag → (step, value) in the order they are kept; and tag → text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    texts = {
        tag.removesuffix("/text_summary"): events.Tensors(tag)[-1]
        .tensor_proto.string_val[0]
        .decode()
        for tag in tags["tensors"]
    }
    return {t: [(e.step, e.value) for e in events.Scalars(t)] for t in tags["scalars"]}, texts


def assert_same_curves(
    found: dict[str, list[tuple[int, float]]], wanted: dict[str, dict[int, float]]
) -> None:
    assert set(found) == set(wanted)
    for name, curve in wanted.items():
        assert [step for step, _ in found[name]] == sorted(curve), name
        assert dict(found[name]) == pytest.approx(curve, rel=1e-6, abs=1e-30), name


def without_seconds(curves: dict[str, Any]) -> dict[str, Any]:
    return {name: curve for name, curve in curves.items() if not name.startswith("seconds/")}


@pytest.mark.parametrize("names", [("a", "b", "c"), ODD])
def test_tensorboard_keeps_every_number_of_a_run(tmp_path: Path, names: Sequence[str]) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    with TensorBoard(tmp_path) as board:
        result = train(board, names=names)
        board.finish(result)
    curves, texts = tensorboard_curves(tmp_path)
    assert_same_curves(curves, expected(result))
    assert [step for step, _ in curves[f"loss/train/{names[0]}"]] == list(range(ROUNDS + 1))
    assert texts["stopped"] == f"all {ROUNDS} rounds done"


def test_a_resumed_run_goes_on_in_the_same_curves_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    with TensorBoard(tmp_path) as board:
        first = train(board, rounds=3)
        board.finish(first)
        # Killed two rounds after its checkpoint: what came after it is computed once more.
        train(board, rounds=5, resume=first.checkpoint())
    with TensorBoard(tmp_path) as board:
        result = train(board, resume=first.checkpoint())
        board.finish(result)
    curves, _ = tensorboard_curves(tmp_path)
    assert_same_curves(without_seconds(curves), without_seconds(expected(result)))


def test_tensorboard_keeps_alarms_refusals_and_the_end_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    with pytest.raises(RuntimeError), TensorBoard(tmp_path) as board:  # noqa: PT012
        fit(
            federation(),
            FSMGDA(local_steps=1),
            rounds=2,
            callbacks=[lambda report, snapshot: board(with_trouble(report), snapshot)],
        )
        raise RuntimeError("the disk is full")
    _, texts = tensorboard_curves(tmp_path)
    assert texts["alarm/stall"] == "objective `a` has held all of the weight"
    assert "round 0, client `c0`, objective `a`: is NaN" in texts["refused"]
    assert texts["stopped"] == "RuntimeError: the disk is full"


def test_rounds_without_losses_leave_no_points_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`")
    with TensorBoard(tmp_path) as board:
        train(board, evaluate_every=3)
    curves, _ = tensorboard_curves(tmp_path)
    assert [step for step, _ in curves["loss/train/a"]] == [0, 3]
    assert [step for step, _ in curves["weight/a"]] == list(range(ROUNDS))


@pytest.mark.parametrize(
    ("kind", "missing", "extra"),
    [
        (TensorBoard, "torch.utils.tensorboard", "tensorboard"),
        (MLflow, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, missing: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'pip install "fmol\[{extra}\]"'):
        kind(tmp_path)


# ---- MLflow ----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs; reading one needs MLflow's word of consent, as writing does."""
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path / "runs"


def client(store: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri=str(store))


def mlflow_curves(store: Path, run_id: str) -> dict[str, list[tuple[int, float]]]:
    reader = client(store)
    return {
        key: [(m.step, m.value) for m in reader.get_metric_history(run_id, key)]
        for key in reader.get_run(run_id).data.metrics
    }


@pytest.mark.parametrize("names", [("a", "b", "c"), ODD])
def test_mlflow_keeps_every_number_of_a_run(store: Path, names: Sequence[str]) -> None:
    params = {"algorithm": {"name": "FSMGDA", "local_steps": 2}, "seed": 0}
    with MLflow(store, experiment="tests", run_name="first", params=params) as tracker:
        result = train(tracker, names=names)
        tracker.finish(result)
    spell = mlflow_module._spell
    assert_same_curves(mlflow_curves(store, tracker.run_id), expected(result, spell))
    run = client(store).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {
        "algorithm.name": "FSMGDA",
        "algorithm.local_steps": "2",
        "seed": "0",
    }
    assert run.data.tags["stopped"] == result.stopped
    assert client(store).get_experiment_by_name("tests").experiment_id == run.info.experiment_id


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(store: Path) -> None:
    with MLflow(store, params={"rounds": 3}) as tracker:
        first = train(tracker, rounds=3)
        tracker.finish(first)
    with MLflow(store, params={"rounds": ROUNDS}, run_id=tracker.run_id) as again:
        assert client(store).get_run(tracker.run_id).info.status == "RUNNING"
        result = train(again, resume=first.checkpoint())
        again.finish(result)
    curves = mlflow_curves(store, tracker.run_id)
    assert_same_curves(without_seconds(curves), without_seconds(expected(result)))
    run = client(store).get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rounds": "3"}
    assert run.data.tags["resumed with rounds"] == str(ROUNDS)


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("no"), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_mlflow_knows_how_a_run_ended(store: Path, error: BaseException, status: str) -> None:
    def end(report: RoundReport, snapshot: object) -> None:
        if report.round == 2:
            raise error

    with pytest.raises(type(error)), MLflow(store) as tracker:
        fit(federation(), FSMGDA(local_steps=1), 5, callbacks=[tracker, end])
    run = client(store).get_run(tracker.run_id)
    assert run.info.status == status
    assert run.data.tags["stopped"].startswith(type(error).__name__)
    assert [step for step, _ in mlflow_curves(store, tracker.run_id)["weight/a"]] == [0, 1, 2]


def test_mlflow_keeps_alarms_and_refusals_as_tags(store: Path) -> None:
    with MLflow(store) as tracker:
        fit(
            federation(),
            FSMGDA(local_steps=1),
            rounds=2,
            callbacks=[lambda report, snapshot: tracker(with_trouble(report), snapshot)],
        )
    tags = client(store).get_run(tracker.run_id).data.tags
    assert tags["alarm.stall.a"] == "objective `a` has held all of the weight"
    assert tags["refused"] == "round 0, client `c0`, objective `a`: is NaN"


def test_many_numbers_go_to_mlflow_in_pieces_that_it_takes(store: Path) -> None:
    tracker = MLflow(store)
    sizes: list[int] = []
    log_batch = tracker._client.log_batch

    def counted(run_id: str, metrics: Sequence[object]) -> None:
        sizes.append(len(metrics))
        log_batch(run_id, metrics=metrics)

    tracker._client.log_batch = counted
    tracker._add({f"m{i}": float(i) for i in range(2500)}, step=0)
    tracker.close()
    assert sizes == [1000, 1000, 500]
    assert len(client(store).get_run(tracker.run_id).data.metrics) == 2500


def test_a_store_that_fails_for_a_while_costs_neither_the_run_nor_its_numbers(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_module, "EVERY", 0.0)
    tracker = MLflow(store)
    log_batch, calls = tracker._client.log_batch, 0

    def sometimes(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise OSError("the network is away")
        log_batch(*args, **options)

    tracker._client.log_batch = sometimes
    with caplog.at_level(logging.WARNING, "fmol"), tracker:
        result = train(tracker)
        tracker.finish(result)
    assert [record.getMessage() for record in caplog.records] == [
        "MLflow does not answer, training goes on: the network is away"
    ]
    assert_same_curves(mlflow_curves(store, tracker.run_id), expected(result))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a//b", "a\nb", "λ‖d‖", "x" * 400, "日本" * 100, "a:b", "\udc80"]
)
def test_any_name_becomes_one_that_mlflow_takes(store: Path, name: str) -> None:
    spelled = mlflow_module._spell(name)
    with MLflow(store, params={name: 1}) as tracker:
        tracker._add({f"loss/train/{spelled}": 1.0}, step=0)
    found = client(store).get_run(tracker.run_id).data
    assert found.metrics == {f"loss/train/{spelled}": 1.0}
    assert found.params == {spelled: "1"}


def test_names_that_are_spelled_alike_stay_apart() -> None:
    names = ["a/b", "a:b", "a_b", "a*b", "A_b", "x" * 60, "x" * 61, "x" * 62]
    assert len({mlflow_module._spell(name) for name in names}) == len(names)
    assert mlflow_module._spell("größe 1-a.b_c") == "größe 1-a.b_c"


def test_a_place_where_mlflow_cannot_keep_runs_is_an_error_at_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    with pytest.raises(ValueError, match="`uri` is 'nowhere://x', and MLflow cannot keep runs"):
        MLflow("nowhere://x")


@pytest.mark.filterwarnings(  # MLflow's own mappers, with SQLAlchemy 2.1.
    "ignore:The ``noload`` loader strategy is deprecated"
)
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")  # MLflow's engine.
def test_mlflow_keeps_runs_in_a_database(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    for package in ("sqlalchemy", "alembic"):
        pytest.importorskip(package, reason="databases need the extra `mlflow`")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with MLflow(uri) as tracker:
        result = train(tracker)
        tracker.finish(result)
    found = tracker._client.get_metric_history(tracker.run_id, "loss/train/a")
    assert [m.value for m in found] == pytest.approx(result.losses[:, 0].tolist())


TELEMETRY = """
import os, sys, threading
import requests

asked = []

def refuse(self, method, url, **options):
    asked.append(url)
    raise requests.ConnectionError("nothing may leave a test")

requests.Session.request = refuse
before = dict(os.environ)
{first}
from fmol.listeners import MLflow
with MLflow(sys.argv[1]) as tracker:
    tracker._add({{"loss": 1.0}}, step=0)
for thread in threading.enumerate():
    if "Telemetry" in thread.name:
        thread.join(10)
print(len(asked))
left = {{k: v for k, v in os.environ.items() if "TELEMETRY_SESSION" not in k}}
assert left == before, set(left) ^ set(before)
"""


@pytest.mark.parametrize(
    ("first", "variables", "asks"),
    [
        ("", {}, False),
        ("", {"DO_NOT_TRACK": "true"}, False),
        ("", {"MLFLOW_DISABLE_TELEMETRY": "false"}, True),
        ("import mlflow", {}, True),
    ],
    ids=["by default", "not to be tracked", "wanted", "imported by the program before"],
)
def test_mlflow_reports_to_nobody_unless_somebody_decided_so(
    tmp_path: Path, first: str, variables: dict[str, str], asks: bool
) -> None:
    """In a process of its own: MLflow decides once, and never sends from a test or from CI."""
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    kept = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "PYTHONPATH")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TELEMETRY.format(first=first), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        check=False,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout.split()[-1]) > 0) == asks
