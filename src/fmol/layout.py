"""A model's trainable parameters as one flat vector `x` `[d]`, and back."""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fmol.precision import in_dtype

__all__ = ["FlatModel", "Layout", "all_finite", "squared_norm"]


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter stands in `x`. Tied parameters stand there once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        return cls(
            tuple(n for n, _ in named),
            tuple(tuple(p.shape) for _, p in named),
            tuple(p.dtype for _, p in named),
        )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(torch.Size(shape).numel()) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """`d`, the number of trainable parameters."""
        return sum(self.sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of `x`: the parameters' own, or the widest of them."""
        dtype = self.dtypes[0]
        for other in self.dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    @cached_property
    def digest(self) -> str:
        """A hash by which two parties can tell that they speak of the same `x`."""
        text = repr((self.names, self.shapes, [str(dtype) for dtype in self.dtypes]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """For each parameter how many units it has, and how many numbers each: a row of a matrix and a
        filter of a convolution is a unit, and a vector as a whole."""
        return tuple(
            (shape[0], size // shape[0]) if len(shape) > 1 and size else (1, size)
            for shape, size in zip(self.shapes, self.sizes, strict=True)
        )

    def unit_squares(self, rows: Tensor) -> Tensor:
        """The squared length of every unit of each of some vectors: `[n, U]` float64 from `[n, d]`.

        >>> layout = Layout(("w", "b"), ((2, 2), (2,)), (torch.float32,) * 2)
        >>> layout.unit_squares(torch.tensor([[1.0, 2.0, 0.0, 3.0, 1.0, 1.0]])).round()
        tensor([[5., 9., 2.]], dtype=torch.float64)
        """
        parts = torch.split(rows, list(self.sizes), dim=1)
        shaped = [
            part.reshape(len(rows), *unit) for part, unit in zip(parts, self.units, strict=True)
        ]
        norms = [torch.linalg.vector_norm(part, dim=2, dtype=torch.float64) for part in shaped]
        return torch.cat(norms, dim=1).square()

    def over_units(self, values: Tensor) -> Tensor:
        """What each unit has, for all of its numbers: `[n, d]` from `[n, U]`."""
        widths = [width for count, width in self.units for _ in range(count)]
        return values.repeat_interleave(torch.tensor(widths, device=values.device), dim=1)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """`x` as named parameters, views into it in its own dtype."""
        parts = torch.split(x, list(self.sizes))
        return {n: p.view(s) for n, s, p in zip(self.names, self.shapes, parts, strict=True)}

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Named parameters as a new vector `x` `[d]`."""
        return torch.cat([parameters[n].detach().reshape(-1).to(self.dtype) for n in self.names])

    def moving(self, trained: str, like: Tensor) -> Tensor | None:
        """1 where a parameter matches one of the patterns divided by commas, 0 elsewhere, `[d]`; None
        where all are trained."""
        return self.matching(trained.split(",")).to(like) if trained else None

    def matching(self, patterns: str | Sequence[str]) -> Tensor:
        """Boolean mask `[d]`: True where a parameter's name matches one of the shell-style patterns."""
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.names):
                raise ValueError(
                    f"pattern `{pattern}` matches no trainable parameter. "
                    f"The model has {', '.join(self.names[:8])}{', …' * (len(self.names) > 8)}."
                )
        return torch.cat(
            [
                torch.full((size,), any(fnmatch.fnmatchcase(name, p) for p in patterns))
                for name, size in zip(self.names, self.sizes, strict=True)
            ]
        )


class FlatModel:
    """A working copy of a module whose trainable parameters live in one flat buffer, `x`.

    So loading `x_t` is one copy and a gradient step is one operation on `[d]`, without a deep copy,
    a state dict or an optimizer object per trajectory.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, step_dtype: torch.dtype | None = None
    ) -> None:
        self.step_dtype = step_dtype
        self.module = copy.deepcopy(model).to(device).train()
        self.layout = Layout.of(self.module)
        named = dict(self.module.named_parameters())
        self._parameters = [named[name] for name in self.layout.names]
        self.x = self.layout.flatten(named)
        # Parameters narrower than `x` (a half-precision layer in a float32 model) need copies.
        self._narrow: list[tuple[nn.Parameter, Tensor]] = []
        for parameter, view in zip(
            self._parameters, self.layout.split(self.x).values(), strict=True
        ):
            if parameter.dtype == view.dtype:
                parameter.data = view
            else:
                self._narrow.append((parameter, view))
        self._zeros = self.x.new_zeros(0)

    def load(self, x: Tensor) -> None:
        """Sets the parameters to `x` `[d]`, by copy."""
        self.x.copy_(x)
        self._refresh()

    def step(self, direction: Tensor, lr: float) -> None:
        """`x ← x − lr · direction`."""
        self.x.add_(direction, alpha=-lr)
        self._refresh()

    def _refresh(self) -> None:
        for parameter, view in self._narrow:
            parameter.data.copy_(view)

    @contextmanager
    def mode(self, *, training: bool) -> Iterator[None]:
        """Within it the module is in training mode, or in evaluation mode.

        Nobody else changes it, so that its first flag tells: going through all layers of a small
        network takes as long as many of its steps.
        """
        before = self.module.training
        if before is not training:
            self.module.train(training)
        try:
            yield
        finally:
            if self.module.training is not before:
                self.module.train(before)

    def __call__(self, inputs: Any) -> Any:
        return self.module(**inputs) if isinstance(inputs, Mapping) else self.module(inputs)

    def step_outputs(self, inputs: Any) -> Any:
        """The outputs that a gradient step starts from; products in `step_dtype` where it is set."""
        with in_dtype(self.step_dtype, self.x.device) as widened:
            return widened(self(inputs))

    def gradient(self, loss: Tensor) -> Tensor:
        """∇loss as a new vector `[d]`; zero where the loss does not depend on a parameter."""
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        parts = [
            self._zero(size) if g is None else g.reshape(-1)
            for g, size in zip(gradients, self.layout.sizes, strict=True)
        ]
        return torch.cat([p.to(self.x.dtype) for p in parts] if self._narrow else parts)

    def _zero(self, size: int) -> Tensor:
        """Zeros for parameters that a loss does not touch, as the other objectives' heads."""
        if self._zeros.numel() < size:
            self._zeros = self.x.new_zeros(size)
        return self._zeros[:size]

    def buffer_versions(self) -> dict[str, tuple[Tensor, int]]:
        """How often each buffer was written; a forward pass that writes one is no function of x."""
        return {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}


def all_finite(vector: Tensor) -> bool:
    """Whether all its values are numbers. One pass: the extremes know of the others."""
    if vector.numel() == 0:
        return True
    if (
        vector.is_cuda
    ):  # One kernel; where there are several, starting them takes longer than they do.
        return math.isfinite(float(torch.linalg.vector_norm(vector, ord=math.inf)))
    return bool(torch.stack(torch.aminmax(vector)).isfinite().all())


def squared_norm(vector: Tensor) -> float:
    """‖v‖² in float64, whatever the dtype of `v`."""
    if vector.dtype != torch.float32 or not vector.is_cpu:
        return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2
    # Widened a piece at a time, which stays in the cache: ten times as fast as torch does it.
    wide = (piece.double() for piece in vector.reshape(-1).split(2**16))
    return sum(float(piece.dot(piece)) for piece in wide)
