"""Two digits in one image: what the digit problems share, whatever digits they are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol.federation import Federation
from fmol.objectives import Objective
from fmol.options import Count, Range, check_options
from fmol.partition import Indices, all_objectives, blocks, dirichlet, iid, make_clients
from fmol.rng import stream, torch_stream

__all__ = [
    "LABELS",
    "NAMES",
    "SUITED",
    "Accuracy",
    "CrossEntropy",
    "DigitOptions",
    "Digits",
    "LeNet",
    "Mlp",
    "Network",
    "Partition",
    "compose",
    "digit_federation",
    "label_sets",
]

NAMES = ("left", "right")
LABELS = 10
SUITED: Mapping[str, Any] = {"heads": ",".join(NAMES), "temperature": 4.0}
"""What both networks and their losses are to an algorithm that asks: the layers that give the outputs,
and cross-entropies, which may be softened."""

Partition = Literal["iid", "left-shards", "both-shards", "dirichlet"]
Network = Literal["mlp", "lenet"]
_Generator: TypeAlias = np.random.Generator


@dataclass(frozen=True, eq=False)
class Digits:
    """Single digits: `images` `[n, h, h]` in whole numbers up to `brightest`, and `labels` `[n]`."""

    images: Tensor
    labels: Tensor
    brightest: int


@dataclass(frozen=True, kw_only=True)
class DigitOptions:
    """Options of every problem with two digits in one image."""

    clients: Count = 10
    """M, how many clients there are."""
    samples: Count = 256
    """Pairs of digits of each client; with "dirichlet" on average."""
    partition: Partition = "iid"
    """Clients alike, few labels a client of the left digit or of both, or Dirichlet by left label."""
    labels_per_client: Annotated[int, Range(least=1, below=LABELS + 1)] = 2
    """With shards: how many labels a client has of each digit that is sharded."""
    alpha: Annotated[float, Range(least=1e-3)] = 0.5
    """With "dirichlet": how alike the clients are; 0.1 is very different, 100 nearly the same."""
    test_samples: Count = 1000
    """Pairs held out at the server, made of digits that no client has."""
    client_test_samples: Annotated[int, Range(least=0)] = 64
    """Pairs held out at each client, of such digits too but with the labels it has; 0 for none."""
    model: Network = "mlp"
    """The network: fully connected, or two convolutions; either has one linear head a digit."""
    width: Count | None = None
    """Units of the last layer before the heads; None is 64 for the mlp and 50 for the lenet."""
    seed: int = 0
    """Decides pairs, partition and initial model (and the split, where there is none by custom)."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        sharded = self.partition in ("left-shards", "both-shards")
        if not sharded or self.clients * self.labels_per_client >= LABELS:
            return []
        return [
            f"{self.clients} `clients` with {self.labels_per_client} `labels_per_client` leave "
            f"some of the {LABELS} labels to nobody: make their product at least {LABELS}."
        ]


@dataclass(frozen=True)
class CrossEntropy:
    """The loss `[B]` of one digit, 0 for left and 1 for right."""

    digit: int

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs[self.digit], targets[:, self.digit], reduction="none"
        )


@dataclass(frozen=True)
class Accuracy:
    """Whether one digit, 0 for left and 1 for right, was recognised, `[B]`."""

    digit: int

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return outputs[self.digit].argmax(1) == targets[:, self.digit]


class Mlp(nn.Module):
    """Two hidden layers and two heads, for images `[B, 1, side, side]`."""

    def __init__(self, side: int, width: int = 64) -> None:
        super().__init__()
        wide = 3 * width // 2
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(side**2, wide), nn.ReLU(), nn.Linear(wide, width), nn.ReLU()
        )
        self.left, self.right = nn.Linear(width, LABELS), nn.Linear(width, LABELS)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(images)
        return self.left(hidden), self.right(hidden)


class LeNet(nn.Module):
    """Two convolutions and two heads, as is usual for MultiMNIST, for images `[B, 1, side, side]`."""

    def __init__(self, side: int, width: int = 50) -> None:
        super().__init__()
        # Two unpadded 5×5 convolutions, each halved after, would leave nothing of a small canvas.
        kernel, padding = (5, 0) if side >= 16 else (3, 1)
        left = side
        for _ in range(2):
            left = (left + 2 * padding - kernel + 1) // 2
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 10, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(10, 20, kernel, padding=padding), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(20 * left**2, width), nn.ReLU(),
        )  # fmt: skip
        self.left, self.right = nn.Linear(width, LABELS), nn.Linear(width, LABELS)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(images)
        return self.left(hidden), self.right(hidden)


def digit_federation(options: DigitOptions, train: Digits, test: Digits, shift: int) -> Federation:
    """The federation of pairs of `train` digits, with pairs of `test` digits held out.

    At the server these have every label, at a client the mix that its own pairs have: the first
    tell what the model knows, the second what a client has of it.
    """
    first, second, parts = _deal(options, train.labels.numpy())
    x, y = compose(train, first, second, shift)
    clients = make_clients(x, y, parts, all_objectives(NAMES, options.clients))
    if options.client_test_samples:
        clients = [
            replace(client, held_out=compose(test, *_own_test(options, i, y[part], test), shift))
            for i, (client, part) in enumerate(zip(clients, parts, strict=True))
        ]
    held_out = compose(test, *_any_pairs(options, len(test.labels), "test"), shift)
    objectives = [
        Objective(name, CrossEntropy(digit), metrics={"accuracy": Accuracy(digit)})
        for digit, name in enumerate(NAMES)
    ]
    return Federation(_network(options, side=x.shape[-1]), objectives, clients, held_out)


