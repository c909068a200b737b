"""What the examples and the documentation's code have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _its_own_random_numbers_and_threads() -> Iterator[None]:
    """Scripts set torch's seed and threads; neither may leak into the tests that follow."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)
