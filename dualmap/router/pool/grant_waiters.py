"""Held requests that wait for their grant: a message is fast, a poll misses nothing."""

from __future__ import annotations

import asyncio
import logging
from itertools import islice

from dualmap.router.timers import CallLater
from dualmap.runtime.clock import Clock
from dualmap.scheduling.queues.granting import CommitReply, Grant, grant_queue
from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder, QueuePlan
from dualmap.scheduling.request.machine import Refusal, turned_away
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import drive
from dualmap.statestore.errors import StoreError
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between look-ups of held requests: grants and refusals whose message got lost are found then."""
LOOKED_UP = 1000
"""Most held requests in one look-up, those that were looked up longest ago: however many are held, the store and the
event loop spend the same on it."""


class ReservationLostError(Exception):
    """The store no longer knows a held request: it came back empty, or reaped the request, and another replica's may
    have its id now. It must be placed again."""


class TurnedAwayError(Exception):
    """A held request is held no longer."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why)
        self.why = why


class GrantWaiter:
    """One attempt of one request that waits."""

    __slots__ = ("_future", "_grant", "attempt", "held", "placed_s", "request_id")

    def __init__(self, request_id: str, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.held = False
        """Whether the store's reply held the request: from now on its record must exist."""
        self.placed_s = 0.0
        """When its hold began, on the clock of the replica."""
        self._grant: Grant | None = None
        self._future: asyncio.Future[Grant] | None = None

    def granted(self, grant: Grant) -> None:
        self._grant = grant
        if self._future is not None and not self._future.done():
            self._future.set_result(grant)

    def failed(self, error: Exception) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    async def grant(self) -> Grant:
        if self._grant is not None:
            return self._grant
        self._future = asyncio.get_running_loop().create_future()
        return await self._future


class GrantWaiters:
    """The held requests of one pool on one replica."""

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        replica_id: str,
        clock: Clock,
        call_later: CallLater,
        order: QueueOrder,
        refuses_late: bool,
    ) -> None:
        """Make the waiters of a pool. With ``refuses_late`` every request that is deferred is refused, else only one
        that is for too long."""
        self._call_later = call_later
        self._pool = pool
        self._replica_id = replica_id
        self._clock = clock
        self.order = order
        self.refuses_late = refuses_late
        self.placing: dict[str, Grant | None] = {}
        """Requests whose reservation is under way, by id: their grant can arrive before the reservation's own answer
        has been read. The caller enters None before it reserves, and removes the entry in any case."""
        self._waiters: dict[str, GrantWaiter] = {}

    def expect(self, request_id: str, attempt: int) -> GrantWaiter:
        """A request is held; the caller must call ``leave`` in any case."""
        waiter = self._waiters[request_id] = GrantWaiter(request_id, attempt)
        # The message of the grant may overtake the reply of the reservation, and it is sent only once.
        early = self.placing.get(request_id)
        if early is not None:
            self.deliver(early)
        return waiter

    def leave(self, waiter: GrantWaiter) -> None:
        # A later attempt of the request may have a waiter under this id by now.
        if self._waiters.get(waiter.request_id) is waiter:
            del self._waiters[waiter.request_id]

    @property
    def held_requests(self) -> int:
        return sum(waiter.held for waiter in self._waiters.values())

    async def wait(self, waiter: GrantWaiter, within_s: float) -> Grant:
        """The grant of a held request.

        Raises:
            TurnedAwayError: it has not come in time, or the request is too late.
            ReservationLostError: the store does not know the request any more.
        """
        waiter.held, waiter.placed_s = True, self._clock.monotonic_s()
        timer = self._call_later(within_s, lambda: waiter.failed(TurnedAwayError(Refusal.HELD_TOO_LONG)))
        try:
            return await waiter.grant()
        finally:
            timer.cancel()

    def deliver(self, grant: Grant) -> None:
        """Hand a grant over. A grant without a waiter is of a request that is over, whose release is being sent."""
        waiter = self._waiters.get(grant.request_id)
        if waiter is None:
            if grant.request_id in self.placing:
                self.placing[grant.request_id] = grant
        # A grant of another attempt is of a reservation whose release is being sent.
        elif waiter.attempt == grant.attempt:
            waiter.granted(grant)

    async def commit(self, plan: QueuePlan) -> CommitReply:
        """Carry a plan out. Grants of this replica's requests need no message."""
        reply = await self._pool.commit(plan, replica_id=self._replica_id)
        for grant in reply.grants:
            if grant.replica_id == self._replica_id:
                self.deliver(grant)
        return reply

    async def plan(self, queue: QueueHead) -> None:
        """Grant what a queue has room for. A failure must not fail the request, or repeat the transition, whose reply
        had the queue: the leader's sweep grants instead."""
        try:
            await drive(grant_queue(queue, self.order), self)
        except StoreError as error:
            log.debug("pool %s: a queue could not be planned: %s", self._pool.name, error)

    async def poll(self) -> None:
        """Look held requests up, again and again. Runs until cancelled."""
        while True:
            await self._clock.sleep(POLL_S)
            try:
                await self.look_up()
            except StoreError as error:
                log.warning("pool %s: held requests could not be looked up: %s", self._pool.name, error)

    async def look_up(self) -> None:
        """Find grants whose message got lost, and requests to refuse by now; up to ``LOOKED_UP`` in one call."""
        first = list(islice(self._waiters.values(), LOOKED_UP))
        if len(first) < len(self._waiters):
            for waiter in first:  # the others have their turn next
                self._waiters[waiter.request_id] = self._waiters.pop(waiter.request_id)
        held = [waiter for waiter in first if waiter.held]
        if not held:
            return
        records = await self._pool.records([waiter.request_id for waiter in held])
        for waiter in held:
            self._settle(waiter, records.get(waiter.request_id))

    def _settle(self, waiter: GrantWaiter, record: StoredRequest | None) -> None:
        if record is None or record.replica_id != self._replica_id:
            waiter.failed(ReservationLostError(waiter.request_id))
        elif record.attempt != waiter.attempt:
            return  # an earlier one, whose release is on its way
        elif record.state is not RequestState.HELD:
            waiter.granted(Grant.of(record))
        else:
            waited_s = self._clock.monotonic_s() - waiter.placed_s
            why = turned_away(record, waited_s, self.order, refuses_late=self.refuses_late)
            if why is not None:
                waiter.failed(TurnedAwayError(why))
