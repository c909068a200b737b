"""Functions and objects in words that are the same in every process, and counts of things."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["in_words", "many"]

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
MOST_WORDS = 200
"""Letters of an object in words: beyond that nobody reads it."""


def many(count: int, word: str) -> str:
    """A count with its noun.

    >>> many(1, "round"), many(20, "round")
    ('1 round', '20 rounds')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def in_words(value: Any) -> str:
    """What an object is, as a reader would call it: without its place in memory, with what it holds.

    >>> def halve(round, rate=0.1):
    ...     return rate / 2
    >>> in_words(halve), in_words(functools.partial(halve, rate=0.2))
    ('halve(rate=0.1)', 'partial(halve(rate=0.1), rate=0.2)')
    """
    text = _in_words(value)
    return text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 1] + "…"


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)} {_digest([value])}"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__} {_digest(value.state_dict().values())}"
    if isinstance(value, functools.partial):
        named = [f"{name}={_in_words(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join(map(_in_words, (value.func, *value.args)))}{_after(named)})"
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        return _function_in_words(value, code)
    if isinstance(value, type):
        return value.__name__
    if "__repr__" not in {name for kind in type(value).__mro__[:-1] for name in vars(kind)}:
        return _with_values(type(value).__name__, getattr(value, "__dict__", {}))
    return ADDRESS.sub("", repr(value))


def _function_in_words(function: Any, code: CodeType) -> str:
    """Its name, and what it was made with; functions without a name are told by where they stand."""
    name = code.co_name
    if name == "<lambda>":
        name = f"lambda in {Path(code.co_filename).name}, line {code.co_firstlineno}"
    given = function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    named = dict(zip(last, given, strict=True)) | (function.__kwdefaults__ or {})
    for free, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            named[free] = cell.cell_contents
        except ValueError:  # Not given a value yet.
            continue
    return _with_values(name, named)


def _with_values(name: str, named: Mapping[str, Any]) -> str:
    """With those of what it holds that are plain values: others may hold the thing itself."""
    told = [
        f"{n}={v!r}" for n, v in named.items() if isinstance(v, bool | int | float | str | None)
    ]
    return f"{name}({', '.join(told)})" if told else name


def _after(named: Iterable[str]) -> str:
    return "".join(f", {each}" for each in named)


def _digest(tensors: Iterable[Tensor]) -> str:
    """The first letters of a sha256 of the values: equal where they are."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return f"#{digest.hexdigest()[:8]}"
