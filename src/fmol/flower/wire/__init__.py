"""Asks and replies as bytes: one packed message each way, checked before anything is believed."""

from fmol.flower.wire.asks import pack_ask, pack_x, unpack_ask
from fmol.flower.wire.failures import Failure, pack_failure
from fmol.flower.wire.header import PROTOCOL, WireError
from fmol.flower.wire.introductions import (
    Introduction,
    pack_introduction,
    pack_query,
    unpack_introduction,
    unpack_query,
)
from fmol.flower.wire.kept import pack_tensors, unpack_tensors
from fmol.flower.wire.message import PART_BYTES, join_parts, split_parts
from fmol.flower.wire.replies import Received, pack_reply, unpack_reply

__all__ = [
    "PART_BYTES",
    "PROTOCOL",
    "Failure",
    "Introduction",
    "Received",
    "WireError",
    "join_parts",
    "pack_ask",
    "pack_failure",
    "pack_introduction",
    "pack_query",
    "pack_reply",
    "pack_tensors",
    "pack_x",
    "split_parts",
    "unpack_ask",
    "unpack_introduction",
    "unpack_query",
    "unpack_reply",
    "unpack_tensors",
]
