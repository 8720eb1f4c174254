"""Releases that are being sent to the store: posted without waiting, delivered together in the background, retried."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from dualmap.router.telemetry.instruments import Counter
from dualmap.runtime.clock import Clock
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.request.release import Release
from dualmap.statestore.call_values import Transition
from dualmap.statestore.errors import StoreError, StoreUnavailableError

log = logging.getLogger(__name__)

LIMIT = 65_536
"""Releases that wait: those of minutes without the store."""
TOGETHER = 64
"""Releases in one delivery at most."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 2.0

_Posted = tuple[Release, Callable[[], None] | None]
"""A release, and what to call once it is settled."""


class Outbox:
    """A bounded queue of the releases of one pool, so that the byte path never waits for the store.

    They are delivered in the order in which they were posted. While one delivery is under way, the next ones gather:
    the busier the store, the more share a call. A delivery that finds the store away is repeated until it succeeds, and
    one that is refused is repeated release by release: they are idempotent. When the queue is full the new release is
    dropped and counted: the replica's reconciliation finds what it should have released.
    """

    def __init__(
        self,
        release: Callable[[Sequence[Release]], Awaitable[Sequence[Transition]]],
        plan: Callable[[QueueHead], None],
        *,
        clock: Clock,
        limit: int = LIMIT,
        dropped: Counter | None = None,
    ) -> None:
        """``release`` makes releases in the store, ``plan`` has a queue planned, and never waits."""
        self._release, self._plan = release, plan
        self._posted: deque[_Posted] = deque()
        self._limit = limit
        self._clock = clock
        self._arrival: asyncio.Future[None] | None = None
        """The future by which ``run`` waits while nothing is posted: a future costs a request less than an event."""
        self._under_way: Sequence[_Posted] = ()
        """Releases that are being delivered."""
        self._settled = asyncio.Event()
        """Set when all that was posted is settled, for those that ``flush``."""
        self._flushed_by = 0
        self.dropped = dropped or Counter()

    def __len__(self) -> int:
        return len(self._posted)

    def post(self, release: Release, settled: Callable[[], None] | None = None) -> None:
        """Hand a release over; never waits and never raises. ``settled`` is called once it was delivered, refused or
        dropped."""
        posted, arrival = self._posted, self._arrival
        if len(posted) >= self._limit:
            self.dropped.inc()
            if settled is not None:
                settled()
            return
        posted.append((release, settled))
        if arrival is not None:
            self._arrival = None
            if not arrival.done():  # as it is where ``run`` was cancelled
                arrival.set_result(None)

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            while not self._posted:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
            posted = self._under_way = self._next_posted()
            try:
                await self._deliver_all([release for release, _ in posted])
            finally:
                for _, settled in posted:
                    if settled is not None:
                        settled()
                # This runs when cancelled, too: ``flush`` must not wait for what nobody delivers any more.
                self._under_way = ()
                if self._flushed_by and not self._posted:
                    self._settled.set()

    def _next_posted(self) -> Sequence[_Posted]:
        """The releases that are delivered next, taken out of the queue."""
        posted = self._posted
        if len(posted) > TOGETHER:
            return [posted.popleft() for _ in range(TOGETHER)]
        taken = (*posted,)
        posted.clear()
        return taken

    async def release(self, releases: Sequence[Release]) -> None:
        """Make releases now."""
        self._plan_all(await self._release(releases))

    def _plan_all(self, transitions: Sequence[Transition]) -> None:
        """Have the queues planned that have room by releases: the next releases do not wait for that."""
        for transition in transitions:
            if transition.queue is not None:
                self._plan(transition.queue)

    async def _deliver_all(self, releases: Sequence[Release]) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            try:
                self._plan_all(await self._release(releases))
            except StoreUnavailableError:
                await self._clock.sleep(delay_s)
                delay_s = min(2 * delay_s, LONGEST_RETRY_S)
            except Exception as error:
                if len(releases) > 1:
                    break
                return log.error("a release was refused: %s", error, exc_info=not isinstance(error, StoreError))
            else:
                return None
        for each in releases:  # one that cannot be carried out takes no others with it
            await self._deliver_all((each,))
        return None

    async def flush(self) -> None:
        """Wait until everything posted has been delivered, refused or dropped."""
        self._flushed_by += 1
        try:
            while self._posted or self._under_way:
                self._settled.clear()
                await self._settled.wait()
        finally:
            self._flushed_by -= 1
