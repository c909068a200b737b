"""What a rule sees, and what is the same for all: the context, and objectives that are protected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmol.bounded import guard
from fmol.minnorm import Mask, read_gramian, read_protected
from fmol.options import nearest

__all__ = [
    "Context",
    "Gramian",
    "Protected",
    "Rule",
    "by_name",
    "check_names",
    "needs_losses",
    "protect",
]

Gramian = Tensor | ArrayLike
"""The inner products of the updates, `[S, S]`."""
Protected = Tensor | Sequence[bool] | Mask | None
"""True for objectives that do not pull and may not be hurt, `[S]`; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rule may know beside the Gramian. Vectors are `[S]`, in the Gramian's order.

    >>> Context(names=("price", "delay"), round=3).losses is None
    True
    """

    names: tuple[str, ...]
    round: int = 0
    losses: Tensor | None = None
    """f_s(x_t) over the cohort, float64; None unless the rule sets `needs_losses`."""
    protected: Tensor | None = None
    """True for objectives at or below their target: not to pull, not to be hurt."""
    memory: MutableMapping[str, Tensor] = field(default_factory=dict)
    """The rule's own, kept from round to round and in checkpoints; write to it freely."""


class Rule(Protocol):
    """Gramian `[S, S]` float64 in, weights `[S]` float64 out.

    A rule with an attribute `needs_losses = True` finds the losses in its context.

    >>> longest: Rule = lambda gramian, context: 1.0 * (gramian.diag() == gramian.diag().max())
    >>> longest(torch.diag(torch.tensor([1.0, 4.0])), Context(names=("price", "delay")))
    tensor([0., 1.])
    """

    def __call__(self, gramian: Tensor, context: Context, /) -> Tensor: ...


def needs_losses(rule: Rule) -> bool:
    """Whether the rule asks for the losses at `x_t`.

    >>> from fmol.rules import MinNorm, SmoothTchebycheff
    >>> needs_losses(MinNorm()), needs_losses(SmoothTchebycheff())
    (False, True)
    """
    return bool(getattr(rule, "needs_losses", False))


def check_names(rule: object, names: Sequence[str]) -> None:
    """Raises where a rule has something for an objective that there is not.

    Its attribute `by_objective` names the options that are mappings from objectives; a rule of which it
    is made is in its attribute `rule`.

    >>> from fmol.rules import Fixed
    >>> check_names(Fixed({"price": 1.0}), ["price", "delay"])
    """
    for option in getattr(rule, "by_objective", ()):
        for name in getattr(rule, option) or {}:
            if name not in names:
                hint = nearest(name, names)
                raise ValueError(
                    f"`{option}` of the rule {type(rule).__name__} names objective `{name}`, which "
                    "there is not. "
                    + (f"Did you mean `{hint}`?" if hint else f"There are {', '.join(names)}.")
                )
    inner = getattr(rule, "rule", None)
    if inner is not None:
        check_names(inner, names)


def protect(
    gramian: Gramian, protected: Protected, weigh: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The weights `[S]` of `weigh(gramian, rows)`, asked about the active objectives alone, with
    multipliers of the protected ones that bend the direction to the nearest that does not hurt them.

    So every rule honours protected objectives, also one that knows nothing of them.

    >>> gramian = [[1.0, -1.0], [-1.0, 4.0]]
    >>> protect(gramian, [False, True], lambda own, rows: torch.ones(len(own)))
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    correlation, norms = read_gramian(gramian)
    mask = read_protected(protected, len(norms))
    matrix = torch.as_tensor(gramian).detach().cpu().double()
    if mask is None:
        return weigh(matrix, torch.arange(len(norms))).double()
    rows = torch.from_numpy(~mask).nonzero().flatten()
    weights = torch.zeros(len(norms), dtype=torch.float64)
    weights[rows] = weigh(matrix[rows][:, rows], rows).double()
    return torch.from_numpy(guard(correlation, norms, weights.numpy(), mask))


def by_name(
    owner: str,
    option: str,
    given: Mapping[str, float],
    names: Sequence[str],
    otherwise: float | None = None,
) -> Tensor:
    """The value of each of `names` `[S]`, float64; `otherwise` where none is given.

    >>> by_name("Fixed", "weight", {"price": 2.0}, ["price", "delay"], otherwise=1.0)
    tensor([2., 1.], dtype=torch.float64)
    """
    missing = [name for name in names if name not in given]
    if missing and otherwise is None:
        raise ValueError(
            f"`{owner}` has no {option} for objective `{missing[0]}`. Give one to every objective."
        )
    return torch.tensor([given.get(name, otherwise) for name in names], dtype=torch.float64)
