"""Grants as they are published: one subscribing connection per pool and process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from scheduling.backoff import worth_logging
from statestore.base import Grant
from statestore.connection import Connection, Resolve
from statestore.errors import StoreError, StoreUnavailableError
from statestore.feed import GrantFeeds
from statestore.keys import PoolKeys
from statestore.redis.codec import grant_from
from statestore.stream import Stream

ASK_AGAIN_S = 5.0
"""How often the server is asked whether it is still there, and for channels that it refused."""

_log = logging.getLogger(__name__)


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
        self._refused: set[bytes] = set()
        """Channels that the server does not let this user read; asked for again now and then."""
        self._refusals = 0
        self._connection = Connection(
            resolve,
            connect_timeout_s=connect_timeout_s,
            command_timeout_s=command_timeout_s,
            on_push=self._pushed,
            on_connected=self._subscribe_all,
            keep=True,
        )
        self._watch: asyncio.Task[None] | None = None

    def open(self, replica_id: str) -> Stream[Grant]:
        """Grants of a replica from about now on."""
        channel = self._keys.grants_channel_of(replica_id)
        if channel not in self._replicas:
            self._replicas[channel] = replica_id
            if self._connection.connected:
                self._subscribe(channel)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._keep_watch())
        return self._feeds.open(replica_id)

    async def _keep_watch(self) -> None:
        """Connect, and notice a connection that died without a word: nothing else is sent on it by itself."""
        while True:
            with contextlib.suppress(StoreError):
                await self._connection.command("PING")
                for channel in tuple(self._refused):
                    self._subscribe(channel)
            await asyncio.sleep(ASK_AGAIN_S if self._connection.connected else 0.1)

    def _subscribe_all(self) -> None:
        for channel in self._replicas:
            self._subscribe(channel)

    def _subscribe(self, channel: bytes) -> None:
        """On the connection there is; when that is lost, the next one subscribes to all."""
        self._refused.discard(channel)
        reply = asyncio.ensure_future(self._connection.command("SUBSCRIBE", channel))
        reply.add_done_callback(lambda done: self._answered(channel, done))

    def _answered(self, channel: bytes, reply: asyncio.Future[Any]) -> None:
        error = None if reply.cancelled() else reply.exception()
        if error is None:
            self._refusals = 0
        elif not isinstance(error, StoreUnavailableError):
            self._refused.add(channel)
            self._refusals += 1
            if worth_logging(self._refusals):
                _log.warning(
                    "channel %s is refused, so grants are noticed by polling alone: %s", channel.decode(), error
                )

    def _pushed(self, push: list[Any]) -> None:
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
