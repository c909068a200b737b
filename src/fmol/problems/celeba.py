"""CelebA: forty attributes of a face, each an objective, from local files or torchvision's download.

The photographs show real people and are for non-commercial research only: they are read where they
lie, and nothing of them is kept.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fmol.federation import Federation
from fmol.objectives import Objective, whole_set
from fmol.options import Count, Range, check_options
from fmol.partition import Indices, all_objectives, dirichlet, iid, label_shards, make_clients
from fmol.problems.faces import ATTRIBUTES, FULL, PEOPLE, SMALL, TABLE, Faces, find_faces
from fmol.problems.loading import DataSet
from fmol.problems.tables import AreaUnderCurve, BinaryAccuracy, BinaryCrossEntropy
from fmol.rng import stream, torch_stream

__all__ = ["AttributeNet", "CelebA", "ResNet18"]


@dataclass(frozen=True, kw_only=True)
class CelebA:
    """Attributes of faces, each a binary objective, on one ResNet-18.

    The whole picture is scaled to a square: cut to one it would lose hats, necklaces and neckties.
    Where images of the official validation and test parts are at hand, the held-out ones are drawn
    from these and the clients' from the training part, and nobody is on both sides. With the first
    10 000 images alone, all of the training part, an image is held out or a client's, never both; who
    is on them is not known, so that one person may be on several.

    The paper does not say what its non-i.i.d. clients are. "shards" is its rule for digits, at most
    two labels a client, with the combinations of a few attributes as labels; "identities" is how
    others divide CelebA, by who is on the image.
    """

    clients: Count = 10
    """M, how many clients there are."""
    samples: Count = 256
    """Images of each client; with "dirichlet" on average."""
    attributes: tuple[str, ...] = ()
    """The attributes to learn, by name, in the order of the objectives; none named is all 40."""
    partition: Literal["iid", "shards", "dirichlet", "identities"] = "iid"
    """Clients alike, few kinds of image a client, Dirichlet by kind, or people of its own each."""
    kinds: tuple[str, ...] = ("Male", "Young", "Smiling")
    """With "shards" and "dirichlet": attributes whose combinations are the kinds of image."""
    kinds_per_client: Count = 2
    """With "shards": how many kinds of image a client has at most."""
    alpha: Annotated[float, Range(least=1e-3)] = 0.5
    """With "dirichlet": how alike the clients are; 0.1 is very different, 100 nearly the same."""
    test_samples: Count = 1000
    """Images held out at the server, none of them a client's."""
    image_size: Annotated[int, Range(least=16)] = 64
    """Height and width to which images are scaled, in pixels."""
    width: Count = 64
    """Channels of the trunk's first stage, doubled in each of the next three; 64 is ResNet-18."""
    seed: int = 0
    """Decides which images are used, the partition and the initial model."""

    recommended: ClassVar[Mapping[str, Any]] = {
        "rounds": 20,
        "local_steps": 10,
        "batch_size": 32,
        "local_lr": 0.1,
        "server_lr": 0.1,
    }
    """What to train it with, where nothing else is said."""
    data_sets: ClassVar[tuple[DataSet, ...]] = (
        DataSet("celeba_10k", SMALL, "torchvision.datasets.CelebA"),
        DataSet("celeba", FULL, "torchvision.datasets.CelebA"),
    )
    """What is read: the first that is found."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        problems = []
        for option in ("attributes", "kinds"):
            names = getattr(self, option)
            unknown = [name for name in names if name not in ATTRIBUTES]
            if unknown:
                problems.append(
                    f"`{option}` must be attributes of CelebA, got {', '.join(unknown)}. "
                    f"It has {', '.join(ATTRIBUTES)}."
                )
            elif len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                problems.append(f"`{option}` must name each attribute once, got {twice} twice.")
        by_kind = self.partition in ("shards", "dirichlet")
        if by_kind and not self.kinds:
            problems.append(f'`kinds` must name an attribute with `partition` "{self.partition}".')
        kinds = 2 ** len(self.kinds)
        if self.partition == "shards" and self.clients * self.kinds_per_client < kinds:
            problems.append(
                f"{self.clients} `clients` with {self.kinds_per_client} `kinds_per_client` leave some "
                f"of the {kinds} combinations of {len(self.kinds)} `kinds` to nobody: make their "
                f"product at least {kinds}."
            )
        return problems

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives' names: the attributes asked for, in the order of the model's outputs."""
        return self.attributes or ATTRIBUTES

    def build(self, data_dir: str | os.PathLike[str] | None = None) -> Federation:
        """The federation, of the files in `data_dir` or where `FMOL_DATA` says, else downloaded."""
        faces = find_faces(data_dir)
        pool, test = _split(self, faces)
        parts = _deal(self, faces, pool)
        columns = [ATTRIBUTES.index(name) for name in self.names]
        # Only what is used is decoded.
        used = np.concatenate(parts)
        train_images, test_images = faces.images([used, test], self.image_size)
        targets = torch.from_numpy(faces.attributes[:, columns].astype(np.float32))
        ends = np.cumsum([len(part) for part in parts])[:-1]
        places = np.split(np.arange(len(used), dtype=np.int64), ends)
        with torch_stream(torch.device("cpu"), self.seed, "problem", "model"):
            model = AttributeNet(self.names, self.width)
        return Federation(
            model=model,
            objectives=[
                Objective(
                    name,
                    BinaryCrossEntropy(s),
                    {"accuracy": BinaryAccuracy(s), "auc": whole_set(AreaUnderCurve(s))},
                )
                for s, name in enumerate(self.names)
            ],
            clients=make_clients(
                train_images, targets[used], places, all_objectives(self.names, self.clients)
            ),
            held_out=(test_images, targets[test]),
        )


