"""fmol through Flower: clients that are asked and answer by Flower's messages.

Nothing of Flower is imported until an engine is made, and nothing that is started from here reports to
anyone: what Flower and Ray would send or install by themselves is switched off first.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmol.flower.engine import ClientError, FlowerEngine

__all__ = ["SWITCHED_OFF", "ClientError", "FlowerEngine"]

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
    if name not in ("ClientError", "FlowerEngine"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("flwr") is None:
        raise ImportError(
            '`engine="flower"` needs flwr. Install it with: pip install "fmol[flower]".'
        )
    from fmol.flower import engine

    return getattr(engine, name)
