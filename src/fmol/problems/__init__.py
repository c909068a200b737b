"""Problems to run: built-in ones by name, and one's own by `module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any, get_type_hints

from torch import nn

from fmol.errors import MisuseError
from fmol.federation import Federation
from fmol.options import nearest

__all__ = ["PROBLEMS", "ProblemError", "find_problem", "problem_file"]

PROBLEMS: Mapping[str, str] = {
    "multidigits": "fmol.problems.multidigits:MultiDigits",
    "quadratic": "fmol.problems.quadratic:Quadratic",
    "waves": "fmol.problems.waves:Waves",
    "multimnist": "fmol.problems.multimnist:MultiMNIST",
    "river-flow": "fmol.problems.river_flow:RiverFlow",
    "celeba": "fmol.problems.celeba:CelebA",
    "shoppers": "fmol.problems.shoppers:Shoppers",
    "adult": "fmol.problems.adult:Adult",
}
"""Name → where the problem is: a dataclass of options with `build(data_dir) -> Federation`."""

LONGEST = 600
"""Characters of an error of one's own code that are shown."""


class ProblemError(MisuseError):
    """A problem that is not where it was looked for, or cannot be used as one."""


def problem_file(name: str, known: Path | None = None) -> Path | None:
    """The file that `file.py:name` is in: `known` if there is such a file, else by its path from the
    working folder. None for other names.

    >>> str(problem_file("own.py:federation")), problem_file("quadratic")
    ('own.py', None)
    """
    module, colon, _ = name.rpartition(":")
    if not colon or not module.endswith(".py"):
        return None
    return known if known is not None and known.is_file() else Path(module)


def find_problem(name: str, known: Path | None = None) -> type:
    """The dataclass of the problem called `name`: a built-in one, or `module:name` of one's own.

    One's own is a `Federation`, a function that returns one (its arguments are the options), or a
    dataclass with `build(data_dir)`; `module` may be a path to a file, and `known` is where that file
    was before.

    >>> find_problem("multidigits").__name__
    'MultiDigits'
    """
    if name in PROBLEMS:
        module, _, attribute = PROBLEMS[name].partition(":")
        kind: type = getattr(importlib.import_module(module), attribute)
        return kind
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        hint = f"{name}:federation" if name.endswith(".py") else nearest(name, PROBLEMS)
        raise ProblemError(
            f"`problem` must be one of {', '.join(PROBLEMS)}, a file that ends in .toml, or your own "
            f"as `module:name`, got {name!r}." + (f" Did you mean `{hint}`?" if hint else "")
        )
    file = problem_file(name, known)
    module_found = _module(module_name, name) if file is None else _file(file, name, known)
    if not hasattr(module_found, attribute):
        public = [each for each in vars(module_found) if not each.startswith("_")]
        hint = nearest(attribute, public)
        raise ProblemError(
            f"`{module_name}` has nothing called `{attribute}`, got `{name}`."
            + (f" Did you mean `{module_name}:{hint}`?" if hint else "")
        )
    return _as_problem(getattr(module_found, attribute), name)


