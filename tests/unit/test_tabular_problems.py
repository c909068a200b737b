"""Tables and the problems made of them: readers, splits without leakage, losses, a short fit."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fmol import FSMGDA, Federation, fit
from fmol.evaluation import batch_mean
from fmol.problems import adult, river_flow, shoppers, tables
from fmol.problems.adult import Adult
from fmol.problems.river_flow import HORIZON, JOINT, LAG, ROWS, SITES, RiverFlow
from fmol.problems.shoppers import Shoppers

DATA = Path(__file__).parents[3] / "shared" / "data"

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the data sets are not beside the project (../shared/data)"
)

REAL: list[Any] = [
    RiverFlow(),
    RiverFlow(partition="iid", assignment="one-each"),
    RiverFlow(assignment="subsets", clients=4),
    Shoppers(),
    Shoppers(group="traffic", assignment="all"),
    Shoppers(group="visitor"),
    Adult(),
    Adult(partition="by-group"),
    Adult(partition="dirichlet", sex_as_input=True),
]


@pytest.fixture(autouse=True)
def no_data_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FMOL_DATA", raising=False)


def training_data(federation: Federation) -> tuple[Tensor, Tensor]:
    clients = [federation.client(id) for id in federation.population.ids()]
    return (
        torch.cat([c.data[0] for c in clients]),
        torch.cat([c.data[1] for c in clients]),
    )


def rows_of(*data: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in torch.cat(data, 1).tolist()}


# ---- readers ---------------------------------------------------------------------------------


def test_an_arff_file_becomes_numbers_and_text(tmp_path: Path) -> None:
    text = (
        "% a comment\n@RELATION 'x'\n@attribute 'the size' numeric\n"
        "@attribute \"kind\" {a, 'b c'}\n@ATTRIBUTE n\tReal\n\n@DATA\n"
        "1.5,a,?\n% another\n\n?, 'b c', -2e3\n"
    )
    for name in ("t.arff", "t.arff.xz"):
        path = tmp_path / name
        path.write_bytes(lzma.compress(text.encode()) if name.endswith("xz") else text.encode())
        table = tables.read_arff(path)
        assert list(table) == ["the size", "kind", "n"]
        np.testing.assert_array_equal(table["the size"], [1.5, np.nan])
        assert table["kind"].tolist() == ["a", "b c"]
        np.testing.assert_array_equal(table["n"], [np.nan, -2000])


def test_a_csv_file_is_read_with_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1, "x, y"\n\n2,z\n')
    assert tables.read_csv(path)["b"].tolist() == ["x, y", "z"]
    path.write_text("|a comment\n1, x.\n")
    assert tables.read_csv(path, ["a", "b"], comment="|")["b"].tolist() == ["x."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n1,2\n3\n", "line 3 of `t.csv` has 1 values for 2 columns"),
        (b"a,b\n", "no rows"),
        (b"", "is empty"),
        (b"a,b\n\xff\xfe,1\n", "damaged"),
    ],
)
def test_a_broken_file_is_said_to_be_broken(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tables.read_csv(path)


def test_a_truncated_xz_file_and_a_wrong_number_are_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.xz"
    path.write_bytes(lzma.compress(b"a,b\n" + b"1,2\n" * 1000)[:-20])
    with pytest.raises(ValueError, match=r"`t.csv.xz` is damaged"):
        tables.read_csv(path)
    other = tmp_path / "t.arff"
    other.write_text("@attribute a numeric\n@data\nx\n")
    with pytest.raises(ValueError, match=r"column `a` of `t.arff` must hold numbers"):
        tables.read_arff(other)
    other.write_text("@attribute a numeric\n")
    with pytest.raises(ValueError, match="no line `@data`"):
        tables.read_arff(other)
    with pytest.raises(ValueError, match="true and false, got 'maybe'"):
        tables.truths(np.array(["TRUE", "maybe"]))


def test_standard_units_come_from_the_rows_they_were_fitted_on() -> None:
    values = np.array([[1.0, 7.0, np.nan], [3.0, 7.0, np.nan], [100.0, 9.0, 5.0]])
    scaled = tables.fit_standard(values[:2])(values)
    np.testing.assert_allclose(scaled, [[-1, 0, 0], [1, 0, 0], [98, 2, 5]])


def test_the_model_is_a_function_of_the_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (tables.mlp([4, 8, 2], seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


# ---- options and what is missing -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: RiverFlow(clients=0, partition="x", width=1.5, gap=47),  # type: ignore[arg-type]
            ["clients", "partition", "width", "gap"],
        ),
        (
            lambda: Shoppers(group="shoe", test_share=float("nan"), seed="a"),  # type: ignore[arg-type]
            ["group", "test_share", "seed"],
        ),
        (
            lambda: Adult(alpha=0.0, sex_as_input=1, group="sex", clients=True),  # type: ignore[arg-type]
            ["alpha", "sex_as_input", "group", "clients"],
        ),
        (lambda: RiverFlow(clients=1), ["partition"]),
        (lambda: RiverFlow(clients=7, assignment="one-each"), ["assignment"]),
    ],
)
def test_all_wrong_options_are_named_at_once(make: Callable[[], object], names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must|needs") as error:
        make()
    assert all(f"`{name}" in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("problem", "package", "file"),
    [
        (RiverFlow(), "scikit-learn", "rf1.arff"),
        (Shoppers(), "ucimlrepo", "online_shoppers_intention.csv"),
        (Adult(), "scikit-learn", "adult.data"),
    ],
)
def test_missing_data_are_said_with_both_ways_to_get_them(
    problem: Any, package: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "ucimlrepo", None)
    with pytest.raises(FileNotFoundError, match=package) as error:
        problem.build(tmp_path)
    assert file in str(error.value)
    assert "data_dir" in str(error.value)
    assert "FMOL_DATA" in str(error.value)


def offer_openml(
    monkeypatch: pytest.MonkeyPatch,
    columns: Mapping[str, Any],
    levels: Mapping[str, list[str]],
) -> None:
    """Lets `fetch_openml` give these columns, without a network."""
    module = ModuleType("sklearn.datasets")

    def fetch(**options: Any) -> SimpleNamespace:
        assert options["target_column"] is None
        return SimpleNamespace(
            data=np.stack([np.asarray(c, dtype=np.float64) for c in columns.values()], 1),
            feature_names=list(columns),
            categories=levels,
        )

    vars(module)["fetch_openml"] = fetch
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)


def test_a_download_that_fails_is_said_in_the_same_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("sklearn.datasets")

    def fetch(**options: Any) -> None:
        raise OSError("no route to host")

    vars(module)["fetch_openml"] = fetch
    monkeypatch.setitem(sys.modules, "sklearn.datasets", module)
    with pytest.raises(FileNotFoundError, match="no route to host"):
        RiverFlow().build(tmp_path)


# ---- river flow ------------------------------------------------------------------------------


def river(change_test: float = 0.0) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """RF1's shape with the row's number as every site's flow, from 40-fold different scales."""
    row = np.arange(ROWS, dtype=np.float64)
    lags = ("0", "n6", "n12", "n18", "n24", "n36", "n48", "n60")
    names = [f"{site}__{lag}" for lag in lags for site in SITES]
    names += [f"{site}_48H__0" for site in SITES]
    columns = {name: (1 + 5 * (i % 8)) * row for i, name in enumerate(names)}
    for i, name in enumerate(names[8:64]):
        columns[name][[i, JOINT + i]] = np.nan
    _, test = river_flow.blocked_split(ROWS, (JOINT,), 0.2, LAG + HORIZON)
    for column in columns.values():
        column[test] += change_test
    return columns


