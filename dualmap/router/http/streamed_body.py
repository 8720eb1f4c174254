"""The body of a request that is answered while it comes: what was read waits here until the answer takes it.

Such a body may be larger than what a replica keeps in memory. So the connection reads no further while more waits than
``HELD_BYTES``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dualmap.router.errors import RouterError
from dualmap.router.http.body_budget import BodyBudget

HELD_BYTES: Final = 256 << 10
"""Bytes that may wait before the connection stops to read."""


class StreamedBody:
    """The reader feeds it, one answer reads it."""

    def __init__(self, bodies: BodyBudget, pays: str | None, hold: Callable[[bool], None]) -> None:
        """``hold`` stops the reading of the connection (True), or lets it continue. ``pays``: the tenant in whose part
        of the budget waiting bytes are counted."""
        self._bodies = bodies
        self._pays = pays
        self._hold = hold
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._is_held = False
        self._waiter: asyncio.Future[None] | None = None
        self._refusal: RouterError | None = None
        self._broken = False
        self.ended = False
        """All of it has come."""

    @property
    def awaited(self) -> bool:
        """Whether the answer waits for the client."""
        return self._waiter is not None

    # the reader's side -------------------------------------------------------------------------------------------
    def feed(self, piece: bytes) -> None:
        """Raises ReplicaFullError where the budget has no room for it."""
        if self._broken:
            return  # nobody reads it any more
        self._bodies.take(len(piece), self._pays)
        self._pieces.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > HELD_BYTES and not self._is_held:
            self._is_held = True
            self._hold(True)
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def break_off(self, refusal: RouterError | None = None) -> None:
        """No more of it comes, or is read. ``refusal``: why it was refused."""
        self._broken = True
        self._refusal = self._refusal or refusal
        self._take()
        self._wake()

    # the answer's side -------------------------------------------------------------------------------------------
    async def read(self) -> bytes | None:
        """The bytes that have come since the last call; empty at the end, None where the rest never comes.

        Raises:
            RouterError: it was refused.
        """
        while not self._pieces and not self.ended and not self._broken:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._refusal is not None:
            raise self._refusal
        return None if self._broken else self._take()

    def _take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        self._bodies.give_back(self._held_bytes, self._pays)
        self._held_bytes = 0
        if self._is_held:
            self._is_held = False
            self._hold(False)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
