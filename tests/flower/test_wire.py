"""What goes over the wire comes out as it went in, bit for bit, or is refused with a sentence."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmol.engines.checks import check_reply
from fmol.engines.seam import Ask, Lane, LocalConfig, Reply
from fmol.flower.wire import (
    PROTOCOL,
    Failure,
    Introduction,
    WireError,
    join_parts,
    pack_ask,
    pack_failure,
    pack_introduction,
    pack_query,
    pack_reply,
    pack_tensors,
    pack_x,
    split_parts,
    unpack_ask,
    unpack_introduction,
    unpack_query,
    unpack_reply,
    unpack_tensors,
)
from fmol.flower.wire.checksum import BLOCK_WORDS, digest
from fmol.flower.wire.message import CHECKED_FROM, MAGIC, PREFIX
from fmol.flower.wire.tensors import ALIGNMENT, DTYPES
from support import federation

LAYOUT = "0123456789abcdef"
names = st.text(max_size=8)
wholes = st.integers(-(2**53), 2**53)
floats = st.floats()
numbers = st.one_of(wholes, floats)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any shape, any bits: NaNs with payloads and negative zeros included."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not size:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape)
    return tensor.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else tensor


locals_ = st.builds(
    LocalConfig,
    lr=floats,
    steps=st.none() | wholes,
    epochs=st.none() | wholes,
    batch_size=st.none() | wholes,
    accumulate=st.sampled_from(["sum", "mean"]),
    momentum=floats,
    weight_decay=numbers,
    clip_norm=st.none() | floats,
    proximal=floats,
    average=floats,
    training=st.booleans(),
)
asks = st.builds(
    Ask,
    client=names,
    round=wholes,
    phase=wholes,
    x=tensors(),
    lanes=st.lists(st.builds(Lane, names, st.dictionaries(names, numbers)), max_size=3).map(tuple),
    local=st.none() | locals_,
    evaluate=st.lists(names, max_size=3).map(tuple),
    held_out=st.booleans(),
    payload=st.dictionaries(names, tensors(), max_size=3),
)
replies = st.builds(
    Reply,
    client=names,
    deltas=st.dictionaries(names, tensors(), max_size=3),
    steps=st.dictionaries(names, wholes, max_size=3),
    first=st.lists(names, max_size=3).map(tuple),
    losses=st.dictionaries(names, floats, max_size=3),
    samples=st.dictionaries(names, wholes, max_size=3),
    held_out=st.dictionaries(names, st.dictionaries(names, floats, max_size=2), max_size=2),
    extra=st.dictionaries(names, tensors(), max_size=3),
    seconds=floats,
)


def bits(value: Any) -> Any:
    """Something that is equal exactly where every bit is."""
    if isinstance(value, Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), data
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, Mapping):
        return [(name, bits(each)) for name, each in value.items()]
    if isinstance(value, tuple):
        return [bits(each) for each in value]
    if isinstance(value, Lane | LocalConfig | Ask | Reply):
        return [(each.name, bits(getattr(value, each.name))) for each in fields(value)]
    return type(value), value


@settings(max_examples=60, deadline=None)
@given(asks)
def test_an_ask_comes_out_as_it_went_in(ask: Ask) -> None:
    note = {"seed": 3, "work": "fmol.local:local_work", "fate": None}
    x = pack_x(ask.x, LAYOUT)
    back, told = unpack_ask(pack_ask(ask, LAYOUT, x, note), x, LAYOUT)
    assert bits(back) == bits(ask)
    assert told == note


@settings(max_examples=60, deadline=None)
@given(replies, asks)
def test_a_reply_comes_out_as_it_went_in(reply: Reply, ask: Ask) -> None:
    received = unpack_reply(pack_reply(reply, ask, LAYOUT, note={"keeps": True}), ask, LAYOUT)
    assert bits(received.answer) == bits(reply)
    assert received.note == {"keeps": True}
    assert received.saved == 0


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(names, tensors(), max_size=4), st.integers(1, 500))
def test_tensors_survive_in_parts_of_any_size(state: dict[str, Tensor], most: int) -> None:
    data = pack_tensors({"kept": state})
    parts = split_parts(data, most)
    assert all(0 < len(part) <= most for part in parts)
    assert bits(unpack_tensors(join_parts(parts))[0].get("kept", {})) == bits(state)


def test_every_field_of_an_ask_and_a_reply_is_one_that_travels() -> None:
    """A field that is added must be packed too, and `PROTOCOL` may have to rise."""
    sent = {"client", "round", "phase", "x", "lanes", "local", "evaluate", "held_out", "payload"}
    assert {each.name for each in fields(Ask)} == sent
    assert {each.name for each in fields(Lane)} == {"slot", "mixture"}
    back = {"client", "deltas", "steps", "first", "losses", "samples", "held_out", "extra"}
    assert {each.name for each in fields(Reply)} == back | {"seconds"}


def example() -> tuple[Ask, bytes]:
    ask = Ask(client="a", round=3, phase=1, x=torch.arange(5.0), lanes=(Lane("s", {"s": 1.0}),))
    reply = Reply(client="a", deltas={"s": torch.arange(5.0)}, losses={"s": 0.5}, samples={"s": 4})
    return ask, pack_reply(reply, ask, LAYOUT)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_message_gives_one_clear_error(data: st.DataObject) -> None:
    ask, packed = example()
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "noise"]))
    broken = bytearray(packed)
    if kind == "flip":
        broken[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        broken = broken[: data.draw(st.integers(0, len(packed) - 1))]
    elif kind == "grow":
        broken += data.draw(st.binary(min_size=1, max_size=70))
    else:
        broken = bytearray(data.draw(st.binary(max_size=300)))
    with pytest.raises(WireError):
        unpack_reply(bytes(broken), ask, LAYOUT)


def large(words: int = 4 * BLOCK_WORDS) -> tuple[Ask, bytes]:
    """A reply of several of the checksum's blocks, all of which are different."""
    ask, _ = example()
    delta = torch.arange(words, dtype=torch.float64).sqrt()
    return ask, pack_reply(Reply(client="a", deltas={"s": delta}), ask, LAYOUT)