# ---- model -----------------------------------------------------------------------------------


class AttributeNet(nn.Module):
    """A `ResNet18` trunk and one linear head per attribute: logits `[B, S]` of images of bytes.

    Images are `[B, 3, h, w]` with values from 0 to 255, of any dtype: as bytes they take a quarter
    of the memory, and become numbers from −1 to 1 only here. The parameters of a head are its own,
    `heads.Bald.weight` and `heads.Bald.bias`; those of all others match `trunk.*`.

    >>> net = AttributeNet(["Bald", "Young"], width=4)
    >>> tuple(net(torch.zeros(3, 3, 64, 64, dtype=torch.uint8)).shape)
    (3, 2)
    """

    def __init__(self, names: Sequence[str], width: int = 64) -> None:
        super().__init__()
        self.trunk = ResNet18(width)
        self.heads = nn.ModuleDict({name: nn.Linear(8 * width, 1) for name in names})

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.trunk(images.to(self.trunk.stem.weight.dtype) / 127.5 - 1)
        # One product for all heads rather than a small one each.
        heads: list[Any] = list(self.heads.values())
        weight = torch.cat([head.weight for head in heads])
        bias = torch.cat([head.bias for head in heads])
        return functional.linear(hidden, weight, bias)


class ResNet18(nn.Module):
    """Features `[B, 8 width]` of images `[B, 3, h, w]`: He et al.'s ResNet-18 without its last layer.

    As there: a 7×7 convolution and a pooling, each halving the image, and four stages of two blocks,
    each stage but the first halving it again. Normalised over groups of channels, since running
    statistics of batches would mix the clients' data; the number of parameters is the same.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = _group_norm(width)
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width * 2**stage
            blocks += [Block(before, after, stride=1 if stage == 0 else 2), Block(after, after)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.stem(images)))
        hidden = self.blocks(functional.max_pool2d(hidden, 3, stride=2, padding=1))
        features: Tensor = hidden.mean(dim=(2, 3))
        return features


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _group_norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = _group_norm(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), _group_norm(after)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(inputs)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))


def _group_norm(channels: int) -> nn.GroupNorm:
    """Over 32 groups, as usual; over fewer in a narrow network, so that two channels share a group."""
    fitting = (g for g in range(32, 0, -1) if channels % g == 0 and 2 * g <= channels)
    return nn.GroupNorm(next(fitting, 1), channels)


# ---- which images ----------------------------------------------------------------------------


def _split(options: CelebA, faces: Faces) -> tuple[Indices, Indices]:
    """The images that clients may have, in random order, and the held-out ones; nobody has both."""
    wanted, test = options.clients * options.samples, options.test_samples
    generator = stream(options.seed, "problem", "split")
    official = faces.part > 0
    if official.any():
        pool, rest = (generator.permutation(np.flatnonzero(m)) for m in (~official, official))
    else:
        order = generator.permutation(len(faces.files))
        # From either end, so that neither number decides which images the other side gets.
        pool, rest = order[:-test], order[-test:]
    if len(pool) < wanted or len(rest) < test:
        raise ValueError(
            f"{options.clients} `clients` with {options.samples} `samples` each and {test} "
            f"`test_samples` need {wanted} images to train and {test} to test, but of "
            f"{len(faces.files)} there are {len(pool)} and {len(rest)} for it. Ask for fewer."
        )
    return pool, np.sort(rest[:test])


def _deal(options: CelebA, faces: Faces, pool: Indices) -> list[Indices]:
    """Each client's images."""
    clients, seed = options.clients, options.seed
    if options.partition == "identities":
        return _by_person(options, faces, pool)
    # The same images, whatever the partition.
    drawn = np.sort(pool[: clients * options.samples])
    if options.partition == "iid":
        return [drawn[part] for part in iid(len(drawn), clients, seed)]
    columns = [ATTRIBUTES.index(name) for name in options.kinds]
    kinds = faces.attributes[drawn][:, columns] @ (1 << np.arange(len(columns)))
    parts = (
        label_shards(kinds, clients, options.kinds_per_client, seed)
        if options.partition == "shards"
        else dirichlet(kinds, clients, options.alpha, seed)
    )
    return [drawn[part] for part in parts]


def _by_person(options: CelebA, faces: Faces, pool: Indices) -> list[Indices]:
    """All images of one person after the other, until a client has enough; nobody is at two clients."""
    if faces.people is None:
        raise ValueError(
            f'`partition` "identities" needs the file {PEOPLE}, which is not beside {TABLE}. Fetch '
            "it, or choose another partition."
        )
    values, who = np.unique(faces.people[pool], return_inverse=True)
    rank = stream(options.seed, "partition", "identities").permutation(len(values))
    # Stable, so that a person's images keep the pool's random order.
    queue = pool[np.argsort(rank[who.reshape(-1)], kind="stable")]
    parts: list[Indices] = []
    start = 0
    while len(parts) < options.clients:
        stop = start + options.samples
        if stop > len(queue):
            raise ValueError(
                f"there are people for {len(parts)} clients with {options.samples} images each, not "
                f"for {options.clients}. Ask for fewer `clients` or `samples`."
            )
        parts.append(np.sort(queue[start:stop]))
        # Who is left over from this client is nobody's.
        start = stop
        while start < len(queue) and faces.people[queue[start]] == faces.people[queue[stop - 1]]:
            start += 1
    return parts
