"""Drift of local steps, corrected by control variates: the server's half of SCAFFOLD, per objective.

On unlike data every client's K steps lead towards its own minimum, and the mean of where they end is
no minimum of the mean. SCAFFOLD lets client `i` step along `g − c_{s,i} + c_s` instead: `c_{s,i}` is
the mean of its own gradients over its last trajectory (option II of Karimireddy and others, *SCAFFOLD*,
ICML 2020), `c_s` the mean of those over the clients. The clients' half is in `fmol.local`.

The update that is sent stays what it was, the sum of what was stepped along, and says both things at
once. Its mean is that of the bare gradients where all take part with equally many steps, because
`Σ_i (c_s − c_{s,i}) = 0`. Divided by its steps it is `c⁺_{s,i} − c_{s,i} + c_s`, so that the server can
follow `c_s` with nothing else sent up: `c_s ← c_s + (n/N)·(mean_i Δ_{s,i}/K_i − c_s)`, with `n` clients
in the cohort and `N` that have a control variate. A client that has none yet is not corrected, and
counts from then on; so `c_s` is at every time the mean of what the clients keep, whoever takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fmol.aggregate import Means
from fmol.algorithms.options import LocalOptions
from fmol.engines.seam import CONTROL

__all__ = ["Drift", "DriftOptions", "control_payload", "follow_controls", "room_for_controls"]

CONTROLS, HOLDERS = "controls", "control_weight"
"""Names in the state's memory: of `c_s` `[S, d]`, and of the weight `[S]` of those who keep one."""

Drift = Literal["none", "scaffold"]


@dataclass(frozen=True, kw_only=True)
class DriftOptions(LocalOptions):
    """How clients descend, and what is done about those that drift apart."""

    drift_correction: Drift = "none"
    """Against the drift of local steps on unlike data: nothing, or SCAFFOLD's control variates. Each
    client keeps a vector per objective, and as many travel down again."""

    def joint_problems(self) -> list[str]:
        """What is wrong with options that are right by themselves."""
        # Not `super()`: it is also asked about values that no algorithm has been made of yet.
        found = LocalOptions.joint_problems(self)
        if self.local_average and self.drift_correction != "none":
            found.append(
                f"`local_average` is {self.local_average:g} and `drift_correction` "
                f"{self.drift_correction!r}, which takes an update for the sum of all local steps. "
                "Leave one of them out."
            )
        return found


def room_for_controls(drift: Drift, slots: int, x: Tensor) -> dict[str, Tensor]:
    """Memory for the mean control variate of each slot, where drift is corrected; zero at first."""
    if drift == "none":
        return {}
    return {
        CONTROLS: torch.zeros(slots, x.numel(), dtype=x.dtype, device=x.device),
        HOLDERS: torch.zeros(slots, dtype=torch.float64),
    }


def corrects(memory: Mapping[str, Tensor]) -> bool:
    """Whether a run with this memory corrects drift."""
    return CONTROLS in memory


def control_payload(
    memory: Mapping[str, Tensor], slots: Sequence[str], wanted: Sequence[str]
) -> dict[str, Tensor]:
    """`c_s` of the `wanted` slots, as an ask carries them; nothing where drift is not corrected."""
    if not corrects(memory):
        return {}
    return {CONTROL + slot: memory[CONTROLS][slots.index(slot)] for slot in wanted}


def follow_controls(memory: Mapping[str, Tensor], means: Means) -> dict[str, Tensor]:
    """What the memory holds of control variates after a round, whether or not `x` moved in it."""
    if means.steps is None:
        return {}
    before, seen = memory[CONTROLS], means.steps
    weight = memory[HOLDERS] + seen.first
    # Never more than all: where clients count by their samples, they may have more than they had.
    share = torch.where(weight > 0, seen.weight / weight, 0.0).clamp(max=1).to(before)
    return {CONTROLS: torch.lerp(before, seen.rows, share[:, None]), HOLDERS: weight}
