"""`fit`: the loop over rounds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fmol.alarms import find_alarms
from fmol.engines import EngineFactory, VectorizedEngine, make_engine
from fmol.environment import describe_environment
from fmol.errors import FmolError
from fmol.federation import ClientList, Federation
from fmol.kernels.fallbacks import Fallbacks
from fmol.measurement import Evaluation, Measurement, unmeasured
from fmol.participation import Everyone, Participation
from fmol.result import Result, Snapshot
from fmol.rounds import NAN, Algorithm, Checkpoint, Plan, RoundReport, State
from fmol.wording import in_words

__all__ = ["Callback", "fit", "read_vector"]

logger = logging.getLogger("fmol")

Callback = Callable[[RoundReport, Snapshot], object]
"""Called after each round with its report and the state it led to. Return True to stop there."""


def fit(
    federation: Federation,
    algorithm: Algorithm,
    rounds: int,
    seed: int = 0,
    engine: str | EngineFactory = "sequential",
    device: str | torch.device = "auto",
    *,
    participation: Participation | None = None,
    evaluate: Literal["all", "cohort"] | int | None = None,
    evaluate_every: int = 1,
    stop_at: float | Mapping[str, float] | None = None,
    start: nn.Module | Mapping[str, Tensor] | Tensor | None = None,
    resume: Checkpoint | None = None,
    callbacks: Sequence[Callback] = (),
    true_gradients_every: int | None = None,
    optimum: Mapping[str, float] | None = None,
) -> Result:
    """The result of training `federation`'s model with `algorithm` for `rounds` rounds.

    `participation` says who takes part in a round (everyone). `evaluate` says over whom training
    losses are: `"all"` clients (the default up to 1000), the `"cohort"` (the default above), or a
    fixed random subset of that many; every `evaluate_every` rounds. `stop_at` ends training at the
    first `x_t` whose losses are all at or below it. `start` begins from other parameters, and
    `resume` goes on from a checkpoint of the same run to the same end as without the break.
    `true_gradients_every` measures `‖d̄_t‖²` and `‖d*_t‖²` with true gradients, and `optimum`, the
    losses at a known `x*`, the gap `Δ_Q`.

    The same arguments give the same result, whatever the order of the clients.

    >>> from fmol import Client, FSMGDA, Objective
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> sites = [Client("a", (x, x), ("slope",)), Client("b", (x, 0 * x), ("level",))]
    >>> objectives = [Objective("slope", lambda out, y: ((out - y) ** 2)[:, 0]),
    ...               Objective("level", lambda out, y: ((out - 1) ** 2)[:, 0])]
    >>> problem = Federation(nn.Linear(1, 1), objectives, sites)
    >>> result = fit(problem, FSMGDA(local_steps=5, batch_size=8), rounds=3)
    >>> tuple(result.losses.shape), tuple(result.weights.shape)
    ((4, 2), (3, 2))
    """
    _check_arguments(
        algorithm, participation, rounds, evaluate_every, true_gradients_every, callbacks
    )
    asked = {
        "rounds": rounds,
        "seed": seed,
        # In words: what makes engines may keep the one that it made, and all that is in that.
        "engine": engine if isinstance(engine, str) else in_words(engine),
        "device": str(device),
        "participation": participation,
        "evaluate": evaluate,
        "evaluate_every": evaluate_every,
        "stop_at": stop_at,
        "start": None if start is None else in_words(start),
        "true_gradients_every": true_gradients_every,
        "optimum": optimum,
    }
    targets = _by_objective(stop_at, federation, "stop_at")
    best = _by_objective(optimum, federation, "optimum")
    participation = participation or Everyone()
    fallbacks = Fallbacks()
    machine = make_engine(engine, federation, seed=seed, device=device)
    environment = describe_environment(machine.device)
    measurement = Measurement(federation, algorithm, machine, seed, evaluate)
    state = algorithm.init(federation, read_vector(federation, start).to(machine.device))
    reports: list[RoundReport] = []
    if resume is not None:
        _check_resume(resume, state, seed, start)
        state = _placed(resume.state, like=state)
        reports += resume.reports
        machine.load_client_state(resume.client_state)
    final: Evaluation | None = None
    stopped = "1 round done" if rounds == 1 else f"all {rounds} rounds done"

    def result(final: Evaluation) -> Result:
        return Result(
            federation,
            algorithm,
            state,
            tuple(reports),
            final,
            stopped,
            seed,
            machine.client_state(),
            asked,
            environment,
        )

    def checkpoint() -> Checkpoint:
        return Checkpoint(state, tuple(reports), machine.client_state(), seed)

    def cohort_of(round: int) -> tuple[str, ...]:
        drawn = participation.cohort(federation.population, federation.names, round, seed)
        return tuple(sorted(set(drawn)))

    try:
        for t in range(len(reports), rounds):
            measured = t % evaluate_every == 0
            plan = Plan(t, cohort_of(t), evaluate=measured, held_out=measured)
            if isinstance(machine, VectorizedEngine):
                machine.expect(rounds - t)
            try:
                after, report = algorithm.round(state, plan, machine)
                report = measurement.complete(report, state) if measured else _unmeasured(report)
                if true_gradients_every is not None and t % true_gradients_every == 0:
                    report = measurement.with_true_gradients(report, state)
            except FmolError as error:
                machine.discard()
                stopped = str(error)
                error.result = result(unmeasured(t, federation.names))
                raise
            if best:
                report = replace(report, optimality_gap=_optimality_gap(report, best))
            notes = fallbacks.take()
            if t == 0:
                notes += _without_labels(report) + _without_held_out(federation, algorithm)
            if notes:
                report = replace(report, notes=(*report.notes, *notes))
            reason = _reached(report, targets, federation)
            if reason:
                # x_t is good enough: the step that was just computed from it is not taken.
                machine.discard()
                stopped = reason
                if measured:
                    final = _evaluation_of(report)
                break
            alarms = find_alarms([*reports, report], federation.population, algorithm)
            report = replace(report, alarms=alarms)
            _log(report, reports)
            machine.commit()
            state = after
            reports.append(report)
            snapshot = Snapshot(federation, state, checkpoint)
            # Every callback is called, even when an earlier one asks to stop.
            answers = [callback(report, snapshot) for callback in callbacks]
            if any(isinstance(answer, bool | np.bool_) and answer for answer in answers):
                stopped = f"a callback stopped it after round {t}"
                break
        if final is None:
            final = measurement.at(state, len(reports), cohort_of(len(reports)))
            for refusal in final.refused:
                logger.warning("refused: %s", refusal)
        return result(final)
    finally:
        machine.close()


def _check_arguments(
    algorithm: Algorithm,
    participation: Participation | None,
    rounds: int,
    evaluate_every: int,
    true_gradients_every: int | None,
    callbacks: Sequence[Callback],
) -> None:
    """Raises for what would otherwise fail far from where it was said."""
    for name, thing, does, such in [
        ("algorithm", algorithm, "round", "FSMGDA(local_steps=10)"),
        ("participation", participation, "cohort", "Fraction(0.5)"),
    ]:
        if isinstance(thing, type):
            raise ValueError(
                f"`{name}` is the class {thing.__name__} itself. Make one of it: {thing.__name__}(…)."
            )
        if thing is not None and not callable(getattr(thing, does, None)):
            raise ValueError(f"`{name}` must be one such as {such}, got {thing!r}.")
    for name, value, least in [
        ("rounds", rounds, 0),
        ("evaluate_every", evaluate_every, 1),
        ("true_gradients_every", true_gradients_every, 1),
    ]:
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not (whole and value >= least):
            raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
    if true_gradients_every is not None and not algorithm.shares_model:
        raise ValueError(
            f"`true_gradients_every` is {true_gradients_every}, but {type(algorithm).__name__} has no "
            "model of all at which gradients could be taken. Leave it out."
        )
    if not isinstance(callbacks, Sequence) or not all(callable(c) for c in callbacks):
        raise ValueError(
            f"`callbacks` must be a list of callables, got {callbacks!r}. Wrap a single one in a list."
        )


def _check_resume(resume: Checkpoint, fresh: State, seed: int, start: object) -> None:
    """Raises where a checkpoint cannot be one of this run."""
    if start is not None:
        raise ValueError("`start` and `resume` were both given. Leave out `start` to go on.")
    if resume.seed != seed:
        raise ValueError(
            f"`resume` is of a run with seed {resume.seed}, and `seed` is {seed}. Give the same seed."
        )
    if resume.state.x.shape != fresh.x.shape or set(resume.state.memory) < set(fresh.memory):
        raise ValueError(
            f"`resume` is of another model or algorithm: it has {resume.state.x.numel()} parameters "
            f"and keeps {sorted(resume.state.memory)}, this run {fresh.x.numel()} and "
            f"{sorted(fresh.memory)}. Resume with the arguments that the run was started with."
        )


def _placed(saved: State, like: State) -> State:
    """A checkpoint's state on the devices where this run has its own."""
    memory = {
        name: tensor.to(like.memory[name].device) if name in like.memory else tensor
        for name, tensor in saved.memory.items()
    }
    return State(saved.x.to(like.x.device), memory)


