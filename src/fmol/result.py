"""What a run leaves in memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fmol.engines.seam import OWN_MODEL, ClientState
from fmol.federation import Federation
from fmol.measurement import Evaluation
from fmol.metrics import Row, conflict_rate
from fmol.portrait import portray
from fmol.record import RunRecord
from fmol.rounds import Algorithm, Checkpoint, RoundReport, State
from fmol.wording import many

if TYPE_CHECKING:
    from fmol.stationarity import Stationarity

__all__ = ["Result", "Snapshot"]


@dataclass(frozen=True)
class Snapshot:
    """What a callback may look at: the state after a round, and the model it stands for."""

    federation: Federation
    state: State
    checkpoint: Callable[[], Checkpoint] = field(repr=False)
    """Gives what `fit(resume=…)` goes on from; to be called within the callback."""

    def model(self) -> nn.Module:
        """A copy of the federation's model with the current parameters."""
        return build_module(self.federation, self.state.x)


@dataclass(frozen=True)
class Result:
    """A finished run."""

    federation: Federation
    algorithm: Algorithm
    state: State
    reports: tuple[RoundReport, ...]
    final: Evaluation
    """The trained model's losses and held-out metrics: the last row of `losses`."""
    stopped: str
    """Why training ended, in words."""
    seed: int
    client_state: ClientState
    """What the clients keep, in a simulation."""
    asked: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Argument → value, as `fit` was given them, beside federation and algorithm."""
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Versions, device, and when."""

    @cached_property
    def model(self) -> nn.Module:
        """The trained module, a copy of the federation's."""
        return build_module(self.federation, self.state.x)

    @cached_property
    def losses(self) -> Tensor:
        """`[rounds + 1, S]` float64: training loss of each objective at `x_t`, row 0 untrained."""
        each = [report.losses for report in self.reports]
        return _matrix([*each, self.final.losses], self.federation.names)

    @cached_property
    def weights(self) -> Tensor:
        """`[rounds, S]` float64: λ of each round."""
        return _matrix([report.weights for report in self.reports], self.federation.names)

    @property
    def conflict_rate(self) -> float:
        """The share of rounds in which equal weights would have hurt some objective.

        Zero says that a fixed weighting would have done; NaN that no round had an update for each
        objective, as with FedAvg.
        """
        return conflict_rate(self.reports)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was done otherwise than asked, or not at all, each once: fallbacks, engines chosen."""
        return tuple(dict.fromkeys(note for report in self.reports for note in report.notes))

    def rounds_until(self, loss: float) -> dict[str, int | None]:
        """Objective → the first `t` with a training loss at `x_t` of `loss` or less, None without."""
        below = (self.losses <= loss).T.tolist()
        first = [each.index(True) if True in each else None for each in below]
        return dict(zip(self.federation.names, first, strict=True))

    def stationarity(self, **options: Any) -> Stationarity:
        """How far the trained model is from Pareto stationarity, with true gradients.

        `options` are those of `fmol.stationarity.stationarity`, as `engine` and `device`.

        >>> from fmol import FMGDA, fit
        >>> from fmol.problems.quadratic import Quadratic
        >>> result = fit(Quadratic().build(), FMGDA(local_steps=5, local_lr=0.1), rounds=40)
        >>> result.stationarity().relative < 0.1
        True
        """
        from fmol.stationarity import stationarity

        if not self.algorithm.shares_model:
            raise ValueError(
                f"{type(self.algorithm).__name__} has no model of all at which gradients could be "
                "taken. Ask for `stationarity(federation, result.client_model(…))` of one client's."
            )
        given = {"weighting": self.algorithm.weighting, "seed": self.seed, **options}
        return stationarity(self.federation, self.state.x, **given)

    def record(self, name: str = "") -> RunRecord:
        """The run as numbers and words, without model and data: what reports are made of.

        Its config has what `fit` and the algorithm were given; functions stand there by their names.
        """
        from fmol.config import call_in_words, call_tables

        return RunRecord(
            name=name or type(self.algorithm).__name__,
            algorithm=type(self.algorithm).__name__,
            portrait=portray(self.federation),
            reports=self.reports,
            final=self.final,
            stopped=self.stopped,
            seed=self.seed,
            config=call_tables(self.algorithm, self.asked),
            environment=self.environment,
            command=call_in_words(self.algorithm, self.asked),
        )

    def report(self, path: str | os.PathLike[str] = "report.html") -> Path:
        """Writes the run as one HTML file to look at, and gives its path."""
        from fmol.report import write_report

        return write_report(path, [self.record()])

    def checkpoint(self) -> Checkpoint:
        """What `fit(resume=…)` goes on from, with more rounds."""
        return Checkpoint(self.state, self.reports, self.client_state, self.seed)

    def client_model(self, client: str) -> nn.Module:
        """The client's own module, after training with `Alone`."""
        state = self.client_state.get(client, {})
        if OWN_MODEL not in state:
            raise ValueError(
                f"client `{client}` has no model of its own: {type(self.algorithm).__name__} trains "
                "one for all. Use `result.model`, or train with `Alone`."
            )
        return build_module(self.federation, state[OWN_MODEL])

    def table(self) -> list[Row]:
        """Every number of the run as one long table: round, split, client, objective, name, value.

        What was not measured has no row.
        """
        return self.record().table()

    def to_pandas(self) -> Any:
        """`table()` as a pandas DataFrame."""
        return self.record().to_pandas()

    def __repr__(self) -> str:
        parts = [
            f"{type(self.algorithm).__name__}, {many(len(self.reports), 'round')}, {self.stopped}",
            "losses: " + "  ".join(f"{n} {value:.4g}" for n, value in self.final.losses.items()),
        ]
        if self.reports:
            parts += [f"alarm: {a.kind} by {a.objective}" for a in self.reports[-1].alarms]
        refused = [refusal for report in self.reports for refusal in report.refused]
        refused += self.final.refused
        if refused:
            parts.append(f"{len(refused)} refused, the last: {refused[-1]}")
        notes = self.notes
        if notes:
            more = f" (and {many(len(notes) - 1, 'more note')})" if len(notes) > 1 else ""
            parts.append(f"note: {notes[0]}{more}")
        return f"Result({'; '.join(parts)})"


def build_module(federation: Federation, x: Tensor) -> nn.Module:
    """A copy of the federation's model with the trainable parameters `x` `[d]`."""
    module = copy.deepcopy(federation.model)
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in federation.layout.split(x).items():
            named[name].copy_(value)
    return module


def _matrix(each: Sequence[Mapping[str, float]], names: Sequence[str]) -> Tensor:
    values = [[row[name] for name in names] for row in each]
    return torch.tensor(values, dtype=torch.float64).reshape(len(each), len(names))