def refuses(broken: bytes, ask: Ask) -> bool:
    try:
        unpack_reply(broken, ask, LAYOUT)
    except WireError:
        return True
    return False


def test_every_flipped_bit_is_found() -> None:
    ask, packed = large(BLOCK_WORDS + 3)
    for place in range(len(packed)):
        for bit in range(8):
            broken = bytearray(packed)
            broken[place] ^= 1 << bit
            assert refuses(bytes(broken), ask), (place, bit)


def test_every_cut_is_found_and_so_is_whatever_is_added() -> None:
    ask, packed = large(BLOCK_WORDS + 3)
    assert all(refuses(packed[:length], ask) for length in range(len(packed)))
    assert all(refuses(packed + bytes(more), ask) for more in range(1, 9 * BLOCK_WORDS))


def test_whatever_is_swapped_is_found() -> None:
    """Blocks of the checksum's own size, at their own place or at any other, and larger ones."""
    ask, packed = large()
    size = 8 * BLOCK_WORDS
    for length in (size, size + 24, 2 * size):
        for first in range(CHECKED_FROM, len(packed) - 2 * length + 1, 8):
            for second in range(first + length, len(packed) - length + 1, size // 2):
                broken = bytearray(packed)
                broken[first : first + length] = packed[second : second + length]
                broken[second : second + length] = packed[first : first + length]
                assert refuses(bytes(broken), ask), (first, second, length)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_two_changes_do_not_cancel(draws: st.DataObject) -> None:
    """Two bits, as the signs of two numbers of a block, whose sum is as before; and swapped words."""
    data = bytearray(large()[1])
    words = len(data) // 8
    first = draws.draw(st.integers(0, words - 2))
    second = draws.draw(st.integers(first + 1, min(words - 1, first + 2 * BLOCK_WORDS)))
    one, other = slice(8 * first, 8 * first + 8), slice(8 * second, 8 * second + 8)
    broken = bytearray(data)
    if draws.draw(st.booleans()):
        broken[one], broken[other] = data[other], data[one]
    else:
        byte, bit = draws.draw(st.integers(0, 7)), 1 << draws.draw(st.integers(0, 7))
        broken[one.start + byte] ^= bit
        broken[other.start + byte] ^= bit
    assert (digest(bytes(broken)) != digest(bytes(data))) == (broken != data)


def test_a_reply_is_read_where_it_lies_and_what_is_kept_is_a_copy() -> None:
    ask, packed = large()
    reply = unpack_reply(packed, ask, LAYOUT).answer
    assert isinstance(reply, Reply)
    begin = np.frombuffer(packed, dtype=np.uint8).ctypes.data
    assert begin < reply.deltas["s"].data_ptr() < begin + len(packed)
    kept = pack_tensors({"kept": {"c": torch.ones(4)}})
    before = bytes(bytearray(kept))
    unpack_tensors(kept)[0]["kept"]["c"].zero_()
    assert kept == before


def test_no_warning_is_seen_of_what_cannot_be_written_to(recwarn: pytest.WarningsRecorder) -> None:
    ask, packed = large()
    unpack_reply(packed, ask, LAYOUT)
    assert not recwarn.list


def forged(packed: bytes, **changes: Any) -> bytes:
    """The same message with another header and a checksum that fits: what a malicious site sends."""
    _, protocol, _, size = PREFIX.unpack_from(packed)
    begin = PREFIX.size
    header = json.loads(packed[begin : begin + size])
    header.update(changes)
    text = json.dumps(header).encode()
    text += b" " * (-(begin + len(text)) % ALIGNMENT)
    rest = struct.pack("<Q", len(text)) + text + packed[begin + size :]
    return PREFIX.pack(MAGIC, protocol, digest(rest), len(text))[: begin - 8] + rest


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": [["deltas", "s", "float32", [10**9], 0, None]]},
        {"tensors": [["deltas", "s", "float32", [-1, -5], 0, None]]},
        {"tensors": [["deltas", "s", "float32", [5], -64, None]]},
        {"tensors": [["deltas", "s", "float32", [5], 3, None]]},
        {"tensors": [["deltas", "s", "object", [5], 0, None]]},
        {"tensors": [["deltas", "s", "float32", "5", 0, None]]},
        {"tensors": [["deltas", 7, "float32", [5], 0, None]]},
        {"tensors": [["deltas", "s", "float32", [2**53] * 20 + [0], 0, None]]},
        {"tensors": [["deltas", "s", "float32", [1] * 1000, 0, None]]},
        {"tensors": [["deltas", "s", "bool", [12], 0, None]]},
        {"tensors": [["deltas", str(i), "float64", [5], 0, 0] for i in range(2)]},
        {"tensors": 7},
        {"bytes": 10**12},
        {"bytes": None},
        {"losses": [1, 2]},
        {"losses": {"s": "small"}},
        {"samples": None},
        {"held_out": {"s": 3}},
        {"first": "s"},
        {"client": None},
        {"note": None},
        {"order": "middle"},
    ],
    ids=str,
)
def test_a_forged_header_gives_one_clear_error(changes: dict[str, Any]) -> None:
    ask, packed = example()
    assert isinstance(unpack_reply(forged(packed), ask, LAYOUT).answer, Reply)
    with pytest.raises(WireError, match="the message"):
        unpack_reply(forged(packed, **changes), ask, LAYOUT)


