"""Delivery of grants to one replica inside this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from scheduling.granting import Grant

MAX_UNREAD_GRANTS = 65_536
"""Grants kept for a reader that does not read; the oldest are dropped first, as ``records`` is authoritative."""


class GrantFeed:
    """An iterator of grants that is endless until closed: open from its creation. A reader that waits for the next one
    gets the end of the iteration then."""

    def __init__(self, on_close: Callable[[GrantFeed], None]) -> None:
        self._unread: deque[Grant] = deque(maxlen=MAX_UNREAD_GRANTS)
        self._arrived = asyncio.Event()
        self._on_close = on_close
        self._closed = False

    def push(self, grant: Grant) -> None:
        self._unread.append(grant)
        self._arrived.set()

    def __aiter__(self) -> GrantFeed:
        return self

    async def __anext__(self) -> Grant:
        while not self._unread:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._unread.popleft()

    async def aclose(self) -> None:
        """End the iteration."""
        if not self._closed:
            self._closed = True
            self._arrived.set()
            self._on_close(self)


class GrantFeeds:
    """The open feeds by replica."""

    def __init__(self) -> None:
        self._feeds: dict[str, list[GrantFeed]] = {}

    def open(self, replica_id: str) -> GrantFeed:
        def close(feed: GrantFeed) -> None:
            feeds = self._feeds.get(replica_id, [])
            if feed in feeds:
                feeds.remove(feed)
            if not feeds:
                self._feeds.pop(replica_id, None)

        feed = GrantFeed(close)
        self._feeds.setdefault(replica_id, []).append(feed)
        return feed

    def deliver(self, replica_id: str, grant: Grant) -> None:
        for feed in self._feeds.get(replica_id, ()):
            feed.push(grant)

    async def close_all(self) -> None:
        for feed in [feed for feeds in self._feeds.values() for feed in feeds]:
            await feed.aclose()
