"""fmol through Flower: clients that are asked and answer by Flower's messages.

An engine for simulations, strategies for a server app, and what a client app needs beside them. Nothing
of Flower is imported until one of these is used, and nothing that is started from here reports to
anyone: what Flower and Ray would send or install by themselves is switched off first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmol.flower.client import QUERY, answer, introduce
    from fmol.flower.engine import ClientError, FlowerEngine
    from fmol.flower.roster import MissingSitesError
    from fmol.flower.strategy import (
        FMGDA,
        FSMGDA,
        FedALS,
        FedAvg,
        FedLS,
        MultiObjective,
        StrategyResult,
    )
    from fmol.flower.warm import keep_warm

__all__ = [
    "FMGDA",
    "FSMGDA",
    "QUERY",
    "SWITCHED_OFF",
    "ClientError",
    "FedALS",
    "FedAvg",
    "FedLS",
    "FlowerEngine",
    "MissingSitesError",
    "MultiObjective",
    "StrategyResult",
    "answer",
    "introduce",
    "keep_warm",
]

HOMES = {
    "QUERY": "client",
    "answer": "client",
    "introduce": "client",
    "ClientError": "engine",
    "FlowerEngine": "engine",
    "MissingSitesError": "roster",
    "FMGDA": "strategy",
    "FSMGDA": "strategy",
    "FedAvg": "strategy",
    "FedALS": "strategy",
    "FedLS": "strategy",
    "MultiObjective": "strategy",
    "StrategyResult": "strategy",
    "keep_warm": "warm",
}
"""In which module each name is: a client app needs nothing of the server's, nor the other way."""

SWITCHED_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What is set in the environment unless it is set already: telemetry, update checks and installing at
run time off; the last keeps Ray from speaking of its future versions."""

for _name, _value in SWITCHED_OFF.items():
    os.environ.setdefault(_name, _value)  # Before flwr, which reads them when it is imported.


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("flwr") is None:
        what = '`engine="flower"`' if HOMES[name] == "engine" else f"`fmol.flower.{name}`"
        raise ImportError(f'{what} needs flwr. Install it with: pip install "fmol[flower]".')
    return getattr(importlib.import_module(f"fmol.flower.{HOMES[name]}"), name)
