"""Which problem and algorithm are meant, and which options those have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmol.config.choices import ALGORITHMS, settable_options
from fmol.config.config import ConfigError
from fmol.config.run import RunOptions
from fmol.options import Option, nearest
from fmol.problems import PROBLEMS, ProblemError, find_problem

__all__ = ["PREFIX", "TABLES", "Meant", "Source", "find_source", "look_up", "table_name"]

TABLES = ("problem", "algorithm")
PREFIX = "problem_"
"""Before the flag of a problem's option whose own name is taken: `--problem-seed`."""
TAKEN = frozenset(
    {*TABLES, "out", "quiet", "grid", "jobs", "anyway", "help"}
    | {"points", "method", "reference", "seeds", "measure"}
)
"""Flags that are no options of anything."""


@dataclass(frozen=True)
class Source:
    """What a config is made of before it is checked: which problem and algorithm, and what is known
    of their options. A command line shows its flags from this."""

    problem: str
    problem_kind: type
    algorithm: str
    algorithm_kind: type

    @property
    def kinds(self) -> dict[str, type]:
        """Table → the dataclass that its options are of; what is at the top of a file is `run`."""
        return {"run": RunOptions, "problem": self.problem_kind, "algorithm": self.algorithm_kind}

    def flags(self) -> dict[str, dict[str, Option]]:
        """Table → flag's name → option; a problem's option whose name is taken has a prefix."""
        known = {table: settable_options(kind) for table, kind in self.kinds.items()}
        taken = {*known["run"], *known["algorithm"], *TAKEN}
        problem = known["problem"].items()
        return {
            "run": known["run"],
            "algorithm": known["algorithm"],
            "problem": {PREFIX + name if name in taken else name: each for name, each in problem},
        }


@dataclass(frozen=True)
class Meant:
    """What problem and algorithm are called, and what they are as far as that can be told."""

    names: Mapping[str, Any]
    kinds: Mapping[str, type]
    problems: tuple[str, ...]
    """What is wrong with their names."""
    cause: ProblemError | None
    """The error of which that came."""
    known_file: Path | None
    """Where the problem's own file was found before, if it is still that problem."""

    def source(self) -> Source:
        """The two of them; raises `ConfigError` where that cannot be told."""
        if self.problems:
            raise ConfigError(self.problems) from self.cause
        names, kinds = self.names, self.kinds
        return Source(names["problem"], kinds["problem"], names["algorithm"], kinds["algorithm"])


def find_source(
    tables: Mapping[str, Any], flags: Mapping[str, str], known_file: Path | None = None
) -> Source:
    """Which problem and algorithm are meant; raises `ConfigError` where that cannot be told.

    `known_file` is as for `read_config`.
    """
    return look_up(tables, flags, known_file).source()


def look_up(tables: Mapping[str, Any], flags: Mapping[str, str], known_file: Path | None) -> Meant:
    """Which problem and algorithm a file's tables and flags mean, and what is wrong with that."""
    known_file = None if flags.get("problem") else known_file  # A flag's is another.
    problems: list[str] = []
    cause = None
    names: dict[str, Any] = {}
    for table, default in (("problem", None), ("algorithm", next(iter(ALGORITHMS)))):
        name = flags.get(table) or table_name(tables, table)
        names[table] = name if name is not None else default
        if names[table] is None:
            problems.append(
                '`problem` must be given: `[problem]` with `name = "…"`. Built in are '
                f"{', '.join(PROBLEMS)}."
            )
        elif not isinstance(names[table], str):
            problems.append(f"`{table}` must be a name, got {names[table]!r}.")
    kinds: dict[str, type] = {}
    if isinstance(names["problem"], str):
        try:
            kinds["problem"] = find_problem(names["problem"], known_file)
        except ProblemError as error:
            problems.append(str(error))
            cause = error
    if isinstance(names["algorithm"], str):
        chosen = names["algorithm"].lower()
        if chosen in ALGORITHMS:
            names["algorithm"], kinds["algorithm"] = chosen, ALGORITHMS[chosen]
        else:
            hint = nearest(chosen, ALGORITHMS)
            problems.append(
                f"`algorithm` must be one of {list(ALGORITHMS)}, got {names['algorithm']!r}."
                + (f" Did you mean `{hint}`?" if hint else "")
            )
    return Meant(names, kinds, tuple(problems), cause, known_file)


def table_name(tables: Mapping[str, Any], table: str) -> Any:
    """What a file calls its problem or algorithm, in a table or without one; None where it does not."""
    given = tables.get(table)
    return given.get("name") if isinstance(given, Mapping) else given
