"""Events of the data plane, for counting."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """A listener on the hot path: implementations count and return. The life cycle counts placed requests itself."""

    def connections_changed(self, change: int) -> None:
        """A client connection opened (+1) or closed (-1)."""

    def refused(self, status: int, code: str) -> None:
        """The data plane answered with an error of its own."""


class NullObserver:
    """Counts nothing."""

    def connections_changed(self, change: int) -> None: ...

    def refused(self, status: int, code: str) -> None: ...
