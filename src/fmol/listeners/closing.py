"""What is closed at the end, whatever happened."""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """Makes a class with `close(error)` a context manager, which is told what went wrong."""

    def close(self, error: BaseException | None = None) -> None:
        """At last, with what broke the run if something did."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)
