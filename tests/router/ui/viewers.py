"""Open pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from dualmap.router.ui.feed import Feed
from dualmap.router.ui.peers import Peers


class Viewer:
    """One open page."""

    def __init__(self, feed: Feed) -> None:
        self._frames: AsyncIterator[bytes] = feed.frames()
        self._next: asyncio.Future[bytes] | None = None

    async def read(self) -> tuple[str, Any]:
        """The next frame: its event and its body."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._frames))
        frame, self._next = await asyncio.wait_for(asyncio.shield(self._next), 60), None
        event, data, *_ = frame.decode().split("\n")
        return event.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        await self._frames.aclose()  # type: ignore[attr-defined]


def feed_of(runtime: Any) -> Feed:
    return Feed(runtime, Peers(runtime.context.replica_id, None, runtime.peer_client))