def test_a_header_nested_without_end_is_refused() -> None:
    _, packed = example()
    deep = b"[" * 100_000
    rest = struct.pack("<Q", len(deep)) + deep
    prefix = PREFIX.pack(MAGIC, PROTOCOL, digest(rest), len(deep))
    with pytest.raises(WireError, match="nested too deeply"):
        unpack_tensors(prefix[: PREFIX.size - 8] + rest)
    assert packed


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"round": 4}, LAYOUT, "of round 3, and 4 was expected"),
        ({"phase": 0}, LAYOUT, "of phase 1, and 0 was expected"),
        ({}, "fedcba9876543210", f"layout '{LAYOUT}', and 'fedcba9876543210' was expected"),
    ],
)
def test_a_mismatch_names_both_sides(changes: dict[str, int], layout: str, words: str) -> None:
    ask, packed = example()
    with pytest.raises(WireError, match=words):
        unpack_reply(packed, Ask(**{**vars(ask), **changes}), layout)


def test_another_protocol_and_another_kind_are_refused_with_both_values() -> None:
    ask, packed = example()
    newer = bytearray(packed)
    struct.pack_into("<I", newer, 8, PROTOCOL + 1)
    with pytest.raises(WireError, match=r"of protocol 5, and this side speaks protocol 4"):
        unpack_reply(bytes(newer), ask, LAYOUT)
    with pytest.raises(WireError, match=r"kind 'reply', and 'ask' was expected"):
        unpack_ask(packed, pack_x(ask.x, LAYOUT), LAYOUT)


def test_an_ask_and_the_x_of_another_do_not_go_together() -> None:
    ask, _ = example()
    x, other = pack_x(ask.x, LAYOUT), pack_x(ask.x + 1, LAYOUT)
    with pytest.raises(WireError, match="belongs to the x"):
        unpack_ask(pack_ask(ask, LAYOUT, x), other, LAYOUT)


def test_a_number_that_no_float_can_hold_is_refused() -> None:
    ask, packed = example()
    with pytest.raises(WireError, match="no count of anything"):
        unpack_reply(forged(packed, steps={"s": 10**400}), ask, LAYOUT)