@pytest.mark.parametrize("gap", [HORIZON, LAG + HORIZON])
@pytest.mark.parametrize("test_share", [0.01, 0.2, 0.5])
def test_no_training_row_is_near_a_held_out_row_of_its_series(gap: int, test_share: float) -> None:
    train, test = river_flow.blocked_split(ROWS, (JOINT,), test_share, gap)
    for series in (range(JOINT), range(JOINT, ROWS)):
        mine = train[(train >= series.start) & (train < series.stop)]
        other = test[(test >= series.start) & (test < series.stop)]
        assert len(mine) > 1000
        assert len(other) == round(test_share * len(series))
        assert np.abs(mine[:, None] - other[None, :]).min() > gap >= 48


def test_blocks_of_the_river_do_not_cross_the_joint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_openml(monkeypatch, river(), {})
    federation = RiverFlow().build(tmp_path)
    train, test = river_flow.blocked_split(ROWS, (JOINT,), 0.2, LAG + HORIZON)
    seen: list[int] = []
    for id in federation.population.ids():
        # The first target is the row's number in standard units.
        numbers = federation.client(id).data[1][:, 0].double() * train.std() + train.mean()
        rows = numbers.round().long().tolist()
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        assert not rows[0] < JOINT <= rows[-1]
        seen += rows
    assert seen == train.tolist()
    assert federation.held_out[0].shape == (len(test), 64)


