"""The engine whose clients are sites on other machines, reached by the grid of a Flower app."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from fmol.aggregate import MeanFold, Means
from fmol.engines.checks import check_reply
from fmol.engines.seam import CONTROL, Ask, ClientState, Refusal, Reply
from fmol.federation import Client, Federation
from fmol.flower.memory import Fate
from fmol.flower.messages import Silence, exchange
from fmol.flower.roster import Grid, Roster
from fmol.flower.server import NOTHING, Call, Kept, MessageEngine
from fmol.options import Count, check_options

__all__ = ["RemoteEngine", "Terms"]

FATE = "flower.fate"
"""Under this name a checkpoint holds what a client has to be told of its last answer."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms a site's answers are let in, and count."""

    min_replies: Count = 1
    """Sites whose updates must be there for a round to count; with fewer the model stays as it is."""
    min_replies_per_objective: Count = 1
    """Sites whose updates must be there for an objective to count; with fewer it is missing."""
    max_samples: Count | None = None
    """Samples that a site may say it has; one that claims more is turned away."""
    lowest_loss: float = 0.0
    """A training loss below this is not plausible, and refused."""
    highest_loss: float = 1e6
    """A training loss above this is not plausible, and refused."""
    half: bool = False
    """Whether updates go up in half precision, eleven bits each."""

    def __post_init__(self) -> None:
        check_options(self)


Configure = Callable[[Call, ArrayRecord], Iterable[Message]]
"""Makes a call's messages; the arrays are what they share."""
Aggregate = Callable[[Call, Iterable[Message]], object]
"""Takes a call's answers in, as they come."""


class RemoteEngine(MessageEngine):
    """Clients are sites of a Flower app; a site's failure is a refusal, and the round goes on.

    All asks are sent at once. Answers wait in Flower's SuperLink and are pulled one by one in the
    order of the clients' ids, so that one at a time is here beside the means. `deadline` is how many
    seconds sites have to answer; `configure` and `aggregate` are called around each exchange.
    """

    def __init__(
        self,
        federation: Federation,
        *,
        grid: Grid,
        roster: Roster,
        terms: Terms,
        deadline: float,
        configure: Configure | None = None,
        aggregate: Aggregate | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        wait: Callable[[float], object] = sleep,
    ) -> None:
        super().__init__(federation, seed=seed, device=device, half=terms.half)
        self.grid, self.roster, self.terms = grid, roster, terms
        self.deadline, self._wait = deadline, wait
        self._configure = configure or (lambda call, arrays: self.messages(call))
        self._aggregate = aggregate or self.take_in

    def _carry_out(self, call: Call) -> None:
        call.tally.notes += self.roster.news()
        for ask in call.asks:
            if self.roster.node(ask.client) is None:
                call.silent[ask.client] = "it is not connected"
        call.asks = [ask for ask in call.asks if ask.client not in call.silent]
        if not call.asks:
            return
        arrays = ArrayRecord(self.pack_x(call.asks[0].x)[1])
        messages = self._configure(call, arrays)
        self._aggregate(call, self._heard(call, messages, monotonic() + self.deadline))

    def _heard(self, call: Call, messages: Iterable[Message], deadline: float) -> Iterator[Message]:
        """The answers as they come; who is silent is noted."""
        twice = len({ask.client for ask in call.asks}) < len(call.asks)
        for answer in exchange(
            self.grid,
            messages,
            in_flight=1 if twice else len(call.asks),
            deadline=deadline,
            wait=self._wait,
        ):
            if isinstance(answer, Silence):
                self.take_in(call, [answer])
            else:
                yield answer

    def _message(self, client: str, content: RecordDict, kind: str) -> Message:
        node = self.roster.node(client)
        assert node is not None
        return Message(content, node, kind, ttl=self.deadline + 60)

    def _weigh(
        self, ask: Ask, sent: int, reply: Reply, received: int, saved: int
    ) -> tuple[int, int]:
        return received, sent

    def _check(
        self, reply: Reply, ask: Ask, client: Client, note: Mapping[str, Any]
    ) -> tuple[Reply, tuple[Refusal, ...]]:
        """As every engine does, by what the site itself said at first; losses in their range too, and
        of metrics those that an objective has."""
        reply, refusals = check_reply(reply, ask, client, self.federation.layout)
        reply = replace(reply, held_out=self._known_metrics(reply.held_out))
        low, high = self.terms.lowest_loss, self.terms.highest_loss
        bad = {n: loss for n, loss in reply.losses.items() if not low <= loss <= high}
        if not bad:
            return reply, refusals
        more = [
            Refusal(
                ask.round,
                client.id,
                name,
                f"its training loss at x is {loss:g}, and {low:g} to {high:g} is let in "
                "(`lowest_loss`, `highest_loss`)",
            )
            for name, loss in sorted(bad.items())
        ]
        return _without_objectives(reply, ask, bad), (*refusals, *more)

    def _known_metrics(
        self, held_out: Mapping[str, Mapping[str, float]]
    ) -> dict[str, dict[str, float]]:
        known = {o.name: {"loss", *o.metrics} for o in self.federation.objectives}
        return {
            name: {metric: value for metric, value in row.items() if metric in known[name]}
            for name, row in held_out.items()
        }

    def _settled(self, call: Call, result: Any) -> Any:
        """The means without those of too few replies, which count as missing."""
        if not isinstance(result, Means) or not isinstance(call.fold, MeanFold):
            return result
        counts = Counter(slot for slots in call.let_in.values() for slot in slots)
        replies = sum(bool(slots) for slots in call.let_in.values())
        least = self.terms.min_replies_per_objective
        few = {slot for slot in result.slots if counts[slot] < least}
        if replies < self.terms.min_replies:
            few = set(result.slots)
            call.tally.notes.append(
                f"{replies} replies came and at least {self.terms.min_replies} are asked for "
                "(`min_replies`): none of them counts"
            )
        for slot in sorted(few if replies >= self.terms.min_replies else ()):
            call.tally.notes.append(
                f"`{slot}` has updates of {counts[slot]} sites and at least {least} are asked for "
                "(`min_replies_per_objective`): it counts as missing"
            )
        if not few:
            return result
        for client, slots in call.let_in.items():
            self._keep_only(client, [slot for slot in slots if slot not in few], slots)
        return _without_slots(result, few, call.fold.slots)

    def _keep_only(self, client: str, counted: Sequence[str], sent: Sequence[str]) -> None:
        """Of an answer that does not count as a whole, the client keeps what belongs to the rest."""
        fate = self._fates.get(client)
        if fate is not None and len(counted) < len(sent):
            self._fates[client] = replace(fate, only=tuple(CONTROL + slot for slot in counted))

    # ---- what clients keep ----

    def client_state(self) -> ClientState:
        """Not what the sites keep, which stays there, but what they have to be told of it."""
        return {
            client: {
                FATE: _to_tensor(
                    {
                        "fate": fate.to_note(),
                        "kept": asdict(self._kept.get(client, NOTHING)),
                        "stores": list(self._stores.get(client, ())),
                    }
                )
            }
            for client, fate in self._fates.items()
        }

    def load_client_state(self, state: ClientState) -> None:
        self._fates.clear()
        self._kept.clear()
        self._stores.clear()
        for client, kept in state.items():
            told = _from_tensor(kept[FATE])
            fate = Fate.from_note(told["fate"])
            if fate is not None:
                self._fates[client] = fate
            self._stores[client] = tuple(told["stores"])
            kept_names = tuple(told["kept"]["names"])
            self._kept[client] = Kept(told["kept"]["of"], kept_names)

    def close(self) -> None:
        """The grid is the app's, and stays open."""


