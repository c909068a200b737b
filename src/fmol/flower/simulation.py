"""Flower's simulation: its link, nodes, contexts and client apps, in this process or in Ray's.

Flower's own loop around these looks for messages ten times a second and has every node registered
beforehand. Here nodes are registered when they are first asked, so that a million clients cost nothing,
and whoever waits is woken up.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Protocol, cast
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import (
    HEARTBEAT_INTERVAL_INF,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    ErrorCode,
)
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from fmol.flower.client import Sites, make_client_app, recall, remember
from fmol.flower.memory import Memory
from fmol.flower.messages import RECORD

__all__ = ["Processes", "Simulation", "Threads", "Workers"]

TASK = 1


class Workers(Protocol):
    """Where client apps run."""

    count: int
    """How many at a time."""

    def process(self, message: Message, context: Context) -> tuple[Message, Context]:
        """The app's answer, and the node's context after it; raises where there is none."""

    def stop(self) -> None: ...


class Threads:
    """Client apps in this process, one at a time."""

    count = 1

    def __init__(self, make_sites: Callable[[], Sites], patience: float) -> None:
        self._make_sites, self._patience = make_sites, patience
        self._app: ClientApp | None = None

    def process(self, message: Message, context: Context) -> tuple[Message, Context]:
        if self._app is None:
            self._app = make_client_app(self._make_sites())
        app, outcome = self._app, SimpleQueue[Message | BaseException]()

        def run() -> None:
            try:
                outcome.put(app(message, context))
            except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                outcome.put(error)

        thread = threading.Thread(target=run, daemon=True, name="fmol-flower-client")
        thread.start()
        thread.join(self._patience)
        if thread.is_alive():
            # It cannot be stopped, and may yet write to the model it works on: leave that to it.
            self._app = None
            raise TimeoutError(f"no answer within {self._patience:g} s")
        answer = outcome.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer, context

    def stop(self) -> None:
        self._app = None


class Processes:
    """Client apps in processes that Ray starts, as many at a time as there are cores."""

    def __init__(
        self, make_sites: Callable[[], Sites], patience: float, count: int | None = None
    ) -> None:
        import ray
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        self._ray, self._patience = ray, patience
        self._ours = not ray.is_initialized()
        before = os.environ.get("PYTHONPATH")
        try:
            self._backend = RayBackend(
                {
                    "init_args": {
                        "num_cpus": count or os.cpu_count() or 1,
                        "log_to_driver": False,
                        "logging_level": "error",
                        "_node_ip_address": "127.0.0.1",
                    },
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                }
            )
        finally:  # Flower leaves it changed.
            if before is None:
                os.environ.pop("PYTHONPATH", None)
            else:
                os.environ["PYTHONPATH"] = before
        try:
            # Once into Ray's store: what makes the app travels with every message.
            place = ray.put(make_sites)
        except Exception as error:
            self.stop()
            raise ValueError(
                f"the federation cannot be sent to Ray's processes: {error}. Define its parts at the "
                'top of a module, or let clients compute in this process: flower_backend="thread".'
            ) from error
        self._backend.build(_AppFromStore(place, uuid4().hex))
        self.count = self._backend.num_workers

    def process(self, message: Message, context: Context) -> tuple[Message, Context]:
        pool, ray = self._backend.pool, self._ray
        assert pool is not None
        job = (self._backend.app_fn, message, str(message.metadata.dst_node_id), context)
        future = pool.submit(lambda actor, *given: actor.run.remote(*given), cast(Any, job))
        try:
            ready, _ = ray.wait([future], timeout=self._patience)
            if not ready:
                raise TimeoutError(f"no answer within {self._patience:g} s")
            answer, after = pool.fetch_result_and_return_actor_to_pool(future)
        except (TimeoutError, ray.exceptions.RayActorError):
            # Stuck or dead: another takes its place.
            actor = pool._future_to_actor.pop(future)
            ray.kill(actor)
            pool.num_actors -= 1
            pool.add_actors_to_pool(1)
            raise
        except Exception:
            pool.add_actor_back_to_pool(future)
            raise
        return answer, after

    def stop(self) -> None:
        if self._ours:
            self._backend.terminate()
        elif self._backend.pool is not None:  # Whoever started Ray goes on with it.
            self._backend.pool.terminate_all_actors()


class _AppFromStore:
    """Makes the client app once in a process, from what lies in Ray's store."""

    apps: dict[str, ClientApp] = {}  # noqa: RUF012 - one for the whole process, and it is meant

    def __init__(self, place: Any, name: str) -> None:
        self.place, self.name = place, name

    def __call__(self) -> ClientApp:
        if self.name not in self.apps:
            import ray

            self.apps[self.name] = make_client_app(ray.get(self.place)())
        return self.apps[self.name]


