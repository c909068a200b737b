"""Checkpoint files: written whole, checked on reading, never unpickled.

A file is eight bytes that name the format, the sha256 of all that follows, and then a safetensors
file: the model, what the algorithm keeps, what the clients keep, and in its metadata the rest as
JSON. The reports of past rounds are not in it but in `metrics.jsonl`, of which a checkpoint says how
many bytes are its own and what their sha256 is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmol.files import sync_folder, write_whole
from fmol.rounds import State

__all__ = [
    "CheckpointError",
    "SavedState",
    "checkpoint_rounds",
    "list_checkpoints",
    "load_checkpoint",
    "save_checkpoint",
]

MAGIC = b"fmolckp1"
DIGEST = 32
KEPT = 2
"""How many checkpoints are kept: should the last one be damaged, there is the one before."""


class CheckpointError(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint file holds."""

    rounds: int
    """Rounds done; the next one has this number."""
    state: State
    client_state: Mapping[str, Mapping[str, Tensor]]
    seed: int
    metrics_bytes: int
    """How much of `metrics.jsonl` belongs to these rounds."""
    metrics_sha256: str
    identity: Mapping[str, Any]
    """What must not change between start and resume."""


def checkpoint_path(folder: Path, rounds: int) -> Path:
    return folder / f"round-{rounds:08d}.ckpt"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the latest first."""
    found = [path for path in folder.glob("round-*.ckpt") if re.fullmatch(r"round-\d+", path.stem)]
    return sorted(found, key=checkpoint_rounds, reverse=True)


def checkpoint_rounds(path: Path) -> int:
    """How many rounds were done at a checkpoint, by its name."""
    return int(path.stem.removeprefix("round-"))


def save_checkpoint(folder: Path, saved: SavedState) -> Path:
    """Writes a checkpoint into `folder` and removes all but the last two."""
    path = checkpoint_path(folder, saved.rounds)
    payload = _encode(saved)
    write_whole(path, MAGIC + hashlib.sha256(payload).digest() + payload)
    remove_old(folder)
    return path


def remove_old(folder: Path) -> None:
    """Takes away all checkpoints but the last two."""
    old = list_checkpoints(folder)[KEPT:]
    for each in old:
        each.unlink(missing_ok=True)
    if old:
        sync_folder(folder)


def load_checkpoint(path: Path) -> SavedState:
    """What a checkpoint file holds, on the CPU; raises `CheckpointError` if a bit of it changed."""
    content = path.read_bytes()
    head, digest, payload = (
        content[: len(MAGIC)],
        content[len(MAGIC) : len(MAGIC) + DIGEST],
        content[len(MAGIC) + DIGEST :],
    )
    if head != MAGIC:
        raise CheckpointError(f"`{path.name}` does not begin as a checkpoint of fmol does")
    if hashlib.sha256(payload).digest() != digest:
        raise CheckpointError(f"`{path.name}` is damaged: its content has another sha256")
    return _decode(payload)


def _encode(saved: SavedState) -> bytes:
    from safetensors.torch import save

    tensors = {"x": saved.state.x}
    # Numbered, because names of clients and of what they keep may hold any character.
    names: dict[str, list[str]] = {"memory": list(saved.state.memory), "clients": []}
    tensors |= {f"memory.{i}": saved.state.memory[name] for i, name in enumerate(names["memory"])}
    places: list[Sequence[str]] = [
        (client, name) for client, kept in saved.client_state.items() for name in kept
    ]
    tensors |= {
        f"client.{i}": saved.client_state[client][name] for i, (client, name) in enumerate(places)
    }
    # safetensors wants each tensor by itself: no views that share memory.
    copies = {
        name: torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
        if tensor.is_contiguous()
        else tensor.detach().cpu().contiguous().clone()
        for name, tensor in tensors.items()
    }
    about = {
        "rounds": saved.rounds,
        "seed": saved.seed,
        "metrics_bytes": saved.metrics_bytes,
        "metrics_sha256": saved.metrics_sha256,
        "identity": saved.identity,
        "memory": names["memory"],
        "clients": places,
        "on_device": [name for name, tensor in tensors.items() if tensor.device.type != "cpu"],
    }
    return save(copies, metadata={"fmol": json.dumps(about, sort_keys=True)})


def _decode(payload: bytes) -> SavedState:
    from safetensors.torch import load

    size = int.from_bytes(payload[:8], "little")
    about = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"]["fmol"])
    tensors = load(payload)
    client_state: dict[str, dict[str, Tensor]] = {}
    for i, (client, name) in enumerate(about["clients"]):
        client_state.setdefault(client, {})[name] = tensors[f"client.{i}"]
    memory = {name: tensors[f"memory.{i}"] for i, name in enumerate(about["memory"])}
    return SavedState(
        rounds=about["rounds"],
        state=State(tensors["x"], memory),
        client_state=client_state,
        seed=about["seed"],
        metrics_bytes=about["metrics_bytes"],
        metrics_sha256=about["metrics_sha256"],
        identity=about["identity"],
    )
