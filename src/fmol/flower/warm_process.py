"""The warm process itself: answers one message after the other until nobody needs it any more."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Message, Metadata
from flwr.app.message.message import make_message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fmol.flower.frames import read_records, receive, send, table_to_context, write_records
from fmol.flower.warm import check_peer, load_app, locked

__all__ = ["serve"]

LOOK_SECONDS = 1.0
"""How often it looks for its SuperExec where the system cannot tell it."""

log = logging.getLogger("flwr")


def serve(listener: socket.socket, app: str, *, idle: float, watched: int, path: Path) -> str:
    """Answers messages, and returns why it stopped.

    `watched` is the process with which this one ends; `idle` is how many seconds it waits for a
    message; `path` is where the socket lies. Whoever asked and is gone takes this process along: nobody
    wants the answer, and what it is at cannot be stopped otherwise.
    """
    loaded: list[ClientApp] = []
    with _watch(watched) as gone:
        while not (why := _wait(listener, idle, gone, path)):
            connection, _ = listener.accept()
            with connection:
                try:
                    check_peer(connection)
                    table, blobs = receive(connection)
                    with _ending_with(connection, gone):
                        answer = _answer(app, loaded, table, blobs)
                    send(connection, *answer)
                except OSError as error:
                    log.warning(
                        "A message to the warm process was left without an answer: %s", error
                    )
    return why


def _answer(
    path: str, loaded: list[ClientApp], table: dict[str, Any], blobs: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    """What goes back for one message: the app's reply, or its error in words."""
    try:
        if not loaded:  # With the first message, so that whoever asked hears what went wrong.
            loaded.append(load_app(path))
        return _call(loaded[0], table, blobs)
    except Exception as error:  # noqa: BLE001 - told to whoever asked
        return {"error": type(error).__name__, "trace": traceback.format_exc()}, []


def _call(
    app: ClientApp, table: dict[str, Any], blobs: list[bytes]
) -> tuple[dict[str, Any], list[bytes]]:
    context = table_to_context(table["context"], blobs)
    metadata = Metadata(**table["metadata"])
    # Flower has these for the whole process, and each message may be of another run.
    TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id
    TaskIdentity.task_id = table["task"]
    message: Message = make_message(metadata, content=read_records(table["content"], blobs))
    reply = app(message, context)
    out: list[bytes] = []
    if reply.has_error():
        said = {"error": f"Flower's error {reply.error.code}", "trace": reply.error.reason or ""}
        return said, []
    content = write_records(reply.content, out)
    return {"content": content, "state": write_records(context.state, out)}, out


# ---- when it ends ----------------------------------------------------------------------------


@contextlib.contextmanager
def _watch(pid: int) -> Iterator[int]:
    """A file that can be read once the process has ended."""
    try:
        file = os.pidfd_open(pid)
    except (AttributeError, OSError):
        file = _look_for(pid)
    try:
        yield file
    finally:
        os.close(file)


def _look_for(pid: int) -> int:
    """The same where the system has no such file: a thread looks every now and then."""
    ours, theirs = os.pipe()

    def look() -> None:
        with contextlib.suppress(OSError):
            while True:
                os.kill(pid, 0)
                threading.Event().wait(LOOK_SECONDS)
        os.close(theirs)

    threading.Thread(target=look, daemon=True).start()
    return ours


def _wait(listener: socket.socket, idle: float, gone: int, path: Path) -> str:
    """Returns when somebody asks, or with the reason to stop; then nobody can ask any more."""
    ready, _, _ = select.select([listener.fileno(), gone], [], [], idle)
    if gone in ready:
        path.unlink(missing_ok=True)
        return "its SuperNode has ended"
    if ready:
        return ""
    with locked(path.parent):
        if select.select([listener], [], [], 0.0)[0]:
            return ""  # In the last moment.
        path.unlink(missing_ok=True)
    return f"there was no message for {idle:g} s"


@contextlib.contextmanager
def _ending_with(connection: socket.socket, gone: int) -> Iterator[None]:
    """While this goes on, whoever asked or the SuperNode ending ends this process at once."""
    ours, theirs = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([connection.fileno(), gone, ours], [], [])
        if ours not in ready:
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(theirs)
        thread.join()
        os.close(ours)


def main() -> None:
    config = json.load(sys.stdin)
    sys.path[:] = config["path"]
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        why = serve(
            listener,
            config["app"],
            idle=config["idle"],
            watched=config["watched"],
            path=Path(config["socket"]),
        )
    log.info("The warm process ends: %s.", why)


if __name__ == "__main__":
    main()