@pytest.mark.parametrize("partition", ["blocks", "iid"])
def test_a_client_of_the_river_holds_out_rows_of_its_own_series(
    partition: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_openml(monkeypatch, river(), {})
    federation = RiverFlow(partition=partition, client_test_samples=50).build(tmp_path)
    train, test = river_flow.blocked_split(ROWS, (JOINT,), 0.2, LAG + HORIZON)

    def rows(targets: torch.Tensor) -> set[int]:
        return set((targets[:, 0].double() * train.std() + train.mean()).round().long().tolist())

    for id in federation.population.ids():
        client = federation.client(id)
        mine, own = rows(client.data[1]), rows(client.held_out[1])
        assert len(own) == 50
        assert own <= set(test.tolist())
        assert {row < JOINT for row in own} <= {row < JOINT for row in mine}
    without = RiverFlow(partition=partition, client_test_samples=0).build(tmp_path)
    assert without.client(without.population.ids()[0]).held_out is None


def test_held_out_rows_of_the_river_change_nothing_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    for change in (0.0, 1e6):
        offer_openml(monkeypatch, river(change), {})
        built.append(RiverFlow(partition="iid").build(tmp_path))
    one, other = map(training_data, built)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not torch.equal(built[0].held_out[0], built[1].held_out[0])


def test_another_edition_of_the_river_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_openml(monkeypatch, {name: c[:-1] for name, c in river().items()}, {})
    with pytest.raises(ValueError, match="must have 9125 rows"):
        RiverFlow().build(tmp_path)


@needs_data
def test_targets_of_the_river_are_later_inputs_of_the_same_series_and_of_no_other() -> None:
    inputs, targets = river_flow._load(DATA)
    for start, stop in ((0, JOINT), (JOINT, ROWS)):
        np.testing.assert_array_equal(
            inputs[start + HORIZON : stop, :8], targets[start : stop - HORIZON]
        )
    assert not (inputs[JOINT, :8] == targets[JOINT - HORIZON]).all()
    assert np.isnan(inputs).sum() == 3264
    assert np.isnan(inputs[[0, JOINT]]).sum(1).tolist() == [56, 56]
    assert not np.isnan(inputs[JOINT - 1]).any()


@needs_data
def test_the_rivers_training_rows_are_in_standard_units() -> None:
    federation = RiverFlow().build(DATA)
    inputs, targets = training_data(federation)
    assert inputs.shape[1:] == (64,)
    assert targets.shape[1:] == (8,)
    torch.testing.assert_close(targets.mean(0), torch.zeros(8), atol=1e-4, rtol=0)
    torch.testing.assert_close(targets.std(0), torch.ones(8), atol=1e-3, rtol=0)
    torch.testing.assert_close(inputs.mean(0), torch.zeros(64), atol=1e-4, rtol=0)


# ---- shoppers --------------------------------------------------------------------------------


def shop(folder: Path, n: int = 400) -> None:
    """A small shop as the UCI file has it, with repeated sessions and rare sources of traffic."""
    header = (
        "Administrative,Administrative_Duration,Informational,Informational_Duration,"
        "ProductRelated,ProductRelated_Duration,BounceRates,ExitRates,PageValues,SpecialDay,Month,"
        "OperatingSystems,Browser,Region,TrafficType,VisitorType,Weekend,Revenue"
    )
    lines = [header]
    for i in range(n):
        traffic = 20 if i % 50 == 0 else 7 if i % 50 == 1 else 1 + i % 2
        j = i % 300  # So the last hundred repeat the first.
        lines.append(
            f"{j % 3},{j},0,0,{j % 40},{3 * j},{0.2 * (j % 5 == 0)},0.1,{j % 7},0,"
            f"{['Feb', 'May'][j % 2]},{1 + j % 4},1,{1 + j % 3},{traffic},"
            f"{['New_Visitor', 'Returning_Visitor'][j % 3 == 0]},{['FALSE', 'TRUE'][j % 2]},"
            f"{['FALSE', 'TRUE'][j % 6 == 0]}"
        )
    folder.mkdir(exist_ok=True)
    (folder / "online_shoppers_intention.csv").write_text("\n".join(lines) + "\n")


def test_rare_groups_of_shoppers_become_one_client(tmp_path: Path) -> None:
    shop(tmp_path / "online_shoppers")
    federation = Shoppers(group="traffic", min_group=20, assignment="all").build(tmp_path)
    assert list(federation.population.ids()) == ["traffic-01", "traffic-02", "traffic-other"]
    sizes = [
        len(federation.client(id).data[0]) + len(federation.client(id).held_out[0])
        for id in federation.population.ids()
    ]
    assert sum(sizes) == 400
    assert sizes[2] == 16


def test_neither_targets_nor_exit_rates_are_inputs_of_the_shoppers(tmp_path: Path) -> None:
    shop(tmp_path)
    used = {*shoppers._NUMERIC, *shoppers._CATEGORICAL}
    assert used.isdisjoint({"Revenue", "BounceRates", "PageValues", "ExitRates"})
    federation = Shoppers(assignment="all").build(tmp_path)
    # The inputs: 7 numbers, 2 months, 4 systems, 1 browser, 3 regions, traffic 1, 2, 7 and 20,
    # 2 kinds of visitor, 2 of days.
    assert federation.held_out[0].shape[1] == 7 + 2 + 4 + 1 + 3 + 4 + 2 + 2


def test_a_session_and_its_copy_are_on_the_same_side(tmp_path: Path) -> None:
    shop(tmp_path)
    federation = Shoppers(min_group=10).build(tmp_path)
    assert rows_of(*training_data(federation)).isdisjoint(rows_of(*federation.held_out))


def test_each_group_of_shoppers_holds_two_objectives_and_each_objective_has_a_holder(
    tmp_path: Path,
) -> None:
    shop(tmp_path)
    matrix = Shoppers(min_group=10).build(tmp_path).assignment()
    assert matrix.sum(0).tolist() == [2, 2, 2]
    assert matrix.sum(1).min() >= 1


def test_shoppers_from_the_uci_repository_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop(tmp_path / "here")
    table = tables.read_csv(tmp_path / "here" / "online_shoppers_intention.csv")
    # As pandas has them: truths as booleans, counts as numbers.
    frame: Any = {**table, "Revenue": tables.truths(table["Revenue"])}
    frame["ProductRelated"] = table["ProductRelated"].astype(np.int64)
    module = ModuleType("ucimlrepo")
    original = type("Frame", (dict,), {"columns": property(list)})(frame)
    vars(module)["fetch_ucirepo"] = lambda id: SimpleNamespace(
        data=SimpleNamespace(original=original)
    )
    monkeypatch.setitem(sys.modules, "ucimlrepo", module)
    (tmp_path / "empty").mkdir()
    fetched = Shoppers(min_group=10).build(tmp_path / "empty")
    read = Shoppers(min_group=10).build(tmp_path / "here")
    assert torch.equal(fetched.held_out[0], read.held_out[0])
    assert torch.equal(fetched.held_out[1], read.held_out[1])


def test_shoppers_without_a_column_are_refused(tmp_path: Path) -> None:
    (tmp_path / "online_shoppers_intention.csv").write_text("Revenue\n0\n")
    with pytest.raises(ValueError, match=r"no columns .*'Month'"):
        Shoppers().build(tmp_path)


def test_the_area_under_the_curve_counts_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 10, (60,), generator=generator).float()
    labels = torch.randint(0, 2, (60,), generator=generator)
    better = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    expected = ((better > 0).double() + 0.5 * (better == 0).double()).mean()
    torch.testing.assert_close(shoppers.area_under_curve(scores, labels), expected)
    assert shoppers.area_under_curve(scores, torch.ones(60)).item() == 0.5


