"""Where clients compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

import torch

from fmol.engines.auto import AutoEngine
from fmol.engines.seam import Engine
from fmol.engines.sequential import SequentialEngine
from fmol.engines.vectorized import VectorizedEngine
from fmol.engines.worker import Compile
from fmol.federation import Federation

__all__ = [
    "ALL_CUDA",
    "AutoEngine",
    "Compile",
    "EngineFactory",
    "EngineName",
    "SequentialEngine",
    "VectorizedEngine",
    "all_devices",
    "make_engine",
    "resolve_device",
]


class EngineFactory(Protocol):
    """Anything that makes an engine for a federation; an engine's class is one."""

    def __call__(self, federation: Federation, *, seed: int, device: torch.device) -> Engine: ...


ALL_CUDA = "cuda:all"
"""All CUDA devices of this machine, the lanes divided among them."""

EngineName = Literal["auto", "sequential", "vectorized", "flower"]
"""What an engine is called in files and flags."""


def _flower(federation: Federation, **options: Any) -> Engine:
    from fmol.flower import FlowerEngine  # Where it is used: flwr is no part of the core.

    return FlowerEngine(federation, **options)


BUILT_IN: dict[str, Callable[..., Engine]] = {
    "auto": AutoEngine,
    "sequential": SequentialEngine,
    "vectorized": VectorizedEngine,
    "flower": _flower,
}


def make_engine(
    engine: str | EngineFactory, federation: Federation, *, seed: int, device: str | torch.device
) -> Engine:
    """The engine called `engine`, or the one that the factory makes, for this federation."""
    if isinstance(engine, str):
        if engine not in BUILT_IN:
            raise ValueError(
                f"`engine` must be one of {sorted(BUILT_IN)} or a factory, got {engine!r}."
            )
        engine = BUILT_IN[engine]
    if device == ALL_CUDA:
        if not (isinstance(engine, type) and issubclass(engine, VectorizedEngine)):
            raise ValueError(
                f"`device` is '{ALL_CUDA}', which the engines 'vectorized' and 'auto' alone divide "
                f"their lanes among. Take one of them, or one device."
            )
        engine = partial(engine, devices=all_devices(device))
    if not callable(engine):
        raise ValueError(
            f"`engine` must be one of {sorted(BUILT_IN)} or a factory, got {engine!r}."
        )
    return engine(federation, seed=seed, device=resolve_device(device))


def all_devices(device: str | torch.device) -> list[torch.device]:
    """Every device that `device` names: all CUDA devices for `"cuda:all"`, one otherwise."""
    first = resolve_device(device)
    if device != ALL_CUDA:
        return [first]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def resolve_device(device: str | torch.device) -> torch.device:
    """`device` as torch knows it; `"auto"` is the first CUDA device where there is one.

    Of `"cuda:all"` it is the first, where the server computes.
    """
    if device == ALL_CUDA:
        device = "cuda:0"
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"`device` {device!r} is not one torch knows. Try 'auto'.") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"`device` is {device!r} but torch sees no CUDA device. Use 'cpu' or 'auto'."
        )
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
