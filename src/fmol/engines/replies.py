"""The replies of many clients from the rows that their lanes came to.

Most of a reply is known before its steps have been computed, so that it can be made while the device
is still busy with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmol.engines.checks import check_reply, message_bytes, reply_bytes
from fmol.engines.lines import (
    Lines,
    count_samples,
    known_losses,
    known_metrics,
    lines_of,
    sample_names,
)
from fmol.engines.schedule import Job
from fmol.engines.scores import Scores
from fmol.engines.seam import Ask, Fold, Refusal, Reply, Site, Transform
from fmol.engines.sequential import say_where
from fmol.layout import Layout
from fmol.local import keep_control, step_count

__all__ = ["Answer", "Replies", "Rows", "Steps"]


@dataclass(frozen=True)
class Rows:
    """What the lanes of a chunk came to, in the order of its jobs."""

    deltas: Tensor
    moved: list[int]
    finite: list[bool]
    squares: list[float]

    def are(self, moved: Sequence[int], lanes: Iterable[int]) -> bool:
        """Whether some lanes moved as often as this, and are finite."""
        return all(self.finite[i] and self.moved[i] == moved[i] for i in lanes)


@dataclass(frozen=True)
class Steps:
    """The same on the device, where it may still be computed."""

    deltas: Tensor
    table: Tensor
    """How many steps moved, if all is finite, and ‖Δ‖²: `[3, L]`."""

    def rows(self) -> Callable[[], Rows]:
        """Asks for what it comes to; the answer, when it is called for, waits for these steps alone and
        not for what the device was told since."""
        table = self.table
        if not table.is_cuda:
            return lambda: self._rows(table)
        with torch.cuda.device(table.device):
            there = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            there.copy_(table, non_blocking=True)  # One transfer for all lanes of a chunk.
            done = torch.cuda.Event()
            done.record()

        def wait() -> Rows:
            done.synchronize()
            return self._rows(there)

        return wait

    def _rows(self, table: Tensor) -> Rows:
        moved, finite, squares = table.tolist()
        return Rows(self.deltas, [int(m) for m in moved], [f > 0 for f in finite], squares)


@dataclass(slots=True)
class Answer:
    """A client's checked reply, what of it was not let in, and its bytes up and down."""

    site: Site
    reply: Reply
    refusals: tuple[Refusal, ...]
    up: int
    down: int
    norms: Mapping[str, float] | None = None
    """Slot → ‖Δ‖; None where the updates are no longer those that the lanes came to."""


@dataclass(slots=True)
class _Draft:
    """What is known of a client's reply before its steps are."""

    ask: Ask
    site: Site
    own: Mapping[str, int]
    """Slot → which of the chunk's rows is its lane's."""
    parts: Mapping[str, Any]
    """What is in the reply, but for its steps."""
    hoped: Answer | None = None
    """The one that will be given if all turns out as planned; None where that cannot be said."""


