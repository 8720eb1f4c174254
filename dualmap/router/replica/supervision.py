"""Background work that is restarted after errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dualmap.runtime.clock import Clock

log = logging.getLogger(__name__)

RESTART_DELAY_S = 1.0


class Supervisor:
    """Runs endless jobs concurrently; one that fails is logged and started again after a pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        self._tasks.append(asyncio.create_task(self._keep_running(name, job), name=name))

    async def _keep_running(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await job()
            except Exception:
                log.exception("background job %r failed; it starts again in %g s", name, RESTART_DELAY_S)
            await self._clock.sleep(RESTART_DELAY_S)

    async def stop(self) -> None:
        """Cancel all jobs and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
