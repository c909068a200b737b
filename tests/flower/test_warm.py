"""A site's warm process: it stays, is its user's alone, ends with its SuperNode, and can be missed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.supercore.task_identity import TaskIdentity

from flower_deployment import wait_until
from fmol.flower import warm
from fmol.flower.frames import FrameError, read_records, receive, send, write_records
from fmol.flower.warm import NOTE, SiteError, check_peer, keep_warm, private_folder
from warm_support import make_arrays

APP = "warm_support:app"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short-lived process as Flower starts it, with a folder for sockets of its own."""
    with TemporaryDirectory(prefix="fmol-") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        monkeypatch.setattr(sys, "argv", ["/somewhere/flwr-clientapp"])
        monkeypatch.setattr(TaskIdentity, "_run_id", 7)
        monkeypatch.setattr(TaskIdentity, "_node_id", 5)
        monkeypatch.setattr(TaskIdentity, "_task_id", 1)
        yield Path(base) / "fmol"


@pytest.fixture
def workers(folder: Path) -> Iterator[list[int]]:
    """The ids of warm processes that a test has seen; they are gone at its end."""
    seen: list[int] = []
    yield seen
    for pid in seen:
        if exists(pid):
            os.kill(pid, signal.SIGKILL)


def exists(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def new_context(node: int = 5) -> Context:
    return Context(
        run_id=7, node_id=node, node_config={"site": "a"}, state=RecordDict(), run_config={"k": 1}
    )


def ask(data: bytes = b"abc", do: str = "") -> Message:
    content = RecordDict({"arrays": make_arrays(data), "config": ConfigRecord({"do": do})})
    metadata = Metadata(7, "m", 1, 5, "", "3", time.time(), 60.0, "train")
    return make_message(metadata, content=content)


def told(reply: Message) -> dict[str, Any]:
    record = reply.content["told"]
    assert isinstance(record, MetricRecord)
    return dict(record)


def note(reply: Message) -> dict[str, Any]:
    return dict(reply.content.config_records[NOTE])


def test_what_was_loaded_with_the_first_message_is_there_for_the_second(
    workers: list[int],
) -> None:
    app, context = keep_warm(APP, idle=20.0), new_context()
    first, second = app(ask(b"abc"), context), app(ask(bytes(10**7)), context)
    workers.append(told(first)["pid"])
    assert told(first)["pid"] == told(second)["pid"] != os.getpid()
    assert [told(first)["asked"], told(second)["asked"]] == [1, 2]
    assert (note(first), note(second)) == ({"where": "started"}, {"where": "warm"})
    assert first.content["arrays"] == make_arrays(b"abc")
    assert second.content["arrays"] == make_arrays(bytes(10**7))
    assert first.metadata.reply_to_message_id == "m"
    assert dict(context.state["kept"]) == {"visits": 2, "raw": b"\0x"}


def test_the_folder_of_sockets_is_its_users_alone(folder: Path, workers: list[int]) -> None:
    workers.append(told(keep_warm(APP, idle=20.0)(ask(), new_context()))["pid"])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match=r"not a folder of this user's alone.*drwxr-x---"):
        private_folder()
    folder.chmod(0o700)


def test_a_link_in_place_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="not a folder of this user's alone"):
        private_folder()


def test_another_users_process_at_the_other_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_peer(ours)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(PermissionError, match="belongs to user"):
            check_peer(ours)


def test_without_a_warm_process_the_message_is_answered_here_and_it_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with heard(caplog):
        reply = keep_warm(APP)(ask(), new_context())
    assert told(reply)["pid"] == os.getpid()
    assert note(reply)["where"] == "here"
    assert "could not be started" in note(reply)["why"]
    assert "so this one does" in caplog.text


