"""What a server lets in: every reply passes here, whatever engine brought it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from numbers import Integral, Real

import torch

from fmol.engines.seam import Ask, ClientRecord, Refusal, Reply
from fmol.federation import Client
from fmol.layout import Layout, all_finite, squared_norm

__all__ = ["check_reply", "client_records", "message_bytes", "reply_bytes"]


def check_reply(
    reply: Reply,
    ask: Ask,
    client: Client,
    layout: Layout,
    limit: int | None = None,
    finite: Container[str] = (),
) -> tuple[Reply, tuple[Refusal, ...]]:
    """The reply without what may not be let in, and a refusal for each thing taken out.

    A (client, objective) with a misshapen or non-finite delta, a non-finite loss, an unknown slot
    or an impossible sample count is taken out as a whole; the client's other objectives stay.
    `limit` is how many samples the server itself knows the client to have, where it does; `finite`
    are slots whose deltas were found finite already.
    """
    bounds = [bound for bound in (client.max_samples, limit) if bound is not None]
    most = min(bounds) if bounds else None
    if reply.client != client.id:
        reason = f"the reply says that it comes from client `{reply.client}`"
        names = sorted({*reply.deltas, *reply.losses}) or list(client.objectives)
        refusals = tuple(Refusal(ask.round, client.id, name, reason) for name in names)
        return Reply(client=client.id), refusals
    reasons: dict[str, str] = {}
    lanes = {lane.slot: lane for lane in ask.lanes}
    for name, count in reply.samples.items():
        if name not in client.objectives:
            reasons[name] = "it counted samples for an objective that it does not hold"
        elif not _is_whole(count) or count < 0:
            reasons[name] = f"it claims {count} samples"
        elif most is not None and count > most:
            reasons[name] = f"it claims {count} samples and the server knows of {most} at most"
    for name, loss in reply.losses.items():
        if name not in client.objectives:
            reasons[name] = "it sent a loss for an objective that it does not hold"
        elif not (type(loss) is float or isinstance(loss, Real)) or not math.isfinite(loss):
            reasons[name] = f"its training loss at x is {loss}"
    for name in reply.held_out:
        if name not in client.objectives:
            reasons[name] = "it sent metrics for an objective that it does not hold"
    for slot, count in reply.steps.items():
        if not _is_whole(count) or count < 0:
            reasons[slot] = f"it claims {count} steps"
    for slot, delta in reply.deltas.items():
        if slot not in lanes:
            reasons[slot] = "it sent an update that nobody asked for"
        elif not isinstance(delta, torch.Tensor):
            reasons[slot] = f"its update is a {type(delta).__name__} instead of a tensor"
        elif delta.shape != (layout.size,):
            reasons[slot] = f"its update has shape {list(delta.shape)} instead of [{layout.size}]"
        elif not delta.is_floating_point():
            reasons[slot] = f"its update is of {delta.dtype} instead of {layout.dtype}"
        elif slot not in finite and not all_finite(delta.to(layout.dtype)):
            bad = int((~torch.isfinite(delta.to(layout.dtype))).sum())
            reasons[slot] = (
                f"its update has {bad} non-finite of {layout.size} values (a step too large, or a "
                "loss computed on missing labels: replace NaN targets before, as with nan_to_num)"
            )
    for name, tensor in reply.extra.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            slot = name.partition(".")[2]  # What belongs to an update stands or falls with it.
            slot = slot if slot in lanes else name
            reasons.setdefault(slot, f"what it sent as `{name}` is not finite")
    if not reasons:
        return reply, ()
    slots = {
        slot
        for slot in reply.deltas
        if slot in reasons or any(n in reasons for n in lanes[slot].mixture if slot in lanes)
    }
    clean = replace(
        reply,
        deltas={k: v for k, v in reply.deltas.items() if k not in slots},
        steps={k: v for k, v in reply.steps.items() if k not in slots},
        first=tuple(slot for slot in reply.first if slot not in slots),
        losses={k: v for k, v in reply.losses.items() if k not in reasons},
        samples={k: v for k, v in reply.samples.items() if k not in reasons},
        held_out={k: v for k, v in reply.held_out.items() if k not in reasons},
        extra={k: v for k, v in reply.extra.items() if k not in reasons},
    )
    return clean, tuple(Refusal(ask.round, client.id, n, r) for n, r in sorted(reasons.items()))


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # The first is quick, and usual.


def message_bytes(ask: Ask) -> int:
    """What this ask would weigh on a wire: its tensors, and eight bytes for each number."""
    numbers = sum(len(lane.mixture) for lane in ask.lanes)
    return _tensor_bytes(ask.x, *ask.payload.values()) + 8 * numbers


def reply_bytes(reply: Reply) -> int:
    """What this reply would weigh on a wire: its tensors, and eight bytes for each number."""
    numbers = len(reply.losses) + len(reply.samples) + len(reply.steps) + len(reply.first)
    numbers += sum(len(row) for row in reply.held_out.values())
    return _tensor_bytes(*reply.deltas.values(), *reply.extra.values()) + 8 * numbers


def _tensor_bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def client_records(
    reply: Reply,
    *,
    bytes_up: int,
    bytes_down: int,
    norms: Mapping[str, float] | None = None,
    seconds: float | None = None,
) -> tuple[ClientRecord, ...]:
    """One line per objective that this reply speaks of; `norms` by slot, where they are known, and
    `seconds` in place of the reply's."""
    if norms is None:
        norms = {slot: math.sqrt(squared_norm(delta)) for slot, delta in reply.deltas.items()}
    if seconds is None:
        seconds = reply.seconds
    losses, samples, held_out = reply.losses, reply.samples, reply.held_out
    return tuple(
        ClientRecord(
            reply.client,
            name,
            losses.get(name, math.nan),
            samples.get(name, 0),
            norms.get(name, math.nan),
            held_out.get(name, {}),
            seconds,
            bytes_up,
            bytes_down,
        )
        for name in sorted({*losses, *samples, *held_out})
    )
