"""Whether a model, its losses and its data can be batched over lanes.

Tried out on a few samples of a few clients, before the first round, and before the first round in which
an objective is asked about for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from fmol import rng
from fmol.data import Samples, TensorSamples, tree_leaves, tree_map
from fmol.engines.gradients import LaneGradients, first_line
from fmol.engines.lanes import Batch, NotBatchedError, Pull, pull_losses
from fmol.engines.pool import Pool, make_pool
from fmol.engines.schedule import pulls_of
from fmol.engines.seam import Ask, Lane, Site
from fmol.layout import FlatModel
from fmol.local import mixture_loss, pure_forward
from fmol.objectives import Objective, WholeSet

__all__ = ["Trial"]

SAMPLES, FEWEST = 8, 2
"""How many samples of a client are looked at, and how few where memory runs out."""
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
        """Objectives whose loss leaves some outputs alone, as those of other objectives' heads."""
        self._known: set[str] = set()
        self._outputs_are_fine = self._gradients_are_fine = False
        self._samples = SAMPLES
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
        while self.reason is None:
            try:
                if not self._outputs_are_fine:
                    self._try_outputs(asks, site_of)
                self._try_objectives(asks, site_of)
                if not self._gradients_are_fine:
                    self._try_gradients(asks, site_of)
                return None
            except NoNumbersError as error:
                return str(error)  # The next round may have other clients.
            except torch.OutOfMemoryError:
                # It says nothing of the model, and the next round may have more of it.
                if self._samples <= FEWEST:
                    return "memory ran out while it was tried on a few samples"
                self._samples //= 2
            except _UnfitError as error:
                self.reason = str(error)
            except Exception as error:  # noqa: BLE001 - one's own model and losses may raise anything.
                why = first_line(error)
                self.reason = f"the model or a loss cannot be batched over lanes ({why})"
        return self.reason

    # ---- the model ---------------------------------------------------------------------------

    def _try_outputs(self, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> None:
        """Raises where what the module returns cannot be taken apart by samples."""
        sites = [site_of(ask) for ask in asks[:CLIENTS]]
        # A few of each: put together, all that clients have would be in memory twice.
        pool = make_pool(
            [ask.client for ask in asks[:CLIENTS]],
            [_first_of(each.samples, self._samples) for each in sites],
        )
        if pool is None:
            pool = _pool_of(asks[0], sites[0])
        site, model = sites[0], sites[0].model
        model.load(asks[0].x)
        # Copies, since a model may write to what it is given; of several clients, who may have one
        # sample each.
        inputs = _copy(pool.span(0, self._samples)[0])
        versions = _versions(inputs)
        with _tried(site), torch.no_grad():
            for training in (False, True):
                with model.mode(training=training), steady(model):
                    _check_outputs(model, inputs, site, drawn=training)
        if _versions(inputs) != versions:
            raise _UnfitError("the model changes its inputs in place")
        self._outputs_are_fine = True

    def _try_gradients(self, asks: Sequence[Ask], site_of: Callable[[Ask], Site]) -> None:
        """Raises where gradients of two lanes side by side are not those of each by itself."""
        told: NoNumbersError | None = None
        for ask, site in _several_first([(ask, site_of(ask)) for ask in asks[:CLIENTS]]):
            names = dict.fromkeys([*(n for lane in ask.lanes for n in lane.mixture), *ask.evaluate])
            lanes = ask.lanes or tuple(Lane(name, {name: 1.0}) for name in names)
            if not lanes:
                continue
            try:
                with _tried(site):
                    self._try_lanes((lanes[0], lanes[-1]), ask, site)
            except NoNumbersError as error:
                told = told or error
                continue
            self._gradients_are_fine = True
            return
        if told is not None:
            raise told

    def _try_lanes(self, lanes: tuple[Lane, Lane], ask: Ask, site: Site) -> None:
        model = site.model
        inputs, targets = _copy(_pool_of(ask, site).span(0, self._samples))
        batch = _padded(inputs, targets, model.x.device)
        starts = torch.stack([ask.x, ask.x * 1.01])
        with model.mode(training=False):
            found, _ = self._gradients(starts, pulls_of(lanes, site), batch)
            for lane, start, size, mine in zip(lanes, starts, batch.sizes, found, strict=True):
                model.load(start)
                loss = mixture_loss(site, lane.mixture, torch.arange(size), set())
                if loss is not None:
                    _compare(mine, model.gradient(loss), model, ask)

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
        seen: dict[str, tuple[Any, Any]] = {}
        for name in sorted(holders):
            self._try_at_some(name, [(ask, site_of(ask)) for ask in holders[name]], seen)
            self._known.add(name)

    def _try_at_some(
        self, name: str, sites: Sequence[tuple[Ask, Site]], seen: dict[str, tuple[Any, Any]]
    ) -> None:
        """Tries an objective at the first of some clients that can tell; `seen` has what the model said
        of those that were looked at."""
        told: NoNumbersError | None = None
        for ask, site in _several_first(sites):
            if ask.client not in seen:
                with _tried(site):
                    seen[ask.client] = _seen(ask, site, self._samples)
            try:
                self._try_objective(site.objectives[name], *seen[ask.client], ask, site)
            except NoNumbersError as error:
                told = told or error
                continue
            return
        if told is not None:
            raise told

    def _try_objective(
        self, objective: Objective, outputs: Any, targets: Any, ask: Ask, site: Site
    ) -> None:
        """Finds out how a loss and metrics may be asked about several lanes and clients; from the
        `outputs` of two lanes `[2, B, …]` for the same samples.

        That the gradient goes on rightly from there is the model's part.
        """
        name, model = objective.name, site.model
        targets = _copy(targets)
        versions = _versions(targets)
        with _tried(site):
            self._try_functions(objective, tree_map(itemgetter(0), outputs), targets)
            batch = _padded(targets, targets, model.x.device)
            outputs = tree_map(lambda leaf: leaf.detach().requires_grad_(), outputs)
            pull = Pull(objective, (0, 1), (1.0, 1.0))
            wanted = _slopes(pull, outputs, batch, batched=False)
            columns = [slope.flatten(0, 1).reshape(slope.shape[:2].numel(), -1) for slope in wanted]
            if any(not bool(slope.any(0).all()) for slope in columns):
                self._partial.add(name)
            if name not in self._single:
                try:
                    for mine, want in zip(
                        _slopes(pull, outputs, batch, batched=True), wanted, strict=True
                    ):
                        _compare(mine, want, model, ask)
                except NotBatchedError:
                    pass  # One number for sets of different sizes: told apart where they are taken.
                except (NoNumbersError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # noqa: BLE001 - one's own losses may raise anything.
                    self._single[name] = first_line(error)
        if _versions(targets) != versions:
            raise _UnfitError(f"the loss of objective `{name}` changes what it is given in place")

    @torch.no_grad()
    def _try_functions(self, objective: Objective, outputs: Any, targets: Any) -> None:
        """Finds the losses and metrics that say of a sample what depends on the others."""
        size = tree_leaves(targets)[0].shape[0]
        half = size // 2
        for name, function in {"loss": objective.loss, **objective.metrics}.items():
            if isinstance(function, WholeSet) or size < 2:
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
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - one's own losses may raise anything.
                why = first_line(error)
            if why:
                self._apart[objective.name, name] = why
                if name == "loss":
                    self._single.setdefault(objective.name, why)


def _pool_of(ask: Ask, site: Site) -> Pool:
    """A client's samples; raises where they are not tensors."""
    pool = make_pool([ask.client], [site.samples])
    if pool is None:
        raise _UnfitError("the clients' data are not tensors in memory")
    return pool


def _first_of(samples: Samples, count: int) -> Samples:
    """The first of some samples, where they are tensors: others are not put together."""
    if not isinstance(samples, TensorSamples):
        return samples
    return TensorSamples(*samples.span(0, count))


def _several_first(sites: Sequence[tuple[Ask, Site]]) -> list[tuple[Ask, Site]]:
    """Those with several samples before the others: of one alone nothing depends."""
    return sorted(sites, key=lambda pair: len(pair[1].samples) < 2)


def _seen(ask: Ask, site: Site, count: int) -> tuple[Any, Any]:
    """What the model says of a client's first samples at two starts, `[2, B, …]`, and their targets."""
    model = site.model
    inputs, targets = _copy(_pool_of(ask, site).span(0, count))
    outputs = []
    with model.mode(training=False), torch.no_grad():
        for start in (ask.x, ask.x * 1.01):
            model.load(start)
            outputs.append(model(inputs))
    leaves = [tree_flatten(each)[0] for each in outputs]
    stacked = [torch.stack(pair) for pair in zip(*leaves, strict=True)]
    return tree_unflatten(stacked, tree_flatten(outputs[0])[1]), targets


def _padded(inputs: Any, targets: Any, device: torch.device) -> Batch:
    """The same samples for two lanes, of which the second has fewer of its own than there is room."""
    count = tree_leaves(inputs)[0].shape[0]
    sizes = (count, max(1, count - 1))
    own = torch.arange(count) < torch.tensor(sizes)[:, None]
    return Batch(_repeat(inputs), _repeat(targets), sizes, None if count == 1 else own.to(device))


def _slopes(pull: Pull, outputs: Any, batch: Batch, *, batched: bool) -> list[Tensor]:
    """The gradient of the sum of two lanes' losses with respect to each of their outputs."""
    means, labelled, _ = pull_losses(pull, outputs, batch, batched=batched)
    if labelled is not None:
        means = torch.where(labelled, means, 0)
    leaves = [leaf for leaf in tree_leaves(outputs) if leaf.is_floating_point()]
    if not means.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    slopes = torch.autograd.grad(means.sum(), leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if slope is None else slope
        for leaf, slope in zip(leaves, slopes, strict=True)
    ]


def _compare(mine: Tensor, want: Tensor, model: FlatModel, ask: Ask) -> None:
    """Raises where one gradient is not the other, to rounding."""
    if not bool(want.isfinite().all()):
        raise NoNumbersError(
            f"gradients of client `{ask.client}` are not finite, so that ways to compute them cannot "
            "be compared"
        )
    # Where products are rounded, the two ways round differently.
    allowed = 0.1 if model.step_dtype is not None else 1e-3
    off = float((mine - want).norm())
    if not off <= allowed * float(want.norm()) + 1e-9:
        raise ValueError(f"its gradients come out otherwise, by {off:.1e}")


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


def _repeat(tree: Any) -> Any:
    """Every tensor of a nest `[B, …]` for two lanes, `[2, B, …]`."""
    return tree_map(lambda leaf: leaf.expand(2, *leaf.shape), tree)
