"""On what a run was made: versions, machine and device."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from fmol import __version__

__all__ = ["PACKAGES", "describe_environment", "package_versions"]

PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn", "pandas", "pillow", "torchvision")
"""What is named with its version, where it is installed."""


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package → version, of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_environment(device: torch.device) -> dict[str, Any]:
    """What a reader of a run may ask about where it was made; nothing about who made it."""
    return {
        "fmol": __version__,
        "python": platform.python_version(),
        "packages": package_versions(),
        "torch": torch.__version__,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "byteorder": sys.byteorder,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
