"""Options as typed fields of dataclasses: checked, explained and read by what the fields say.

One field is the single source of an option: its name, type, range, default and the docstring below
it. From them come the checks at construction, the keys of a config file, and the flags of the
command line with their help.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import math
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "NotNegative",
    "Option",
    "OptionsError",
    "Positive",
    "Range",
    "check_options",
    "expected",
    "explain_options",
    "list_options",
    "nearest",
    "parse_text",
    "read_options",
]


@dataclass(frozen=True)
class Range:
    """What a number must keep to: at least `least`, more than `above`, less than `below`."""

    least: float | None = None
    below: float | None = None
    above: float | None = None

    def __contains__(self, value: Any) -> bool:
        # Written so that NaN, which is neither below nor above anything, is outside.
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = [("of at least", self.least), ("above", self.above), ("below", self.below)]
        return " and ".join(f"{word} {value:g}" for word, value in parts if value is not None)


Count = Annotated[int, Range(least=1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]


class OptionsError(ValueError):
    """All that is wrong with some options, a sentence each in `problems`."""

    def __init__(self, owner: str, problems: Sequence[str]) -> None:
        super().__init__(f"{owner}: " + " ".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Option:
    """One field that a user may set."""

    name: str
    kind: Any
    """Its annotation, with a `Range` where it has one."""
    default: Any
    """`MISSING` where it must be given."""

    @property
    def flag(self) -> str:
        """How it is written on a command line."""
        return "--" + self.name.replace("_", "-")


Choices = Mapping[Any, Mapping[str, type]]
"""For kinds that are more than a value, what can be named in their place: name → dataclass."""


def list_options(owner: type) -> dict[str, Option]:
    """Name → option, for every field of the dataclass `owner` that its constructor takes."""
    kinds = get_type_hints(owner, include_extras=True)
    found = {}
    for each in fields(owner):
        if each.init:
            default = each.default
            if default is MISSING and each.default_factory is not MISSING:
                default = each.default_factory()
            found[each.name] = Option(each.name, kinds[each.name], default)
    return found


def explain_options(owner: type) -> dict[str, str]:
    """Name → the docstring below the field, on one line; of inherited fields too.

    >>> from fmol import FSMGDA
    >>> explain_options(FSMGDA)["local_epochs"]
    "E passes over the client's own data a round, so E·⌈n/b⌉ gradient steps."
    """
    texts: dict[str, str] = {}
    for kind in reversed(owner.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):  # Built in, or made where there is no source.
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for line, below in itertools.pairwise(body):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                texts[line.target.id] = " ".join(below.value.value.split())
    return texts


# ---- checks ----------------------------------------------------------------------------------


def check_options(options: Any) -> None:
    """Raises one `OptionsError` with all that is wrong with a dataclass of options.

    What is wrong with options that are right by themselves is told by its `joint_problems()`, if it
    has one.
    """
    owner = type(options)
    values = {name: getattr(options, name) for name in list_options(owner)}
    bad = {
        name: _must_be(option, values[name])
        for name, option in list_options(owner).items()
        if not fits(option.kind, values[name])
    }
    problems = [*bad.values(), *_joint_problems(owner, values, bad)]
    if problems:
        raise OptionsError(owner.__name__, problems)


def _joint_problems(owner: type, values: Mapping[str, Any], bad: Iterable[str]) -> list[str]:
    """What is wrong with options together, leaving out what only those say that are wrong anyway."""
    ask = getattr(owner, "joint_problems", None)
    if ask is None:
        return []
    bad = list(bad)
    try:
        problems: list[str] = ask(SimpleNamespace(**values))
    except TypeError:
        if not bad:  # A wrong kind of value is what would explain it.
            raise
        return []
    return [text for text in problems if not any(f"`{name}`" in text for name in bad)]


def _must_be(option: Option, value: object, choices: Choices | None = None) -> str:
    if isinstance(value, type):
        return f"`{option.name}` is the class {value.__name__} itself: make one of it."
    return f"`{option.name}` must be {expected(option.kind, choices)}, got {value!r}."


def fits(kind: Any, value: object) -> bool:
    """Whether `value` is one that a field annotated with `kind` may hold."""
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        ranges = [each for each in rest if isinstance(each, Range)]
        return fits(kind, value) and all(value in each for each in ranges)
    if _is_union(kind):
        return any(fits(part, value) for part in get_args(kind))
    origin = get_origin(kind) or kind
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(kind))
    if origin in (int, float):
        number: type = Integral if origin is int else Real
        return (
            isinstance(value, number) and not isinstance(value, bool) and math.isfinite(value)  # type: ignore[arg-type]
        )
    if origin in (NoneType, None):
        return value is None
    if origin is Mapping:
        inside_kinds = get_args(kind)
        return isinstance(value, Mapping) and all(
            fits(inside_kinds[0], name) and fits(inside_kinds[1], each)
            for name, each in value.items()
        )
    if origin in (tuple, Sequence):
        inner = get_args(kind)[0]
        listed = isinstance(value, tuple | list) and not isinstance(value, str)
        return listed and all(fits(inner, each) for each in value)  # type: ignore[attr-defined]
    if origin in (bool, str):
        return isinstance(value, origin)
    # A protocol: whatever can be called if it says so, but not a class in its place.
    can = callable(value) if "__call__" in vars(origin) else True
    return can and not isinstance(value, type)


def expected(kind: Any, choices: Choices | None = None) -> str:
    """What a field annotated with `kind` may hold, in words."""
    if get_origin(kind) is Annotated:
        inner, *rest = get_args(kind)
        return " ".join([expected(inner, choices), *(str(each) for each in rest if str(each))])
    if _is_union(kind):
        parts = [expected(part, choices) for part in get_args(kind) if part is not NoneType]
        return " or ".join(part for part in dict.fromkeys(parts) if part)
    origin = get_origin(kind) or kind
    if origin is Literal:
        return f"one of {list(get_args(kind))}"
    named = (choices or {}).get(kind)
    if named is not None:
        return f"one of {list(named)} with its own options"
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
    }
    if origin in words:
        return words[origin]
    if origin is Mapping:
        names, values = (expected(part) for part in get_args(kind))
        return f"a mapping from {names} to {values}"
    if origin in (tuple, Sequence):
        return f"a list, each {expected(get_args(kind)[0])}"
    return "a callable"


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


# ---- from files and flags --------------------------------------------------------------------


def read_options(
    owner: type,
    values: Mapping[str, Any],
    choices: Choices | None = None,
    called: str = "",
) -> Any:
    """`owner(**values)`, with values as a config file has them; raises `OptionsError` with all
    that is wrong: unknown names with the nearest that is known, values of the wrong kind or range.

    `"none"` stands for None, a list for a tuple, and a table with a `name` for one of `choices`.
    """
    known = list_options(owner)
    problems: list[str] = []
    good: dict[str, Any] = {}
    bad: set[str] = set()
    for name, value in values.items():
        if name not in known:
            hint = nearest(name, known)
            owner_name = called or owner.__name__
            problems.append(
                f"`{name}` is not an option of {owner_name}, got {value!r}. "
                + (f"Did you mean `{hint}`?" if hint else f"It has {_listed(known)}.")
            )
            continue
        option = known[name]
        try:
            good[name] = _read(option.kind, value, choices or {})
        except OptionsError as error:
            problems += [f"in `{name}`: {problem}" for problem in error.problems]
            bad.add(name)
            continue
        if not fits(option.kind, good[name]):
            problems.append(_must_be(option, value, choices))
            bad.add(name)
    for name, option in known.items():
        if option.default is MISSING and name not in values:
            problems.append(f"`{name}` must be given: {expected(option.kind, choices)}.")
            bad.add(name)
    if problems:
        filled = {name: good.get(name, option.default) for name, option in known.items()}
        problems += _joint_problems(owner, filled, bad)
        raise OptionsError(called or owner.__name__, problems)
    try:
        return owner(**good)
    except OptionsError:
        raise
    except ValueError as error:
        raise OptionsError(called or owner.__name__, [str(error)]) from error


def _read(kind: Any, value: Any, choices: Choices) -> Any:
    """A value of a config file as the field wants it; what does not fit is left as it is."""
    parts = [get_args(kind)[0]] if get_origin(kind) is Annotated else [kind]
    if _is_union(parts[0]):
        parts = list(get_args(parts[0]))
    if value == "none" and NoneType in parts:
        return None
    if isinstance(value, list):
        return tuple(value)
    for part in parts:
        named = choices.get(part)
        if named is None:
            continue
        table = {"name": value} if isinstance(value, str) else value
        if isinstance(table, Mapping) and "name" in table:
            chosen = table["name"]
            if chosen not in named:
                hint = nearest(str(chosen), named)
                raise OptionsError(
                    "name",
                    [
                        f"`name` must be one of {list(named)}, got {chosen!r}."
                        + (f" Did you mean `{hint}`?" if hint else "")
                    ],
                )
            rest = {name: each for name, each in table.items() if name != "name"}
            return read_options(named[chosen], rest, choices, called=chosen)
    return value


def parse_text(kind: Any, text: str) -> Any:
    """The text of a flag as a config file would have it: a TOML value, bare words as text.

    Lists may be written without brackets and tables without braces.

    >>> parse_text(float | None, "0.5"), parse_text(Mapping[str, float], "left=0.5,right=1")
    (0.5, {'left': 0.5, 'right': 1})
    """
    parts = [kind]
    if get_origin(kind) is Annotated:
        parts = [get_args(kind)[0]]
    if _is_union(parts[0]):
        parts = list(get_args(parts[0]))
    origins = [get_origin(part) or part for part in parts]
    values = [each for part in parts if get_origin(part) is Literal for each in get_args(part)]
    if text in values or text == "none":
        return text
    written = text.strip()
    if tuple in origins or (Sequence in origins and "," in written):
        if not written.startswith("["):
            return [word.strip() for word in written.split(",") if word.strip()]
    elif "=" in written and not written.startswith(("{", '"', "'")):
        written = f"{{{written}}}"
    if all(origin in (str, Literal, NoneType) for origin in origins):
        return text
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` was probably meant to be; None if there is none."""
    plain = name.replace("-", "_").lower()
    by_plain = {each.replace("-", "_").lower(): each for each in known}
    found = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.6)
    if found:
        return by_plain[found[0]]
    # What was cut short: `rate` for nothing, but `local` for `local_steps`.
    longer = [each for each in by_plain if plain and each.startswith(plain)]
    return by_plain[longer[0]] if longer else None


def _listed(known: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in known) or "none"
