"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["is_leftover", "sync_folder", "write_whole"]


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes `path` so that a crash at any moment leaves the old content or the new, never a part.

    A temporary file beside it, synced to the disk, takes its name; then the folder is synced, or
    the new name itself could be lost. On failure nothing is left behind and the old file stands.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # What `mkstemp` makes is for the owner alone; a run is as readable as any file of theirs.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def is_leftover(path: Path) -> bool:
    """Whether `path` is the temporary file of a process that was killed while it wrote."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def sync_folder(folder: Path) -> None:
    """Makes names that were given or taken in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
