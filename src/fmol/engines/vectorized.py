"""All lanes at once: the same round as the sequential engine's, many trajectories side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fmol import rng
from fmol.anchors import anchored_layers, anchors_of
from fmol.data import Samples, TensorSamples, as_samples, is_lazy
from fmol.engines.gradients import LaneGradients, first_line
from fmol.engines.memory import free_memory, lane_bytes
from fmol.engines.pool import Pool, make_pool
from fmol.engines.probe import Trial
from fmol.engines.replies import Replies, Rows, Steps
from fmol.engines.schedule import Job
from fmol.engines.scores import Scorer, Scores
from fmol.engines.seam import Ask, Fold, LocalConfig, Receipt, Site, Transform, Work
from fmol.engines.sequential import SequentialEngine, Tally, say_where
from fmol.engines.worker import Compile, LaneWorker
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import ClientList, Federation
from fmol.layout import FlatModel, all_finite, squared_norm
from fmol.local import correction_of, descend, local_work, own_stream, pure_forward
from fmol.objectives import Objective
from fmol.precision import Precision, products, step_dtype
from fmol.wording import many

__all__ = ["VectorizedEngine"]

logger = logging.getLogger("fmol")

MOST_LANES = 4096
"""More at a time win nothing."""
MOST_SCORED = 4096
"""Samples that are evaluated at a time on a GPU."""
ENOUGH_BROKEN = 3
"""After so many lanes that are not finite by themselves either, none is looked at again in a round."""
ENOUGH_AGAIN = 3
"""From so many lanes on that are computed again alone, notes say what that costs."""
MEMORY_SHARE = 0.5
"""Of the memory that is free, how much lanes in flight may take."""
MOST_ON_CPU, LARGEST_ON_CPU = 2**27, 2**25
"""Bytes that lanes in flight take on a CPU, all together and in one tensor. Beyond it every step is new
memory from the system, page by page, and far from any cache."""


class _Begun(NamedTuple):
    """A chunk whose steps the device was told to take."""

    jobs: list[Job]
    replies: Replies
    rows: Callable[[], Rows]
    clients: int
    seconds: float
    """What it took so far, without what was done for other chunks in between."""
    tally: Tally


class VectorizedEngine(SequentialEngine):
    """Steps all lanes of a round together, in chunks of at most `lanes_in_flight`.

    What cannot be computed so (another work than the usual one, a model or data that cannot be
    batched) is computed one by one as in the sequential engine, and the receipt says why. With
    several `devices` each takes a part of the lanes; the first is where the server computes.
    `compile` says when steps are compiled for a CUDA device, and `say` is told when they are.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        devices: Sequence[torch.device | str] = (),
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
        lanes_in_flight: int | Literal["auto"] = "auto",
        precision: Precision = "fp32",
        compile: Compile = "auto",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(
            federation,
            seed=seed,
            device=devices[0] if devices else device,
            evaluation_batch=evaluation_batch,
            cache_bytes=cache_bytes,
            precision=precision,
        )
        if lanes_in_flight != "auto" and not (
            isinstance(lanes_in_flight, int) and lanes_in_flight >= 1
        ):
            raise ValueError(
                f"`lanes_in_flight` must be 'auto' or a whole number of at least 1, got "
                f"{lanes_in_flight!r}."
            )
        if compile not in ("auto", "always", "never"):
            raise ValueError(f"`compile` must be 'auto', 'always' or 'never', got {compile!r}.")
        others = [torch.device(other) for other in devices[1:]]
        models = [FlatModel(federation.model, other, step_dtype(precision)) for other in others]
        self._workers = [
            LaneWorker(
                model,
                seed=seed,
                compile=compile,
                batched=self._loss_is_batched,
                note=self._say,
                say=say,
            )
            for model in (self._model, *models)
        ]
        self._lanes_in_flight = lanes_in_flight
        self._limits: dict[tuple[int, ...], int] = {}
        """Shape of a step → how many lanes of it fit into memory."""
        self._single_losses: dict[str, str] = {}
        """Objective → why its loss is computed lane by lane."""
        self._trial = Trial(self._gradients, self._single_losses)
        self._everyone = _pool_of_all(federation, self.device, cache_bytes)
        self._copies: dict[torch.device, Pool] = {}
        self._notes: list[str] = []
        self._broken_alone = 0
        """Lanes of this round that were not finite by themselves either."""
        self._most = MOST_LANES
        at_once = max(evaluation_batch, MOST_SCORED if self.device.type == "cuda" else 0)
        self._scorer = Scorer(self._model, at_once, self._warn, self._trial.apart, evaluation_batch)
        self._begun: _Begun | None = None
        """The chunk that is still to be let in."""
        # A CPU is done with a chunk when it has been told of it: nothing goes on beside the next one.
        self._overlaps = self.device.type == "cuda"

    def expect(self, rounds: int) -> None:
        """Takes note of how many rounds are to come: whether compiling pays hangs on it."""
        for worker in self._workers:
            worker.rounds_left = rounds

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        super().close()

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
        self._notes, self._broken_alone = tally.notes, 0
        for worker in self._workers:
            worker.gradients.begin_round()
        asks = sorted(asks, key=lambda ask: ask.client)
        with products(self.precision, self.device):
            self._carry_out(asks, fold, work, transforms, tally)
        result = None if fold is None else fold.result()
        return result, tally.receipt(perf_counter() - started)

    def _carry_out(
        self,
        asks: Sequence[Ask],
        fold: Fold | None,
        work: Work | None,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> None:
        """Computes all asks, chunk by chunk, and folds their replies in."""
        reason = self._why_not(asks, work)
        if reason is not None:
            tally.notes.append(f"clients were computed one by one: {reason}")
            self._one_by_one(asks, fold, work, transforms, tally)
            return
        try:
            for chunk in self._chunks(asks):
                left = [chunk]
                while left:
                    left[:1] = self._begin(left[0], fold, work, transforms, tally)
            self._end()
        finally:
            self._begun = None  # After an error nothing more of this round is let in.

    def _begin(
        self,
        chunk: list[Ask],
        fold: Fold | None,
        work: Work | None,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> list[list[Ask]]:
        """Tells the device to take a chunk's steps, and lets in the chunk before.

        Gives what is to be begun in its place: nothing, or where memory ran out smaller chunks.
        """
        sites = {ask.client: self._site_of(ask) for ask in chunk}
        pool = self._pool_for(sites)
        if pool is None or not self._overlaps:
            self._end()
        if pool is None:
            tally.notes.append("clients whose data are not alike were computed one by one")
            self._one_by_one(chunk, fold, work, transforms, tally)
            return []
        started = perf_counter()
        try:
            taken = self._take(chunk, sites, pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - what is wrong at a client is said by it alone.
            self._one_by_one_after(error, chunk, fold, work, transforms, tally)
            return []
        if taken is None:
            return self._make_room(chunk)
        jobs, steps = taken
        rows = steps.rows()
        seconds = perf_counter() - started
        # While the device computes: the chunk before, whose updates are gone before scores take memory,
        # and what is known without this one.
        self._end()
        started = perf_counter()
        for worker in self._workers:
            worker.draw_ahead()
        try:
            scores, held_out = self._scores(chunk, sites, pool)  # Here it waits for the device.
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - what is wrong at a client is said by it alone.
            self._one_by_one_after(error, chunk, fold, work, transforms, tally)
            return []
        replies = Replies(chunk, sites, jobs, self.federation.layout, transforms, fold)
        replies.prepare(steps.deltas, scores, held_out, self._masked)
        replies.fold_ahead(steps.deltas)
        seconds += perf_counter() - started
        self._begun = _Begun(jobs, replies, rows, len(chunk), seconds, tally)
        return []

    def _one_by_one_after(
        self,
        error: BaseException,
        chunk: list[Ask],
        fold: Fold | None,
        work: Work | None,
        transforms: Sequence[Transform],
        tally: Tally,
    ) -> None:
        """Carries out a chunk in which something failed: alone, a client fails with words of its own,
        or not at all, where it was only batching that failed."""
        self._end()
        self._one_by_one(chunk, fold, work, transforms, tally)
        tally.notes.append(
            f"{many(len(chunk), 'client')} computed one by one, since side by side they failed "
            f"({first_line(error)})"
        )

    def _end(self) -> None:
        """Lets in what the chunk before came to, if there is one; the device may still compute it."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        started = perf_counter()
        replies, rows = begun.replies, begun.rows()  # And here, where no scores are asked for.
        if not all(rows.finite):
            rows = self._look_again(begun.jobs, rows)
        seconds = (begun.seconds + perf_counter() - started) / begun.clients
        lines = replies.lines(rows)
        if lines is not None:  # Then no client has anything new to keep either.
            begun.tally.add_lines(lines, rows.squares, seconds)
        else:
            for answer in replies.finish(rows):
                reply, up, down = answer.reply, answer.up, answer.down
                self._hold_back(answer.site, reply, answer.refusals)
                begun.tally.add(reply, answer.refusals, up, down, answer.norms, seconds=seconds)
        replies.fold_in(rows)

    def _look_again(self, jobs: Sequence[Job], rows: Rows) -> Rows:
        """The rows with what is finite where a lane is computed by itself.

        Side by side, gradients go back through all outputs, and zero times infinity is no number: a
        head that a lane has nothing to do with may break it. Once a few are broken by themselves too,
        the steps are what is wrong, and nothing is looked at again in this round.
        """
        moved, finite, squares = list(rows.moved), list(rows.finite), list(rows.squares)
        again = 0
        for i, job in enumerate(jobs):
            if finite[i] or self._broken_alone >= ENOUGH_BROKEN:
                continue
            if not self._trial.leaves_some(job.lane.mixture):
                continue
            ask, lane, site = job.ask, job.lane, job.site
            with own_stream(ask, f"lane {lane.slot}", site), pure_forward(site):
                descent = descend(ask, lane, site)
            if not all_finite(descent.delta):
                self._broken_alone += 1
                continue
            rows.deltas[i] = descent.delta
            moved[i], finite[i], squares[i] = descent.moved, True, squared_norm(descent.delta)
            again += 1
        if not again:
            return rows
        cost = ", which takes as long as one after the other" if again >= ENOUGH_AGAIN else ""
        told = f"{many(again, 'lane')} computed again alone{cost}"
        self._say(f"{told}: outputs they do not use overflow")
        # Another tensor, by which a fold can tell that its sums are not of these rows.
        return Rows(rows.deltas.view_as(rows.deltas), moved, finite, squares)

    def _take(
        self, chunk: Sequence[Ask], sites: Mapping[str, Site], pool: Pool
    ) -> tuple[list[Job], Steps] | None:
        """The lanes of a chunk, and their steps; None where memory ran out and less may be tried."""
        try:
            jobs = self._jobs(chunk, sites)
            return jobs, self._descend(jobs, pool)
        except torch.OutOfMemoryError:
            if self._begun is None and len(chunk) == 1:
                raise
            return None

    def _make_room(self, chunk: list[Ask]) -> list[list[Ask]]:
        """After memory ran out: the same chunk once there is no other beside it, or its halves."""
        if self._begun is not None:
            self._overlaps = False
            self._warn("memory ran out: one chunk of lanes after the other from here on")
            self._end()
            torch.cuda.empty_cache()
            return [chunk]
        half = (len(chunk) + 1) // 2
        self._keep_to(max(1, sum(len(ask.lanes) for ask in chunk[:half])))
        return [chunk[:half], chunk[half:]]

    def _keep_to(self, lanes: int) -> None:
        """After memory ran out: no more lanes at a time than these."""
        torch.cuda.empty_cache()
        lanes = min(lanes, self._most)
        self._limits = dict.fromkeys(self._limits, lanes)
        self._most = lanes
        if self._lanes_in_flight != "auto":
            self._lanes_in_flight = lanes
        self._warn(f"memory ran out: {lanes} lanes at a time from here on")

    def _warn(self, note: str) -> None:
        logger.warning(note)
        self._notes.append(note)

    def _say(self, note: str) -> None:
        self._notes.append(note)

    def _jobs(
        self, chunk: Sequence[Ask], sites: Mapping[str, Site], local: LocalConfig | None = None
    ) -> list[Job]:
        """The lanes of some asks, in their order; with `local` in place of what they are told."""
        told = chunk if local is None else [replace(ask, local=local) for ask in chunk]
        jobs: list[Job] = []
        for ask in told:
            site = sites[ask.client]
            anchors = anchors_of(ask, site) if ask.lanes else ()
            for lane in ask.lanes:
                correction = correction_of(ask, lane.slot, site) if ask.payload else None
                jobs.append(Job(ask, lane, site, correction, anchors))
        return jobs

    def _pool_for(self, sites: Mapping[str, Site]) -> Pool | None:
        """The clients' samples in one place; None where they are not tensors of one kind."""
        if self._everyone is not None:
            return self._everyone
        return make_pool(list(sites), [site.samples for site in sites.values()])

    def _site_of(self, ask: Ask) -> Site:
        try:
            return self._site(ask.client)
        except Exception as error:
            say_where(error, ask)
            raise

    # ---- what can be batched -----------------------------------------------------------------

    def _why_not(self, asks: Sequence[Ask], work: Work | None) -> str | None:
        """Why these asks are carried out one by one; None where they are not."""
        if work is not None and work is not local_work:
            return f"`{getattr(work, '__name__', type(work).__name__)}` is not the usual work"
        if not asks:
            return None
        known = self._trial.reason
        with products("fp32", self.device):  # What is rounded would hide what is different.
            reason = self._trial.why_not(asks, self._site_of)
        for worker in self._workers:
            worker.single_losses = bool(self._single_losses)
        if reason is not None and reason != known:
            logger.info("clients are computed one by one: %s", reason)
        return reason

    def _loss_is_batched(self, objective: str) -> bool:
        reason = self._single_losses.get(objective)
        if reason is not None:
            self._notes.append(f"the loss of `{objective}` was computed lane by lane: {reason}")
        return reason is None

    @property
    def _gradients(self) -> LaneGradients:
        return self._workers[0].gradients

    @property
    def _masked(self) -> set[str]:
        """Objectives whose loss marks which samples have a label."""
        return set().union(*(worker.gradients.masked for worker in self._workers))

    # ---- chunks ------------------------------------------------------------------------------

    def _chunks(self, asks: Sequence[Ask]) -> Iterator[list[Ask]]:
        """Whole clients, as many as have lanes that fit into memory together, and evenly many."""
        most = self._most = self._most_lanes(asks)
        lanes = [max(len(ask.lanes), 1) for ask in asks]
        if len(set(lanes)) == 1:
            each = max(1, most // lanes[0])
            parts = -(-len(asks) // each)
            # Steps are recorded and compiled by shape: best if all chunks have the same.
            even = next((n for n in range(parts, 2 * parts) if len(asks) % n == 0), parts)
            size = -(-len(asks) // even)
            yield from (list(asks[i : i + size]) for i in range(0, len(asks), size))
            return
        chunk: list[Ask] = []
        total = 0
        for ask, count in zip(asks, lanes, strict=True):
            if chunk and total + count > most:
                yield chunk
                chunk, total = [], 0
            chunk.append(ask)
            total += count
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
        key = (width, bool(first.local.anchor))
        if key not in self._limits:
            try:
                each, largest = lane_bytes(first, site, self._gradients, width)
            except torch.OutOfMemoryError:
                self._warn("memory ran out while a lane was weighed: one at a time in this round")
                return 1
            except Exception:  # noqa: BLE001 - its steps fail as well, and are looked after there.
                return MOST_LANES
            # A lane's own anchors, those of all lanes side by side, and what a graph has of them.
            layers = anchored_layers(site, first.local)
            each += 3 * sum(layer.width**2 for layer in layers) * site.model.x.element_size()
            fit = 0
            for worker in self._workers:
                worker.lane_bytes = each
                room = MEMORY_SHARE * free_memory(worker.device)
                if worker.device.type == "cpu":
                    room = min(room, MOST_ON_CPU, LARGEST_ON_CPU * each / max(largest, 1))
                fit += max(1, int(room / each))
            self._limits[key] = min(MOST_LANES, fit)
        return self._limits[key]

    # ---- steps -------------------------------------------------------------------------------

    def _descend(self, jobs: Sequence[Job], pool: Pool) -> Steps:
        """Lines 1–3 for every job; halves what it does at a time where memory runs out, unless another
        chunk takes a part of it."""
        parts: list[tuple[Tensor, Tensor]] = []
        # A single client may have more lanes than fit.
        start, size = 0, min(len(jobs), self._most)
        while start < len(jobs):
            try:
                parts += self._steps(jobs[start : start + size], pool)
                start += size
                continue
            except torch.OutOfMemoryError:
                if size == 1 or self._begun is not None:
                    raise
            # Out here: as long as there is an error, so is all that its frames refer to.
            size = (size + 1) // 2
            self._keep_to(size)
        if not parts:
            return Steps(torch.empty(0, 0), torch.empty(3, 0))
        deltas = parts[0][0] if len(parts) == 1 else torch.cat([delta for delta, _ in parts])
        moved = torch.cat([moved for _, moved in parts])
        squares = torch.linalg.vector_norm(deltas, dim=1, dtype=torch.float64) ** 2
        finite = squares.isfinite().double()
        return Steps(deltas, torch.stack([moved.double(), finite, squares]))

    def _steps(self, jobs: Sequence[Job], pool: Pool) -> list[tuple[Tensor, Tensor]]:
        """Δ `[L, d]` and moving steps `[L]` of the jobs, divided among the devices."""
        size = -(-len(jobs) // len(self._workers))
        # Begun on all devices before anything is fetched from one.
        found = [
            worker.steps(jobs[i * size : (i + 1) * size], self._pool_on(worker.device, pool))
            for i, worker in enumerate(self._workers)
            if i * size < len(jobs)
        ]
        return [(delta.to(self.device), moved.to(self.device)) for delta, moved in found]

    def _pool_on(self, device: torch.device, pool: Pool) -> Pool:
        if pool is not self._everyone:
            return pool.to(device)
        if device not in self._copies:
            self._copies[device] = pool.to(device)
            self._copies[device].stays = True
        return self._copies[device]

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
        first = asked[0]
        name = ("model", first.round, first.phase, first.client, "evaluate")
        with rng.torch_stream(self.device, self.seed, *name):
            scores = self._scorer.score(pool, wanted, metrics=False)
            for client, row in scores.items():
                sites[client].counts.update({n: s["loss"].samples for n, s in row.items()})
            held_out = self._held_out(asked, sites, wanted)
        return scores, held_out

    def _held_out(
        self,
        asked: Sequence[Ask],
        sites: Mapping[str, Site],
        wanted: Mapping[str, Sequence[Objective]],
    ) -> Scores:
        """Losses and metrics at `x` on the clients' own held-out data, where they have any."""
        own: dict[str, Samples] = {}
        for ask in asked:
            samples = sites[ask.client].held_out
            if ask.held_out and samples is not None:
                own[ask.client] = samples
        if not own:
            return {}
        scores = self._scorer.held_out(own, wanted)
        if scores is None:
            self._notes.append("held-out data that are not alike were evaluated client by client")
            scores = self._scorer.one_by_one(own, wanted)
        return scores


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
    if pool is None:
        return None
    pool = pool.to(device)
    pool.stays = True
    return pool
