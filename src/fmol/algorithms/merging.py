"""Dense layers merged as a least-squares problem, in place of a mean over the clients.

After many local steps a client's layer is right for the inputs that it saw there, and may be anything
elsewhere. A mean takes all of it alike: what one client learned about its own samples is divided by the
number of clients. Here each client also sends the second moments of what went into the layer, and the
server takes the update `Δ` that does to everybody's inputs what their own did, as nearly as it can:

    Δ = argmin Σ_i Σ_n w_in ‖(Δ − Δ_i) a_in‖²  =  (Σ_i Δ_i G_i)(Σ_i G_i)⁻¹,   G_i = Σ_n w_in a_in a_inᵀ

(RegMean: Jin and others, ICLR 2023, who merge trained models once, with `w = 1`). A sample counts by
how wrong the model was on it when the round began, `w = floor + 1 − exp(−loss)`: what was right already
must not hold up what was not. It only works where clients' layers see like inputs, so the layers
below must agree: parameters of other layers are held where they are in such rounds.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fmol.aggregate import MeanFold, Means, Weighting
from fmol.data import tree_leaves
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply, Site, Transform
from fmol.errors import RefusedError
from fmol.layout import FlatModel, Layout, all_finite
from fmol.local import own_stream, pure_forward, step_count
from fmol.objectives import Objective
from fmol.precision import full_precision

__all__ = ["InputMoments", "MergeFold", "Merging", "dense_layers"]

MOMENTS = "moments."
"""Before a slot's name: the second moments of what went into the dense layers, in a reply."""
ROUNDING = torch.finfo(torch.float32).eps
"""How far below zero second moments may be, beside the sum of their diagonal: they are sent in single
precision, which takes half as much from them at most. Less than a ridge."""
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
    def moments(self) -> int:
        """How many different second moments there are."""
        return self.width * (self.width + 1) // 2

    def read(self, x: Tensor) -> Tensor:
        """The layer's part of a vector `[d]`, `[outputs, width]`."""
        weight = x[self.weight : self.weight + self.outputs * self.inputs]
        matrix = weight.reshape(self.outputs, self.inputs)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, x[self.bias : self.bias + self.outputs, None]], dim=1)

    def write(self, x: Tensor, matrix: Tensor) -> None:
        """Puts the layer's part into a vector `[d]`."""
        x[self.weight : self.weight + self.outputs * self.inputs] = matrix[
            :, : self.inputs
        ].reshape(-1)
        if self.bias is not None:
            x[self.bias : self.bias + self.outputs] = matrix[:, -1]


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


@dataclass(frozen=True)
class Merging:
    """Least squares in one round: what clients are told, what they send, and how it is folded."""

    layers: tuple[Dense, ...]
    layout: Layout
    floor: float
    ridge: float

    def local(self, local: LocalConfig) -> LocalConfig:
        """What a lane is told: only what is merged moves."""
        return replace(local, trained=self.trained)

    def held(self, vector: Tensor) -> Tensor:
        """A step `[d]` that leaves the other parameters where they are."""
        moving = self.layout.moving(self.trained, vector)
        return vector if moving is None else vector * moving

    @property
    def trained(self) -> str:
        """What moves, as a lane is told: patterns that only these layers' names match."""
        # Commas divide patterns, and have no way to be escaped.
        names = [glob.escape(layer.name).replace(",", "?") for layer in self.layers]
        return ",".join(f"{name}.*" if name else "*" for name in names)

    @property
    def transform(self) -> Transform:
        """By which clients send the moments along."""
        names, widths = zip(*((layer.name, layer.width) for layer in self.layers), strict=True)
        return InputMoments(names, widths, self.floor)

    def fold(
        self, slots: Sequence[str], like: Tensor, weighting: Weighting, **more: Any
    ) -> MeanFold:
        """What takes the clients' replies in."""
        return MergeFold(slots, like, weighting, layers=self.layers, ridge=self.ridge, **more)

    @property
    def note(self) -> str:
        """What is done otherwise than in other rounds."""
        names = ", ".join(f"`{layer.name}`" for layer in self.layers)
        size = sum(layer.outputs * layer.width for layer in self.layers)
        held = self.layout.size - size
        rest = f"; the other {held} parameters are held" if held else ""
        return f"the dense layers {names} are merged by least squares{rest}"


# ---- at a client -----------------------------------------------------------------------------


