"""Grants as they are published: one subscribing connection per pool and process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from statestore.base import Grant
from statestore.connection import Connection, Resolve
from statestore.errors import StoreError
from statestore.feed import GrantFeeds
from statestore.keys import PoolKeys
from statestore.redis.codec import grant_from

_PING_EVERY_S = 5.0


class GrantSubscriber:
    """Feeds of the replicas of this process. Connects with the first feed and stays connected, resubscribing."""

    def __init__(
        self,
        keys: PoolKeys,
        resolve: Resolve,
        *,
        connect_timeout_s: float,
        command_timeout_s: float,
        on_grant: Callable[[Grant], None],
    ) -> None:
        self._keys = keys
        self._on_grant = on_grant
        self._feeds = GrantFeeds()
        self._replicas: dict[bytes, str] = {}
        self._connection = Connection(
            resolve,
            connect_timeout_s=connect_timeout_s,
            command_timeout_s=command_timeout_s,
            on_push=self._pushed,
            on_connected=self._subscribe_all,
            keep=True,
        )
        self._watch: asyncio.Task[None] | None = None

    def open(self, replica_id: str) -> AsyncIterator[Grant]:
        """Grants of a replica from about now on."""
        channel = self._keys.grants_channel_of(replica_id)
        if channel not in self._replicas:
            self._replicas[channel] = replica_id
            self._connection.post("SUBSCRIBE", channel)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._keep_watch())
        return self._feeds.open(replica_id)

    async def _keep_watch(self) -> None:
        """Connect, and notice a connection that died without a word: nothing else is ever sent on it."""
        while True:
            with contextlib.suppress(StoreError):
                await self._connection.command("PING")
            await asyncio.sleep(_PING_EVERY_S if self._connection.connected else 0.1)

    def _subscribe_all(self) -> None:
        if self._replicas:
            self._connection.post("SUBSCRIBE", *self._replicas)

    def _pushed(self, push: list[Any]) -> None:
        if push[0] != b"message":
            return
        replica_id = self._replicas.get(push[1])
        if replica_id is not None:
            grant = grant_from(push[2])
            self._on_grant(grant)
            self._feeds.deliver(replica_id, grant)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._connection.close()
        await self._feeds.close_all()
