"""CelebA: which images, partitions, no leakage, the network, files and errors."""

from __future__ import annotations

import io
import lzma
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fmol import FSMGDA, Federation, fit
from fmol.problems.celeba import AttributeNet, CelebA, ResNet18
from fmol.problems.faces import ATTRIBUTES
from fmol.problems.loading import DATA_VARIABLE
from support import flat

DATA = Path(__file__).parents[3] / "shared" / "data"
COUNT = 240
KINDS = ("Male", "Young", "Smiling")


# ---- images made up ---------------------------------------------------------------------------
# Image i is one colour throughout, which has i as three digits to the base seven, 36 apart, so that
# JPEG cannot blur them: what a federation holds can be read off its images.


def jpeg(i: int, size: tuple[int, int] = (9, 11)) -> bytes:
    file = io.BytesIO()
    colour = (18 + 36 * (i // 49), 18 + 36 * (i // 7 % 7), 18 + 36 * (i % 7))
    Image.new("RGB", size, colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def file_name(i: int) -> str:
    return f"{i + 1:06d}.jpg"


def made_up_attributes(count: int = COUNT) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).integers(0, 2, size=(count, len(ATTRIBUTES)))


def table(values: np.ndarray[Any, Any], names: tuple[str, ...] = ATTRIBUTES) -> str:
    rows = [
        f"{file_name(i)} " + " ".join(f"{2 * v - 1:2d}" for v in r) for i, r in enumerate(values)
    ]
    return "\n".join([str(len(values)), " ".join(names), *rows]) + "\n"


def write_small(root: Path, *, images: int = COUNT, rows: int = COUNT) -> Path:
    """The layout with a zip file; `rows` beyond `images` are of images that are not there."""
    folder = root / "celeba_10k"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "img_align_celeba_half_10k.zip", "w") as archive:
        for i in range(images):
            archive.writestr(f"img_align_celeba_half/{file_name(i)}", jpeg(i))
    parts = "".join(f"{file_name(i)} {int(i >= COUNT)}\n" for i in range(rows))
    for name, text in (
        ("list_attr_celeba.txt.xz", table(made_up_attributes(rows))),
        ("list_eval_partition.txt.xz", parts),
    ):
        (folder / name).write_bytes(lzma.compress(text.encode()))
    return folder


def write_full(root: Path) -> Path:
    """torchvision's layout: images 160 to 199 are to validate, from 200 on to test; six a person."""
    folder = root / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    for i in range(COUNT):
        (folder / "img_align_celeba" / file_name(i)).write_bytes(jpeg(i))
    parts = (f"{file_name(i)} {int(i >= 160) + int(i >= 200)}\n" for i in range(COUNT))
    people = (f"{file_name(i)} {1000 - i // 6}\n" for i in range(COUNT))
    (folder / "list_attr_celeba.txt").write_text(table(made_up_attributes()))
    (folder / "list_eval_partition.txt").write_text("".join(parts))
    (folder / "identity_CelebA.txt").write_text("".join(people))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small")
    write_small(root)
    return root


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("full")
    write_full(root)
    return root


def tiny(**options: Any) -> CelebA:
    usual: dict[str, Any] = {
        "clients": 8, "samples": 20, "test_samples": 60, "image_size": 16, "width": 2,
    }  # fmt: skip
    return CelebA(**{**usual, **options})


def which(images: Tensor) -> list[int]:
    """The numbers of the images."""
    digits = (images.float().mean(dim=(2, 3)) - 18) / 36
    assert float((digits - digits.round()).abs().max()) < 0.2
    return (digits.round().long() @ torch.tensor([49, 7, 1])).tolist()


def shares(federation: Federation) -> list[list[int]]:
    """The images of each client."""
    return [which(federation.client(id).data[0]) for id in federation.population.ids()]


def kinds(federation: Federation, of: tuple[str, ...]) -> list[set[tuple[float, ...]]]:
    """For each client the combinations of these attributes that occur."""
    columns = [federation.names.index(name) for name in of]
    targets = [federation.client(id).data[1][:, columns] for id in federation.population.ids()]
    return [{tuple(row) for row in mine.tolist()} for mine in targets]


# ---- which images -----------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet"])
def test_no_image_is_at_two_clients_or_held_out_as_well(small: Path, partition: Any) -> None:
    federation = tiny(partition=partition, seed=3).build(small)
    trained = [i for mine in shares(federation) for i in mine]
    tested = which(federation.held_out[0])
    assert (len(trained), len(set(trained))) == (160, 160)
    assert (len(tested), len(set(tested))) == (60, 60)
    assert not set(trained) & set(tested)


def test_every_image_can_be_used_and_one_more_is_refused(small: Path) -> None:
    federation = tiny(samples=20, test_samples=80).build(small)
    trained = [i for mine in shares(federation) for i in mine]
    assert sorted([*trained, *which(federation.held_out[0])]) == list(range(COUNT))
    for options in ({"samples": 23}, {"test_samples": 81}, {"test_samples": 500}):
        with pytest.raises(ValueError, match=r"images to train and .* to test, .* Ask for fewer"):
            tiny(**options).build(small)


def test_attributes_belong_to_their_images(small: Path) -> None:
    values = torch.from_numpy(made_up_attributes()).float()
    federation = tiny().build(small)
    for id in federation.population.ids():
        images, targets = federation.client(id).data
        assert torch.equal(targets, values[which(images)])
    images, targets = federation.held_out
    assert torch.equal(targets, values[which(images)])
    assert federation.names == ATTRIBUTES
    assert all(federation.client(id).objectives == ATTRIBUTES for id in federation.population.ids())


def test_partitions_deal_the_same_images_and_sizes_leave_one_another_alone(small: Path) -> None:
    used = [
        sorted(i for mine in shares(tiny(partition=p).build(small)) for i in mine)
        for p in ("iid", "shards", "dirichlet")
    ]
    assert used[0] == used[1] == used[2]
    fewer = tiny(test_samples=10).build(small)
    assert sorted(i for mine in shares(fewer) for i in mine) == used[0]
    assert set(which(fewer.held_out[0])) < set(which(tiny().build(small).held_out[0]))


def test_shards_keep_to_the_kinds_allowed_and_the_samples_asked_for(small: Path) -> None:
    federation = tiny(partition="shards").build(small)
    held = kinds(federation, KINDS)
    assert [len(mine) for mine in shares(federation)] == [20] * 8
    assert max(len(mine) for mine in held) == 2
    assert len(set().union(*held)) == 8
    one = tiny(partition="shards", kinds=("Bald",), kinds_per_client=1).build(small)
    assert [len(mine) for mine in kinds(one, ("Bald",))] == [1] * 8


def test_dirichlet_clients_differ_in_kinds_and_size(small: Path) -> None:
    federation = tiny(partition="dirichlet", alpha=0.1).build(small)
    sizes = [len(mine) for mine in shares(federation)]
    assert sum(sizes) == 160
    assert len(set(sizes)) > 4
    assert min(len(mine) for mine in kinds(federation, KINDS)) < 8


def test_kinds_need_not_be_among_the_attributes_that_are_learned(small: Path) -> None:
    federation = tiny(partition="shards", attributes=("Young", "Bald")).build(small)
    assert federation.names == ("Young", "Bald")
    male = torch.from_numpy(made_up_attributes()[:, ATTRIBUTES.index("Male")])
    shares_of_men = [float(male[mine].float().mean()) for mine in shares(federation)]
    assert {0.0, 1.0} & set(shares_of_men)


def test_attributes_are_chosen_by_name_in_the_order_given(small: Path) -> None:
    names = ("Young", "5_o_Clock_Shadow", "Bald")
    federation = tiny(attributes=names).build(small)
    images, targets = federation.held_out
    columns = [ATTRIBUTES.index(name) for name in names]
    assert torch.equal(
        targets, torch.from_numpy(made_up_attributes())[which(images)][:, columns].float()
    )
    heads = [name for name in federation.layout.names if name.endswith("bias") and "heads" in name]
    assert heads == [f"heads.{name}.bias" for name in names]
    outputs, wanted = torch.tensor([[9.0, -9.0, 9.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    for objective, right in zip(federation.objectives, (True, True, False), strict=True):
        loss: Any = objective.loss(outputs, wanted)
        accuracy: Any = objective.metrics["accuracy"](outputs, wanted)
        assert (float(loss) < 1) is right
        assert float(accuracy) == right


def test_the_seed_decides_everything_and_no_global_generator_is_touched(small: Path) -> None:
    before, before_numpy = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first, same, other = (tiny(seed=seed).build(small) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert before_numpy == str(np.random.get_state())  # noqa: NPY002
    for get in (
        lambda f: f.client("client-3").data[0],
        lambda f: f.held_out[0],
        lambda f: flat(f.model),
    ):
        assert torch.equal(get(first), get(same))
        assert not torch.equal(get(first), get(other))


# ---- the whole data set -----------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["iid", "identities"])
def test_with_the_official_parts_clients_train_on_one_and_others_are_held_out(
    full: Path, partition: Any
) -> None:
    federation = tiny(partition=partition, clients=5, test_samples=80).build(full)
    assert max(i for mine in shares(federation) for i in mine) < 160
    assert sorted(which(federation.held_out[0])) == list(range(160, 240))


def test_with_identities_nobody_is_at_two_clients(full: Path) -> None:
    federation = tiny(partition="identities", clients=6).build(full)
    held = shares(federation)
    assert [len(mine) for mine in held] == [20] * 6
    people = [{i // 6 for i in mine} for mine in held]
    assert [len(mine) for mine in people] == [4] * 6
    assert len(set().union(*people)) == 24


def test_too_few_people_are_said(full: Path) -> None:
    # Each client takes four people, of whom two images are left over: 26 are enough for six.
    with pytest.raises(ValueError, match="people for 6 clients with 20 images each, not for 7"):
        tiny(partition="identities", clients=7).build(full)


def test_identities_need_the_file_that_names_them(small: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the file identity_CelebA\.txt"):
        tiny(partition="identities").build(small)


# ---- the network ------------------------------------------------------------------------------


def test_the_trunk_is_a_resnet_18() -> None:
    trunk = ResNet18()
    assert sum(p.numel() for p in trunk.parameters()) == 11_176_512
    assert sum(isinstance(m, nn.Conv2d) for m in trunk.modules()) == 20
    assert {m.num_groups for m in trunk.modules() if isinstance(m, nn.GroupNorm)} == {32}
    assert dict(AttributeNet(ATTRIBUTES).named_parameters())["heads.Bald.weight"].shape == (1, 512)


def test_no_layer_keeps_statistics_of_what_it_saw() -> None:
    assert list(AttributeNet(ATTRIBUTES, width=4).buffers()) == []


@pytest.mark.parametrize("width", [1, 2, 5, 8, 24])
@pytest.mark.parametrize("size", [16, 48])
def test_the_network_answers_with_a_logit_per_attribute(width: int, size: int) -> None:
    net = AttributeNet(["Bald", "Young", "Male"], width)
    images = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8)
    logits = net(images)
    assert tuple(logits.shape) == (3, 3)
    assert bool(logits.isfinite().all())
    hidden = net.trunk(images / 127.5 - 1)
    each = [head(hidden)[:, 0] for head in net.heads.values()]
    torch.testing.assert_close(logits, torch.stack(each, 1))
    assert net.double()(images).dtype == torch.float64


def test_an_image_is_answered_whatever_else_is_in_its_batch() -> None:
    net = AttributeNet(["Bald"], width=4).double()
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    torch.testing.assert_close(net(images)[2:3], net(images[2:3]))


def test_many_models_can_be_differentiated_at_once() -> None:
    net = AttributeNet(["Bald", "Young"], width=2).double()
    names = [name for name, _ in net.named_parameters()]
    many = {n: torch.stack([p.detach(), 1.1 * p.detach()]) for n, p in net.named_parameters()}
    images = torch.randint(0, 256, (2, 3, 3, 16, 16), dtype=torch.uint8)

    def loss(parameters: dict[str, Tensor], batch: Tensor) -> Tensor:
        outputs: Tensor = functional_call(net, parameters, (batch,))
        return outputs.square().sum()

    together = vmap(grad(loss))(many, images)
    for i in range(2):
        alone = grad(loss)({n: many[n][i] for n in names}, images[i])
        for name in names:
            torch.testing.assert_close(together[name][i], alone[name])


def test_images_stay_bytes_until_the_network_sees_them(small: Path) -> None:
    federation = tiny().build(small)
    for images in (federation.client("client-0").data[0], federation.held_out[0]):
        assert images.dtype == torch.uint8
        assert tuple(images.shape[1:]) == (3, 16, 16)


def test_the_whole_picture_is_scaled(tmp_path: Path) -> None:
    folder = write_small(tmp_path)
    half = Image.new("RGB", (20, 40))
    half.paste((255, 255, 255), (0, 20, 20, 40))
    file = io.BytesIO()
    half.save(file, "PNG")
    with zipfile.ZipFile(folder / "img_align_celeba_half_10k.zip", "w") as archive:
        for i in range(4):
            archive.writestr(f"img_align_celeba_half/{file_name(i)}", file.getvalue())
    federation = tiny(clients=1, samples=3, test_samples=1).build(tmp_path)
    image = federation.held_out[0][0]
    assert int(image[:, :7].max()) == 0
    assert int(image[:, 9:].min()) == 255


# ---- training ---------------------------------------------------------------------------------


def test_a_round_trains_the_trunk_and_every_head(small: Path) -> None:
    names = ("Bald", "Male", "Young")
    federation = tiny(attributes=names, clients=2).build(small)
    algorithm = FSMGDA(local_steps=2, batch_size=5, shared="trunk.*")
    result = fit(federation, algorithm, rounds=1)
    assert result.losses.shape == (2, 3)
    assert not result.reports[0].refused
    before = dict(federation.model.named_parameters())
    after = dict(result.model.named_parameters())
    for name in (*(f"heads.{each}.bias" for each in names), "trunk.stem.weight"):
        assert not torch.equal(before[name], after[name])
    assert set(result.final.held_out["Bald"]) == {"loss", "accuracy", "auc"}


@pytest.mark.skipif(
    not (DATA / "celeba_10k").is_dir(), reason="no CelebA files at ../shared/data/celeba_10k"
)
def test_a_round_on_the_real_images() -> None:
    problem = CelebA(
        clients=2,
        samples=12,
        test_samples=16,
        attributes=("Male", "Smiling", "Eyeglasses"),
        width=8,
    )
    federation = problem.build(DATA)
    images, targets = federation.client("client-0").data
    assert tuple(images.shape) == (12, 3, 64, 64)
    assert 40 < float(images.float().mean()) < 215
    assert set(targets.unique().tolist()) <= {0.0, 1.0}
    result = fit(federation, FSMGDA(local_steps=1, batch_size=4), rounds=1)
    assert bool(result.losses.isfinite().all())
    assert result.reports[0].missing == ()
    assert 0 <= result.final.held_out["Smiling"]["auc"] <= 1


# ---- options, files and what is missing -------------------------------------------------------


def test_all_wrong_options_are_said_at_once() -> None:
    wrong: dict[str, Any] = {
        "clients": 0, "samples": 1.5, "attributes": "Bald", "partition": "male",
        "kinds": ("Male", 3), "kinds_per_client": 0, "alpha": 0, "test_samples": True,
        "image_size": 8, "width": -3, "seed": "one",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^CelebA: ") as caught:
        CelebA(**wrong)
    for name, value in wrong.items():
        assert f"`{name}` must be" in str(caught.value)
        assert f"got {value!r}." in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attributes": ("Bald", "Smilling")},
            r"`attributes` must be .* got Smilling\. It has 5_o_",
        ),
        ({"kinds": ("male",)}, r"`kinds` must be attributes of CelebA, got male\."),
        ({"attributes": ("Bald", "Young", "Bald")}, "once, got Bald twice"),
        ({"partition": "shards", "kinds": ()}, '`kinds` must name .* with `partition` "shards"'),
        (
            {"partition": "shards", "clients": 3},
            "3 `clients` with 2 `kinds_per_client` leave some of the 8 combinations of 3 `kinds`",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CelebA(**options)


def test_a_table_of_more_images_than_there_are_is_read(tmp_path: Path) -> None:
    write_small(tmp_path, rows=COUNT + 30)
    federation = tiny().build(tmp_path / "celeba_10k")
    assert max(i for mine in shares(federation) for i in mine) < COUNT


def write_xz(path: Path, text: str) -> None:
    path.write_bytes(lzma.compress(text.encode()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (table(made_up_attributes(100)), r"has no line for 000101\.jpg and 139 more of the 240"),
        (table(made_up_attributes(), ATTRIBUTES[::-1]), "must name CelebA's 40 attributes"),
        (table(3 * made_up_attributes()), "must hold −1 and 1 only"),
        (table(made_up_attributes()[:, :-1]), r"000001\.jpg .* 40 whole numbers, got 39 words"),
        (table(made_up_attributes()).replace("-1", "no"), "40 whole numbers"),
        ("", "must name CelebA's 40 attributes"),
    ],
)
def test_a_broken_table_is_said_to_be_broken(tmp_path: Path, text: str, message: str) -> None:
    folder = write_small(tmp_path)
    write_xz(folder / "list_attr_celeba.txt.xz", text)
    with pytest.raises(ValueError, match=message) as caught:
        tiny().build(tmp_path)
    assert "`list_attr_celeba.txt.xz`" in str(caught.value)
    assert "Fetch the file anew." in str(caught.value)


def test_a_damaged_archive_and_a_damaged_image_are_named(tmp_path: Path) -> None:
    folder = write_small(tmp_path)
    path = folder / "img_align_celeba_half_10k.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"_10k\.zip` is not a whole zip file"):
        tiny().build(tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(4):
            archive.writestr(file_name(i), jpeg(i)[:300] if i == 2 else jpeg(i))
    with pytest.raises(ValueError, match=r"`000003\.jpg` is not a whole image"):
        tiny(clients=1, samples=3, test_samples=1).build(tmp_path)


def test_without_pillow_the_package_to_install_is_named(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r'pip install "fmol\[celeba\]"'):
        tiny().build(small)


def test_without_files_and_torchvision_one_sentence_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    for data_dir in (None, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"`celeba`.*`data_dir`.*pip install torchvision"
        ):
            CelebA().build(data_dir)


def pretend_torchvision(monkeypatch: pytest.MonkeyPatch, celeba: Any) -> None:
    datasets = types.ModuleType("torchvision.datasets")
    datasets.CelebA = celeba  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


def test_without_files_torchvision_downloads_into_the_folder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def celeba(root: Path, **options: Any) -> None:
        asked.append((root, options["split"], options["download"]))
        write_full(root)

    pretend_torchvision(monkeypatch, celeba)
    for _ in range(2):
        federation = tiny(clients=2).build(tmp_path)
        assert len(federation.held_out[0]) == 60
    assert asked == [(tmp_path, "all", True)]  # Once: then the files are found.


def test_a_download_that_fails_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Path, **options: Any) -> None:
        raise RuntimeError("too many have asked for this file")

    pretend_torchvision(monkeypatch, refuse)
    with pytest.raises(FileNotFoundError, match=r"can download it \(too many have asked"):
        CelebA().build(tmp_path)
    pretend_torchvision(monkeypatch, lambda root, **options: None)
    with pytest.raises(FileNotFoundError, match="that torchvision can download it"):
        CelebA().build(tmp_path)
