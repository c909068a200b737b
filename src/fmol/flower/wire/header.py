"""What a message's header says: plain values that are written, and checked when they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = [
    "PROTOCOL",
    "WireError",
    "address",
    "agree",
    "built",
    "number",
    "numbers",
    "plain",
    "plain_map",
    "text",
    "texts",
    "whole",
]

PROTOCOL = 4
"""Rises whenever a message of before could be misread."""

MOST_WHOLE = 2**53
"""Whole numbers beyond this are no counts of anything, and are not exact as floats either."""

T = TypeVar("T")


class WireError(ValueError):
    """A message that cannot be packed, or cannot be taken for what it should be."""


def address(kind: str, layout: str, client: str, round: int, phase: int) -> dict[str, Any]:
    """What an ask and all that answers it say first: `agree` holds it to what was expected."""
    return {"kind": kind, "layout": layout, "client": client, "round": round, "phase": phase}


def agree(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises where a message is not of this kind, model, round and phase, with both sides' values."""
    words = {
        "kind": ("a message of the kind", "Answer asks with replies."),
        "layout": ("a model with layout", "Build the same model on both sides."),
        "round": ("round", "It is too late or too early, and is left out."),
        "phase": ("phase", "It is too late or too early, and is left out."),
    }
    for name, wanted in expected.items():
        got = header.get(name)
        if type(got) is not type(wanted) or got != wanted:
            what, advice = words[name]
            raise WireError(
                f"the message is of {what} {got!r}, and {wanted!r} was expected. {advice}"
            )


def built(build: Callable[[], T]) -> T:
    """What `build` makes of a header; one sentence where the header is not as it should be."""
    try:
        return build()
    except WireError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(
            f"the message's header is not one of protocol {PROTOCOL}: {error!r}. Run the same version "
            "of fmol on both sides."
        ) from error


def plain(value: Any, owner: str) -> Any:
    """`value` as JSON has it, unchanged in value; raises for what is no number, text or nothing."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise WireError(f"{owner} holds a {type(value).__name__}. Give plain numbers.")


def plain_map(values: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Values by name as JSON has them, each as `plain` makes it."""
    for name in values:
        if not isinstance(name, str):
            raise WireError(f"{owner} is keyed by {name!r}. Key it by names.")
    return {name: plain(value, owner) for name, value in values.items()}


def text(value: Any) -> str:
    """`value`, if it is text."""
    if not isinstance(value, str):
        raise WireError(f"the message's header has {value!r} in place of a name.")
    return value


def texts(values: Any) -> tuple[str, ...]:
    """`values`, if they are a list of texts."""
    if not isinstance(values, list):
        raise WireError(f"the message's header has {values!r} in place of names.")
    return tuple(map(text, values))


def number(value: Any) -> Any:
    """`value`, if it is a number."""
    if not isinstance(value, int | float):
        raise WireError(f"the message's header has {value!r} in place of a number.")
    return _bounded(value)


def whole(value: Any) -> int:
    """`value`, if it is a whole number that can count something."""
    if type(value) is not int:
        raise WireError(f"the message's header has {value!r} in place of a whole number.")
    return int(_bounded(value))


def numbers(values: Any) -> dict[str, Any]:
    """`values`, if they are numbers by name."""
    if not isinstance(values, dict):
        raise WireError(f"the message's header has {values!r} in place of numbers by name.")
    return {name: number(value) for name, value in values.items()}


def _bounded(value: float) -> float:
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        raise WireError("the message's header has a whole number that is no count of anything.")
    return value
