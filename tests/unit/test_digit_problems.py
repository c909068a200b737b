"""MultiDigits and MultiMNIST: composition, partitions, no leakage, errors."""

from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fmol import FSMGDA, Federation, fit
from fmol.problems import multidigits
from fmol.problems.digits import (
    Accuracy,
    CrossEntropy,
    DigitOptions,
    Digits,
    LeNet,
    Mlp,
    Partition,
    compose,
    label_sets,
)
from fmol.problems.loading import DATA_VARIABLE
from fmol.problems.multidigits import MultiDigits, bundled_digits
from fmol.problems.multimnist import FILES, MultiMNIST, mnist_digits
from support import flat

DATA = Path(__file__).parents[3] / "shared" / "data"
SHARDS: tuple[Partition, ...] = ("left-shards", "both-shards")


def labels_by_client(federation: Federation) -> list[tuple[list[int], list[int]]]:
    """For each client the left and the right labels that occur."""
    targets = [federation.client(id).data[1] for id in federation.population.ids()]
    return [(y[:, 0].unique().tolist(), y[:, 1].unique().tolist()) for y in targets]


def sizes(federation: Federation) -> list[int]:
    return [len(federation.client(id).data[1]) for id in federation.population.ids()]


def client_pairs(federation: Federation) -> tuple[Tensor, Tensor]:
    """All clients' images and labels."""
    pairs = [federation.client(id).data for id in federation.population.ids()]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def visible(images: Tensor, side: int, shift: int) -> tuple[set[bytes], set[bytes]]:
    """What of the left and of the right digit no other digit can cover, for every image."""
    alone = torch.ones(side, side, dtype=torch.bool)
    alone[shift:, shift:] = False
    left = images[:, 0, :side, :side][:, alone]
    right = images[:, 0, shift:, shift:][:, alone.flip(0, 1)]
    return {row.numpy().tobytes() for row in left}, {row.numpy().tobytes() for row in right}


def visible_digits(digits: Digits, shift: int) -> tuple[set[bytes], set[bytes]]:
    """The same of single digits, as if each stood on the left and on the right."""
    images = digits.images.float()[:, None] / digits.brightest
    side = images.shape[-1]
    canvas = torch.zeros(2, len(images), 1, side + shift, side + shift)
    canvas[0, :, :, :side, :side] = images
    canvas[1, :, :, shift:, shift:] = images
    return visible(canvas[0], side, shift)[0], visible(canvas[1], side, shift)[1]


def test_the_brighter_pixel_is_kept_where_digits_overlap() -> None:
    digits = Digits(torch.tensor([[[4, 8], [2, 6]], [[3, 1], [5, 7]]]), torch.tensor([9, 2]), 8)
    images, labels = compose(digits, np.array([0, 1, 0]), np.array([1, 0, 0]), shift=1)
    assert labels.tolist() == [[9, 2], [2, 9], [9, 9]]
    assert (8 * images[:, 0]).tolist() == [
        [[4, 8, 0], [2, 6, 1], [0, 5, 7]],
        [[3, 1, 0], [5, 7, 8], [0, 2, 6]],
        [[4, 8, 0], [2, 6, 8], [0, 2, 6]],
    ]


def test_digits_stand_at_the_two_corners_of_the_canvas() -> None:
    train, _ = bundled_digits()
    images, labels = compose(train, np.array([5]), np.array([11]), multidigits.SHIFT)
    first, second = (train.images[i].float() / 16 for i in (5, 11))
    assert tuple(images.shape) == (1, 1, 12, 12)
    assert images.dtype == torch.float32
    assert torch.equal(images[0, 0, :4, :8], first[:4])
    assert torch.equal(images[0, 0, 8:, 4:], second[4:])
    assert torch.equal(images[0, 0, 4:8, 4:8], torch.maximum(first[4:, 4:], second[:4, :4]))
    assert float(images[0, 0, :4, 8:].sum() + images[0, 0, 8:, :4].sum()) == 0
    assert labels.tolist() == [[int(train.labels[5]), int(train.labels[11])]]


