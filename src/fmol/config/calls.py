"""A call of `fit` as a config has it, and as one would type it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

from fmol.config.choices import ALGORITHMS
from fmol.config.run import RunOptions
from fmol.config.writing import plain_value
from fmol.engines import EngineName
from fmol.options import list_options
from fmol.rounds import Algorithm
from fmol.wording import in_words

__all__ = ["call_in_words", "call_tables"]


def call_tables(algorithm: Algorithm, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call as a config file has them, as far as it knows them.

    There is no table of the problem: from Python that is an object without a name. Options that only
    Python can give stand there where they were given; functions by their names.
    """
    defaults = {name: option.default for name, option in list_options(RunOptions).items()}
    run = {
        name: plain_value(defaults[name] if value is None and name in defaults else value)
        for name, value in asked.items()
        if name in defaults or value is not None
    }
    named = {kind: name for name, kind in ALGORITHMS.items()}
    name = named.get(type(algorithm), type(algorithm).__name__)
    return {**run, "algorithm": {"name": name, **_options(algorithm)}}


def _options(algorithm: Algorithm) -> dict[str, Any]:
    if not is_dataclass(algorithm):
        return {
            name: plain_value(value) for name, value in getattr(algorithm, "__dict__", {}).items()
        }
    found = {}
    for each in fields(algorithm):
        value = getattr(algorithm, each.name)
        if value != () or not each.init:
            found[each.name] = plain_value(value)
    return found


def call_in_words(algorithm: Algorithm, asked: Mapping[str, Any]) -> str:
    """The call with what is not as by default: `fit(federation, FMGDA(local_steps=5), rounds=9)`."""
    given = [
        f"{name}={_argument(name, value)}"
        for name, value in asked.items()
        if name == "rounds" or plain_value(value) != plain_value(DEFAULTS.get(name))
    ]
    return f"fit({', '.join(['federation', _typed(algorithm), *given])})"


DEFAULTS = {"seed": 0, "engine": "sequential", "device": "auto", "evaluate_every": 1}
"""Of `fit`; what is not here is None."""


def _argument(name: str, value: Any) -> str:
    if name == "start":  # Other parameters have a name where the call stands, and none here.
        return "…"
    if name == "engine" and value not in get_args(EngineName):  # In words already.
        return str(value)
    return _typed(value)


def _typed(value: Any) -> str:
    """A value as Python reads it, where it is more than an object by its name."""
    if is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{each.name}={_typed(getattr(value, each.name))}"
            for each in fields(value)
            if each.init and plain_value(getattr(value, each.name)) != plain_value(_default(each))
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{n!r}: {_typed(each)}" for n, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_typed, value)) + "]"
    return in_words(value)


def _default(each: Any) -> Any:
    if each.default_factory is not MISSING:
        return each.default_factory()
    return MISSING if each.default is MISSING else each.default
