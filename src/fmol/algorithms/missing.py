"""What happens in a round to an objective for which nobody sent an update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fmol.aggregate import Means
from fmol.engines.seam import Receipt
from fmol.errors import MissingObjectiveError, RefusedError
from fmol.rounds import State

__all__ = ["OnMissing", "Rows", "check_arrivals", "fill_in", "room_for_reuse"]


OnMissing = Literal["skip", "reuse", "hold", "fail"]
"""Leave it out, take its last update, leave the model as it is, or raise."""


@dataclass(frozen=True)
class Rows:
    """The updates that enter this round's QP: `deltas` `[len(names), d]`."""

    names: tuple[str, ...]
    deltas: Tensor
    losses: Tensor
    """f_s(x_t) over the cohort, `[len(names)]` float64; of the same age as the row."""
    missing: tuple[str, ...] = ()
    reused: Mapping[str, int] = field(default_factory=dict)
    hold: bool = False
    memory: Mapping[str, Tensor] = field(default_factory=dict)


def room_for_reuse(policy: OnMissing, objectives: int, x: Tensor) -> dict[str, Tensor]:
    """Memory for the last update of each objective, where the policy needs it."""
    if policy != "reuse":
        return {}
    return {
        "last_deltas": torch.zeros(objectives, x.numel(), dtype=x.dtype, device=x.device),
        "last_losses": torch.full((objectives,), torch.nan, dtype=torch.float64),
        "last_rounds": torch.full((objectives,), -1, dtype=torch.int64),
    }


def check_arrivals(means: Means, receipt: Receipt) -> None:
    """Raises where everybody answered and not one update could be let in.

    Where some were silent, or too few for their updates to count, the next round may do better.
    """
    arrived = any(not math.isnan(record.delta_norm) for record in receipt.clients)
    if not means.slots and receipt.refused and not receipt.silent and not arrived:
        more = len(receipt.refused) - 1
        raise RefusedError(
            f"{receipt.refused[0]}{f' (and {more} more)' if more else ''}. Nothing else arrived in "
            "this round, so the model stays what it was before it. Look at that client's data and "
            "loss, or take smaller steps."
        )


def fill_in(
    policy: OnMissing,
    max_age: int,
    state: State,
    losses: Mapping[str, float],
    round: int,
    means: Means,
    receipt: Receipt,
) -> Rows:
    """The rows of the QP after the policy has spoken; it may reuse updates up to `max_age` rounds old.

    Never a zero vector: zero is in the hull then, and nobody moves.
    """
    check_arrivals(means, receipt)
    missing = tuple(name for name in losses if name not in means.slots)
    if missing and policy == "fail":
        raise MissingObjectiveError(
            f"round {round}: no client of the cohort sent an update for objective `{missing[0]}`. "
            'Use `participation=Stratified(…)`, or `on_missing_objective="skip"`, "reuse" or "hold".'
        )
    hold = bool(missing) and policy == "hold"
    if policy != "reuse":
        values = torch.tensor([losses[name] for name in means.slots], dtype=torch.float64)
        return Rows(means.slots, means.deltas, values, missing, hold=hold, memory=state.memory)
    return _reuse(max_age, state, losses, round, means, missing)


def _reuse(
    max_age: int,
    state: State,
    losses: Mapping[str, float],
    round: int,
    means: Means,
    missing: tuple[str, ...],
) -> Rows:
    """The fresh rows, and for missing objectives their last one where it is young enough."""
    names = tuple(losses)
    # Clones: the state before this round must stay what it was if the round fails.
    memory = {name: tensor.clone() for name, tensor in state.memory.items()}
    memory["last_deltas"] = memory["last_deltas"].to(means.deltas.device)
    deltas, values, when = (memory[f"last_{part}"] for part in ("deltas", "losses", "rounds"))
    fresh = [names.index(slot) for slot in means.slots]
    deltas[fresh], when[fresh] = means.deltas, round
    values[fresh] = torch.tensor([losses[slot] for slot in means.slots], dtype=torch.float64)
    seen = {name: int(when[names.index(name)]) for name in missing}
    reused = {n: round - last for n, last in seen.items() if last >= 0 and round - last <= max_age}
    present = tuple(name for name in names if name in means.slots or name in reused)
    rows = [names.index(name) for name in present]
    return Rows(present, deltas[rows], values[rows], missing, reused, memory=memory)
