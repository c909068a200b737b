"""Who a site is: the question as a message, and a site's answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fmol.flower.wire.failures import Failure, failure_from
from fmol.flower.wire.header import agree, built, text, texts, whole
from fmol.flower.wire.message import decode, encode

__all__ = [
    "Introduction",
    "pack_introduction",
    "pack_query",
    "unpack_introduction",
    "unpack_query",
]


@dataclass(frozen=True)
class Introduction:
    """What a site says of itself before it takes part."""

    client: str
    """The name by which the server knows it, in every run and after every restart."""
    objectives: tuple[str, ...]
    samples: int
    held_out: int
    """Samples of its own that are held out; 0 without."""
    layout: str
    """The digest of its model's layout."""


def pack_query(layout: str) -> bytes:
    """The question who a site is, which names the layout of the server's model."""
    return encode({"kind": "query", "layout": layout, "note": {}}, [])


def unpack_query(data: bytes) -> str:
    """The layout of the model of whoever asks."""
    header, _, _ = decode(data)
    agree(header, {"kind": "query"})
    return built(lambda: text(header["layout"]))


def pack_introduction(site: Introduction) -> bytes:
    """A site's answer to a query."""
    return encode({"kind": "introduction", **asdict(site), "note": {}}, [])


def unpack_introduction(data: bytes) -> Introduction | Failure:
    """What a site says of itself, or why it could not; raises `WireError` for anything else."""
    header, _, _ = decode(data)
    if header.get("kind") == "failure":
        return failure_from(header)
    agree(header, {"kind": "introduction"})
    return built(
        lambda: Introduction(
            client=text(header["client"]),
            objectives=texts(header["objectives"]),
            samples=whole(header["samples"]),
            held_out=whole(header["held_out"]),
            layout=text(header["layout"]),
        )
    )