def test_the_bundled_digits_are_split_without_overlap() -> None:
    train, test = bundled_digits(seed=3)
    seen, unseen = ({image.numpy().tobytes() for image in d.images} for d in (train, test))
    assert (len(seen), len(unseen)) == (1400, 397)
    assert not seen & unseen


@pytest.mark.parametrize("partition", ["iid", "left-shards", "both-shards", "dirichlet"])
def test_no_digit_held_out_is_in_a_clients_pair(partition: Any) -> None:
    federation = MultiDigits(partition=partition, samples=60, test_samples=300, seed=1).build()
    trained = visible(client_pairs(federation)[0], 8, 4)
    tested = visible(federation.held_out[0], 8, 4)
    train, test = bundled_digits(seed=1)
    for side in range(2):
        assert trained[side] <= visible_digits(train, 4)[side]
        assert tested[side] <= visible_digits(test, 4)[side]
        assert not trained[side] & tested[side]


@pytest.mark.parametrize("clients", [5, 7, 10, 23])
@pytest.mark.parametrize("partition", SHARDS)
def test_shards_keep_to_the_labels_allowed_and_the_samples_asked_for(
    partition: Any, clients: int
) -> None:
    federation = MultiDigits(partition=partition, clients=clients, samples=80).build()
    held = labels_by_client(federation)
    assert sizes(federation) == [80] * clients
    assert all(len(left) == 2 for left, _ in held)
    assert all(len(right) == (10 if partition == "left-shards" else 2) for _, right in held)
    for side in range(2):
        assert {label for labels in held for label in labels[side]} == set(range(10))


def test_left_and_right_labels_are_sharded_independently() -> None:
    held = labels_by_client(MultiDigits(partition="both-shards").build())
    assert [left for left, _ in held] != [right for _, right in held]


def test_labels_within_a_shard_are_balanced_and_paired_at_random() -> None:
    federation = MultiDigits(partition="both-shards", samples=200).build()
    for id in federation.population.ids():
        _, counts = federation.client(id).data[1].unique(dim=0, return_counts=True)
        assert len(counts) == 4
        assert int(counts.min()) > 25


def test_label_sets_are_as_even_as_they_can_be() -> None:
    for clients, number in [(7, 3), (10, 2), (1, 10), (13, 7), (4, 3)]:
        sets = label_sets(clients, number, np.random.default_rng(clients))
        holders = np.bincount(np.concatenate(sets), minlength=10)
        assert all(len(set(labels.tolist())) == number for labels in sets)
        assert holders.max() - holders.min() <= 1


def test_iid_clients_have_all_labels_and_equal_sizes() -> None:
    federation = MultiDigits(clients=6, samples=150).build()
    assert sizes(federation) == [150] * 6
    assert all(len(left) == len(right) == 10 for left, right in labels_by_client(federation))


def test_dirichlet_clients_differ_and_share_all_pairs() -> None:
    federation = MultiDigits(partition="dirichlet", alpha=0.2, samples=100).build()
    assert sum(sizes(federation)) == 1000
    assert len(set(sizes(federation))) > 5
    assert any(len(left) < 10 for left, _ in labels_by_client(federation))


def test_labels_belong_to_their_images() -> None:
    train, _ = bundled_digits(seed=0)
    for partition in SHARDS:
        images, labels = client_pairs(MultiDigits(partition=partition, samples=30).build())
        corner = (train.images.float() / 16)[:, :4, :].flatten(1)
        for image, label in zip(images, labels, strict=True):
            # The upper half of the left digit is nobody else's.
            hits = (corner == image[0, :4, :8].flatten()).all(1)
            assert int(label[0]) in train.labels[hits].tolist()


