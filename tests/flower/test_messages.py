"""Packed messages over a grid: in order, bounded in number and in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import monotonic

import pytest

pytest.importorskip("flwr", reason='needs flwr: pip install "fmol[flower]"')

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.error import Error

from fmol.flower.messages import Silence, exchange, from_content, to_arrays, to_content
from fmol.flower.simulation import Simulation
from fmol.flower.wire import WireError


class Backwards:
    """A grid that answers late and in the wrong order, and not at all what is in `lost`."""

    def __init__(self, lost: Iterable[bytes] = (), failing: Iterable[bytes] = ()) -> None:
        self.waiting: dict[str, Message] = {}
        self.lost, self.failing = set(lost), set(failing)
        self.most = self.count = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            self.waiting[f"m{self.count}"] = message
            ids.append(f"m{self.count}")
        self.most = max(self.most, len(self.waiting))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        for id in sorted(message_ids, key=lambda id: -int(id[1:])):
            data = from_content(self.waiting[id].content)
            if data in self.failing:
                return [Message(Error(0, "it broke"), reply_to=self.waiting.pop(id))]
            if data not in self.lost:
                return [Message(to_content(data * 2), reply_to=self.waiting.pop(id))]
        return []


def read(answer: Message | Silence) -> bytes:
    assert isinstance(answer, Message)
    return from_content(answer.content)


@pytest.fixture
def messages() -> Iterator[list[Message]]:
    simulation = Simulation(lambda: pytest.fail("nothing is computed here"))
    contents = [to_content(b"%d" % i) for i in range(10)]
    yield [simulation.message(f"c{i}", each, "train") for i, each in enumerate(contents)]
    simulation.close()


def test_answers_come_in_the_order_of_the_messages_and_few_are_on_their_way(
    messages: list[Message],
) -> None:
    grid = Backwards()
    answers = exchange(grid, messages, in_flight=3, patience=5, wait=lambda _: None)
    assert [read(each) for each in answers] == [b"%d%d" % (i, i) for i in range(10)]
    assert grid.most == 3


def test_whoever_does_not_answer_is_silent_and_the_others_are_heard(
    messages: list[Message],
) -> None:
    grid, began = Backwards(lost=[b"2", b"9"], failing=[b"4"]), monotonic()
    answers = list(exchange(grid, messages, in_flight=4, patience=0.2, wait=lambda _: None))
    silent = {i: a.reason for i, a in enumerate(answers) if isinstance(a, Silence)}
    assert silent == {2: "no answer within 0.2 s", 4: "it broke", 9: "no answer within 0.2 s"}
    assert monotonic() - began < 5


def test_what_has_arrived_by_the_deadline_is_heard_whoever_is_late(
    messages: list[Message],
) -> None:
    grid, began = Backwards(lost=[b"0", b"5"]), monotonic()
    answers = exchange(grid, messages, in_flight=10, deadline=began + 0.3, wait=lambda _: None)
    heard = [i for i, each in enumerate(answers) if isinstance(each, Message)]
    assert heard == [1, 2, 3, 4, 6, 7, 8, 9]
    assert 0.3 <= monotonic() - began < 5


def test_a_large_message_goes_in_several_arrays() -> None:
    content = to_content(bytes(range(250)), to_arrays(b"shared", "x"), part_bytes=100)
    assert from_content(content, "x") == b"shared"
    del content["fmol"]["x.0000"]
    assert [len(array.data) for array in content.array_records["fmol"].values()] == [100, 100, 50]
    assert from_content(content) == bytes(range(250))
    assert len(to_content(b"small").array_records["fmol"]) == 1


def test_content_of_someone_else_is_named() -> None:
    with pytest.raises(WireError, match=r"has the records \['config'\] and no `head` of fmol's"):
        from_content(RecordDict({"config": ConfigRecord({"lr": 0.1})}))
