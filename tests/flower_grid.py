"""A Flower grid without a network, whose nodes are client apps in this process that can misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fmol.federation import Federation
from fmol.flower.client import QUERY, OwnSite, answer, introduce


def site_app(federation: OwnSite, **options: Any) -> ClientApp:
    """A client app as a site writes it."""
    app = ClientApp()

    @app.query(QUERY)
    def query(message: Message, context: Context) -> Message:
        return introduce(message, context, federation)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, federation, device="cpu", **options)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(message, context, federation, device="cpu", **options)

    return app


def site_of(problem: Federation, client: str) -> Federation:
    """What a site has of a problem: the model, its own objectives, itself."""
    own = problem.client(client)
    objectives = [o for o in problem.objectives if o.name in own.objectives]
    return Federation(problem.model, objectives, [own])


@dataclass
class Node:
    """A connected site."""

    app: ClientApp
    context: Context
    spoil: Callable[[Message, Message], Message] | None = None
    """Makes another answer of a message and its answer."""
    deaf: bool = False
    """Takes messages and never answers."""


@dataclass
class FakeGrid:
    """Nodes by id; messages are answered when their answers are pulled."""

    nodes: dict[int, Node] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    before_pull: Callable[[Message], None] | None = None
    """Called with each message before it is answered."""

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self._waiting: dict[str, Message] = {}

    def join(self, app: ClientApp, node: int | None = None, **config: Any) -> int:
        node = 100 + len(self.nodes) if node is None else node
        context = Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )
        self.nodes[node] = Node(app, context)
        return node

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = id
            self.sent.append(message)
            self._waiting[id] = message
            ids.append(id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        return [reply for id in message_ids for reply in self._answer(id)]

    def _answer(self, id: str) -> list[Message]:
        message = self._waiting.get(id)
        node = None if message is None else self.nodes.get(message.metadata.dst_node_id)
        if message is None or node is None or node.deaf:
            return []
        if self.before_pull is not None:
            self.before_pull(message)
        del self._waiting[id]
        try:
            reply = node.app(message, node.context)
        except Exception as error:  # noqa: BLE001 - as Flower tells it
            return [Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)]
        return [reply if node.spoil is None else node.spoil(message, reply)]


def connect(problem: Federation, **options: Any) -> FakeGrid:
    """A grid whose nodes are the clients of a problem."""
    grid = FakeGrid()
    for client in problem.population.ids():
        grid.join(site_app(site_of(problem, client), **options))
    return grid
