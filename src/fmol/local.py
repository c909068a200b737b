"""Steps 1–3 of the algorithm: what a client does with `x_t` and its own data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmol import rng
from fmol.anchors import anchored_layers, anchors_of, pull_back, softening
from fmol.engines.seam import CONTROL, Ask, Lane, LocalConfig, Reply, Site
from fmol.evaluation import batch_mean, evaluate
from fmol.misfit import check_fit

__all__ = [
    "batch_counts",
    "batch_rows",
    "batches",
    "check_site",
    "correction_of",
    "count_labels",
    "descend",
    "keep_control",
    "local_work",
    "mixture_loss",
    "own_stream",
    "pure_forward",
    "shares_of",
    "step_count",
]


def step_count(local: LocalConfig, n: int) -> int:
    """The number of gradient steps a client with `n` samples takes: `K`, or `E·⌈n/b⌉`."""
    if local.steps is not None:
        return local.steps
    assert local.epochs is not None
    batch = min(local.batch_size or n, n)
    return local.epochs * -(-n // batch)


def shares_of(local: LocalConfig, steps: int) -> list[float] | None:
    """How much of the direction of each of so many steps is in Δ; None where it is all of each.

    In the mean of the last `m` iterates a step is as often as iterates come after it: `(K − k)/m`.

    >>> shares_of(LocalConfig(lr=0.1, steps=5, average=0.6), 5)
    [1.0, 1.0, 1.0, 0.6666666666666666, 0.3333333333333333]
    """
    if not local.average:
        return None
    last = max(1, round(local.average * steps))
    return [min(1.0, (steps - k) / last) for k in range(steps)]


def batches(
    n: int, local: LocalConfig, *, seed: int, round: int, client: str
) -> Iterator[Tensor | None]:
    """For each step the indices of its batch; None is all the data in stored order.

    Each (seed, round, client) draws one permutation and steps take consecutive slices of it, the
    short last one included; used up, it is drawn anew. Nothing carries over to the next round, and
    all lanes of a client see the same batches (the algorithm's `ξ_i`).
    """
    steps, size = step_count(local, n), local.batch_size
    if size is None or size >= n:
        yield from (None for _ in range(steps))
        return
    generator = rng.stream(seed, "batches", round, client)
    for first in range(0, steps, -(-n // size)):
        order = torch.from_numpy(generator.permutation(n))
        yield from order.split(int(size))[: steps - first]


def batch_rows(n: int, local: LocalConfig, generator: np.random.Generator) -> NDArray[np.int64]:
    """All of `batches` at once, `[K, B]`, from a generator that is at the beginning of their stream.

    A short batch is filled up with its own first sample; `batch_counts` says how many of each count.
    """
    steps, size = step_count(local, n), local.batch_size
    if size is None or size >= n:
        return np.broadcast_to(np.arange(n), (steps, n))
    each = -(-n // size)
    order = np.empty((-(-steps // each), each * size), dtype=np.int64)
    for row in order:
        row[:n] = generator.permutation(n)
    if n < each * size:
        order[:, n:] = order[:, [(each - 1) * size]]
    return order.reshape(-1, size)[:steps]


def batch_counts(n: int, local: LocalConfig) -> NDArray[np.int64]:
    """How many samples are in each of `batches`, `[K]`."""
    steps, size = step_count(local, n), local.batch_size
    if size is None or size >= n:
        return np.full(steps, n)
    each = -(-n // size)
    counts = np.full(steps, size)
    counts[each - 1 :: each] = n - (each - 1) * size
    return counts


@dataclass
class Descent:
    """One lane's trajectory: Δ `[d]`, how many of its steps moved, and whose losses mark labels."""

    delta: Tensor
    moved: int = 0
    masked: set[str] = field(default_factory=set)
    correction: Tensor | None = None
    """What was added to every step, `[d]`; None where drift is not corrected."""


def descend(ask: Ask, lane: Lane, site: Site) -> Descent:
    """Steps 1–3 for one lane.

    Δ accumulates the directions actually stepped along, taken at `x^{t,0} … x^{t,K−1}`: without
    momentum, weight decay, a correction and the like those are the gradients of the algorithm's
    step 3. Where the last iterates are averaged, it accumulates as much of each as is in their mean.
    """
    local, model = ask.local, site.model
    assert local is not None
    layers, anchors = anchored_layers(site, local), anchors_of(ask, site)
    model.load(ask.x)
    softer = softening(local, model.layout, model.x)
    if softer is not None:
        model.load(softer * model.x)
    descent = Descent(torch.zeros_like(model.x), correction=correction_of(ask, lane.slot, site))
    velocity: Tensor | None = None
    moving = model.layout.moving(local.trained, model.x)
    steps = step_count(local, len(site.samples))
    shares = shares_of(local, steps)
    order = batches(
        len(site.samples), local, seed=site.seed, round=ask.round, client=site.client.id
    )
    with model.mode(training=local.training):
        for k, indices in enumerate(order):
            loss = mixture_loss(site, lane.mixture, indices, descent.masked)
            if loss is None:
                continue  # Nobody in this batch has a label: a step that does not move.
            direction = model.gradient(loss)
            if softer is not None:
                direction *= local.temperature
            if moving is not None:
                direction *= moving
            if local.clip_norm is not None:
                norm = torch.linalg.vector_norm(direction)
                direction *= (local.clip_norm / norm.clamp(min=local.clip_norm)).to(direction.dtype)
            if local.weight_decay:
                direction.add_(model.x, alpha=local.weight_decay)
            if local.proximal:
                direction.add_(model.x - ask.x, alpha=local.proximal)
            if layers:
                pull_back(direction, model.x - ask.x.to(model.x), layers, anchors)
            if local.momentum:
                velocity = (
                    direction if velocity is None else velocity.mul_(local.momentum).add_(direction)
                )
                direction = velocity
            if descent.correction is not None:
                # After momentum, which would multiply it; not in place, which would change momentum.
                direction = direction + descent.correction
            if moving is not None:  # What was added to the gradient moves nothing else either.
                direction = direction * moving
            descent.delta.add_(direction, alpha=1.0 if shares is None else shares[k])
            descent.moved += 1
            if k + 1 < steps:  # The last iterate is never looked at.
                model.step(direction, local.lr)
    if local.accumulate == "mean":
        descent.delta /= steps
    return descent


def correction_of(ask: Ask, slot: str, site: Site) -> Tensor | None:
    """`c_s − c_{s,i}` `[d]`, by which SCAFFOLD corrects every step; None where it is not asked for.

    Zero for a client that has no `c_{s,i}` yet: it cannot know how it drifts.
    """
    control = ask.payload.get(CONTROL + slot)
    if control is None:
        return None
    own = site.state.get(CONTROL + slot)
    return torch.zeros_like(control) if own is None else control - own


def keep_control(
    ask: Ask, slot: str, site: Site, delta: Tensor, moved: int, correction: Tensor | None
) -> bool:
    """Puts the mean of a lane's uncorrected directions into the client's state, as its `c_{s,i}`.

    They are those it took less the correction in each (SCAFFOLD's option II). True where the client
    had none before. A lane that never moved has nothing to say, and keeps what it has.
    """
    if correction is None or not moved:
        return False
    assert ask.local is not None
    first = CONTROL + slot not in site.state
    site.state[CONTROL + slot] = delta / ask.local.steps_in(moved) - correction
    return first


def mixture_loss(
    site: Site, mixture: Mapping[str, float], indices: Tensor | None, masked: set[str]
) -> Tensor | None:
    """Σ w_s f_{s,i} on one batch, None without a label; notes in `masked` whose loss marks labels."""
    inputs, targets = site.samples.batch(indices)
    size = len(site.samples) if indices is None else len(indices)
    outputs = site.model.step_outputs(inputs)
    total: Tensor | None = None
    for name, weight in mixture.items():
        value = site.objectives[name].loss(outputs, targets)
        mean, count = batch_mean(value, size, f"the loss of objective `{name}`")
        if isinstance(value, tuple):
            masked.add(name)
        if count and not mean.requires_grad:
            raise ValueError(
                f"the loss of objective `{name}` does not depend on the model's trainable parameters. "
                "Return a tensor computed from the outputs, without `.item()` or `.detach()`."
            )
        if count:
            mean = mean if weight == 1.0 else weight * mean
            total = mean if total is None else total + mean
    return total


def local_work(ask: Ask, site: Site) -> Reply:
    """The usual answer: losses at `x` where they are wanted, then one Δ per lane.

    A client without a single label for an objective does not hold it: such a lane sends nothing.
    """
    started = perf_counter()
    losses: dict[str, float] = {}
    held_out: dict[str, dict[str, float]] = {}
    if ask.evaluate:
        with own_stream(ask, "evaluate", site), pure_forward(site):
            losses, held_out = _evaluate(ask, site)
    deltas: dict[str, Tensor] = {}
    steps: dict[str, int] = {}
    first: list[str] = []
    for lane in ask.lanes:
        with own_stream(ask, f"lane {lane.slot}", site), pure_forward(site):
            descent = descend(ask, lane, site)
        for name in lane.mixture:
            if name not in site.counts:
                marks = name in descent.masked
                site.counts[name] = count_labels(site, ask.x, name) if marks else len(site.samples)
        if any(site.counts[name] for name in lane.mixture):
            deltas[lane.slot], steps[lane.slot] = descent.delta, descent.moved
            known = descent.delta, descent.moved, descent.correction
            first += [lane.slot] if keep_control(ask, lane.slot, site, *known) else []
    names = {*ask.evaluate, *(name for lane in ask.lanes for name in lane.mixture)}
    return Reply(
        client=site.client.id,
        deltas=deltas,
        steps=steps,
        first=tuple(first),
        losses=losses,
        samples={name: site.counts[name] for name in sorted(names)},
        held_out=held_out,
        seconds=perf_counter() - started,
    )


def _evaluate(ask: Ask, site: Site) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Losses at `x` on the client's training data, and losses and metrics on its held-out data."""
    losses: dict[str, float] = {}
    held_out: dict[str, dict[str, float]] = {}
    site.model.load(ask.x)
    wanted = [site.objectives[name] for name in ask.evaluate]
    scores = evaluate(
        site.model, site.samples, wanted, batch_size=site.evaluation_batch, metrics=False
    )
    for name, score in scores.items():
        site.counts[name] = score["loss"].samples
        if score["loss"].samples:
            losses[name] = score["loss"].value
    if ask.held_out and site.held_out is not None:
        scores = evaluate(
            site.model, site.held_out, wanted, batch_size=site.evaluation_batch, metrics=True
        )
        held_out = {o: {m: s.value for m, s in row.items()} for o, row in scores.items()}
    return losses, held_out


def count_labels(site: Site, x: Tensor, name: str) -> int:
    """How many of the client's samples carry a label for this objective.

    Only the loss can say, and it needs outputs to be called with.
    """
    site.model.load(x)
    scores = evaluate(
        site.model,
        site.samples,
        [site.objectives[name]],
        batch_size=site.evaluation_batch,
        metrics=False,
    )
    return scores[name]["loss"].samples


def own_stream(ask: Ask, purpose: str, site: Site) -> AbstractContextManager[None]:
    """Whatever the model draws, as dropout does, comes from a stream of this purpose's own."""
    name = ("model", ask.round, ask.phase, site.client.id, purpose)
    return rng.torch_stream(site.model.x.device, site.seed, *name)


def check_site(error: Exception, site: Site) -> None:
    """Raises `MisfitError` where a client's data are why the model raised `error`."""
    check_fit(error, site.model, site.samples, f"`data` of client `{site.client.id}`")
    if site.held_out is not None:
        check_fit(error, site.model, site.held_out, f"`held_out` of client `{site.client.id}`")


@contextmanager
def pure_forward(site: Site) -> Iterator[None]:
    """Refuses models whose forward pass writes a buffer or its inputs: lanes would see one another; and
    says so where the client's data are what a model fails on."""
    before = site.model.buffer_versions()
    held_out = [] if site.held_out is None else [site.held_out]
    versions = [samples.versions() for samples in (site.samples, *held_out)]
    try:
        yield
    except RuntimeError as error:
        check_site(error, site)
        raise
    if [samples.versions() for samples in (site.samples, *held_out)] != versions:
        raise ValueError(
            f"the model's forward pass changes its inputs in place, which are the data of client "
            f"`{site.client.id}` themselves. Work on a copy (`x = x - 0.5`, not `x -= 0.5`)."
        )
    after = site.model.buffer_versions()
    changed = [
        name
        for name, (buffer, version) in after.items()
        if name not in before or buffer is not before[name][0] or version != before[name][1]
    ]
    if changed:
        raise ValueError(
            f"the model's forward pass changes its buffer `{changed[0]}`, which would carry data "
            "from one client to the next. Use a layer without running state (GroupNorm, LayerNorm)."
        )
