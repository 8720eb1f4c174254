"""Grants as they are published: one subscribing connection per replica of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError

from scheduling.backoff import worth_logging
from statestore.errors import StoreError
from statestore.feed import GrantFeed, GrantFeeds
from statestore.keys import PoolKeys
from statestore.redis.codec import grant_from

ASK_AGAIN_S = 5.0
"""How often a silent server is pinged, and a refused channel subscribed again."""
_RECONNECT_S = 0.1

_log = logging.getLogger(__name__)


class GrantSubscriber:
    """Feeds of the replicas of this process. Connects with a replica's first feed and stays connected."""

    def __init__(self, keys: PoolKeys, connections: ConnectionPool) -> None:
        self._keys = keys
        self._client = Redis(connection_pool=connections)
        self._feeds = GrantFeeds()
        self._listening: dict[str, asyncio.Task[None]] = {}

    def open(self, replica_id: str) -> GrantFeed:
        """Grants of a replica from about now on."""
        if replica_id not in self._listening:
            self._listening[replica_id] = asyncio.get_running_loop().create_task(self._listen(replica_id))
        return self._feeds.open(replica_id)

    async def _listen(self, replica_id: str) -> None:
        while True:
            with contextlib.suppress(StoreError, RedisError, OSError):  # lost, or not to be had
                async with self._client.pubsub() as subscription:
                    await self._read(subscription, replica_id)
            await asyncio.sleep(_RECONNECT_S)

    async def _read(self, subscription: Any, replica_id: str) -> None:
        """Hand on what is published, until the connection is lost or the server is silent although it was asked."""
        loop, channel, refusals, asked = asyncio.get_running_loop(), self._keys.grants_channel_of(replica_id), 0, False
        await subscription.subscribe(channel)
        while True:
            try:
                async with asyncio.timeout(ASK_AGAIN_S) as silence:
                    while True:
                        message = await subscription.get_message(timeout=None)
                        asked = False
                        if message["type"] == "message":
                            self._feeds.deliver(replica_id, grant_from(message["data"]))
                        silence.reschedule(loop.time() + ASK_AGAIN_S)
            except TimeoutError:
                if asked:
                    raise
                asked = True
                await subscription.ping()
            except NoPermissionError as error:
                refusals += 1
                if worth_logging(refusals):
                    _log.warning(
                        "channel %s is refused, so grants are noticed by polling alone: %s", channel.decode(), error
                    )
                await asyncio.sleep(ASK_AGAIN_S)
                await subscription.subscribe(channel)

    async def close(self) -> None:
        for task in self._listening.values():
            task.cancel()
        await asyncio.gather(*self._listening.values(), return_exceptions=True)
        await self._feeds.close_all()
