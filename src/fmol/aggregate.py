"""Steps 4–5: one running mean per objective, and the Gramian of the means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmol.data import upload
from fmol.engines.seam import Ask, Lane, Reply
from fmol.layout import Layout, squared_norm
from fmol.precision import full_precision

__all__ = ["MeanFold", "Means", "StepMeans", "Weighting", "gramian"]

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True)
class StepMeans:
    """What a step was like on average, of every slot: what control variates are made of."""

    rows: Tensor
    """The mean over clients of Δ_{s,i} divided by its steps, `[S, d]`; zero where nobody moved."""
    weight: Tensor
    """Of the clients that moved, `[S]` float64."""
    first: Tensor
    """Of those among them that had no control variate before, `[S]`."""


@dataclass(frozen=True)
class Means:
    """The mean delta of each slot that has one: `slots` name the rows of `deltas` `[len(slots), d]`."""

    slots: tuple[str, ...]
    deltas: Tensor
    mean_squares: Mapping[str, float]
    """`mean_i‖Δ_{s,i}‖²`."""
    steps: StepMeans | None = None
    """The same per step and for all slots, where the fold was asked for it."""
    unit_squares: Tensor | None = None
    """`mean_squares` of every unit by itself, `[len(slots), U]`, where the fold was asked for it."""

    @property
    def spread(self) -> dict[str, float]:
        """`ρ_s = mean_i‖Δ_{s,i}‖²/‖Δ_s‖²`: near one where clients agree, large where they cancel."""
        norms = torch.linalg.vector_norm(self.deltas, dim=1, dtype=torch.float64)
        return self.spread_of(dict(zip(self.slots, norms.square().tolist(), strict=True)))

    def spread_of(self, squares: Mapping[str, float]) -> dict[str, float]:
        """The same from `‖Δ_s‖²`, where they are known: it saves looking at all deltas again."""
        found = {}
        for slot, mean_square in self.mean_squares.items():
            if mean_square == 0:
                found[slot] = 1.0  # All are zero: they agree.
            else:
                found[slot] = mean_square / squares[slot] if squares[slot] > 0 else math.inf
        return found


class MeanFold:
    """Weighted means per slot, folded in one at a time: S vectors in memory, never M × S.

    `weighting` is `"uniform"`, every client alike, or `"samples"`, by the number of samples that
    carry a label, always renormalised over those who answered. With `steps` it also takes the means
    of each client's Δ per step: as many vectors again. With `units` it also takes the mean of the
    squared length of every unit of that layout.
    """

    notes: tuple[str, ...] = ()
    """What there is to say of how it was folded."""

    def __init__(
        self,
        slots: Sequence[str],
        like: Tensor,
        weighting: Weighting,
        *,
        steps: bool = False,
        units: Layout | None = None,
    ) -> None:
        # Half precision loses a mean over many clients: it is summed in float32.
        dtype = torch.float32 if like.element_size() < 4 else like.dtype
        self._sums = torch.zeros(len(slots), like.numel(), dtype=dtype, device=like.device)
        self._begun = False
        self._units = [1.0] * len(slots)
        """By what each row of the sums is divided already: where the lanes that came first are all that
        come, the sums are means and need not be gone over again."""
        self._dtype = like.dtype
        self._row = {slot: i for i, slot in enumerate(slots)}
        self._weight = [0.0] * len(slots)
        self._moved = [0] * len(slots)
        self._squares = [0.0] * len(slots)
        self._weighting = weighting
        self._expected: tuple[Tensor, Sequence[str], Sequence[float]] | None = None
        """Of which rows, slots and weights the sums are already."""
        self._steps = torch.zeros_like(self._sums) if steps else None
        self._stepped = [0.0] * len(slots)
        self._first = [0.0] * len(slots)
        self._layout = units
        self._unit_squares = torch.zeros(0, device=like.device)
        if units is not None:
            count = sum(count for count, _ in units.units)
            self._unit_squares = torch.zeros(
                len(slots), count, dtype=torch.float64, device=like.device
            )

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots, in the order of the rows."""
        return tuple(self._row)

    def weight_of(self, reply: Reply, lane: Lane) -> float:
        """How much a client's update counts."""
        if self._weighting == "uniform":
            return 1.0
        return float(max(reply.samples.get(name, 0) for name in lane.mixture))

    def add(self, reply: Reply, ask: Ask) -> None:
        if self._expected is not None:  # They come one by one in place of that.
            self._sums.zero_()
            self._units, self._expected = [1.0] * len(self._units), None
        for lane in ask.lanes:
            delta = reply.deltas.get(lane.slot)
            if delta is None:
                continue
            row, weight = self._row[lane.slot], self.weight_of(reply, lane)
            self._begun = True
            self._sums[row].add_(delta.to(self._sums), alpha=weight / self._units[row])
            self._weight[row] += weight
            self._moved[row] += reply.steps.get(lane.slot, 1)
            self._squares[row] += weight * squared_norm(delta)
            if self._layout is not None:
                own = self._layout.unit_squares(delta.to(self._sums)[None])[0]
                self._unit_squares[row].add_(own, alpha=weight)
            moved = reply.steps.get(lane.slot, 1)
            if self._steps is not None and ask.local is not None and moved:
                share = weight / ask.local.steps_in(moved)
                self._steps[row].add_(delta.to(self._sums), alpha=share)
                self._stepped[row] += weight
                self._first[row] += weight * (lane.slot in reply.first)

    def expect_rows(self, slots: Sequence[str], deltas: Tensor, weights: Sequence[float]) -> None:
        """Sums up rows `[L, d]` that a device may still compute, before it is known if all of them
        count; `add_rows` finds the sums there, or takes others where not all do."""
        if self._begun or self._expected is not None:
            return
        weights = self._counted(weights)
        totals = [0.0] * len(self._weight)
        for slot, weight in zip(slots, weights, strict=True):
            totals[self._row[slot]] += weight
        self._units = [total or 1.0 for total in totals]
        self._take_in(self._mix(slots, weights), deltas)
        self._expected = deltas, slots, weights

    def add_rows(
        self,
        slots: Sequence[str],
        deltas: Tensor,
        weights: Sequence[float],
        moved: Sequence[int],
        squares: Sequence[float],
        parts: Sequence[int] = (),
        first: Sequence[bool] = (),
    ) -> None:
        """Many lanes at once: the slot, Δ (a row of `[L, d]`), samples, steps and ‖Δ‖² of each; where
        means per step are wanted, how many steps Δ is the sum of, and whether it is the first one.

        As `add` would do one after the other, to rounding; rows of weight zero may hold anything
        finite.
        """
        weights = self._counted(weights)
        rows = [self._row[slot] for slot in slots]
        for row, weight, steps, square in zip(rows, weights, moved, squares, strict=True):
            self._weight[row] += weight
            self._moved[row] += steps if weight else 0
            self._squares[row] += weight * square
        mix = self._mix(slots, weights)
        if not self._are_expected(deltas, slots, weights):
            if not self._begun:
                self._units = [weight or 1.0 for weight in self._weight]
            self._take_in(mix, deltas)
        self._begun, self._expected = True, None
        if self._layout is not None:
            own = self._layout.unit_squares(deltas)
            self._unit_squares += torch.from_numpy(mix).to(own) @ own
        if self._steps is None:
            return
        mix[:, [lane for lane, count in enumerate(moved) if not count]] = 0
        for lane, row in enumerate(rows):
            self._stepped[row] += mix[row, lane]
            self._first[row] += mix[row, lane] * first[lane]
        mix /= np.maximum(parts, 1)
        with full_precision():
            self._steps.addmm_(torch.from_numpy(mix).to(self._sums), deltas.to(self._sums))

    def _are_expected(self, deltas: Tensor, slots: Sequence[str], weights: Sequence[float]) -> bool:
        """Whether these very rows have been summed up so."""
        if self._expected is None:
            return False
        rows, their_slots, their_weights = self._expected
        return rows is deltas and their_slots == slots and their_weights == weights

    def _counted(self, weights: Sequence[float]) -> Sequence[float]:
        """How much lanes with so many samples count."""
        if self._weighting == "uniform":
            return [float(weight > 0) for weight in weights]
        return list(weights)

    def _mix(self, slots: Sequence[str], weights: Sequence[float]) -> NDArray[np.float64]:
        """How much each lane counts in each sum, `[S, L]`."""
        mix = np.zeros((len(self._weight), len(slots)))
        mix[[self._row[slot] for slot in slots], np.arange(len(slots))] = weights
        return mix

    def _take_in(self, mix: NDArray[np.float64], deltas: Tensor) -> None:
        """Adds lanes' rows to the sums; takes the sums' place where these have not begun."""
        shares = upload(mix / np.array(self._units)[:, None], self._sums.device).to(self._sums)
        with full_precision():
            # A product and no scattered additions, whose order a GPU leaves open.
            self._sums.addmm_(shares, deltas.to(self._sums), beta=1 if self._begun else 0)

    def result(self) -> Means:
        """Means of the slots for which somebody moved. Call it once: it may divide the sums in place.

        Where every batch of every holder was without a label there is no update, which is not the
        same as an update of zero: a zero row would force `d = 0`.
        """
        rows = [i for i, w in enumerate(self._weight) if w > 0 and self._moved[i] > 0]
        sums = self._sums if len(rows) == len(self._weight) else self._sums[rows]
        left = [self._weight[i] / self._units[i] for i in rows]
        if any(share != 1 for share in left):
            sums /= torch.tensor(left, dtype=torch.float64).to(sums)[:, None]
        names = tuple(self._row)
        return Means(
            tuple(names[i] for i in rows),
            sums.to(self._dtype),
            {names[i]: self._squares[i] / self._weight[i] for i in rows},
            self._step_means(),
            self._unit_means(rows),
        )

    def _unit_means(self, rows: Sequence[int]) -> Tensor | None:
        if self._layout is None:
            return None
        total = torch.tensor([self._weight[i] for i in rows], dtype=torch.float64)
        squares = self._unit_squares[list(rows)]
        return squares / total.to(squares)[:, None]

    def _step_means(self) -> StepMeans | None:
        if self._steps is None:
            return None
        weight = torch.tensor(self._stepped, dtype=torch.float64)
        whole = torch.where(weight > 0, weight, 1.0).to(self._steps)
        rows = (self._steps / whole[:, None]).to(self._dtype)
        return StepMeans(rows, weight, torch.tensor(self._first, dtype=torch.float64))


