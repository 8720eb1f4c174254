"""Events of the data plane, for counting."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """A listener on the hot path: implementations count and return. The life cycle counts placed requests itself."""

    def connections_changed(self, change: int) -> None:
        """A client connection opened (+1) or closed (-1)."""

    def refused(self, status: int, code: str) -> None:
        """The data plane answered with an error of its own."""

    def relayed(self, chunks: int) -> None:
        """The native relay has passed so many chunks of a stream on."""


class NullObserver:
    """Counts nothing."""

    def connections_changed(self, change: int) -> None: ...

    def refused(self, status: int, code: str) -> None: ...

    def relayed(self, chunks: int) -> None: ...
