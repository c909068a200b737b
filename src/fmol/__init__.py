"""Federated multi-objective learning: many clients, each with its own objectives, one model."""

import logging

from fmol import participation, partition, rules, schedules
from fmol.algorithms import FMGDA, FSMGDA, MGD, SMGD, Alone, FedAvg
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
    "FedAvg",
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

# A library does not speak unless the application asks it to.
logging.getLogger("fmol").addHandler(logging.NullHandler())