def gramian(deltas: Tensor, *, chunk: int = 512) -> Tensor:
    """`G = ΔΔᵀ` `[S, S]` in float64, on the CPU, from `deltas` `[S, d]` in any floating dtype.

    Products of short chunks are taken in the deltas' own precision and summed in float64: as fast
    as one float32 product and about a thousand times more accurate. Where a row is so small or so large
    that its squares might leave the range of float32, it is done again with rows brought to the same
    magnitude. On GPUs that are quick at it, all of it is in float64 from the start, which has room for
    every square: there it is exact to the last digits whatever the rows' size.
    """
    if deltas.element_size() < 4:
        deltas = deltas.float()
    s, d = deltas.shape
    if deltas.dtype == torch.float64:
        return deltas.mm(deltas.T).cpu()
    if s == 0 or d == 0:
        return torch.zeros(s, s, dtype=torch.float64)
    total = _gram_on_gpu(deltas)
    if total is not None and bool(total.isfinite().all()):
        return total
    total = _chunked_products(deltas, None, chunk).cpu()
    norms = total.diagonal()
    # A norm is between the largest value and √d times that.
    if bool(((norms >= 1e-24 * d) & (norms <= 1e24)).all()):
        return total
    peak = deltas.abs().amax(dim=1)
    # A power of two, so that scaling is exact; rows of ordinary size are left as they are.
    scale = torch.where(
        (peak > 0) & ((peak < 1e-12) | (peak > 1e12)), torch.exp2(torch.log2(peak).floor()), 1.0
    )
    total = _chunked_products(deltas, scale, chunk).cpu()
    wide = scale.double().cpu()
    return total * wide[:, None] * wide[None, :]


def _gram_on_gpu(deltas: Tensor) -> Tensor | None:
    """The same in one pass in float64; None where there is no kernel for it."""
    if not deltas.is_cuda:
        return None
    from fmol.kernels.gram import gram

    return gram(deltas)


def _chunked_products(deltas: Tensor, scale: Tensor | None, chunk: int) -> Tensor:
    """`ΔΔᵀ` `[S, S]` in float64 of the rows divided by `scale` `[S]`."""
    s, d = deltas.shape
    total = torch.zeros(s, s, dtype=torch.float64, device=deltas.device)
    # A block of chunks at a time bounds the memory of the partial products.
    block = chunk * max(1, 2**22 // (s * s))
    with full_precision():
        for start in range(0, d, block):
            part = deltas[:, start : start + block]
            part = part if scale is None else part / scale[:, None]
            whole = part.shape[1] // chunk * chunk
            pieces = part[:, :whole].reshape(s, -1, chunk).transpose(0, 1)
            total += torch.bmm(pieces, pieces.transpose(1, 2)).double().sum(0)
            rest = part[:, whole:]
            total += rest.mm(rest.T).double()
    return total