class Simulation:
    """A Flower grid whose nodes are a federation's clients, each from when it is first asked."""

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._start = workers
        self._workers: Workers | None = None
        self._threads: list[threading.Thread] = []
        self._todo: SimpleQueue[int | None] = SimpleQueue()
        self._arrived = threading.Event()
        self._contexts: dict[int, Context] = {}
        self._nodes: dict[str, int] = {}
        factory = LinkStateFactory(
            FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
        )
        self._state = cast(InMemoryLinkState, factory.state())
        self._run = Run.create_empty(run_id=secrets.randbits(63) | 1)
        self._run.primary_task_id, self._run.federation_id = TASK, NOOP_FEDERATION_ID
        self._state.run_ids[self._run.run_id] = RunRecord(run=self._run)
        self._state.task_store[TASK] = Task(task_id=TASK, run_id=self._run.run_id)
        self._grid = InMemoryGrid(state_factory=factory)
        self._grid.set_run(self._run)

    # ---- what the server does ----

    def message(self, client: str, content: RecordDict, kind: str) -> Message:
        """A message to a client, of Flower's kind `train` or `evaluate`."""
        # Flower has these for the whole process, and there may be more than one simulation in it.
        TaskIdentity.run_id, TaskIdentity.task_id = self._run.run_id, TASK
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        return Message(content, self._node(client), kind)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self._ensure_started()
        ids = list(self._grid.push_messages(messages))
        for message in messages:
            self._todo.put(message.metadata.dst_node_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._arrived.clear()  # Before looking: what arrives from now on is not missed.
        return self._grid.pull_messages(message_ids)

    def wait(self, seconds: float) -> None:
        """Returns when an answer has arrived since the last look, or after so many seconds."""
        self._arrived.wait(seconds)

    @property
    def count(self) -> int:
        """How many clients compute at a time."""
        return self._ensure_started().count

    # ---- what stays at the clients ----

    def memories(self) -> dict[str, Memory]:
        """What each client has of its own: in a simulation all of them are here."""
        found = {}
        for client, node in self._nodes.items():
            found[client] = recall(self._contexts[node])
        return found

    def remember(self, memories: dict[str, Memory]) -> None:
        """Gives each client what it has of its own, and the others nothing."""
        for context in self._contexts.values():
            context.state.pop(RECORD, None)
        for client, memory in memories.items():
            remember(self._contexts[self._node(client)], memory)

    def _node(self, client: str) -> int:
        if client not in self._nodes:
            node = self._state.create_node(
                NOOP_FLWR_AID,
                NOOP_ACCOUNT_NAME,
                secrets.token_bytes(32),
                heartbeat_interval=HEARTBEAT_INTERVAL_INF,
            )
            self._state.acknowledge_node_heartbeat(node, heartbeat_interval=HEARTBEAT_INTERVAL_INF)
            self._nodes[client] = node
            self._contexts[node] = self._context(node, RecordDict())
        return self._nodes[client]

    def _context(self, node: int, state: RecordDict) -> Context:
        return Context(
            run_id=self._run.run_id, node_id=node, node_config={}, state=state, run_config={}
        )

    # ---- what the nodes do ----

    def _ensure_started(self) -> Workers:
        if self._workers is None:
            self._workers = self._start()
            self._threads = [
                threading.Thread(target=self._serve, daemon=True, name=f"fmol-flower-{i}")
                for i in range(self._workers.count)
            ]
            for thread in self._threads:
                thread.start()
        return self._workers

    def _serve(self) -> None:
        while (node := self._todo.get()) is not None:
            for message in self._state.get_message_ins(node_id=node, limit=1):
                answer = self._answer(message, node)
                answer.metadata.__dict__["_message_id"] = str(uuid4())  # As Flower's own loop does.
                self._state.store_message_res(answer)
            self._arrived.set()

    def _answer(self, message: Message, node: int) -> Message:
        workers = self._workers
        assert workers is not None
        # A copy: an app that is given up on must not change what its node has.
        context = self._context(node, RecordDict(dict(self._contexts[node].state)))
        try:
            answer, after = workers.process(message, context)
        except Exception as error:  # noqa: BLE001 - told to the server as Flower does
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                reason = str(error)
            return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)
        self._contexts[node] = after
        return answer

    def close(self) -> None:
        """Stops whatever runs; what stays at the clients can still be looked at."""
        workers, self._workers = self._workers, None
        while not self._todo.empty():  # Nobody waits for these any more.
            self._todo.get()
        for _ in self._threads:
            self._todo.put(None)
        if workers is not None:
            workers.stop()
        for thread in self._threads:
            thread.join(5.0)
        self._threads = []
