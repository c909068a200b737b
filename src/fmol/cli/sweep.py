"""Many runs of one config: every combination of some options."""

from __future__ import annotations

import hashlib
import itertools
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fmol.cli.console import Console
from fmol.cli.failures import describe
from fmol.config import (
    Config,
    ConfigError,
    find_source,
    plain_value,
    read_config,
    read_file,
    toml_value,
)
from fmol.files import write_whole
from fmol.runs import RunFolder, RunMisuseError, resume, start
from fmol.runs.folder import new_folder
from fmol.runs.identity import changed_keys
from fmol.runs.training import StoppedError
from fmol.wording import many

__all__ = ["read_grid", "run_sweep"]


LONGEST = 200
"""Bytes of a folder's name; most file systems take 255."""
GRACE = 20.0
"""Seconds that runs in processes of their own have to write a checkpoint, once they are to stop."""
GLANCE = 0.05
"""Seconds between two looks at whether one of them has ended."""
MOST_NAMED = 8
"""Runs that are named when a sweep is stopped; the others are counted."""


def read_grid(
    table: Mapping[str, Any], grids: Sequence[str], say: Callable[[str], None] | None = None
) -> list[dict[str, str]]:
    """Every combination of the values in a file's `[sweep]` and in `--grid KEY=A,B`; flags win.

    Values of a key that is given several times are joined; `say` hears of those that are dropped.

    >>> read_grid({}, ["seed=0,1", "local_lr=cosine,start=0.1,rounds=5;0.1"])[1]
    {'seed': '0', 'local_lr': '0.1'}
    """
    axes: dict[str, list[str]] = {}
    given: dict[str, list[str]] = {}
    problems = []
    for name, values in table.items():
        if not isinstance(values, list) or not values:
            problems.append(f"[sweep] `{name}` must be a list of values to try, got {values!r}.")
        else:
            axes[name] = [_text(value) for value in values]
    for grid in grids:
        name, _, text = grid.partition("=")
        try:
            given.setdefault(name.strip().replace("-", "_"), []).extend(_grid_values(grid, text))
        except ValueError as error:
            problems.append(str(error))
    axes |= given
    if not axes and not problems:
        problems.append(
            "there is nothing to sweep over. Give `--grid KEY=A,B`, or `[sweep]` in the file."
        )
    if problems:
        raise ConfigError(problems)
    for name, tried in axes.items():
        once = list(dict.fromkeys(tried))
        if len(once) < len(tried) and say:
            twice = ", ".join(value for value in once if tried.count(value) > 1)
            say(f"`{name}` is to be {twice} more than once: dropped but for the first.")
        axes[name] = once
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _grid_values(grid: str, text: str) -> list[str]:
    """The values in a TOML list, between semicolons, or else between commas."""
    written = text.strip()
    if written.startswith("["):
        try:
            listed = tomllib.loads(f"values = {written}")["values"]
            if listed:
                return [_text(value) for value in listed]
        except ValueError as error:
            if ";" not in written:
                raise ValueError(
                    f"`--grid` has what is no TOML list: {error}, got {grid!r}. Put quotes around "
                    "words, or write KEY=A,B."
                ) from error
    semicolons = ";" in written
    tried = [value.strip() for value in written.split(";" if semicolons else ",")]
    tried = [value for value in tried if value]
    if not tried or written == "[]":
        raise ValueError(f"`--grid` must be KEY=A,B,… with at least one value, got {grid!r}.")
    if not semicolons and len(tried) > 1 and any("=" in value for value in tried):
        name = grid.partition("=")[0]
        raise ValueError(
            f"`--grid` would split a value with options of its own at the commas, got {grid!r}. Put "
            f"`;` between values, and behind a single one: '{name}={written};'. A TOML list does too."
        )
    return tried


