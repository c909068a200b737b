"""Many runs of one config: every combination of some options."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmol.config import (
    Config,
    ConfigError,
    find_source,
    plain_value,
    read_config,
    read_file,
    toml_value,
)
from fmol.errors import FmolError
from fmol.files import write_whole
from fmol.options import OptionsError
from fmol.runs import RunError, RunFolder, resume, start
from fmol.runs.folder import new_folder
from fmol.runs.identity import changed_keys
from fmol.runs.training import StoppedError

if TYPE_CHECKING:
    from fmol.cli.commands import Console

__all__ = ["read_grid", "run_sweep"]


def read_grid(table: Mapping[str, Any], grids: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of the values in a file's `[sweep]` and in `--grid KEY=A,B`; flags win."""
    axes: dict[str, list[str]] = {}
    problems = []
    for name, values in table.items():
        if not isinstance(values, list) or not values:
            problems.append(f"[sweep] `{name}` must be a list of values to try, got {values!r}.")
        else:
            axes[name] = [_text(value) for value in values]
    for grid in grids:
        name, equals, values = grid.partition("=")
        tried = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not tried:
            problems.append(f"`--grid` must be KEY=A,B,… with at least one value, got {grid!r}.")
        else:
            axes[name.strip().replace("-", "_")] = tried
    if not axes and not problems:
        problems.append(
            "there is nothing to sweep over. Give `--grid KEY=A,B`, or `[sweep]` in the file."
        )
    if problems:
        raise ConfigError(problems)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


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
    """The sweep's folder and the names of runs that failed; all configs are checked before any run."""
    configs = dict(_configs(tables, flags, combinations))
    if out is None:
        source = find_source(tables, flags)
        out = new_folder("runs", f"sweep-{source.problem}", source.algorithm, 0)
    out.mkdir(parents=True, exist_ok=True)
    todo = [name for name in configs if not _is_done(RunFolder(out / name), configs[name])]
    console.say(f"{len(configs)} runs, {len(configs) - len(todo)} of them done already, in {out}")
    if jobs == 1:
        failed = [name for name in todo if not _run_here(out / name, configs[name], console)]
    else:
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(lambda name: _run_apart(out, name, configs[name], console), todo))
        failed = [name for name, good in zip(todo, done, strict=True) if not good]
    return out, failed


def _is_done(folder: RunFolder, config: Config) -> bool:
    """Whether a run was finished before; raises where it was one of another config."""
    if not folder.config.is_file():
        return False
    before = read_file(folder.config)
    changes = changed_keys(before, config.tables)
    if changes:
        raise RunError(
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
    for values in combinations:
        try:
            config = read_config(tables, {**flags, **values})
        except ConfigError as error:
            problems += [text for text in error.problems if text not in problems]
            continue
        yield _folder_name(values), config
    if problems:
        raise ConfigError(problems)


def _folder_name(values: Mapping[str, str]) -> str:
    """What tells a run from its siblings, fit for a file's name."""
    text = ",".join(f"{name}={value}" for name, value in values.items())
    return "".join(c if c.isalnum() or c in "=,.-_+" else "-" for c in text)[:200]


def _run_here(path: Path, config: Config, console: Console) -> bool:
    console.say(path.name)
    try:
        if RunFolder(path).config.is_file():
            flags = {"rounds": str(config.run.rounds)}
            resume(path, flags=flags, watch=console.watch, say=console.say)
        else:
            start(config, path, command="", watch=console.watch, say=console.say)
    except StoppedError:
        raise
    except (RunError, FmolError, OptionsError, OSError, ValueError) as error:
        console.say(f"{path.name} failed: {error}")
        return False
    return True


def _run_apart(out: Path, name: str, config: Config, console: Console) -> bool:
    """The same in a process of its own: threads of one process would share torch's."""
    path = out / name
    if RunFolder(path).config.is_file():
        arguments = ["resume", str(path), "--rounds", str(config.run.rounds)]
    else:
        file = out / f"{name}.toml"
        write_whole(file, config.to_toml())
        arguments = ["run", str(file), "--out", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "fmol", *arguments, "--quiet"],
        check=False,
        capture_output=True,
        text=True,
    )
    said = done.stderr.strip().splitlines()
    console.say(
        f"{name} failed: {said[-1] if said else done.returncode}"
        if done.returncode
        else f"{name} done"
    )
    return done.returncode == 0
