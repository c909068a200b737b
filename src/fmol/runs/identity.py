"""What makes two stretches of a run one run: what must not change between start and resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmol import __version__
from fmol.data import TensorSamples, as_samples, is_lazy
from fmol.federation import ClientList, Federation
from fmol.portrait import portray
from fmol.runs.checkpoints import SavedState
from fmol.runs.folder import RunError, RunMisuseError

__all__ = ["changed_keys", "changed_versions", "check_unchanged", "fingerprint", "versions"]

FREE = frozenset(
    {
        "rounds",
        "stop_at",
        "checkpoint_every",
        "data_dir",
        "tensorboard",
        "mlflow",
        "device",
        "compile",
        "lanes_in_flight",
    }
)
"""Run options that may change: they decide how long a run goes on, what is written, and how much is
computed at a time; the device is compared as it was really used."""
MOST_BYTES = 2**29
"""How much of the data is looked at as a whole."""
MOST_OF_LARGE = 2**16
"""Beyond that, how many values at either end of a tensor."""


def fingerprint(federation: Federation, x: Tensor) -> str:
    """A sha256 of the model, its start, the objectives' names and targets, who holds what, and the
    data, held-out ones too, as far as they are tensors in memory.

    Beyond 512 MiB only the beginning and end of each tensor count. What losses compute, data that
    come when they are needed, and clients that come and go are not looked at.
    """
    digest = hashlib.sha256()
    layout = federation.layout
    portrait = portray(federation).to_json()
    if getattr(federation.population, "comes_and_goes", False):
        portrait |= {"size": None, "clients": []}
    about = [portrait, list(layout.names), [list(s) for s in layout.shapes]]
    digest.update(json.dumps(about, sort_keys=True).encode())
    digest.update(_bytes(x))
    left = MOST_BYTES
    for tensor in _tensors(federation):
        left -= tensor.numel() * tensor.element_size()
        flat = tensor.reshape(-1)
        for part in [flat] if left >= 0 else [flat[:MOST_OF_LARGE], flat[-MOST_OF_LARGE:]]:
            digest.update(_bytes(part))
    return digest.hexdigest()


def _tensors(federation: Federation) -> Iterator[Tensor]:
    if not isinstance(federation.population, ClientList):
        return
    clients = [federation.client(id) for id in federation.population.ids()]
    for data in [*(d for c in clients for d in (c.data, c.held_out)), federation.held_out]:
        samples = None if data is None or is_lazy(data) else as_samples(data, "data")
        if isinstance(samples, TensorSamples):
            yield from samples.leaves


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def versions(device: torch.device) -> dict[str, str]:
    """What a change of would change results, in their last bits at least."""
    return {"fmol": __version__, "torch": torch.__version__, "device": device.type}


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What is not as it was when the run began, in words."""
    return [
        f"{name} was {before[name]} and is {now[name]}"
        for name in now
        if name in before and before[name] != now[name]
    ]


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], at: str = "") -> list[str]:
    """The config's keys whose change would change results, each with both values."""
    changes: list[str] = []
    for key in dict.fromkeys([*before, *now]):
        if not at and key in FREE:
            continue
        old, new = before.get(key), now.get(key)
        if not at and isinstance(old, Mapping) and isinstance(new, Mapping):
            if old.get("name") != new.get("name"):  # Then its options differ as a matter of course.
                changes.append(f"`{key}` was {old.get('name')} and is {new.get('name')}")
            else:
                changes += changed_keys(old, new, f"[{key}] ")
        elif old != new:
            changes.append(f"{at}`{key}` was {old!r} and is {new!r}")
    return changes


def check_unchanged(
    path: Path, saved: SavedState, identity: Mapping[str, Any], anyway: bool
) -> list[str]:
    """What has changed since the checkpoint and does no harm; raises for what would."""
    changes = changed_keys(saved.identity["config"], identity["config"])
    if changes:
        raise RunMisuseError(
            f"the config is not what the run in `{path}` was started with: "
            f"{'; '.join(changes)}. Results would be of neither. Change it back, or start a new run."
        )
    if saved.identity["federation"] != identity["federation"]:
        raise RunError(
            "the problem is not what the run was started with: its model, objectives, clients or "
            "data have changed. Restore them (a problem of your own must build the same each time: "
            "seed what it draws), or start a new run."
        )
    other = changed_versions(saved.identity["versions"], identity["versions"])
    if other and not anyway:
        raise RunError(
            f"{'; '.join(other)} since the run was started, so results may differ from those of an "
            "unbroken run. Go back, or accept that with `--anyway`."
        )
    return [f"After round {saved.rounds}: {text}." for text in other]
