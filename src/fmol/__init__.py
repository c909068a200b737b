"""Federated multi-objective learning: many clients, each with its own objectives, one model."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmol import participation, partition, rules, schedules
    from fmol.algorithms import FMGDA, FSMGDA, MGD, SMGD, Alone, FedALS, FedAvg, FedLS
    from fmol.errors import FmolError, MissingObjectiveError, RefusedError
    from fmol.federation import Client, Federation, LazyPopulation, Population
    from fmol.minnorm import min_norm
    from fmol.objectives import Objective, whole_set
    from fmol.result import Result
    from fmol.rounds import RoundReport
    from fmol.training import fit

__all__ = [
    "FMGDA",
    "FSMGDA",
    "MGD",
    "SMGD",
    "Alone",
    "Client",
    "FedALS",
    "FedAvg",
    "FedLS",
    "Federation",
    "FmolError",
    "LazyPopulation",
    "MissingObjectiveError",
    "Objective",
    "Population",
    "RefusedError",
    "Result",
    "RoundReport",
    "fit",
    "min_norm",
    "participation",
    "partition",
    "rules",
    "schedules",
    "whole_set",
]

__version__ = "0.1.0"

_HOMES = {
    "algorithms": ("FMGDA", "FSMGDA", "MGD", "SMGD", "Alone", "FedALS", "FedAvg", "FedLS"),
    "errors": ("FmolError", "MissingObjectiveError", "RefusedError"),
    "federation": ("Client", "Federation", "LazyPopulation", "Population"),
    "minnorm": ("min_norm",),
    "objectives": ("Objective", "whole_set"),
    "result": ("Result",),
    "rounds": ("RoundReport",),
    "training": ("fit",),
}
"""Module → its names that are given here. They are imported when they are first asked for: torch takes
longer to import than a site's short-lived process has to do."""


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        found = getattr(importlib.import_module(f"fmol.{home}"), name)
    elif name in __all__:
        found = importlib.import_module(f"fmol.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A library does not speak unless the application asks it to.
logging.getLogger("fmol").addHandler(logging.NullHandler())
