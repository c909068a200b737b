"""Which sites there are: who they say they are, what they hold, and whether they are connected."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Protocol

from flwr.app import Message

from fmol.errors import FmolError
from fmol.federation import Client, ClientList, Population
from fmol.flower.client import QUERY
from fmol.flower.messages import Link, from_content, to_content
from fmol.flower.wire import Failure, Introduction, WireError, pack_query, unpack_introduction
from fmol.participation import Participation

__all__ = ["Connected", "Grid", "MissingSitesError", "Roster"]

logger = logging.getLogger("fmol")

POLL = 0.2
"""Seconds between two looks at what has arrived."""
TRIES = 3
"""How often a node is asked whose app fails."""
MOST_NAME = 100
"""Letters in the name of a site."""


class Grid(Link, Protocol):
    """What is needed of a Flower grid."""

    def get_node_ids(self) -> Iterable[int]: ...


class MissingSitesError(FmolError):
    """Too few sites are connected, or none that holds some objective."""


@dataclass(frozen=True)
class _Elsewhere:
    """Data that are at a site: the server knows how many samples they are, and nothing else."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __call__(self) -> object:
        raise FmolError("these data are at their site, and never leave it.")


@dataclass(frozen=True)
class _Site:
    client: Client
    node: int


class Roster:
    """The sites that have introduced themselves, as a population; those who left are in it still.

    Every node is asked once who it is. A site's name belongs to the node that gave it first, until
    that one is gone. `layout` is the digest of the model's layout, `most` how many samples a site may
    say that it has.
    """

    comes_and_goes = True
    """Who is in it may be others when a run is gone on with."""

    def __init__(
        self,
        grid: Grid,
        objectives: Sequence[str],
        layout: str,
        *,
        most: int | None = None,
        patience: float = 600.0,
        wait: Callable[[float], object] = sleep,
    ) -> None:
        self._grid, self._objectives, self._layout = grid, tuple(objectives), layout
        self._most, self._patience, self._wait = most, patience, wait
        self._sites: dict[str, _Site] = {}
        self._nodes: set[int] = set()
        self._asked: dict[int, tuple[str, float]] = {}
        """Node → the query that it has not answered, and when it was sent."""
        self._known: set[int] = set()
        """Nodes that have said who they are since they were connected: they are not asked again."""
        self._errors: Counter[int] = Counter()
        """Node → how often its app failed to say who it is."""
        self._waiting: dict[int, Introduction] = {}
        """Nodes whose name another has that is still connected."""
        self._turned_away: dict[int, str] = {}
        self._news: list[str] = []
        self._everyone = ClientList(())

    # ---- as a population ----

    def __len__(self) -> int:
        return len(self._everyone)

    def ids(self) -> Sequence[str]:
        return self._everyone.ids()

    def holders(self, objective: str) -> Sequence[str]:
        return self._everyone.holders(objective)

    def get(self, client: str) -> Client:
        return self._everyone.get(client)

    # ---- who is there ----

    def connected(self) -> Population:
        """The sites that can be asked now."""
        return ClientList(site.client for site in self._sites.values() if self._is_there(site))

    def node(self, client: str) -> int | None:
        """The node at which a site can be reached now; None where it cannot."""
        site = self._sites.get(client)
        return site.node if site is not None and self._is_there(site) else None

    def news(self) -> list[str]:
        """What has changed since this was last asked, in words."""
        news, self._news = self._news, []
        return news

    def refresh(self) -> None:
        """Looks who is connected, asks new nodes who they are, and hears those who have answered."""
        before = set(self.connected().ids())
        self._nodes = set(self._grid.get_node_ids())
        for kept in (self._asked, self._waiting, self._turned_away, self._errors):
            for node in [node for node in kept if node not in self._nodes]:
                del kept[node]
        self._known &= self._nodes  # Who comes back may hold something else.
        for node in sorted(self._nodes - self._known - set(self._asked)):
            self._ask(node)
        self._hear_all()
        for node, introduction in sorted(self._waiting.items()):
            if self.node(introduction.client) is None:
                del self._waiting[node]
                self._let_in(node, introduction)
        for client in sorted(before - set(self.connected().ids())):
            self._say(self._gone(client))

    def gather(self, least: int, *, everything: bool = False) -> None:
        """Waits until at least so many sites are connected; with `everything`, also until every
        objective is held by one of them and nobody who is connected still has to answer.

        Raises `MissingSitesError` after the roster's patience.
        """
        until = monotonic() + self._patience
        while True:
            self.refresh()
            there = self.connected()
            unheld = [name for name in self._objectives if not there.holders(name)]
            enough = len(there) >= least and not (everything and unheld)
            late = monotonic() > until
            if enough and (late or not (everything and self._asked)):
                return
            if late:
                raise MissingSitesError(self._missing(least, unheld if everything else []))
            self._wait(POLL)

    # ---- introductions ----

    def _ask(self, node: int) -> None:
        content = to_content(pack_query(self._layout))
        message = Message(content, node, f"query.{QUERY}", ttl=self._patience + 60)
        for id in self._grid.push_messages([message]):
            if id:
                self._asked[node] = (id, monotonic())

    def _hear_all(self) -> None:
        """Takes in what nodes say of themselves, as far as it has arrived."""
        for node, (id, since) in sorted(self._asked.items()):
            # One by one: by whose query it is an answer to, Flower knows whose it is.
            answer = next(iter(self._grid.pull_messages([id])), None)
            if answer is not None:
                del self._asked[node]
                self._hear(node, answer)
            elif monotonic() - since > self._patience:
                del self._asked[node]  # Asked anew with the next look.
                self._say(f"node {node} did not say who it is within {self._patience:g} s")

    def _hear(self, node: int, answer: Message) -> None:
        if answer.has_error():
            self._errors[node] += 1
            if self._errors[node] < TRIES:
                self._ask(node)  # Its process may have died by chance.
                return
        self._known.add(node)
        try:
            if answer.has_error():
                raise WireError(answer.error.reason or "its app could not answer")
            introduction = unpack_introduction(from_content(answer.content))
            if isinstance(introduction, Failure):
                raise WireError(f"{introduction.kind}: {introduction.message}")
            self._check(introduction)
        except WireError as error:
            self._turned_away[node] = str(error)
            self._say(f"node {node} was turned away: {error}")
            return
        other = self.node(introduction.client)
        if other is not None and other != node:
            self._waiting[node] = introduction
            self._say(
                f"node {node} says that it is `{introduction.client}`, which node {other} is: it has "
                "to wait until that one is gone"
            )
        else:
            self._let_in(node, introduction)

    def _check(self, site: Introduction) -> None:
        """Raises `WireError` for a site that cannot take part."""
        if not (0 < len(site.client) <= MOST_NAME and site.client.isprintable()):
            raise WireError(
                f"its name is {site.client[:MOST_NAME]!r}. Give its client an id of 1 to {MOST_NAME} "
                "letters that can be printed."
            )
        if site.layout != self._layout:
            raise WireError(
                f"`{site.client}` has a model with layout {site.layout!r}, and the server's has "
                f"{self._layout!r}. Build the same model on both sides."
            )
        if not set(site.objectives) & set(self._objectives):
            raise WireError(
                f"`{site.client}` holds {list(site.objectives)}, and none of them is among the "
                f"server's objectives {list(self._objectives)}."
            )
        if site.samples < 1 or (self._most is not None and site.samples > self._most):
            bound = "at least 1" if self._most is None else f"1 to {self._most}"
            raise WireError(
                f"`{site.client}` says that it has {site.samples} samples, and {bound} are let in. "
                "Look at its data, or raise `max_samples`."
            )

    def _let_in(self, node: int, site: Introduction) -> None:
        client = Client(
            site.client,
            _Elsewhere(site.samples),
            tuple(name for name in self._objectives if name in site.objectives),
            held_out=_Elsewhere(site.held_out) if site.held_out else None,
            max_samples=site.samples,
        )
        back = site.client in self._sites
        self._sites[site.client] = _Site(client, node)
        self._everyone = ClientList(each.client for each in self._sites.values())
        held = ", ".join(client.objectives)
        came = "is back" if back else "takes part"
        self._say(f"site `{site.client}` {came} and holds {held}", logging.INFO)

    def _is_there(self, site: _Site) -> bool:
        return site.node in self._nodes and site.node in self._known

    # ---- words ----

    def _say(self, text: str, level: int = logging.WARNING) -> None:
        logger.log(level, "%s", text)
        self._news.append(text)

    def _gone(self, client: str) -> str:
        there = self.connected()
        orphans = [n for n in self.get(client).objectives if not there.holders(n)]
        more = f", and nobody else holds {', '.join(f'`{n}`' for n in orphans)}" if orphans else ""
        return f"site `{client}` is gone{more}"

    def _missing(self, least: int, unheld: Sequence[str]) -> str:
        there = list(self.connected().ids())
        said = [f"within {self._patience:g} s {len(there)} of at least {least} sites were there"]
        said[0] += f" ({', '.join(f'`{id}`' for id in there)})" if there else ""
        if unheld:
            said.append(f"no site holds {', '.join(f'`{name}`' for name in unheld)}")
        said += [f"node {node} was turned away: {r}" for node, r in self._turned_away.items()]
        unheard = sorted(self._nodes - self._known)
        said += [f"node {node} has not said who it is" for node in unheard]
        return (
            f"{'; '.join(said)}. Start more SuperNodes and look at their logs (with node keys, each "
            "has to be registered first), or ask for less with `min_sites`."
        )


@dataclass(frozen=True)
class Connected:
    """Draws cohorts among the sites that are connected when the round begins.

    The draw hangs on the seed, the round and the names of those who are there.
    """

    roster: Roster
    inner: Participation
    min_sites: int

    def cohort(
        self, population: Population, objectives: Sequence[str], round: int, seed: int
    ) -> tuple[str, ...]:
        self.roster.gather(self.min_sites)
        return self.inner.cohort(self.roster.connected(), objectives, round, seed)
