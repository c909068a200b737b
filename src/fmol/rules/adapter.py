"""TorchJD's Gramian weightings as rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fmol.options import check_options
from fmol.rng import torch_stream
from fmol.rules.seam import Context, Gramian, Protected, protect

__all__ = ["TorchJD", "torchjd"]

Name = Literal[
    "upgrad",
    "mgda",
    "dualproj",
    "pcgrad",
    "cagrad",
    "imtl-g",
    "aligned-mtl",
    "fairgrad",
    "krum",
    "random",
]
CLASSES: Mapping[str, str] = {
    "upgrad": "UPGradWeighting",
    "mgda": "MGDAWeighting",
    "dualproj": "DualProjWeighting",
    "pcgrad": "PCGradWeighting",
    "cagrad": "CAGradWeighting",
    "imtl-g": "IMTLGWeighting",
    "aligned-mtl": "AlignedMTLWeighting",
    "fairgrad": "FairGradWeighting",
    "krum": "KrumWeighting",
    "random": "RandomWeighting",
}
"""Those that need nothing but a Gramian and keep nothing from round to round."""

Weighting = Callable[[Tensor], Tensor]


def torchjd(
    gramian: Gramian,
    weighting: Name | Weighting = "upgrad",
    protected: Protected = None,
    **options: Any,
) -> Tensor:
    """The weights `[S]` of a weighting of TorchJD, named (with its own `options`) or passed.

    It sees the Gramian scaled to a trace of S, as if updates had a mean squared length of one:
    TorchJD's thresholds are absolute numbers, and below a trace of 1e-4 several of its weightings are
    the mean, or zero, without a word. Where a weighting depends on the scale, this is the scale it
    gets; the weights need not sum to one.

    >>> torchjd([[1e-12, 0.0], [0.0, 1e-12]], "mgda")
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    weigh = _find(weighting, options)
    return protect(gramian, protected, lambda own, rows: _weigh(weigh, own))


@dataclass(frozen=True)
class TorchJD:
    """A Gramian weighting of TorchJD (`pip install "fmol[torchjd]"`), by name or as an object.

    Common descent, and what happens at a solved objective: as the weighting has it, to within its
    own tolerances. One with a memory is refused, because its memory would not be in checkpoints;
    what one draws at random depends on the round alone.

    >>> TorchJD("mgda")(torch.eye(2), Context(names=("a", "b")))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    weighting: Name | Callable[[Tensor], Tensor] = "upgrad"
    """Which of them; some need packages that TorchJD names when they are missing."""
    options: Mapping[str, int | float | str] = field(default_factory=dict)
    """Its own options by name, such as `c` of CAGrad and `alpha` of FairGrad."""

    def __post_init__(self) -> None:
        check_options(self)

    def joint_problems(self) -> list[str]:
        """What is wrong with the weighting, or missing for it."""
        try:
            _find(self.weighting, self.options)
        except (ImportError, ValueError) as error:
            return [str(error)]
        return []

    @cached_property
    def _found(self) -> Weighting:
        return _find(self.weighting, self.options)

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor:
        def weigh(own: Tensor, rows: Tensor) -> Tensor:
            return _weigh(self._found, own, context.round)

        return protect(gramian, context.protected, weigh)


def _weigh(weigh: Weighting, gramian: Tensor, round: int = 0) -> Tensor:
    """The weights for a Gramian brought to a trace of S; equal ones where all updates are zero."""
    size = len(gramian)
    # By the largest first: the trace itself may be out of the range of numbers.
    top = float(gramian.diagonal().max())
    if not top > 0:
        return torch.full((size,), 1 / size, dtype=torch.float64)
    scaled = gramian / top
    scaled = scaled * (size / scaled.diagonal().sum())
    with torch.no_grad(), torch_stream(torch.device("cpu"), 0, "rule", round):
        weights = torch.as_tensor(weigh(scaled)).detach().cpu().double()
    if weights.shape != (size,) or not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"{_called(weigh)} returned {weights.tolist()} for {size} objectives. Use another rule; "
            "`upgrad` and `min-norm` are exact for every Gramian."
        )
    return weights


def _find(weighting: Any, options: Mapping[str, Any]) -> Weighting:
    """The weighting that is named, or the one that is passed; refused where it cannot be a rule."""
    if isinstance(weighting, str):
        weighting = _make(weighting, options)
    elif options:
        raise ValueError(
            f"`options` are for a weighting that is named, got {dict(options)} with "
            f"{_called(weighting)}. Set them where that is made."
        )
    if callable(getattr(weighting, "reset", None)):
        raise ValueError(
            f"`weighting` is a {_called(weighting)}, which keeps a memory that no checkpoint would "
            "have. Use one without, in the rule `Smoothed` where weights are to be smoothed."
        )
    found: Weighting = weighting
    return found


def _make(name: str, options: Mapping[str, Any]) -> Weighting:
    try:
        from torchjd import aggregation
    except ImportError as error:
        raise ImportError(
            '`TorchJD` needs torchjd. Install it with: pip install "fmol[torchjd]".'
        ) from error
    if name not in CLASSES:
        raise ValueError(f"`weighting` must be one of {list(CLASSES)}, got {name!r}.")
    try:
        made: Weighting = getattr(aggregation, CLASSES[name])(**options)
    except ImportError as error:  # TorchJD's own sentence ends with what to install.
        raise ImportError(f"`weighting` {name!r} needs more: {error}") from error
    except (TypeError, ValueError) as error:
        said = re.sub(r"^\w+\.__init__\(\) ", "", str(error)).rstrip(".")
        raise ValueError(
            f"`options` {dict(options)} do not fit `weighting` {name!r}: {said}. See TorchJD's "
            f"{CLASSES[name]}."
        ) from error
    return made


def _called(weighting: object) -> str:
    return getattr(weighting, "__name__", type(weighting).__name__)
