"""Transitions on their way to the store: posted without waiting, delivered in the background, retried."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from router.instruments import Counter
from statestore.clock import Clock
from statestore.errors import StoreError, StoreUnavailableError

log = logging.getLogger(__name__)

Transition = Callable[[], Awaitable[object]]

LIMIT = 65_536
"""Transitions that wait: those of minutes without the store."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0


class Outbox:
    """A bounded queue of idempotent store calls, so that the byte path never waits for the store.

    Calls start in the order in which they were posted. One that finds the store away is repeated until it succeeds.
    When the queue is full the new transition is dropped and counted: the replica's reconciliation finds what it should
    have released.
    """

    def __init__(
        self, *, clock: Clock, limit: int = LIMIT, concurrency: int = 64, dropped: Counter | None = None
    ) -> None:
        self._posted: deque[tuple[Transition, Callable[[], None] | None]] = deque()
        self._limit = limit
        self._clock = clock
        self._concurrency = concurrency
        self._idle: list[asyncio.Future[None]] = []
        """Idle couriers, the most recent last."""
        self._owed = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self.dropped = dropped or Counter()

    def __len__(self) -> int:
        return len(self._posted)

    def post(self, transition: Transition, settled: Callable[[], None] | None = None) -> None:
        """Hand a transition over; never waits and never raises. ``settled`` is called once it was delivered, refused
        or dropped."""
        if len(self._posted) >= self._limit:
            self.dropped.inc()
            if settled is not None:
                settled()
            return
        self._posted.append((transition, settled))
        self._owed += 1
        self._settled.clear()
        while self._idle:
            courier = self._idle.pop()
            if not courier.done():  # else it was cancelled
                courier.set_result(None)
                return

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with asyncio.TaskGroup() as couriers:
            for _ in range(self._concurrency):
                couriers.create_task(self._deliver_all())

    async def _deliver_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._posted:
                work = loop.create_future()
                self._idle.append(work)
                await work
            transition, settled = self._posted.popleft()
            try:
                try:
                    await transition()
                except StoreUnavailableError:
                    await self._repeat(transition)
            except StoreError as error:
                log.error("a transition was refused: %s", error)
            except Exception:
                log.exception("a transition failed")
            finally:
                if settled is not None:
                    settled()
                self._owed -= 1
                if self._owed == 0:
                    self._settled.set()

    async def _repeat(self, transition: Transition) -> None:
        """Until it gets through."""
        delay_s = FIRST_RETRY_S
        while True:
            await self._clock.sleep(delay_s)
            try:
                await transition()
                return
            except StoreUnavailableError:
                delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything posted has been delivered; False when that takes longer than the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True