@needs_data
def test_the_real_shoppers_are_whole_and_in_standard_units() -> None:
    federation = Shoppers().build(DATA)
    assert len(federation.population) == 9
    inputs, targets = training_data(federation)
    assert len(inputs) + len(federation.held_out[0]) == 12330
    held_out = [federation.client(id).held_out for id in federation.population.ids()]
    assert sum(len(x) for x, _ in held_out) == len(federation.held_out[0])
    torch.testing.assert_close(targets[:, 1:].mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(targets[:, 1:].std(0), torch.ones(2), atol=1e-3, rtol=0)
    assert targets[:, 0].sum() + federation.held_out[1][:, 0].sum() == 1908
    assert rows_of(inputs, targets).isdisjoint(rows_of(*federation.held_out))


# ---- adult -----------------------------------------------------------------------------------

PERSON = (
    "{age}, {work}, 77516, Bachelors, 13, Divorced, {job}, Wife, White, {sex}, 0, 0, 40, {land}, "
    "{income}"
)


def census(folder: Path, test_age: int = 50) -> None:
    """A small census as UCI publishes it."""
    folder.mkdir(exist_ok=True)
    jobs = ["Sales", "Sales", "Tech-support", "?", "Armed-Forces"]
    lines = [
        PERSON.format(
            age=20 + i % 40,
            work="Private",
            job="Armed-Forces" if i == 0 else jobs[i % 4],
            sex=["Male", "Female"][i % 3 == 0],
            land="United-States",
            income=["<=50K", ">50K"][i % 5 == 0],
        )
        for i in range(120)
    ]
    (folder / "adult.data").write_text("\n".join(lines) + "\n\n")
    seen = {"work": "Never-worked", "job": "Sales", "sex": "Female", "land": "Peru"}
    lines = [
        "|1x3 Cross validator",
        PERSON.format(age=test_age, income=">50K.", **seen),
        PERSON.format(age=test_age, income="<=50K.", **{**seen, "sex": "Male"}),
    ]
    (folder / "adult.test").write_text("\n".join(lines) + "\n\n")


def test_the_comment_and_the_dots_of_the_test_file_are_handled(tmp_path: Path) -> None:
    census(tmp_path / "adult")
    federation = Adult(clients=2).build(tmp_path)
    assert federation.held_out[1].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    inputs, targets = training_data(federation)
    assert len(inputs) == 120
    assert targets.mean(0).tolist() == pytest.approx([24 / 120, 40 / 120])


def test_a_level_that_training_never_saw_is_no_level_at_all(tmp_path: Path) -> None:
    census(tmp_path)
    # 5 numbers; work 1, marital status 1, job 4, relationship 1, race 1, country 1; sex 2.
    assert Adult().build(tmp_path).held_out[0].shape[1] == 5 + 9
    held_out = Adult(sex_as_input=True).build(tmp_path).held_out[0]
    assert held_out.shape[1] == 5 + 9 + 2
    assert held_out[0, 5:].sum() == 7 - 2  # Neither the new kind of work nor the new country.


def test_the_published_test_file_changes_nothing_in_training(tmp_path: Path) -> None:
    built = []
    for age in (50, 90):
        census(tmp_path, age)
        built.append(Adult(clients=3).build(tmp_path))
    assert torch.equal(training_data(built[0])[0], training_data(built[1])[0])
    assert not torch.equal(built[0].held_out[0], built[1].held_out[0])


def test_groups_of_people_are_clients_and_rare_ones_are_merged(tmp_path: Path) -> None:
    census(tmp_path)
    federation = Adult(partition="by-group", min_group=30).build(tmp_path)
    ids = list(federation.population.ids())
    assert ids == [f"occupation-{n}" for n in ("Sales", "Tech-support", "other", "unknown")]
    assert [len(federation.client(id).data[0]) for id in ids] == [59, 30, 1, 30]


def test_a_label_nobody_knows_is_refused(tmp_path: Path) -> None:
    census(tmp_path)
    path = tmp_path / "adult.data"
    path.write_text(path.read_text().replace(">50K", "rich"))
    with pytest.raises(ValueError, match=r"column `income` must hold .* got 'rich'"):
        Adult().build(tmp_path)


def test_openmls_adult_is_parted_where_the_test_rows_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = adult._TEST_ROWS + 200
    row = np.arange(n)
    names = [*adult._NAMES[:-1], "class"]
    levels = {name: ["x", "y"] for name in names if name not in (*adult._NUMERIC, "fnlwgt")}
    levels |= {"sex": ["Female", "Male"], "class": ["<=50K", ">50K"]}
    columns = {name: (row % 2).astype(np.float64) for name in names}
    columns["workclass"][3] = np.nan
    columns["fnlwgt"][[0, adult._TEST_ROWS]] = adult._FIRST_OF_TEST, adult._FIRST_OF_TRAIN
    offer_openml(monkeypatch, columns, levels)
    federation = Adult(clients=4).build(tmp_path)
    assert len(federation.held_out[0]) == adult._TEST_ROWS
    assert len(training_data(federation)[0]) == 200
    offer_openml(monkeypatch, columns | {"fnlwgt": columns["age"]}, levels)
    with pytest.raises(ValueError, match="another order"):
        Adult().build(tmp_path)


def test_fairness_losses_are_what_they_say() -> None:
    outputs = torch.tensor([[2.0], [0.5], [-1.0], [-0.3], [0.8], [1.5]])
    income = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    sex = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    targets, p = torch.stack([income, sex], 1), torch.sigmoid(outputs[:, 0])
    parity = (p[[1, 3, 4, 5]].mean() - p[[0, 2]].mean()) ** 2
    low, high = (p[[3, 5]].mean() - p[2]) ** 2, (p[[1, 4]].mean() - p[0]) ** 2
    torch.testing.assert_close(adult.parity_loss(outputs, targets), parity)
    torch.testing.assert_close(adult.odds_loss(outputs, targets), low + high)
    assert adult.parity_gap(outputs, targets).item() == pytest.approx(3 / 4 - 1 / 2)
    assert adult.odds_gap(outputs, targets).item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("loss", [adult.parity_loss, adult.odds_loss])
@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_without_one_of_the_sexes_gives_zero_and_a_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], size: int
) -> None:
    outputs = torch.linspace(-3, 3, size)[:, None].requires_grad_()
    targets = torch.tensor([[1.0, 1.0]] * size)
    value = loss(outputs, targets)
    assert value.item() == 0
    (gradient,) = torch.autograd.grad(value, outputs)
    assert torch.equal(gradient, torch.zeros(size, 1))
    assert adult.parity_gap(outputs, targets).item() == 0
    assert adult.odds_gap(outputs, targets).item() == 0