def _without_objectives(reply: Reply, ask: Ask, bad: Collection[str]) -> Reply:
    """The reply without these objectives and the updates that descend them."""
    slots = {lane.slot for lane in ask.lanes if any(name in bad for name in lane.mixture)}
    return replace(
        reply,
        deltas={k: v for k, v in reply.deltas.items() if k not in slots},
        steps={k: v for k, v in reply.steps.items() if k not in slots},
        first=tuple(slot for slot in reply.first if slot not in slots),
        losses={k: v for k, v in reply.losses.items() if k not in bad},
        samples={k: v for k, v in reply.samples.items() if k not in bad},
        held_out={k: v for k, v in reply.held_out.items() if k not in bad},
    )


def _without_slots(means: Means, few: Collection[str], order: Sequence[str]) -> Means:
    """The means without these slots; `order` is that of the rows of means per step."""
    rows = [i for i, slot in enumerate(means.slots) if slot not in few]
    steps = means.steps
    if steps is not None:
        counts = torch.tensor([slot not in few for slot in order], dtype=torch.float64)
        steps = replace(steps, weight=steps.weight * counts, first=steps.first * counts)
    return Means(
        tuple(means.slots[i] for i in rows),
        means.deltas[rows],
        {slot: value for slot, value in means.mean_squares.items() if slot not in few},
        steps,
    )


def _to_tensor(value: Mapping[str, Any]) -> Tensor:
    return torch.from_numpy(np.frombuffer(json.dumps(value).encode(), dtype=np.uint8).copy())


def _from_tensor(tensor: Tensor) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(bytes(tensor.cpu().numpy()))
    return value
