"""Nobody loses a run: kills, damaged files, full disks, vanished data, changed configs.

`pytest -m slow tests/end_to_end/test_survival.py` does all fifty kills. Counts are printed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("click")
pytest.importorskip("safetensors")

from fmol.config import Config, read_config
from fmol.engines import AutoEngine
from fmol.runs import RunError, RunFolder, resume, start
from fmol.runs.checkpoints import list_checkpoints, load_checkpoint
from fmol.runs.metrics_log import MetricsLog
from fmol.runs.training import StoppedError

ROUNDS = 12
FLAGS = {
    "problem": "quadratic",
    "rounds": str(ROUNDS),
    "checkpoint_every": "2",
    "local_steps": "2",
    "clients": "3",
    "samples": "8",
    "participation": "number,count=2",
    "on_missing_objective": "reuse",
    "assignment": "one-each",
    "device": "cpu",
}


def config(**flags: str) -> Config:
    return read_config({}, {**FLAGS, **flags})


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fmol", *arguments]


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Prints what was counted, whatever pytest captures."""
    with capsys.disabled():
        print(f"\n{text}")  # noqa: T201


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def rounds_in(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["round"] for line in map(json.loads, lines) if line["kind"] == "round"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    start(config(), folder)
    return folder


def assert_same(folder: Path, straight: Path) -> None:
    assert digest(folder) == digest(straight)
    assert rounds_in(folder) == list(range(ROUNDS))
    assert _without_times(folder) == _without_times(straight)
    assert len(list_checkpoints(folder / "checkpoints")) <= 2
    assert not list(folder.rglob("*.tmp"))


def _without_times(folder: Path) -> list[object]:
    """All that was measured but how long it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds", None)
        line["clients"].pop("seconds")
    return lines


# ---- kill -9 ---------------------------------------------------------------------------------

CALLS = ("fsync", "replace", "unlink", "open")
"""The calls to the system before which a run is killed, one after the other."""


def run_until_killed(work: Callable[[], object], at: int) -> bool:
    """Does `work` in a process of its own, killed before its `at`-th call; whether it was."""
    child = os.fork()
    if child == 0:
        _count_down(at)
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent looks at the code alone
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _count_down(at: int) -> None:
    left = [at]

    def killing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, killing(getattr(os, name)))
    Path.replace = killing(Path.replace)  # type: ignore[method-assign,assignment]
    Path.unlink = killing(Path.unlink)  # type: ignore[method-assign,assignment]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
# torch has threads of its own; the child computes with one and ends by `_exit`.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_kill_before_any_call_to_the_disk_loses_nothing(
    tmp_path: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills, step = 0, 5
    for at in range(1, 1000, step):
        folder = tmp_path / str(at)
        if not run_until_killed(partial(start, config(), folder), at):
            break
        kills += 1
        if (folder / "config.toml").is_file():
            resume(folder)
        else:
            start(config(), folder)
        assert_same(folder, straight)
    say(capsys, f"{kills} runs killed at a call to the disk, every one ended as without it")
    assert kills >= 10


def kill_at_random_moments(folder: Path, kills: int, seed: int) -> int:
    """Starts a run, kills it after a random time, goes on with it, and so on; kills that hit."""
    dice = random.Random(seed)
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in FLAGS.items() if name != "problem"
    ]
    flags.append("--threads=1")
    hit = 0
    for _ in range(kills):
        begun = (folder / "config.toml").is_file()
        arguments = (
            ["resume", str(folder)] if begun else ["run", "quadratic", "--out", str(folder), *flags]
        )
        process = subprocess.Popen(command(*arguments, "--quiet"), stderr=subprocess.PIPE)
        size = _size(folder)
        deadline = time.monotonic() + 120
        # Not before it has begun to write: what happens while Python starts needs no test.
        while process.poll() is None and _size(folder) == size and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.25))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hit += 1
        _, errors = process.communicate(timeout=120)
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        if process.returncode == 0:
            return hit
    subprocess.run(command("resume", str(folder), "--quiet"), check=True, timeout=300)
    return hit


def _size(folder: Path) -> tuple[int, int]:
    """Changes whenever a run has written something."""
    latest = 0
    files = list(folder.rglob("*")) if folder.exists() else []
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # A temporary file that has its name by now.
            latest = max(latest, path.stat().st_mtime_ns)
    return len(files), latest


def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    tmp_path: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hit = kill_at_random_moments(tmp_path / "run", kills=3, seed=0)
    assert hit >= 1
    assert_same(tmp_path / "run", straight)
    say(capsys, f"{hit} kills at random moments, the final model bit-identical, each round once")


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_nothing(
    tmp_path: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = runs = 0
    while done < 50:
        folder = tmp_path / str(runs)
        done += kill_at_random_moments(folder, kills=min(5, 50 - done), seed=runs)
        assert_same(folder, straight)
        runs += 1
        assert runs < 60
    say(capsys, f"{done} kills over {runs} runs, every final model bit-identical, each round once")


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(tmp_path: Path, straight: Path) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / number.name
        flags = flags_line(rounds="100000", checkpoint_every="1000000", threads="1").split()
        process = subprocess.Popen(
            command("run", "quadratic", "--out", str(folder), *flags),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not _has_rounds(folder, 3):
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == code
        assert f"fmol resume {folder}" in said
        assert len(list_checkpoints(folder / "checkpoints")) == 1
    done = len(rounds_in(folder))
    result = resume(folder, flags={"rounds": str(done + 3)})
    assert rounds_in(folder) == list(range(done + 3))
    assert len(result.reports) == done + 3


def _has_rounds(folder: Path, rounds: int) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= rounds


def test_an_interrupt_between_any_two_lines_of_bookkeeping_leaves_a_true_checkpoint(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right after the state of a round was taken, before the rest is noted."""
    real: Callable[[MetricsLog], str] = vars(MetricsLog)["sha256"].fget
    calls = {"n": 0}

    def sha256(self: MetricsLog) -> str:
        calls["n"] += 1
        if calls["n"] == 6:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(MetricsLog, "sha256", property(sha256))
    with pytest.raises(StoppedError):
        start(config(checkpoint_every="100"), tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert_same(tmp_path / "run", straight)


def test_two_processes_do_not_write_into_one_folder(stopped: Path, straight: Path) -> None:
    lock = RunFolder(stopped).take_lock()
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    done = subprocess.run(
        command("resume", str(stopped)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "is being written to by another process" in done.stderr
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    with lock:
        pass
    resume(stopped)
    assert_same(stopped, straight)


def test_going_on_with_more_rounds_takes_away_the_earlier_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    start(config(rounds="4"), folder)
    assert (folder / "summary.json").is_file()

    def watch(*_: object) -> list[Callable[..., None]]:
        def interrupt(report: object, snapshot: object) -> None:
            raise KeyboardInterrupt

        return [interrupt]

    with pytest.raises(StoppedError):
        resume(folder, flags={"rounds": "8"}, watch=watch)
    assert not (folder / "summary.json").exists()
    assert not (folder / "model.safetensors").exists()
    resume(folder)
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["rounds"] == 8


# ---- damaged files ---------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that was stopped after eight rounds of twelve, with checkpoints after 6 and 8."""
    folder = tmp_path / "run"
    stop_after(folder, 8)
    return folder


def stop_after(folder: Path, rounds: int, **flags: str) -> None:
    def watch(*_: object) -> list[Callable[..., None]]:
        def interrupt(report: object, snapshot: object) -> None:
            if getattr(report, "round", 0) == rounds - 1:
                raise KeyboardInterrupt

        return [interrupt]

    with pytest.raises(StoppedError, match=f"after {rounds} rounds.*fmol resume"):
        start(config(**flags), folder, watch=watch)


def test_any_flipped_bit_in_a_checkpoint_is_detected(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = list_checkpoints(stopped / "checkpoints")[0]
    content = latest.read_bytes()
    dice = random.Random(0)
    places = {0, 7, 8, 39, 40, len(content) - 1} | {
        dice.randrange(len(content)) for _ in range(300)
    }
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << dice.randrange(8)
        latest.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"damaged|does not begin"):
            load_checkpoint(latest)
    say(capsys, f"{len(places)} flipped bits in a checkpoint, all detected")


def test_any_truncation_of_a_checkpoint_is_detected(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = list_checkpoints(stopped / "checkpoints")[0]
    content = latest.read_bytes()
    lengths = [*range(80), *range(80, len(content), 37), len(content) - 1]
    for length in lengths:
        latest.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"damaged|does not begin"):
            load_checkpoint(latest)
    say(capsys, f"{len(lengths)} truncations of a checkpoint, all detected")


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_it_is_said(
    stopped: Path, straight: Path, damage: str
) -> None:
    latest, before = list_checkpoints(stopped / "checkpoints")
    content = bytearray(latest.read_bytes())
    content[len(content) // 2] ^= 4
    latest.write_bytes({"flip": bytes(content), "cut": bytes(content[:100]), "empty": b""}[damage])
    said: list[str] = []
    resume(stopped, say=said.append)
    assert any(latest.name in text for text in said)
    assert any(f"Going on from `{before.name}`" in text for text in said)
    assert_same(stopped, straight)
    assert any(latest.name in note for note in RunFolder(stopped).record().notes)


def test_with_all_checkpoints_damaged_it_is_refused_and_nothing_is_touched(stopped: Path) -> None:
    for path in list_checkpoints(stopped / "checkpoints"):
        path.write_bytes(b"nothing")
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=r"no checkpoint .* can be used.*Start the run anew"):
        resume(stopped)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_metrics_that_were_tampered_with_make_the_checkpoint_of_before_the_last_good_one(
    stopped: Path, straight: Path
) -> None:
    metrics = stopped / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"1", b"2", 1))
    said: list[str] = []
    resume(stopped, say=said.append)
    assert any("does not hold what" in text for text in said)
    assert_same(stopped, straight)


def test_what_came_after_the_checkpoint_is_cut_off(stopped: Path, straight: Path) -> None:
    latest = list_checkpoints(stopped / "checkpoints")[0]
    latest.unlink()  # As if it had been killed before: two rounds stand in the metrics for naught.
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "round", "round": 8, "half a li')
    resume(stopped)
    assert_same(stopped, straight)


# ---- no pickle -------------------------------------------------------------------------------

AUDITED = """
import pickle, sys, torch, fmol.cli.commands
found = []
sys.addaudithook(lambda event, arguments: event == "pickle.find_class" and found.append(arguments))
pickle.loads(pickle.dumps(print))
assert found, "the hook hears nothing"
found.clear()

def refused(*arguments, **named):
    raise AssertionError("something was to be unpickled")

pickle.load = pickle.loads = pickle.Unpickler = torch.load = refused
from fmol.runs import RunFolder, resume
resume(sys.argv[1])
RunFolder(sys.argv[1]).record()
assert not found, found
print("no pickle")
"""


def test_nothing_is_unpickled_on_any_load_path(stopped: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, str(stopped)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no pickle" in done.stdout


# ---- disks and data --------------------------------------------------------------------------

namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs `unshare -rm`, to have a disk of its own",
)


def on_a_small_disk(place: Path, size: str, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a shell script with a disk of `size` mounted at `place`, gone afterwards."""
    place.mkdir(exist_ok=True)
    fmol = " ".join(command())
    text = f'mount -t tmpfs -o size={size} tmpfs {place} && fmol() {{ {fmol} "$@"; }}\n{script}'
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", text],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def flags_line(**more: str) -> str:
    flags = {**FLAGS, **more}
    return " ".join(f"--{n.replace('_', '-')}={v}" for n, v in flags.items() if n != "problem")


@namespaces
def test_a_full_disk_is_a_clear_error_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    script = (
        f"fmol run quadratic --out {place}/run {flags_line(rounds='5000')} --quiet; echo code $?\n"
        f"ls {place}/run/checkpoints\n"
        f"mount -o remount,size=64m {place}\n"
        f"n=$(ls {place}/run/checkpoints | tail -1 | tr -dc 0-9 | sed 's/^0*//')\n"
        f"fmol resume {place}/run --rounds $((n + 4)) --quiet; echo code $?\n"
    )
    done = on_a_small_disk(place, "200k", script)
    assert "code 1" in done.stdout, done.stderr
    assert "No space left on device" in done.stderr
    assert "The last checkpoint is intact" in done.stderr
    assert "Traceback" not in done.stderr
    assert "round-" in done.stdout
    assert done.stdout.strip().endswith("code 0"), done.stdout + done.stderr


@namespaces
def test_a_folder_that_cannot_be_written_to_is_a_clear_error(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    script = (
        f"fmol run quadratic --out {place}/run {flags_line()} --quiet; echo code $?\n"
        f"mount -o remount,ro {place}\n"
        f"fmol resume {place}/run --rounds 20 --quiet; echo code $?\n"
        f"fmol run quadratic --out {place}/other {flags_line()} --quiet; echo code $?\n"
        f"ls {place}/run/checkpoints\n"
    )
    done = on_a_small_disk(place, "8m", script)
    assert done.stdout.split()[:6] == ["code", "0", "code", "1", "code", "1"], done.stderr
    assert done.stderr.count("Read-only file system") == 2
    assert "Traceback" not in done.stderr
    assert "round-00000012.ckpt" in done.stdout


def write_digits(folder: Path) -> None:
    """A few digits in MNIST's own format."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for part, count in (("train", 200), ("t10k", 60)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            path = folder / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes()))


MNIST = {
    "problem": "multimnist",
    "clients": "2",
    "samples": "20",
    "test_samples": "10",
    "model": "mlp",
    "assignment": "",
    "participation": "everyone",
}


def mnist_config(data_dir: Path, **flags: str) -> Config:
    chosen = {**FLAGS, **MNIST, "data_dir": str(data_dir), **flags}
    del chosen["assignment"]
    return read_config({}, chosen)


def test_vanished_data_are_a_clear_error_and_the_run_goes_on_once_they_are_back(
    tmp_path: Path,
) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    write_digits(data / "mnist")
    start(mnist_config(data, rounds="4"), folder)
    before = digest(folder)
    checkpoints = list_checkpoints(folder / "checkpoints")
    (data / "mnist").rename(tmp_path / "elsewhere")
    done = subprocess.run(
        command("resume", str(folder), "--rounds", "6"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "the data set `mnist`" in done.stderr
    assert "was not found" in done.stderr
    assert "Traceback" not in done.stderr
    assert list_checkpoints(folder / "checkpoints") == checkpoints
    assert digest(folder) == before
    resume(folder, flags={"rounds": "6", "data_dir": str(tmp_path / "elsewhere")})
    assert rounds_in(folder) == list(range(6))


def test_data_that_changed_since_the_start_are_refused(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    write_digits(data / "mnist")
    start(mnist_config(data, rounds="4"), folder)
    path = data / "mnist" / "train-images-idx3-ubyte.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[16:] = content[16:][::-1]
    path.write_bytes(gzip.compress(content))
    with pytest.raises(RunError, match="the problem is not what the run was started with"):
        resume(folder, flags={"rounds": "6"})


@pytest.mark.parametrize("choice", ["sequential", "vectorized"])
def test_a_resumed_run_keeps_the_engine_that_was_found_to_be_faster(
    tmp_path: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"sequential": (1.0, 2.0, 4), "vectorized": (2.0, 1.0, 4)}
    other = "vectorized" if choice == "sequential" else "sequential"
    monkeypatch.setattr(AutoEngine, "_time", lambda self, asks: times[choice])
    stop_after(tmp_path / "run", 4, engine="auto")
    monkeypatch.setattr(AutoEngine, "_time", lambda self, asks: times[other])
    resume(tmp_path / "run")
    start(config(engine=choice), tmp_path / "straight")
    assert digest(tmp_path / "run") == digest(tmp_path / "straight")
    known = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert known["engine"] == choice


# ---- what changed since the start ------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("local_steps = 2", "local_steps = 3", r"\[algorithm\] `local_steps` was 2 and is 3"),
        ("clients = 3", "clients = 4", r"\[problem\] `clients` was 3 and is 4"),
        ("seed = 0", "seed = 1", "`seed` was 0 and is 1"),
        ('normalize = "none"', 'normalize = "l2"', "`normalize` was 'none' and is 'l2'"),
    ],
)
def test_a_config_that_was_changed_since_the_start_is_refused_by_key(
    stopped: Path, old: str, new: str, key: str
) -> None:
    path = stopped / "config.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(RunError, match=f"{key}.*Change it back, or start a new run"):
        resume(stopped)


def test_how_long_and_how_often_may_change(stopped: Path) -> None:
    resume(stopped, flags={"rounds": "14", "checkpoint_every": "3"})
    assert rounds_in(stopped) == list(range(14))
    assert "rounds = 14" in (stopped / "config.toml").read_text(encoding="utf-8")
    resume(stopped)  # From the file alone: as it stands now.
    assert rounds_in(stopped) == list(range(14))


@pytest.mark.parametrize("what", ["fmol", "torch"])
def test_another_version_is_said_and_refused_unless_it_is_accepted(
    stopped: Path, straight: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from fmol.runs import identity

    if what == "fmol":
        monkeypatch.setattr(identity, "__version__", "9.9")
    else:
        monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(RunError, match=f"{what} was .* and is 9.9.*`--anyway`"):
        resume(stopped)
    said: list[str] = []
    resume(stopped, anyway=True, say=said.append)
    assert any(f"After round 8: {what} was" in text for text in said)
    assert any("9.9" in note for note in RunFolder(stopped).record().notes)
    assert_same(stopped, straight)


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stop_at.*which the federation does not have"):
        start(config(stop_at="nothing=0.1"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
