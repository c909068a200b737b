"""fmol's algorithms as strategies of Flower's: `strategy.start(grid, …)` trains over a grid's nodes.

The loop over rounds, the rule, the steps, alarms, metrics and checkpoints are `fit`'s and the run
folder's, as in a simulation; a strategy only says where clients compute.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from logging import INFO
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log
from torch import nn

from fmol import algorithms
from fmol.config import ALGORITHMS, Config, RunOptions
from fmol.federation import Federation
from fmol.flower.remote import RemoteEngine, Terms
from fmol.flower.roster import Connected, Grid, Roster
from fmol.flower.server import Call
from fmol.layout import Layout
from fmol.objectives import Objective
from fmol.options import nearest
from fmol.portrait import portray
from fmol.result import Result, Snapshot
from fmol.rounds import Algorithm, RoundReport
from fmol.runs.folder import RunFolder
from fmol.runs.training import FLOWER_APP, train_config
from fmol.training import Callback, fit

__all__ = ["FMGDA", "FSMGDA", "FedALS", "FedAvg", "FedLS", "MultiObjective", "StrategyResult"]

logger = logging.getLogger("fmol")

RUN_OPTIONS = frozenset(
    {
        "seed",
        "device",
        "participation",
        "evaluate",
        "evaluate_every",
        "stop_at",
        "true_gradients_every",
        "checkpoint_every",
        "threads",
        "tensorboard",
        "mlflow",
    }
)
"""Of the options of a run, those that a strategy takes."""

MetricValues = dict[str, int | float | list[int] | list[float]]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class StrategyResult(FlowerResult):
    """Flower's result of a strategy, with fmol's own of the same run."""

    run: Result | None = field(default=None, repr=False)
    """Losses, weights, reports and the model, as `fmol.fit` gives them."""

    def __repr__(self) -> str:
        return FlowerResult.__repr__(self)


class MultiObjective(Strategy):
    """A strategy that trains `model` on `objectives` by the algorithm of its class.

    `options` are those of the algorithm (`fmol.FSMGDA` and so on), of a run (`seed`, `participation`,
    `evaluate`, `evaluate_every`, `stop_at`, `checkpoint_every`, …) and of `fmol.flower.remote.Terms`
    (`min_replies`, `min_replies_per_objective`, `max_samples`, …). `out` is the run's folder: with it
    every round is written down, and a server that is started again with the same folder goes on from
    the last round. `min_sites` is how many sites must be connected for a round to begin; they are
    waited for `patience` seconds at most. `held_out` are data of the server's own.

    To have another algorithm as a strategy, name its class: `class Mine(MultiObjective): kind = …`.

    >>> objectives = [Objective("price", lambda out, y: (out[:, 0] - y) ** 2)]
    >>> strategy = FSMGDA(nn.Linear(3, 1), objectives, local_steps=5, seed=1, min_replies=2)
    >>> strategy.algorithm.local_steps, strategy.terms.min_replies
    (5, 2)
    """

    kind: ClassVar[type]
    """The algorithm's class."""

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[Objective],
        *,
        out: str | Path | None = None,
        min_sites: int = 2,
        patience: float = 600.0,
        held_out: Any = None,
        **options: Any,
    ) -> None:
        if not hasattr(self, "kind"):
            raise ValueError(
                f"{type(self).__name__} has no algorithm. Use FSMGDA, FMGDA, FedAvg, FedLS or FedALS, "
                "or set `kind`."
            )
        if min_sites < 1:
            raise ValueError(f"`min_sites` must be at least 1, got {min_sites!r}.")
        if not patience > 0:
            raise ValueError(f"`patience` must be more than 0 seconds, got {patience!r}.")
        if out is not None and importlib.util.find_spec("safetensors") is None:
            raise ImportError('`out` needs safetensors. Install it with: pip install "fmol[cli]".')
        mine = _divide(self.kind, options)
        self.algorithm: Algorithm = self.kind(**mine["algorithm"])
        self.terms = Terms(**mine["terms"])
        self.run_options = {"evaluate": "cohort", "checkpoint_every": 1, **mine["run"]}
        RunOptions(**self.run_options)  # Says now what is wrong with them.
        self.model, self.objectives, self.held_out = model, tuple(objectives), held_out
        self.out = None if out is None else Path(out)
        self.min_sites, self.patience = min_sites, patience
        self._engine: RemoteEngine | None = None
        self._call: Call | None = None

    # ---- Flower's hooks: called around every exchange of messages, in this order ----

    def summary(self) -> None:
        """Logs what the strategy was made with."""
        log(INFO, "\t├── Algorithm: %r", self.algorithm)
        log(INFO, "\t├── Objectives: %s", ", ".join(o.name for o in self.objectives))
        log(INFO, "\t├── Terms: %r", self.terms)
        log(INFO, "\t├── Sites: at least %d, waited for %g s", self.min_sites, self.patience)
        log(INFO, "\t└── Run folder: %s", self.out or "none: nothing is kept if it is killed")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The round's messages, one to each site of the cohort; `arrays` are what all of them share."""
        return self._messages(config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Takes answers in as they come. There are no arrays yet: the model moves when all are in."""
        return None, self._take_in(replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages that ask for losses and metrics alone: after the last round, or of sites beyond the
        cohort. The cohort's ride along with its training."""
        return self._messages(config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Takes losses and metrics in."""
        return self._take_in(replies)

    def _messages(self, config: ConfigRecord) -> Iterable[Message]:
        engine, call = self._open()
        for message in engine.messages(call):
            if config:
                message.content["config"] = config
            yield message

    def _take_in(self, replies: Iterable[Message]) -> MetricRecord:
        engine, call = self._open()
        engine.take_in(call, replies)
        refused = len(call.tally.refused)
        return MetricRecord({"replies": len(call.let_in), "refused": refused})

    def _open(self) -> tuple[RemoteEngine, Call]:
        if self._engine is None or self._call is None:
            raise ValueError("no round is going on. Train with `start(grid, …)`.")
        return self._engine, self._call

    # ---- training ----

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> StrategyResult:
        """The result of training over the sites that `grid` reaches, for `num_rounds` rounds.

        `initial_arrays` are the parameters to begin with, by name; the model's own without.
        `timeout` is how many seconds sites have to answer in a round. The configs go along with every
        message, as the record `"config"`, for what the app itself wants to tell its sites.
        `evaluate_fn` is called with 0 and the first arrays, and after each round.
        """
        if not timeout > 0:
            raise ValueError(f"`timeout` must be more than 0 seconds, got {timeout!r}.")
        model = _with_arrays(self.model, initial_arrays)
        log(INFO, "Starting %s strategy:", type(self).__name__)
        log(INFO, "\t├── Number of rounds: %d, %g s each at most", num_rounds, timeout)
        self.summary()
        names = [objective.name for objective in self.objectives]
        roster = Roster(
            grid,
            names,
            Layout.of(model).digest,
            most=self.terms.max_samples,
            patience=self.patience,
        )
        roster.gather(self.min_sites, everything=True)
        federation = Federation(model, self.objectives, roster, self.held_out)
        configs = {True: train_config or ConfigRecord(), False: evaluate_config or ConfigRecord()}

        def configure(call: Call, arrays: ArrayRecord) -> Iterable[Message]:
            self._call = call
            train = bool(call.asks[0].lanes)
            hook = self.configure_train if train else self.configure_evaluate
            return hook(call.asks[0].round + 1, arrays, configs[train], grid)

        def aggregate(call: Call, replies: Iterable[Message]) -> None:
            hook = self.aggregate_train if call.asks[0].lanes else self.aggregate_evaluate
            hook(call.asks[0].round + 1, replies)
            self._call = None

        def make_engine(federation: Federation, **options: Any) -> RemoteEngine:
            self._engine = RemoteEngine(
                federation,
                grid=grid,
                roster=roster,
                terms=self.terms,
                deadline=timeout,
                configure=configure,
                aggregate=aggregate,
                **options,
            )
            return self._engine

        outcome = StrategyResult()
        if evaluate_fn is not None:
            _keep(outcome.evaluate_metrics_serverapp, 0, evaluate_fn(0, _arrays_of(model)))
        watch = partial(_watch, outcome, num_rounds, evaluate_fn)
        try:
            result = self._train(
                federation,
                num_rounds,
                make_engine,
                Connected(roster, self._run(num_rounds).participation, self.min_sites),
                [watch, *callbacks],
            )
        finally:
            self._engine = self._call = None
        outcome.arrays, outcome.run = _arrays_of(result.model), result
        for report in result.reports:
            _keep_held_out(outcome, report.round, report.held_out)
            outcome.train_metrics_clientapp[report.round + 1] = _metrics(report)
        _keep_held_out(outcome, len(result.reports), result.final.held_out)
        log(INFO, "%r", result)
        return outcome

    def _run(self, rounds: int) -> RunOptions:
        return RunOptions(rounds=rounds, engine="flower", **self.run_options)

    def _train(
        self,
        federation: Federation,
        rounds: int,
        engine: Any,
        participation: Connected,
        callbacks: Sequence[Callback],
    ) -> Result:
        options = self._run(rounds)
        if self.out is None:
            return fit(
                federation,
                self.algorithm,
                rounds,
                options.seed,
                engine,
                options.device,
                participation=participation,
                evaluate=options.evaluate,
                evaluate_every=options.evaluate_every,
                stop_at=options.stop_at,
                true_gradients_every=options.true_gradients_every,
                callbacks=callbacks,
            )
        names = {kind: name for name, kind in ALGORITHMS.items()}
        name = names.get(self.kind, self.kind.__name__)
        config = Config(FLOWER_APP, self.terms, name, self.algorithm, options)
        folder = RunFolder(self.out)
        known = len(federation.population)

        def portray_all(report: RoundReport, snapshot: Snapshot) -> None:
            nonlocal known
            if len(federation.population) > known:  # Sites have come that were not there at first.
                known = len(federation.population)
                folder.write_json(folder.federation, portray(federation).to_json())

        return train_config(
            folder,
            config,
            federation,
            command=f"{type(self).__name__}.start",
            watch=lambda *_: [portray_all, *callbacks],
            say=lambda text: log(INFO, "%s", text),
            engine=engine,
            participation=participation,
        )


class FSMGDA(MultiObjective):
    """`fmol.FSMGDA` as a strategy of Flower's."""

    kind = algorithms.FSMGDA


class FMGDA(MultiObjective):
    """`fmol.FMGDA` as a strategy of Flower's."""

    kind = algorithms.FMGDA


class FedAvg(MultiObjective):
    """`fmol.FedAvg`, on fixed weights of the objectives, as a strategy of Flower's."""

    kind = algorithms.FedAvg


class FedLS(MultiObjective):
    """`fmol.FedLS`, FedAvg with least squares, as a strategy of Flower's; sites must allow
    `InputMoments`."""

    kind = algorithms.FedLS


class FedALS(MultiObjective):
    """`fmol.FedALS`, FedLS with clients that stay near the model in what it does, as a strategy of
    Flower's; sites must allow `InputMoments` and, but for `head_weight=0`, `OutputMoments`."""

    kind = algorithms.FedALS


def _divide(kind: type, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each option to what it is one of; raises for those that nobody knows."""
    places = {
        "algorithm": {each.name for each in fields(kind) if each.init},
        "terms": {each.name for each in fields(Terms)},
        "run": RUN_OPTIONS,
    }
    found: dict[str, dict[str, Any]] = {place: {} for place in places}
    unknown = []
    for name, value in options.items():
        place = next((place for place, names in places.items() if name in names), None)
        if place is None:
            hint = nearest(name, sorted(set().union(*places.values())))
            unknown.append(f"`{name}`" + (f" (did you mean `{hint}`?)" if hint else ""))
        else:
            found[place][name] = value
    if unknown:
        raise ValueError(
            f"{kind.__name__} as a strategy has no option {', '.join(unknown)}. It takes those of the "
            "algorithm, of a run and of `fmol.flower.remote.Terms`."
        )
    return found


def _with_arrays(model: nn.Module, arrays: ArrayRecord | None) -> nn.Module:
    """A copy of the model with the parameters of `arrays`."""
    module = copy.deepcopy(model)
    if arrays is not None:
        try:
            module.load_state_dict(arrays.to_torch_state_dict())
        except RuntimeError as error:
            raise ValueError(
                f"`initial_arrays` are not those of the strategy's model: {error}. Pass "
                "ArrayRecord(model.state_dict())."
            ) from error
    return module


def _arrays_of(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: t.detach().cpu() for name, t in model.state_dict().items()})


def _watch(
    outcome: StrategyResult,
    rounds: int,
    evaluate_fn: EvaluateFn | None,
    report: RoundReport,
    snapshot: Snapshot,
) -> None:
    """Logs a round, and lets the app look at the model after it."""
    losses = "  ".join(
        f"{n} {loss:.4g}" for n, loss in report.losses.items() if not math.isnan(loss)
    )
    said = [f"{len(report.cohort)} sites"]
    said += [f"{len(report.refused)} refused"] if report.refused else []
    said += [f"silent: {', '.join(report.silent)}"] if report.silent else []
    said += [f"no update for {', '.join(report.missing)}"] if report.missing else []
    log(INFO, "[ROUND %d/%d] %s (%s)", report.round + 1, rounds, losses, "; ".join(said))
    for note in report.notes:
        log(INFO, "\t└──> %s", note)
    if evaluate_fn is not None:
        after = report.round + 1
        metrics = evaluate_fn(after, _arrays_of(snapshot.model()))
        _keep(outcome.evaluate_metrics_serverapp, after, metrics)


def _keep(kept: dict[int, MetricRecord], round: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        kept[round] = metrics


def _keep_held_out(
    outcome: StrategyResult, round: int, held_out: Mapping[str, Mapping[str, float]]
) -> None:
    """Held-out metrics at `x_t` are those after `t` rounds, as Flower counts them."""
    values: MetricValues = {
        f"{o}.{m}": float(v) for o, row in held_out.items() for m, v in row.items()
    }
    if values:
        outcome.evaluate_metrics_clientapp[round] = MetricRecord(values)


def _metrics(report: RoundReport) -> MetricRecord:
    """A round's numbers as Flower keeps them; the losses are those it began with."""
    values: MetricValues = {}
    for name, each in (
        ("loss", report.losses),
        ("weight", report.weights),
        ("delta-norm", report.delta_norms),
    ):
        values |= {f"{name}.{objective}": float(value) for objective, value in each.items()}
    values |= {
        "direction-norm-squared": float(report.direction_norm_squared),
        "gap": float(report.gap),
        "bytes-up": report.bytes_up,
        "bytes-down": report.bytes_down,
        "sites": len(report.cohort),
        "silent": len(report.silent),
        "refused": len(report.refused),
        "missing": len(report.missing),
    }
    return MetricRecord(values)
