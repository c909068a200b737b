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

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fmol.aggregate import MeanFold, Means, Weighting
from fmol.data import tree_leaves
from fmol.dense import Dense, row_count, second_moments, site_batches
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply, Site, Transform
from fmol.errors import RefusedError
from fmol.layout import Layout
from fmol.local import own_stream, pure_forward, step_count
from fmol.objectives import Objective
from fmol.precision import full_precision

__all__ = ["InputMoments", "MergeFold", "Merging", "Sums", "factored", "packed_rows", "unpacked"]

MOMENTS = "moments."
"""Before a slot's name: the second moments of what went into the dense layers, in a reply."""
ROUNDING = torch.finfo(torch.float32).eps
"""How far below zero second moments may be, beside the sum of their diagonal: they are sent in single
precision, which takes half as much from them at most. Less than a ridge."""


@dataclass(frozen=True)
class Merging:
    """Least squares in one round: what clients are told, what they send, and how it is folded."""

    layers: tuple[Dense, ...]
    layout: Layout
    floor: float | None
    """What a sample counts that is solved; None where all count alike."""
    ridge: float
    holds: bool = True
    """Whether the other parameters stay where they are; else they become means."""
    descent: Mapping[str, Any] = field(default_factory=dict)
    """What else lanes are told, as fields of a `LocalConfig`."""
    remark: str = ""
    """What else there is to say of it in the round's note."""

    def local(self, local: LocalConfig) -> LocalConfig:
        """What a lane is told: where others are held only what is merged moves."""
        return replace(local, trained=self.trained if self.holds else "", **self.descent)

    def held(self, vector: Tensor) -> Tensor:
        """A step `[d]` that leaves the parameters where they are that are held."""
        if not self.holds:
            return vector
        moving = self.layout.moving(self.trained, vector)
        return vector if moving is None else vector * moving

    @property
    def trained(self) -> str:
        """What moves, as a lane is told: patterns that only these layers' names match."""
        return ",".join(layer.pattern for layer in self.layers)

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
        held = self.layout.size - size if self.holds else 0
        rest = f"; the other {held} parameters are held" if held else ""
        what = f"layers {names} are" if len(self.layers) > 1 else f"layer {names} is"
        return f"the dense {what} merged by least squares{rest}{self.remark}"


# ---- at a client -----------------------------------------------------------------------------


