"""A partition to look at: who got how much of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmol.partition.columns import Indices, Labels, label_codes, named_parts
from fmol.wording import many

__all__ = ["Description", "describe"]


@dataclass(frozen=True, eq=False, repr=False)
class Description:
    """What each client got: sizes `[M]` and, where labels were given, their counts `[M, L]`.

    Printed, it is a table; of more than 20 clients the first ten and a summary.
    """

    clients: tuple[str, ...]
    sizes: Indices
    labels: tuple[Any, ...]
    counts: Indices

    def __str__(self) -> str:
        shown = 10 if len(self.clients) > 20 else len(self.clients)
        table = [self._header(), *(self._row(i) for i in range(shown))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                # Names and free text read from the left, numbers line up on the right.
                cell.ljust(width)
                if column == 0 or (column > 2 and self._wide)
                else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        if shown < len(self.clients):
            lines.append(f"… and {len(self.clients) - shown:,} more")
        return "\n".join([*lines, self._summary()])

    __repr__ = __str__

    @property
    def _wide(self) -> bool:
        return len(self.labels) > 12

    def _header(self) -> list[str]:
        if not self.labels:
            return ["client", "samples"]
        columns = ["most frequent"] if self._wide else [str(label) for label in self.labels]
        return ["client", "samples", "distinct", *columns]

    def _row(self, i: int) -> list[str]:
        row = [self.clients[i], str(self.sizes[i])]
        if not self.labels:
            return row
        counts = self.counts[i]
        row.append(str(np.count_nonzero(counts)))
        if not self._wide:
            return [*row, *(str(count) for count in counts)]
        top = [j for j in np.argsort(-counts, kind="stable")[:3] if counts[j]]
        return [*row, ", ".join(f"{self.labels[j]} ({counts[j]})" for j in top)]

    def _summary(self) -> str:
        text = (
            f"{many(len(self.clients), 'client')}, {many(int(self.sizes.sum()), 'sample')}, "
            f"{_range(self.sizes)} each"
        )
        if not self.labels:
            return f"{text}."
        return f"{text}; {_range(np.count_nonzero(self.counts, axis=1))} labels each."


def describe(
    parts: Sequence[Indices] | Mapping[Any, Indices], labels: Labels | None = None
) -> Description:
    """A readable table of a partition: each client's size and, with `labels`, its label counts.

    >>> from fmol.partition import blocks
    >>> print(describe(blocks(5, 2), labels=["cat", "cat", "dog", "cat", "dog"]))
    client  samples  distinct  cat  dog
    0             3         2    2    1
    1             2         2    1    1
    2 clients, 5 samples, 2 to 3 each; 2 labels each.
    """
    names, parts = named_parts(parts)
    sizes = np.array([len(part) for part in parts], dtype=np.int64)
    if labels is None:
        return Description(names, sizes, (), np.zeros((len(parts), 0), dtype=np.int64))
    values, codes = label_codes(labels)
    largest = max((int(part.max()) for part in parts if len(part)), default=-1)
    if largest >= len(codes):
        raise ValueError(
            f"a client has sample {largest}, but there are {len(codes)} `labels`. "
            "Give the labels of the whole data set, in its order."
        )
    counts = [np.bincount(codes[part], minlength=len(values)) for part in parts]
    table = np.array(counts, dtype=np.int64).reshape(len(parts), len(values))
    return Description(names, sizes, tuple(values.tolist()), table)


def _range(values: Indices) -> str:
    if len(values) == 0:
        return "0"
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
