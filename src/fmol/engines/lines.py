"""The lines in the record of clients with whose replies nothing is wrong, without making the replies.

What an engine has computed itself is of the right shape and for the right lanes. Where nothing is done
to it on its way to the server either, all that is left to look at are its numbers, which become a line
per objective and a weight per lane. Whatever else there may be is for `fmol.engines.replies`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from fmol.engines.checks import message_bytes
from fmol.engines.scores import Scores
from fmol.engines.seam import Ask, ClientRecord, Site
from fmol.local import count_labels

__all__ = ["Lines", "count_samples", "known_losses", "known_metrics", "lines_of", "sample_names"]


@dataclass
class Lines:
    """A chunk's lines, column by column, as far as they are known before its steps are."""

    clients: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Which of the chunk's lanes is named after the objective, −1 for none."""
    held_out: list[Mapping[str, float]] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    bytes_up: int = 0
    """Of all clients together; `up` is there once for each of their lines."""
    bytes_down: int = 0
    weights: list[float] = field(default_factory=list)
    """The samples behind each lane, the most of its objectives'."""

    def records(self, squares: Sequence[float], seconds: float) -> Iterator[ClientRecord]:
        """The lines themselves, with `‖Δ‖²` of each lane and the seconds of each client."""
        lengths = [*map(math.sqrt, squares), math.nan]
        return map(
            ClientRecord,
            self.clients,
            self.names,
            self.losses,
            self.samples,
            [lengths[row] for row in self.rows],
            self.held_out,
            repeat(seconds),
            self.up,
            self.down,
        )


def lines_of(
    chunk: Sequence[Ask],
    sites: Mapping[str, Site],
    delta_bytes: int,
    scores: Scores,
    held_out: Scores,
    masked: Collection[str],
) -> Lines | None:
    """The lines of these clients if every Δ turns out finite; None where something else may have to be
    refused, or is left out.

    `delta_bytes` is what a Δ weighs, `scores` are on the clients' training data, and `masked` are the
    objectives whose loss marks which samples have a label.
    """
    lines = Lines()
    kinds: dict[object, _Kind | None] = {}
    for ask in chunk:
        site, client, lanes = sites[ask.client], ask.client, ask.lanes
        # The chunk keeps all lanes there are, so that no two have the same id.
        key = id(lanes), ask.evaluate, site.client.objectives
        if key not in kinds:
            kinds[key] = _kind_of(ask, site)
        kind, most = kinds[key], site.client.max_samples
        if kind is None or ask.payload:
            return None
        samples = count_samples(kind.names, ask, site, masked)
        weights = [max([samples[name] for name in lane.mixture]) for lane in lanes]
        losses, metrics = known_losses(scores, client), known_metrics(held_out, client)
        if not all(weights) or not all(map(math.isfinite, losses.values())):
            return None
        if most is not None and max(samples.values()) > most:
            return None
        numbers = len(lanes) + len(samples) + len(losses) + sum(map(len, metrics.values()))
        up, size, row = len(lanes) * delta_bytes + 8 * numbers, len(samples), len(lines.weights)
        lines.clients += [client] * size
        lines.names += kind.names
        lines.losses += [losses.get(name, math.nan) for name in kind.names]
        lines.samples += samples.values()
        lines.rows += [-1 if lane is None else row + lane for lane in kind.lanes]
        lines.held_out += [metrics.get(name, {}) for name in kind.names]
        lines.up += [up] * size
        lines.down += [kind.down] * size
        lines.bytes_up += up
        lines.bytes_down += kind.down
        lines.weights += map(float, weights)
    return lines


@dataclass(frozen=True)
class _Kind:
    """What asks have in common that are about the same objectives."""

    names: tuple[str, ...]
    """Of these objectives, sorted."""
    lanes: tuple[int | None, ...]
    """For each of them, which of the ask's lanes is named after it."""
    down: int
    """What such an ask weighs."""


def _kind_of(ask: Ask, site: Site) -> _Kind | None:
    """None where it is about an objective that the client does not hold."""
    names = sample_names(ask)
    if not names or not set(names) <= set(site.client.objectives):
        return None
    slots = {lane.slot: place for place, lane in enumerate(ask.lanes)}
    return _Kind(names, tuple(map(slots.get, names)), message_bytes(ask))


def sample_names(ask: Ask) -> tuple[str, ...]:
    """The objectives whose samples a reply counts, sorted."""
    return tuple(sorted({*ask.evaluate, *(name for lane in ask.lanes for name in lane.mixture)}))


def count_samples(
    names: Sequence[str], ask: Ask, site: Site, masked: Collection[str]
) -> dict[str, int]:
    """Objective → how many of the client's samples carry a label."""
    counts = site.counts
    for name in names:
        if name not in counts:
            counts[name] = count_labels(site, ask.x, name) if name in masked else len(site.samples)
    return {name: counts[name] for name in names}


def known_losses(scores: Scores, client: str) -> dict[str, float]:
    """Objective → the client's loss at `x`, where it has a label."""
    losses = {name: row["loss"] for name, row in scores.get(client, {}).items()}
    return {name: score.value for name, score in losses.items() if score.samples}


def known_metrics(held_out: Scores, client: str) -> dict[str, dict[str, float]]:
    """Objective → metric → value on the client's held-out data."""
    return {
        name: {metric: score.value for metric, score in row.items()}
        for name, row in held_out.get(client, {}).items()
    }
