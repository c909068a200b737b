"""Every engine computes what the sequential one does, to rounding, and says what it could not batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmol import (
    FMGDA,
    FSMGDA,
    MGD,
    SMGD,
    Alone,
    Client,
    FedAvg,
    Federation,
    LazyPopulation,
    Objective,
    Result,
    fit,
    whole_set,
)
from fmol.algorithms import Momentum
from fmol.engines import AutoEngine, VectorizedEngine, gradients
from fmol.engines.seam import Ask, Reply, Site
from fmol.participation import Fraction, Number
from fmol.rounds import Algorithm
from support import data, federation, flat, masked_error, relative, squared_error

ROUNDS = 10


def both(problem: Federation, algorithm: Algorithm, **options: Any) -> tuple[Result, Result]:
    options = {"rounds": ROUNDS, "seed": 3, "device": "cpu", **options}
    engine = options.pop("engine", "vectorized")
    sequential = fit(problem, algorithm, engine="sequential", **options)
    return sequential, fit(problem, algorithm, engine=engine, **options)


def assert_same(one: Result, other: Result, tolerance: float = 1e-10) -> None:
    assert relative(flat(other.model), flat(one.model)) < tolerance
    for name in ("losses", "weights"):
        a, b = getattr(one, name), getattr(other, name)
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.allclose(a.nan_to_num(), b.nan_to_num(), rtol=100 * tolerance, atol=tolerance)
    for mine, theirs in zip(one.reports, other.reports, strict=True):
        assert mine.cohort == theirs.cohort
        assert (mine.bytes_up, mine.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert (mine.missing, mine.held) == (theirs.missing, theirs.held)
        assert len(mine.refused) == len(theirs.refused)
        for a, b in zip(mine.clients, theirs.clients, strict=True):
            assert (a.client, a.objective, a.samples) == (b.client, b.objective, b.samples)
            assert math.isclose(a.loss, b.loss, rel_tol=1e-6) or math.isnan(a.loss)
            assert math.isclose(a.delta_norm, b.delta_norm, rel_tol=1e-6) or math.isnan(
                b.delta_norm
            )
            assert a.held_out.keys() == b.held_out.keys()
            for metric, value in a.held_out.items():
                assert b.held_out[metric] == pytest.approx(value, rel=1e-6, nan_ok=True)


def batched(result: Result) -> bool:
    return not any("one by one" in note for report in result.reports for note in report.notes)


ALGORITHMS: list[Algorithm] = [
    FSMGDA(local_steps=3, batch_size=4),
    FSMGDA(local_steps=3, batch_size=4, accumulate="mean", weighting="samples"),
    FSMGDA(local_epochs=2, batch_size=4),
    FMGDA(local_steps=2, normalize="loss"),
    FMGDA(local_epochs=3),
    FSMGDA(
        local_steps=4,
        batch_size=4,
        local_momentum=0.5,
        weight_decay=0.1,
        clip_norm=0.5,
        proximal=0.3,
    ),
    FSMGDA(local_steps=2, batch_size=4, shared="trunk.*", on_missing_objective="reuse"),
    MGD(0.1),
    SMGD(batch_size=4),
    FedAvg(local_steps=3, batch_size=4),
    FedAvg({"a": 0.5, "b": 0.0, "c": 2.0}, local_epochs=1, batch_size=4),
    FSMGDA(local_epochs=2, batch_size=4, local_average=0.5),
    FedAvg(local_epochs=3, batch_size=5, local_average=0.3, local_momentum=0.5, accumulate="mean"),
    FSMGDA(local_epochs=1, batch_size=4, drift_correction="scaffold", extrapolate=True),
    FSMGDA(local_steps=3, batch_size=4, extrapolate=True, extrapolate_by="unit"),
    FedAvg(local_steps=3, batch_size=4, drift_correction="scaffold", server_step=Momentum(0.5)),
]


@pytest.mark.parametrize("participation", [None, Number(2), Fraction(0.5)], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_engines_agree_for_every_algorithm_on_unequal_clients(
    algorithm: Algorithm, participation: Any
) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    one, other = both(problem, algorithm, participation=participation)
    assert batched(other)
    assert_same(one, other)


def test_work_of_another_kind_is_done_one_by_one_and_it_is_said() -> None:
    one, other = both(federation(), Alone(local_steps=3, batch_size=4))
    assert_same(one, other, 1e-15)
    assert "`work_alone` is not the usual work" in other.reports[0].notes[0]


@pytest.mark.parametrize(
    "algorithm",
    [
        FSMGDA(local_steps=5, batch_size=4),
        FMGDA(local_steps=4, local_momentum=0.5),
        FedAvg({"a": 0.5, "b": 0.1, "c": 2.0}, local_steps=5, batch_size=4),
    ],
    ids=lambda a: type(a).__name__,
)
def test_steps_that_are_recorded_and_replayed_are_the_same_steps(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 2)
    problem = federation([("a", "b"), ("c",), ("b", "c"), ("a",)], sizes=[5, 9, 12, 7])
    made: list[VectorizedEngine] = []

    def engine(*arguments: Any, **named: Any) -> VectorizedEngine:
        made.append(VectorizedEngine(*arguments, **named))
        return made[-1]

    one, other = both(problem, algorithm, engine=engine)
    assert_same(one, other)
    assert made[0]._gradients._replays
    assert None not in made[0]._gradients._replays.values()


@pytest.mark.parametrize(("steps", "replayed"), [(1, False), (2, False), (3, True)])
def test_steps_are_replayed_where_there_are_enough_in_a_round_for_one_to_be_checked(
    steps: int, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 2)
    made: list[VectorizedEngine] = []

    def engine(*arguments: Any, **named: Any) -> VectorizedEngine:
        made.append(VectorizedEngine(*arguments, **named))
        return made[-1]

    problem = federation([("a", "b"), ("c",)], sizes=[12] * 2, held_out=data(20, seed=9))
    fit(problem, FSMGDA(local_steps=steps, batch_size=4), rounds=8, device="cpu", engine=engine)
    assert bool(made[0]._gradients._replays) is replayed


@pytest.mark.parametrize("name", ["attention", "convolutions", "dicts"])
def test_models_of_many_kinds_can_be_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        problem = MODELS[name]()
    one, other = both(problem, FSMGDA(local_steps=3, batch_size=4, local_lr=0.05), rounds=3)
    assert_same(one, other)


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 100])
def test_the_size_of_chunks_changes_nothing_but_rounding(lanes: int) -> None:
    problem = federation([("a", "b", "c")] * 3, sizes=[5, 9, 12])
    one, other = both(
        problem,
        FSMGDA(local_epochs=1, batch_size=4),
        engine=lambda *a, **k: VectorizedEngine(*a, lanes_in_flight=lanes, **k),
    )
    assert_same(one, other)


# ---- models ----------------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, attention and LayerNorm over tokens `[B, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embed(tokens)
        mixed, _ = self.attend(words, words, words, need_weights=False)
        pooled = self.norm(words + mixed).mean(1)
        return torch.cat([head(pooled) for head in self.heads], dim=1)


class Images(nn.Module):
    """Strided, padded and dilated convolutions with GroupNorm, over images `[B, 3, 12, 12]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.Conv2d(4, 6, (3, 2), dilation=2, padding=(2, 1), bias=False),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 6, 1, groups=2),
            nn.Flatten(),
            nn.LazyLinear(2),
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(images)
        return out


class Tied(nn.Module):
    """One weight used twice, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.out = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs))))
        return self.out(torch.tanh(self.frozen(hidden)))  # type: ignore[no-any-return]


class Named(nn.Module):
    """Inputs by name, outputs as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, *, features: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"left": self.left(features)[:, 0] * scale, "right": self.right(features)[:, 0]}


def made(
    model: nn.Module,
    make: Callable[[torch.Generator, int], Any],
    losses: Sequence[Callable[[Any, Any], Any]] = (squared_error(0), squared_error(1)),
    sizes: Sequence[int] = (6, 9, 7),
    **options: Any,
) -> Federation:
    clients = []
    for i, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(i)
        targets = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        clients.append(Client(f"c{i}", (make(generator, n), targets), ("a", "b"), **options))
    objectives = [Objective(name, loss) for name, loss in zip("ab", losses, strict=True)]
    return Federation(model.double(), objectives, clients)


def floats(*shape: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda g, n: torch.randn(n, *shape, generator=g, dtype=torch.float64)


def images() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Images().double()
        model(torch.zeros(1, 3, 12, 12, dtype=torch.float64))
        return model


MODELS: dict[str, Callable[[], Federation]] = {
    "attention": lambda: made(Words(), lambda g, n: torch.randint(11, (n, 6), generator=g)),
    "convolutions": lambda: made(images(), floats(3, 12, 12)),
    "tied and frozen": lambda: made(Tied(), floats(5)),
    "dicts": lambda: made(
        Named(),
        lambda g, n: {
            "features": torch.randn(n, 5, generator=g, dtype=torch.float64),
            "scale": torch.ones(n, dtype=torch.float64),
        },
        (lambda out, y: (out["left"] - y[:, 0]) ** 2, lambda out, y: (out["right"] - y[:, 1]) ** 2),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_engines_agree_on_many_kinds_of_model(name: str, batch_size: int | None) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        problem = MODELS[name]()
    one, other = both(problem, FSMGDA(local_steps=3, batch_size=batch_size, local_lr=0.05))
    assert batched(other), other.reports[0].notes
    assert_same(one, other)


def test_float32_agrees_after_three_rounds_on_a_smooth_model() -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c")])
    clients = [
        Client(c.id, (c.data[0].float(), c.data[1].float()), c.objectives)
        for c in map(problem.client, problem.population.ids())
    ]
    single = Federation(problem.model.float(), problem.objectives, clients)
    one, other = both(single, FSMGDA(local_steps=5, batch_size=4), rounds=3)
    assert relative(flat(other.model), flat(one.model)) < 1e-4


# ---- losses ----------------------------------------------------------------------------------


def set_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Defined on a set alone: the squared gap between two means."""
    return (outputs[:, 0].mean() - targets[:, 0].mean()) ** 2


def stubborn_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One that looks at values: no call can serve several lanes."""
    if float(targets[0, 1]) > 1e9:
        raise RuntimeError("never")
    return (outputs[:, 1] - targets[:, 1]) ** 2


@pytest.mark.parametrize("sizes", [(8, 8, 8), (6, 9, 7)])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_losses_of_sets_and_losses_that_look_at_values_agree(
    sizes: Sequence[int], batch_size: int | None
) -> None:
    problem = made(nn.Linear(5, 2), floats(5), (set_loss, stubborn_loss), sizes)
    one, other = both(problem, FSMGDA(local_steps=3, batch_size=batch_size))
    assert_same(one, other)
    assert batched(other)
    notes = " ".join(other.reports[0].notes)
    assert "the loss of `b` was computed lane by lane" in notes


@pytest.mark.parametrize("algorithm", [FSMGDA(local_steps=4, batch_size=3), FMGDA(local_steps=2)])
def test_missing_labels_agree(algorithm: Algorithm) -> None:
    clients = []
    for i, n in enumerate((6, 9, 7)):
        inputs, targets = data(n, seed=i)
        targets[:: i + 1, 0] = torch.nan  # The first client has no label for `a` at all.
        targets[1::3, 1] = torch.nan
        clients.append(Client(f"c{i}", (inputs, targets), ("a", "b", "c")))
    objectives = [Objective(name, masked_error(s)) for s, name in enumerate("abc")]
    model = federation().model
    one, other = both(Federation(model, objectives, clients), algorithm, evaluate="cohort")
    assert_same(one, other)
    assert [r.client for r in other.reports[0].clients if r.objective == "a" and r.samples] == [
        "c1",
        "c2",
    ]
    quiet = {"evaluate_every": 3}
    assert_same(*both(Federation(model, objectives, clients), algorithm, **quiet))


def test_held_out_scores_agree() -> None:
    worst = whole_set(lambda out, y: (out[:, 0] - y[:, 0]).abs().max())
    objectives = [
        Objective("a", squared_error(0), {"worst": worst, "error": squared_error(0)}),
        Objective("b", masked_error(1), {"near": lambda out, y: (out[:, 1] - y[:, 1]).abs() < 0.5}),
    ]
    clients = [
        Client(
            f"c{i}",
            data(n, outputs=2, seed=i),
            held,
            held_out=data(m, outputs=2, seed=9 + i) if m else None,
        )
        for i, (n, m, held) in enumerate([(6, 5, ("a", "b")), (9, 0, ("a",)), (7, 3, ("b",))])
    ]
    model = nn.Linear(5, 2).double()
    one, other = both(Federation(model, objectives, clients), FSMGDA(local_steps=2, batch_size=4))
    assert_same(one, other)


# ---- what is refused, transformed, lazy, or cannot be batched --------------------------------


def test_what_is_not_finite_is_refused_alike() -> None:
    problem = federation([("a", "b"), ("a", "b"), ("c",)])
    clients = [problem.client(id) for id in problem.population.ids()]
    broken = clients[1].data[1].clone()
    broken[0, 0] = torch.inf
    clients[1] = replace(clients[1], data=(clients[1].data[0], broken))
    one, other = both(
        Federation(problem.model, problem.objectives, clients), FMGDA(local_steps=2), rounds=3
    )
    assert_same(one, other)
    assert [str(r) for r in one.reports[0].refused] == [str(r) for r in other.reports[0].refused]


@dataclass(frozen=True)
class Halved:
    """Half of what is sent, and the other half back."""

    def client(self, reply: Reply, ask: Ask, site: Site) -> Reply:
        return replace(reply, deltas={slot: 0.5 * delta for slot, delta in reply.deltas.items()})

    def server(self, reply: Reply, ask: Ask) -> Reply:
        return replace(reply, deltas={slot: 2.0 * delta for slot, delta in reply.deltas.items()})


def test_transforms_see_every_reply() -> None:
    algorithm = FSMGDA(local_steps=2, batch_size=4, transforms=(Halved(),))
    one, other = both(federation([("a", "b"), ("c",), ("b",)]), algorithm)
    assert_same(one, other)


def test_lazy_clients_agree() -> None:
    def make(id: str) -> Client:
        return Client(id, lambda: data(6 + int(id[1:]) % 3, seed=int(id[1:])), ("a", "b", "c"))

    names = [f"c{i:03d}" for i in range(50)]
    problem = federation()
    lazy = Federation(problem.model, problem.objectives, LazyPopulation(names, make))
    one, other = both(lazy, FSMGDA(local_steps=2, batch_size=4), participation=Number(5))
    assert batched(other)
    assert_same(one, other)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, n: int, seed: int) -> None:
        self.inputs, self.targets = data(n, seed=seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i], self.targets[i]


class Mixing(nn.Module):
    """What it says of a sample depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs - inputs.mean(0))  # type: ignore[no-any-return]


class Branching(nn.Module):
    """Takes another way by what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs if float(self.out.weight.detach().sum()) > -1e9 else -inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (lambda: federation(model=Mixing().double()), "depends on the others in its batch"),
        (lambda: federation(model=Branching().double()), "cannot be batched over lanes"),
        (lambda: _with_holes(federation()), "are not finite, so that ways to compute them"),
        (
            lambda: Federation(
                federation().model,
                federation().objectives,
                [Client(f"c{i}", Rows(5 + i, i), ("a", "b", "c")) for i in range(3)],
            ),
            "not tensors in memory",
        ),
    ],
)
def test_what_cannot_be_batched_is_computed_one_by_one_and_it_is_said(
    problem: Callable[[], Federation], reason: str
) -> None:
    one, other = both(problem(), FSMGDA(local_steps=2, batch_size=4), rounds=3)
    assert_same(one, other, 1e-15)
    assert any(reason in note for note in other.reports[0].notes), other.reports[0].notes


def _with_holes(problem: Federation) -> Federation:
    """Losses of the last column are no numbers anywhere: their objective takes no part."""
    for client in problem.population.ids():
        problem.client(client).data[1][:, -1] = torch.nan
    return problem


def test_lanes_in_flight_must_be_a_number_or_auto() -> None:
    with pytest.raises(ValueError, match="`lanes_in_flight` must be 'auto' or a whole number"):
        VectorizedEngine(federation(), lanes_in_flight=0)


def test_clients_whose_data_are_not_alike_are_computed_one_by_one_and_it_is_said() -> None:
    problem = federation()
    clients = [problem.client(id) for id in problem.population.ids()]
    clients[1] = replace(clients[1], data=Rows(7, 1))
    mixed = Federation(problem.model, problem.objectives, clients)
    for engine in ("vectorized", "auto"):
        one, other = both(mixed, FSMGDA(local_steps=2, batch_size=4), rounds=3, engine=engine)
        assert_same(one, other)
        assert "one by one" in " ".join(other.reports[0].notes) or engine == "auto"


def test_held_out_data_that_are_not_alike_are_evaluated_all_the_same() -> None:
    problem = federation()
    clients = [problem.client(id) for id in problem.population.ids()]
    clients[0] = replace(clients[0], held_out=data(5, seed=50))
    clients[1] = replace(clients[1], held_out=Rows(4, 51))
    one, other = both(
        Federation(problem.model, problem.objectives, clients),
        FSMGDA(local_steps=2, batch_size=4),
        rounds=3,
    )
    assert_same(one, other)
    assert one.final.held_out
    assert other.final.held_out.keys() == one.final.held_out.keys()
    assert any("client by client" in note for note in other.reports[0].notes)


def test_a_loss_that_changes_between_rounds_is_noticed_although_steps_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "RECORD_AT", 2)
    scale = {"v": 1.0}

    def annealed(outputs: Tensor, targets: Tensor) -> Tensor:
        return scale["v"] * (outputs[:, 0] - targets[:, 0]) ** 2

    problem = made(nn.Linear(5, 2), floats(5), (annealed, squared_error(1)), (8, 8, 8))

    def change(report: Any, snapshot: Any) -> None:
        scale["v"] = 0.1 if report.round >= 4 else 1.0

    results = []
    for engine in ("sequential", "vectorized"):
        scale["v"] = 1.0
        results.append(
            fit(
                problem,
                FSMGDA(local_steps=3, batch_size=4),
                rounds=8,
                device="cpu",
                engine=engine,
                callbacks=[change],
            )
        )
    assert_same(results[0], results[1])
    notes = [note for report in results[1].reports for note in report.notes]
    assert any("depends on more than tensors" in note for note in notes)


# ---- auto ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["sequential", "vectorized"])
def test_auto_is_one_of_the_two_bit_for_bit_and_says_which(choice: Any) -> None:
    problem = federation([("a", "b"), ("c",), ("b", "c")])
    algorithm = FSMGDA(local_steps=3, batch_size=4)
    told: list[str] = []

    def engine(*arguments: Any, **named: Any) -> AutoEngine:
        return AutoEngine(*arguments, choice=choice, decided=told.append, **named)

    ours = fit(problem, algorithm, rounds=3, device="cpu", engine=engine)
    same = fit(problem, algorithm, rounds=3, device="cpu", engine=choice)
    assert torch.equal(flat(ours.model), flat(same.model))
    assert told == []  # It was settled beforehand.
    measured = fit(problem, algorithm, rounds=3, device="cpu", engine="auto")
    note = measured.reports[0].notes[0]
    assert note.startswith(("engine vectorized: a lane's step", "engine sequential: a lane's step"))
    assert not any("engine" in note for note in measured.reports[1].notes)


def test_auto_takes_the_faster_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, algorithm = federation(), FSMGDA(local_steps=3, batch_size=4)
    for times, choice in (((1.0, 2.0, 4), "sequential"), ((2.0, 1.0, 4), "vectorized")):
        monkeypatch.setattr(AutoEngine, "_time", lambda self, asks, times=times: times)
        told: list[str] = []
        fit(
            problem,
            algorithm,
            rounds=2,
            device="cpu",
            engine=lambda *a, told=told, **k: AutoEngine(*a, decided=told.append, **k),
        )
        assert told == [choice]


@pytest.mark.parametrize(
    ("compiled", "rounds", "choice"),
    [(0.5, 40, "compiled"), (1.5, 40, "vectorized"), (0.5, 1, "vectorized")],
)
def test_auto_compiles_on_a_cpu_where_a_long_run_shows_that_it_is_faster(
    compiled: float, rounds: int, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time(self: AutoEngine, asks: Any) -> tuple[float, float, int]:
        return 2.0, compiled if self._workers[0].compile == "always" else 1.0, 4

    compilations: list[Any] = []

    def compile(step: Any, **_: Any) -> Any:
        compilations.append(step)
        return step

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(AutoEngine, "_time", time)
    told: list[str] = []
    problem, algorithm = federation(), FSMGDA(local_steps=3, batch_size=4)
    result = fit(
        problem,
        algorithm,
        rounds=rounds,
        device="cpu",
        engine=lambda *a, **k: AutoEngine(*a, decided=told.append, **k),
        callbacks=[lambda report, _: report.round >= 3],
    )
    assert told == [choice]
    note = result.reports[0].notes[0]
    assert note.startswith(f"engine {choice}: a lane's step takes 2000.00 ms by itself and 1000.00")
    assert ("compiled 1500.00 ms" in note) == (compiled == 1.5)
    assert bool(compilations) == (choice == "compiled")
    one = fit(problem, algorithm, rounds=len(result.reports), device="cpu")
    assert relative(flat(result.model), flat(one.model)) < 1e-12


def test_auto_goes_on_where_steps_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(step: Any, **_: Any) -> Any:
        def run(*tensors: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        return run

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr("fmol.engines.auto.COMPILE_SECONDS", {"first": 0.0, "later": 0.0})
    monkeypatch.setattr("fmol.engines.auto.COMPILE_EACH", 0.0)
    told: list[str] = []
    result = fit(
        federation(),
        FSMGDA(local_steps=3, batch_size=4),
        rounds=2,
        device="cpu",
        engine=lambda *a, **k: AutoEngine(*a, decided=told.append, **k),
    )
    assert told[0] in ("sequential", "vectorized")
    note = result.reports[0].notes[0]
    assert note.endswith("; steps are not compiled: RuntimeError: no C++ compiler")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_on_a_cpu_are_what_steps_are_and_go_on_bit_for_bit() -> None:
    problem = federation([("a", "b", "c")] * 4, sizes=[8, 8, 8, 8])
    algorithm = FSMGDA(local_steps=6, batch_size=4)
    engine = partial(VectorizedEngine, compile="always")
    one = fit(problem, algorithm, rounds=6, device="cpu")
    whole = fit(problem, algorithm, rounds=6, device="cpu", engine=engine)
    assert relative(flat(whole.model), flat(one.model)) < 1e-10
    assert not any("not compiled" in note for report in whole.reports for note in report.notes)
    kept: list[Any] = []
    fit(
        problem,
        algorithm,
        rounds=3,
        device="cpu",
        engine=engine,
        callbacks=[lambda _, snapshot: kept.append(snapshot.checkpoint())],
    )
    resumed = fit(problem, algorithm, rounds=6, device="cpu", engine=engine, resume=kept[-1])
    assert torch.equal(flat(resumed.model), flat(whole.model))


def test_auto_does_not_try_lanes_side_by_side_with_a_large_model_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fmol.engines.auto.MOST_PARAMETERS", 3)
    monkeypatch.setattr(AutoEngine, "_time", lambda self, asks: pytest.fail("it was timed"))
    algorithm = FSMGDA(local_steps=2)
    report = fit(federation(), algorithm, rounds=1, engine="auto", device="cpu").reports[0]
    assert "parameters are bound by memory" in report.notes[0]


def test_auto_runs_what_cannot_be_batched_one_by_one() -> None:
    problem = federation(model=Mixing().double())
    result = fit(problem, FSMGDA(local_steps=2), rounds=2, device="cpu", engine="auto")
    assert "engine sequential: what the model says of a sample" in result.reports[0].notes[0]


def test_auto_runs_one_by_one_what_fails_while_it_is_measured() -> None:
    class OwnError(Exception):
        pass

    class Failing(AutoEngine):
        def _steps(self, *arguments: Any) -> Any:
            raise OwnError("not side by side")

    result = fit(federation(), FSMGDA(local_steps=2), rounds=1, device="cpu", engine=Failing)
    assert "steps side by side failed (OwnError: not side by side)" in result.reports[0].notes[0]


def test_measuring_leaves_no_trace_in_the_results() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    problem, algorithm = federation(model=net), FSMGDA(local_steps=3, batch_size=4)
    auto = fit(problem, algorithm, rounds=3, device="cpu", engine="auto")
    chosen = "vectorized" if "engine vectorized" in auto.reports[0].notes[0] else "sequential"
    plain = fit(problem, algorithm, rounds=3, device="cpu", engine=chosen)
    assert torch.equal(flat(auto.model), flat(plain.model))
