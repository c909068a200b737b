"""What a run measures beside its own steps: losses over more than the cohort, true gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from operator import attrgetter
from time import perf_counter

import torch
from torch import Tensor

from fmol import rng
from fmol.aggregate import MeanFold, Means, Weighting, gramian
from fmol.data import Samples, as_samples
from fmol.engines.seam import Ask, ClientRecord, Engine, Lane, LocalConfig, Receipt, Refusal
from fmol.evaluation import EVALUATION_BATCH
from fmol.evaluation import evaluate as evaluate_on
from fmol.federation import Federation
from fmol.layout import FlatModel
from fmol.metrics import mean_held_out, mean_losses
from fmol.minnorm import min_norm
from fmol.misfit import check_fit
from fmol.rounds import NAN, Algorithm, RoundReport, State

__all__ = ["Evaluation", "Measurement", "choose_panel", "measure_gradients"]

EVALUATE_ALL_UP_TO = 1000


@dataclass(frozen=True)
class Evaluation:
    """How the model stands at one `x_t`. NaN where it was not measured."""

    round: int
    losses: Mapping[str, float]
    held_out: Mapping[str, Mapping[str, float]]
    clients: tuple[ClientRecord, ...] = ()
    refused: tuple[Refusal, ...] = ()
    """What was not let in, so that the means are over fewer than `evaluated` says."""
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
    ) -> None:
        self._federation, self._algorithm, self._engine = federation, algorithm, engine
        self._seed = seed
        self._panel, self.evaluated = choose_panel(federation, seed, evaluate)
        """Who is evaluated (None is whoever takes part), and the same in words."""
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
            records = tuple(sorted([*mine, *others.clients], key=attrgetter("client")))
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
        receipt = self._ask(panel, round, state)
        return replace(self._evaluation(round, state, receipt.clients), refused=receipt.refused)

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
            with rng.torch_stream(self._engine.device, self._seed, "model", round, "held_out"):
                try:
                    scores = evaluate_on(
                        self._model,
                        self._held_out,
                        self._federation.objectives,
                        batch_size=EVALUATION_BATCH,
                        metrics=True,
                    )
                except RuntimeError as error:
                    owner = "`held_out` of the federation"
                    check_fit(error, self._model, self._held_out, owner)
                    raise
            held_out = {o: {m: s.value for m, s in row.items()} for o, row in scores.items()}
        return Evaluation(round, losses, held_out, records, evaluated=self.evaluated)

    def with_true_gradients(self, report: RoundReport, state: State) -> RoundReport:
        """The report with `‖d̄_t‖²` and `‖d*_t‖²`: λ of the round, and the best λ, on ∇f_s(x_t)."""
        clients = sorted(self._panel) if self._panel is not None else report.cohort
        gradients, receipt = measure_gradients(
            self._engine, clients, state.x, self._algorithm.weighting, report.round
        )
        report = replace(report, refused=report.refused + receipt.refused)
        if not gradients.slots:
            return report
        gram = gramian(gradients.deltas)
        present = [report.weights[name] for name in gradients.slots]
        weights = torch.tensor(present, dtype=torch.float64)
        # A round that held has no λ, and so no d̄.
        taken = float(weights @ gram @ weights) if float(weights.sum()) > 0 else NAN
        return replace(
            report,
            true_direction_norm_squared=taken,
            stationarity=min_norm(gram).norm_squared,
        )


def measure_gradients(
    engine: Engine, clients: Sequence[str], x: Tensor, weighting: Weighting, round: int = 0
) -> tuple[Means, Receipt]:
    """∇f_s(x), the means over `clients` that hold s of their gradients on all their data, in evaluation
    mode; and what happened on the way."""
    federation = engine.federation
    asks = [
        Ask(
            client=client,
            round=round,
            x=x,
            lanes=tuple(Lane(name, {name: 1.0}) for name in federation.client(client).objectives),
            local=LocalConfig(lr=0.0, steps=1, training=False),
        )
        for client in clients
    ]
    gradients, receipt = engine.map(asks, MeanFold(federation.names, x, weighting))
    return gradients, receipt


def choose_panel(
    federation: Federation, seed: int, evaluate: str | int | None
) -> tuple[frozenset[str] | None, str]:
    """Who is evaluated, None for whoever takes part, and that in words."""
    ids = federation.population.ids()
    size = len(federation.population)
    if evaluate is None:
        evaluate = "all" if size <= EVALUATE_ALL_UP_TO else "cohort"
    if evaluate == "cohort":
        return None, "the cohort"
    if evaluate == "all":
        words = f"all {size} clients" if size > 1 else "the one client"
        return frozenset(ids[i] for i in range(size)), words
    if isinstance(evaluate, bool) or not isinstance(evaluate, Integral) or evaluate < 1:
        raise ValueError(
            f"`evaluate` must be 'all', 'cohort' or a number of clients, got {evaluate!r}."
        )
    stream = rng.stream(seed, "evaluate")
    drawn = {ids[i] for i in rng.sample_without_replacement(stream, size, int(evaluate))}
    held = {name for client in drawn for name in federation.client(client).objectives}
    for name in federation.names:
        if name not in held:  # Nobody drawn holds it: it would never be seen.
            holders = federation.population.holders(name)
            stream = rng.stream(seed, "evaluate", name)
            drawn.add(holders[int(stream.integers(len(holders)))])
    return frozenset(drawn), f"{len(drawn)} of {size} clients"


def unmeasured(round: int, names: Sequence[str]) -> Evaluation:
    """An evaluation that did not take place."""
    return Evaluation(round, dict.fromkeys(names, NAN), {})