class Replies:
    """The replies of a chunk's clients: prepared while the device computes, finished when it has."""

    def __init__(
        self,
        chunk: Sequence[Ask],
        sites: Mapping[str, Site],
        jobs: Sequence[Job],
        layout: Layout,
        transforms: Sequence[Transform],
        fold: Fold | None,
    ) -> None:
        self._chunk, self._sites, self._jobs = chunk, sites, jobs
        self._layout, self._transforms, self._fold = layout, transforms, fold
        self._lines: Lines | None = None
        """What the clients come to where nobody has to see their replies."""
        self._known: tuple[Tensor, Scores, Scores, Collection[str]]
        """What replies are made of."""
        self._planned: list[int] = []
        """How many steps each job takes, if all of them move."""
        self._drafts: list[_Draft] = []
        self._replies: dict[str, Reply] = {}
        self._weights: list[float] | None = None
        """Of the jobs' updates, as far as they were folded in ahead."""
        self._as_hoped = False

    def prepare(
        self, deltas: Tensor, scores: Scores, held_out: Scores, masked: Collection[str]
    ) -> None:
        """Finds out what can be said without waiting for `deltas` `[L, d]`.

        `scores` are on the clients' training data, and `masked` are the objectives whose loss marks
        which samples have a label.
        """
        self._known = deltas, scores, held_out, masked
        if not self._transforms and (self._fold is None or hasattr(self._fold, "add_rows")):
            delta_bytes = deltas.shape[1] * deltas.element_size()
            self._lines = lines_of(self._chunk, self._sites, delta_bytes, scores, held_out, masked)
        if self._lines is None:
            self._draft()

    def lines(self, rows: Rows) -> Lines | None:
        """What the clients came to where all of it is let in; None where there are replies to see."""
        if self._lines is not None and not all(rows.finite):
            self._lines = None
            self._draft()
        return self._lines

    def _draft(self) -> None:
        """Makes all of the replies that can be made without waiting for their steps."""
        deltas, scores, held_out, masked = self._known
        self._planned = [
            step_count(job.ask.local, len(job.site.samples)) if job.ask.local else 0
            for job in self._jobs
        ]
        mine: dict[str, dict[str, int]] = {ask.client: {} for ask in self._chunk}
        for row, job in enumerate(self._jobs):
            mine[job.ask.client][job.lane.slot] = row
        every = deltas.unbind()
        for ask in self._chunk:
            site, own = self._sites[ask.client], mine[ask.client]
            samples = count_samples(sample_names(ask), ask, site, masked)
            parts = _known(ask, site, own, every, scores, held_out, samples)
            draft = _Draft(ask, site, own, parts)
            if not self._transforms and not ask.payload:
                draft.hoped = self._answer(draft, self._planned)
            self._drafts.append(draft)

    def finish(self, rows: Rows) -> Iterator[Answer]:
        """The reply of each client in turn, after its way to the server and the checks there."""
        lengths = None if self._transforms else [math.sqrt(square) for square in rows.squares]
        self._as_hoped = all(rows.finite) and rows.moved == self._planned
        for draft in self._drafts:
            answer, as_hoped = draft.hoped, self._as_hoped
            if answer is None or not (as_hoped or rows.are(self._planned, draft.own.values())):
                answer = self._answer(draft, rows.moved, rows.finite)
            if lengths is not None:
                answer.norms = {slot: lengths[draft.own[slot]] for slot in answer.reply.deltas}
            self._replies[draft.ask.client] = answer.reply
            yield answer

    def fold_ahead(self, deltas: Tensor) -> None:
        """Lets the fold sum up `deltas` `[L, d]` on the device before it is known if all turns out as
        planned, where it can and that is likely."""
        expect_rows = getattr(self._fold, "expect_rows", None)
        if expect_rows is None or not self._jobs:
            return
        self._weights = self._weights_ahead()
        if self._weights is not None:
            expect_rows([job.lane.slot for job in self._jobs], deltas, self._weights)

    def _weights_ahead(self) -> list[float] | None:
        """What each lane is likely to weigh; None where that cannot be said."""
        if self._lines is not None:
            return self._lines.weights
        answers = {draft.ask.client: draft.hoped for draft in self._drafts if draft.hoped}
        if len(answers) < len(self._drafts):
            return None
        replies = {client: answer.reply for client, answer in answers.items()}
        return [_weight(job, replies[job.ask.client]) for job in self._jobs]

    def fold_in(self, rows: Rows) -> None:
        """Folds all of it in: all rows at once where the fold can and they are as they were sent."""
        fold = self._fold
        if fold is None:
            return
        add_rows = getattr(fold, "add_rows", None)
        if self._transforms or add_rows is None:
            for ask in self._chunk:
                fold.add(self._replies[ask.client], ask)
            return
        jobs = self._jobs
        if not jobs:
            return
        deltas = rows.deltas
        if not all(rows.finite):  # Weight zero does not silence what is not a number.
            finite = torch.tensor(rows.finite, device=deltas.device)
            deltas = torch.where(finite[:, None], deltas, 0)
        if self._lines is not None:
            weights = self._lines.weights
        elif self._weights is not None and self._as_hoped:
            weights = self._weights
        else:
            weights = [_weight(job, self._replies[job.ask.client]) for job in jobs]
        squares = [s if f else 0.0 for s, f in zip(rows.squares, rows.finite, strict=True)]
        slots, local = [job.lane.slot for job in jobs], jobs[0].ask.local
        drift: tuple[Any, ...] = ()
        if local is not None and any(job.correction is not None for job in jobs):
            parts = [local.steps_in(moved) for moved in rows.moved]
            drift = parts, [job.lane.slot in self._replies[job.ask.client].first for job in jobs]
        add_rows(slots, deltas, weights, rows.moved, squares, *drift)

    def _answer(
        self, draft: _Draft, moved: Sequence[int], finite: Sequence[bool] | None = None
    ) -> Answer:
        """A client's reply after its way to the server and the checks there.

        Without `finite` it is the one that will be given if all turns out finite.
        """
        ask, site, deltas = draft.ask, draft.site, draft.parts["deltas"]
        steps = {slot: moved[draft.own[slot]] for slot in deltas}
        first = tuple(
            slot
            for slot, delta in (deltas.items() if ask.payload else ())
            if keep_control(
                ask, slot, site, delta, steps[slot], self._jobs[draft.own[slot]].correction
            )
        )
        reply = Reply(client=ask.client, steps=steps, first=first, **draft.parts)
        try:
            for transform in self._transforms:
                reply = transform.client(reply, ask, site)
            up, down = reply_bytes(reply), message_bytes(ask)
            for transform in reversed(self._transforms):
                reply = transform.server(reply, ask)
        except Exception as error:
            say_where(error, ask)
            raise
        known: Collection[str] = ()
        if not self._transforms:
            own = draft.own
            known = own if finite is None else [slot for slot, i in own.items() if finite[i]]
        limit = len(site.samples)
        reply, refusals = check_reply(reply, ask, site.client, self._layout, limit, known)
        return Answer(site, reply, refusals, up, down)


def _weight(job: Job, reply: Reply) -> float:
    """The samples behind a lane's update, the most of its objectives'; none if not let in."""
    if job.lane.slot not in reply.deltas:
        return 0.0
    return float(max(reply.samples.get(name, 0) for name in job.lane.mixture))


def _known(
    ask: Ask,
    site: Site,
    own: Mapping[str, int],
    deltas: Sequence[Tensor],
    scores: Scores,
    held_out: Scores,
    samples: Mapping[str, int],
) -> dict[str, Any]:
    """What is in a client's reply, but for its steps; `own` are its rows of `deltas`."""
    return {
        # A client without a single label for an objective does not hold it.
        "deltas": {
            lane.slot: deltas[own[lane.slot]]
            for lane in ask.lanes
            if any(site.counts[name] for name in lane.mixture)
        },
        "losses": known_losses(scores, ask.client),
        "samples": samples,
        "held_out": known_metrics(held_out, ask.client),
    }
