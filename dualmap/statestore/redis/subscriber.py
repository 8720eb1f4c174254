"""Messages as they are published: a subscribing connection for each who listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError

from dualmap.scheduling.backoff import worth_logging
from dualmap.statestore.errors import StoreError

RETRY_S = 5.0
"""How often a silent server is pinged, and a refused channel subscribed again."""
_RECONNECT_S = 0.1

_log = logging.getLogger(__name__)


class Subscriber:
    """Stays connected for those who listen, until it is closed."""

    def __init__(self, connections: ConnectionPool) -> None:
        self._connections = connections
        self._listening: list[asyncio.Task[None]] = []

    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        """Hand on what is published there from about now on."""
        listening = self._listen(channel, deliver)
        self._listening.append(asyncio.get_running_loop().create_task(listening))

    async def _listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        client = Redis(connection_pool=self._connections)
        while True:
            with contextlib.suppress(StoreError, RedisError, OSError):  # lost, or not to be had
                async with client.pubsub() as subscription:
                    await self._read(subscription, channel, deliver)
            await asyncio.sleep(_RECONNECT_S)

    async def _read(self, subscription: Any, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        """Hand on what is published, until the connection is lost or the server leaves a ping unanswered."""
        loop, refusals, pinged = asyncio.get_running_loop(), 0, False
        await subscription.subscribe(channel)
        while True:
            try:
                async with asyncio.timeout(RETRY_S) as silence:
                    while True:
                        message = await subscription.get_message(timeout=None)
                        pinged = False
                        if message["type"] == "message":
                            deliver(message["data"])
                        silence.reschedule(loop.time() + RETRY_S)
            except TimeoutError:
                if pinged:
                    raise
                pinged = True
                await subscription.ping()
            except NoPermissionError as error:
                refusals += 1
                if worth_logging(refusals):
                    _log.warning(
                        "channel %s is refused, so grants are noticed by polling alone: %s", channel.decode(), error
                    )
                await asyncio.sleep(RETRY_S)
                await subscription.subscribe(channel)

    async def close(self) -> None:
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
