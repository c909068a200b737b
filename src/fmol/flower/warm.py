"""A site's process that stays warm: torch, data and model are loaded once, and not for every message.

Flower starts a new process for each message to a site. `keep_warm` makes that process a thin one: it
hands the message to another on the same machine, which was started with the first message, keeps what
it has loaded, and ends with the SuperNode or when nothing came for a while.

The two talk over a socket in a folder that only their own user can enter, and each checks that the
other belongs to that user. When the warm process cannot be reached or ends half-way, the message is
answered in the short-lived process as if there were none; the log and the reply's record `fmol.warm`
say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fmol.flower.frames import (
    BY_ITSELF,
    NOTE,
    context_to_table,
    read_records,
    receive,
    send,
    write_records,
)

__all__ = ["NOTE", "SiteError", "WarmApp", "check_peer", "keep_warm", "load_app", "locked"]

SHORT_LIVED = "flwr-clientapp"
"""Flower's program that answers one message and ends."""
BACKLOG = 8
CONNECT_SECONDS = 10.0
"""How long it is tried to reach the warm process; what it is then asked may take any time."""
METADATA = (
    "run_id",
    "message_id",
    "src_node_id",
    "dst_node_id",
    "reply_to_message_id",
    "group_id",
    "created_at",
    "ttl",
    "message_type",
)
"""What the app is told of a message beside its content."""

log = logging.getLogger("flwr")
"""Flower's, so that it stands in the SuperNode's log among Flower's own lines."""


class SiteError(RuntimeError):
    """The site's app failed. What the server is told is the kind of error alone: its text may quote
    data, and stands with the traceback in the site's log."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"{kind}: what went wrong is in the site's log")


def keep_warm(app: str, *, idle: float = 1800.0) -> ClientApp:
    """A client app that lets `app`, the import path of another, answer in a process that stays.

    Let the module that calls this import nothing large, and name it as the `clientapp` component. What
    `app` keeps in its modules (`functools.cache` around loading data is the usual way) is there for the
    next message. After `idle` seconds without one the process ends. In a simulation, whose processes
    stay anyway, `app` is called directly.

    >>> keep_warm("my_app.site:app", idle=60.0)
    WarmApp('my_app.site:app', idle=60)
    """
    if ":" not in app:
        raise ValueError(f"`app` must be 'module:name', the path of a client app, got {app!r}.")
    if not idle > 0:
        raise ValueError(f"`idle` must be more than 0 seconds, got {idle!r}.")
    return WarmApp(app, idle)


class WarmApp(ClientApp):
    """What `keep_warm` returns."""

    def __init__(self, app: str, idle: float) -> None:
        super().__init__()
        self.app, self.idle = app, idle

    def __repr__(self) -> str:
        return f"WarmApp({self.app!r}, idle={self.idle:g})"

    def __call__(self, message: Message, context: Context) -> Message:
        if Path(sys.argv[0]).name != SHORT_LIVED:
            return _answer_here(self.app, message, context, BY_ITSELF)
        try:
            connection, how = _connect(self.app, self.idle)
        except OSError as error:
            return self._fall_back(message, context, f"it could not be started: {error}")
        with connection:
            try:
                table, blobs = _exchange(connection, message, context)
            except OSError as error:
                return self._fall_back(message, context, f"it ended before it answered: {error}")
        if "error" in table:
            log.error("The app of this site failed:\n%s", table["trace"])
            raise SiteError(table["error"])
        context.state = read_records(table["state"], blobs)
        content = read_records(table["content"], blobs)
        content[NOTE] = ConfigRecord({"where": how})
        return Message(content, reply_to=message)

    def _fall_back(self, message: Message, context: Context, why: str) -> Message:
        log.warning("The warm process did not answer, so this one does: %s", why)
        try:
            return _answer_here(self.app, message, context, why)
        except Exception as error:  # noqa: BLE001 - the server is told its kind, and the log the rest
            log.error("The app of this site failed:\n%s", traceback.format_exc())
            raise SiteError(type(error).__name__) from None


def load_app(path: str) -> ClientApp:
    """The client app of an import path; raises where it is none."""
    module, _, name = path.partition(":")
    app = getattr(importlib.import_module(module), name)
    if not isinstance(app, ClientApp):
        raise TypeError(f"`{path}` is a {type(app).__name__}. Give the path of a `ClientApp`.")
    return app


def _answer_here(app: str, message: Message, context: Context, why: str) -> Message:
    answer = load_app(app)(message, context)
    if answer.has_content():
        answer.content[NOTE] = ConfigRecord({"where": "here", "why": why})
    return answer


def _exchange(
    connection: socket.socket, message: Message, context: Context
) -> tuple[dict[str, Any], list[bytes]]:
    blobs: list[bytes] = []
    table = {
        "metadata": {name: getattr(message.metadata, name) for name in METADATA},
        "content": write_records(message.content, blobs),
        "context": context_to_table(context, blobs),
        "task": TaskIdentity.task_id,
    }
    send(connection, table, blobs)
    return receive(connection)


# ---- the other process -----------------------------------------------------------------------


def _connect(app: str, idle: float) -> tuple[socket.socket, str]:
    """A connection to the warm process, and whether that was `warm` or had to be started, `started`."""
    folder = private_folder()
    watched = os.getppid()  # The SuperExec: it ends with its SuperNode.
    identity = [app, watched, _started_at(watched), sys.executable, sys.path]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = folder / f"{name}.sock"
    with locked(folder):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        try:
            try:
                connection.connect(str(path))
                how = "warm"
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)  # Of one that has ended.
                _start(path, app, idle, watched)
                connection.connect(str(path))
                how = "started"
            check_peer(connection)
        except BaseException:
            connection.close()
            raise
    connection.settimeout(None)  # Training takes any time, and a process that ends is noticed.
    return connection, how


def _start(path: Path, app: str, idle: float, watched: int) -> None:
    """Starts the warm process. It is given the socket that listens, so nobody waits for it to be up."""
    config = {"app": app, "idle": idle, "watched": watched, "socket": str(path), "path": sys.path}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(BACKLOG)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fmol.flower.warm_process", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(config).encode())
    # It outlives this process on purpose, and nobody here will wait for it.
    process.returncode = 0


def private_folder() -> Path:
    """The folder of sockets, which only this user can enter; raises where another could.

    In `XDG_RUNTIME_DIR` where there is one, and otherwise in the folder for temporary files.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("this system has no unix sockets")
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "fmol" if base else Path(tempfile.gettempdir()) / f"fmol-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"`{folder}` is not a folder of this user's alone (owner {found.st_uid}, "
            f"mode {stat.filemode(found.st_mode)}). Remove it, or set XDG_RUNTIME_DIR."
        )
    return folder


def check_peer(connection: socket.socket) -> None:
    """Raises where the process at the other end belongs to another user."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return  # The folder's permissions are what keeps others out.
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    if user != os.getuid():
        raise PermissionError(f"the socket's other end belongs to user {user}, not {os.getuid()}.")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time: two messages do not start two processes, and none connects to one that ends."""
    import fcntl  # Not on every system; where it is not, there are no such sockets either.

    until = monotonic() + CONNECT_SECONDS
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() > until:
                    raise TimeoutError(f"`{folder}` was locked for {CONNECT_SECONDS:g} s") from None
                sleep(0.01)
        yield


def _started_at(pid: int) -> str:
    """When a process was started, so that a later one with its id is not taken for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