@pytest.mark.parametrize("partition", ["iid", "left-shards", "both-shards", "dirichlet"])
def test_the_seed_decides_everything_and_no_global_generator_is_touched(partition: Any) -> None:
    before, before_numpy = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first, same, other = (
        MultiDigits(partition=partition, samples=20, test_samples=50, seed=seed).build()
        for seed in (1, 1, 2)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert before_numpy == str(np.random.get_state())  # noqa: NPY002
    for get in (
        lambda f: f.client("client-3").data[0],
        lambda f: f.held_out[0],
        lambda f: flat(f.model),
    ):
        assert torch.equal(get(first), get(same))
        assert not torch.equal(get(first), get(other)[: len(get(first))])


def test_three_rounds_lower_both_losses() -> None:
    federation = MultiDigits(clients=5, samples=100, test_samples=100).build()
    algorithm = FSMGDA(local_steps=10, batch_size=25, local_lr=0.2, server_lr=0.2)
    result = fit(federation, algorithm, rounds=3)
    assert bool((result.losses[-1] < result.losses[0]).all())
    assert set(result.final.held_out) == {"left", "right"}
    assert 0 <= result.final.held_out["left"]["accuracy"] <= 1


def test_objectives_are_the_losses_and_accuracies_of_their_own_digits() -> None:
    for digit, objective in enumerate(MultiDigits(clients=1, samples=5).build().objectives):
        assert objective.name == ("left", "right")[digit]
        assert objective.loss == CrossEntropy(digit)
        assert objective.metrics == {"accuracy": Accuracy(digit)}
    outputs = (torch.eye(10)[[3, 4]], torch.eye(10)[[5, 6]])
    targets = torch.tensor([[3, 9], [0, 6]])
    assert Accuracy(0)(outputs, targets).tolist() == [True, False]
    assert Accuracy(1)(outputs, targets).tolist() == [False, True]
    hit, missed = CrossEntropy(0)(outputs, targets).tolist()
    assert missed - hit == pytest.approx(1)


@pytest.mark.parametrize("side", [12, 36])
@pytest.mark.parametrize("network", [Mlp, LeNet])
@pytest.mark.parametrize("width", [None, 7])
def test_networks_answer_with_ten_scores_a_digit(network: Any, side: int, width: Any) -> None:
    model = network(side) if width is None else network(side, width)
    left, right = model(torch.zeros(3, 1, side, side))
    assert tuple(left.shape) == tuple(right.shape) == (3, 10)
    assert model.left.in_features == (width or (64 if network is Mlp else 50))


def test_the_lenet_of_multimnist_is_the_usual_one() -> None:
    shapes = [tuple(p.shape) for p in LeNet(36).parameters()]
    assert shapes[:6] == [(10, 1, 5, 5), (10,), (20, 10, 5, 5), (20,), (50, 720), (50,)]
    assert MultiMNIST().model == "lenet"
    assert type(MultiDigits(model="lenet", samples=2).build().model) is LeNet


@pytest.mark.parametrize("kind", [MultiDigits, MultiMNIST])
def test_all_wrong_options_are_said_at_once(kind: type[DigitOptions]) -> None:
    wrong: dict[str, Any] = {
        "clients": 0, "samples": 1.5, "partition": "shards", "labels_per_client": 11, "alpha": 0,
        "test_samples": True, "model": "resnet", "width": -3, "seed": "one",
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{kind.__name__}: ") as caught:
        kind(**wrong)
    for name, value in wrong.items():
        assert f"`{name}` must be" in str(caught.value)
        assert f"got {value!r}." in str(caught.value)


def test_shards_that_leave_labels_to_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match="4 `clients` with 2 `labels_per_client` leave some"):
        MultiDigits(partition="left-shards", clients=4)
    MultiDigits(partition="iid", clients=4)


def test_without_scikit_learn_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[digits\]"'):
        MultiDigits().build()


@pytest.mark.skipif(not (DATA / "mnist").is_dir(), reason="no MNIST files at ../shared/data/mnist")
def test_multimnist_is_made_of_the_files() -> None:
    federation = MultiMNIST(samples=20, test_samples=50, partition="both-shards").build(DATA)
    images, _ = client_pairs(federation)
    assert sizes(federation) == [20] * 10
    assert tuple(images.shape) == (200, 1, 36, 36)
    assert float(images.max()) == 1
    assert all(len(left) == len(right) == 2 for left, right in labels_by_client(federation))
    train, test = mnist_digits(DATA / "mnist")
    assert tuple(train.images.shape) == (60_000, 28, 28)
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    tested = visible(federation.held_out[0], 28, 8)
    for side in range(2):
        assert tested[side] <= visible_digits(test, 8)[side]
        assert not tested[side] & visible(images, 28, 8)[side]


def idx(values: np.ndarray[Any, Any]) -> bytes:
    """An idx file of bytes, compressed."""
    sizes = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes())


