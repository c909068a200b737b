"""What gives way to what: a file to flags, and what a problem recommends to both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmol.config.source import Source
from fmol.options import list_options

__all__ = ["drop_foreign", "recommend", "recommended_options", "settle_steps"]

STEPS = ("local_steps", "local_epochs")
"""Two ways to say how far a client goes: one of them alone is said."""


def drop_foreign(options: dict[str, Any], source: Source) -> list[str]:
    """Takes out what a file says for another algorithm than the one asked for; says so."""
    foreign = [name for name in options if name not in list_options(source.algorithm_kind)]
    for name in foreign:
        del options[name]
    return [
        f"`{name}` of the file is no option of {source.algorithm}: left out." for name in foreign
    ]


def settle_steps(options: dict[str, Any], flags: Mapping[str, str]) -> list[str]:
    """Lets a flag for one of steps and epochs take the place of the other in a file; says so."""
    for said, other in (STEPS, STEPS[::-1]):
        asked = flags.get(said, "none") != "none" and other not in flags
        if asked and options.get(other, "none") != "none":
            options[other] = "none"
            return [f"`{other}` of the file gives way to `--{said.replace('_', '-')}`."]
    return []


def recommend(given: Mapping[str, dict[str, Any]], source: Source) -> None:
    """Fills in what the problem recommends where nothing was said."""
    recommended = recommended_options(source.problem_kind, source.algorithm_kind)
    if set(STEPS) & set(given["algorithm"]):
        recommended = {name: value for name, value in recommended.items() if name not in STEPS}
    for table in ("run", "algorithm"):
        for name in list_options(source.kinds[table]):
            if name in recommended and name not in given[table]:
                given[table][name] = recommended[name]


def recommended_options(problem: type, algorithm: type = object) -> dict[str, Any]:
    """Options of run and algorithm that suit a problem, where nothing else is said, but for those that
    the algorithm keeps to itself."""
    own: Mapping[str, Any] = getattr(problem, "recommended", {})
    if not set(STEPS) & set(own):
        own = {"local_steps": 10, **own}
    kept = getattr(algorithm, "own_options", ())
    return {name: value for name, value in own.items() if name not in kept}
