"""All lanes at once: the same round as the sequential engine's, many trajectories side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmol import rng
from fmol.data import Samples, TensorSamples, as_samples, is_lazy, tree_leaves, tree_map
from fmol.engines.checks import check_reply, message_bytes, reply_bytes
from fmol.engines.graphs import StepGraph
from fmol.engines.lanes import (
    DEPENDS,
    Batch,
    LaneGradients,
    LaneModel,
    LaneSteps,
    Pull,
    batch_dependent,
    pull_losses,
    same_gradients,
)
from fmol.engines.memory import free_memory
from fmol.engines.pool import Pool, make_pool
from fmol.engines.schedule import Job, Schedule, plan_steps, pulls_of, walk
from fmol.engines.scores import Scores, score_clients
from fmol.engines.seam import (
    Ask,
    Fold,
    LocalConfig,
    Receipt,
    Reply,
    Site,
    Transform,
    Work,
)
from fmol.engines.sequential import SequentialEngine, Tally, said_where
from fmol.evaluation import EVALUATION_BATCH, evaluate
from fmol.federation import ClientList, Federation
from fmol.local import count_labels, local_work, mixture_loss, step_count
from fmol.objectives import Objective

__all__ = ["VectorizedEngine"]

logger = logging.getLogger("fmol")

MOST_LANES = 4096
"""More at a time win nothing."""
GRAPH_AT = 2
"""The use of a round's shape at which it becomes a CUDA graph."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, how much lanes in flight may take."""
BROKEN = (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError, IndexError)
"""What a model or a loss that cannot be batched raises."""


@dataclass(frozen=True)
class _Rows:
    """What the lanes of a chunk came to, in the order of its jobs."""

    deltas: Tensor
    moved: list[int]
    finite: list[bool]
    squares: list[float]


