"""The records of a round: what it starts from, what it is asked, what it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fmol.aggregate import Weighting
from fmol.alarms import Alarm
from fmol.engines.seam import (
    Ask,
    ClientRecord,
    ClientState,
    Engine,
    Lane,
    LocalConfig,
    Refusal,
    Work,
)
from fmol.federation import Client, Federation

__all__ = ["Algorithm", "Checkpoint", "Plan", "RoundReport", "State", "nothing_sent"]

NAN = float("nan")


@dataclass(frozen=True)
class State:
    """All that a run carries from one round to the next at the server: tensors and numbers only."""

    x: Tensor
    """The model's trainable parameters, `[d]`."""
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """What an algorithm or its rule keeps beside `x`."""


@dataclass(frozen=True)
class Plan:
    """What the training loop asks of a round."""

    round: int
    cohort: tuple[str, ...]
    evaluate: bool = True
    """Whether the cohort's losses at `x_t` are wanted (they ride along with training)."""
    held_out: bool = False
    """Whether metrics on the clients' own held-out data are wanted as well."""

    def ask(
        self,
        client: Client,
        x: Tensor,
        *,
        lanes: Sequence[Lane] = (),
        local: LocalConfig | None = None,
        need_losses: bool = False,
        payload: Mapping[str, Tensor] | None = None,
    ) -> Ask:
        """The message to one client of the cohort."""
        return Ask(
            client=client.id,
            round=self.round,
            x=x,
            lanes=tuple(lanes),
            local=local,
            evaluate=client.objectives if self.evaluate or need_losses else (),
            held_out=self.held_out and self.evaluate,
            payload=payload or {},
        )


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """Everything measured in one round. Mappings are by objective; NaN where not measured."""

    round: int
    cohort: tuple[str, ...]
    losses: Mapping[str, float]
    """Training loss at `x_t`, in evaluation mode, over `evaluated`."""
    evaluated: str = ""
    """Over whom `losses` is, in words."""
    held_out: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Objective → `"loss"` and metrics at `x_t`: at the server where it has held-out data, else the
    mean over the evaluated clients' own."""
    delta_norms: Mapping[str, float]
    weights: Mapping[str, float]
    """λ: the applied coefficients divided by their sum."""
    scale: float = 1.0
    """That sum: 1 for the paper's step, another factor where updates are normalised or protected, or a
    rule's weights do not sum to one. 1 where that sum is not positive; then they are not divided."""
    missing: tuple[str, ...] = ()
    """Objectives nobody sent an update for."""
    reused: Mapping[str, int] = field(default_factory=dict)
    """Missing objectives that stood in with an old update → its age in rounds."""
    protected: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    silent: tuple[str, ...] = ()
    direction_norm_squared: float = NAN
    gap: float = NAN
    min_cosine: float = NAN
    stationary: bool = False
    """These four are of the rule's direction, over the vectors that the rule was given."""
    step_norm_squared: float = NAN
    """‖v_t‖² of what was applied, `x_{t+1} = x_t − server_lr · v_t`: the server's step may make more of
    the rule's direction than the direction itself."""
    step_min_cosine: float = NAN
    """min_s cos(Δ_s, v_t) over this round's updates: below zero, what was applied raises some
    objective, to first order. NaN where there is one update for several objectives."""
    extrapolation: Mapping[str, float] = field(default_factory=dict)
    """e_s, by which each update was stretched before the rule; empty where that was not asked for."""
    cosines: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    """Pairwise cosines of the updates, `[S, S]`."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """ρ_s = mean_i‖Δ_{s,i}‖² / ‖Δ_s‖²."""
    held: bool = False
    """Whether `x` stayed what it was in this round."""
    local_lr: float = NAN
    server_lr: float = NAN
    bytes_up: int = 0
    """What training would put on a wire; evaluating clients outside the cohort is not counted."""
    bytes_down: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds: `clients`, `server`, `evaluation`."""
    true_direction_norm_squared: float = NAN
    """‖d̄_t‖² = ‖Σ λ_s ∇f_s(x_t)‖² with the true gradients, where asked for."""
    stationarity: float = NAN
    """‖d*_t‖², the same with λ computed from the true gradients, where asked for."""
    optimality_gap: float = NAN
    """Δ_Q = Σ λ_s (f_s(x_t) − f_s(x*)), where f_s(x*) is known."""
    alarms: tuple[Alarm, ...] = ()
    clients: tuple[ClientRecord, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped: tensors, numbers and reports."""

    state: State
    reports: tuple[RoundReport, ...]
    client_state: ClientState
    seed: int


def nothing_sent(report: RoundReport) -> RoundReport:
    """The report of a round in which no message went anywhere."""
    clients = tuple(record._replace(bytes_up=0, bytes_down=0) for record in report.clients)
    return replace(report, bytes_up=0, bytes_down=0, clients=clients)


class Algorithm(Protocol):
    """The text of one round. State in, state out; where clients compute is the engine's affair."""

    @property
    def work(self) -> Work:
        """How clients answer; also used to ask clients outside the cohort for their losses."""

    @property
    def shares_model(self) -> bool:
        """Whether `state.x` is the model of all, so that the server can evaluate it."""

    @property
    def weighting(self) -> Weighting:
        """`"uniform"` or `"samples"`: what `f_s` is the mean of."""

    def init(self, federation: Federation, x: Tensor) -> State:
        """The state before round 0; raises where the options do not fit the federation."""

    def round(self, state: State, plan: Plan, engine: Engine) -> tuple[State, RoundReport]:
        """One round: the next state, and what was measured on the way there."""
