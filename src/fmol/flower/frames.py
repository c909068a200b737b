"""Flower's records between two processes of one machine: a table in JSON, and bytes as they lie.

Nothing is pickled, and arrays are neither copied into a message nor limited by its size.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

__all__ = [
    "BY_ITSELF",
    "NOTE",
    "FrameError",
    "context_to_table",
    "read_records",
    "receive",
    "send",
    "table_to_context",
    "write_records",
]

NOTE = "fmol.warm"
"""The record in every reply of a warm site that tells where it was made, and if not in the process
that stays, why."""
BY_ITSELF = "this process stays by itself"
"""The reason that is none: in a simulation there is nothing to keep warm."""
SIZES = struct.Struct("<8sQ")
"""What it is, and the bytes of the table."""
MAGIC = b"fmolwarm"
MOST_TABLE_BYTES = 2**26
"""A table holds names, numbers and sizes alone: a longer one is none of ours."""


class FrameError(ConnectionError):
    """The other side ended in the middle of a frame, or does not speak of frames at all."""


# ---- frames ----------------------------------------------------------------------------------


def send(connection: socket.socket, table: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
    """One frame: a table of plain values, and bytes after it."""
    text = json.dumps({"table": table, "blobs": [len(blob) for blob in blobs]}).encode()
    connection.sendall(SIZES.pack(MAGIC, len(text)) + text)
    for blob in blobs:
        connection.sendall(blob)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """The next frame's table and bytes; raises `FrameError` where there is none, or half of one."""
    magic, size = SIZES.unpack(_exactly(connection, SIZES.size))
    if magic != MAGIC or size > MOST_TABLE_BYTES:
        raise FrameError(
            f"a frame begins with {magic!r} and {size} bytes, which is none of fmol's."
        )
    frame = json.loads(_exactly(connection, size))
    return frame["table"], [_exactly(connection, count) for count in frame["blobs"]]


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts: list[bytes] = []
    have = 0
    while have < count:
        # In one go where the system can, so that nothing has to be copied together.
        parts.append(connection.recv(count - have, socket.MSG_WAITALL))
        if not parts[-1]:
            raise FrameError(f"the other side ended after {have} of {count} bytes.")
        have += len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


# ---- records ---------------------------------------------------------------------------------


def write_records(records: RecordDict, blobs: list[bytes]) -> dict[str, Any]:
    """The records as a table; bytes are appended to `blobs` and named by their place there.

    >>> blobs = []
    >>> table = write_records(RecordDict({"c": ConfigRecord({"n": 1, "b": b"xy"})}), blobs)
    >>> blobs
    [b'xy']
    >>> dict(read_records(table, blobs)["c"])
    {'n': 1, 'b': b'xy'}
    """

    def place(data: bytes) -> dict[str, int]:
        blobs.append(data)
        return {"blob": len(blobs) - 1}

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return place(value)
        return [plain(each) for each in value] if isinstance(value, list) else value

    table: dict[str, Any] = {}
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            rows = {
                key: [array.dtype, list(array.shape), array.stype, place(array.data)]
                for key, array in record.items()
            }
            table[name] = ["arrays", rows]
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            table[name] = [kind, {key: plain(value) for key, value in record.items()}]
    return table


def read_records(table: Mapping[str, Any], blobs: Sequence[bytes]) -> RecordDict:
    """The records that `write_records` was given."""

    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return blobs[value["blob"]]
        return [value_of(each) for each in value] if isinstance(value, list) else value

    records = RecordDict()
    for name, (kind, rows) in table.items():
        if kind == "arrays":
            records[name] = ArrayRecord(
                {
                    key: Array(dtype=dtype, shape=tuple(shape), stype=stype, data=value_of(data))
                    for key, (dtype, shape, stype, data) in rows.items()
                }
            )
        else:
            make = MetricRecord if kind == "metrics" else ConfigRecord
            records[name] = make({key: value_of(value) for key, value in rows.items()})
    return records


def context_to_table(context: Context, blobs: list[bytes]) -> dict[str, Any]:
    """A node's context as a table, what it keeps for the app included."""
    return {
        "run_id": context.run_id,
        "node_id": context.node_id,
        "node_config": dict(context.node_config),
        "run_config": dict(context.run_config),
        "series_id": context.series_id,
        "state": write_records(context.state, blobs),
    }


def table_to_context(table: Mapping[str, Any], blobs: Sequence[bytes]) -> Context:
    """The context that `context_to_table` was given."""
    return Context(**{**table, "state": read_records(table["state"], blobs)})
