"""Requests that wait for the first instance of a pool that may have none.

While any waits, the members are read often: an instance that has become ready is to get them at once, and no reply of
the store says so, as nothing is placed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dualmap.router.pool.view import ViewKeeper
from dualmap.router.timers import CallLater
from dualmap.runtime.clock import Clock
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Time between two readings of the members while requests wait. There are hardly any."""


class InstanceWaiters:
    """The requests of one pool on one replica that wait for an instance."""

    def __init__(self, keeper: ViewKeeper, *, clock: Clock, call_later: CallLater) -> None:
        self._keeper = keeper
        self._clock = clock
        self._call_later = call_later
        self._waiting: set[asyncio.Future[bool]] = set()
        self._some = asyncio.Event()
        self.on_first: Callable[[], None] = lambda: None
        """Called when a request waits, and none did before."""

    async def wait(self, within_s: float) -> bool:
        """Whether an instance is ready within the time."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        timer = self._call_later(within_s, lambda: None if waiter.done() else waiter.set_result(False))
        self._waiting.add(waiter)
        if len(self._waiting) == 1:
            self._some.set()
            self.on_first()
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiting.discard(waiter)

    async def watch(self) -> None:
        """Look for instances while requests wait. Runs until cancelled."""
        while True:
            await self._some.wait()
            await self._clock.sleep(LOOK_S)
            try:
                await self._keeper.refresh()
            except StoreError as error:
                log.debug("the members could not be read: %s", error)
            if self._keeper.view.ready:
                for waiter in self._waiting:
                    if not waiter.done():
                        waiter.set_result(True)
            if not self._waiting:
                self._some.clear()
