"""What is wrong with a file and flags together: what is unknown, misplaced, or certainly wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fmol.config.choices import ALGORITHMS, CHOICES
from fmol.config.run import RunOptions
from fmol.config.source import PREFIX, TABLES, Meant
from fmol.options import (
    Option,
    OptionsError,
    certain_problems,
    list_options,
    nearest,
    parse_text,
    read_options,
)
from fmol.problems import PROBLEMS, find_problem

__all__ = ["certain_mistakes", "in_table", "take_out_misplaced", "unknown_flag"]


def certain_mistakes(
    given: dict[str, dict[str, Any]], flags: Mapping[str, str], meant: Meant
) -> list[str]:
    """What else is certainly wrong, where it cannot be told which problem or algorithm is meant.

    What is not an option of the one that is meant may be one of another: only what is wrong with each
    that may be meant is said.
    """
    names, kinds = meant.names, meant.kinds
    likely: dict[str, Sequence[type]] = {
        "run": [RunOptions],
        "problem": [kinds["problem"]] if "problem" in kinds else _near_problems(names["problem"]),
        "algorithm": [kinds["algorithm"]] if "algorithm" in kinds else [*ALGORITHMS.values()],
    }
    known = {
        table: {name: option for kind in each for name, option in list_options(kind).items()}
        for table, each in likely.items()
    }
    problems = []
    for name, text in flags.items():
        own = name.removeprefix(PREFIX)
        homes = [(table, name) for table in ("run", "algorithm") if name in known[table]]
        homes += [("problem", own)] if own in known["problem"] else []
        if homes:
            table, key = homes[0]
            given[table][key] = parse_text(known[table][key].kind, text)
        elif name not in TABLES and likely["problem"]:
            problems.append(unknown_flag(name, text, known, "the problem or the algorithm"))
    problems += take_out_misplaced(given, known, closed=bool(likely["problem"]))
    for table, each in likely.items():
        called = "the run" if table == "run" else f"{table} {names[table]}"
        if table not in ("run", *kinds):
            found = _shared_problems(each, given[table], f"any {table}")
        elif table == "algorithm":  # The problem that is meant may recommend what is not given.
            found = certain_problems(each[0], given[table], CHOICES, called)
        else:
            found = _problems(each[0], given[table], called)
        problems += [in_table(table, text) for text in found]
    return problems


def _problems(kind: type, values: Mapping[str, Any], called: str) -> list[str]:
    try:
        read_options(kind, values, CHOICES, called=called)
    except OptionsError as error:
        return list(error.problems)
    return []


def _near_problems(name: Any) -> list[type]:
    """The problems that a name which is none may stand for; none where it may be one's own."""
    near = isinstance(name, str) and ":" not in name and nearest(name, PROBLEMS)
    return [find_problem(each) for each in PROBLEMS] if near else []


def _shared_problems(kinds: Sequence[type], values: Mapping[str, Any], called: str) -> list[str]:
    """What is wrong with a table's values for each of the kinds that it may be of."""
    problems = []
    for name, value in values.items():
        owners = [kind for kind in kinds if name in list_options(kind)]
        found = [certain_problems(kind, {name: value}, CHOICES, called) for kind in owners]
        if kinds and not owners:
            hint = nearest(name, {each: None for kind in kinds for each in list_options(kind)})
            problems.append(
                f"`{name}` is not an option of {called}, got {value!r}."
                + (f" Did you mean `{hint}`?" if hint else "")
            )
        elif found and all(found):
            problems += found[0]
    return problems


def take_out_misplaced(
    given: Mapping[str, dict[str, Any]],
    known: Mapping[str, Mapping[str, Option]],
    closed: bool = True,
) -> list[str]:
    """Takes out keys of a file that stand in another's table, and tables that are misspelt.

    Unless `closed`, a problem may have more options than are `known`.
    """
    problems = []
    for table, values in given.items():
        if table == "problem" and not closed:
            continue
        for name in [each for each in values if each not in known[table]]:
            homes = [each for each in known if name in known[each]]
            hint = nearest(name, TABLES) if isinstance(values[name], Mapping) else None
            if homes:
                place = "at the top, above all tables" if homes == ["run"] else f"into [{homes[0]}]"
                text = f"`{name}` is in the wrong place: put it {place}."
                problems.append(in_table(table, text))
            elif table == "run" and hint:
                problems.append(f"`[{name}]` is not a table of a config. Did you mean `[{hint}]`?")
            else:
                continue
            del values[name]
    return problems


def unknown_flag(name: str, text: str, known: Mapping[str, Iterable[str]], owners: str) -> str:
    """What is said of a flag that is not among those of any table in `known`."""
    everything = [each for options in known.values() for each in options]
    hint = nearest(name, [*everything, "algorithm"])
    flag = "--" + name.replace("_", "-")
    return f"`{flag}` is not an option of the run, of {owners}, got {text!r}. " + (
        f"Did you mean `--{hint.replace('_', '-')}`?" if hint else "`--help` lists them."
    )


def in_table(table: str, text: str) -> str:
    """A sentence with the table that it is about, unless that is the top of the file."""
    return text if table == "run" else f"[{table}] {text}"