@needs_data
def test_the_real_adult_has_the_published_split() -> None:
    federation = Adult(partition="dirichlet").build(DATA)
    inputs, targets = training_data(federation)
    assert len(inputs) == 32561
    assert len(federation.held_out[0]) == 16281
    assert int(targets[:, 0].sum()) == 7841
    assert int(targets[:, 1].sum()) == 10771
    torch.testing.assert_close(inputs[:, :5].mean(0), torch.zeros(5), atol=1e-4, rtol=0)


# ---- all -------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("problem", REAL, ids=repr)
def test_a_problem_is_whole_and_a_few_rounds_lower_the_sum_of_its_losses(problem: Any) -> None:
    before = torch.random.get_rng_state()
    federation = problem.build(DATA)
    assert torch.equal(before, torch.random.get_rng_state())
    clients = [federation.client(id) for id in federation.population.ids()]
    for data in (federation.held_out, *(c.data for c in clients)):
        assert data[0].dtype == data[1].dtype == torch.float32
        assert torch.isfinite(data[0]).all()
        assert torch.isfinite(data[1]).all()
    outputs = federation.model(federation.held_out[0])
    for objective in federation.objectives:
        loss, _ = batch_mean(
            objective.loss(outputs, federation.held_out[1]), len(outputs), objective.name
        )
        assert torch.isfinite(loss)
        assert loss.requires_grad
    algorithm = FSMGDA(local_steps=5, batch_size=32, local_lr=0.05, server_lr=0.05)
    result = fit(federation, algorithm, rounds=2)
    sums = result.losses.sum(1)
    assert sums[-1] < sums[0]
    assert all(
        np.isfinite(value)
        for scores in result.reports[-1].held_out.values()
        for value in scores.values()
    )


@needs_data
@pytest.mark.parametrize("make", [RiverFlow, Shoppers, Adult])
def test_the_same_options_build_the_same_problem(make: Callable[..., Any]) -> None:
    options = {"partition": "iid"} if make is RiverFlow else {}
    one, same, other = (make(seed=seed, **options).build(DATA) for seed in (1, 1, 2))
    assert torch.equal(training_data(one)[0], training_data(same)[0])
    assert not torch.equal(
        one.client(one.population.ids()[0]).data[0][:50],
        other.client(other.population.ids()[0]).data[0][:50],
    )
