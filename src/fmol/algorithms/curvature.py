"""Least squares in what heads make of a layer, each output by how much the loss curves there.

Merging asks that a layer's outputs become, for everybody's inputs, what the clients' own updates made
of them. Where the next layers are heads that are held, what becomes of those outputs is known: a head's
output `c` reads `j_c · (W a)`. And how much it matters is known as well: at a sample on which the
loss is content with a wide margin, not at all; where classes compete, much. So with `κ > 0`

    Δ = argmin Σ_i Σ_n [ w_in ‖(Δ − Δ_i) a_in‖²  +  κ Σ_c q_inc (j_c · (Δ − Δ_i) a_in)² ]

with the second derivatives `q_inc` of client i's loss with respect to the softened output `c`, and the
heads' rows `j_c` brought to `Σ_c ‖j_c‖² = H` for a layer of `H` outputs. It is the Gauss–Newton
approximation of everybody's loss, but for three things: what lies between the layer and its heads is
taken for the identity, of the second derivatives by two outputs the mixed ones are left out, and
outputs are softened half as much as while clients descend. The sums are `C + 1` second moments in
place of one, and the equations

    Δ Σ_i G_i + κ Σ_c j_c j_cᵀ Δ Σ_i G_ic  =  Σ_i [Δ_i G_i + κ Σ_c j_c j_cᵀ Δ_i G_ic]

are solved by conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fmol.aggregate import Weighting
from fmol.algorithms.merging import (
    InputMoments,
    MergeFold,
    Merging,
    Sums,
    factored,
    packed_rows,
    unpacked,
)
from fmol.dense import Dense, row_count, second_moments, site_batches
from fmol.engines.gradients import first_line
from fmol.engines.seam import Ask, Lane, Site, Transform
from fmol.objectives import Objective

__all__ = ["CurvedMerging", "OutputMoments", "merge_curved", "read_by"]

CLOSE = 1e-10
"""How near conjugate gradients are to come, beside the right hand side."""
MOST_NUMBERS = 2**24
"""How many numbers clients may be asked for: 67 MB, and at the server four times that, since sums are
whole matrices in double precision, and as much again while they are solved."""
LEAST = 1e-30
"""Second derivatives below it count nothing: of classes that are beyond doubt."""
MOST_TURNS = 200
"""How many turns they are given; 10 to 100 are usual."""


def read_by(
    hidden: Sequence[Dense], heads: Sequence[Dense]
) -> tuple[Dense, tuple[Dense, ...]] | None:
    """The layer that heads read, and the heads that do; None where nobody can be told to.

    The last one that is as wide as what heads take in: where it is not what they read, merging weighs
    samples by what does not matter there, and is right all the same.
    """
    for layer in reversed(hidden):
        readers = tuple(head for head in heads if head.inputs == layer.outputs)
        if readers:
            return layer, readers
    return None


def merge_curved(
    plain: Merging, heads: Sequence[Dense], *, strength: float, softness: float
) -> Merging:
    """What `plain` does, with the layer that heads read merged by what they make of it; `plain` with a
    remark where that cannot be."""
    found = read_by(plain.layers, heads)
    if found is None:
        why = "no merged layer is as wide as what heads take in"
        return replace(plain, remark=f"; `head_weight` is left out, since {why}")
    read, readers = found
    numbers = sum(head.outputs for head in readers) * read.width * (read.width + 1) // 2
    if numbers > MOST_NUMBERS:
        why = f"its second moments would be {numbers:,} numbers a client"
        return replace(plain, remark=f"; `head_weight` is left out, since {why}")
    names = " and ".join(f"`{head.name}`" for head in readers)
    told = {each.name: getattr(plain, each.name) for each in fields(plain)}
    told["remark"] = f"; `{read.name}` by what {names} make of it"
    return CurvedMerging(**told, read=read, heads=readers, strength=strength, softness=softness)


@dataclass(frozen=True, kw_only=True)
class CurvedMerging(Merging):
    """Least squares in which one layer counts by what heads make of it."""

    read: Dense
    heads: tuple[Dense, ...]
    strength: float
    """κ."""
    softness: float
    """What outputs are divided by where the loss's second derivatives are taken."""

    @property
    def transform(self) -> Transform:
        plain = super().transform
        assert isinstance(plain, InputMoments)
        return OutputMoments(
            plain.layers,
            plain.widths,
            plain.floor,
            read=plain.layers.index(self.read.name),
            heads=tuple(head.name for head in self.heads),
            outputs=tuple(head.outputs for head in self.heads),
            softness=self.softness,
        )

    def fold(
        self, slots: Sequence[str], like: Tensor, weighting: Weighting, **more: Any
    ) -> MergeFold:
        rows = torch.cat([head.read(like)[:, : head.inputs] for head in self.heads])
        named = {"layers": self.layers, "ridge": self.ridge, **more}
        return CurvedFold(
            slots, like, weighting, read=self.read, rows=rows, strength=self.strength, **named
        )


