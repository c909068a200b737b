"""The client's side: a message in, a message out, and everything else stays where it is.

A site of its own has a federation with one client: its model, the objectives it holds, its data. With
`introduce` it says who it is, and with `answer` it does what a message asks for. In a simulation the
same is done for many clients of one federation, by `Sites`.
"""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fmol.data import as_samples
from fmol.engines import AutoEngine, SequentialEngine, VectorizedEngine, resolve_device
from fmol.engines.auto import Choice
from fmol.engines.seam import Ask, Reply
from fmol.evaluation import EVALUATION_BATCH
from fmol.federation import Federation
from fmol.flower.imports import NotAllowedError, find, known_by_path, make_transform
from fmol.flower.memory import (
    Fate,
    Memory,
    Stored,
    load_memory,
    memory_file,
    save_memory,
    settle,
)
from fmol.flower.messages import RECORD, X, from_content, to_content
from fmol.flower.wire import (
    Introduction,
    WireError,
    pack_failure,
    pack_introduction,
    pack_reply,
    unpack_ask,
    unpack_query,
)
from fmol.local import local_work
from fmol.precision import Precision, products

__all__ = [
    "QUERY",
    "OwnSite",
    "SiteEngine",
    "Sites",
    "answer",
    "introduce",
    "make_client_app",
    "recall",
    "remember",
]

logger = logging.getLogger("fmol")

QUERY = "fmol"
"""The name of the query by which a server asks who a site is: `@app.query("fmol")`."""

SITE_BYTES = 2**20
"""What a site takes beside model and data, generously: there shall not be thousands."""
MEMORY, ENGINE = "memory", "engine"
"""Where a node keeps what its client keeps, and which engine was the faster one."""

ENGINES: Mapping[str, Callable[..., SequentialEngine]] = {
    "auto": AutoEngine,
    "sequential": SequentialEngine,
    "vectorized": VectorizedEngine,
}
SiteEngine = Literal["auto", "sequential", "vectorized"]
"""How a site computes its lanes: `"sequential"`, `"vectorized"`, or `"auto"`, the faster of the two."""


OwnSite = Federation | Callable[[Context], Federation]
"""A federation with one client, the site itself; or what makes it, whose errors stay at the site."""


def introduce(message: Message, context: Context, site: OwnSite) -> Message:
    """The answer to the query who this site is: its name, what it holds, how much, which model.

    Nothing else of the data is looked at.
    """
    layout = ""
    try:
        theirs = unpack_query(from_content(message.content))
        federation = _load(site, context)
        layout = federation.layout.digest
        client = federation.client(_only_client(federation))
        if theirs != layout:
            logger.warning("the server's model has layout %s and this site's %s", theirs, layout)
        said = Introduction(
            client=client.id,
            objectives=client.objectives,
            samples=_length(client.data),
            held_out=0 if client.held_out is None else _length(client.held_out),
            layout=layout,
        )
        data = pack_introduction(said)
    except Exception as error:  # noqa: BLE001 - told to the server, in words that hold no data
        data = _failure(error, "", None, layout, private=True)
    return Message(to_content(data), reply_to=message)


def answer(
    message: Message,
    context: Context,
    site: OwnSite,
    *,
    device: str | torch.device = "auto",
    engine: SiteEngine = "auto",
    precision: Precision = "fp32",
    allow: Sequence[Any] = (),
    keep: str | Path | None = None,
) -> Message:
    """The answer to what a server asks of this site: training, or losses and metrics.

    `engine` says how the site's lanes are computed. Works and transforms other than fmol's usual work
    are carried out only if they are among `allow`, functions and classes of this site's own choice: no
    path that comes with a message is imported. `keep` is a folder for what the site has to remember
    between rounds, as SCAFFOLD's control variates; without it Flower keeps that in memory, and forgets
    it when the SuperNode or the run ends.
    """
    try:
        federation = _load(site, context)
        name = _only_client(federation)
        options = (resolve_device(device), engine, precision, tuple(allow))
        sites = _ours.get(name, federation, options)
    except Exception as error:  # noqa: BLE001 - told to the server, in words that hold no data
        return Message(to_content(_failure(error, "", None, "", private=True)), reply_to=message)
    if keep is None:
        return _respond(sites, message, context)
    file = memory_file(keep, name)
    sites.choice = _choice_of(context)
    data, memory = sites.answer_message(message, load_memory(file))
    save_memory(file, memory)
    remember(context, Memory(), sites.choice)
    return Message(to_content(data), reply_to=message)


