"""Who takes part and in what: clients, populations of them, and the federation as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fmol.data import as_samples, is_lazy
from fmol.layout import Layout
from fmol.objectives import Objective
from fmol.wording import many

__all__ = ["Client", "ClientList", "Federation", "LazyPopulation", "Population"]


@dataclass(frozen=True, eq=False)
class Client:
    """One participant: an id, private data, and the names of the objectives it holds (`S_i`).

    `data` and `held_out` are a pair (inputs, targets) of tensors (or of dicts and tuples of
    tensors), a map-style dataset, or a callable without arguments that returns one of these.
    A dict of inputs is given to the model as keyword arguments, anything else as one argument.
    `max_samples` is what the server believes this client can have at most: a reply that claims
    more is refused.

    >>> Client("site-a", data=(torch.ones(8, 3), torch.ones(8)), objectives=("left", "right"))
    Client(id='site-a', objectives=('left', 'right'), max_samples=None)
    """

    id: str
    data: Any = field(repr=False)
    objectives: tuple[str, ...]
    held_out: Any = field(default=None, repr=False)
    max_samples: int | None = None

    def __post_init__(self) -> None:
        names = (self.objectives,) if isinstance(self.objectives, str) else tuple(self.objectives)
        object.__setattr__(self, "objectives", names)


@runtime_checkable
class Population(Protocol):
    """Clients that need not exist until they take part.

    Every method must answer in time and memory independent of how many clients there are, and the
    sequences must support `len` and indexing only. Their order is part of the run: a cohort drawn
    by index changes when the order does.
    """

    def __len__(self) -> int: ...

    def ids(self) -> Sequence[str]:
        """All client ids."""

    def holders(self, objective: str) -> Sequence[str]:
        """The ids of the clients that hold `objective` (`R_s`)."""

    def get(self, client: str) -> Client:
        """The client with this id."""


class ClientList:
    """A population from a list: sorted by id, so that the order of the list changes nothing."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = {c.id: c for c in sorted(clients, key=lambda c: str(c.id))}
        self._ids = tuple(self._clients)
        holders: dict[str, list[str]] = {}
        for client in self._clients.values():
            for name in client.objectives:
                holders.setdefault(name, []).append(client.id)
        self._holders = {name: tuple(ids) for name, ids in holders.items()}

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> Sequence[str]:
        return self._ids

    def holders(self, objective: str) -> Sequence[str]:
        return self._holders.get(objective, ())

    def get(self, client: str) -> Client:
        return self._clients[client]


@dataclass(frozen=True, eq=False)
class LazyPopulation:
    """A population of which each client is made when it is asked for.

    `names` is any sequence of ids (it is never walked through), `make` turns an id into a client, and
    `held_by` says who holds each objective; left out, everyone holds everything. `make` is called
    several times a round: let the client's `data` be a callable, so that it stays cheap.

    >>> class Numbered:
    ...     def __len__(self): return 1_000_000
    ...     def __getitem__(self, i): return f"phone-{i:06d}"
    >>> phones = LazyPopulation(Numbered(), lambda id: Client(id, data=None, objectives=("words",)))
    >>> phones.get(phones.ids()[999_999]).id
    'phone-999999'
    """

    names: Sequence[str]
    make: Callable[[str], Client]
    held_by: Mapping[str, Sequence[str]] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def ids(self) -> Sequence[str]:
        return self.names

    def holders(self, objective: str) -> Sequence[str]:
        return self.names if self.held_by is None else self.held_by.get(objective, ())

    def get(self, client: str) -> Client:
        return self.make(client)


class Federation:
    """A model, the objectives, the clients, and optionally held-out data at the server.

    Everything that can be checked before training is checked here, and all that is wrong is said at
    once. The model is never modified: training works on a copy.

    >>> inputs, targets = torch.ones(4, 2), torch.ones(4)
    >>> federation = Federation(
    ...     model=nn.Linear(2, 1),
    ...     objectives=[Objective("price", lambda out, y: (out[:, 0] - y) ** 2)],
    ...     clients=[Client("a", data=(inputs, targets), objectives=("price",))],
    ... )
    >>> federation
    Federation(Linear with 3 trainable parameters, 1 objective, 1 client)
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[Objective],
        clients: Sequence[Client] | Population,
        held_out: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"`model` must be a torch.nn.Module, got a {type(model).__name__}. Pass a module."
            )
        for name, value, one in [
            ("objectives", objectives, Objective),
            ("clients", clients, Client),
        ]:
            if isinstance(value, one):
                raise ValueError(f"`{name}` must be a list, got one {one.__name__}. Wrap it: […].")
        self.model = model
        self.objectives = tuple(objectives)
        self.held_out = held_out
        problems = [*_model_problems(model), *_objective_problems(self.objectives)]
        known = {o.name for o in self.objectives if isinstance(o, Objective)}
        if isinstance(clients, Population):
            self.population: Population = clients
        else:
            clients = tuple(clients)
            problems += _client_problems(clients, known)
            self.population = ClientList(c for c in clients if isinstance(c, Client))
        problems += _holder_problems(sorted(known), self.population)
        if held_out is not None and not is_lazy(held_out):
            problems += _data_problems(held_out, "`held_out` of the federation")
        if problems:
            raise ValueError(
                problems[0]
                if len(problems) == 1
                else "\n".join(
                    [f"{len(problems)} things are wrong with this federation:", *problems]
                )
            )
        self.layout = Layout.of(model)

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives' names in their order: the order of every vector `[S]` in a result."""
        return tuple(o.name for o in self.objectives)

    def assignment(self) -> Tensor:
        """The paper's matrix `A`, 0/1, `[S, M]`: which client (column, by id) holds what (row)."""
        ids = self.population.ids()
        column = {ids[i]: i for i in range(len(ids))}
        matrix = torch.zeros(len(self.objectives), len(self.population), dtype=torch.int64)
        for s, name in enumerate(self.names):
            holders = self.population.holders(name)
            matrix[s, [column[holders[i]] for i in range(len(holders))]] = 1
        return matrix

    def client(self, id: str) -> Client:
        """The client with this id, checked: a population makes clients only now."""
        try:
            client = self.population.get(id)
        except KeyError as error:
            raise ValueError(
                f"there is no client `{id}` in this federation. Look at `population.ids()`."
            ) from error
        if client.id != id:
            raise ValueError(
                f"the population was asked for client `{id}` and gave `{client.id}`. "
                "Return the client with the id that was asked for from `get`."
            )
        if not isinstance(self.population, ClientList):  # Those were checked beforehand.
            problems = list(_client_problems([client], set(self.names), check_data=False))
            if problems:
                raise ValueError(" ".join(problems))
        return client

    def __repr__(self) -> str:
        return (
            f"Federation({type(self.model).__name__} with {self.layout.size:,} trainable parameters, "
            f"{many(len(self.objectives), 'objective')}, {many(len(self.population), 'client')})"
        )


