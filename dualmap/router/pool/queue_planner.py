"""Plans of queues that have room, in the background: no reply waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dualmap.scheduling.queues.queue_order import QueueHead


class QueuePlanner:
    """Grants from the queues of a pool. An instance has one plan under way: two of one queue would race, and what is
    reported of it meanwhile is planned next, by the latest head alone."""

    def __init__(self, grant: Callable[[QueueHead], Awaitable[object]]) -> None:
        """``grant`` plans a queue until it has no room or nothing to grant, and raises nothing."""
        self._grant = grant
        self._heads: dict[str, QueueHead] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def plan(self, queue: QueueHead) -> None:
        """Have a queue planned that a reply contained; never waits."""
        name = queue.load.instance_id
        self._heads[name] = queue
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._work(name))

    async def _work(self, name: str) -> None:
        try:
            # The head is taken out before it is planned, so that one that comes during the plan is planned next.
            while (queue := self._heads.pop(name, None)) is not None:
                await self._grant(queue)
        finally:
            # No await since the last look: a head that comes later finds no task, and starts one.
            del self._tasks[name]

    async def done(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._tasks.values())