def compose(digits: Digits, first: Indices, second: Indices, shift: int) -> tuple[Tensor, Tensor]:
    """Images `[n, 1, side, side]` of two digits in 0…1, and their labels `[n, 2]`, left and right.

    The first digit is at the upper left, the second `shift` pixels further down and to the right;
    where they overlap the brighter pixel is kept.
    """
    left, right = torch.from_numpy(first), torch.from_numpy(second)
    side = digits.images.shape[-1]
    canvas = torch.zeros(len(left), 1, side + shift, side + shift, dtype=digits.images.dtype)
    canvas[:, 0, :side, :side] = digits.images[left]
    under = canvas[:, 0, shift:, shift:]
    canvas[:, 0, shift:, shift:] = torch.maximum(under, digits.images[right])
    labels = torch.stack([digits.labels[left], digits.labels[right]], dim=1)
    return canvas.float() / digits.brightest, labels


def label_sets(clients: int, labels_per_client: int, generator: _Generator) -> list[Indices]:
    """For each client its labels, all different; each label has as many holders as any, or one more.

    >>> sets = label_sets(5, 2, np.random.default_rng(0))
    >>> sorted(int(label) for labels in sets for label in labels)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    holders = np.zeros(LABELS, dtype=np.int64)
    sets = []
    for _ in range(clients):
        # The labels with the fewest holders, chance deciding between equals.
        chosen = np.lexsort((generator.random(LABELS), holders))[:labels_per_client]
        holders[chosen] += 1
        sets.append(np.sort(chosen).astype(np.int64, copy=False))
    return sets


def _deal(
    options: DigitOptions, labels: npt.NDArray[np.int64]
) -> tuple[Indices, Indices, list[Indices]]:
    """The left and the right digit of every training pair `[n]`, and each client's pairs."""
    clients, samples, seed = options.clients, options.samples, options.seed
    if options.partition in ("iid", "dirichlet"):
        first, second = _any_pairs(options, len(labels), "train")
        if options.partition == "iid":
            return first, second, iid(len(first), clients, seed)
        return first, second, dirichlet(labels[first], clients, options.alpha, seed)
    # Pairs dealt out by their labels cannot keep to few labels of both digits and leave nothing
    # over. So here labels are chosen first, and each client's pairs are made of digits with them.
    sharded = NAMES if options.partition == "both-shards" else NAMES[:1]
    columns = []
    for name in NAMES:
        everything = np.arange(LABELS, dtype=np.int64)
        sets = [everything] * clients
        if name in sharded:
            generator = stream(seed, "problem", "labels", name)
            sets = label_sets(clients, options.labels_per_client, generator)
        drawn = []
        for client, held in enumerate(sets):
            generator = stream(seed, "problem", "pairs", name, client)
            # Every label as often as any other, or once more.
            wanted = np.resize(generator.permutation(held), samples)
            wanted = generator.permutation(wanted)
            drawn.append(_digits_with(wanted, labels, generator))
        columns.append(np.concatenate(drawn))
    first, second = columns
    return first, second, blocks(clients * samples, clients)


def _any_pairs(options: DigitOptions, digits: int, purpose: str) -> tuple[Indices, Indices]:
    """Left and right digits, each drawn from all of them with replacement."""
    count = options.test_samples if purpose == "test" else options.clients * options.samples
    generator = stream(options.seed, "problem", "pairs", purpose)
    first, second = generator.integers(digits, size=(2, count))
    return first, second


def _own_test(
    options: DigitOptions, client: int, labels: Tensor, test: Digits
) -> tuple[Indices, Indices]:
    """Left and right test digits for one client, with labels `[n, 2]` drawn from its own."""
    generator = stream(options.seed, "problem", "pairs", "own test", client)
    drawn = labels.numpy()[generator.integers(len(labels), size=options.client_test_samples)]
    known = test.labels.numpy()
    first, second = (_digits_with(drawn[:, digit], known, generator) for digit in (0, 1))
    return first, second


def _digits_with(
    wanted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], generator: _Generator
) -> Indices:
    """For each label in `wanted` a random digit that has it."""
    counts = np.bincount(labels, minlength=LABELS)
    order = np.argsort(labels, kind="stable")
    begins = np.cumsum(counts) - counts
    return np.asarray(order[begins[wanted] + generator.integers(counts[wanted])], dtype=np.int64)


def _network(options: DigitOptions, side: int) -> nn.Module:
    kind: Any = {"mlp": Mlp, "lenet": LeNet}[options.model]
    with torch_stream(torch.device("cpu"), options.seed, "problem", "model"):
        network: nn.Module = kind(side) if options.width is None else kind(side, options.width)
    return network