# ---- at a client -----------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputMoments(InputMoments):
    """Sends, behind the second moments of what goes into all layers, those of the layer that heads
    read once more for each of their outputs, weighted by the loss's second derivative there.

    These are taken where the lane is half-way. They tell more of a client's data than `InputMoments`
    do: where one sample alone is in doubt between classes, what goes into the layer for that one. A
    site has to allow them by name.
    """

    read: int = 0
    """Which of `layers` it is."""
    heads: tuple[str, ...] = ()
    outputs: tuple[int, ...] = ()
    softness: float = 1.0

    @property
    def sent(self) -> list[tuple[str, int]]:
        again = (self.layers[self.read], self.widths[self.read])
        return [*super().sent, *[again] * sum(self.outputs)]

    def _moments(self, ask: Ask, lane: Lane, site: Site, x: Tensor, weights: Tensor) -> Tensor:
        plain = super()._moments(ask, lane, site, x, weights)
        curvatures = self._curvatures(ask, lane, site, (ask.x.to(x) + x) / 2)
        named = [self.layers[self.read]], [self.widths[self.read]]
        ((sums, _),) = second_moments(site, x, *named, curvatures)
        packed = torch.cat([packed_rows(each) for each in sums])
        return torch.cat([plain, (packed / (weights > 0).sum().clamp(min=1)).float()])

    def _curvatures(self, ask: Ask, lane: Lane, site: Site, x: Tensor) -> Tensor:
        """The second derivatives of a lane's loss with respect to each of the heads' softened outputs,
        at each sample, `[n, C]`; none is below zero."""
        site.model.load(x)
        found = []
        for inputs, targets in site_batches(site):
            size = row_count(inputs)
            outputs, given = self._soften(site, inputs)
            with torch.enable_grad():
                total = torch.zeros((), device=x.device)
                for name, share in lane.mixture.items():
                    total = total + share * _sum(site.objectives[name], outputs, targets, size)
                total = total / sum(lane.mixture.values())
                bends = [
                    bend
                    for name, count in zip(self.heads, self.outputs, strict=True)
                    for bend in self._bends(total, given[name], count, size, lane)
                ]
            found.append(torch.stack(bends, dim=1))
        second = torch.cat(found)
        # Numbers near the least that single precision has would be sent without most of their digits.
        # What is no number stays, and is refused with the update.
        return torch.where(second < LEAST, 0, second)

    def _soften(self, site: Site, inputs: Any) -> tuple[Any, dict[str, list[Tensor]]]:
        """The model's outputs where what heads give is softened, and what each gave so at any call."""
        given: dict[str, list[Tensor]] = {name: [] for name in self.heads}

        def soften(name: str, _: Any, __: Any, out: Tensor) -> Tensor:
            torch.set_grad_enabled(True)  # From here on: of what goes before nothing is kept.
            given[name].append((out.detach() / self.softness).requires_grad_())
            return given[name][-1].clone()  # Which the model may change in place.

        module = site.model.module
        hooks = [
            module.get_submodule(name).register_forward_hook(partial(soften, name))
            for name in self.heads
        ]
        try:
            with torch.no_grad():
                outputs = site.model(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return outputs, given

    def _bends(
        self, total: Tensor, given: Sequence[Tensor], count: int, size: int, lane: Lane
    ) -> list[Tensor]:
        """For each output of a head `[n]`; nothing where nobody calls it, or no loss goes by it."""
        bends = [torch.zeros(size, device=total.device) for _ in range(count)]
        if not given:
            return bends
        for out, slope in zip(given, _slopes(total, given, lane), strict=True):
            for column in range(count):
                (second,) = _slopes(slope[..., column].sum(), [out], lane)
                bend = second[..., column].to(bends[column])
                if len(bend) == size:  # Called on sequences, it gives several rows for each sample.
                    bends[column] += bend.reshape(size, -1).mean(1)
                else:  # Whose rows these are is not known.
                    bends[column] += bend.mean()
        return bends


def _slopes(total: Tensor, given: Sequence[Tensor], lane: Lane) -> Sequence[Tensor]:
    """The derivatives of a sum of losses, or of their derivatives; zero where it goes by others."""
    if not total.requires_grad:
        return [torch.zeros_like(each) for each in given]
    try:
        return torch.autograd.grad(total, list(given), create_graph=True, materialize_grads=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        names = ", ".join(f"`{name}`" for name in lane.mixture)
        raise ValueError(
            f"the losses of {names} have no second derivatives ({first_line(error)}), and "
            "`head_weight` goes by them. Set it to 0."
        ) from error


def _sum(objective: Objective, outputs: Any, targets: Any, size: int) -> Tensor:
    """The sum of an objective's losses over those of a batch's samples that have a label for it."""
    value = objective.loss(outputs, targets)
    values, valid = value if isinstance(value, tuple) else (value, None)
    values = torch.as_tensor(values)
    if valid is not None:
        values = torch.where(valid.reshape(values.shape), values, 0)
    return values.sum() if values.numel() == size else size * values.sum()


# ---- at the server ---------------------------------------------------------------------------


class CurvedFold(MergeFold):
    """A `MergeFold` that counts one layer by what heads make of it.

    For that layer it holds as many second moments more as heads have outputs.
    """

    def __init__(
        self,
        slots: Sequence[str],
        like: Tensor,
        weighting: Weighting,
        *,
        read: Dense,
        rows: Tensor,
        strength: float,
        **more: Any,
    ) -> None:
        self._read, self._strength = read, strength
        rows = rows.double()
        # So that κ means the same however large the heads' numbers are.
        size = rows.square().sum() / rows.shape[1]
        self._rows = rows / size.sqrt() if float(size) else rows
        super().__init__(slots, like, weighting, **more)

    def sums(self, layer: Dense) -> Sums:
        plain = super().sums(layer)
        if layer != self._read:
            return plain
        return CurvedSums(
            plain.deltas, plain.products, plain.moments, rows=self._rows, strength=self._strength
        )

    def moments(self, packed: Tensor) -> Iterator[Tensor]:
        widths = [layer.width for layer in self._layers] + [self._read.width] * len(self._rows)
        found = list(unpacked(packed, widths))
        plain, curved = found[: len(self._layers)], found[len(self._layers) :]
        for layer, own in zip(self._layers, plain, strict=True):
            yield torch.stack([own, *curved]) if layer == self._read else own


@dataclass(kw_only=True)
class CurvedSums(Sums):
    """`Sums` of a layer that heads read, with those of `G_ic` for each of their outputs."""

    rows: Tensor
    """`j_c` `[C, H]`."""
    strength: float
    curved: Tensor = field(init=False)
    """`Σ_i G_ic` `[C, width, width]`."""
    pulled: Tensor = field(init=False)
    """`Σ_i j_c · Δ_i G_ic` `[C, width]`."""

    def __post_init__(self) -> None:
        width = len(self.moments)
        self.curved = self.moments.new_zeros(len(self.rows), width, width)
        self.pulled = self.moments.new_zeros(len(self.rows), width)

    def add(self, delta: Tensor, moments: Tensor, share: float) -> None:
        super().add(delta, moments[0], share)
        own = moments[1:].to(self.curved)
        self.curved.add_(own, alpha=share)
        self.pulled.add_(_each(self.rows @ delta.to(self.deltas), own), alpha=share)

    def merged(self, ridge: float) -> Tensor | None:
        """The solution of the equations above, with a ridge in each of the moments."""
        start = super().merged(ridge)
        sizes = self.curved.diagonal(dim1=1, dim2=2).mean(1)
        if start is None or not bool(sizes.any()):
            return start
        mean = self.deltas / self.share
        added = ridge * self.moments.diagonal().mean()
        identity = torch.eye(len(self.moments)).to(self.moments)
        system = _System(
            self.moments + added * identity, self.curved, ridge * sizes, self.rows, self.strength
        )
        pulled = self.pulled + ridge * sizes[:, None] * (self.rows @ mean)
        right = self.products + added * mean + self.strength * self.rows.T @ pulled
        found, apart = system.solved(right, start)
        if apart > CLOSE:
            self.note = (
                f"what heads make of a layer was merged to {apart:.1e} in {MOST_TURNS} turns, and not "
                f"to {CLOSE:g}: the clients' second moments are of very unlike sizes"
            )
        return found


@dataclass(frozen=True)
class _System:
    """`Δ ↦ Δ S + κ Σ_c j_c j_cᵀ Δ (S_c + ε_c I)`, positive definite, and what solves it."""

    plain: Tensor
    curved: Tensor
    ridges: Tensor
    rows: Tensor
    strength: float

    def __call__(self, delta: Tensor) -> Tensor:
        seen = self.rows @ delta
        pulled = _each(seen, self.curved) + self.ridges[:, None] * seen
        return delta @ self.plain + self.strength * self.rows.T @ pulled

    def solved(self, right: Tensor, start: Tensor) -> tuple[Tensor, float]:
        """The solution by conjugate gradients from `start`, and how far from it they ended, beside the
        right hand side. Every turn comes nearer, so that where they end early it is better than `start`
        all the same. Raises where a direction is negative."""
        x, left = start, right - self(start)
        step = near = self._nearly(left)
        size, scale = (left * near).sum(), right.norm()
        for _ in range(MOST_TURNS):
            if left.norm() <= CLOSE * scale:
                break
            ahead = self(step)
            bend = (step * ahead).sum()
            if not float(bend) > 0:
                raise ArithmeticError(
                    "what least squares would have to divide by has negative directions"
                )
            x, left = x + size / bend * step, left - size / bend * ahead
            near = self._nearly(left)
            before, size = size, (left * near).sum()
            step = near + size / before * step
        return x, float(left.norm() / scale)

    def _nearly(self, right: Tensor) -> Tensor:
        """The solution were all `S_c` alike but for their size: a preconditioner."""
        seen, factors, plain = self._factors
        mine = seen.T @ right
        near = seen @ torch.cholesky_solve(mine[:, :, None], factors)[..., 0]
        return near + torch.cholesky_solve((right - seen @ mine).T, plain).T

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Directions of the layer's outputs that heads see `[H, R]`, with a Cholesky factor for each,
        and one for all others."""
        sizes = self.curved.diagonal(dim1=1, dim2=2).sum(1)
        common = self.curved.sum(0) / sizes.sum()
        strengths, turn = torch.linalg.eigh(self.strength * (self.rows.T * sizes) @ self.rows)
        seen = strengths > 1e-12 * strengths[-1]
        factors = factored(self.plain + strengths[seen, None, None] * common)
        return turn[:, seen], factors, factored(self.plain)


def _each(rows: Tensor, matrices: Tensor) -> Tensor:
    """Row c `[C, width]` times matrix c `[C, width, width]`."""
    return torch.bmm(rows[:, None, :], matrices)[:, 0]