def _text(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(plain_value(value))


def run_sweep(
    tables: Mapping[str, Any],
    flags: Mapping[str, str],
    combinations: Sequence[Mapping[str, str]],
    out: Path | None,
    jobs: int,
    console: Console,
) -> tuple[Path, list[str]]:
    """The sweep's folder and the names of runs that failed; all configs are checked before any run.

    Interrupted, it stops the runs that are under way and raises `StoppedError`.
    """
    configs = dict(_configs(tables, flags, combinations))
    if out is None:
        source = find_source(tables, flags)
        out = new_folder("runs", f"sweep-{source.problem}", source.algorithm, 0)
    out.mkdir(parents=True, exist_ok=True)
    todo = [name for name in configs if not _is_done(RunFolder(out / name), configs[name])]
    console.say(
        f"{many(len(configs), 'run')}, {len(configs) - len(todo)} of them done already, in {out}"
    )
    ended: dict[str, bool] = {}
    run = _run_here if jobs == 1 else _Apart(jobs).run
    try:
        run(out, {name: configs[name] for name in todo}, ended, console)
    except (KeyboardInterrupt, StoppedError) as error:
        cause = error.__cause__ if isinstance(error, StoppedError) else error
        text = _where_it_stands(out, configs, todo, ended)
        raise StoppedError(f"{text}\nGo on with the same command and `--out {out}`") from cause
    return out, [name for name in todo if not ended[name]]


def _where_it_stands(
    out: Path, names: Iterable[str], todo: Sequence[str], ended: Mapping[str, bool]
) -> str:
    """Which runs of a sweep are finished, failed, stopped and pending, a line each."""
    stands: dict[str, list[str]] = {"finished": [], "failed": [], "stopped": [], "pending": []}
    for name in names:
        if name not in todo or ended.get(name):
            stands["finished"].append(name)
        elif name in ended:
            stands["failed"].append(name)
        else:
            begun = RunFolder(out / name).config.is_file()
            stands["stopped" if begun else "pending"].append(name)
    lines = ["stopped"]
    for state, found in stands.items():
        more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
        if found:
            lines.append(f"  {state}: {'  '.join([*found[:MOST_NAMED], *more])}")
    return "\n".join(lines)


def _is_done(folder: RunFolder, config: Config) -> bool:
    """Whether a run was finished before; raises where it was one of another config."""
    if not folder.config.is_file():
        return False
    before = read_file(folder.config)
    changes = changed_keys(before, config.tables)
    if changes:
        raise RunMisuseError(
            f"`{folder.path}` is a run of another config: {'; '.join(changes)}. Name another folder "
            "with `--out`."
        )
    return folder.summary.is_file() and before["rounds"] >= config.run.rounds


def _configs(
    tables: Mapping[str, Any],
    flags: Mapping[str, str],
    combinations: Sequence[Mapping[str, str]],
) -> Iterator[tuple[str, Config]]:
    problems: list[str] = []
    names: set[str] = set()
    for values in combinations:
        try:
            config = read_config(tables, {**flags, **values})
        except ConfigError as error:
            problems += [text for text in error.problems if text not in problems]
            continue
        name = _folder_name(values)
        if name.casefold() in names:  # Some file systems do not tell A from a.
            name = f"{name}-{hashlib.sha256(_label(values).encode()).hexdigest()[:8]}"
        names.add(name.casefold())
        yield name, config
    if problems:
        raise ConfigError(problems)


def _label(values: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _folder_name(values: Mapping[str, str]) -> str:
    """What tells a run from its siblings, fit for a file's name."""
    plain = "".join(c if c.isalnum() or c in "=,.-_+" else "-" for c in _label(values))
    return plain.encode()[:LONGEST].decode(errors="ignore")


def _run_here(
    out: Path, configs: Mapping[str, Config], ended: dict[str, bool], console: Console
) -> None:
    """Runs one after the other, and notes in `ended` which went well."""
    for name, config in configs.items():
        console.say(name)
        path = out / name
        try:
            if RunFolder(path).config.is_file():
                flags = {"rounds": str(config.run.rounds)}
                resume(path, flags=flags, watch=console.watch, say=console.say)
            else:
                start(config, path, command="", watch=console.watch, say=console.say)
        except StoppedError:
            raise
        except Exception as error:  # noqa: BLE001 - one's own code may raise anything.
            console.complain(f"{name} failed: {describe(error)}")
            ended[name] = False
        else:
            ended[name] = True


class _Apart:
    """Runs in processes of their own, some at a time: threads of one would share torch's."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def run(
        self, out: Path, configs: Mapping[str, Config], ended: dict[str, bool], console: Console
    ) -> None:
        """Runs them all, and notes in `ended` which went well; stops those it has started if it is
        interrupted."""
        waiting = list(configs)
        # Not in the sweep's folder: once a run has begun, its own config.toml says the same.
        with tempfile.TemporaryDirectory(prefix="fmol-sweep-") as files:
            try:
                while waiting or self.running:
                    while waiting and len(self.running) < self.jobs:
                        name = waiting.pop(0)
                        self._start(Path(files), out / name, configs[name])
                    self._collect(ended, console)
                    time.sleep(GLANCE)
            except BaseException:
                self._stop()
                self._collect(ended, console, stopped=True)
                raise

    def _start(self, files: Path, path: Path, config: Config) -> None:
        if RunFolder(path).config.is_file():
            arguments = ["resume", str(path), "--rounds", str(config.run.rounds)]
        else:
            file = files / f"{path.name}.toml"
            write_whole(file, config.to_toml())
            arguments = ["run", str(file), "--out", str(path)]
        said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is.
        with _deaf_to_interrupts():
            self.running[path.name] = (
                subprocess.Popen(
                    [sys.executable, "-m", "fmol", *arguments, "--quiet"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                ),
                said,
            )

    def _collect(self, ended: dict[str, bool], console: Console, stopped: bool = False) -> None:
        """Notes which runs have ended; of those that were stopped, only what had ended before."""
        for name, (process, said) in list(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[name]
            with said:
                said.seek(0)
                text = said.read().decode(errors="replace").strip()
            if stopped and code in (130, 143, -signal.SIGTERM, -signal.SIGKILL):
                continue
            ended[name] = code == 0
            if code:
                text = text.removeprefix("error: ") or f"it ended with code {code}"
                console.complain(f"{name} failed: {text}")
            else:
                console.say(f"{name} done")

    def _stop(self) -> None:
        """Has each run write a checkpoint and end; those that do not within `GRACE` are killed."""
        processes = [process for process, _ in self.running.values()]
        try:
            for process in processes:
                process.terminate()
            until = time.monotonic() + GRACE
            for process in processes:
                process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            pass
        finally:  # Also where a second Ctrl-C says not to wait.
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Lets a process that is started within not hear Ctrl-C, which a terminal sends to all: who
    started it tells it to stop, and twice would break into the writing of its checkpoint."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
