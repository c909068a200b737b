"""A run folder: what is in it, how it is read, and what is said where it cannot be written to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fmol.errors import MisuseError
from fmol.files import is_leftover, write_whole
from fmol.portrait import Portrait
from fmol.record import RunRecord
from fmol.runs.checkpoints import (
    CheckpointError,
    SavedState,
    checkpoint_rounds,
    list_checkpoints,
    load_checkpoint,
)
from fmol.runs.metrics_log import Salvage, holds, salvage_metrics

try:
    import fcntl
except ImportError:  # Not on Windows: there nothing keeps two processes apart.
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "RunError",
    "RunFolder",
    "RunMisuseError",
    "find_runs",
    "new_folder",
    "plain_numbers",
    "writing",
]


class RunError(Exception):
    """A run that cannot be started, read or gone on with, in a sentence that says what to do."""


class RunMisuseError(RunError, MisuseError):
    """The same where what was asked for is wrong: another folder or flag would do."""


class RunFolder:
    """The files of one run.

    `config.toml` what was asked for, every option with its value; `environment.json` on what it ran,
    from the start and after each resume; `federation.json` who holds what; `metrics.jsonl` a line per
    round; `checkpoints/` the last two; and at the end `model.safetensors`, `summary.json` and
    `report.html`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.federation = self.path / "federation.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model.safetensors"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.events = self.path / "tensorboard"
        self.lock = self.path / ".lock"

    @classmethod
    def create(cls, path: str | Path) -> RunFolder:
        """A new, empty run folder; raises where something is there already."""
        folder = cls(path)
        files = [file for file in folder.path.rglob("*") if file.is_file()]
        # What a run left that was killed while its folder was being made is nobody's.
        if any(not is_leftover(file) and file != folder.lock for file in files):
            again = f"`fmol resume {path}`" if folder.config.exists() else "another folder"
            raise RunMisuseError(
                f"`{path}` is not empty, and a run overwrites nothing. Name a new folder with "
                f"`--out`, or go on with {again}."
            )
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run folder at `path`; raises where there is none."""
        folder = cls(path)
        if not folder.path.is_dir():
            raise RunMisuseError(f"there is no folder `{path}`. Name the folder of a run.")
        if not folder.config.is_file():
            raise RunMisuseError(
                f"`{path}` is not the folder of a run: it has no `{folder.config.name}`. Name one "
                "that `fmol run` has made."
            )
        return folder

    def take_lock(self) -> contextlib.AbstractContextManager[object]:
        """Keeps other processes from writing into the folder until what it gives is closed.

        A process that is killed lets go of it.
        """
        if fcntl is None:
            return contextlib.nullcontext()
        file = self.lock.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise RunError(
                f"`{self.path}` is being written to by another process. Wait until it is done, or "
                "stop it."
            ) from error
        return file

    def remove_end(self) -> None:
        """Takes away what is written at the end of a run."""
        for file in (self.summary, self.model, self.report):
            file.unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        """Takes away what a run left that was killed while it wrote a file."""
        for place in (self.path, self.checkpoints):
            for file in place.glob(".*.tmp"):
                if is_leftover(file):
                    file.unlink(missing_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def remove_if_empty(self) -> None:
        """Takes the folder away again if no round was written into it."""
        if list_checkpoints(self.checkpoints) or (
            self.metrics.exists() and self.metrics.stat().st_size > 0
        ):
            return
        for file in (self.config, self.environment, self.federation, self.metrics, self.lock):
            file.unlink(missing_ok=True)
        for place in (self.checkpoints, self.path):
            with contextlib.suppress(OSError):  # What somebody else put there stays.
                place.rmdir()

    def write_json(self, path: Path, data: Mapping[str, Any]) -> None:
        write_whole(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, path: Path) -> dict[str, Any]:
        """The content of one of the folder's JSON files; raises where it is not whole."""
        try:
            data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _unreadable(path, error) from error
        except ValueError as error:
            raise RunError(f"`{path}` cannot be read: {error}. It may be damaged.") from error
        return data

    def path_from_here(self, file: Path) -> str:
        """A file's path as the folder's files have it: from the folder on, so that both may move."""
        try:
            return Path(os.path.relpath(file.resolve(), self.path.resolve())).as_posix()
        except ValueError:  # On another drive.
            return str(file.resolve())

    def problem_file(self) -> Path | None:
        """Where the file was that the run's problem is in; None where no file is named, or none was
        written down."""
        if not self.environment.is_file():
            return None
        known = self.read_json(self.environment).get("problem_file")
        return None if known is None else Path(os.path.normpath(self.path.resolve() / known))

    def last_state(self) -> tuple[SavedState | None, list[str]]:
        """The latest checkpoint that is whole, with its metrics, and what is wrong with later ones.

        None, with nothing said, for a run that was stopped before its first checkpoint.
        """
        said: list[str] = []
        found = list_checkpoints(self.checkpoints)
        for path in found:
            try:
                saved = load_checkpoint(path)
            except (CheckpointError, OSError) as error:
                said.append(f"{error}: it is not used.")
                continue
            if not holds(self.metrics, saved.metrics_bytes, saved.metrics_sha256):
                said.append(
                    f"`{self.metrics.name}` does not hold what `{path.name}` was written with: "
                    "it is not used."
                )
                continue
            if said:
                said.append(f"Going on from `{path.name}`, after {saved.rounds} rounds.")
            return saved, said
        if found:
            raise RunError(
                f"no checkpoint in `{self.checkpoints}` can be used. "
                + " ".join(said)
                + " Start the run anew in another folder."
            )
        return None, said

    def record(self, name: str = "", say: Callable[[str], None] | None = None) -> RunRecord:
        """The run as numbers and words, whether it has ended or not: what reports are made of.

        Where metrics are damaged, `say` is told which lines and what is left out, and so are the notes;
        without it that is an error.
        """
        from fmol.config import read_file

        tables = read_file(self.config)
        environment = self.read_json(self.environment) if self.environment.exists() else {}
        done = self._rounds_done()  # Before the metrics, to which a run may be adding.
        try:
            found = salvage_metrics(self.metrics)
        except OSError as error:
            raise _unreadable(self.metrics, error) from error
        damage = self._damage(found, done)
        if damage and say is None:
            raise RunError(
                f"{damage} `fmol report {self.path}` shows the rest. If only its end is damaged, `fmol "
                f"resume {self.path}` goes back to the last checkpoint before that."
            )
        if damage and say is not None:
            say(f"{damage} The rest is shown.")
        if not self.federation.is_file():
            raise RunMisuseError(f"`{self.path}` has no `{self.federation.name}`. Resume the run.")
        return RunRecord(
            name=name or self.path.name,
            algorithm=str(tables["algorithm"]["name"]),
            portrait=Portrait.from_json(self.read_json(self.federation)),
            reports=found.reports,
            final=found.final,
            stopped=found.stopped,
            seed=int(tables["seed"]),
            config=tables,
            environment=environment.get("started", {}),
            command=environment.get("command", ""),
            notes=(*environment.get("notes", ()), *([damage] if damage else [])),
        )

    def _rounds_done(self) -> int:
        """How many rounds the metrics must have, as far as the folder's other files tell."""
        if self.summary.is_file():
            try:
                return int(self.read_json(self.summary)["rounds"])
            except (RunError, KeyError, TypeError, ValueError):
                return 0  # Damaged itself, it tells nothing; and nothing of it is shown.
        # The oldest: a later one that is damaged may have been passed over.
        return min(map(checkpoint_rounds, list_checkpoints(self.checkpoints)), default=0)

    def _damage(self, found: Salvage, done: int) -> str:
        """What of the metrics is damaged or lost, in a sentence; empty where nothing is."""
        last = found.reports[-1].round if found.reports else -1
        end = found.final.round if found.final is not None else max(done, last + 1)
        there = {report.round for report in found.reports}
        lost = [round for round in range(end) if round not in there]
        ended = self.summary.is_file()
        # A run that has ended was not killed while it wrote the last line.
        damaged = [*found.damaged, *([found.cut_short] if ended and found.cut_short else [])]
        if not damaged and not lost:
            return ""
        what = [f"round{'s' * (len(lost) > 1)} {_listed(lost)}"] if lost else []
        what += ["how the trained model stands"] if ended and found.final is None else []
        what = what or [f"what came after round {last}" if there else "what stood there"]
        verb = "are" if len(lost) > 1 or len(what) > 1 else "is"
        how = "is not whole" if self.metrics.exists() else "is missing"
        if damaged:
            how = f"is damaged in line{'s' * (len(damaged) > 1)} {_listed(damaged)}"
        return f"`{self.metrics}` {how}: {' and '.join(what)} {verb} left out."


