"""A model's dense layers: where they lie in `x`, and what goes into them at a client."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fmol.data import tree_leaves
from fmol.engines.seam import Site
from fmol.layout import FlatModel, Layout

__all__ = ["MOST_INPUTS", "Dense", "dense_layers", "row_count", "second_moments", "site_batches"]

MOST_INPUTS = 2048
"""A layer with as many or more is held: its moments would be larger than most models."""


@dataclass(frozen=True)
class Dense:
    """A dense layer's place in the vector of all parameters."""

    name: str
    outputs: int
    inputs: int
    weight: int
    """Where its weights begin."""
    bias: int | None

    @property
    def width(self) -> int:
        """Inputs, and the one that is always 1 where there is a bias."""
        return self.inputs + (self.bias is not None)

    @property
    def pattern(self) -> str:
        """Matches the names of its parameters, and no others."""
        # Commas divide patterns, and have no way to be escaped.
        name = glob.escape(self.name).replace(",", "?")
        return f"{name}.*" if name else "*"

    def matches(self, patterns: str) -> bool:
        """Whether its name matches one of the shell-style patterns divided by commas."""
        wanted = (pattern.strip() for pattern in patterns.split(","))
        return any(fnmatchcase(self.name, pattern) for pattern in wanted if pattern)

    def read(self, x: Tensor) -> Tensor:
        """The layer's part of vectors `[…, d]`, `[…, outputs, width]`."""
        weight = x[..., self.weight : self.weight + self.outputs * self.inputs]
        matrix = weight.reshape(*x.shape[:-1], self.outputs, self.inputs)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, x[..., self.bias : self.bias + self.outputs, None]], dim=-1)

    def write(self, x: Tensor, matrix: Tensor) -> None:
        """Puts the layer's part into a vector `[d]`."""
        for part, own in self.parts(x, matrix):
            part.copy_(own)

    def add(self, x: Tensor, matrix: Tensor) -> None:
        """Adds to the layer's part of vectors `[…, d]`."""
        for part, own in self.parts(x, matrix):
            part.add_(own)

    def parts(self, x: Tensor, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of vectors `[…, d]`, each with what belongs there of `[…, outputs, width]`."""
        weight = x[..., self.weight : self.weight + self.outputs * self.inputs]
        yield weight, matrix[..., : self.inputs].reshape(weight.shape)
        if self.bias is not None:
            yield x[..., self.bias : self.bias + self.outputs], matrix[..., -1]


def dense_layers(model: nn.Module, layout: Layout) -> tuple[Dense, ...]:
    """The layers that can be merged: `nn.Linear` all of whose parameters are trained, and in no other.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    >>> [(d.name, d.outputs, d.inputs) for d in dense_layers(model, Layout.of(model))]
    [('2', 3, 8)]
    """
    starts, at = {}, 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        starts[name], at = at, at + size
    uses: dict[int, int] = {}
    modules = dict(model.named_modules())
    for module in modules.values():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = []
    for name, module in modules.items():
        if type(module) is not nn.Linear or module.in_features >= MOST_INPUTS:
            continue
        prefix = f"{name}." if name else ""
        named = [prefix + key for key, _ in module.named_parameters()]
        alone = all(uses[id(parameter)] == 1 for parameter in module.parameters())
        if not alone or not all(key in starts for key in named):
            continue
        bias = starts[prefix + "bias"] if module.bias is not None else None
        start = starts[prefix + "weight"]
        found.append(Dense(name, module.out_features, module.in_features, start, bias))
    return tuple(found)


@torch.no_grad()
def second_moments(
    site: Site,
    x: Tensor,
    names: Sequence[str],
    widths: Sequence[int],
    weights: Tensor | None = None,
) -> list[tuple[Tensor, int]]:
    """`Σ_n w_n a_n a_nᵀ` `[width, width]` over a client's samples, for each layer of these names; and
    over how many inputs, which are more than the samples where a layer is called on sequences.

    `a` is what goes into the layer where the model is at `x` `[d]`, with a 1 behind it where there is a
    bias; `weights` `[n]` are all 1 where they are left out. With several for each sample, `[n, C]`,
    there are as many sums, `[C, width, width]`. In double precision: single would leave directions
    that are negative beyond rounding. The model is as it is, in training mode or not.
    """
    site.model.load(x)
    layers = [site.model.module.get_submodule(name) for name in names]
    if weights is None:
        weights = torch.ones(len(site.samples), device=x.device)
    several = weights.shape[1:]
    sums = [
        torch.zeros(*several, width, width, dtype=torch.float64, device=x.device)
        for width in widths
    ]
    counted = [0] * len(sums)
    first = 0
    for inputs, _ in site_batches(site):
        last = first + row_count(inputs)
        for place, seen in _inputs_of(site.model, layers, inputs):
            rows = seen.reshape(-1, seen.shape[-1]).to(sums[place])
            counted[place] += len(rows)
            counts = weights[first:last].to(rows)
            if len(seen) != len(counts):  # Whose rows these are is not known.
                counts = counts.mean(0).expand(len(rows), *several)
            counts = counts.repeat_interleave(len(rows) // len(counts), dim=0)
            if rows.shape[1] < sums[place].shape[-1]:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            if not several:
                sums[place] += (counts[:, None] * rows).T @ rows
            for one, each in zip(sums[place], counts.T, strict=True) if several else ():
                one.addmm_((each[:, None] * rows).T, rows)
        first = last
    for name, count in zip(names, counted, strict=True):
        if not count:
            raise ValueError(
                f"the model has a layer `{name}` that its forward pass does not call, so that "
                "nobody knows its inputs. Call it as a module, or use FedAvg."
            )
    return list(zip(sums, counted, strict=True))


def site_batches(site: Site) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of all of a client's samples, a batch at a time."""
    size = site.evaluation_batch
    for start in range(0, len(site.samples), size):
        yield site.samples.span(start, min(start + size, len(site.samples)))


def row_count(inputs: Any) -> int:
    """How many samples there are in a batch's inputs."""
    return len(tree_leaves(inputs)[0])


def _inputs_of(
    model: FlatModel, layers: Sequence[nn.Module], inputs: Any
) -> list[tuple[int, Tensor]]:
    """What goes into each layer in a forward pass, as often as it is called."""
    seen: list[tuple[int, Tensor]] = []

    def listen(place: int, layer: nn.Module) -> Any:
        def hear(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            seen.append((place, given[0] if given else named["input"]))

        return layer.register_forward_pre_hook(hear, with_kwargs=True)

    hooks = [listen(place, layer) for place, layer in enumerate(layers)]
    try:
        model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
