"""Many lanes as one: their models side by side, their losses, and K steps of all at once.

Lanes are independent of one another, so the gradient of the sum of all their losses with respect to
their stacked parameters `X` `[L, d]` is every lane's own gradient: one forward and one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fmol.data import tree_leaves, tree_map
from fmol.engines.seam import LocalConfig
from fmol.evaluation import batch_mean
from fmol.layout import FlatModel
from fmol.objectives import Objective

__all__ = [
    "Batch",
    "LaneModel",
    "LaneSteps",
    "NotBatchedError",
    "Pull",
    "batch_dependent",
    "pull_losses",
]


@dataclass(frozen=True)
class Batch:
    """One step's samples of `L` lanes, each padded to `B`: nests of tensors `[L, B, …]`."""

    inputs: Any
    targets: Any
    sizes: tuple[int, ...]
    """How many of each lane's samples are its own; the others only fill up."""

    @property
    def width(self) -> int:
        return tree_leaves(self.inputs)[0].shape[1]

    @property
    def padded(self) -> bool:
        return any(size != self.width for size in self.sizes)


@dataclass(frozen=True)
class Pull:
    """One objective among the lanes: who descends it, and how much it weighs there."""

    objective: Objective
    lanes: tuple[int, ...]
    weights: tuple[float, ...]


