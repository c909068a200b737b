"""Which lanes take which steps on which samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fmol.engines.lanes import LaneSteps, Pull
from fmol.engines.pool import Pool
from fmol.engines.seam import Ask, Lane, Site
from fmol.local import batches

__all__ = ["Job", "Schedule", "plan_steps", "pulls_of", "walk"]


@dataclass(frozen=True)
class Job:
    """One lane of one ask."""

    ask: Ask
    lane: Lane
    site: Site


@dataclass(frozen=True)
class Schedule:
    """For each step of some lanes the rows of the pool `[L, B]`, how many count, and who moves."""

    rows: list[Tensor]
    sizes: list[tuple[int, ...]]
    active: list[Tensor | None]

    @property
    def even(self) -> bool:
        """Whether all lanes take all steps, with batches of one size."""
        width = self.rows[0].shape[1]
        return all(active is None for active in self.active) and all(
            size == width for sizes in self.sizes for size in sizes
        )


def plan_steps(jobs: Sequence[Job], pool: Pool, seed: int, device: torch.device) -> Schedule:
    local, round = jobs[0].ask.local, jobs[0].ask.round
    assert local is not None
    mine: dict[str, list[Tensor]] = {}
    for client in dict.fromkeys(job.ask.client for job in jobs):
        n, offset = pool.sizes[client], pool.offsets[client]
        order = batches(n, local, seed=seed, round=round, client=client)
        every = torch.arange(offset, offset + n)
        mine[client] = [every if b is None else b + offset for b in order]
    clients = list(mine)
    lanes = torch.tensor([clients.index(job.ask.client) for job in jobs])
    schedule = Schedule([], [], [])
    for k in range(max(len(steps) for steps in mine.values())):
        # A lane that is done goes on with its first batch, which moves nothing.
        now = [steps[k] if k < len(steps) else steps[0] for steps in mine.values()]
        width = max(len(rows) for rows in now)
        # Short batches are filled up with their own first sample, which does not count.
        filled = [
            rows if len(rows) == width else torch.cat([rows, rows[:1].expand(width - len(rows))])
            for rows in now
        ]
        schedule.rows.append(torch.stack(filled)[lanes])
        schedule.sizes.append(tuple(len(now[c]) for c in lanes.tolist()))
        active = [k < len(steps) for steps in mine.values()]
        moving = None if all(active) else torch.tensor(active)[lanes].to(device)
        schedule.active.append(moving)
    if len({rows.shape for rows in schedule.rows}) == 1:  # One transfer for all steps.
        schedule.rows[:] = torch.stack(schedule.rows).to(device).unbind()
    else:
        schedule.rows[:] = [rows.to(device) for rows in schedule.rows]
    return schedule


def walk(steps: LaneSteps, schedule: Schedule, rows: Sequence[Tensor], pool: Pool) -> None:
    """Takes all steps of a schedule, on the batches at `rows`."""
    for k, (mine, sizes, active) in enumerate(
        zip(rows, schedule.sizes, schedule.active, strict=True)
    ):
        steps.step(pool.gather(mine, sizes), active, last=k + 1 == len(schedule.sizes))


def pulls_of(lanes: Sequence[Lane], site: Site) -> list[Pull]:
    """For each objective that some lane descends, which lanes those are and by how much."""
    found: dict[str, list[tuple[int, float]]] = {}
    for i, lane in enumerate(lanes):
        for name, weight in lane.mixture.items():
            found.setdefault(name, []).append((i, weight))
    return [
        Pull(site.objectives[name], tuple(i for i, _ in each), tuple(w for _, w in each))
        for name, each in found.items()
    ]
