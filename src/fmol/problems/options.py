"""The options of problems, checked by what their fields say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["check_options"]


def check_options(
    options: Any,
    least: Mapping[str, float],
    below: Mapping[str, float] | None = None,
    more: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Raises one ValueError that lists all that is wrong with a problem's options.

    Choices and types are read from the fields' annotations; `least` has the smallest value that a
    number may take, `below` what it must stay under. `more` tells what is wrong with options that
    are right by themselves, and is asked only once they are.
    """
    problems = []
    for name, kind in get_type_hints(type(options)).items():
        problem = _problem(kind, getattr(options, name), least.get(name), (below or {}).get(name))
        if problem:
            problems.append(f"`{name}` must be {problem}, got {getattr(options, name)!r}.")
    problems += [] if problems else more()
    if problems:
        raise ValueError(f"{type(options).__name__}: " + " ".join(problems))


def _problem(kind: Any, value: object, low: float | None, high: float | None) -> str:
    """What a value of this annotation should be, empty if it is."""
    if NoneType in get_args(kind):
        if value is None:
            return ""
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return "" if value in get_args(kind) else f"one of {list(get_args(kind))}"
    if kind is bool:
        return "" if isinstance(value, bool) else "true or false"
    number: type = Integral if kind is int else Real
    text = "a whole number" if kind is int else "a finite number"
    text += "" if low is None else f" of at least {low:g}"
    text += "" if high is None else f" and below {high:g}"
    bottom = float("-inf") if low is None else low
    top = float("inf") if high is None else high
    # Written so that NaN, which is neither below nor above anything, is refused.
    fits = isinstance(value, number) and not isinstance(value, bool) and bottom <= value < top  # type: ignore[operator]
    return "" if fits else text
