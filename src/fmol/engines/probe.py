"""Whether a model, its losses and its data can be batched over lanes, and what a lane weighs.

Tried out on a few samples of one client, before the first round.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fmol import rng
from fmol.data import tree_leaves, tree_map
from fmol.engines.gradients import LaneGradients, first_line
from fmol.engines.lanes import Batch, Pull, batch_dependent, pull_losses
from fmol.engines.pool import make_pool
from fmol.engines.schedule import pulls_of
from fmol.engines.seam import Ask, LocalConfig, Site
from fmol.engines.trajectories import LaneSteps
from fmol.local import mixture_loss

__all__ = ["lane_bytes", "why_not_batched"]

BROKEN = (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError, IndexError)
"""What a model or a loss that cannot be batched raises."""
SAMPLES = 8


class NoNumbersError(ValueError):
    """The data, not the model, are why nothing can be said."""


def why_not_batched(
    ask: Ask, site: Site, gradients: LaneGradients, single_losses: MutableMapping[str, str]
) -> str | None:
    """Why the model or the data cannot be batched; None where they can.

    Into `single_losses` go the objectives whose loss has to be computed lane by lane, and why.
    """
    pool = make_pool([ask.client], [site.samples])
    if pool is None:
        return "the clients' data are not tensors in memory"
    model = site.model
    count = min(SAMPLES, pool.total)
    inputs, targets = pool.span(0, count)
    model.load(ask.x)
    try:
        with rng.torch_stream(model.x.device, site.seed, "model", "probe"):
            if batch_dependent(model, inputs):
                return "what the model says of a sample depends on the others in its batch"
            if ask.lanes:
                _try_lanes(ask, site, gradients, Batch(inputs, targets, (count,)), single_losses)
    except NoNumbersError as error:
        return str(error)
    except BROKEN as error:
        return f"the model cannot be batched over lanes ({first_line(error)})"
    return None


def _try_lanes(
    ask: Ask,
    site: Site,
    gradients: LaneGradients,
    one: Batch,
    single_losses: MutableMapping[str, str],
) -> None:
    """Raises where gradients of two lanes side by side are not those of each by itself."""
    model, count = site.model, one.sizes[0]
    lanes = ask.lanes[:2] if len(ask.lanes) > 1 else ask.lanes * 2
    batch = Batch(_repeat(one.inputs), _repeat(one.targets), (count, count))
    starts = torch.stack([ask.x, ask.x * 1.01])
    # Where products are rounded, the two ways round differently.
    rough = model.step_dtype is not None
    with model.mode(training=False):
        outputs = _repeat(model(one.inputs))
        with torch.no_grad():
            for name in site.client.objectives:
                pull = Pull(site.objectives[name], (0, 1), (1.0, 1.0))
                try:
                    pull_losses(pull, outputs, batch, batched=True)
                except BROKEN as error:
                    single_losses.setdefault(name, first_line(error))
        pulls = pulls_of(lanes, site)
        steps = LaneSteps(gradients, pulls, ask.local or LocalConfig(lr=0.0), starts)
        got, _ = steps.gradients(starts, pulls, batch)
        indices = torch.arange(count)
        for lane, start, mine in zip(lanes, starts, got, strict=True):
            model.load(start)
            loss = mixture_loss(site, lane.mixture, indices, set())
            if loss is None:
                continue
            want = model.gradient(loss)
            if not bool(want.isfinite().all()):
                raise NoNumbersError(
                    f"gradients of client `{ask.client}` are not finite, so that ways to compute them "
                    "cannot be compared"
                )
            off = float((mine - want).norm())
            if not off <= (0.1 if rough else 1e-3) * float(want.norm()) + 1e-9:
                raise ValueError(f"its gradients come out otherwise, by {off:.1e}")


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

    inputs, targets = pool.span(0, width)
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
