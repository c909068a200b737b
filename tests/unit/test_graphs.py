"""Where graphs of steps lay out their samples; the graphs themselves are in test_gpu.py."""

from __future__ import annotations

import torch

from fmol.data import TensorSamples
from fmol.engines.graphs import GraphMemory
from fmol.engines.pool import Pool
from fmol.engines.schedule import RowStage, Stage, copy_stage


def stage(clients: int, counts: bool = True) -> Stage:
    inputs = {"image": torch.randn(3, clients, 4, 5), "mask": torch.rand(3, clients, 4) > 0.5}
    sizes = torch.randint(1, 5, (3, clients)) if counts else None
    return Stage(inputs, torch.randint(0, 9, (3, clients, 4)), sizes)


def equal(a: Stage | RowStage, b: Stage | RowStage) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a.tensors, b.tensors, strict=True)
    )


def test_a_stage_in_the_common_place_is_the_same_one() -> None:
    given = stage(6)
    assert equal(GraphMemory().lay_out(given), given)


def test_a_smaller_stage_takes_the_place_of_a_larger_one() -> None:
    memory = GraphMemory()
    large, small = stage(6), stage(2, counts=False)
    first = memory.lay_out(large)
    second = memory.lay_out(small)
    assert equal(second, small)
    assert second.tensors[0].data_ptr() == first.tensors[0].data_ptr()
    copy_stage(first, large)
    assert equal(first, large)


def test_a_larger_stage_takes_a_place_of_its_own_and_leaves_the_last_one() -> None:
    memory = GraphMemory()
    small, large = stage(2), stage(6)
    first = memory.lay_out(small)
    assert equal(memory.lay_out(large), large)
    assert equal(first, small)


def test_rows_of_a_pool_that_stays_give_what_is_laid_out_otherwise() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {"image": torch.randn(20, 3, generator=generator)}
    pool = Pool(["one"], [TensorSamples(inputs, torch.arange(20))])
    rows = torch.randint(0, 20, (3, 2, 4), generator=generator)
    laid, by_row = Stage(*pool.gather(rows), None), RowStage(pool, rows, None)
    placed = GraphMemory().lay_out(by_row)
    lanes = torch.tensor([0, 0, 1])
    for step in range(3):
        for width in (4, 2):
            a, b = laid.at(step, width, lanes), placed.at(step, width, lanes)
            assert torch.equal(a[0]["image"], b[0]["image"])
            assert torch.equal(a[1], b[1])
    copy_stage(placed, RowStage(pool, rows.flip(0), None))
    assert torch.equal(placed.at(0, 4, lanes)[1], laid.at(2, 4, lanes)[1])


def test_pools_are_of_one_kind_where_what_is_recorded_with_one_is_right_for_the_other() -> None:
    def pool(width: int, stays: bool) -> Pool:
        made = Pool(["one"], [TensorSamples(torch.zeros(4, width), torch.zeros(4))])
        made.stays = stays
        return made

    assert pool(3, False).kind == pool(3, False).kind
    assert pool(3, False).kind != pool(2, False).kind
    one, other = pool(3, True), pool(3, True)  # Both are kept, so they lie in different places.
    assert one.kind == one.kind
    assert one.kind != other.kind