def _evaluation_of(report: RoundReport) -> Evaluation:
    return Evaluation(
        report.round,
        report.losses,
        report.held_out,
        report.clients,
        report.refused,
        report.evaluated,
    )


def _optimality_gap(report: RoundReport, best: Mapping[str, float]) -> float:
    """Δ_Q with the round's λ; NaN where the round held, and has none."""
    if not any(report.weights.values()):
        return NAN
    return sum(weight * (report.losses[n] - best[n]) for n, weight in report.weights.items())


def _unmeasured(report: RoundReport) -> RoundReport:
    """Without losses: what a rule may have asked of the cohort is not what was asked to be shown."""
    return replace(report, losses=dict.fromkeys(report.losses, NAN))


def read_vector(
    federation: Federation,
    start: nn.Module | Mapping[str, Tensor] | Tensor | None,
    option: str = "start",
) -> Tensor:
    """`x` `[d]`: the federation's own parameters, or those of another model of the same shape.

    `option` is what the caller was given them as, for errors.
    """
    layout = federation.layout
    if isinstance(start, Tensor):
        if start.shape != (layout.size,):
            raise ValueError(
                f"`{option}` has shape {list(start.shape)} and the model has {layout.size} trainable "
                "parameters. Pass a vector of that length, a module, or a state dict."
            )
        return _finite(start.detach().to(layout.dtype).clone(), f"`{option}`")
    source = federation.model if start is None else start
    if not isinstance(source, nn.Module | Mapping):
        raise ValueError(
            f"`{option}` is a {type(source).__name__}. Pass a module, a state dict or a vector [d]."
        )
    named = dict(source.named_parameters()) if isinstance(source, nn.Module) else dict(source)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in named or tuple(named[name].shape) != shape:
            seen = list(named[name].shape) if name in named else "nothing"
            raise ValueError(
                f"`{option}` has {seen} for parameter `{name}`, where the federation's model has "
                f"{list(shape)}. Start from a model of the same architecture."
            )
    return _finite(layout.flatten(named), f"`{option}`" if start is not None else "the model")


