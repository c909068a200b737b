"""A front as a few lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fmol.front.result import LOSS, Front, FrontPoint

__all__ = ["front_table", "hypervolume_lines", "point_label"]

MOST = 6
"""Objectives that have a column each; of more, the mean and the worst."""


def front_table(front: Front) -> list[str]:
    """A line per method and preference: where it ended, whether it is beaten, how stationary it is."""
    names, rows = front.objectives, front.rows()
    values, kept = front.values(), front.kept()
    few = len(names) <= MOST
    word = "loss" if front.measure == LOSS else front.measure
    worst = "lowest" if front.maximise else "highest"
    heads = [f"{word} {name}" for name in names] if few else [f"{word} mean", f"{word} {worst}"]
    table = [["method", "preference", *heads, "‖d*‖ relative", "dominated"]]
    for row, own, good in zip(rows, values, kept.tolist(), strict=True):
        numbers = list(own) if few else [own.mean(), own.min() if front.maximise else own.max()]
        table.append(
            [
                row[0].method,
                point_label(row[0], names),
                *(f"{number:.4g}" for number in numbers),
                f"{fmean(point.stationarity['relative'] for point in row):.1%}",
                "" if good else "yes",
            ]
        )
    return _aligned(table) + _footer(front, int(kept.sum()))


def _footer(front: Front, kept: int) -> list[str]:
    seeds = f", means over {len(front.seeds)} seeds" if len(front.seeds) > 1 else ""
    beaten = len(front.rows()) - kept
    lines = [f"{kept} of {len(front.rows())} are not dominated{seeds}"] if beaten or seeds else []
    return lines + hypervolume_lines(front)


def hypervolume_lines(front: Front) -> list[str]:
    """The hypervolume of each method, or how to have one."""
    if front.reference is None:
        given = ",".join(f"{name}={v:g}" for name, v in front.suggested_reference().items())
        return [
            "hypervolume: needs a reference point, the worst values that still count; a little beyond "
            f"these points is --reference {given}"
        ]
    lines = []
    for method, found in front.hypervolumes().items():
        if len(found) == 1:
            text = str(found[0]).removeprefix("hypervolume ")
        else:
            each = [volume.value for volume in found]
            text = f"{fmean(each):.6g}, from {min(each):.6g} to {max(each):.6g} over the seeds"
            beyond = sum(len(volume.beyond) for volume in found)
            text += "" if found[0].exact else " (estimates)"
            text += f"; {beyond} points are beyond the reference and add nothing" if beyond else ""
        lines.append(f"hypervolume {method}: {text}")
    corner = ", ".join(f"{name} {value:g}" for name, value in front.reference.items())
    return [*lines, f"up to the reference {corner}"]


def point_label(point: FrontPoint, names: Sequence[str]) -> str:
    """The preference in a few characters; of many objectives, those with the most of it."""
    shares = {name: point.preference[name] for name in names}
    if len(names) <= MOST:
        return " ".join(f"{share:.2f}" for share in shares.values())
    top = sorted(shares, key=lambda name: -shares[name])[:2]
    if shares[top[0]] - min(shares.values()) < 1e-9:
        return "equal"
    return "  ".join(f"{name} {shares[name]:.2f}" for name in top if shares[name] > 0) + (
        "" if shares[top[0]] > 1 - 1e-9 else " …"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