class Sites:
    """Clients of a federation that answer packed asks, one at a time, on one working model.

    `known` are the works and transforms that may be carried out, by their paths; None imports
    whatever is asked for, which is for simulations. What is `private` tells the server of an error
    no more than its kind.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        device: torch.device,
        precision: Precision = "fp32",
        engine: SiteEngine = "sequential",
        known: Mapping[str, Any] | None = None,
        private: bool = False,
        evaluation_batch: int = EVALUATION_BATCH,
        cache_bytes: int = 2**30,
    ) -> None:
        if engine not in ENGINES:
            raise ValueError(f"`engine` must be one of {sorted(ENGINES)}, got {engine!r}.")
        self.federation, self.device, self.precision = federation, device, precision
        self.engine, self.known, self.private = engine, known, private
        self.choice: Choice | None = None
        """Which engine `"auto"` came to, once it has."""
        self._options = {"evaluation_batch": evaluation_batch, "cache_bytes": cache_bytes}
        self._machine: SequentialEngine | None = None
        digest, held = federation.layout.digest, len(federation.objectives)
        self._alike = (digest, held, device, precision)
        self._news: list[str] = []
        """What is said with the next reply."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Flower may send an app to another process. A working model's parameters are views into one
        # vector, which pickle tears apart: so it is made anew there.
        options: dict[str, Any] = {
            "device": self.device,
            "precision": self.precision,
            "engine": self.engine,
            "known": self.known,
            "private": self.private,
            **self._options,
        }
        return partial(Sites, **options), (self.federation,)

    def answer_message(self, message: Message, memory: Memory) -> tuple[bytes, Memory]:
        """The same as `answer`, to what is in a Flower message."""
        try:
            data, x = from_content(message.content), from_content(message.content, X)
        except WireError as error:
            return _failure(error, "", None, self.federation.layout.digest, self.private), memory
        return self.answer(data, x, memory)

    def answer(self, data: bytes, x: bytes, memory: Memory) -> tuple[bytes, Memory]:
        """The reply to a packed ask, or the failure to give one, and what the client keeps then."""
        ask: Ask | None = None
        layout = self.federation.layout.digest
        try:
            ask, note = unpack_ask(data, x, layout)
            memory = settle(memory, Fate.from_note(note["fate"]))
            lost = memory.of != note["kept"]
            if lost:  # Of a round that the server has not: it counts on none, or on another.
                memory = Memory()
            reply, state, told = self._work(ask, note, memory)
            keeps = bool(state) or bool(memory)
            note_up = {
                "answer": note["answer"],
                "keeps": keeps,
                "stores": sorted(state),
                "lost": lost,
                **told,
            }
            packed = pack_reply(reply, ask, layout, half=bool(note["half"]), note=note_up)
        except Exception as error:  # noqa: BLE001 - all of them are told to the server
            client = "" if ask is None else ask.client
            return _failure(error, client, ask, layout, self.private), memory
        pending = Stored(note["answer"], state) if keeps else None
        return packed, Memory(memory.kept, memory.held, pending, memory.of)

    def _work(
        self, ask: Ask, note: Mapping[str, Any], memory: Memory
    ) -> tuple[Reply, dict[str, Tensor], dict[str, Any]]:
        """The client's half of an ask: its reply, what it would keep, and what is said beside it."""
        work = find(note["work"], "`work`", self.known)
        transforms = [make_transform(each, self.known) for each in note["transforms"]]
        machine, ask = self._engine(note["seed"]), self._placed(ask)
        machine.load_client_state({ask.client: memory.state})
        site = machine._site(ask.client)
        told: dict[str, Any] = {"samples": len(site.samples)}
        if work is local_work and self.engine != "sequential":
            # By the engine's own way. What that refuses does not leave the site, but is told.
            reply, receipt = machine.map([ask], _Last())
            reply = replace(reply, seconds=receipt.seconds)  # Engines time asks, not replies.
            machine.commit()
            site = machine._site(ask.client)
            told["refused"] = [[each.objective, each.reason] for each in receipt.refused]
            told["notes"] = [*receipt.notes, *self._news]
            self._news.clear()
            self.choice = getattr(machine, "choice", None)
            if self.choice is not None:
                _choices.setdefault(self._alike, self.choice)
        else:
            with products(self.precision, self.device):
                reply = work(ask, site)
        for transform in transforms:
            reply = transform.client(reply, ask, site)
        return reply, {name: tensor.detach() for name, tensor in site.state.items()}, told

    @property
    def size(self) -> int:
        """About how many bytes it takes to keep these sites: a model, data that were used, all else."""
        layout = self.federation.layout
        data = 0 if self._machine is None else self._machine._data._bytes
        return SITE_BYTES + layout.size * layout.dtype.itemsize + data

    def _engine(self, seed: int) -> SequentialEngine:
        """Where this site computes, made when the first ask says with which seed."""
        if self._machine is None or self._machine.seed != seed:
            options: dict[str, Any] = {**self._options, "precision": self.precision}
            if self.engine == "auto":
                if self.choice is None and self._alike in _choices:
                    self.choice = _choices[self._alike]
                    self._news = [
                        f"engine {self.choice}: it was the faster at a site like this one"
                    ]
                options["choice"] = self.choice
            self._machine = ENGINES[self.engine](
                self.federation, seed=seed, device=self.device, **options
            )
        return self._machine

    def _placed(self, ask: Ask) -> Ask:
        if self.device.type == "cpu":
            return ask
        payload = {name: tensor.to(self.device) for name, tensor in ask.payload.items()}
        return Ask(**{**vars(ask), "x": ask.x.to(self.device), "payload": payload})