def _finite(x: Tensor, source: str) -> Tensor:
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"the parameters in {source} are not finite. Give others.")
    return x


def _by_objective(
    values: float | Mapping[str, float] | None, federation: Federation, option: str
) -> dict[str, float]:
    """`values` by objective, checked: one number stands for all; None for none."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        values = dict.fromkeys(federation.names, values)
    for name, value in values.items():
        if not isinstance(value, Real) or math.isnan(value):
            raise ValueError(f"`{option}` for objective `{name}` must be a number, got {value!r}.")
    unknown = sorted(set(values) - set(federation.names))
    if unknown:
        raise ValueError(
            f"`{option}` names objective `{unknown[0]}`, which the federation does not have. "
            f"Its objectives are {list(federation.names)}."
        )
    absent = [name for name in federation.names if name not in values]
    if option == "optimum" and absent:
        raise ValueError(f"`optimum` has no loss for objective `{absent[0]}`. Give all of them.")
    return dict(values)


def _without_labels(report: RoundReport) -> list[str]:
    """A note on clients that hold an objective and have no label for it, by objective."""
    refused = {(each.client, each.objective) for each in report.refused}
    empty: dict[str, list[str]] = {}
    for record in report.clients:
        if record.samples == 0 and (record.client, record.objective) not in refused:
            empty.setdefault(record.objective, []).append(record.client)
    notes = []
    for name, clients in empty.items():
        more = f" and {len(clients) - 3} more" if len(clients) > 3 else ""
        who = ", ".join(f"`{client}`" for client in clients[:3]) + more
        notes.append(f"no label for objective `{name}`, so no part in it: client {who}")
        logger.warning(notes[-1])
    return notes


def _without_held_out(federation: Federation, algorithm: Algorithm) -> list[str]:
    """A note on metrics that nothing is there to be measured on, by objective.

    Clients that are made when they are needed are not made for it.
    """
    if not isinstance(federation.population, ClientList):
        return []
    if federation.held_out is not None and algorithm.shares_model:
        return []
    ids = federation.population.ids()
    clients = [client for id in ids if (client := federation.client(id)).held_out is not None]
    measured = {name for client in clients for name in client.objectives}
    unmet = [o.name for o in federation.objectives if o.metrics and o.name not in measured]
    if not unmet:
        return []
    names = ", ".join(f"`{name}`" for name in unmet[:3])
    more = f" and {len(unmet) - 3} more" if len(unmet) > 3 else ""
    why = "no held-out data" if federation.held_out is None else "no held-out data at the clients"
    note = f"metrics of {names}{more} were not computed: {why}"
    logger.warning(note)
    return [note]


def _reached(report: RoundReport, targets: Mapping[str, float], federation: Federation) -> str:
    """Why training should end at this `x_t`, in words; empty if it should not."""
    if targets and all(report.losses[name] <= goal for name, goal in targets.items()):
        return f"every loss in `stop_at` was reached at round {report.round}"
    everyone = len(report.cohort) == len(federation.population)
    if everyone and len(report.protected) == len(federation.objectives):
        return f"every objective reached its target at round {report.round}"
    return ""


def _log(report: RoundReport, before: Sequence[RoundReport]) -> None:
    for refusal in report.refused:
        logger.warning("refused: %s", refusal)
    if report.missing:
        logger.info("round %d: no update for %s", report.round, ", ".join(report.missing))
    standing = {(a.kind, a.objective) for a in before[-1].alarms} if before else set()
    for alarm in report.alarms:
        if (alarm.kind, alarm.objective) not in standing:
            logger.warning("%s: %s", alarm.kind, alarm.message)