def write_small_mnist(folder: Path) -> None:
    folder.mkdir()
    for file in FILES:
        labels = np.arange(30) % 10
        images = np.broadcast_to(labels[:, None, None] + 100 * ("t10k" in file), (30, 28, 28))
        (folder / file).write_bytes(idx(images if "images" in file else labels))


def test_multimnist_reads_idx_files_and_keeps_the_test_files_apart(tmp_path: Path) -> None:
    write_small_mnist(tmp_path / "mnist")
    federation = MultiMNIST(samples=7, clients=10, partition="left-shards").build(tmp_path)
    images, labels = client_pairs(federation)
    assert torch.allclose(255 * images[:, 0, 0, 0], labels[:, 0].float())
    assert torch.allclose(255 * images[:, 0, -1, -1], labels[:, 1].float())
    tested = federation.held_out
    assert torch.allclose(255 * tested[0][:, 0, 0, 0], 100.0 + tested[1][:, 0])


@pytest.mark.parametrize("damage", ["cut", "flipped", "not idx", "empty"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    write_small_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / FILES[2]
    whole = path.read_bytes()
    flipped = whole[:40] + bytes([whole[40] ^ 255]) + whole[41:]
    content = {
        "cut": whole[:-20], "flipped": flipped, "not idx": gzip.compress(b"text"), "empty": b"",
    }  # fmt: skip
    path.write_bytes(content[damage])
    with pytest.raises(ValueError, match=f"{FILES[2]}` is not a whole idx file"):
        mnist_digits(tmp_path)


def test_without_files_and_torchvision_one_sentence_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    for data_dir in (None, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"`mnist`.*`data_dir`.*pip install torchvision"
        ):
            MultiMNIST().build(data_dir)


def pretend_torchvision(monkeypatch: pytest.MonkeyPatch, mnist: Any) -> None:
    datasets = types.ModuleType("torchvision.datasets")
    datasets.MNIST = mnist  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


def test_without_files_torchvision_downloads_into_the_folder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def mnist(root: Path, train: bool, download: bool) -> types.SimpleNamespace:
        asked.append((root, train, download))
        shape = (20 if train else 10, 28, 28)
        images = torch.full(shape, 255 if train else 51, dtype=torch.uint8)
        return types.SimpleNamespace(data=images, targets=torch.arange(shape[0]) % 10)

    pretend_torchvision(monkeypatch, mnist)
    federation = MultiMNIST(samples=3, test_samples=4).build(tmp_path)
    assert asked == [(tmp_path, True, True), (tmp_path, False, True)]
    assert float(client_pairs(federation)[0].max()) == 1
    assert float(federation.held_out[0].max()) == pytest.approx(0.2)


def test_a_download_that_fails_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mnist(root: Path, train: bool, download: bool) -> None:
        raise RuntimeError("no route to host")

    pretend_torchvision(monkeypatch, mnist)
    with pytest.raises(FileNotFoundError, match=r"torchvision can download it \(no route to host"):
        MultiMNIST().build(tmp_path)
