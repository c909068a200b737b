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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fmol.aggregate import MeanFold, Means, Weighting
from fmol.algorithms.drift import Drift
from fmol.data import tree_leaves
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply, Site, Transform
from fmol.errors import RefusedError
from fmol.federation import Federation
from fmol.layout import FlatModel, Layout
from fmol.local import step_count
from fmol.objectives import Objective
from fmol.options import Positive, Range

__all__ = ["InputMoments", "MergeFold", "MergeOptions", "Merging", "dense_layers"]

MOMENTS = "moments."
"""Before a slot's name: the second moments of what went into the dense layers, in a reply."""
MOST_INPUTS = 2048
"""A layer with more is held: its moments would be larger than most models."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """How clients' updates become one."""

    merge: Literal["mean", "least-squares"] = "mean"
    """Their mean, or, for dense layers, the update that does to all clients' inputs most nearly what
    their own did; the other parameters are held in such rounds."""
    merge_after: Annotated[int, Range(least=0)] = 1
    """Rounds of means, in which everything is trained, before least squares."""
    merge_floor: Positive = 0.01
    """How much a sample counts whose loss is zero, beside one whose loss is large."""
    merge_ridge: Positive = 0.01
    """How much directions count that no input has, beside those that inputs have on average: there
    it is the mean."""

    def check_merging(
        self, federation: Federation, transforms: Sequence[Transform], drift: Drift
    ) -> None:
        """Raises where least squares cannot be: without a dense layer, or with what is not for them."""
        if self.merge == "mean":
            return
        if transforms:
            raise ValueError(
                f"`merge` is 'least-squares' and `transforms` has {transforms[0]!r}: what that does to "
                "updates would not be done to the moments beside them. Leave one of the two out."
            )
        if drift != "none":
            raise ValueError(
                f"`merge` is 'least-squares' and `drift_correction` is {drift!r}, which follows means. "
                "Leave one of the two out."
            )
        if not dense_layers(federation.model, federation.layout):
            raise ValueError(
                "`merge` is 'least-squares' and the model has no trainable `nn.Linear` of at most "
                f"{MOST_INPUTS} inputs. Use 'mean'."
            )

    def merging(self, federation: Federation, round: int) -> Merging | None:
        """What is done in this round in place of a mean; None for a mean."""
        if self.merge == "mean" or round < self.merge_after:
            return None
        layers = dense_layers(federation.model, federation.layout)
        return Merging(layers, federation.layout, self.merge_floor, self.merge_ridge)


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
        names = [f"{layer.name}.*" if layer.name else "*" for layer in self.layers]
        return replace(local, trained=",".join(names))

    @property
    def transform(self) -> Transform:
        """By which clients send the moments along."""
        size = sum(layer.moments for layer in self.layers)
        return InputMoments(tuple(layer.name for layer in self.layers), size, self.floor)

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
    size: int
    """Of all moments of a lane, which the server expects."""
    floor: float

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        lanes = [lane for lane in ask.lanes if lane.slot in reply.deltas]
        assert ask.local is not None
        site.model.module.eval()
        try:
            weights = self._weights(ask, lanes, site)
            extra = {
                MOMENTS + lane.slot: self._moments(
                    site, _end(ask, reply.deltas[lane.slot], site), weights[lane.slot]
                )
                for lane in lanes
            }
        finally:
            site.model.module.train()
        return replace(reply, extra={**reply.extra, **extra})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        """The reply as it is, where there are moments for every update in it."""
        for slot in reply.deltas:
            moments = reply.extra.get(MOMENTS + slot)
            if moments is None or moments.shape != (self.size,):
                seen = "none" if moments is None else f"moments of shape {list(moments.shape)}"
                raise ValueError(
                    f"beside the update `{slot}` of client `{reply.client}` there are {seen}, and "
                    f"[{self.size}] were asked for."
                )
        return reply

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
        if not isinstance(values, Tensor) or values.shape != (size,):
            return torch.ones(size, device=_device(outputs))  # One number for all tells none apart.
        counts = self.floor + 1 - torch.exp(-values.float().clamp(min=0))
        return counts if valid is None else torch.where(valid.bool(), counts, 0)

    @torch.no_grad()
    def _moments(self, site: Site, x: Tensor, weights: Tensor) -> Tensor:
        """The second moments of all layers, one after the other; of each those above its diagonal, and
        on it."""
        site.model.load(x)
        layers = [site.model.module.get_submodule(name) for name in self.layers]
        sums = [torch.zeros(_width(layer), _width(layer), device=x.device) for layer in layers]
        first = 0
        for inputs, _ in _batches(site):
            last = first + _rows(inputs)
            for place, seen in _inputs_of(site.model, layers, inputs):
                rows = seen.reshape(-1, seen.shape[-1]).to(sums[place])
                counts = weights[first:last]
                if len(rows) % len(counts):
                    counts = counts.mean().expand(len(rows))  # Whose rows these are is not known.
                counts = counts.repeat_interleave(len(rows) // len(counts))[:, None]
                if rows.shape[1] < len(sums[place]):
                    rows = torch.cat([rows, torch.ones_like(counts)], dim=1)
                sums[place] += (counts * rows).T @ rows
            first = last
        return torch.cat([each[_triangle(len(each), each.device)] for each in sums]) / max(first, 1)


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


def _width(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear)
    return layer.in_features + (layer.bias is not None)


def _inputs_of(
    model: FlatModel, layers: Sequence[nn.Module], inputs: Any
) -> list[tuple[int, Tensor]]:
    """What goes into each layer in a forward pass, as often as it is called."""
    seen: list[tuple[int, Tensor]] = []

    def listen(place: int, layer: nn.Module) -> Any:
        return layer.register_forward_pre_hook(lambda _, given: seen.append((place, given[0])))

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
    the layers, and the square of their inputs. Nothing grows with the number of clients.
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
        self._moments = {
            (slot, layer): torch.zeros(layer.width, layer.width, device=like.device)
            for slot in slots
            for layer in self._layers
        }
        self._products = {
            (slot, layer): torch.zeros(layer.outputs, layer.width, device=like.device)
            for slot in slots
            for layer in self._layers
        }
        self._shares = dict.fromkeys(slots, 0.0)

    def add(self, reply: Reply, ask: Ask) -> None:
        super().add(reply, ask)
        for lane in ask.lanes:
            if lane.slot not in reply.deltas:
                continue
            share = self.weight_of(reply, lane)
            self._shares[lane.slot] += share
            sizes = [layer.moments for layer in self._layers]
            parts = torch.split(reply.extra[MOMENTS + lane.slot], sizes)
            for layer, part in zip(self._layers, parts, strict=True):
                products = self._products[lane.slot, layer]
                own = _whole(part.to(products), layer.width)
                delta = layer.read(reply.deltas[lane.slot]).to(products)
                self._moments[lane.slot, layer].add_(own, alpha=share)
                products.addmm_(delta, own, alpha=share)

    def add_rows(self, *arguments: Any, **named: Any) -> None:
        """Refused: rows come without moments."""
        raise TypeError("least squares need whole replies, one by one.")

    def result(self) -> Means:
        means = super().result()
        for row, slot in enumerate(means.slots):
            for layer in self._layers:
                merged = self._merged(means.deltas[row], slot, layer)
                if merged is not None:
                    layer.write(means.deltas[row], merged.to(means.deltas))
        return means

    def _merged(self, mean: Tensor, slot: str, layer: Dense) -> Tensor | None:
        """`(Σ Δ_i G_i + ε Σ Δ_i)(Σ G_i + ε I)⁻¹`; None where the layer had no inputs."""
        moments = self._moments[slot, layer].double() / self._shares[slot]
        products = self._products[slot, layer].double() / self._shares[slot]
        ridge = self._ridge * moments.diagonal().mean()
        if not float(ridge) > 0:
            return None
        products += ridge * layer.read(mean).double()
        moments.diagonal().add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(moments)
        if int(failed):
            raise RefusedError(
                f"the moments that clients sent for the inputs of layer `{layer.name}` are none: their "
                "sum has a negative direction. Find out who sends such, or use `merge=mean`."
            )
        return torch.cholesky_solve(products.T, factor).T


def _whole(part: Tensor, width: int) -> Tensor:
    """The symmetric matrix whose upper triangle it is."""
    whole = part.new_zeros(width, width)
    rows, columns = _triangle(width, part.device)
    whole[rows, columns] = part
    whole[columns, rows] = part
    return whole