@dataclass(frozen=True)
class InputMoments:
    """Sends the weighted second moments of what goes into some layers, for every lane.

    They are of the model at the end of the lane's steps, on all of the client's samples.
    """

    layers: tuple[str, ...]
    widths: tuple[int, ...]
    """How many inputs each has, and one more where there is a bias."""
    floor: float | None
    """What a sample counts that is solved; None where all that have a label count alike."""

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
                    ask, lane, site, _end(ask, reply.deltas[lane.slot], site), weights[lane.slot]
                )
                for lane in lanes
            }
        return replace(reply, extra={**reply.extra, **extra})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        """The reply as it is, where what is beside every update can be second moments.

        Whether they are finite is looked at with all the rest.
        """
        names, widths = zip(*self.sent, strict=True)
        size = sum(width * (width + 1) // 2 for width in widths)
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
            good = torch.cat([_are_moments(each) for each in _alike(moments, widths)])
            for name, each in zip(names, good.tolist(), strict=True):
                if not each:
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
        for inputs, targets in site_batches(site):
            outputs, size = site.model(inputs), row_count(inputs)
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
        counts = torch.ones(size, device=values.device)
        if self.floor is not None:
            counts += self.floor - torch.exp(-values.reshape(size).float().clamp(min=0))
        return counts if valid is None else torch.where(valid.reshape(size), counts, 0)

    @property
    def sent(self) -> list[tuple[str, int]]:
        """Of which layer each matrix is that is sent, and how wide it is."""
        return list(zip(self.layers, self.widths, strict=True))

    def _moments(self, ask: Ask, lane: Lane, site: Site, x: Tensor, weights: Tensor) -> Tensor:
        """What a lane that came to `x` `[d]` sends: the second moments of all layers, packed, over the
        number of samples that count."""
        sums = second_moments(site, x, self.layers, self.widths, weights)
        packed = torch.cat([packed_rows(each) for each, _ in sums])
        return (packed / (weights > 0).sum().clamp(min=1)).float()


def _end(ask: Ask, delta: Tensor, site: Site) -> Tensor:
    """Where a lane came to, `[d]`."""
    assert ask.local is not None
    steps = 1 if ask.local.accumulate == "sum" else step_count(ask.local, len(site.samples))
    return ask.x.to(delta) - ask.local.lr * steps * delta


def _device(outputs: Any) -> torch.device:
    return tree_leaves(outputs)[0].device


def packed_rows(matrix: Tensor) -> Tensor:
    """What is above the diagonal of a symmetric matrix, and on it."""
    return matrix[_triangle(len(matrix), matrix.device)]


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
        self._found = {(slot, layer): self.sums(layer) for slot in slots for layer in self._layers}

    def sums(self, layer: Dense) -> Sums:
        """What a layer's updates and moments are added up in."""
        return Sums.of(layer, self._sums.device)

    def moments(self, packed: Tensor) -> Iterator[Tensor]:
        """Each layer's second moments, of what a client sent."""
        return unpacked(packed, [layer.width for layer in self._layers])

    def add(self, reply: Reply, ask: Ask) -> None:
        super().add(reply, ask)
        for lane in ask.lanes:
            if lane.slot not in reply.deltas:
                continue
            moments = self.moments(reply.extra[MOMENTS + lane.slot].to(self._sums.device))
            for layer, own in zip(self._layers, moments, strict=True):
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
                found = self._found[slot, layer]
                try:
                    merged = found.merged(self._ridge)
                except ArithmeticError as error:
                    raise RefusedError(
                        f"what clients sent as second moments of the inputs of layer `{layer.name}` "
                        f"leaves no solution with a `ridge` of {self._ridge:g}: take a larger one, or "
                        "smaller steps."
                    ) from error
                if found.note:
                    self.notes = (*self.notes, found.note)
                if merged is not None:
                    layer.write(means.deltas[row], merged.to(means.deltas))
        return means


@dataclass
class Sums:
    """Of one layer and slot over the clients, in double precision: of `Δ_i`, `Δ_i G_i` and `G_i`."""

    deltas: Tensor
    products: Tensor
    moments: Tensor
    share: float = 0.0
    note: str = ""
    """What there is to say of how it was merged."""

    @classmethod
    def of(cls, layer: Dense, device: torch.device) -> Sums:
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
        return torch.cholesky_solve((self.products + added * mean).T, factored(damped)).T


def factored(matrices: Tensor) -> Tensor:
    """The Cholesky factors of some matrices; raises where one has a negative direction."""
    factors: Tensor
    factors, bad = torch.linalg.cholesky_ex(matrices)
    if bool(bad.any()):
        raise ArithmeticError("what least squares would have to divide by has negative directions")
    return factors


def unpacked(moments: Tensor, widths: Sequence[int]) -> Iterator[Tensor]:
    """The symmetric matrices whose upper triangles stand one after the other."""
    return itertools.chain.from_iterable(_alike(moments, widths))


def _alike(moments: Tensor, widths: Sequence[int]) -> Iterator[Tensor]:
    """The same, those that are as wide as the one before with it, `[k, width, width]`."""
    at = 0
    for width, run in itertools.groupby(widths):
        count, size = len(list(run)), width * (width + 1) // 2
        parts = moments[at : at + count * size].view(count, size)
        at += count * size
        whole = parts.new_zeros(count, width, width)
        rows, columns = _triangle(width, parts.device)
        whole[:, rows, columns] = parts
        whole[:, columns, rows] = parts
        yield whole


def _are_moments(matrices: Tensor) -> Tensor:
    """Whether symmetric matrices `[k, width, width]` have no negative direction beyond rounding `[k]`;
    what is not finite is left to who looks for that."""
    finite = matrices.isfinite().flatten(1).all(1)
    one = torch.eye(matrices.shape[1], dtype=torch.float64, device=matrices.device)
    doubled = torch.where(finite[:, None, None], matrices.double(), one)
    sizes = doubled.diagonal(dim1=1, dim2=2).sum(1)
    bad = torch.linalg.cholesky_ex(doubled + ROUNDING * sizes[:, None, None] * one).info
    return torch.where(sizes > 0, bad == 0, ~doubled.flatten(1).any(1))