_choices: dict[tuple[Any, ...], Choice] = {}
"""What `"auto"` came to in this process, for all sites with as many objectives of the same model: to
find out takes several rounds' time."""


class _Ours:
    """Sites that this process has answered for, with model, data and engine as they were left.

    One in a deployment; in a simulation a process has many in turn. The least recently used are
    forgotten beyond `most` bytes, and a site whose federation is a new one is made anew.
    """

    def __init__(self, most: int = 2**30) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[Any, ...], Sites] = OrderedDict()

    def get(self, name: str, federation: Federation, options: tuple[Any, ...]) -> Sites:
        """The site of this name; `options` are its device, engine, precision and what it allows."""
        key = (name, *options)
        found = self._kept.pop(key, None)
        if found is None or found.federation is not federation:
            device, engine, precision, allow = options
            found = Sites(
                federation,
                device=device,
                engine=engine,
                precision=precision,
                known=known_by_path([local_work, *allow]),
                private=True,
            )
            sizes = [sites.size for sites in self._kept.values()]
            total = sum(sizes) + found.size
            for size in sizes:
                if total > self._most:
                    self._kept.popitem(last=False)
                    total -= size
        self._kept[key] = found
        return found


_ours = _Ours()


def make_client_app(sites: Sites) -> ClientApp:
    """A Flower client app that answers fmol's asks, to train and to evaluate alike."""
    app = ClientApp()
    app.train()(partial(_respond, sites))
    app.evaluate()(partial(_respond, sites))
    return app


def _respond(sites: Sites, message: Message, context: Context) -> Message:
    """A Flower message's answer; what the client keeps is in the node's context."""
    sites.choice = sites.choice or _choice_of(context)
    data, memory = sites.answer_message(message, recall(context))
    remember(context, memory, sites.choice)
    return Message(to_content(data), reply_to=message)


def recall(context: Context) -> Memory:
    """What a node's client keeps."""
    record: Mapping[str, Any] = context.state.config_records.get(RECORD) or {}
    return Memory.from_bytes(record.get(MEMORY, b""))


def remember(context: Context, memory: Memory, choice: Choice | None = None) -> None:
    """Lets a node keep this, and nothing where there is nothing."""
    kept: dict[str, Any] = {MEMORY: memory.to_bytes()} if memory else {}
    if choice is not None:
        kept[ENGINE] = choice
    context.state.pop(RECORD, None)
    if kept:
        context.state[RECORD] = ConfigRecord(kept)


def _choice_of(context: Context) -> Choice | None:
    record: Mapping[str, Any] = context.state.config_records.get(RECORD) or {}
    choice: Choice | None = record.get(ENGINE)
    return choice


class _Last:
    """A fold that gives the one reply it was given."""

    def __init__(self) -> None:
        self.reply: Reply | None = None

    def add(self, reply: Reply, ask: Ask) -> None:
        self.reply = reply

    def result(self) -> Reply | None:
        return self.reply


def _failure(error: Exception, client: str, ask: Ask | None, layout: str, private: bool) -> bytes:
    """An error as the server is told it; a private site's own errors, which may quote its data, stay
    in its log."""
    kind, words, trace = type(error).__name__, str(error), traceback.format_exc()
    if private:
        logger.error("this site could not answer:\n%s", trace)
        trace = ""
        if not isinstance(error, WireError | NotAllowedError):
            words = "what went wrong is in the site's log"
    return pack_failure(kind, words, trace, client, ask, layout)


def _load(site: OwnSite, context: Context) -> Federation:
    return site if isinstance(site, Federation) else site(context)


def _only_client(federation: Federation) -> str:
    ids = federation.population.ids()
    if len(ids) != 1:
        raise WireError(
            f"this site's federation has {len(ids)} clients. Give it one: the site itself."
        )
    return ids[0]


def _length(data: Any) -> int:
    return len(as_samples(data, "the site's data"))