class VectorizedEngine(SequentialEngine):
    """Steps all lanes of a round together, in chunks of at most `lanes_in_flight`.

    What cannot be computed so (another work than the usual one, a model or data that cannot be
    batched) is computed one by one as in the sequential engine, and the receipt says why.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
        lanes_in_flight: int | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(
            federation,
            seed=seed,
            device=device,
            evaluation_batch=evaluation_batch,
            cache_bytes=cache_bytes,
        )
        if lanes_in_flight != "auto" and not (
            isinstance(lanes_in_flight, int) and lanes_in_flight >= 1
        ):
            raise ValueError(
                f"`lanes_in_flight` must be 'auto' or a whole number of at least 1, got "
                f"{lanes_in_flight!r}."
            )
        self._gradients = LaneGradients(LaneModel(self._model), self._loss_is_batched, self._say)
        self._lanes_in_flight = lanes_in_flight
        self._limits: dict[tuple[int, ...], int] = {}
        """Shape of a step → how many lanes of it fit into memory."""
        self._reasons: dict[bool, str | None] = {}
        """With lanes or without → why clients are computed one by one, None where they are not."""
        self._single_losses: dict[str, str] = {}
        """Objective → why its loss is computed lane by lane."""
        self._everyone = _pool_of_all(federation, self.device, cache_bytes)
        self._notes: list[str] = []
        self._most = MOST_LANES
        self._uses: dict[Any, int] = {}
        self._graphs: dict[Any, StepGraph | None] = {}
        self._draws = any(
            isinstance(layer, nn.modules.dropout._DropoutNd | nn.RReLU)
            for layer in self._model.module.modules()
        )

    # ---- a round -----------------------------------------------------------------------------

    def map(
        self,
        asks: Sequence[Ask],
        fold: Fold | None = None,
        *,
        work: Work | None = None,
        transforms: Sequence[Transform] = (),
    ) -> tuple[Any, Receipt]:
        started = perf_counter()
        tally = Tally()
        self._notes = tally.notes
        self._gradients.begin_round()
        asks = sorted(asks, key=lambda ask: ask.client)
        reason = self._why_not(asks, work)
        if reason is not None:
            tally.notes.append(f"clients were computed one by one: {reason}")
            self._one_by_one(asks, fold, work, transforms, tally)
        for chunk in self._chunks(asks) if reason is None else ():
            begun = perf_counter()
            sites = {ask.client: self._site_of(ask) for ask in chunk}
            pool = self._pool_for(sites)
            if pool is None:
                tally.notes.append("clients whose data are not alike were computed one by one")
                self._one_by_one(chunk, fold, work, transforms, tally)
                continue
            jobs = self._jobs(chunk, sites)
            replies, rows = self._compute(chunk, sites, jobs, pool)
            seconds = (perf_counter() - begun) / len(chunk)
            for ask in chunk:
                reply = replace(replies[ask.client], seconds=seconds)
                mine = {job.lane.slot: i for i, job in enumerate(jobs) if job.ask is ask}
                site = sites[ask.client]
                replies[ask.client] = self._let_in(reply, ask, site, mine, rows, transforms, tally)
            if fold is not None:
                _fold(fold, chunk, jobs, rows, replies, one_by_one=bool(transforms))
        result = None if fold is None else fold.result()
        return result, tally.receipt(perf_counter() - started)

    def _say(self, note: str) -> None:
        self._notes.append(note)

    def _let_in(
        self,
        reply: Reply,
        ask: Ask,
        site: Site,
        mine: Mapping[str, int],
        rows: _Rows,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> Reply:
        """A client's reply after its way to the server and the checks there; `mine` are its rows."""
        with said_where(ask):
            for transform in transforms:
                reply = transform.client(reply, ask, site)
            bytes_up, bytes_down = reply_bytes(reply), message_bytes(ask)
            for transform in reversed(transforms):
                reply = transform.server(reply, ask)
        finite = () if transforms else [slot for slot, i in mine.items() if rows.finite[i]]
        layout, limit = self.federation.layout, len(site.samples)
        reply, refusals = check_reply(reply, ask, site.client, layout, limit, finite)
        if refusals:  # What is refused leaves no trace at the client either.
            self._pending.pop(ask.client, None)
        else:
            self._pending[ask.client] = dict(site.state)
        norms = None
        if not transforms:
            norms = {slot: math.sqrt(rows.squares[mine[slot]]) for slot in reply.deltas}
        tally.add(reply, refusals, bytes_up, bytes_down, norms)
        return reply

    def _jobs(
        self, chunk: Sequence[Ask], sites: Mapping[str, Site], local: LocalConfig | None = None
    ) -> list[Job]:
        """The lanes of some asks, in their order; with `local` in place of what they are told."""
        told = chunk if local is None else [replace(ask, local=local) for ask in chunk]
        return [Job(ask, lane, sites[ask.client]) for ask in told for lane in ask.lanes]

    def _pool_for(self, sites: Mapping[str, Site]) -> Pool | None:
        """The clients' samples in one place; None where they are not tensors of one kind."""
        if self._everyone is not None:
            return self._everyone
        return make_pool(list(sites), [site.samples for site in sites.values()])

    def _site_of(self, ask: Ask) -> Site:
        with said_where(ask):
            return self._site(ask.client)

    def _compute(
        self, chunk: Sequence[Ask], sites: Mapping[str, Site], jobs: Sequence[Job], pool: Pool
    ) -> tuple[dict[str, Reply], _Rows]:
        """What every client of a chunk answers, and the rows that its updates are."""
        scores, held_out = self._scores(chunk, sites, pool)
        rows = self._descend(jobs, pool)
        replies = {}
        for ask in chunk:
            site = sites[ask.client]
            names = {*ask.evaluate, *(name for lane in ask.lanes for name in lane.mixture)}
            for name in sorted(names - set(site.counts)):
                marks = name in self._gradients.masked
                site.counts[name] = count_labels(site, ask.x, name) if marks else len(site.samples)
            mine = [(i, job.lane) for i, job in enumerate(jobs) if job.ask is ask]
            # A client without a single label for an objective does not hold it.
            sent = [(i, lane) for i, lane in mine if any(site.counts[n] for n in lane.mixture)]
            losses = {n: s["loss"] for n, s in scores.get(ask.client, {}).items()}
            replies[ask.client] = Reply(
                client=ask.client,
                deltas={lane.slot: rows.deltas[i] for i, lane in sent},
                steps={lane.slot: rows.moved[i] for i, lane in sent},
                losses={n: score.value for n, score in losses.items() if score.samples},
                samples={name: site.counts[name] for name in sorted(names)},
                held_out={
                    o: {m: score.value for m, score in row.items()}
                    for o, row in held_out.get(ask.client, {}).items()
                },
            )
        return replies, rows

    # ---- what can be batched -----------------------------------------------------------------

    def _why_not(self, asks: Sequence[Ask], work: Work | None) -> str | None:
        """Why these asks are carried out one by one; None where they are not."""
        if work is not None and work is not local_work:
            return f"`{getattr(work, '__name__', type(work).__name__)}` is not the usual work"
        if not asks:
            return None
        first = next((ask for ask in asks if ask.lanes), asks[0])
        if bool(first.lanes) not in self._reasons:
            reason = self._probe(first)
            self._reasons[bool(first.lanes)] = reason
            if reason is not None:
                logger.info("clients are computed one by one: %s", reason)
        return self._reasons[bool(first.lanes)]

    def _probe(self, ask: Ask) -> str | None:
        """Why the model or the data cannot be batched, tried on a few samples of one client."""
        site = self._site_of(ask)
        pool = make_pool([ask.client], [site.samples])
        if pool is None:
            return "the clients' data are not tensors in memory"
        count = min(8, pool.total)
        inputs, targets = pool.span(0, count)
        self._model.load(ask.x)
        try:
            with rng.torch_stream(self.device, self.seed, "model", "probe"):
                if batch_dependent(self._model, inputs):
                    return "what the model says of a sample depends on the others in its batch"
                if ask.lanes:
                    self._probe_lanes(ask, site, Batch(inputs, targets, (count,)))
        except BROKEN as error:
            return f"the model cannot be batched over lanes ({_first_line(error)})"
        return None

    def _probe_lanes(self, ask: Ask, site: Site, one: Batch) -> None:
        """Raises where gradients of two lanes side by side are not those of each by itself."""
        model, count = self._model, one.sizes[0]
        lanes = ask.lanes[:2] if len(ask.lanes) > 1 else ask.lanes * 2
        batch = Batch(_repeat(one.inputs), _repeat(one.targets), (count, count))
        starts = torch.stack([ask.x, ask.x * 1.01])
        model.module.eval()
        try:
            self._probe_losses(site, _repeat(model(one.inputs)), batch)
            pulls = pulls_of(lanes, site)
            local = ask.local or LocalConfig(lr=0.0)
            steps = LaneSteps(self._gradients, pulls, local, starts)
            got, _ = steps.gradients(starts, pulls, batch)
            indices = torch.arange(count)
            for lane, start, mine in zip(lanes, starts, got, strict=True):
                model.load(start)
                loss = mixture_loss(site, lane.mixture, indices, set())
                if loss is None:
                    continue
                want = model.gradient(loss)
                error = float((mine - want).norm())
                if not error <= 1e-3 * float(want.norm()) + 1e-9:
                    raise ValueError(f"its gradients come out otherwise, by {error:.1e}")
        finally:
            model.module.train()

    def _probe_losses(self, site: Site, outputs: Any, batch: Batch) -> None:
        """Notes the objectives whose loss cannot be computed for several lanes in one call."""
        with torch.no_grad():
            for name in site.client.objectives:
                pull = Pull(site.objectives[name], (0, 1), (1.0, 1.0))
                try:
                    pull_losses(pull, outputs, batch, batched=True)
                except BROKEN as error:
                    self._single_losses.setdefault(name, _first_line(error))

    def _loss_is_batched(self, objective: str) -> bool:
        reason = self._single_losses.get(objective)
        if reason is not None:
            self._notes.append(f"the loss of `{objective}` was computed lane by lane: {reason}")
        return reason is None

    # ---- chunks ------------------------------------------------------------------------------

    def _chunks(self, asks: Sequence[Ask]) -> Iterator[list[Ask]]:
        """Whole clients, as many as have lanes that fit into memory together."""
        most, lanes = self._most_lanes(asks), 0
        self._most = most
        chunk: list[Ask] = []
        for ask in asks:
            if chunk and lanes + len(ask.lanes) > most:
                yield chunk
                chunk, lanes = [], 0
            chunk.append(ask)
            lanes += max(len(ask.lanes), 1)
        if chunk:
            yield chunk

    def _most_lanes(self, asks: Sequence[Ask]) -> int:
        if self._lanes_in_flight != "auto":
            return self._lanes_in_flight
        first = next((ask for ask in asks if ask.lanes), None)
        if first is None or first.local is None:
            return MOST_LANES
        site = self._site(first.client)
        width = min(first.local.batch_size or len(site.samples), len(site.samples))
        key = (width,)
        if key not in self._limits:
            self._limits[key] = self._probe_memory(first, site, width)
        return self._limits[key]

    def _probe_memory(self, ask: Ask, site: Site, width: int) -> int:
        """How many lanes with batches of `width` fit, from what one of them keeps for its gradient."""
        pool = make_pool([ask.client], [site.samples])
        assert pool is not None
        kept = [0]

        def count(tensor: Tensor) -> Tensor:
            kept[0] += tensor.numel() * tensor.element_size()
            return tensor

        inputs, targets = pool.span(0, width)
        one = Batch(_repeat(inputs, 1), _repeat(targets, 1), (width,))
        steps = LaneSteps(
            self._gradients,
            pulls_of(ask.lanes[:1], site),
            ask.local or LocalConfig(lr=0.0),
            ask.x[None],
        )
        with (
            rng.torch_stream(self.device, self.seed, "model", "probe"),
            torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
        ):
            steps.gradients(steps.X, steps.pulls, one)
        row = ask.x.numel() * ask.x.element_size()
        batch = sum(t.numel() * t.element_size() for t in tree_leaves((one.inputs, one.targets)))
        # Parameters, Δ, gradient, direction and what is on the way between them.
        lane = 2 * kept[0] + 2 * batch + 6 * row
        return max(1, min(MOST_LANES, int(MEMORY_SHARE * free_memory(self.device) / lane)))

    # ---- steps -------------------------------------------------------------------------------

    def _descend(self, jobs: Sequence[Job], pool: Pool) -> _Rows:
        """Lines 1–3 for every job; halves what it does at a time where memory runs out."""
        parts: list[tuple[Tensor, Tensor]] = []
        # A single client may have more lanes than fit.
        start, size = 0, min(len(jobs), self._most)
        while start < len(jobs):
            try:
                parts.append(self._steps(jobs[start : start + size], pool))
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                size = (size + 1) // 2
                torch.cuda.empty_cache()
                self._limits = dict.fromkeys(self._limits, size)
                self._most = size
                note = f"memory ran out: {size} lanes at a time from here on"
                logger.warning(note)
                self._notes.append(note)
                continue
            start += size
        if not parts:
            return _Rows(torch.empty(0), [], [], [])
        deltas = parts[0][0] if len(parts) == 1 else torch.cat([delta for delta, _ in parts])
        moved = torch.cat([moved for _, moved in parts])
        squares = torch.linalg.vector_norm(deltas, dim=1, dtype=torch.float64) ** 2
        finite = torch.isfinite(deltas).all(1)
        # One transfer for all lanes of a chunk.
        table = torch.stack([moved.double(), finite.double(), squares]).tolist()
        return _Rows(deltas, [int(m) for m in table[0]], [f > 0 for f in table[1]], table[2])

    def _steps(self, jobs: Sequence[Job], pool: Pool) -> tuple[Tensor, Tensor]:
        """Δ of every job `[L, d]`, and how many of its steps moved `[L]`."""
        first, pulls = jobs[0].ask, pulls_of([job.lane for job in jobs], jobs[0].site)
        local = first.local
        assert local is not None
        schedule = plan_steps(jobs, pool, self.seed, self.device)
        starts = torch.stack([job.ask.x for job in jobs])
        self._model.module.train(local.training)
        name = ("model", first.round, first.phase, "lanes", first.client, first.lanes[0].slot)
        try:
            with rng.torch_stream(self.device, self.seed, *name):
                graph = self._graph(schedule, pulls, local, starts, pool)
                if graph is None:
                    steps = LaneSteps(self._gradients, pulls, local, starts)
                    walk(steps, schedule, schedule.rows, pool)
                    delta, moved = steps.delta, steps.moved
                else:
                    replayed = graph(starts, torch.stack(schedule.rows), local.lr)
                    # The graph's own tensors are written to again when it is replayed.
                    delta, moved = replayed.delta.clone(), replayed.moved.clone()
                    if graph.calls & (graph.calls - 1) == 0:  # Ever more seldom.
                        steps = LaneSteps(self._gradients, pulls, local, starts)
                        walk(steps, schedule, schedule.rows, pool)
                        if not same_gradients(delta, steps.delta):
                            self._graphs = dict.fromkeys(self._graphs)
                            self._say(DEPENDS)
                            delta, moved = steps.delta, steps.moved
        finally:
            self._model.module.train()
        if local.accumulate == "mean":
            counts = [step_count(local, len(job.site.samples)) for job in jobs]
            delta /= torch.tensor(counts, device=self.device)[:, None]
        return delta, moved

    def _graph(
        self,
        schedule: Schedule,
        pulls: Sequence[Pull],
        local: LocalConfig,
        starts: Tensor,
        pool: Pool,
    ) -> StepGraph | None:
        """The steps as a CUDA graph; None where there is none, or it is not worth one yet."""
        if self.device.type != "cuda" or pool is not self._everyone or not schedule.even:
            return None
        if self._draws or self._single_losses:
            return None  # What draws, or looks at values, is not the same every time.
        key = (
            tuple(starts.shape),
            len(schedule.rows),
            tuple(schedule.rows[0].shape),
            tuple((pull.objective.name, pull.lanes, pull.weights) for pull in pulls),
            replace(local, lr=0.0),
        )
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] < GRAPH_AT or (key not in self._graphs and len(self._graphs) >= 8):
            return None
        if key not in self._graphs:

            def body(start: Tensor, rows: Tensor, lr: Tensor) -> LaneSteps:
                steps = LaneSteps(self._gradients, pulls, local, start, lr)
                walk(steps, schedule, list(rows), pool)
                return steps

            try:
                stacked = torch.stack(schedule.rows)
                self._graphs[key] = StepGraph(body, starts, stacked, local.lr)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._graphs[key] = None
                note = f"steps are started one by one: no CUDA graph ({_first_line(error)})"
                logger.info(note)
                self._notes.append(note)
        return self._graphs[key]

    # ---- losses ------------------------------------------------------------------------------

    def _scores(
        self, chunk: Sequence[Ask], sites: Mapping[str, Site], pool: Pool
    ) -> tuple[Scores, Scores]:
        """Losses at `x` on the clients' training data, and scores on their held-out data."""
        asked = [ask for ask in chunk if ask.evaluate]
        if not asked:
            return {}, {}
        self._model.load(asked[0].x)
        wanted = {
            ask.client: [sites[ask.client].objectives[name] for name in ask.evaluate]
            for ask in asked
        }
        size = max(self.evaluation_batch, 4096 if self.device.type == "cuda" else 0)
        first = asked[0]
        name = ("model", first.round, first.phase, first.client, "evaluate")
        with rng.torch_stream(self.device, self.seed, *name):
            scores = score_clients(self._model, pool, wanted, batch_size=size, metrics=False)
            for client, row in scores.items():
                sites[client].counts.update({n: s["loss"].samples for n, s in row.items()})
            held_out = self._held_out(asked, sites, wanted, size)
        return scores, held_out

    def _held_out(
        self,
        asked: Sequence[Ask],
        sites: Mapping[str, Site],
        wanted: Mapping[str, Sequence[Objective]],
        size: int,
    ) -> Scores:
        """Losses and metrics at `x` on the clients' own held-out data, where they have any."""
        own: dict[str, Samples] = {}
        for ask in asked:
            samples = sites[ask.client].held_out
            if ask.held_out and samples is not None:
                own[ask.client] = samples
        if not own:
            return {}
        pool = make_pool(list(own), list(own.values()))
        if pool is not None:
            mine = {client: wanted[client] for client in own}
            return score_clients(self._model, pool, mine, batch_size=size, metrics=True)
        self._notes.append("held-out data that are not alike were evaluated client by client")
        return {
            client: evaluate(self._model, samples, wanted[client], batch_size=size, metrics=True)
            for client, samples in own.items()
        }


