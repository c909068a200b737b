"""What a run measures beside its own steps: losses over more than the cohort, true gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from fmol import rng
from fmol.aggregate import MeanFold, gramian
from fmol.data import Samples, as_samples
from fmol.engines.seam import Ask, ClientRecord, Engine, Lane, LocalConfig, Receipt
from fmol.evaluation import evaluate as evaluate_on
from fmol.federation import Federation
from fmol.layout import FlatModel
from fmol.metrics import mean_held_out, mean_losses
from fmol.minnorm import min_norm
from fmol.rounds import NAN, Algorithm, RoundReport, State

__all__ = ["Evaluation", "Measurement"]

EVALUATE_ALL_UP_TO = 1000


@dataclass(frozen=True)
class Evaluation:
    """How the model stands at one `x_t`. NaN where it was not measured."""

    round: int
    losses: Mapping[str, float]
    held_out: Mapping[str, Mapping[str, float]]
    clients: tuple[ClientRecord, ...] = ()
    evaluated: str = ""


class Measurement:
    """Evaluates a run's model over the clients chosen by `evaluate`, always the same ones.

    The cohort's losses ride along with its training; only the other evaluated clients are asked.
    """

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        engine: Engine,
        seed: int,
        evaluate: str | int | None,
        batch_size: int = 1024,
    ) -> None:
        self._federation, self._algorithm, self._engine = federation, algorithm, engine
        self._batch_size = batch_size
        size = len(federation.population)
        if evaluate is None:
            evaluate = "all" if size <= EVALUATE_ALL_UP_TO else "cohort"
        ids = federation.population.ids()
        self._panel: frozenset[str] | None = None
        """Who is evaluated; None is whoever takes part."""
        if evaluate == "cohort":
            self.evaluated = "the cohort"
        elif evaluate == "all":
            self._panel = frozenset(ids[i] for i in range(size))
            self.evaluated = f"all {size} clients"
        elif isinstance(evaluate, int) and not isinstance(evaluate, bool) and evaluate >= 1:
            stream = rng.stream(seed, "evaluate")
            drawn = rng.sample_without_replacement(stream, size, evaluate)
            self._panel = frozenset(ids[i] for i in drawn)
            self.evaluated = f"{len(self._panel)} of {size} clients"
        else:
            raise ValueError(
                f"`evaluate` must be 'all', 'cohort' or a number of clients, got {evaluate!r}."
            )
        self._held_out: Samples | None = None
        self._model: FlatModel | None = None
        if federation.held_out is not None and algorithm.shares_model:
            samples = as_samples(federation.held_out, "`held_out` of the federation")
            self._held_out = samples.to(engine.device)
            self._model = FlatModel(federation.model, engine.device)

    def complete(self, report: RoundReport, state: State) -> RoundReport:
        """The report of a round that started at `state`, with losses over all who are evaluated."""
        started = perf_counter()
        records, refused = report.clients, report.refused
        if self._panel is not None:
            mine = [record for record in report.clients if record.client in self._panel]
            heard = {record.client for record in report.clients}
            heard |= {refusal.client for refusal in report.refused} | set(report.silent)
            others = self._ask(sorted(self._panel - heard), report.round, state)
            records = tuple(sorted([*mine, *others.clients], key=lambda record: record.client))
            refused += others.refused
        evaluation = self._evaluation(report.round, state, records)
        return replace(
            report,
            refused=refused,
            losses=evaluation.losses,
            held_out=evaluation.held_out,
            evaluated=self.evaluated,
            seconds={**report.seconds, "evaluation": perf_counter() - started},
        )

    def at(self, state: State, round: int, cohort: Sequence[str]) -> Evaluation:
        """How the model stands at `state`, over `cohort` where that is who is evaluated."""
        panel = cohort if self._panel is None else sorted(self._panel)
        return self._evaluation(round, state, self._ask(panel, round, state).clients)

    def _ask(self, clients: Sequence[str], round: int, state: State) -> Receipt:
        asks = [
            Ask(
                client=client,
                round=round,
                x=state.x,
                evaluate=self._federation.client(client).objectives,
                held_out=True,
            )
            for client in clients
        ]
        return self._engine.map(asks, work=self._algorithm.work)[1]

    def _evaluation(
        self, round: int, state: State, records: tuple[ClientRecord, ...]
    ) -> Evaluation:
        names = self._federation.names
        losses = mean_losses(records, names, self._algorithm.weighting)
        held_out: Mapping[str, Mapping[str, float]] = mean_held_out(records, names)
        if self._held_out is not None and self._model is not None:
            self._model.load(state.x)
            scores = evaluate_on(
                self._model,
                self._held_out,
                self._federation.objectives,
                batch_size=self._batch_size,
                metrics=True,
            )
            held_out = {o: {m: s.value for m, s in row.items()} for o, row in scores.items()}
        return Evaluation(round, losses, held_out, records, self.evaluated)

    def with_true_gradients(self, report: RoundReport, state: State) -> RoundReport:
        """The report with `‖d̄_t‖²` and `‖d*_t‖²`: λ of the round, and the best λ, on ∇f_s(x_t)."""
        names, x = self._federation.names, state.x
        clients = sorted(self._panel) if self._panel is not None else report.cohort
        asks = [
            Ask(
                client=client,
                round=report.round,
                x=x,
                lanes=tuple(
                    Lane(name, {name: 1.0}) for name in self._federation.client(client).objectives
                ),
                local=LocalConfig(lr=0.0, steps=1),
            )
            for client in clients
        ]
        fold = MeanFold(names, x, self._algorithm.weighting)
        gradients, _ = self._engine.map(asks, fold)
        if not gradients.slots:
            return report
        gram = gramian(gradients.deltas)
        present = [report.weights[name] for name in gradients.slots]
        weights = torch.tensor(present, dtype=torch.float64)
        return replace(
            report,
            true_direction_norm_squared=float(weights @ gram @ weights),
            stationarity=min_norm(gram).norm_squared,
        )


def unmeasured(round: int, names: Sequence[str]) -> Evaluation:
    """An evaluation that did not take place."""
    return Evaluation(round, dict.fromkeys(names, NAN), {})