def _module(module: str, reference: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # As `python -m` does: one's own modules are where one works.
        sys.path.insert(0, here)
    try:
        if module and not module.startswith("."):
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module may be there, and what it imports not.
        if absent is None or not f"{module}.".startswith(f"{absent}."):
            raise _broken(error, module, f"python -m {module}") from error
    raise ProblemError(
        f"there is no module `{module}`, got `{reference}`. Run from the folder that holds it, "
        "install it, or give the path of its file."
    )


def _file(path: Path, reference: str, known: Path | None) -> ModuleType:
    if not path.is_file():
        raise ProblemError(
            f"there is no file `{path}`, got `{reference}`. Name one that is there."
            if known is None
            else f"there is no file `{known}` any more, and no `{path}` here. Put it back, or go where "
            "it is."
        )
    # Its whole path: `types.py` must not take the place of Python's own `types`.
    name = str(path.resolve())
    if name in sys.modules:
        return sys.modules[name]
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # As `python file.py` does, for what lies beside it.
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # Dataclasses look their module up by name.
    try:
        spec.loader.exec_module(found)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise _broken(error, str(path), f"python {path}") from error
        raise
    return found


def _broken(error: BaseException, called: str, again: str) -> ProblemError:
    """The error for a module of one's own that raised something when it was imported."""
    place = _place(error)
    at = f"line {place[1]} of `{_shown(place[0])}` " if place else ""
    text = shorten(str(error), LONGEST, placeholder=" …").rstrip(".")
    if isinstance(error, SyntaxError):
        what = f"{at}has a syntax error: {error.msg}" if at else f"it has a syntax error: {text}"
    else:
        what = f"{at or 'it '}raised {type(error).__name__}" + (f": {text}" if text else "")
    return ProblemError(
        f"`{called}` cannot be imported: {what}. Mend it; `{again}` shows the whole traceback."
    )


def _place(error: BaseException) -> tuple[str, int] | None:
    """File and line where one's own code raised an error, however deep in a library it arose."""
    if isinstance(error, SyntaxError):
        return (error.filename, error.lineno) if error.filename and error.lineno else None
    frames = traceback.extract_tb(error.__traceback__)
    places = [(each.filename, each.lineno) for each in frames if each.lineno is not None]
    own = [place for place in places if not _is_library(Path(place[0]))]
    return own[-1] if own else None


def _is_library(path: Path) -> bool:
    """Whether a file is Python's, fmol's or an installed package's."""
    folders = [sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")]
    folders.append(str(Path(__file__).parents[1]))
    # What is frozen into Python has no path.
    return not path.is_absolute() or any(path.is_relative_to(each) for each in folders)


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _as_problem(found: Any, name: str) -> type:
    if isinstance(found, Federation):
        return _Given.of(found, name)
    if isinstance(found, type) and is_dataclass(found) and hasattr(found, "build"):
        for each in fields(found):
            _check_option(each.name, name)
        return found
    # A model can be called too, but not for a federation.
    if callable(found) and not isinstance(found, type | nn.Module):
        return _from_function(found, name)
    raise ProblemError(
        f"`{name}` is a {type(found).__name__}, where a Federation was expected, a function that "
        "returns one, or a dataclass with `build(data_dir)`. Name one of those."
    )


def _check_option(option: str, name: str) -> None:
    if option in ("name", "build"):
        raise ProblemError(
            f"`{name}` has an option `{option}`, a word that means something else for problems. Give "
            "it another one."
        )


class _Given:
    """A federation that is there already, as a problem without options."""

    @staticmethod
    def of(federation: Federation, name: str) -> type:
        def build(self: Any, data_dir: str | None = None) -> Federation:
            return federation

        return make_dataclass(_class_name(name), [], namespace={"build": build}, frozen=True)


def _from_function(function: Callable[..., Federation], name: str) -> type:
    """The function's arguments as the fields of a dataclass whose `build` calls it."""
    kinds = _annotations(function)
    parameters, columns = inspect.signature(function).parameters, []
    for each in parameters.values():
        if each.name == "data_dir":
            continue
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            raise ProblemError(
                f"`{name}` takes `{each}`, which no option can be made of. Name its arguments."
            )
        _check_option(each.name, name)
        missing = each.default is each.empty
        guess = Any if missing or each.default is None else type(each.default)
        kind = kinds.get(each.name, guess)
        if each.default is None:
            kind = kind | None
        columns.append((each.name, kind) if missing else (each.name, kind, _default(each.default)))
    names = [column[0] for column in columns]

    def build(self: Any, data_dir: str | None = None) -> Federation:
        values = {each: getattr(self, each) for each in names}
        if "data_dir" in parameters:
            values["data_dir"] = data_dir
        return function(**values)

    return make_dataclass(
        _class_name(name), columns, namespace={"build": build}, frozen=True, kw_only=True
    )


def _default(value: Any) -> Any:
    # Dataclasses take no list or dict for a default, lest all share it.
    shared = isinstance(value, list | dict | set)
    return field(default_factory=partial(copy, value)) if shared else field(default=value)


def _annotations(function: Callable[..., Federation]) -> dict[str, Any]:
    """Argument → its kind, of those that say it."""
    inner = function.func if isinstance(function, partial) else function
    try:
        return get_type_hints(inner, include_extras=True)
    except (NameError, TypeError):  # Names that only type checkers see, or an object's `__call__`.
        return {}


def _class_name(reference: str) -> str:
    return reference.rpartition(":")[2]
