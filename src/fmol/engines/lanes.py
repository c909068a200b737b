"""Many lanes as one: their models side by side, and their losses.

Lanes are independent of one another, so the gradient of the sum of all their losses with respect to
their stacked parameters `X` `[L, d]` is every lane's own gradient: one forward and one backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from fmol.data import tree_leaves, tree_map
from fmol.engines.layers import LaneLayers
from fmol.evaluation import batch_mean, check_mask
from fmol.layout import FlatModel, Layout
from fmol.objectives import Objective
from fmol.precision import in_dtype

__all__ = [
    "Batch",
    "LaneModel",
    "NotBatchedError",
    "Pull",
    "outputs_of",
    "pull_losses",
]


@dataclass(frozen=True)
class Batch:
    """One step's samples of `L` lanes, each padded to `B`: nests of tensors `[L, B, …]`."""

    inputs: Any
    targets: Any
    sizes: tuple[int, ...]
    """How many of each lane's samples are its own; the others only fill up."""
    own: Tensor | None = None
    """Which those are, `[L, B]`; None where all are."""

    @property
    def width(self) -> int:
        return tree_leaves(self.inputs)[0].shape[1]


@dataclass(frozen=True)
class Pull:
    """One objective among the lanes: who descends it, and how much it weighs there."""

    objective: Objective
    lanes: tuple[int, ...]
    weights: tuple[float, ...]
    _kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Indices that steps use: what is recorded reads them where they lie, so they stay with it."""

    def index(self, lanes: tuple[int, ...], device: torch.device) -> Any:
        """Some lanes as an index, kept for as long as this is."""
        key = (lanes, device)
        if key not in self._kept:
            self._kept[key] = _index(lanes, device)
        return self._kept[key]


class LaneModel:
    """A module evaluated for many parameter vectors at once."""

    def __init__(self, model: FlatModel, say: Callable[[str], None] = lambda text: None) -> None:
        self._model, self._say = model, say
        self._module = model.module
        trainable = set(model.layout.names)
        self._fixed = {
            name: value
            for name, value in [*self._module.named_parameters(), *self._module.named_buffers()]
            if name not in trainable
        }

    @property
    def layout(self) -> Layout:
        """Where each parameter stands."""
        return self._model.layout

    @property
    def step_dtype(self) -> torch.dtype | None:
        """What products of a step are taken in; None is the parameters' own dtype."""
        return self._model.step_dtype

    @property
    def draws(self) -> bool:
        """Whether the module draws at random in the mode it is in."""
        return self.training and any(
            isinstance(layer, nn.modules.dropout._DropoutNd | nn.RReLU)
            for layer in self._module.modules()
        )

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self._module.training

    def outputs(self, X: Tensor, inputs: Any) -> Any:
        """What every lane's module returns for its own inputs `[L, B, …]`: nests of `[L, B, …]`."""
        layout = self._model.layout
        parts = torch.split(X, list(layout.sizes), dim=1)
        stacked = {
            name: part.reshape(len(X), *shape).to(dtype)
            for name, shape, dtype, part in zip(
                layout.names, layout.shapes, layout.dtypes, parts, strict=True
            )
        }

        def one(parameters: dict[str, Tensor], mine: Any) -> Any:
            arguments = ((), mine) if isinstance(mine, Mapping) else ((mine,), {})
            return functional_call(self._module, {**self._fixed, **parameters}, *arguments)

        # Attention's fused kernels know nothing of lanes; written out as products, it is batched.
        with (
            LaneLayers(self._say),
            sdpa_kernel(SDPBackend.MATH),
            in_dtype(self.step_dtype, X.device) as widened,
        ):
            return widened(vmap(one, randomness="different")(stacked, inputs))


# ---- losses ----------------------------------------------------------------------------------


class NotBatchedError(RuntimeError):
    """A loss that cannot be computed for all lanes at once."""


def outputs_of(pulls: Sequence[Pull], outputs: Any) -> list[Any]:
    """What each objective's own lanes returned, nests of `[n, B, …]`, from that of all `[L, B, …]`.

    Where no lane is of two objectives, as one division of the whole: a part taken by itself has a
    gradient as large as the whole, and there are as many parts as objectives.
    """
    leaves, spec = tree_flatten(outputs)
    size = len(leaves[0])
    lanes = tuple(pull.lanes for pull in pulls)
    if all(len(mine) == size for mine in lanes):
        return [outputs] * len(pulls)
    way = _division(lanes, size)
    if way is None:
        device = leaves[0].device
        return [tree_map(itemgetter(pull.index(pull.lanes, device)), outputs) for pull in pulls]
    parts = []
    for leaf in leaves:
        if way == "in turns":
            parts.append(leaf.unflatten(0, (-1, len(pulls))).unbind(1))
            continue
        if way == "by order":
            order = tuple(itertools.chain(*lanes))
            leaf = leaf.index_select(0, pulls[0].index(order, leaf.device))
        parts.append(leaf.split([len(mine) for mine in lanes]))
    return [tree_unflatten(list(each), spec) for each in zip(*parts, strict=True)]


