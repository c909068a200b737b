"""Costs do not grow with who does not take part."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fmol import FSMGDA, MGD, Client, Federation, LazyPopulation, Objective, fit
from fmol.aggregate import MeanFold
from fmol.engines import SequentialEngine
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply
from fmol.engines.sequential import RECORD_BYTES
from fmol.participation import Number, Participation, Stratified
from fmol.rounds import RoundReport
from support import Net, data, squared_error

NAMES = ("a", "b", "c")


class Ids(Sequence[str]):
    """Ids that exist only when looked at; counts how often they are."""

    def __init__(self, count: int, every: int = 1) -> None:
        self.total, self.every, self.looked_at = count, every, 0

    def __len__(self) -> int:
        return self.total // self.every

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        self.looked_at += 1
        if not 0 <= i < len(self):
            raise IndexError(i)
        return f"client-{i * self.every:07d}"


def population(count: int) -> tuple[Federation, Ids, list[str]]:
    ids, made = Ids(count), list[str]()

    def make(id: str) -> Client:
        made.append(id)
        seed = int(id.split("-")[1])
        held = NAMES if seed % 10 == 0 else NAMES[:2]
        return Client(id, data=lambda: data(8, seed=seed), objectives=held)

    rare = Ids(count, every=10)
    clients = LazyPopulation(ids, make, {"a": ids, "b": ids, "c": rare})
    objectives = [Objective(name, squared_error(s)) for s, name in enumerate(NAMES)]
    return Federation(Net().double(), objectives, clients), ids, made


@pytest.mark.parametrize(
    "participation", [Number(20), Stratified(20)], ids=["number", "stratified"]
)
def test_a_round_of_twenty_looks_at_twenty_of_a_million(participation: Participation) -> None:
    problem, ids, made = population(1_000_000)
    result = fit(
        problem, FSMGDA(local_steps=2, batch_size=4), rounds=3, participation=participation
    )
    assert all(20 <= len(report.cohort) <= 22 for report in result.reports)
    assert len(set(made)) <= 4 * 22
    assert ids.looked_at <= 4 * 200
    assert result.reports[0].evaluated == "the cohort"


def test_a_million_clients_cost_no_more_than_a_thousand() -> None:
    """Peak memory, and everything the population is asked for, are those of a thousand."""

    def cost(count: int) -> tuple[int, int, int]:
        problem, ids, made = population(count)

        def run() -> None:
            algorithm = FSMGDA(local_steps=2, batch_size=4)
            fit(problem, algorithm, rounds=4, participation=Number(20), evaluate="cohort")

        run()
        looked_at, asked_for = ids.looked_at, len(made)
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, looked_at, asked_for

    few, many = cost(1_000), cost(1_000_000)
    assert many[0] < 1.2 * few[0] + 100_000
    assert many[1] == few[1]
    assert many[2] <= 1.1 * few[2]


def alive() -> list[Tensor]:
    return [o for o in gc.get_objects() if type(o) is Tensor and o._base is None]


class Weigh:
    """A fold around another that notes how many vectors of length d are alive."""

    def __init__(self, inner: MeanFold, d: int, before: Sequence[Tensor]) -> None:
        self.inner, self.d, self.peak = inner, d, 0
        self._before = {id(tensor) for tensor in before}

    def add(self, reply: Reply, ask: Ask) -> None:
        self.inner.add(reply, ask)
        mine = [t for t in alive() if t.numel() >= self.d and id(t) not in self._before]
        self.peak = max(self.peak, sum(t.numel() // self.d for t in mine))

    def result(self) -> object:
        return self.inner.result()


@pytest.mark.parametrize("clients", [2, 30])
def test_the_server_holds_one_vector_per_objective_whatever_the_number_of_clients(
    clients: int,
) -> None:
    gc.collect()
    others = alive()  # Kept, so that no new tensor takes the place of one of them.
    net = Net(features=5, width=400).double()
    objectives = [Objective(name, squared_error(s)) for s, name in enumerate(NAMES)]
    everyone = [Client(f"c{i:02d}", data(4, seed=i), NAMES) for i in range(clients)]
    problem = Federation(net, objectives, everyone)
    engine = SequentialEngine(problem)
    x = problem.layout.flatten(dict(net.named_parameters()))
    lanes = tuple(Lane(name, {name: 1.0}) for name in NAMES)
    local = LocalConfig(lr=0.1, steps=2)
    asks = [Ask(client=c.id, round=0, x=x, lanes=lanes, local=local) for c in everyone]
    fold = Weigh(MeanFold(NAMES, x, "uniform"), problem.layout.size, others)
    engine.map(asks, fold)
    # S sums, one client's S deltas, x, the working model's x, and a few temporaries.
    assert fold.peak <= 3 + 3 + 2 + 4


def test_lazy_data_are_kept_in_a_bounded_cache() -> None:
    loads: list[int] = []

    def client(i: int) -> Client:
        def load() -> tuple[Tensor, Tensor]:
            loads.append(i)
            return data(8, seed=i)

        return Client(f"c{i}", data=load, objectives=NAMES)

    objectives = [Objective(name, squared_error(s)) for s, name in enumerate(NAMES)]
    problem = Federation(Net().double(), objectives, [client(i) for i in range(6)])
    size = 8 * (5 + 3) * 8 + RECORD_BYTES

    def engine(cache: int):  # type: ignore[no-untyped-def]
        return lambda federation, *, seed, device: SequentialEngine(
            federation, seed=seed, device=device, cache_bytes=cache
        )

    roomy = fit(problem, FSMGDA(local_steps=1, batch_size=4), rounds=3, engine=engine(10 * size))
    assert sorted(loads) == list(range(6))
    loads.clear()
    tight = fit(problem, FSMGDA(local_steps=1, batch_size=4), rounds=3, engine=engine(2 * size))
    assert len(loads) > 6
    assert torch.equal(roomy.losses, tight.losses)


def test_reports_are_plain_records() -> None:
    problem, _, _ = population(100)
    report = fit(problem, FSMGDA(local_steps=1), rounds=1, participation=Number(2)).reports[0]
    assert isinstance(report, RoundReport)
    assert len(report.clients) in range(4, 7)


def test_a_population_is_only_counted_and_indexed_never_walked_through() -> None:
    """Indexing beyond the end does not raise here, so that a plain loop would never end."""

    class Endless:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: int) -> str:
            return f"client-{i:07d}"

    def make(id: str) -> Client:
        return Client(id, data=lambda: data(4, seed=int(id.split("-")[1])), objectives=NAMES)

    objectives = [Objective(name, squared_error(s)) for s, name in enumerate(NAMES)]
    clients = LazyPopulation(Endless(), make)  # type: ignore[arg-type]
    problem = Federation(Net().double(), objectives, clients)
    assert problem.assignment().shape == (3, 5)
    for algorithm in (MGD(0.1), FSMGDA(local_steps=1)):
        result = fit(problem, algorithm, rounds=1, evaluate=2)
        assert len(result.reports[0].cohort) == 5


def test_many_small_clients_do_not_add_up_in_the_cache() -> None:
    """Each has a few bytes of data; what the cache keeps for each beside them counts as well."""
    problem, _, _ = population(5000)
    engine = SequentialEngine(problem, cache_bytes=100 * (RECORD_BYTES + 8 * 8 * 8))
    ids = problem.population.ids()
    for i in range(500):
        engine._data.get(ids[i])
    assert len(engine._data._items) == 100
