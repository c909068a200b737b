"""Where graphs of steps lay out their samples; the graphs themselves are in test_gpu.py."""

from __future__ import annotations

import torch

from fmol.engines.graphs import GraphMemory
from fmol.engines.schedule import Stage


def stage(clients: int, counts: bool = True) -> Stage:
    inputs = {"image": torch.randn(3, clients, 4, 5), "mask": torch.rand(3, clients, 4) > 0.5}
    sizes = torch.randint(1, 5, (3, clients)) if counts else None
    return Stage(inputs, torch.randint(0, 9, (3, clients, 4)), sizes)


def equal(a: Stage, b: Stage) -> bool:
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
    first.copy_(large)
    assert equal(first, large)


def test_a_larger_stage_takes_a_place_of_its_own_and_leaves_the_last_one() -> None:
    memory = GraphMemory()
    small, large = stage(2), stage(6)
    first = memory.lay_out(small)
    assert equal(memory.lay_out(large), large)
    assert equal(first, small)
