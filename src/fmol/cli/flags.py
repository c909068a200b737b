"""Flags made of options: those of the run, of the problem and of the algorithm that are named.

Which flags there are depends on what is asked for, so they are made when the arguments are known;
`--help` and the shell's completion see the same ones. Values are taken as text: the config checks them
all together, with what a file says, so that everything wrong is said at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from fmol.config import (
    ALGORITHMS,
    CHOICES,
    RunOptions,
    Source,
    find_source,
    plain_value,
    read_file,
    recommended_options,
)
from fmol.options import Option, explain_options, kinds_in, list_options, nearest
from fmol.problems import PROBLEMS
from fmol.reproduce import EXPERIMENTS
from fmol.runs import RunFolder

__all__ = [
    "AlgorithmType",
    "ConfigCommand",
    "ExperimentType",
    "GridType",
    "ProblemType",
    "is_file",
]

SOURCE, GIVEN, UNKNOWN = "fmol.source", "fmol.given", "fmol.unknown"


class ValueType(click.ParamType):  # type: ignore[type-arg]
    """Text for one option; knows its choices, for help and completion, and leaves checking alone."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.choices = list(_choices(option.kind))
        self.name = _metavar(option.kind)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        number = ["NUMBER"] if self.name == "number" else []
        return "|".join([*number, *self.choices]) if self.choices else self.name.upper()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        if self.option.name == "data_dir":
            return click.Path(file_okay=False).shell_complete(ctx, param, incomplete)
        return [CompletionItem(each) for each in self.choices if each.startswith(incomplete)]


class AlgorithmType(click.ParamType):  # type: ignore[type-arg]
    """The name of an algorithm; the config checks it."""

    name = "name"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(each) for each in ALGORITHMS if each.startswith(incomplete)]


