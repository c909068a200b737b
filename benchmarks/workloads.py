"""What the engines are timed on: models, losses and made-up data of the shapes of real problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fmol import FSMGDA, Client, Federation, Objective
from fmol.problems.celeba import AttributeNet
from fmol.problems.digits import CrossEntropy, LeNet
from fmol.problems.tables import BinaryCrossEntropy

CPU, GPU, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")


@dataclass(frozen=True)
class Workload:
    """One round's work: clients `M`, objectives `S`, local steps `K` and samples per step."""

    name: str
    kind: str
    """The model, as rivals written in another language know it."""
    clients: int
    objectives: int
    steps: int
    batch: int
    make: Callable[[int, int], Federation]
    """The federation of M clients with S objectives."""
    devices: tuple[str, ...] = BOTH
    """Where it is timed unless it is asked for by name."""
    local_lr: float = 1e-3
    """Small, so that rounding does not grow from step to step and results can be compared."""

    @property
    def lanes(self) -> int:
        return self.clients * self.objectives

    def federation(self) -> Federation:
        torch.manual_seed(0)
        return self.make(self.clients, self.objectives)

    def algorithm(self) -> FSMGDA:
        return FSMGDA(
            local_steps=self.steps, batch_size=self.batch, local_lr=self.local_lr, server_lr=0.1
        )

    def flops(self, federation: Federation) -> int:
        """Of a round's local steps: one step of one lane, counted, times lanes and steps."""
        with FlopCounterMode(display=False) as counter:
            self._take_a_step(federation)
        return counter.get_total_flops() * self.lanes * self.steps

    def bytes(self, federation: Federation) -> int:
        """The same of what each operation by itself reads and writes: fused ones move less."""
        with ByteCounter() as counter:
            self._take_a_step(federation)
        return counter.total * self.lanes * self.steps

    def _take_a_step(self, federation: Federation) -> None:
        client = federation.client(federation.population.ids()[0])
        inputs, targets = (part[: self.batch] for part in client.data)
        federation.objectives[0].loss(federation.model(inputs), targets).mean().backward()
        federation.model.zero_grad()


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of every operation's tensors, in and out; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        before, after = _storages((args, kwargs)), _storages(found)
        if not (after.keys() <= before.keys() and not func._schema.is_mutable):
            self.total += sum(before.values()) + sum(after.values())
        return found


def _storages(nest: Any) -> dict[int, int]:
    """Where the tensors of a nest lie, and how many bytes each looks at."""
    leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    return {
        leaf.untyped_storage().data_ptr(): leaf.numel() * leaf.element_size() for leaf in leaves
    }


def workloads() -> list[Workload]:
    found = []
    for clients in (10, 100):
        for batch in (16, 64, 256):
            slow = clients == 100 and batch > 16  # Minutes a round on a few CPU cores.
            name = f"lenet-{clients}-{batch}"
            devices = GPU if slow else BOTH
            found.append(Workload(name, "lenet", clients, 2, 10, batch, digits, devices))
    for batch in (16, 256):
        found.append(Workload(f"mlp-{batch}", "mlp", 10, 8, 30, batch, rivers))
    resnet = Workload("resnet", "resnet", 10, 40, 10, 32, faces(64, 64), GPU, local_lr=1e-4)
    narrow = Workload("narrow-resnet", "resnet", 4, 4, 5, 16, faces(8, 64), CPU, local_lr=1e-4)
    return [*found, resnet, narrow, Workload("transformer", "transformer", 10, 4, 10, 32, texts)]


# ---- federations -----------------------------------------------------------------------------


def federate(
    model: nn.Module,
    losses: list[Callable[..., Tensor]],
    clients: int,
    draw: Callable[[], tuple[Tensor, Tensor]],
) -> Federation:
    """Every client holds every objective, on samples of its own that `draw` makes up."""
    names = [f"s{s:03d}" for s in range(len(losses))]
    return Federation(
        model,
        [Objective(name, loss) for name, loss in zip(names, losses, strict=True)],
        [Client(f"c{i:05d}", draw(), tuple(names)) for i in range(clients)],
    )


def digits(clients: int, objectives: int) -> Federation:
    """LeNet on images of two digits, 36×36, 256 of them a client."""
    return federate(
        LeNet(side=36),
        [CrossEntropy(digit) for digit in range(objectives)],
        clients,
        lambda: (torch.randn(256, 1, 36, 36), torch.randint(10, (256, objectives))),
    )


@dataclass(frozen=True)
class SquaredError:
    """The loss `[B]` of one column."""

    column: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, self.column] - targets[:, self.column]) ** 2


def perceptron(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(),
        nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def rivers(clients: int, objectives: int, width: int = 64, samples: int = 512) -> Federation:
    """The River Flow MLP, 64-64-64-S."""
    return federate(
        perceptron(64, width, objectives),
        [SquaredError(s) for s in range(objectives)],
        clients,
        lambda: (torch.randn(samples, 64), torch.randn(samples, objectives)),
    )


def faces(width: int, side: int) -> Callable[[int, int], Federation]:
    """ResNet-18 (at `width` 64) on images of bytes with yes-or-no attributes."""

    def make(clients: int, objectives: int) -> Federation:
        return federate(
            AttributeNet([f"a{s}" for s in range(objectives)], width),
            [BinaryCrossEntropy(s) for s in range(objectives)],
            clients,
            lambda: (
                torch.randint(256, (128, 3, side, side), dtype=torch.uint8),
                torch.randint(2, (128, objectives)).float(),
            ),
        )

    return make


VOCABULARY, TOKENS, WIDTH, HEADS, CLASSES = 1000, 32, 64, 4, 5


class EncoderLayer(nn.Module):
    """Attention written out, and a feed-forward part; norms before each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, t, 3, HEADS, d // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(d // HEADS), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Logits `[B, S, classes]` of token sequences `[B, 32]`."""

    def __init__(self, objectives: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.layers = nn.Sequential(EncoderLayer(), EncoderLayer())
        self.head = nn.Linear(WIDTH, objectives * CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(tokens) + self.places).mean(1)
        return self.head(hidden).unflatten(-1, (-1, CLASSES))


@dataclass(frozen=True)
class ClassOf:
    """The loss `[B]` of one of a sample's labels."""

    label: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs[:, self.label], targets[:, self.label], reduction="none"
        )


def texts(clients: int, objectives: int) -> Federation:
    """A small transformer on sequences of 32 tokens."""
    return federate(
        Classifier(objectives),
        [ClassOf(s) for s in range(objectives)],
        clients,
        lambda: (
            torch.randint(VOCABULARY, (256, TOKENS)),
            torch.randint(CLASSES, (256, objectives)),
        ),
    )
