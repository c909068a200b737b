"""Options as TOML that explains itself.

The standard library reads TOML and does not write it; no library writes the comments that make a config
explain itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fmol.config.choices import CHOICES, settable_options
from fmol.options import explain_options
from fmol.wording import in_words

__all__ = ["option_lines", "option_values", "plain_value", "toml_value"]


def option_values(options: Any) -> dict[str, Any]:
    """Option → value as a config file has it."""
    return {name: plain_value(getattr(options, name)) for name in settable_options(type(options))}


def plain_value(value: Any) -> Any:
    """A value as TOML and JSON know it."""
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return [plain_value(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain_value(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        for named in CHOICES.values():
            for name, kind in named.items():
                if type(value) is kind:
                    return {"name": name, **option_values(value)}
        return {"name": type(value).__name__, **_all_options(value)}
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return str(value) if isinstance(value, Path) else in_words(value)


def _all_options(options: Any) -> dict[str, Any]:
    """Option → value of a dataclass that files cannot name, so that all of it is told."""
    return {each.name: plain_value(getattr(options, each.name)) for each in fields(options)}


def option_lines(options: Any) -> list[str]:
    """Options as lines of a config file, each below what its docstring says of it."""
    help = explain_options(type(options))
    lines = []
    for name, value in option_values(options).items():
        lines += [f"# {help[name]}"] if help.get(name) else []
        lines.append(f"{name} = {toml_value(value)}")
    return lines


def toml_value(value: Any) -> str:
    """A value of `plain_value` as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(name)} = {toml_value(each)}" for name, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return repr(value)


def _toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
