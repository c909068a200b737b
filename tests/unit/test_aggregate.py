"""One running mean per objective, and the Gramian of the means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fmol import aggregate
from fmol.aggregate import MeanFold, Means, Weighting, gramian
from fmol.engines.seam import Ask, Lane, Reply
from support import relative

D = 5
LIKE = torch.zeros(D, dtype=torch.float64)


def vectors(count: int, seed: int = 0, d: int = D) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, d, generator=generator, dtype=torch.float64)


def folded(
    replies: list[dict[str, Tensor]],
    *,
    samples: list[int] | None = None,
    steps: list[int] | None = None,
    slots: tuple[str, ...] = ("a", "b"),
    weighting: Weighting = "uniform",
    like: Tensor = LIKE,
) -> Means:
    """The means of these replies, one mapping slot → Δ per client."""
    fold = MeanFold(slots, like, weighting)
    asked = Ask(client="c", round=0, x=like, lanes=tuple(Lane(s, {s: 1.0}) for s in slots))
    for i, deltas in enumerate(replies):
        reply = Reply(
            client=f"c{i}",
            deltas=deltas,
            steps={} if steps is None else dict.fromkeys(deltas, steps[i]),
            samples={} if samples is None else dict.fromkeys(deltas, samples[i]),
        )
        fold.add(reply, asked)
    return fold.result()


# --- means ----------------------------------------------------------------------------------


def test_uniform_is_the_plain_mean_over_those_who_answered_for_the_slot() -> None:
    a, b = vectors(4), vectors(2, seed=1)
    replies: list[dict[str, Tensor]] = [
        {"a": a[0]}, {"a": a[1], "b": b[0]}, {"a": a[2], "b": b[1]}, {"a": a[3]},
    ]  # fmt: skip
    means = folded(replies, samples=[1, 50, 3, 7])
    assert means.slots == ("a", "b")
    assert relative(means.deltas[0], a.mean(0)) < 1e-15
    assert relative(means.deltas[1], b.mean(0)) < 1e-15


def test_samples_is_the_mean_weighted_by_labelled_samples() -> None:
    a = vectors(3)
    means = folded([{"a": row} for row in a], samples=[1, 10, 5], weighting="samples")
    expected = (a[0] + 10 * a[1] + 5 * a[2]) / 16
    assert relative(means.deltas[0], expected) < 1e-15


def test_a_client_that_says_it_has_no_samples_has_no_say() -> None:
    a = vectors(2)
    means = folded([{"a": a[0]}, {"a": a[1]}], samples=[4, 0], weighting="samples")
    assert torch.equal(means.deltas[0], a[0])
    assert folded([{"a": a[0]}], samples=[0], weighting="samples").slots == ()


def test_a_mixture_counts_by_the_most_samples_of_its_objectives() -> None:
    a = vectors(2)
    fold = MeanFold(["m"], LIKE, "samples")
    asked = Ask(client="c", round=0, x=LIKE, lanes=(Lane("m", {"a": 0.5, "b": 0.5}),))
    fold.add(Reply(client="c", deltas={"m": a[0]}, samples={"a": 3, "b": 9}), asked)
    fold.add(Reply(client="d", deltas={"m": a[1]}, samples={"b": 1}), asked)
    assert relative(fold.result().deltas[0], 0.9 * a[0] + 0.1 * a[1]) < 1e-15


def test_slots_without_an_update_are_absent_and_never_zero() -> None:
    a = vectors(2)
    means = folded([{"c": a[0]}, {"c": a[1], "a": a[0]}], slots=("a", "b", "c"))
    assert means.slots == ("a", "c")
    assert means.deltas.shape == (2, D)
    assert set(means.spread) == {"a", "c"}
    assert torch.equal(means.deltas[0], a[0])
    assert relative(means.deltas[1], a.mean(0)) < 1e-15


def test_without_any_update_there_are_no_rows() -> None:
    means = folded([{}, {}])
    assert (means.slots, means.spread) == ((), {})
    assert means.deltas.shape == (0, D)


def test_a_slot_for_which_nobody_moved_is_absent() -> None:
    zero = torch.zeros(D, dtype=torch.float64)
    assert folded([{"a": zero}, {"a": zero}], steps=[0, 0]).slots == ()


def test_a_client_that_did_not_move_counts_where_another_did() -> None:
    a = vectors(1)[0]
    means = folded([{"a": torch.zeros_like(a)}, {"a": a}], steps=[0, 2])
    assert relative(means.deltas[0], a / 2) < 1e-15


def test_a_zero_update_of_a_client_that_moved_is_an_update() -> None:
    means = folded([{"a": torch.zeros(D, dtype=torch.float64)}], steps=[3])
    assert means.slots == ("a",)
    assert not means.deltas.any()


def test_the_rows_are_in_the_order_of_the_slots_and_not_of_arrival() -> None:
    a = vectors(2)
    means = folded([{"b": a[1], "a": a[0]}], slots=("b", "a"))
    assert means.slots == ("b", "a")
    assert torch.equal(means.deltas, a.flip(0))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("case", ["as expected", "one refused", "one by one"])
def test_rows_that_were_summed_up_ahead_count_once_and_as_they_turn_out(
    case: str, weighting: Weighting
) -> None:
    rows, samples = vectors(4), [3.0, 1.0, 2.0, 5.0]
    slots = ["a", "b", "a", "b"]
    fold = MeanFold(("a", "b"), LIKE, weighting)
    fold.expect_rows(slots, rows, samples)
    if case == "one by one":
        asked = Ask(
            client="c", round=0, x=LIKE, lanes=(Lane("a", {"a": 1.0}), Lane("b", {"b": 1.0}))
        )
        for i in (0, 2):
            counts = {"a": int(samples[i]), "b": int(samples[i + 1])}
            deltas = {"a": rows[i], "b": rows[i + 1]}
            fold.add(Reply(client=f"c{i}", deltas=deltas, samples=counts), asked)
    else:
        if case == "one refused":  # It had something in it that is no number, and has none now.
            rows = rows.clone()
            rows[2], samples[2] = 0.0, 0.0
        squares = rows.square().sum(1).tolist()
        fold.add_rows(slots, rows, samples, [1] * 4, squares)
        more = vectors(1, seed=1)
        fold.add_rows(["a"], more, [4.0], [1], [float(more.square().sum())])
        rows, samples, slots = torch.cat([rows, more]), [*samples, 4.0], [*slots, "a"]
    weights = torch.tensor(samples, dtype=torch.float64)
    if weighting == "uniform":
        weights = (weights > 0).double()
    means = fold.result()
    for row, slot in enumerate(("a", "b")):
        own = [i for i, each in enumerate(slots) if each == slot]
        wanted = weights[own] @ rows[own] / weights[own].sum()
        assert relative(means.deltas[row], wanted) < 1e-15


def test_folding_changes_no_reply() -> None:
    a = vectors(2)
    before = a.clone()
    folded([{"a": a[0]}, {"a": a[1]}], samples=[2, 3], weighting="samples")
    assert torch.equal(a, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single_and_given_back_in_half(dtype: torch.dtype) -> None:
    """A running sum of ones in bfloat16 never gets past 256, in float16 never past 2048."""
    one = torch.ones(D, dtype=dtype)
    means = folded([{"a": one}] * 3000, like=one)
    assert means.deltas.dtype == dtype
    assert torch.equal(means.deltas[0], one)
    assert means.spread["a"] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_are_kept(dtype: torch.dtype) -> None:
    a = vectors(3).to(dtype)
    means = folded([{"a": row} for row in a], like=torch.zeros(D, dtype=dtype))
    assert means.deltas.dtype == dtype
    assert relative(means.deltas[0], a.mean(0)) < 2 * float(torch.finfo(dtype).eps)


# --- spread ---------------------------------------------------------------------------------


def test_the_spread_is_the_mean_square_over_the_square_of_the_mean() -> None:
    a = vectors(4)
    spread = folded([{"a": row} for row in a]).spread["a"]
    expected = a.square().sum(1).mean() / a.mean(0).square().sum()
    assert spread == pytest.approx(float(expected), rel=1e-12)


def test_the_spread_is_weighted_as_the_mean_is() -> None:
    a, n = vectors(3), torch.tensor([1, 10, 5])
    spread = folded([{"a": r} for r in a], samples=n.tolist(), weighting="samples").spread["a"]
    weights = n.double() / n.sum()
    expected = (weights @ a.square().sum(1)) / (weights @ a).square().sum()
    assert spread == pytest.approx(float(expected), rel=1e-12)


def test_the_spread_is_one_where_clients_agree_and_large_where_they_cancel() -> None:
    a = vectors(2)
    assert folded([{"a": a[0]}] * 3).spread["a"] == pytest.approx(1.0, rel=1e-12)
    nearly = folded([{"a": a[0]}, {"a": -a[0] + 1e-3 * a[1]}]).spread["a"]
    assert nearly > 1e5
    assert folded([{"a": a[0]}, {"a": -a[0]}]).spread["a"] == math.inf


def test_clients_that_all_send_zero_agree() -> None:
    zero = torch.zeros(D, dtype=torch.float64)
    assert folded([{"a": zero}] * 3, steps=[1, 1, 1]).spread["a"] == 1.0


def test_an_update_whose_square_is_beyond_float64_does_not_end_the_run() -> None:
    means = folded([{"a": torch.full((D,), 1e200, dtype=torch.float64)}])
    assert torch.equal(means.deltas[0], torch.full((D,), 1e200, dtype=torch.float64))


# --- Gramian --------------------------------------------------------------------------------


def whole_numbers(s: int, d: int, seed: int = 0) -> Tensor:
    """Small whole numbers: every sum of products is exact in every precision, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (s, d), generator=generator).double()


