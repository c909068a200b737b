"""What can be named in files and flags, and which options can be written there at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fmol.algorithms import (
    FMGDA,
    FSMGDA,
    MGD,
    SMGD,
    Adam,
    Alone,
    FedALS,
    FedAvg,
    FedLS,
    Momentum,
    Plain,
)
from fmol.algorithms.steps import ServerStep
from fmol.options import Choices, Option, kinds_in, list_options
from fmol.participation import Everyone, Fraction, Number, Participation, Stratified
from fmol.rules import (
    Capped,
    Fixed,
    MinNorm,
    NearPrior,
    Rule,
    Smoothed,
    SmoothTchebycheff,
    TorchJD,
    UpGrad,
)
from fmol.schedules import Cosine, InverseSqrt, StepDecay, Warmup

__all__ = ["ALGORITHMS", "CHOICES", "settable_options"]

ALGORITHMS: Mapping[str, type] = {
    "fsmgda": FSMGDA,
    "fmgda": FMGDA,
    "fedavg": FedAvg,
    "fedls": FedLS,
    "fedals": FedALS,
    "smgd": SMGD,
    "mgd": MGD,
    "alone": Alone,
}
"""What an algorithm is called in files and flags; the first is the default."""

CHOICES: Choices = {
    Callable[[int], float]: {
        "cosine": Cosine,
        "step-decay": StepDecay,
        "inverse-sqrt": InverseSqrt,
        "warmup": Warmup,
    },
    Rule: {
        "min-norm": MinNorm,
        "upgrad": UpGrad,
        "capped": Capped,
        "near-prior": NearPrior,
        "fixed": Fixed,
        "tchebycheff": SmoothTchebycheff,
        "smoothed": Smoothed,
        "torchjd": TorchJD,
    },
    ServerStep: {"plain": Plain, "momentum": Momentum, "adam": Adam},
    Participation: {
        "everyone": Everyone,
        "fraction": Fraction,
        "number": Number,
        "stratified": Stratified,
    },
}
"""What can be named where an option is more than a value: `{name = "cosine", start = 0.1, …}`."""


def settable_options(owner: type) -> dict[str, Option]:
    """Name → option, for those that can be written down: not those that only Python can give."""
    return {
        name: option
        for name, option in list_options(owner).items()
        if any(_writable(kind) for kind in kinds_in(option.kind))
    }


def _writable(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    if origin in (tuple, list, Sequence):
        return all(_writable(each) for each in get_args(kind) if each is not Ellipsis)
    plain = (int, float, bool, str, Path, Literal, Mapping, dict, Any)
    return origin in plain or kind in CHOICES