def test_a_warm_process_that_dies_half_way_loses_no_message(
    workers: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, context = keep_warm(APP, idle=20.0), new_context()
    workers.append(told(app(ask(), context))["pid"])
    # What kills the warm process is harmless here, as when memory was short only there.
    monkeypatch.setattr("warm_support.os._exit", lambda status: None)
    with heard(caplog):
        reply = app(ask(do="die"), context)
    assert told(reply)["pid"] == os.getpid()
    assert "ended before it answered" in note(reply)["why"]
    assert dict(context.state["kept"])["visits"] == 2
    after = app(ask(), context)
    workers.append(told(after)["pid"])
    assert note(after) == {"where": "started"}
    assert len({os.getpid(), *workers}) == 3


def test_of_an_error_of_the_app_the_server_hears_its_kind_and_the_log_the_rest(
    folder: Path, workers: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    app = keep_warm(APP, idle=20.0)
    with heard(caplog), pytest.raises(SiteError) as info:
        app(ask(do="fail"), new_context())
    assert str(info.value) == "ValueError: what went wrong is in the site's log"
    assert "the data of this site cannot be read" in caplog.text
    assert "warm_support.py" in caplog.text
    reply = app(ask(), new_context())
    workers.append(told(reply)["pid"])
    assert note(reply) == {"where": "warm"}
    os.kill(workers[0], signal.SIGKILL)
    folder.chmod(0o755)  # From now on this process has to answer by itself.
    with pytest.raises(SiteError, match=r"^ValueError: what went wrong is in the site's log$"):
        app(ask(do="fail"), new_context())


def test_it_ends_when_nothing_came_for_a_while(folder: Path, workers: list[int]) -> None:
    app = keep_warm(APP, idle=0.5)
    workers.append(told(app(ask(), new_context()))["pid"])
    assert wait_until(lambda: not exists(workers[0]), seconds=10.0)
    assert not list(folder.glob("*.sock"))
    workers.append(told(app(ask(), new_context()))["pid"])
    assert workers[0] != workers[1]


SHORT_LIVED = """
import sys
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
sys.argv = ["flwr-clientapp"]
from test_warm import APP, ask, new_context, told
from fmol.flower.warm import keep_warm
reply = keep_warm(APP, idle=60.0)(ask(do=sys.stdin.read().strip()), new_context())
print(told(reply)["pid"], flush=True)
"""
SUPEREXEC = """
import subprocess, sys, time
subprocess.run([sys.executable, "-c", sys.argv[1]], input=sys.argv[2], text=True)
time.sleep(60)
"""


@pytest.fixture
def superexec(folder: Path) -> Iterator[Any]:
    """Starts what stands for a SuperExec: it starts a short-lived process, and stays."""
    started: list[subprocess.Popen[str]] = []

    def start(do: str = "") -> subprocess.Popen[str]:
        here = Path(__file__).parent
        paths = os.pathsep.join([str(here), str(here.parent)])
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SUPEREXEC, SHORT_LIVED, do],
                env={**os.environ, "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_it_ends_with_its_supernode_and_two_of_them_have_two(
    superexec: Any, workers: list[int]
) -> None:
    one, other = superexec(), superexec()
    workers += [int(one.stdout.readline()), int(other.stdout.readline())]
    assert workers[0] != workers[1]
    one.kill()
    one.wait()
    assert wait_until(lambda: not exists(workers[0]), seconds=10.0)
    assert exists(workers[1])


def test_it_ends_with_whoever_asked_when_nobody_waits_for_the_answer(
    folder: Path, superexec: Any
) -> None:
    def children(of: int) -> list[int]:
        text = Path(f"/proc/{of}/task/{of}/children").read_text()
        return [int(word) for word in text.split()]

    process = superexec("sleep")
    asking = wait_until(lambda: children(process.pid), seconds=20.0)[0]
    worker = wait_until(lambda: children(asking), seconds=20.0)[0]
    time.sleep(4.0)  # By then it has the message and sleeps over it.
    assert exists(worker)
    os.kill(asking, signal.SIGKILL)
    assert wait_until(lambda: not exists(worker), seconds=10.0)


def test_in_a_process_that_stays_by_itself_there_is_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/python"])
    reply = keep_warm(APP)(ask(), new_context())
    assert told(reply)["pid"] == os.getpid()
    assert note(reply)["where"] == "here"
    assert not folder.exists()


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"`app` must be 'module:name'.*got 'site'"):
        keep_warm("site")
    with pytest.raises(ValueError, match="`idle` must be more than 0 seconds, got 0"):
        keep_warm(APP, idle=0)
    with pytest.raises(TypeError, match=r"`warm_support:not_an_app` is a int\. Give the path"):
        warm.load_app("warm_support:not_an_app")


def test_nothing_large_is_imported_in_the_short_lived_process() -> None:
    code = "import sys, fmol.flower.warm; print('torch' in sys.modules, 'ray' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_records_go_through_a_socket_unchanged() -> None:
    records = RecordDict(
        {
            "arrays": make_arrays(b"\1\2"),
            "metrics": MetricRecord({"a": 1, "b": 2.5, "many": [1.0, 2.0], "inf": float("inf")}),
            "config": ConfigRecord({"t": "x", "b": b"y", "n": True, "l": [b"1", b"2"], "e": []}),
        }
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        blobs: list[bytes] = []
        table = write_records(records, blobs)
        send(ours, table, blobs)
        assert read_records(*receive(theirs)) == records
        ours.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(FrameError, match="none of fmol's"):
            receive(theirs)
        ours.sendall(b"fmolwarm")
        ours.close()
        with pytest.raises(FrameError, match="ended after 8 of 16 bytes"):
            receive(theirs)


def test_a_frame_that_comes_bit_by_bit_arrives_whole() -> None:
    blob = bytes(range(256)) * 20_000  # More than a socket holds.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, {"n": 1}, [blob, b"", b"end"]))
        sender.start()
        assert receive(theirs) == ({"n": 1}, [blob, b"", b"end"])
        sender.join()


def heard(caplog: pytest.LogCaptureFixture) -> Any:
    """Flower's log does not go up to where pytest listens: it is told to for a while."""

    class Listening:
        def __enter__(self) -> None:
            logging.getLogger("flwr").addHandler(caplog.handler)

        def __exit__(self, *exc: object) -> None:
            logging.getLogger("flwr").removeHandler(caplog.handler)

    return Listening()
