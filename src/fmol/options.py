"""Options as typed fields of dataclasses: checked, explained and read by what the fields say.

One field is the single source of an option: its name, type, range, default and the docstring below
it. From them come the checks at construction, the keys of a config file, and the flags of the
command line with their help.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import math
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "NotNegative",
    "Option",
    "OptionsError",
    "Positive",
    "Range",
    "certain_problems",
    "check_options",
    "expected",
    "explain_options",
    "kinds_in",
    "list_options",
    "nearest",
    "parse_text",
    "read_options",
]


@dataclass(frozen=True)
class Range:
    """What a number must keep to: at least `least` and at most `most`, more than `above`, less than
    `below`."""

    least: float | None = None
    below: float | None = None
    above: float | None = None
    most: float | None = None

    def __contains__(self, value: Any) -> bool:
        # Written so that NaN, which is neither below nor above anything, is outside.
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        parts = [
            ("of at least", self.least),
            ("above", self.above),
            ("below", self.below),
            ("at most", self.most),
        ]
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


_LISTS = (tuple, list, Sequence)
_TABLES = (Mapping, dict)

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
        texts |= _own_texts(kind)
    return texts


@functools.cache  # Finding a class in its file is slow, and a shell waits for it at every Tab.
def _own_texts(kind: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # Built in, or made where there is no source.
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {
        line.target.id: " ".join(below.value.value.split())
        for line, below in itertools.pairwise(body)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


# ---- checks ----------------------------------------------------------------------------------


def check_options(options: Any) -> None:
    """Raises one `OptionsError` with all that is wrong with a dataclass of options.

    What their kinds and ranges do not say, as what is wrong with options together, is told by its
    `joint_problems()`, if it has one.
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
    except (TypeError, ValueError, ArithmeticError):
        if not bad:  # A wrong value is what would explain it.
            raise
        return []
    return [text for text in problems if not any(f"`{name}`" in text for name in bad)]


def _must_be(option: Option, value: object, choices: Choices | None = None) -> str:
    if isinstance(value, type):
        return f"`{option.name}` is the class {value.__name__} itself: make one of it."
    sentence = f"`{option.name}` must be {expected(option.kind, choices)}, got {value!r}."
    words = [str(w) for k in kinds_in(option.kind) if get_origin(k) is Literal for w in get_args(k)]
    words += [word for k in kinds_in(option.kind) for word in (choices or {}).get(k, ())]
    hint = nearest(value, words) if isinstance(value, str) else None
    if hint:
        return f"{sentence} Did you mean {hint!r}?"
    return sentence if choices is not None else sentence + _advice(option, value)


def _advice(option: Option, value: object) -> str:
    """What to write in Python for what a config file would have; empty where it has nothing to do
    with one."""
    # Here, where a value is wrong: what can be named is known to those that know all of it.
    from fmol.config import CHOICES

    named = {n: each for kind in kinds_in(option.kind) for n, each in CHOICES.get(kind, {}).items()}
    if not named or not isinstance(value, str | Mapping):
        return ""
    plain = parse_text(option.kind, value) if isinstance(value, str) else None
    if isinstance(plain, int | float) and fits(option.kind, plain):
        return f" Write `{plain!r}`."
    call, home = _as_call(option.kind, value, CHOICES)
    if call:
        return f" Write `{call}` (from {home})."
    classes = ", ".join(each.__name__ for each in named.values())
    return f" Give an object of your own, or of {classes} (from {home})."


def _as_call(kind: Any, value: Any, choices: Choices) -> tuple[str, str]:
    """A value of a config file as Python would have it, empty where there is none; and where its class
    is to be found."""
    named = {n: each for part in kinds_in(kind) for n, each in choices.get(part, {}).items()}
    table = parse_text(kind, value) if isinstance(value, str) and value not in named else value
    table = table if isinstance(table, Mapping) else {"name": table}
    name = str(table.get("name"))
    chosen = named.get(name) or named.get(nearest(name, named) or "")
    # `fmol.rules.cone` is one of those whose names `fmol.rules` gives.
    home = ".".join((chosen or next(iter(named.values()))).__module__.split(".")[:2])
    if chosen is None:
        return "", home
    said = []
    for each, option in list_options(chosen).items():
        if each in table:
            inner = any(part in choices for part in kinds_in(option.kind))
            call = _as_call(option.kind, table[each], choices)[0] if inner else ""
            said.append(f"{each}={call or repr(table[each])}")
        elif option.default is MISSING:
            said.append(f"{each}=…")
    return f"{chosen.__name__}({', '.join(said)})", home


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
        return isinstance(value, number) and not isinstance(value, bool) and _is_finite(value)
    if origin in (NoneType, None):
        return value is None
    if origin in _TABLES:
        names, values = get_args(kind) or (Any, Any)
        return isinstance(value, Mapping) and all(
            fits(names, name) and fits(values, each) for name, each in value.items()
        )
    if origin in _LISTS:
        if not isinstance(value, tuple | list):
            return False
        inner = get_args(kind) or (Any,)
        if origin is not tuple or len(inner) == 1 or inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        return len(inner) == len(value) and all(map(fits, inner, value))
    if origin in (bool, str):
        return isinstance(value, origin)
    # A protocol or a class: whatever can do the same, but not a class in its place.
    return not isinstance(value, type) and all(hasattr(value, each) for each in _methods(origin))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # A whole number that no float can hold.
        return False


