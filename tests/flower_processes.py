"""Processes that a test starts, and all that they start themselves: ended, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fmol.flower import SWITCHED_OFF

TESTS = Path(__file__).resolve().parent


def marked(mark: str) -> list[int]:
    """The processes with this in their environment, where there is a /proc to look at."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_command(
    line: Sequence[str],
    home: Path,
    *,
    timeout: float = 120,
    cwd: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """What a command prints; it and all that it started are ended, whatever happens."""
    environment = {
        **os.environ,
        **SWITCHED_OFF,
        "HOME": str(home),
        "FLWR_HOME": str(home / ".flwr"),
        "PYTHONPATH": str(TESTS),
        "FMOL_TEST": str(home),
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }
    process = subprocess.Popen(
        line,
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.wait()
        for pid in marked(f"FMOL_TEST={home}"):  # Some outlive a parent that is killed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, out
    return out


def run_script(script: str, home: Path, timeout: float = 120) -> str:
    """What a script prints."""
    return run_command([sys.executable, "-c", script], home, timeout=timeout)
