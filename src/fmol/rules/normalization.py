"""What each update is divided by before a rule sees the Gramian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fmol.errors import LossError

__all__ = ["Normalize", "scales"]

Normalize = Literal["none", "l2", "loss", "loss+"]


def scales(
    normalize: Normalize, norms: Tensor, losses: Tensor | None, names: Sequence[str], round: int = 0
) -> Tensor:
    """`c_s > 0` `[S]` by which each update is divided before the rule: `u_s = Δ_s/c_s`.

    Floored far below the largest, so that a solved objective's vector grows and steps aside without
    leaving the range of numbers.

    >>> scales("l2", torch.tensor([3.0, 0.0]), None, ["price", "delay"])
    tensor([3.0000e+00, 3.0000e-08])
    """
    if normalize == "none":
        return torch.ones_like(norms)
    if normalize == "l2":
        values = norms
    else:
        for name, loss in zip(names, [] if losses is None else losses.tolist(), strict=True):
            if not loss >= 0:
                raise LossError(
                    f"round {round}: objective `{name}` has a training loss of {loss:g}, and "
                    f'`normalize="{normalize}"` needs losses that are known and not negative. Add a '
                    'constant to that loss or use `normalize="l2"`.'
                )
        assert losses is not None
        values = losses if normalize == "loss" else losses * norms
    top = float(values.max())
    return values.clamp(min=1e-8 * top) if top > 0 else torch.ones_like(norms)