def _methods(kind: Any) -> list[str]:
    """What an object must have to stand where `kind` is asked for."""
    return [
        name
        for name, each in vars(kind).items()
        if callable(each) and (name == "__call__" or not name.startswith("_"))
    ]


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
        Path: "a path",
    }
    if origin in words:
        return words[origin]
    if origin in _TABLES:
        names, values = (expected(part) for part in get_args(kind) or (str, Any))
        return f"a mapping from {names} to {values}"
    if origin in _LISTS:
        return f"a list, each {expected((get_args(kind) or (Any,))[0])}"
    if origin is Any:
        return "anything"
    return "a callable" if "__call__" in vars(origin) else f"a {origin.__name__}"


def kinds_in(kind: Any) -> list[Any]:
    """The kinds of value that an annotation allows, without ranges."""
    if get_origin(kind) is Annotated:
        return kinds_in(get_args(kind)[0])
    if _is_union(kind):
        return [each for part in get_args(kind) for each in kinds_in(part)]
    return [kind]


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
    good, bad, problems = _read_each(known, values, choices, called or owner.__name__)
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


def certain_problems(
    owner: type, values: Mapping[str, Any], choices: Choices | None = None, called: str = ""
) -> list[str]:
    """What is wrong with `values` whatever the options are that are not among them.

    >>> from fmol import FSMGDA
    >>> certain_problems(FSMGDA, {"local_lr": -1.0})
    ['`local_lr` must be a finite number of at least 0 or a callable, got -1.0.']
    """
    known = list_options(owner)
    good, bad, problems = _read_each(known, values, choices, called or owner.__name__)
    filled = {name: good.get(name, option.default) for name, option in known.items()}
    absent = [name for name in known if name not in values]
    return [*problems, *_joint_problems(owner, filled, [*bad, *absent])]


def _read_each(
    known: Mapping[str, Option], values: Mapping[str, Any], choices: Choices | None, called: str
) -> tuple[dict[str, Any], set[str], list[str]]:
    """Each value by itself: those that could be read, the names of those that are wrong, and why."""
    problems: list[str] = []
    good: dict[str, Any] = {}
    bad: set[str] = set()
    for name, value in values.items():
        if name not in known:
            hint = nearest(name, known)
            problems.append(
                f"`{name}` is not an option of {called}, got {value!r}. "
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
    return good, bad, problems


def _read(kind: Any, value: Any, choices: Choices) -> Any:
    """A value of a config file as the field wants it; what does not fit is left as it is."""
    parts = kinds_in(kind)
    if value == "none" and NoneType in parts:
        return None
    if isinstance(value, list):
        return value if list in (get_origin(part) or part for part in parts) else tuple(value)
    if isinstance(value, str) and Path in parts:
        return Path(value)
    for part in parts:
        named = choices.get(part)
        if named is None:
            continue
        table = {"name": value} if isinstance(value, str) and value in named else value
        if isinstance(table, Mapping) and "name" in table:
            chosen = table["name"]
            if not isinstance(chosen, str) or chosen not in named:
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

    Lists may be written without brackets and tables without braces, a table's name first.

    >>> parse_text(float | None, "0.5"), parse_text(Mapping[str, float], "left=0.5,right=1")
    (0.5, {'left': 0.5, 'right': 1})
    >>> parse_text(Mapping[str, float], "cosine,start=0.1,rounds=40")
    {'name': 'cosine', 'start': 0.1, 'rounds': 40}
    >>> parse_text(Mapping[str, float], "fixed,weights={left = 1, right = 2}")
    {'name': 'fixed', 'weights': {'left': 1, 'right': 2}}
    """
    parts = kinds_in(kind)
    origins = [get_origin(part) or part for part in parts]
    values = [each for part in parts if get_origin(part) is Literal for each in get_args(part)]
    words = {str(each): each for each in values} | {"none": "none"}
    if text in words:
        return words[text]
    written = text.strip()
    if all(origin in (str, Path, Literal, NoneType) for origin in origins):
        return text
    if {tuple, list} & set(origins) or (Sequence in origins and "," in written):
        if not written.startswith("["):
            return _parse_list(parts[[each in _LISTS for each in origins].index(True)], written)
    elif "=" in written and not written.startswith(("{", '"', "'")):
        return _parse_pairs(written)
    return _toml_value(written, otherwise=text)


def _parse_list(kind: Any, text: str) -> list[Any]:
    """`a,b` and `"a, b",c` as a list."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    inner = (get_args(kind) or (Any,))[0]
    listed = _toml_value(f"[{text}]", otherwise=text) if '"' in text else text
    return listed if isinstance(listed, list) else [parse_text(inner, word) for word in words]


def _parse_pairs(text: str) -> Any:
    """`left=0.5,right=1` as a table; `cosine,start=0.1` as one with a `name`."""
    first, *rest = _split(text)
    table: dict[str, Any] = {} if "=" in first else {"name": first.strip()}
    for pair in [first, *rest] if "=" in first else rest:
        key, equals, value = pair.partition("=")
        if not equals:
            return text
        table[key.strip()] = _toml_value(value.strip(), otherwise=value.strip())
    return table


def _split(text: str) -> list[str]:
    """The parts between commas outside brackets and quotes: `a,b={c = 1, d = 2}` has two."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote or sign in "\"'":
            quote = "" if sign == quote else quote or sign
        depth += (sign in "[{") - (sign in "]}") if not quote else 0
        if sign == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _toml_value(text: str, otherwise: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # No TOML, or a number or nest too long to be meant.
        return otherwise
    return table["value"] if len(table) == 1 else otherwise


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
