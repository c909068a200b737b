"""How products are rounded, and what that means for comparing steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fmol.precision import full_precision, rounding


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_steps_may_differ_by_what_their_products_are_rounded_to() -> None:
    torch.set_float32_matmul_precision("highest")
    exact = rounding(None)
    torch.set_float32_matmul_precision("high")
    assert 2**-10 < exact * 2 < rounding(None) < rounding(torch.bfloat16) < 1


def test_full_precision_is_given_back_also_after_an_error() -> None:
    torch.set_float32_matmul_precision("high")

    def fails() -> None:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.get_float32_matmul_precision() == "high"