class LaneModel:
    """A module evaluated for many parameter vectors at once."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._module = model.module
        trainable = set(model.layout.names)
        self._fixed = {
            name: value
            for name, value in [*self._module.named_parameters(), *self._module.named_buffers()]
            if name not in trainable
        }

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
        with _LaneConvolutions(), sdpa_kernel(SDPBackend.MATH):
            return vmap(one, randomness="different")(stacked, inputs)


# ---- convolutions ----------------------------------------------------------------------------


class _LaneConvolutions(TorchFunctionMode):
    """Convolutions with weights of each lane's own, as products of matrices.

    Batched by `vmap` alone they become one convolution with a group per lane, which is slow
    everywhere.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.conv2d:
            call = _conv2d_call(*args, **(kwargs or {}))
            if call is not None:
                return _LaneConv2d.apply(*call)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _conv2d_call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """The arguments of a convolution that can be written as one product per lane, else None."""
    if groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return None
    return input, weight, bias, _pair(stride), _pair(padding), _pair(dilation)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _LaneConv2d(torch.autograd.Function):
    """`conv2d` that knows what to do when `vmap` gives every lane its own weights."""

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> Tensor:
        return torch.conv2d(input, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.has_bias, ctx.how = inputs[2] is not None, inputs[3:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.how
        shape = [weight.shape[0]] if ctx.has_bias else None
        mask = [*ctx.needs_input_grad[:2], ctx.has_bias]
        grads = torch.ops.aten.convolution_backward(
            grad, input, weight, shape, stride, padding, dilation, False, [0, 0], 1, mask
        )
        return (*grads, None, None, None)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> tuple[Tensor, int]:
        lanes = info.batch_size
        x = _lead(input, in_dims[0], lanes)
        flat = x.reshape(-1, *x.shape[2:])
        if in_dims[1] is None and (bias is None or in_dims[2] is None):
            out = torch.conv2d(flat, weight, bias, stride, padding, dilation)
            return out.reshape(lanes, -1, *out.shape[1:]), 0
        w = _lead(weight, in_dims[1], lanes)
        kernel = (w.shape[-2], w.shape[-1])
        size = [
            (x.shape[3 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1
            for i in (0, 1)
        ]
        columns = functional.unfold(flat, kernel, dilation, padding, stride)
        columns = columns.reshape(lanes, -1, *columns.shape[1:])
        out = torch.matmul(w.reshape(lanes, 1, w.shape[1], -1), columns)
        if bias is not None:
            out = out + _lead(bias, in_dims[2], lanes)[:, None, :, None]
        return out.reshape(lanes, x.shape[1], w.shape[1], *size), 0


def _lead(value: Tensor, dim: int | None, lanes: int) -> Tensor:
    """The tensor with its lanes first."""
    return value.expand(lanes, *value.shape) if dim is None else value.movedim(dim, 0)


# ---- losses ----------------------------------------------------------------------------------


def pull_losses(
    pull: Pull, outputs: Any, batch: Batch, batched: bool
) -> tuple[Tensor, Tensor, bool]:
    """Each lane's mean loss `[n]` of one objective, over how many samples, and whether it masks.

    `batched` calls the loss once for all lanes; otherwise lane by lane, on its own samples alone,
    which every loss can do.
    """
    rows = list(pull.lanes)
    whole = len(rows) == len(batch.sizes)
    mine = (outputs, batch.targets)
    if not whole:
        mine = tree_map(lambda leaf: leaf[rows], mine)
    sizes = [batch.sizes[row] for row in rows]
    if not batched:
        return _losses_one_by_one(pull.objective, mine, sizes)
    value: Any = vmap(pull.objective.loss, randomness="different")(*mine)
    device = tree_leaves(value)[0].device
    masks = isinstance(value, tuple)
    values, valid = value if masks else (value, None)
    if values.dim() == 1 and batch.width > 1:
        if batch.padded:
            raise NotBatchedError("its loss is one number for a set, and sets differ in size")
        return values, torch.tensor(sizes, device=device), masks
    values = values.reshape(len(rows), -1)
    if values.shape[1] != batch.width:
        raise NotBatchedError("its loss is not one value per sample")
    counts: Tensor | None = None
    if valid is not None:
        valid = valid.reshape(len(rows), -1).bool()
    if batch.padded:
        own = torch.arange(batch.width, device=device) < torch.tensor(sizes, device=device)[:, None]
        valid = own if valid is None else valid & own
    if valid is None:
        return values.mean(1), torch.tensor(sizes, device=device), masks
    counts = valid.sum(1)
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.where(valid, values, 0).sum(1, dtype=wide)
    return total / counts.clamp(min=1), counts, masks


class NotBatchedError(RuntimeError):
    """A loss that cannot be computed for all lanes at once."""


def _losses_one_by_one(
    objective: Objective, mine: tuple[Any, Any], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, bool]:
    means, counts, masks = [], [], False
    for row, size in enumerate(sizes):
        outputs, targets = tree_map(itemgetter((row, slice(size))), mine)
        value = objective.loss(outputs, targets)
        masks = masks or isinstance(value, tuple)
        mean, count = batch_mean(value, size, f"the loss of objective `{objective.name}`")
        means.append(mean)
        counts.append(count)
    stacked = torch.stack(means)
    return stacked, torch.tensor(counts, device=stacked.device), masks


# ---- steps -----------------------------------------------------------------------------------


@dataclass
class LaneSteps:
    """The trajectories of `L` lanes from `start` `[L, d]`: what `fmol.local.descend` does for one."""

    model: LaneModel
    pulls: Sequence[Pull]
    local: LocalConfig
    start: Tensor
    batched: Callable[[str], bool] = lambda objective: True
    """Whether an objective's loss is computed for all lanes in one call."""

    def __post_init__(self) -> None:
        self.X = self.start.clone()
        self.delta = torch.zeros_like(self.X)
        self.moved = torch.zeros(len(self.X), dtype=torch.int64, device=self.X.device)
        self.velocity = torch.zeros_like(self.X) if self.local.momentum else None
        self.masked: set[str] = set()
        self.weights = [
            torch.tensor(pull.weights, dtype=self.X.dtype, device=self.X.device)
            for pull in self.pulls
        ]
        self.rows = [torch.tensor(pull.lanes, device=self.X.device) for pull in self.pulls]

    def gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Every lane's gradient `[L, d]` on its batch, and whether a sample of it had a label `[L]`."""
        X = self.X.detach().requires_grad_()
        outputs = self.model.outputs(X, batch.inputs)
        total = X.new_zeros(())
        labelled = torch.zeros(len(X), dtype=torch.bool, device=X.device)
        for pull, weights, rows in zip(self.pulls, self.weights, self.rows, strict=True):
            means, counts, masks = self._losses(pull, outputs, batch)
            if masks:
                self.masked.add(pull.objective.name)
            # What has no label is left out, whatever its loss came to.
            total = total + torch.where(counts > 0, weights * means, 0).sum()
            labelled = (
                labelled.index_fill(0, rows[counts > 0], True)
                if masks
                else (labelled.index_fill(0, rows, True))
            )
        (gradient,) = torch.autograd.grad(total, X)
        return gradient, labelled

    def _losses(self, pull: Pull, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor, bool]:
        if self.batched(pull.objective.name):
            try:
                return pull_losses(pull, outputs, batch, batched=True)
            except NotBatchedError:
                pass  # One number for sets of different sizes: each by itself, then.
        return pull_losses(pull, outputs, batch, batched=False)

    def step(self, batch: Batch, active: Tensor | None, last: bool) -> None:
        """One step of the lanes that are `active` `[L]`, None for all; the `last` moves Δ alone."""
        local = self.local
        direction, moves = self.gradient(batch)
        if active is not None:
            moves = moves & active
        if local.clip_norm is not None:
            norm = torch.linalg.vector_norm(direction, dim=1)
            direction *= (local.clip_norm / norm.clamp(min=local.clip_norm))[:, None]
        if local.weight_decay:
            direction.add_(self.X, alpha=local.weight_decay)
        if local.proximal:
            direction.add_(self.X - self.start, alpha=local.proximal)
        if self.velocity is not None:
            moving = torch.where(
                moves[:, None], self.velocity * local.momentum + direction, self.velocity
            )
            self.velocity = direction = moving
        direction = torch.where(moves[:, None], direction, 0)
        self.delta += direction
        self.moved += moves
        if not last:
            self.X.add_(direction, alpha=-local.lr)


def batch_dependent(model: FlatModel, inputs: Any) -> bool:
    """Whether what the module says of a sample depends on the others in its batch.

    Told in evaluation mode from a few samples, by giving the first half of them alone.
    """
    size = tree_leaves(inputs)[0].shape[0]
    half = max(1, size // 2)
    model.module.eval()
    try:
        with torch.no_grad():
            together = tree_leaves(model(inputs))
            alone = tree_leaves(model(tree_map(itemgetter(slice(half)), inputs)))
    finally:
        model.module.train()
    return any(
        a.shape[:1] != (half,) or b.shape[:1] != (size,) or not _close(a, b[:half])
        for a, b in zip(alone, together, strict=True)
    ) or any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.module.modules())


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True))