class ProblemType(click.ParamType):  # type: ignore[type-arg]
    """A built-in problem, a TOML file, or `module:name`."""

    name = "problem"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = [CompletionItem(each) for each in PROBLEMS if each.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


class ExperimentType(click.ParamType):  # type: ignore[type-arg]
    """An experiment of the paper by its name; one that is misspelt is answered with the nearest."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in EXPERIMENTS:
            meant = nearest(value, EXPERIMENTS)
            self.fail(
                f"there is no experiment `{value}`. "
                + (f"Did you mean `{meant}`?" if meant else "`--list` says which there are."),
                param,
                ctx,
            )
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(each) for each in EXPERIMENTS if each.startswith(incomplete)]


class GridType(click.ParamType):  # type: ignore[type-arg]
    """`KEY=A,B` of a sweep; the shell is offered the keys."""

    name = "grid"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        source: Source | None = ctx.meta.get(SOURCE)
        tables = source.flags().values() if source else [list_options(RunOptions)]
        keys = ["algorithm", *(key for table in tables for key in table)]
        wanted = incomplete.replace("-", "_")
        return [CompletionItem(f"{key}=") for key in keys if key.startswith(wanted)]


class ConfigCommand(click.Command):
    """A command on a problem, whose flags are the options of what its arguments name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        on_problem = any(isinstance(param.type, ProblemType) for param in self.params)
        fits = _names_problem if on_problem else _is_run
        at = _find_subject(args, _takes_value(self.params), fits)
        if at is None:  # Some problem must show which flags there are.
            ctx.meta[SOURCE] = _peek(next(iter(PROBLEMS)), args)
        elif on_problem:
            ctx.meta[SOURCE] = _peek(args[at], args)
        else:
            ctx.meta[SOURCE] = _peek(str(Path(args[at], "config.toml")), args, RunFolder(args[at]))
        known = {name for param in self.get_params(ctx) for name in param.opts}
        known |= {name for param in self.get_params(ctx) for name in param.secondary_opts}
        args, ctx.meta[UNKNOWN] = _set_aside(args, known, at)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        source = ctx.meta.get(SOURCE)
        return [*super().get_params(ctx), *(_options(source) if source else ())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        source: Source | None = ctx.meta.get(SOURCE)
        titles = {"": "Options", "run": "The run"}
        if source:
            # Also where no problem was named: what stands there is not the algorithm's own default.
            suited = hasattr(source.problem_kind, "recommended")
            hint = f", as recommended for {source.problem}" if suited else ""
            titles["algorithm"] = f"The algorithm, {source.algorithm}{hint}"
            titles["problem"] = f"The problem, {source.problem}"
        for group, title in titles.items():
            lines = [
                line
                for param in self.get_params(ctx)
                if isinstance(param, click.Option)
                and getattr(param, "group", "") == group
                and (line := param.get_help_record(ctx)) is not None
            ]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines, col_max=34)
        formatter.write_paragraph()
        formatter.write_text(
            "Flags are the keys of a config file. Options of other algorithms and problems: "
            "name them, as in `fmol run river-flow --algorithm fedavg --help`."
        )

    @staticmethod
    def flags(ctx: click.Context) -> dict[str, str]:
        """Option → text, of the flags that were given, known or not."""
        given: dict[str, str] = ctx.meta.get(GIVEN, {})
        if ctx.params.get("algorithm"):
            given["algorithm"] = ctx.params["algorithm"]
        unknown: dict[str, str] = ctx.meta[UNKNOWN]
        return given | unknown


class _OptionFlag(click.Option):
    """A flag that remembers under which heading it is explained."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def is_file(problem: str) -> bool:
    """Whether the problem on a command line is a config file."""
    return problem.endswith(".toml")


def _find_subject(
    args: Sequence[str], takes_value: Mapping[str, bool], fits: Callable[[str], bool]
) -> int | None:
    """Where in the arguments the problem stands, or the run to go on with; None if nowhere.

    What follows a flag that takes a value is that value. Of a flag that is not known yet, since it
    may be one of the problem's, it cannot be told: such a word is taken if there is no other.
    """
    surely: list[int] = []
    perhaps: list[int] = []
    after: list[int] | None = surely
    for i, each in enumerate(args):
        if each == "--":
            return next((j for j in range(i + 1, len(args)) if fits(args[j])), None)
        if each.startswith("-"):
            takes = False if "=" in each else takes_value.get(each)
            after = {True: None, False: surely, None: perhaps}[takes]
            continue
        if after is not None and fits(each):
            after.append(i)
        after = surely
    return next(iter([*surely, *perhaps]), None)


def _takes_value(params: Sequence[click.Parameter]) -> dict[str, bool]:
    """Flag → whether a value follows it, of the command's own flags and those of every run."""
    found = {"-h": False, "--help": False}
    for param in params:
        if isinstance(param, click.Option):
            found |= dict.fromkeys([*param.opts, *param.secondary_opts], not param.is_flag)
    for option in list_options(RunOptions).values():
        found[option.flag] = option.kind is not bool
        if option.kind is bool:
            found[f"--no-{option.flag.removeprefix('--')}"] = False
    return found


def _names_problem(argument: str) -> bool:
    return argument in PROBLEMS or is_file(argument) or ":" in argument


def _is_run(argument: str) -> bool:
    return _is_there(Path(argument, "config.toml"))


def _peek(problem: str, args: Sequence[str], run: RunFolder | None = None) -> Source | None:
    """What a problem and the algorithm that the arguments name consist of; None if it is broken.

    `run` is whose config file it is, if it is one's.
    """
    flags = {}
    for i, each in enumerate(args):
        if each.startswith("--algorithm="):
            flags["algorithm"] = each.partition("=")[2]
        elif each == "--algorithm" and i + 1 < len(args):
            flags["algorithm"] = args[i + 1]
    if flags.get("algorithm", "").lower() not in ALGORITHMS:
        flags.pop("algorithm", None)
    try:
        tables = read_file(Path(problem)) if is_file(problem) else {}
        flags = flags if is_file(problem) else {**flags, "problem": problem}
        return find_source(tables, flags, None if run is None else run.problem_file())
    except Exception:  # noqa: BLE001 - one's own module may raise anything.
        return None  # The command itself will say what is wrong.


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # What is no path at all: too long, or with a null character.
        return False


def _set_aside(
    args: Sequence[str], known: Collection[str], at: int | None
) -> tuple[list[str], dict[str, str]]:
    """The arguments without flags that are not known, and those by name with their values.

    `at` is where the problem stands, which is no flag's value.
    """
    rest: list[str] = []
    unknown: dict[str, str] = {}
    i = 0
    while i < len(args):
        flag, equals, value = args[i].partition("=")
        if flag == "--":
            return [*rest, *args[i:]], unknown
        if not flag.startswith("--") or flag in known:
            rest.append(args[i])
        else:
            alone = i + 1 == len(args) or i + 1 == at or _stands_alone(args[i + 1])
            if not equals and not alone:
                value, i = args[i + 1], i + 1
            unknown[flag.removeprefix("--").replace("-", "_")] = value
        i += 1
    return rest, unknown


def _stands_alone(argument: str) -> bool:
    """Whether an argument is none that belongs to the flag before it."""
    return argument.startswith("--") or argument in PROBLEMS or is_file(argument)


def _options(source: Source) -> Iterator[click.Option]:
    kinds = {
        "run": RunOptions,
        "algorithm": source.algorithm_kind,
        "problem": source.problem_kind,
    }
    for group, options in source.flags().items():
        texts = explain_options(kinds[group])
        recommended = recommended_options(source.problem_kind, source.algorithm_kind)
        for name, option in options.items():
            flag = "--" + name.replace("_", "-")
            default = option.default
            if group != "problem" and option.name in recommended:
                default = recommended[option.name]
            shown = "" if default is MISSING else f"  [{_show(default)}]"
            arguments: dict[str, Any] = {
                "default": None,
                "help": f"{texts.get(option.name, '')}{shown}",
                "group": group,
                # Not an argument of the command's function, which cannot know them all.
                "expose_value": False,
                "callback": _note,
            }
            if option.kind is bool:
                yield _OptionFlag([f"{flag}/--no-{flag.removeprefix('--')}", name], **arguments)
            else:
                yield _OptionFlag([flag, name], type=ValueType(option), **arguments)


def _note(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None:
        text = value if isinstance(value, str) else str(value).lower()
        ctx.meta.setdefault(GIVEN, {})[param.name] = text


def _show(default: Any) -> str:
    value = plain_value(default)
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choices(kind: Any) -> Iterator[str]:
    for part in kinds_in(kind):
        if get_origin(part) is Literal:
            yield from map(str, get_args(part))
        yield from CHOICES.get(part, ())


def _metavar(kind: Any) -> str:
    names: dict[Any, str] = {int: "number", float: "number", str: "text"}
    found = [names[part] for part in kinds_in(kind) if part in names]
    return found[0] if found else "value"
