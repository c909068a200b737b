"""Losses and metrics of many clients at one `x`: one forward pass over all of their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fmol.data import Samples, tree_map
from fmol.engines.layers import LaneLayers
from fmol.engines.pool import Pool, make_pool
from fmol.evaluation import Score, check_mask, evaluate, score_of
from fmol.layout import FlatModel
from fmol.objectives import Objective, WholeSet

__all__ = ["Scorer", "Scores"]

NONE = Score(float("nan"), 0)
Scores = dict[str, dict[str, dict[str, Score]]]
"""Client → objective → `"loss"` and metrics → `Score`."""


class Scorer:
    """Scores many clients at the model's `x`; half as many samples at a time where memory runs out,
    which `warn` is told."""

    def __init__(
        self,
        model: FlatModel,
        batch_size: int,
        warn: Callable[[str], None],
        apart: Callable[[str, str], str | None],
        set_size: int,
    ) -> None:
        self._model, self._batch_size, self._warn = model, batch_size, warn
        self._apart, self._set_size = apart, set_size
        """Why a function of an objective, `"loss"` or a metric, is asked client by client, if so; and
        about how many samples at a time it is then."""

    def held_out(
        self, own: Mapping[str, Samples], wanted: Mapping[str, Sequence[Objective]]
    ) -> Scores | None:
        """Losses and metrics of data that clients hold out; None where these are not alike."""
        pool = make_pool(list(own), list(own.values()))
        if pool is None:
            return None
        return self.score(pool, {client: wanted[client] for client in own}, metrics=True)

    def one_by_one(
        self, own: Mapping[str, Samples], wanted: Mapping[str, Sequence[Objective]]
    ) -> Scores:
        """The same, client by client."""
        size = self._batch_size
        return {
            client: evaluate(self._model, samples, wanted[client], batch_size=size, metrics=True)
            for client, samples in own.items()
        }

    def score(
        self, pool: Pool, wanted: Mapping[str, Sequence[Objective]], *, metrics: bool
    ) -> Scores:
        """What `fmol.evaluation.evaluate` gives for each client by itself.

        An objective is asked about the samples of the clients that want it alone: others may have no
        labels for it that make sense.
        """
        clients = list(wanted)
        scores: Scores = {client: {} for client in clients}
        outputs, targets = self._outputs(pool, clients)
        sizes = [pool.sizes[client] for client in clients]
        starts = dict(zip(clients, torch.tensor([0, *sizes]).cumsum(0).tolist(), strict=False))
        objectives = {o.name: o for each in wanted.values() for o in each}
        held = {client: {o.name for o in each} for client, each in wanted.items()}
        found: list[tuple[str, str, list[str], list[Score] | Tensor]] = []
        for objective in objectives.values():
            holders = [client for client in clients if objective.name in held[client]]
            mine = (outputs, targets)
            if len(holders) < len(clients):
                rows = torch.cat(
                    [torch.arange(starts[c], starts[c] + pool.sizes[c]) for c in holders]
                ).to(pool.device)
                mine = tree_map(lambda leaf, rows=rows: leaf.index_select(0, rows), mine)  # type: ignore[misc]
            lengths = [pool.sizes[client] for client in holders]
            functions: dict[str, Any] = {"loss": objective.loss}
            functions |= objective.metrics if metrics else {}
            for name, function in functions.items():
                what = f"the {name} of objective `{objective.name}`"
                by_client = self._apart(objective.name, name) is not None
                values = (
                    _client_by_client(function, mine, lengths, what, self._set_size)
                    if by_client
                    else _values(function, mine, lengths, what)
                )
                found.append((objective.name, name, holders, values))
        # One transfer for all: each waits for the device.
        tables = [values.reshape(-1) for *_, values in found if isinstance(values, Tensor)]
        numbers = iter(torch.cat(tables).tolist() if tables else ())
        for objective_name, name, holders, values in found:
            if isinstance(values, Tensor):
                sums, counts = (list(islice(numbers, len(holders))) for _ in range(2))
                values = [
                    Score(total / count, int(count)) if count else NONE
                    for total, count in zip(sums, counts, strict=True)
                ]
            for client, score in zip(holders, values, strict=True):
                scores[client].setdefault(objective_name, {})[name] = score
        return scores

    def _outputs(self, pool: Pool, clients: Sequence[str]) -> tuple[Any, Any]:
        """The model's outputs for all samples of `clients`, one after the other, and their targets."""
        rows = None
        if clients != list(pool.sizes):
            spans = [(pool.offsets[c], pool.sizes[c]) for c in clients]
            rows = torch.cat([torch.arange(start, start + n) for start, n in spans]).to(pool.device)
        total = pool.total if rows is None else len(rows)
        parts, targets = [], []
        # On a CPU the kernels for few channels are the faster ones here as well.
        layers = LaneLayers() if pool.device.type == "cpu" else nullcontext()
        with self._model.mode(training=False), torch.no_grad(), layers:
            start = 0
            while start < total:
                stop = min(start + self._batch_size, total)
                try:
                    batch = (
                        pool.span(start, stop) if rows is None else pool.gather(rows[start:stop])
                    )
                    parts.append(self._model(batch[0]))
                    targets.append(batch[1])
                    start = stop
                    continue
                except torch.OutOfMemoryError:
                    if stop - start == 1:
                        raise
                # Out here: as long as there is an error, so is all that its frames refer to.
                self._halve(stop - start)
        return _join(parts), _join(targets)

    def _halve(self, size: int) -> None:
        """After memory ran out for `size` samples at a time."""
        torch.cuda.empty_cache()
        self._batch_size = (size + 1) // 2
        self._warn(
            f"memory ran out: {self._batch_size} samples at a time are evaluated from here on"
        )


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: _join([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        joined = [_join(list(column)) for column in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first


def _values(
    function: Callable[[Any, Any], Any], mine: tuple[Any, Any], lengths: Sequence[int], what: str
) -> list[Score] | Tensor:
    """Each client's score, by what the function says of its set; or sums of its samples' values and how
    many count, `[2, C]`, where these have values of their own."""
    total = sum(lengths)
    if not isinstance(function, WholeSet):
        with torch.no_grad():
            value = function(*mine)
        pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        values, valid = pair
        if _one_each(values, total) and (valid is None or _one_each(valid, total)):
            if valid is not None:
                check_mask(valid, what)
            return _sums(values, valid, lengths)
    return _client_by_client(function, mine, lengths, what, max(lengths))


def _client_by_client(
    function: Callable[[Any, Any], Any],
    mine: tuple[Any, Any],
    lengths: Sequence[int],
    what: str,
    most: int,
) -> list[Score]:
    """Each client's score, by what the function says of its samples alone, `most` at a time."""
    scores, start = [], 0
    for length in lengths:
        outputs, targets = tree_map(lambda leaf, a=start, n=length: leaf[a : a + n], mine)  # type: ignore[misc]
        scores.append(score_of(function, outputs, targets, length, most, what))
        start += length
    return scores


def _one_each(value: Any, total: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (total,)


def _sums(values: Tensor, valid: Tensor | None, lengths: Sequence[int]) -> Tensor:
    wide = values.double()
    sizes = _sizes(tuple(lengths), values.device)
    counts = sizes.double()
    if valid is not None:
        wide = torch.where(valid, wide, 0)
        counts = torch.segment_reduce(valid.double(), "sum", lengths=sizes)
    return torch.stack([torch.segment_reduce(wide, "sum", lengths=sizes), counts])


@lru_cache(maxsize=64)
def _sizes(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The lengths on the device; brought there once, since that waits for it."""
    return torch.tensor(lengths, device=device)
