"""A config from a file and from flags, checked as a whole: everything that is wrong is said at once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fmol.config.choices import CHOICES
from fmol.config.config import Config, ConfigError
from fmol.config.mistakes import certain_mistakes, in_table, take_out_misplaced, unknown_flag
from fmol.config.precedence import drop_foreign, recommend, settle_steps
from fmol.config.source import TABLES, Source, look_up, table_name
from fmol.options import OptionsError, list_options, parse_text, read_options
from fmol.problems import problem_file

__all__ = ["read_config", "read_file"]


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; raises `ConfigError` where it is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Some editors put a mark before the text.
        return tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([f"`{path}` cannot be read: {reason}. Name a file that can."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"`{path}` is not text in UTF-8: {error}. Save it as UTF-8."]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"`{path}` is not valid TOML: {error}."]) from error


def read_config(
    tables: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
    known_file: Path | None = None,
) -> Config:
    """The config that a file's `tables` and a command line's `flags` make; flags win.

    Flags are by option name, with underscores, `problem` and `algorithm` among them. What is given
    nowhere is what the problem recommends, else the option's own default. `known_file` is where the
    problem's own file was found before, if it is named by one: whatever the working folder, it is
    looked for there first. Raises `ConfigError` with all that is wrong.

    >>> config = read_config({"problem": "multidigits", "rounds": 5}, {"local_steps": "3"})
    >>> config.run.rounds, config.algorithm, config.algorithm_options.local_steps
    (5, 'fsmgda', 3)
    """
    tables, flags = dict(tables or {}), dict(flags or {})
    given: dict[str, dict[str, Any]] = {
        "run": {name: value for name, value in tables.items() if name not in TABLES},
        "problem": _table(tables, "problem"),
        "algorithm": _table(tables, "algorithm"),
    }
    meant = look_up(tables, flags, known_file)
    # What a file says of another than the flag's may be left out.
    displaced = [
        table
        for table in TABLES
        if flags.get(table) and table_name(tables, table) not in (None, meant.names[table])
    ]
    if meant.problems:
        given |= {table: {} for table in displaced}
        raise ConfigError(
            [*meant.problems, *certain_mistakes(given, flags, meant)]
        ) from meant.cause
    source = meant.source()
    notes = drop_foreign(given["algorithm"], source) if "algorithm" in displaced else []
    if "problem" in displaced:
        if given["problem"]:
            notes.append(f"[problem] of the file is not of {source.problem}: left out.")
        given["problem"] = {}
    problems = _add_flags(given, flags, source)
    known = {table: list_options(kind) for table, kind in source.kinds.items()}
    problems += take_out_misplaced(given, known)
    notes += settle_steps(given["algorithm"], flags)
    recommend(given, source)
    read: dict[str, Any] = {}
    for table, kind in source.kinds.items():
        called = "the run" if table == "run" else f"{table} {meant.names[table]}"
        try:
            read[table] = read_options(kind, given[table], CHOICES, called=called)
        except OptionsError as error:
            problems += [in_table(table, text) for text in error.problems]
    if problems:
        raise ConfigError(problems)
    return Config(
        source.problem,
        read["problem"],
        source.algorithm,
        read["algorithm"],
        read["run"],
        tuple(notes),
        problem_file(source.problem, meant.known_file),
    )


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name)
    return {k: v for k, v in table.items() if k != "name"} if isinstance(table, Mapping) else {}


def _add_flags(
    given: Mapping[str, dict[str, Any]], flags: Mapping[str, str], source: Source
) -> list[str]:
    """Writes flags over what a file says; what is said of those that are no options."""
    problems = []
    known = source.flags()
    owners = f"problem {source.problem} or of algorithm {source.algorithm}"
    for name, text in flags.items():
        if name in TABLES:
            continue
        place = next((table for table in known if name in known[table]), None)
        if place is None:
            problems.append(unknown_flag(name, text, known, owners))
        else:
            option = known[place][name]
            given[place][option.name] = parse_text(option.kind, text)
    return problems
