"""The seam between algorithms and engines: what is asked of a client, and what comes back.

An algorithm says *what* it wants of which clients (`Ask`), how replies are to be combined (`Fold`)
and, if it is not the usual local work, *how* a client computes it (`Work`). An engine says *where*:
in this process one after the other, all at once, or on other machines. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fmol.data import Samples
from fmol.federation import Client, Federation
from fmol.layout import FlatModel
from fmol.objectives import Objective

__all__ = [
    "CONTROL",
    "OWN_MODEL",
    "Ask",
    "ClientRecord",
    "ClientState",
    "Engine",
    "Fold",
    "Lane",
    "LocalConfig",
    "Receipt",
    "Refusal",
    "Reply",
    "Site",
    "Transform",
    "Work",
]

OWN_MODEL = "own.x"
"""The name under which a client keeps parameters of its own, `[d]`."""

CONTROL = "control."
"""Before a slot's name: its control variate `[d]`, the mean of all in an ask's payload and a client's
own in its state."""

ClientState = Mapping[str, Mapping[str, Tensor]]
"""What stays at the clients between rounds: client id → name → tensor."""


@dataclass(frozen=True)
class LocalConfig:
    """How a lane descends: `steps` gradient steps, or `epochs` passes over the client's data."""

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    """Samples per step; None is all of the client's data, in stored order."""
    accumulate: Literal["sum", "mean"] = "sum"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    proximal: float = 0.0
    average: float = 0.0
    """Of the steps, how many of the last ones have their iterates averaged: Δ leads to their mean."""
    trained: str = ""
    """Shell-style patterns of the parameters that move, divided by commas; all of them where empty."""
    anchor: float = 0.0
    """How much it costs to change what the dense layers that move give for the client's inputs."""
    softened: str = ""
    """Patterns of parameters that are held, and divided by `temperature` while a lane descends."""
    temperature: float = 1.0
    """By what gradients are multiplied as well: with heads that are `softened` a lane then descends
    `τ loss(outputs / τ)`."""
    training: bool = True
    """Whether the model is in training mode; false gives the gradients of the reported losses."""

    def steps_in(self, moved: int) -> int:
        """How many steps a Δ is the sum of: those that `moved`, or one where it is their mean."""
        return moved if self.accumulate == "sum" else 1


@dataclass(frozen=True)
class Lane:
    """One trajectory at one client: what it descends and under which name its delta comes back.

    FMGDA has one lane per objective, `Lane("left", {"left": 1.0})`; FedAvg has one for a mixture.
    """

    slot: str
    mixture: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One message to one client in one phase of a round, all its lanes inside.

    Without lanes it asks for losses at `x` only. Everything in it is tensors, numbers and names, so
    that it can travel.
    """

    client: str
    round: int
    x: Tensor
    lanes: tuple[Lane, ...] = ()
    local: LocalConfig | None = None
    evaluate: tuple[str, ...] = ()
    """Objectives whose training loss at `x` is wanted, in evaluation mode."""
    held_out: bool = False
    """Whether losses and metrics on the client's own held-out data are wanted as well."""
    phase: int = 0
    payload: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What one client sends back; nothing else leaves it."""

    client: str
    deltas: Mapping[str, Tensor] = field(default_factory=dict)
    """Slot → Δ `[d]`."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Slot → gradient steps that had a labelled sample, so moved."""
    first: tuple[str, ...] = ()
    """Slots whose control variate this client keeps from now on, and had none of before."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Objective → training loss at `x`."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Objective → samples that carry a label for it."""
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Objective → metric → value on the client's own held-out data."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Refusal:
    """Something a client sent that was not let in, and why."""

    round: int
    client: str
    objective: str
    reason: str

    def __str__(self) -> str:
        where = f"round {self.round}, client `{self.client}`, objective `{self.objective}`"
        return f"{where}: {self.reason}"


class ClientRecord(NamedTuple):
    """One line per client and objective of a round. NaN where something was not measured."""

    client: str
    objective: str
    loss: float
    samples: int
    delta_norm: float
    held_out: Mapping[str, float]
    seconds: float
    """Of the client's whole work in this round, all its objectives together."""
    bytes_up: int
    """Of the client's whole reply."""
    bytes_down: int


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What happened while an engine carried out some asks."""

    clients: tuple[ClientRecord, ...] = ()
    refused: tuple[Refusal, ...] = ()
    silent: tuple[str, ...] = ()
    """Clients that were asked and did not answer."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Anything done otherwise than asked for, in words: a fallback is visible here."""


@dataclass(kw_only=True)
class Site:
    """All that a client's own computation may touch. It never leaves the client."""

    client: Client
    objectives: Mapping[str, Objective]
    model: FlatModel
    samples: Samples
    held_out: Samples | None
    state: MutableMapping[str, Tensor]
    """Stays at the client across rounds; written back when the round is committed."""
    counts: MutableMapping[str, int]
    """Labelled samples per objective, remembered once they are known."""
    seed: int
    evaluation_batch: int


class Work(Protocol):
    """How a client answers an ask. `fmol.local.local_work` is the usual one.

    An engine may recognise a work by identity and carry out many at once; one that it does not
    know it calls client by client.
    """

    def __call__(self, ask: Ask, site: Site) -> Reply: ...


class Transform(Protocol):
    """Something done to every reply on its way: the client half in order, the server half in reverse.

    Clipping, noise and compression are of this kind.
    """

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        """The reply as it leaves the client; `site.state` may keep something between rounds."""

    def server(self, reply: Reply, ask: Ask) -> Reply:
        """The reply as the server takes it in."""


class Fold(Protocol):
    """Combines replies one at a time, fed in client-id order, so that no list of them is kept."""

    def add(self, reply: Reply, ask: Ask) -> None: ...

    def result(self) -> Any: ...


class Engine(Protocol):
    """Where clients compute.

    A round may call `map` any number of times. What clients want to keep is held back until
    `commit`, so that a round that fails leaves no trace at the clients.
    """

    federation: Federation
    device: torch.device

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        """`fold.result()` over the clients' checked replies (None without a fold), and a receipt."""

    def commit(self) -> None:
        """Keeps what the clients stored since the last commit."""

    def discard(self) -> None:
        """Forgets what the clients stored since the last commit."""

    def client_state(self) -> ClientState:
        """What is stored at the clients, for a simulation's checkpoint and for `Alone`."""

    def load_client_state(self, state: ClientState) -> None:
        """Puts back what `client_state` gave."""

    def close(self) -> None:
        """Lets go of whatever the engine holds: processes, connections, memory."""
