"""Whether a model, its losses and its data can be batched over lanes, and what a lane weighs.

Tried out on a few samples of a few clients, before the first round, and before the first round in which
an objective is asked about for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fmol import rng
from fmol.data import tree_leaves, tree_map
from fmol.engines.gradients import LaneGradients, first_line
from fmol.engines.lanes import Batch, Pull
from fmol.engines.pool import make_pool
from fmol.engines.schedule import pulls_of
from fmol.engines.seam import Ask, LocalConfig, Site
from fmol.engines.trajectories import LaneSteps
from fmol.layout import FlatModel
from fmol.local import mixture_loss, pure_forward
from fmol.objectives import Objective, WholeSet

__all__ = ["BROKEN", "Trial", "lane_bytes"]

BROKEN = (
    RuntimeError, ValueError, TypeError, NotImplementedError, KeyError, IndexError, AttributeError,
    AssertionError,
)  # fmt: skip
"""What a model or a loss that cannot be batched raises."""
SAMPLES = 8
CLIENTS = 8
"""How many clients are looked at for one that has two samples and finite gradients."""
DEPENDS = "what it says of a sample depends on the others in its batch"


class NoNumbersError(ValueError):
    """The data, not the model, are why nothing can be said."""


class Trial:
    """What is known of whether a model and its losses can be batched over lanes.

    The model is tried once, and each objective when it is asked about for the first time: what holds
    for one says nothing of the others. So the answer depends neither on the round nor on who takes
    part, but where data are such that nothing can be said.
    """

    def __init__(self, gradients: LaneGradients, single: MutableMapping[str, str]) -> None:
        self._gradients = gradients
        self._single = single
        """Objective → why its loss is computed lane by lane."""
        self._apart: dict[tuple[str, str], str] = {}
        self._partial: set[str] = set()
        """Objectives whose loss leaves some parameters alone, as other objectives' heads."""
        self._known: set[str] = set()
        self._model_is_fine = False
        self.reason: str | None = None
        """Why nothing is batched, once it is known; None where it is, or nothing is known yet."""

    def apart(self, objective: str, function: str) -> str | None:
        """Why a loss or a metric, by its name, is asked client by client in evaluations."""
        return self._apart.get((objective, function))

    def leaves_some(self, objectives: Collection[str]) -> bool:
        """Whether a lane of these objectives may leave some of the model's outputs unused."""
        return any(name in self._partial for name in objectives)

    def why_not(self, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> str | None:
        """Why such asks cannot be batched; None where they can."""
        if self.reason is None:
            try:
                if not self._model_is_fine:
                    self._try_model(asks, site_of)
                    self._model_is_fine = True
                self._try_objectives(asks, site_of)
            except NoNumbersError as error:
                return str(error)  # The next round may have other clients.
            except BROKEN as error:
                self.reason = f"the model cannot be batched over lanes ({first_line(error)})"
            except _UnfitError as error:
                self.reason = str(error)
        return self.reason

    # ---- the model ---------------------------------------------------------------------------

    def _try_model(self, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> None:
        sites = [site_of(ask) for ask in asks[:CLIENTS]]
        pool = make_pool([ask.client for ask in asks[:CLIENTS]], [each.samples for each in sites])
        if pool is None:
            pool = make_pool([asks[0].client], [sites[0].samples])
        if pool is None:
            raise _UnfitError("the clients' data are not tensors in memory")
        site, model = sites[0], sites[0].model
        model.load(asks[0].x)
        # Copies, since a model may write to what it is given; of several clients, who may have one
        # sample each.
        inputs = _copy(pool.span(0, min(SAMPLES, pool.total))[0])
        versions = _versions(inputs)
        with _tried(site), torch.no_grad():
            for training in (False, True):
                with model.mode(training=training), steady(model):
                    _check_outputs(model, inputs, site, drawn=training)
        if _versions(inputs) != versions:
            raise _UnfitError("the model changes its inputs in place")

    # ---- losses and metrics ------------------------------------------------------------------

    def _try_objectives(self, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> None:
        """Tries the objectives that these asks are the first to ask about."""
        if asks and len(self._known) == len(site_of(asks[0]).objectives):
            return
        holders: dict[str, list[Ask]] = {}
        last: tuple[object, object] | None = None
        for ask in asks:
            alike = last is not None and ask.lanes is last[0] and ask.evaluate is last[1]
            if alike and not holders:
                continue  # As most are: clients that hold the same objectives share their lanes.
            last = ask.lanes, ask.evaluate
            for name in {*ask.evaluate, *(n for lane in ask.lanes for n in lane.mixture)}:
                if name not in self._known and len(holders.setdefault(name, [])) < CLIENTS:
                    holders[name].append(ask)
        for name in sorted(holders):
            self._try_at_some(name, holders[name], site_of)
            self._known.add(name)

    def _try_at_some(self, name: str, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> None:
        """Tries an objective at the first of some clients that can tell; at those with several samples
        before the others."""
        sites = [(ask, site_of(ask)) for ask in asks]
        sites.sort(key=lambda pair: len(pair[1].samples) < 2)
        told: NoNumbersError | None = None
        for ask, site in sites:
            try:
                self._try_objective(name, ask, site)
            except NoNumbersError as error:
                told = told or error
                continue
            return
        if told is not None:
            raise told

    def _try_objective(self, name: str, ask: Ask, site: Site) -> None:
        """Raises where gradients of two lanes side by side are not those of each by itself."""
        model, objective = site.model, site.objectives[name]
        pool = make_pool([ask.client], [site.samples])
        if pool is None:
            raise _UnfitError("the clients' data are not tensors in memory")
        count = min(SAMPLES, pool.total)
        inputs, targets = _copy(pool.span(0, count))
        versions = _versions((inputs, targets))
        with _tried(site):
            model.load(ask.x)
            self._try_functions(objective, model, inputs, targets)
            # The second lane has fewer samples of its own than there is room for.
            sizes = (count, max(1, count - 1))
            own = torch.arange(count) < torch.tensor(sizes)[:, None]
            batch = Batch(
                _repeat(inputs),
                _repeat(targets),
                sizes,
                None if count == 1 else own.to(model.x.device),
            )
            starts = torch.stack([ask.x, ask.x * 1.01])
            wanted = [_gradient(site, name, x, n) for x, n in zip(starts, sizes, strict=True)]
            if any(want is not None and self._leaves_some(model, want) for want in wanted):
                self._partial.add(name)
            if name not in self._single:
                try:
                    self._compare(objective, starts, batch, wanted, model)
                except BROKEN as error:
                    self._single[name] = first_line(error)
            if name in self._single:
                self._compare(objective, starts, batch, wanted, model)
        if _versions((inputs, targets)) != versions:
            raise _UnfitError(f"the loss of objective `{name}` changes what it is given in place")

    @staticmethod
    def _leaves_some(model: FlatModel, gradient: Tensor) -> bool:
        """Whether a gradient `[d]` is zero for some parameter as a whole."""
        return any(not bool(part.any()) for part in model.layout.split(gradient).values())

    def _compare(
        self,
        objective: Objective,
        starts: Tensor,
        batch: Batch,
        wanted: Sequence[Tensor | None],
        model: FlatModel,
    ) -> None:
        pull = Pull(objective, (0, 1), (1.0, 1.0))
        # Where products are rounded, the two ways round differently.
        allowed = 0.1 if model.step_dtype is not None else 1e-3
        with model.mode(training=False):
            found, _ = self._gradients(starts, [pull], batch)
        for mine, want in zip(found, wanted, strict=True):
            if want is None:
                continue
            off = float((mine - want).norm())
            if not off <= allowed * float(want.norm()) + 1e-9:
                raise ValueError(f"its gradients come out otherwise, by {off:.1e}")

    @torch.no_grad()
    def _try_functions(
        self, objective: Objective, model: FlatModel, inputs: Any, targets: Any
    ) -> None:
        """Finds the losses and metrics that say of a sample what depends on the others."""
        size = tree_leaves(inputs)[0].shape[0]
        if size < 2:
            return
        half = size // 2
        with model.mode(training=False):
            outputs = model(inputs)
        for name, function in {"loss": objective.loss, **objective.metrics}.items():
            if isinstance(function, WholeSet):
                continue
            try:
                whole = _values(function(outputs, targets), size)
                if whole is None:
                    continue  # One number for the set: never asked about several clients at once.
                parts = [
                    _values(function(*tree_map(itemgetter(part), (outputs, targets))), count)
                    for part, count in ((slice(half), half), (slice(half, size), size - half))
                ]
                same = all(part is not None for part in parts) and _close(
                    torch.cat([part for part in parts if part is not None]), whole
                )
                why = "" if same else DEPENDS
            except BROKEN as error:
                why = first_line(error)
            if why:
                self._apart[objective.name, name] = why
                if name == "loss":
                    self._single.setdefault(objective.name, why)


class _UnfitError(Exception):
    """Why nothing can be batched, in words of its own."""


def _check_outputs(model: FlatModel, inputs: Any, site: Site, *, drawn: bool) -> None:
    """Raises where what the module returns cannot be taken apart by samples; `drawn` where it may draw
    at random, of which nothing can be said."""
    with pure_forward(site):
        whole = model(inputs)
    _check_nest(whole)
    size = tree_leaves(inputs)[0].shape[0]
    if drawn and not _alike(whole, model(inputs)):
        return
    half = max(1, size // 2)
    part = model(tree_map(itemgetter(slice(half)), inputs))
    leaves = list(zip(tree_leaves(part), tree_leaves(whole), strict=True))
    if (
        any(a.shape[:1] != (half,) or b.shape[:1] != (size,) for a, b in leaves)
        or not all(_close(a, b[:half]) for a, b in leaves)
        or any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.module.modules()
        )
    ):
        raise _UnfitError("what the model says of a sample depends on the others in its batch")


def _check_nest(tree: Any) -> None:
    """Raises where outputs are more than tensors in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return
    plain = type(tree) in (dict, list, tuple) or (
        isinstance(tree, tuple) and hasattr(tree, "_fields")
    )
    if not plain:
        raise _UnfitError(
            f"the model returns a `{type(tree).__name__}`, and only tensors in tuples, lists and dicts "
            "are batched"
        )
    for part in tree.values() if isinstance(tree, dict) else tree:
        _check_nest(part)


@contextmanager
def steady(model: FlatModel) -> Iterator[None]:
    """Within it dropout lets everything through, so that outputs can be compared."""
    layers = [
        layer
        for layer in model.module.modules()
        if layer.training and isinstance(layer, nn.modules.dropout._DropoutNd | nn.RReLU)
    ]
    attention = [
        (layer, layer.dropout)
        for layer in model.module.modules()
        if isinstance(layer, nn.MultiheadAttention)
    ]
    try:
        for layer in layers:
            layer.training = False
        for each, _ in attention:
            each.dropout = 0.0
        with _NoDropout():
            yield
    finally:
        for layer in layers:
            layer.training = True
        for each, share in attention:
            each.dropout = share


class _NoDropout(TorchFunctionMode):
    """Lets everything through dropout that a forward pass calls as a function."""

    FUNCTIONS = (
        functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
        functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout,
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in self.FUNCTIONS:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


@contextmanager
def _tried(site: Site) -> Iterator[None]:
    """Within it randomness is the probe's own, and nothing is left of what was computed."""
    with rng.torch_stream(site.model.x.device, site.seed, "model", "probe"):
        yield


def _gradient(site: Site, name: str, x: Tensor, count: int) -> Tensor | None:
    """The gradient `[d]` of an objective on a client's first samples; None where none has a label."""
    model = site.model
    model.load(x)
    with model.mode(training=False):
        loss = mixture_loss(site, {name: 1.0}, torch.arange(count), set())
        if loss is None:
            return None
        want = model.gradient(loss)
    if not bool(want.isfinite().all()):
        raise NoNumbersError(
            f"gradients of client `{site.client.id}` are not finite, so that ways to compute them "
            "cannot be compared"
        )
    return want


def _values(value: Any, size: int) -> Tensor | None:
    """What a loss or a metric says of each of so many samples, those without a label as NaN; None where
    it is one number for all."""
    values, valid = value if isinstance(value, tuple) else (value, None)
    if not isinstance(values, Tensor) or values.numel() != size or (size > 1 and not values.dim()):
        return None
    values = values.reshape(size).double()
    return values if valid is None else torch.where(valid.reshape(size), values, torch.nan)


def _copy(tree: Any) -> Any:
    return tree_map(Tensor.clone, tree)


def _versions(tree: Any) -> list[int]:
    """How often each tensor of a nest was written to."""
    return [0 if leaf.is_inference() else leaf._version for leaf in tree_leaves(tree)]


def _alike(a: Any, b: Any) -> bool:
    return all(
        x.shape == y.shape and _close(x, y)
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point() or not b.is_floating_point():
        return bool(torch.equal(a, b))
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True))


class _Largest(TorchDispatchMode):
    """Within it the largest tensor that is made is looked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        made = [storage for storage in _storages(out) if storage.data_ptr() not in given]
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in made)])
        return out


def _storages(nest: Any) -> list[torch.UntypedStorage]:
    leaves, _ = tree_flatten(nest)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


def lane_bytes(ask: Ask, site: Site, gradients: LaneGradients, width: int) -> tuple[int, int]:
    """What a lane with batches of `width` takes, from what one of them keeps for its gradient; and on a
    CPU the largest part of it, else none."""
    pool = make_pool([ask.client], [site.samples])
    assert pool is not None
    kept = [0]

    def count(tensor: Tensor) -> Tensor:
        kept[0] += tensor.numel() * tensor.element_size()
        return tensor

    # Copies: a model may write to what it is given.
    inputs, targets = _copy(pool.span(0, width))
    one = Batch(_repeat(inputs, 1), _repeat(targets, 1), (width,))
    local = ask.local or LocalConfig(lr=0.0)
    steps = LaneSteps(gradients, pulls_of(ask.lanes[:1], site), local, ask.x[None])
    with (
        rng.torch_stream(site.model.x.device, site.seed, "model", "probe"),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        _Largest() if site.model.x.is_cpu else nullcontext() as largest,
    ):
        steps.gradients(steps.X, steps.pulls, one)
    row = ask.x.numel() * ask.x.element_size()
    batch = sum(t.numel() * t.element_size() for t in tree_leaves((one.inputs, one.targets)))
    # Parameters, Δ, gradient, direction and what is on the way between them.
    return 2 * kept[0] + 2 * batch + 6 * row, 0 if largest is None else largest.bytes


def _repeat(tree: Any, times: int = 2) -> Any:
    """Every tensor of a nest `[B, …]` as `[times, B, …]`."""
    return tree_map(lambda leaf: leaf.expand(times, *leaf.shape), tree)
