"""The engine that computes through Flower's simulation: every ask and every reply a Flower message."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from flwr.app import Message, RecordDict

from fmol.engines.checks import message_bytes, reply_bytes
from fmol.engines.seam import Ask, ClientState, Reply, Transform, Work
from fmol.engines.sequential import say_where
from fmol.errors import FmolError
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import Federation
from fmol.flower.client import Sites
from fmol.flower.memory import Memory, settle
from fmol.flower.messages import exchange
from fmol.flower.server import Call, Kept, MessageEngine
from fmol.flower.simulation import Processes, Simulation, Threads, Workers
from fmol.flower.wire import Failure
from fmol.precision import Precision, check_precision

__all__ = ["ClientError", "FlowerBackend", "FlowerEngine"]

FlowerBackend = Literal["thread", "ray"]
"""Where Flower's client apps run: in this process, or in processes that Ray starts."""


CHECKPOINT = "checkpoint"
"""What is in place of an answer's name for what a client was given to keep."""


class ClientError(FmolError):
    """A client's own computation failed. The message has its error, and a note its traceback."""


class FlowerEngine(MessageEngine):
    """Clients are nodes of a Flower simulation, and what they are asked goes through its messages.

    The numbers are those of the sequential engine. `backend` says where client apps run; `half` sends
    updates in half precision; `patience` is how many seconds a client may take before it counts as
    silent; `in_flight` is how many asks are on their way at a time, and so how many replies may have
    to be held until their turn comes.

    >>> from fmol import Client, FSMGDA, Objective, fit
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> problem = Federation(
    ...     torch.nn.Linear(1, 1),
    ...     [Objective("slope", lambda out, y: ((out - y) ** 2)[:, 0])],
    ...     [Client("a", (x, x), "slope"), Client("b", (x, 2 * x), "slope")],
    ... )
    >>> ours = fit(problem, FSMGDA(local_steps=2), rounds=2, device="cpu", engine="flower")
    >>> same = fit(problem, FSMGDA(local_steps=2), rounds=2, device="cpu")
    >>> bool((ours.losses == same.losses).all())
    True
    """

    def __init__(
        self,
        federation: Federation,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        backend: FlowerBackend = "thread",
        precision: Precision = "fp32",
        half: bool = False,
        patience: float = 600.0,
        in_flight: int = 8,
        processes: int | None = None,
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
    ) -> None:
        super().__init__(federation, seed=seed, device=device, half=half)
        check_precision(precision, self.device)
        _check_options(backend, self.device, patience, in_flight)
        self.backend, self.in_flight, self.patience = backend, in_flight, patience
        sites = partial(
            Sites,
            federation,
            device=self.device,
            precision=precision,
            evaluation_batch=evaluation_batch,
            cache_bytes=cache_bytes,
        )

        def workers() -> Workers:
            if backend == "thread":
                return Threads(sites, patience)
            return Processes(sites, patience, processes)

        self._simulation = Simulation(workers)

    def _carry_out(self, call: Call) -> None:
        answers = exchange(
            self._simulation,
            self.messages(call),
            in_flight=self._window(call),
            # A client's own bound is kept where it computes; this one is for a link that is broken.
            patience=2 * self.patience + 10,
            wait=self._simulation.wait,
        )
        self.take_in(call, answers)

    def _window(self, call: Call) -> int:
        """How many asks are on their way at a time."""
        if len({ask.client for ask in call.asks}) < len(call.asks):
            return 1  # A client that is asked twice must hear of the first before the second.
        return max(self.in_flight, self._simulation.count)

    def _message(self, client: str, content: RecordDict, kind: str) -> Message:
        return self._simulation.message(client, content, kind)

    def _weigh(
        self, ask: Ask, sent: int, reply: Reply, received: int, saved: int
    ) -> tuple[int, int]:
        """As the other engines count, so that theirs are the same numbers."""
        return reply_bytes(reply) - saved, message_bytes(ask)

    def _failed(self, ask: Ask, failure: Failure) -> str:
        error = ClientError(
            f"client `{ask.client}` could not answer in round {ask.round}: "
            f"{failure.kind}: {failure.message}"
        )
        error.add_note(failure.trace)
        raise error

    def _transformed(self, transform: Transform, reply: Reply, ask: Ask) -> Reply:
        try:
            return transform.server(reply, ask)
        except Exception as error:
            say_where(error, ask)
            raise

    def _path(self, work: Work) -> str:
        path = super()._path(work)
        if self.backend == "ray" and path.startswith("__main__:"):
            raise ValueError(
                f"`work` is `{path}`, and in Ray's processes the main module is another. Define it at "
                "the top of a module that can be imported."
            )
        return path

    def client_state(self) -> ClientState:
        settled = {
            client: settle(memory, self._fates.get(client)).kept
            for client, memory in self._simulation.memories().items()
        }
        return {
            client: {name: tensor.to(self.device) for name, tensor in kept.items()}
            for client, kept in settled.items()
            if kept
        }

    def load_client_state(self, state: ClientState) -> None:
        self._fates.clear()
        held = {client: kept for client, kept in state.items() if kept}
        self._kept = {client: Kept(CHECKPOINT, tuple(kept)) for client, kept in held.items()}
        memories = {client: Memory(kept, of=CHECKPOINT) for client, kept in held.items()}
        self._simulation.remember(memories)

    def close(self) -> None:
        self._simulation.close()


def _check_options(backend: str, device: torch.device, patience: float, in_flight: int) -> None:
    if backend not in ("thread", "ray"):
        raise ValueError(f"`backend` must be 'thread' or 'ray', got {backend!r}.")
    if backend == "ray" and device.type != "cpu":
        raise ValueError(
            f"`backend` is 'ray', whose processes compute on the CPU, and `device` is {device}. Use "
            "'cpu', or the backend 'thread'."
        )
    if not patience > 0:
        raise ValueError(f"`patience` must be more than 0 seconds, got {patience!r}.")
    if in_flight < 1:
        raise ValueError(f"`in_flight` must be at least 1, got {in_flight!r}.")