def test_an_introduction_and_a_query_arrive() -> None:
    site = Introduction("a", ("left", "right"), 120, 30, LAYOUT)
    assert unpack_introduction(pack_introduction(site)) == site
    assert unpack_query(pack_query(LAYOUT)) == LAYOUT
    failure = pack_failure("ValueError", "no data", "", "", None, LAYOUT)
    assert unpack_introduction(failure) == Failure("", "ValueError", "no data", "")
    with pytest.raises(WireError, match="kind 'query', and 'introduction' was expected"):
        unpack_introduction(pack_query(LAYOUT))
    with pytest.raises(WireError, match="in place of a whole number"):
        unpack_introduction(forged(pack_introduction(site), samples="many"))


def test_an_ask_of_a_newer_version_is_refused_by_what_it_sets() -> None:
    ask = Ask(client="a", round=0, x=torch.ones(2), local=LocalConfig(lr=0.1, steps=1))
    x = pack_x(ask.x, LAYOUT)
    newer = forged(pack_ask(ask, LAYOUT, x), local={"lr": 0.1, "steps": 1, "tomorrow": 3})
    with pytest.raises(WireError, match="sets `tomorrow` for the local steps"):
        unpack_ask(newer, x, LAYOUT)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=8),
    st.integers(-30, 30),
    st.sampled_from([torch.float32, torch.float64]),
)
@example_of([2.2041281035771752e-308], 0, torch.float64)
@example_of([5e-324, -1e-310], 0, torch.float64)
def test_halves_keep_eleven_bits_at_any_scale(
    values: list[float], power: int, dtype: torch.dtype
) -> None:
    delta = (torch.tensor(values, dtype=torch.float64) * 10.0**power).to(dtype)
    ask, _ = example()
    packed = pack_reply(Reply(client="a", deltas={"s": delta}), ask, LAYOUT, half=True)
    received = unpack_reply(packed, ask, LAYOUT)
    assert isinstance(received.answer, Reply)
    back = received.answer.deltas["s"]
    assert back.dtype == dtype
    largest = float(delta.abs().max())
    error = (back.double() - delta.double()).abs()
    assert bool((error <= 2.0**-11 * delta.double().abs() + 2.0**-38 * largest).all())
    assert received.saved == delta.numel() * (dtype.itemsize - 2)


def test_what_is_not_finite_stays_so_in_halves_and_is_refused_by_the_same_check() -> None:
    problem = federation([("a",)], names=("a",))
    delta = torch.ones(problem.layout.size, dtype=torch.float64)
    delta[3], delta[5] = torch.inf, torch.nan
    ask = Ask(client="c0", round=0, x=delta, lanes=(Lane("a", {"a": 1.0}),))
    layout = problem.layout.digest
    packed = pack_reply(Reply(client="c0", deltas={"a": delta}), ask, layout, half=True)
    reply = unpack_reply(packed, ask, layout).answer
    assert isinstance(reply, Reply)
    clean, refusals = check_reply(reply, ask, problem.client("c0"), problem.layout)
    assert not clean.deltas
    assert "2 non-finite" in str(refusals[0])


def test_numbers_of_numpy_are_numbers() -> None:
    ask, _ = example()
    reply = Reply(client="a", losses={"s": np.float32(0.1)}, samples={"s": np.int64(4)})  # type: ignore[dict-item]
    back = unpack_reply(pack_reply(reply, ask, LAYOUT), ask, LAYOUT).answer
    assert isinstance(back, Reply)
    assert (back.losses, back.samples) == ({"s": float(np.float32(0.1))}, {"s": 4})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(client="a", deltas={"s": [1.0]}), "`s` is a list. Send a tensor"),  # type: ignore[dict-item]
        (Reply(client="a", deltas={"s": torch.eye(2).to_sparse()}), "Make it dense"),
        (Reply(client="a", losses={"s": object()}), "`losses` holds a object"),  # type: ignore[dict-item]
        (Reply(client="a", losses={3: 1.0}), "keyed by 3"),  # type: ignore[dict-item]
    ],
)
def test_what_cannot_be_sent_is_named(reply: Reply, words: str) -> None:
    ask, _ = example()
    with pytest.raises(WireError, match=words):
        pack_reply(reply, ask, LAYOUT)


def test_a_failure_arrives_in_words() -> None:
    ask, _ = example()
    packed = pack_failure("ValueError", "no labels", "Traceback …", "a", ask, LAYOUT)
    assert unpack_reply(packed, ask, LAYOUT).answer == Failure(
        "a", "ValueError", "no labels", "Traceback …"
    )


def test_a_message_is_hardly_larger_than_its_numbers() -> None:
    reply = Reply(client="a", deltas={f"s{i}": torch.zeros(10_000) for i in range(8)})
    ask, _ = example()
    whole = len(pack_reply(reply, ask, LAYOUT))
    assert 320_000 < whole < 1.01 * 320_000
    assert len(pack_reply(reply, ask, LAYOUT, half=True)) < 0.51 * whole