def _pool_of_all(federation: Federation, device: torch.device, most: int) -> Pool | None:
    """All clients' training data on the device, where they are tensors at hand and not too large."""
    if not isinstance(federation.population, ClientList):
        return None
    parts, total = {}, 0
    for id in federation.population.ids():
        data = federation.client(id).data
        if is_lazy(data):
            return None
        samples = as_samples(data, f"`data` of client `{id}`")
        total += samples.nbytes
        if not isinstance(samples, TensorSamples) or total > most:
            return None
        parts[id] = samples
    pool = make_pool(list(parts), list(parts.values()))
    return None if pool is None else pool.to(device)


def _fold(
    fold: Fold,
    chunk: Sequence[Ask],
    jobs: Sequence[Job],
    rows: _Rows,
    replies: Mapping[str, Reply],
    *,
    one_by_one: bool,
) -> None:
    """Folds a chunk's checked replies in: all rows at once where the fold can and they are as sent."""
    add_rows = getattr(fold, "add_rows", None)
    if one_by_one or add_rows is None:
        for ask in chunk:
            fold.add(replies[ask.client], ask)
        return
    if not jobs:
        return
    deltas = rows.deltas
    if not all(rows.finite):  # Weight zero does not silence what is not a number.
        deltas = torch.where(torch.tensor(rows.finite, device=deltas.device)[:, None], deltas, 0)
    weights = []
    for job in jobs:
        reply = replies[job.ask.client]
        let_in = job.lane.slot in reply.deltas
        most = max(reply.samples.get(name, 0) for name in job.lane.mixture)
        weights.append(float(most) if let_in else 0.0)
    squares = [s if f else 0.0 for s, f in zip(rows.squares, rows.finite, strict=True)]
    add_rows([job.lane.slot for job in jobs], deltas, weights, rows.moved, squares)


def _repeat(tree: Any, times: int = 2) -> Any:
    """Every tensor of a nest `[B, …]` as `[times, B, …]`."""
    return tree_map(lambda leaf: leaf.expand(times, *leaf.shape), tree)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
