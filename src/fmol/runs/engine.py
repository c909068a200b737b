"""The engine that a run's options name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fmol.config import RunOptions
from fmol.engines import (
    AutoEngine,
    EngineFactory,
    SequentialEngine,
    VectorizedEngine,
    all_devices,
)
from fmol.runs.folder import RunFolder

__all__ = ["lane_options", "named_engine"]


def named_engine(
    folder: RunFolder, options: RunOptions, environment: dict[str, Any], say: Callable[[str], None]
) -> EngineFactory:
    """The engine; where it is chosen by measuring, the choice of the first stretch is kept."""
    if options.engine == "sequential":
        return partial(SequentialEngine, precision=options.precision)
    if options.engine == "flower":
        from fmol.flower import FlowerEngine

        return partial(FlowerEngine, precision=options.precision, backend=options.flower_backend)
    side_by_side = lane_options(options, say)
    if options.engine == "vectorized":
        return partial(VectorizedEngine, **side_by_side)

    def keep(choice: str) -> None:
        environment["engine"] = choice
        folder.write_json(folder.environment, environment)

    return partial(AutoEngine, choice=environment.get("engine"), decided=keep, **side_by_side)


def lane_options(options: RunOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """What a run's options say to an engine that steps lanes side by side."""
    return {
        "precision": options.precision,
        "compile": options.compile,
        "lanes_in_flight": options.lanes_in_flight,
        "devices": all_devices(options.device),
        "say": say,
    }
