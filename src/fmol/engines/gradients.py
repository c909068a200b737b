"""Every lane's gradient at once: computed, recorded and replayed, or compiled."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fmol.anchors import softening
from fmol.engines.lanes import (
    Batch,
    LaneModel,
    NotBatchedError,
    Pull,
    outputs_of,
    pull_losses,
)
from fmol.engines.seam import LocalConfig
from fmol.precision import rounding

__all__ = ["DEPENDS", "LaneGradients", "count_use", "first_line"]

logger = logging.getLogger("fmol")

RECORD_AT = 40
"""The use of a step's shape at which it is recorded: that costs as much as some dozen steps."""
OFTEN = 3
"""The uses of a step's shape in a round from which on replaying it pays: one of them is checked."""
DEPENDS = "steps are computed anew each time: a loss or the model depends on more than tensors"
NUDGE, NUDGED, NUDGES = 1e-6, 10.0, 4
"""A change of the size of rounding, relative to parameters; how many times what it does to the steps
rounding may do; and how many such changes are tried, since whether one turns a ReLU is chance."""
FAINT = 1e-3
"""How long a lane's gradient is taken to be at least, beside the median, where two are compared."""
MOST_QUOTED = 200
"""Letters of an error that are quoted."""
MOST_RECORDED = 32
"""Shapes that are recorded; where cohorts are ever new ones, later shapes are computed as they come."""

MOST_COUNTED = 1024
"""Shapes whose uses are counted; each key has all its lanes in it."""