@lru_cache(maxsize=64)
def _division(lanes: tuple[tuple[int, ...], ...], size: int) -> str | None:
    """How so many lanes are divided among objectives; None where some are of two, or of none.

    >>> _division(((0, 2), (1, 3)), 4), _division(((0, 1), (2,)), 3), _division(((0, 2), (1,)), 3)
    ('in turns', 'in a row', 'by order')
    """
    order = list(itertools.chain(*lanes))
    if order == list(range(size)):
        return "in a row"
    if sorted(order) != list(range(size)):
        return None
    each = len(lanes)
    in_turns = all(mine == tuple(range(s, size, each)) for s, mine in enumerate(lanes))
    return "in turns" if in_turns and size % each == 0 else "by order"


def pull_losses(
    pull: Pull, outputs: Any, batch: Batch, *, batched: bool
) -> tuple[Tensor, Tensor | None, bool]:
    """Each lane's mean loss `[n]` of one objective, whether it has a label, and if the loss masks.

    `outputs` are those of its own lanes. Where every sample has a label the second is None. `batched`
    calls the loss once for all lanes; otherwise it is called lane by lane, on its own samples alone,
    which every loss can do.
    """
    targets, own = batch.targets, batch.own
    if len(pull.lanes) < len(batch.sizes):
        rows = pull.index(pull.lanes, tree_leaves(batch.inputs)[0].device)
        targets = tree_map(itemgetter(rows), targets)
        own = None if own is None else own[rows]
    mine = outputs, targets
    if not batched:
        sizes = [batch.sizes[lane] for lane in pull.lanes]
        return _losses_one_by_one(pull.objective, mine, sizes)
    value: Any = vmap(pull.objective.loss, randomness="different")(*mine)
    masks = isinstance(value, tuple)
    values, valid = value if masks else (value, None)
    if values.dim() == 1 and batch.width > 1:
        if batch.own is not None:
            raise NotBatchedError("its loss is one number for a set, and sets differ in size")
        return values, None, masks
    values = values.reshape(len(pull.lanes), -1)
    if values.shape[1] != batch.width:
        raise NotBatchedError("its loss is not one value per sample")
    if valid is not None:
        check_mask(valid, f"the loss of objective `{pull.objective.name}`")
        valid = valid.reshape(len(pull.lanes), -1)
    if own is not None:
        valid = own if valid is None else valid & own
    if valid is None:
        return values.mean(1), None, masks
    counts = valid.sum(1)
    # As in `batch_mean`: where, not a product, and in single precision at least.
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.where(valid, values, 0).sum(1, dtype=wide)
    return total / counts.clamp(min=1), counts > 0 if masks else None, masks


@lru_cache(maxsize=256)
def _index(lanes: tuple[int, ...], device: torch.device) -> Any:
    """The lanes as an index; a slice where they are evenly apart, which copies nothing.

    Brought to the device once: a list would be brought there at every use, which nothing that is to
    become a CUDA graph may do.
    """
    if len(lanes) > 1:
        step = lanes[1] - lanes[0]
        if step > 0 and all(b - a == step for a, b in itertools.pairwise(lanes)):
            return slice(lanes[0], lanes[-1] + 1, step)
    return torch.tensor(lanes, device=device)


def _losses_one_by_one(
    objective: Objective, mine: tuple[Any, Any], sizes: Sequence[int]
) -> tuple[Tensor, Tensor | None, bool]:
    means, counts, masks = [], [], False
    for row, size in enumerate(sizes):
        outputs, targets = tree_map(itemgetter((row, slice(size))), mine)
        value = objective.loss(outputs, targets)
        masks = masks or isinstance(value, tuple)
        mean, count = batch_mean(value, size, f"the loss of objective `{objective.name}`")
        means.append(mean)
        counts.append(count)
    stacked = torch.stack(means)
    labelled = torch.tensor(counts, device=stacked.device) > 0 if masks else None
    return stacked, labelled, masks
