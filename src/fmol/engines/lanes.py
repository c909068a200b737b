"""Many lanes as one: their models side by side, their losses, and K steps of all at once.

Lanes are independent of one another, so the gradient of the sum of all their losses with respect to
their stacked parameters `X` `[L, d]` is every lane's own gradient: one forward and one backward pass.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fmol.data import tree_leaves, tree_map
from fmol.engines.convolutions import LaneConvolutions
from fmol.engines.seam import LocalConfig
from fmol.evaluation import batch_mean, check_mask
from fmol.layout import FlatModel, Layout
from fmol.objectives import Objective
from fmol.precision import in_dtype, rounding

__all__ = [
    "DEPENDS",
    "Batch",
    "LaneGradients",
    "LaneModel",
    "LaneSteps",
    "NotBatchedError",
    "Pull",
    "batch_dependent",
    "count_use",
    "first_line",
    "pull_losses",
]

logger = logging.getLogger("fmol")

RECORD_AT = 40
"""The use of a step's shape at which it is recorded: that costs as much as some dozen steps."""
OFTEN = 3
"""The uses of a step's shape in a round from which on replaying it pays: one of them is checked."""
DEPENDS = "steps are computed anew each time: a loss or the model depends on more than tensors"
EARLY = 4
"""The steps of a round by which a graph of it is checked: later ones do the same, and what rounding
does to the first of them has grown beyond comparing after hundreds."""
NUDGE, NUDGED = 1e-6, 10.0
"""A change of the size of rounding, relative to parameters, and how many times what it does to the
steps rounding may do."""
FAINT = 1e-3
"""How long a lane's gradient is taken to be at least, beside the median, where two are compared."""
MOST_RECORDED = 32
"""Shapes that are recorded; where cohorts are ever new ones, later shapes are computed as they come."""

MOST_COUNTED = 1024
"""Shapes whose uses are counted; each key has all its lanes in it."""


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

    def __init__(self, model: FlatModel) -> None:
        self._model = model
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
            LaneConvolutions(),
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


def count_use(uses: dict[Any, int], key: Any) -> None:
    """Counts that a shape was used once more; where there are ever new ones, old ones are forgotten."""
    if key not in uses and len(uses) >= MOST_COUNTED:
        uses.clear()
    uses[key] = uses.get(key, 0) + 1


# ---- gradients -------------------------------------------------------------------------------


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
        self._constants: dict[Any, Tensor] = {}
        self._moving: dict[str, Tensor | None] = {}
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
        if not X.is_cuda and self._in_last_round.get(key, 0) < OFTEN:
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
            if not self.same(results[0], fresh[0]):
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
        wave = torch.cos(torch.arange(starts.shape[1], device=starts.device, dtype=starts.dtype))
        nudged = begin(starts * (1 + NUDGE * wave))
        off, moved, length = map(_lengths, (found - right, nudged - right, right))
        allowed = rounding(self._model.step_dtype) * length + NUDGED * moved
        return bool(((off <= allowed) | ~allowed.isfinite()).all())

    def compile(self, X: Tensor, pulls: Sequence[Pull], batch: Batch) -> bool:
        """Compiles steps of this shape, which takes a while; False where that cannot be done."""
        leaves, spec = tree_flatten((batch.inputs, batch.targets))
        key = self._key(X, pulls, batch, leaves, spec)
        if self._replays.get(key) is not None:
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
        if not self.same(results[0], self._compute(X, pulls, batch)[0]):
            self._note("steps are not compiled: their gradients would come out otherwise")
            return False
        self._replays[key] = compiled
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

    def moving(self, trained: str, like: Tensor) -> Tensor | None:
        """`Layout.moving`, brought to the device once."""
        if trained not in self._moving:
            self._moving[trained] = self._model.layout.moving(trained, like)
        return self._moving[trained]

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
            parts.append((means if labelled is None else torch.where(labelled, means, 0)).sum())
            everyone = everyone or (labelled is None and len(pull.lanes) == len(X))
            seen.append((pull.lanes, labelled))
        (gradient,) = torch.autograd.grad(torch.stack(parts).sum(), X)
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


# ---- steps -----------------------------------------------------------------------------------


@dataclass
class LaneSteps:
    """The trajectories of `L` lanes from `start` `[L, d]`: what `fmol.local.descend` does for one."""

    gradients: LaneGradients
    pulls: Sequence[Pull]
    local: LocalConfig
    start: Tensor
    lr: Tensor | None = None
    """The step size as a tensor, where it must be one; None is that of `local`."""
    correction: Tensor | None = None
    """What is added to every step of each lane, `[L, d]`; None where drift is not corrected."""

    def __post_init__(self) -> None:
        self.X = self.start.clone()
        self.delta = torch.zeros_like(self.X)
        self.moved = torch.zeros(len(self.X), dtype=torch.int64, device=self.X.device)
        self.velocity = torch.zeros_like(self.X) if self.local.momentum else None
        self.moving = self.gradients.moving(self.local.trained, self.X)
        self.early = self.delta
        """Δ after the first steps, `EARLY` of them where there are as many."""
        self._taken = 0

    def step(self, batch: Batch, active: Tensor | None, last: bool) -> None:
        """One step of the lanes that are `active` `[L]`, None for all; the `last` moves Δ alone."""
        local = self.local
        direction, moves = self.gradients(self.X, self.pulls, batch)
        if active is not None:
            moves = active if moves is None else moves & active
        if self.moving is not None:
            direction = direction * self.moving
        if local.clip_norm is not None:
            norm = torch.linalg.vector_norm(direction, dim=1)
            direction *= (local.clip_norm / norm.clamp(min=local.clip_norm))[:, None]
        if local.weight_decay:
            direction.add_(self.X, alpha=local.weight_decay)
        if local.proximal:
            direction.add_(self.X - self.start, alpha=local.proximal)
        if self.velocity is not None:
            moving = self.velocity * local.momentum + direction
            if moves is not None:
                moving = torch.where(moves[:, None], moving, self.velocity)
            self.velocity = direction = moving
        if self.correction is not None:
            direction = direction + self.correction
        if self.moving is not None:
            direction = direction * self.moving
        if moves is not None:
            direction = torch.where(moves[:, None], direction, 0)
        self.delta += direction
        self.moved += 1 if moves is None else moves
        self._taken += 1
        if self._taken == EARLY:
            self.early = self.delta.clone()
        if last:
            return
        if self.lr is None:
            self.X.add_(direction, alpha=-local.lr)
        else:
            self.X.addcmul_(direction, self.lr, value=-1)


def batch_dependent(model: FlatModel, inputs: Any) -> bool:
    """Whether what the module says of a sample depends on the others in its batch.

    Told in evaluation mode from a few samples, by giving the first half of them alone.
    """
    size = tree_leaves(inputs)[0].shape[0]
    half = max(1, size // 2)
    with model.mode(training=False), torch.no_grad():
        together = tree_leaves(model(inputs))
        alone = tree_leaves(model(tree_map(itemgetter(slice(half)), inputs)))
    return any(
        a.shape[:1] != (half,) or b.shape[:1] != (size,) or not _close(a, b[:half])
        for a, b in zip(alone, together, strict=True)
    ) or any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.module.modules())


def _lengths(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return found


def _own(batch: Batch) -> tuple[Tensor, ...]:
    return () if batch.own is None else (batch.own,)


def first_line(error: BaseException) -> str:
    """What an error says, as short as it can be quoted."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True))