class LaneGradients:
    """Every lane's gradient at once; recorded after a few steps of one shape, and then replayed.

    What is replayed is the list of tensor operations of forward and backward pass: without it,
    Python's share of a step is most of it for small models.
    """

    def __init__(
        self,
        model: LaneModel,
        batched: Callable[[str], bool],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._model, self._batched, self._note = model, batched, note
        self._checked: set[Any] = set()
        self._uses: dict[Any, int] = {}
        self._in_round: dict[Any, int] = {}
        self._in_last_round: dict[Any, int] = {}
        self._replays: dict[Any, Callable[..., list[Tensor]] | None] = {}
        self._compiled: set[Any] = set()
        """Which of these are compiled."""
        self._constants: dict[Any, Tensor] = {}
        self._moving: dict[str, Tensor | None] = {}
        self._softening: dict[tuple[str, float], Tensor | None] = {}
        self.masked: set[str] = set()
        """Objectives whose loss marks which samples have a label."""
        self._of_sets: set[str] = set()
        """Objectives whose loss is one number for a set of samples."""

    def __call__(
        self, X: Tensor, pulls: Sequence[Pull], batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """`[L, d]`, and which lanes had a label in their batch, None for all `[L]`."""
        # Each is asked: it may note something.
        batched = [self._batched(pull.objective.name) for pull in pulls]
        leaves, spec = tree_flatten((batch.inputs, batch.targets))
        if not all(batched) or not all(isinstance(leaf, Tensor) for leaf in leaves):
            return self._compute(X, pulls, batch)
        # What is replayed draws otherwise than what is computed, and a run that goes on after a break
        # would begin to replay in another round.
        if self._model.draws or self.goes_by_sizes(pulls, batch.own is None):
            return self._compute(X, pulls, batch)
        key = self._key(X, pulls, batch, leaves, spec)
        count_use(self._uses, key)
        count_use(self._in_round, key)
        # On a GPU whole rounds are recorded, as graphs, and steps only where they are compiled.
        if not X.is_cuda and key not in self._compiled and self._in_last_round.get(key, 0) < OFTEN:
            return self._compute(X, pulls, batch)
        wanted = not X.is_cuda and self._uses[key] >= RECORD_AT
        if wanted and key not in self._replays and len(self._replays) < MOST_RECORDED:
            self._replays[key] = self._record(X, pulls, batch, leaves, spec)
        replay = self._replays.get(key)
        if replay is None:
            return self._compute(X, pulls, batch)
        results = replay(X, *leaves, *_own(batch))
        # On a GPU it is checked once a round is done, where looking at numbers holds up nothing.
        if not X.is_cuda and key not in self._checked:
            self._checked.add(key)
            fresh = self._compute(X, pulls, batch)
            right = self.same(results[0], fresh[0]) or (
                # What is compiled rounds otherwise, and rounding may decide which way a ReLU goes.
                key in self._compiled
                and self.explains(results[0], lambda at: self._compute(at, pulls, batch)[0], X)
            )
            if not right:
                self._replays[key] = None
                self._note(DEPENDS)
                return fresh
        return results[0], results[1] if len(results) > 1 else None

    def goes_by_sizes(self, pulls: Sequence[Pull], even: bool) -> bool:
        """Whether steps look at how many samples each lane has, which is no tensor: what is recorded of
        one is not right for another. So it is where a loss is of sets, and those are not `even`."""
        return not even and any(pull.objective.name in self._of_sets for pull in pulls)

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Whether two gradients `[L, d]`, or sums of them, are the same but for rounding: finite in the
        same lanes, and near in each."""
        finite, other = (each.isfinite().all(1) for each in (a, b))
        off, length = _lengths(a - b), _lengths(b)
        # What is next to nothing beside the others is what rounding left of large terms.
        usual = torch.where(finite & other, length, torch.nan).nanmedian()
        near = off <= rounding(self._model.step_dtype) * torch.maximum(length, FAINT * usual)
        return bool(((near | ~finite) & (finite == other)).all())

    def explains(self, found: Tensor, begin: Callable[[Tensor], Tensor], starts: Tensor) -> bool:
        """Whether `found` `[L, d]` is what `begin` makes of these starts, but for rounding.

        Where steps grow from one to the next, so does rounding: what it may do is then told by what
        becomes of a change of its size in the starts. Lanes that are no numbers any more say nothing.
        """
        right = begin(starts)
        if self.same(found, right):
            return True
        if not self.same(begin(starts), right):
            return False
        off, length = _lengths(found - right), _lengths(right)
        moved = torch.zeros_like(length)
        place = torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype)
        for number in range(1, 1 + NUDGES):
            nudged = begin(starts * (1 + NUDGE * torch.cos(number * place)))
            moved = torch.maximum(moved, _lengths(nudged - right))
            allowed = rounding(self._model.step_dtype) * length + NUDGED * moved
            if bool(((off <= allowed) | ~allowed.isfinite()).all()):
                return True
        worst = int((off / allowed).nan_to_num().argmax())
        told = [float(each[worst] / length[worst]) for each in (off, moved)]
        logger.info("lane %d is off by %.1e, where nudges move it by %.1e", worst, *told)
        return False

    def compile(self, X: Tensor, pulls: Sequence[Pull], batch: Batch) -> bool:
        """Compiles steps of this shape, which takes a while; False where that cannot be done."""
        leaves, spec = tree_flatten((batch.inputs, batch.targets))
        key = self._key(X, pulls, batch, leaves, spec)
        if key in self._compiled and self._replays.get(key) is not None:
            return True
        recorded = self._record(X, pulls, batch, leaves, spec)
        if recorded is None:
            return False
        compiled = torch.compile(recorded, dynamic=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # Advice on precision and softmax.
                results = compiled(X, *leaves, *_own(batch))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            self._note(f"steps are not compiled: {first_line(error)}")
            logger.info("a step could not be compiled: %s", error)
            return False
        # Rounded products of many layers differ by more than one rounding: a nudge tells by how much.
        if not self.explains(results[0], lambda at: self._compute(at, pulls, batch)[0], X):
            self._note("steps are not compiled: their gradients would come out otherwise")
            return False
        self._replays[key] = compiled
        self._compiled.add(key)
        return True

    def _key(
        self,
        X: Tensor,
        pulls: Sequence[Pull],
        batch: Batch,
        leaves: Sequence[Any],
        spec: TreeSpec,
    ) -> Any:
        """What two steps must share so that one can be replayed as the other."""
        return (
            X.shape,
            tuple((pull.objective.name, pull.lanes, pull.weights) for pull in pulls),
            spec,
            tuple((leaf.shape, leaf.dtype) for leaf in leaves),
            batch.own is not None,
            self._model.training,
        )

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Within it nothing is replayed."""
        kept, self._replays = self._replays, {}
        try:
            yield
        finally:
            self._replays = kept

    def forget(self) -> None:
        """Lets go of all that was recorded or compiled: what it does is not what steps do."""
        self._replays.clear()
        self._compiled.clear()

    def moving(self, trained: str, like: Tensor) -> Tensor | None:
        """`Layout.moving`, brought to the device once."""
        if trained not in self._moving:
            self._moving[trained] = self._model.layout.moving(trained, like)
        return self._moving[trained]

    def softening(self, local: LocalConfig, like: Tensor) -> Tensor | None:
        """`fmol.anchors.softening`, brought to the device once."""
        key = local.softened, local.temperature
        if key not in self._softening:
            self._softening[key] = softening(local, self._model.layout, like)
        return self._softening[key]

    def begin_round(self) -> None:
        """Lets the first replay of each shape be checked: what a loss reads may have changed."""
        self._checked.clear()
        if self._in_round:  # Where losses alone are asked for, no steps are taken.
            self._in_last_round, self._in_round = self._in_round, {}

    def _record(
        self, X: Tensor, pulls: Sequence[Pull], batch: Batch, leaves: list[Any], spec: TreeSpec
    ) -> Callable[..., list[Tensor]] | None:
        """The step as a list of tensor operations; None where it cannot be had."""

        def run(X: Tensor, *tensors: Tensor) -> list[Tensor]:
            inputs, targets = tree_unflatten(list(tensors[: len(leaves)]), spec)
            own = tensors[len(leaves)] if batch.own is not None else None
            gradient, labelled = self._compute(X, pulls, Batch(inputs, targets, batch.sizes, own))
            return [gradient] if labelled is None else [gradient, labelled]

        try:
            replay: Callable[..., list[Tensor]] = make_fx(run)(X, *leaves, *_own(batch))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            logger.info("a step could not be recorded, and is computed anew each time: %s", error)
            return None
        return None if self.goes_by_sizes(pulls, batch.own is None) else replay

    def _compute(
        self, X: Tensor, pulls: Sequence[Pull], batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        X = X.detach().requires_grad_()
        outputs = self._model.outputs(X, batch.inputs)
        parts, seen, everyone = [], [], False
        for pull, own_outputs in zip(pulls, outputs_of(pulls, outputs), strict=True):
            means, labelled, masks = self._losses(pull, own_outputs, batch)
            if masks:
                self.masked.add(pull.objective.name)
            if any(weight != 1.0 for weight in pull.weights):
                means = means * self._constant(pull.weights, means)
            # What has no label is left out, whatever its loss came to.
            parts.append(means if labelled is None else torch.where(labelled, means, 0))
            everyone = everyone or (labelled is None and len(pull.lanes) == len(X))
            seen.append((pull.lanes, labelled))
        # One sum for all: with hundreds of objectives there are hundreds of everything else.
        (gradient,) = torch.autograd.grad(torch.cat(parts).sum(), X)
        if everyone or all(name not in self.masked for name in (p.objective.name for p in pulls)):
            return gradient, None
        found = torch.zeros(len(X), device=X.device)
        for lanes, mark in seen:
            index = self._constant(lanes, torch.empty(0, dtype=torch.int64, device=X.device))
            own = torch.ones_like(index) if mark is None else mark
            found = found.index_add(0, index, own.to(found))
        return gradient, found > 0

    def _constant(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        """The numbers as a tensor on the device of `like`; brought there once."""
        key = (values, like.dtype, like.device)
        if key not in self._constants:
            self._constants[key] = torch.tensor(values, dtype=like.dtype, device=like.device)
        return self._constants[key]

    def _losses(self, pull: Pull, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor | None, bool]:
        if self._batched(pull.objective.name):
            try:
                return pull_losses(pull, outputs, batch, batched=True)
            except NotBatchedError:  # One number for sets of different sizes: each by itself, then.
                self._of_sets.add(pull.objective.name)
        return pull_losses(pull, outputs, batch, batched=False)


def count_use(uses: dict[Any, int], key: Any) -> None:
    """Counts that a shape was used once more; where there are ever new ones, old ones are forgotten."""
    if key not in uses and len(uses) >= MOST_COUNTED:
        uses.clear()
    uses[key] = uses.get(key, 0) + 1


def _lengths(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found


def _own(batch: Batch) -> tuple[Tensor, ...]:
    return () if batch.own is None else (batch.own,)


def first_line(error: BaseException) -> str:
    """What an error says, as short as it can be quoted."""
    text = next(iter(str(error).strip().splitlines()), "")
    if len(text) > MOST_QUOTED:
        text = text[:MOST_QUOTED].rpartition(" ")[0].rstrip(" ,;:.") + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