def _unknown_objective(client: str, name: str, known: set[str]) -> str:
    return (
        f"client `{client}` holds objective `{name}`, which is not among the federation's "
        f"objectives {sorted(known)}. Add it to `objectives` or take it from the client."
    )


def _model_problems(model: nn.Module) -> Iterable[str]:
    for name, module in model.named_modules():
        if (
            getattr(module, "track_running_stats", False)
            and getattr(module, "running_mean", None) is not None
        ):
            yield (
                f"layer `{name or type(module).__name__}` is a {type(module).__name__} with running "
                "statistics, which would mix the clients' data. Use GroupNorm (or LayerNorm), or "
                "`track_running_stats=False`."
            )
    if not any(p.requires_grad for p in model.parameters()):
        yield (
            "the `model` has no trainable parameters. "
            "Set `requires_grad=True` on those that should be trained."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield (
                f"parameter `{name}` has no shape yet. Pass one batch through the `model` before."
            )
        elif parameter.requires_grad and parameter.is_complex():
            yield (
                f"parameter `{name}` is complex ({parameter.dtype}), which fmol does not train. "
                "Store its real and imaginary parts as two real parameters."
            )


def _objective_problems(objectives: Sequence[Objective]) -> Iterable[str]:
    if not objectives:
        yield "`objectives` is empty. Give at least one Objective."
    for objective in objectives:
        if not isinstance(objective, Objective):
            yield (
                f"`objectives` must hold Objective objects, got a {type(objective).__name__}. "
                "Make it one: Objective(name, loss)."
            )
    names = [o.name for o in objectives if isinstance(o, Objective)]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"objective `{name}` is listed {names.count(name)} times. Give each its own name."


def _client_problems(
    clients: Sequence[Client], known: set[str], check_data: bool = True
) -> Iterable[str]:
    if not clients:
        yield "`clients` is empty. Give at least one Client."
    seen: set[str] = set()
    for client in clients:
        if not isinstance(client, Client):
            yield f"`clients` must hold Client objects, got a {type(client).__name__}. Make it one."
            continue
        if not isinstance(client.id, str) or not client.id:
            yield f"a client's `id` must be a non-empty string, got {client.id!r}. Name it."
            continue
        if client.id in seen:
            yield f"client id `{client.id}` is used more than once. Give each client its own."
        seen.add(client.id)
        if not client.objectives:
            yield (
                f"client `{client.id}` holds no objective. "
                "Give it at least one, or leave it out of `clients`."
            )
        for name in client.objectives:
            if name not in known:
                yield _unknown_objective(client.id, name, known)
        for name in sorted({n for n in client.objectives if client.objectives.count(n) > 1}):
            if name in known:
                yield f"client `{client.id}` lists objective `{name}` twice. List it once."
        if client.max_samples is not None and client.max_samples < 1:
            yield (
                f"`max_samples` of client `{client.id}` must be at least 1, got "
                f"{client.max_samples}. Leave it out for no bound."
            )
        if not check_data:
            continue
        if not is_lazy(client.data):
            yield from _data_problems(client.data, f"`data` of client `{client.id}`")
        if client.held_out is not None and not is_lazy(client.held_out):
            yield from _data_problems(client.held_out, f"`held_out` of client `{client.id}`")


def _holder_problems(names: Sequence[str], population: Population) -> Iterable[str]:
    for name in names:
        if len(population.holders(name)) == 0:
            yield (
                f"objective `{name}` is held by no client. Give it to at least one "
                "client, or leave it out of `objectives`."
            )


def _data_problems(data: Any, owner: str) -> Iterable[str]:
    try:
        as_samples(data, owner)
    except ValueError as error:
        yield str(error)
