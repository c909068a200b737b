"""Functions and transforms by name: what a message can say of code that both sides have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fmol.engines.seam import Transform

__all__ = [
    "NotAllowedError",
    "describe_transform",
    "find",
    "known_by_path",
    "make_transform",
    "path_of",
]


class NotAllowedError(ValueError):
    """Code that a message names and a site has not been told to trust."""


def path_of(thing: Any, what: str) -> str:
    """The import path of a function or class, `module:name`; raises where it leads elsewhere.

    >>> from fmol.local import local_work
    >>> path_of(local_work, "`work`")
    'fmol.local:local_work'
    """
    name = getattr(thing, "__qualname__", None)
    module = getattr(thing, "__module__", None)
    path = f"{module}:{name}"
    if name is None or module is None or _look_up(path) is not thing:
        raise ValueError(
            f"{what} is {name or type(thing).__name__!r} of module {module!r}, which a client cannot "
            "find by that name. Define it at the top of a module that clients can import."
        )
    return path


def known_by_path(things: Iterable[Any]) -> dict[str, Any]:
    """Import path → function or class: what a site has been told to trust.

    >>> from fmol.local import local_work
    >>> list(known_by_path([local_work]))
    ['fmol.local:local_work']
    """
    return {path_of(thing, "what a site allows"): thing for thing in things}


def find(path: str, what: str, known: Mapping[str, Any] | None = None) -> Any:
    """What an import path leads to; raises `ValueError` where it leads nowhere.

    With `known` nothing is imported: a path that is not in it is refused.
    """
    if known is not None:
        if path not in known:
            raise NotAllowedError(
                f"{what} is `{path}`, which this site has not been told to trust. It knows "
                f"{', '.join(known)}; give more with `allow`."
            )
        return known[path]
    found = _look_up(path)
    if found is None:
        raise ValueError(
            f"{what} is `{path}`, which cannot be imported at this client. Install its module here, or "
            "define it in one that both sides have."
        )
    return found


def _look_up(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found


def describe_transform(transform: Transform) -> dict[str, Any]:
    """A transform as its class's import path and its options, from which clients make it again."""
    kind = type(transform)
    options = (
        {each.name: getattr(transform, each.name) for each in fields(transform) if each.init}
        if is_dataclass(transform)
        else dict(vars(transform))
    )
    path = path_of(kind, f"the class of the transform {transform!r}")
    if not all(map(_is_plain, options.values())) or (options and not is_dataclass(transform)):
        raise ValueError(
            f"the transform {transform!r} cannot be made again at a client. Let it be a dataclass "
            "whose options are numbers, texts and tuples of them."
        )
    return {"path": path, "options": {name: _as_list(value) for name, value in options.items()}}


def make_transform(
    described: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> Transform:
    """The transform that was described; with `known`, one of those classes."""
    kind = find(described["path"], "the class of a transform", known)
    made: Transform = kind(**{k: _as_tuple(v) for k, v in described["options"].items()})
    return made


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _as_list(value: Any) -> Any:
    return [_as_list(each) for each in value] if isinstance(value, tuple) else value


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