def error_of(deltas: Tensor, **more: Any) -> float:
    """The largest |G − G_exact|, relative to the lengths of the two rows."""
    exact = deltas.double() @ deltas.double().T
    lengths = exact.diagonal().sqrt()
    error: Tensor = (gramian(deltas, **more) - exact).abs() / (lengths[:, None] * lengths[None, :])
    return float(error.max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("s", "d"),
    [
        (1, 1),
        (1, 5000),
        (3, 1023),
        (3, 1024),
        (3, 1025),
        (2, 3 * 1024),
        (4, 3 * 1024 + 17),
        (40, 7),
    ],
)
def test_the_gramian_of_whole_numbers_is_exact_whatever_its_shape(
    s: int, d: int, dtype: torch.dtype
) -> None:
    numbers = whole_numbers(s, d)
    product = gramian(numbers.to(dtype))
    assert product.dtype == torch.float64
    assert torch.equal(product, numbers @ numbers.T)


@pytest.mark.parametrize("chunk", [1, 7, 64, 1024, 10**6])
def test_the_gramian_does_not_depend_on_the_chunks(chunk: int) -> None:
    numbers = whole_numbers(3, 500)
    assert torch.equal(gramian(numbers.float(), chunk=chunk), numbers @ numbers.T)


def test_chunks_are_added_up_beyond_single_precision() -> None:
    """Each chunk's sums fit in 24 bits, all of them together do not."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (3, 20 * 1024 + 3), generator=generator).double()
    exact = numbers @ numbers.T
    assert not torch.equal(exact.float().double(), exact)
    assert torch.equal(gramian(numbers.float()), exact)


def test_the_gramian_of_many_rows_goes_in_blocks() -> None:
    """With 1500 rows a block is one chunk, so that three of them and a rest are put together."""
    numbers = whole_numbers(1500, 3 * 16 + 5)
    assert torch.equal(gramian(numbers.float(), chunk=16), numbers @ numbers.T)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_what_a_kernel_in_double_precision_gives_is_not_computed_again(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = vectors(3).float()
    rows[1] *= scale
    exact = rows.double() @ rows.double().T
    monkeypatch.setattr(aggregate, "_gram_on_gpu", lambda deltas: exact)
    assert gramian(rows) is exact


def test_what_a_kernel_gives_that_is_not_finite_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = whole_numbers(3, 50)
    lost = torch.full((3, 3), torch.nan, dtype=torch.float64)
    monkeypatch.setattr(aggregate, "_gram_on_gpu", lambda deltas: lost)
    assert torch.equal(gramian(numbers.float()), numbers @ numbers.T)


@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["both signs", "one sign"])
def test_a_single_precision_gramian_is_nearly_exact_in_high_dimension(shift: float) -> None:
    """Measured 2e−8 at this size; one single-precision product has 1e−5."""
    deltas = (vectors(4, d=300_000) + shift).float()
    deltas[1] += 3 * deltas[0]
    exact = deltas.double() @ deltas.double().T
    assert error_of(deltas) < 1e-7
    assert float(((deltas @ deltas.T).double() - exact).abs().max() / exact.max()) > 1e-7


def test_a_double_precision_gramian_is_exact_to_rounding() -> None:
    deltas = vectors(3, d=2000)
    exact = [
        [math.fsum(x * y for x, y in zip(a, b, strict=True)) for b in deltas.tolist()]
        for a in deltas.tolist()
    ]
    lengths = deltas.norm(dim=1)
    error = (gramian(deltas) - torch.tensor(exact, dtype=torch.float64)).abs()
    assert float((error / (lengths[:, None] * lengths)).max()) < 1e-15


SCALES: Mapping[str, list[float]] = {
    "tiny": [1e-25, 1e-25, 1e-25],
    "huge": [1e25, 1e25, 1e25],
    "both": [1e-25, 1.0, 1e25],
    "near the ends of single precision": [1e-36, 1.0, 1e37],
    "with a row of zeros": [0.0, 1e-25, 1.0],
    "around where scaling begins": [0.9e-12, 1.1e12, 0.9e12],
}


@pytest.mark.parametrize("case", SCALES)
def test_rows_of_extreme_scale_neither_overflow_nor_vanish_in_single_precision(case: str) -> None:
    scale = torch.tensor(SCALES[case])
    deltas = vectors(3, d=3000).float() * scale[:, None]
    exact = deltas.double() @ deltas.double().T
    product = gramian(deltas)
    assert bool(torch.isfinite(product).all())
    lengths = deltas.double().norm(dim=1)
    bound = 3e-7 * lengths[:, None] * lengths  # A single chunk's own rounding: measured 7e−8.
    assert bool(((product - exact).abs() <= bound).all())
    assert torch.equal(product.diagonal() > 0, scale > 0)


def test_scaling_a_row_by_a_power_of_two_scales_the_gramian_exactly() -> None:
    deltas = vectors(3, d=3000).float()
    scale = torch.tensor([2.0**-90, 1.0, 2.0**90], dtype=torch.float64)
    scaled = gramian((deltas.double() * scale[:, None]).float())
    assert torch.equal(scaled, gramian(deltas) * scale[:, None] * scale)


def test_a_row_below_the_normal_numbers_of_single_precision_does_not_vanish() -> None:
    deltas = vectors(2, d=500).float()
    deltas[0] *= 1e-40
    assert error_of(deltas) < 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_gramian_is_that_of_the_numbers_half_precision_holds(
    dtype: torch.dtype,
) -> None:
    deltas = vectors(3, d=5000).to(dtype)
    assert error_of(deltas) < 3e-7


def test_bfloat16_rows_of_extreme_scale_keep_their_products() -> None:
    deltas = (vectors(2, d=500) * torch.tensor([[1e-25], [1e25]], dtype=torch.float64)).bfloat16()
    assert error_of(deltas) < 3e-7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_rows_or_columns_there_is_an_empty_or_zero_gramian(dtype: torch.dtype) -> None:
    assert gramian(torch.zeros(0, 5, dtype=dtype)).shape == (0, 0)
    assert torch.equal(gramian(torch.zeros(2, 0, dtype=dtype)), torch.zeros(2, 2).double())


def test_the_gramian_leaves_the_deltas_alone() -> None:
    deltas = vectors(2, d=50).float() * torch.tensor([[1e-25], [1e25]])
    before = deltas.clone()
    gramian(deltas)
    assert torch.equal(deltas, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_the_gramian_on_a_gpu_is_exact_whatever_precision_the_model_trains_in(
    precision: str,
) -> None:
    """TF32 has ten bits after the point, and 1 + 2⁻¹² is one in it."""
    deltas = torch.full((2, 5000), 1 + 2**-12)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        product = gramian(deltas.cuda())
    finally:
        torch.set_float32_matmul_precision(before)
    assert product.device.type == "cpu"
    exact = deltas.double() @ deltas.double().T
    assert float(((product - exact) / exact).abs().max()) < 1e-6