def _listed(numbers: Sequence[int]) -> str:
    """Numbers that rise, those in a row as one.

    >>> _listed([1, 3, 4, 5, 8]), _listed([1, 2])
    ('1, 3 to 5 and 8', '1 to 2')
    """
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    parts = [str(row[0]) if len(row) == 1 else f"{row[0]} to {row[-1]}" for row in rows]
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _unreadable(path: Path, error: OSError) -> RunMisuseError:
    reason = error.strerror or str(error)
    return RunMisuseError(f"`{path}` cannot be read: {reason}. Give leave to, or name another run.")


@contextlib.contextmanager
def writing(folder: RunFolder) -> Iterator[None]:
    """Turns a failure to write into a sentence that says what stands and what to do."""
    try:
        yield
    except OSError as error:
        there = folder.checkpoints.is_dir() and any(folder.checkpoints.glob("round-*.ckpt"))
        stands = (
            f"The last checkpoint is intact: make room or give leave to write, then `fmol resume "
            f"{folder.path}`."
            if there
            else "Nothing was lost: no round was done. Name another folder with `--out`."
        )
        reason = error.strerror or str(error)
        raise RunError(f"`{folder.path}` cannot be written to: {reason}. {stands}") from error


def find_runs(paths: Sequence[str | Path]) -> list[RunFolder]:
    """The run folders at `paths`; a folder of runs, as a sweep makes, stands for all in it."""
    found: list[RunFolder] = []
    for path in map(Path, paths):
        inside = sorted(each.parent for each in path.glob("*/config.toml")) if path.is_dir() else []
        if inside and not (path / "config.toml").is_file():
            found += [RunFolder.open(each) for each in inside]
        else:
            found.append(RunFolder.open(path))
    return found


def new_folder(root: str | Path, problem: str, algorithm: str, seed: int) -> Path:
    """A name under `root` that no run has yet, which says what it is of and when it began."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in problem).strip("-")
    when = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    base = Path(root) / f"{plain}-{algorithm}-seed{seed}-{when}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def plain_numbers(value: Any) -> Any:
    """The same with NaN as null: what every JSON reader knows."""
    if isinstance(value, Mapping):
        return {str(name): plain_numbers(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain_numbers(each) for each in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value