@dataclass(frozen=True)
class InputMoments:
    """Sends the weighted second moments of what goes into some layers, for every lane.

    They are of the model at the end of the lane's steps, on all of the client's samples.
    """

    layers: tuple[str, ...]
    widths: tuple[int, ...]
    """How many inputs each has, and one more where there is a bias."""
    floor: float

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        lanes = [lane for lane in ask.lanes if lane.slot in reply.deltas]
        with (
            site.model.mode(training=False),
            own_stream(ask, "moments", site),
            pure_forward(site),
            full_precision(),
        ):
            weights = self._weights(ask, lanes, site)
            extra = {
                MOMENTS + lane.slot: self._moments(
                    site, _end(ask, reply.deltas[lane.slot], site), weights[lane.slot]
                )
                for lane in lanes
            }
        return replace(reply, extra={**reply.extra, **extra})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        """The reply as it is, where what is beside every update can be second moments.

        Whether they are finite is looked at with all the rest.
        """
        size = sum(width * (width + 1) // 2 for width in self.widths)
        found: dict[str, Tensor] = {}
        for slot in reply.deltas:
            moments = reply.extra.get(MOMENTS + slot)
            if moments is None or moments.shape != (size,) or not moments.is_floating_point():
                seen = "none" if moments is None else f"{list(moments.shape)} of {moments.dtype}"
                raise ValueError(
                    f"beside the update `{slot}` of client `{reply.client}` there are moments {seen}, "
                    f"and [{size}] were asked for."
                )
            found[MOMENTS + slot] = moments = moments.float()
            for name, matrix in zip(self.layers, _matrices(moments, self.widths), strict=True):
                if all_finite(matrix) and not _are_moments(matrix):
                    raise ValueError(
                        f"what client `{reply.client}` sent as second moments of the inputs of layer "
                        f"`{name}` are none: they have a negative direction."
                    )
        return replace(reply, extra={**reply.extra, **found})

    @torch.no_grad()
    def _weights(self, ask: Ask, lanes: Sequence[Lane], site: Site) -> dict[str, Tensor]:
        """How much each sample counts for each lane, `[n]`: by its loss at `x`."""
        site.model.load(ask.x)
        parts: dict[str, list[Tensor]] = {lane.slot: [] for lane in lanes}
        for inputs, targets in _batches(site):
            outputs, size = site.model(inputs), _rows(inputs)
            for lane in lanes:
                total = torch.zeros(size, device=site.model.x.device)
                for name, share in lane.mixture.items():
                    total += share * self._wrong(site.objectives[name], outputs, targets, size)
                parts[lane.slot].append(total / sum(lane.mixture.values()))
        return {slot: torch.cat(each) for slot, each in parts.items()}

    def _wrong(self, objective: Objective, outputs: Any, targets: Any, size: int) -> Tensor:
        value = objective.loss(outputs, targets)
        values, valid = value if isinstance(value, tuple) else (value, None)
        if not isinstance(values, Tensor) or values.numel() != size:
            return torch.ones(size, device=_device(outputs))  # One number for all tells none apart.
        counts = self.floor + 1 - torch.exp(-values.reshape(size).float().clamp(min=0))
        return counts if valid is None else torch.where(valid.reshape(size), counts, 0)

    @torch.no_grad()
    def _moments(self, site: Site, x: Tensor, weights: Tensor) -> Tensor:
        """The second moments of all layers, one after the other; of each those above its diagonal, and
        on it."""
        site.model.load(x)
        layers = [site.model.module.get_submodule(name) for name in self.layers]
        # In double precision: single would leave them directions that are negative beyond rounding.
        sums = [
            torch.zeros(width, width, dtype=torch.float64, device=x.device) for width in self.widths
        ]
        called: set[int] = set()
        first = 0
        for inputs, _ in _batches(site):
            last = first + _rows(inputs)
            for place, seen in _inputs_of(site.model, layers, inputs):
                called.add(place)
                rows = seen.reshape(-1, seen.shape[-1]).to(sums[place])
                counts = weights[first:last].to(rows)
                if len(seen) != len(counts):  # Whose rows these are is not known.
                    counts = counts.mean().expand(len(rows))
                counts = counts.repeat_interleave(len(rows) // len(counts))[:, None]
                if rows.shape[1] < len(sums[place]):
                    rows = torch.cat([rows, torch.ones_like(counts)], dim=1)
                sums[place] += (counts * rows).T @ rows
            first = last
        for place, name in enumerate(self.layers):
            if place not in called:
                raise ValueError(
                    f"the model has a layer `{name}` that its forward pass does not call, so that "
                    "nobody knows its inputs. Call it as a module, or use FedAvg."
                )
        packed = torch.cat([each[_triangle(len(each), each.device)] for each in sums])
        return (packed / (weights > 0).sum().clamp(min=1)).float()


def _end(ask: Ask, delta: Tensor, site: Site) -> Tensor:
    """Where a lane came to, `[d]`."""
    assert ask.local is not None
    steps = 1 if ask.local.accumulate == "sum" else step_count(ask.local, len(site.samples))
    return ask.x.to(delta) - ask.local.lr * steps * delta


def _batches(site: Site) -> Iterator[tuple[Any, Any]]:
    size = site.evaluation_batch
    for start in range(0, len(site.samples), size):
        yield site.samples.span(start, min(start + size, len(site.samples)))


def _device(outputs: Any) -> torch.device:
    return tree_leaves(outputs)[0].device


def _rows(inputs: Any) -> int:
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


@cache
def _triangle(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(width, width, device=device)
    return rows, columns


# ---- at the server ---------------------------------------------------------------------------


class MergeFold(MeanFold):
    """Means as of a `MeanFold`, but for some layers: least squares over what clients saw there.

    Beside the sums of updates it holds those of `Δ_i G_i` and of `G_i` for each slot: as much again as
    the layers, and the square of their inputs. Nothing grows with the number of clients. A client
    that left a layer where it was, as the head of an objective that it does not hold, does not count
    there.
    """

    def __init__(
        self,
        slots: Sequence[str],
        like: Tensor,
        weighting: Weighting,
        *,
        layers: Sequence[Dense],
        ridge: float,
        **more: Any,
    ) -> None:
        super().__init__(slots, like, weighting, **more)
        self._layers, self._ridge = tuple(layers), ridge
        self._found = {
            (slot, layer): _Sums.of(layer, like.device) for slot in slots for layer in self._layers
        }

    def add(self, reply: Reply, ask: Ask) -> None:
        super().add(reply, ask)
        for lane in ask.lanes:
            if lane.slot not in reply.deltas:
                continue
            moments = reply.extra[MOMENTS + lane.slot].to(self._sums.device)
            widths = [layer.width for layer in self._layers]
            for layer, own in zip(self._layers, _matrices(moments, widths), strict=True):
                delta = layer.read(reply.deltas[lane.slot])
                if bool(delta.any()):
                    found = self._found[lane.slot, layer]
                    found.add(delta, own, self.weight_of(reply, lane))

    def add_rows(self, *arguments: Any, **named: Any) -> None:
        """Refused: rows come without moments."""
        raise TypeError("least squares need whole replies, one by one.")

    def result(self) -> Means:
        means = super().result()
        for row, slot in enumerate(means.slots):
            for layer in self._layers:
                try:
                    merged = self._found[slot, layer].merged(self._ridge)
                except ArithmeticError as error:
                    raise RefusedError(
                        f"what clients sent as second moments of the inputs of layer `{layer.name}` "
                        f"leaves no solution with a `ridge` of {self._ridge:g}: take a larger one, or "
                        "smaller steps."
                    ) from error
                if merged is not None:
                    layer.write(means.deltas[row], merged.to(means.deltas))
        return means


@dataclass
class _Sums:
    """Of one layer and slot over the clients, in double precision: of `Δ_i`, `Δ_i G_i` and `G_i`."""

    deltas: Tensor
    products: Tensor
    moments: Tensor
    share: float = 0.0

    @classmethod
    def of(cls, layer: Dense, device: torch.device) -> _Sums:
        none = torch.zeros(layer.outputs, layer.width, dtype=torch.float64, device=device)
        return cls(none, none.clone(), none.new_zeros(layer.width, layer.width))

    def add(self, delta: Tensor, moments: Tensor, share: float) -> None:
        delta, moments = delta.to(self.deltas), moments.to(self.moments)
        self.deltas.add_(delta, alpha=share)
        self.products.addmm_(delta, moments, alpha=share)
        self.moments.add_(moments, alpha=share)
        self.share += share

    def merged(self, ridge: float) -> Tensor | None:
        """`(Σ Δ_i G_i + ε mean_i Δ_i)(Σ G_i + ε I)⁻¹`, the mean where all inputs are zero; None where
        nobody moved the layer. Raises where it has no solution."""
        if not self.share:
            return None
        mean = self.deltas / self.share
        added = ridge * self.moments.diagonal().mean()
        if not float(added):
            return mean
        damped = self.moments + added * torch.eye(len(self.moments)).to(self.moments)
        factor, bad = torch.linalg.cholesky_ex(damped)
        if int(bad):
            raise ArithmeticError(
                "what least squares would have to divide by has negative directions"
            )
        return torch.cholesky_solve((self.products + added * mean).T, factor).T


def _matrices(moments: Tensor, widths: Sequence[int]) -> Iterator[Tensor]:
    """The symmetric matrices whose upper triangles stand one after the other."""
    sizes = [width * (width + 1) // 2 for width in widths]
    for width, part in zip(widths, torch.split(moments, sizes), strict=True):
        whole = part.new_zeros(width, width)
        rows, columns = _triangle(width, part.device)
        whole[rows, columns] = part
        whole[columns, rows] = part
        yield whole


def _are_moments(matrix: Tensor) -> bool:
    """Whether a symmetric matrix has no negative direction, but for rounding."""
    size = matrix.diagonal().double().sum()
    if float(size) <= 0:
        return not bool(matrix.any())
    added = ROUNDING * size * torch.eye(len(matrix)).to(matrix.device)
    return not int(torch.linalg.cholesky_ex(matrix.double() + added).info)
