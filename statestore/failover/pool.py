"""One pool that outlives its store: shared while Redis answers, local while it does not.

A store that cannot be reached is away, and so is one that refuses what it is asked: for a request it makes no
difference why it cannot be entered there. While the store is away the replica decides on a ledger of its own, seeded
with the last known members and its own live requests. Other replicas' load is out of sight then: the dual mapping
keeps prefixes together all the same.
When the store is back, the replica hands its requests over and is one of many again.

There is no await between reading and changing local state. A hand-over waits for the calls under way, and the others
for its end, so nothing can change under it; every wait is bounded by the store's own timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from scheduling.backoff import backoff_s, worth_logging
from scheduling.chain import Chain
from scheduling.settings import SchedulingSettings
from statestore.base import FinishFacts, Grant, Membership, Observation, PoolSnapshot, PoolStore, RequestRecord
from statestore.clock import Clock, RealClock
from statestore.errors import StoreError, StoreUnavailableError
from statestore.failover.delegate import SharedCalls
from statestore.failover.handover import hand_back, local_ledger, lost_members
from statestore.failover.own import OwnRequests
from statestore.feed import GrantFeeds
from statestore.last_seen import LastSeenLoads
from statestore.ledger import upkeep
from statestore.memory import MemoryPool, wall_clock_ms
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveOutcome, ReserveStatus
from statestore.stream import Stream

FIRST_PROBE_S = 0.05
LONGEST_PROBE_S = 1.0
STEADY_S = 5.0
"""A store that is away again sooner than this after a hand-over was not really back: its probes go on getting rarer."""
HAND_OVER_TIMEOUT_S = 10.0
GRANTS_RETRY_S = 0.5

_DISPATCHED = ReserveOutcome(ReserveStatus.DISPATCHED)

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class FailoverPool(SharedCalls):
    """``PoolStore`` for a replica. Calls of requests never raise StoreError once members are known;
    heartbeats, snapshots, operators' and leaders' calls do: a ledger of one replica says nothing of the fleet."""

    def __init__(
        self,
        primary: PoolStore,
        scheduling: SchedulingSettings,
        *,
        clock: Clock | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        super().__init__(primary)
        self.name = primary.name
        self._scheduling = scheduling
        self._clock = clock if clock is not None else RealClock()
        self._now_ms = now_ms
        self._feeds = GrantFeeds()
        self._own = OwnRequests()
        self._known: Membership | None = None
        self._last_seen = LastSeenLoads()
        self._sequence = 0
        self._local: MemoryPool | None = None
        self._replica_ids: set[str] = set()
        """Whose requests come through here: in practice this process's one."""
        self._beat: tuple[str, int, Mapping[str, str]] | None = None
        """The last heartbeat: repeated at a hand-over, before a reaper takes this replica for dead."""
        self._settled: asyncio.Event | None = None
        self._calls_under_way = 0
        self._quiet = asyncio.Event()
        """What a hand-over waits for: no call under way."""
        self._early_grants: list[tuple[str, Grant]] = []
        self._returning: asyncio.Task[None] | None = None
        self._probes = 0
        """In a row, without a store that was steady in between."""
        self._back_s = float("-inf")
        """When the last hand-over succeeded."""
        self._listeners: dict[str, asyncio.Task[None]] = {}

    @property
    def degraded(self) -> bool:
        return self._local is not None

    async def close(self) -> None:
        """Stop probing and listening; grants iterators end."""
        tasks = [*self._listeners.values(), *([self._returning] if self._returning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._feeds.close_all()

    # the life of a request -------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        local = await self._local_pool()
        if local is None:
            try:
                found = await self._primary.membership()
            except StoreError as error:
                local = self._degrade(error)
            else:
                if self._known is None or not lost_members(found, self._known):
                    self._known = found
                    self._last_seen.forget_all_but(found.instances.keys())
                    return found
                local = self._degrade(StoreUnavailableError("the store lost its members"))
        return await local.membership()

    async def observe(self, instance_ids: Sequence[str], chain: Chain, *, horizon: bool = False) -> Observation:
        local = self._local if self._settled is None else await self._local_pool()
        if local is None:
            try:
                seen = await self._primary.observe(instance_ids, chain, horizon=horizon)
            except StoreError as error:
                local = self._degrade(error)
            else:
                if self._trusts(seen):
                    return seen
                local = self._degrade(StoreUnavailableError("the store lost its members"))
        return await local.observe(instance_ids, chain, horizon=horizon)

    def _trusts(self, seen: Observation) -> bool:
        """Whether the store still has its members; if so, what was seen is remembered for a ledger to start from."""
        if self._known is not None and seen.epoch < self._known.epoch:
            return False
        self._last_seen.note(seen.loads)
        self._sequence = max(self._sequence, seen.sequence)
        return True

    async def reserve_idle(
        self, instance_ids: Sequence[str], newcomer: Newcomer
    ) -> tuple[Observation, IdlePlacement | None]:
        self._replica_ids.add(newcomer.replica_id)
        local = self._local if self._settled is None else await self._local_pool()
        if local is None:
            try:
                seen, placement = await self._under_way(self._primary.reserve_idle(instance_ids, newcomer))
            except StoreError as error:
                local = self._degrade(error)
            else:
                if self._trusts(seen):
                    if placement is not None:
                        self._reserved(placement.reservation, _DISPATCHED)
                    return seen, placement
                # What was reserved all the same is over there at the hand-over: this replica's ledger has its own word.
                local = self._degrade(StoreUnavailableError("the store lost its members"))
        return await local.reserve_idle(instance_ids, newcomer)

    async def reserve(self, reservation: Reservation) -> ReserveOutcome:
        self._replica_ids.add(reservation.replica_id)
        local = self._local if self._settled is None else await self._local_pool()
        if local is None:
            try:
                outcome = await self._under_way(self._primary.reserve(reservation))
            except StoreError as error:
                local = self._degrade(error)
            else:
                self._reserved(reservation, outcome)
                return outcome
        return await local.reserve(reservation)

    async def first_token(self, request_id: str, instance_id: str, chain: Chain, *, seen: bool = True) -> bool:
        local = self._local if self._settled is None else await self._local_pool()
        if local is None:
            try:
                released = await self._under_way(self._primary.first_token(request_id, instance_id, chain, seen=seen))
            except StoreError as error:
                local = self._degrade(error)
            else:
                self._own.prefilled(request_id, self._now_ms())
                if self._local is None:
                    return released
                local = self._local  # another call found the store away meanwhile
        return await local.first_token(request_id, instance_id, chain, seen=seen)

    async def finish(
        self,
        request_id: str,
        *,
        replica_id: str | None = None,
        attempt: int | None = None,
        facts: FinishFacts | None = None,
    ) -> bool:
        local = self._local if self._settled is None else await self._local_pool()
        if local is None:
            try:
                released = await self._under_way(
                    self._primary.finish(request_id, replica_id=replica_id, attempt=attempt, facts=facts)
                )
            except StoreError as error:
                local = self._degrade(error)
            else:
                self._own.finished(request_id, attempt)
                if self._local is None:
                    return released
                local = self._local
        return await local.finish(request_id, replica_id=replica_id, attempt=attempt, facts=facts)

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, RequestRecord]:
        local = await self._local_pool()
        if local is None:
            try:
                records = await self._primary.records(request_ids)
            except StoreError as error:
                local = self._degrade(error)
            else:
                for record in records.values():
                    self._own.seen(record, self._now_ms())
                return records
        return await local.records(request_ids)

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        self._beat = (replica_id, lease_ms, info)
        return await self._of_the_fleet(lambda: self._primary.heartbeat(replica_id, lease_ms, info))

    async def retire(self, replica_id: str) -> None:
        self._beat = None
        await super().retire(replica_id)

    async def adopt(self, records: Sequence[RequestRecord]) -> int:
        local = await self._local_pool()
        return await (self._under_way(self._primary.adopt(records)) if local is None else local.adopt(records))

    async def requests_of(self, replica_id: str) -> Sequence[RequestRecord]:
        local = await self._local_pool()
        if local is None:
            try:
                return await self._primary.requests_of(replica_id)
            except StoreError as error:
                local = self._degrade(error)
        return await local.requests_of(replica_id)

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        return await self._of_the_fleet(self._primary.snapshot)

    # grants ----------------------------------------------------------------------------------------------
    def grants(self, replica_id: str) -> Stream[Grant]:
        if replica_id not in self._listeners:
            listening = self._listen(replica_id)
            self._listeners[replica_id] = asyncio.get_running_loop().create_task(listening)
        return self._feeds.open(replica_id)

    async def _listen(self, replica_id: str) -> None:
        while True:
            with contextlib.suppress(StoreError):
                async for grant in self._primary.grants(replica_id):
                    self._granted(replica_id, grant)
            await self._clock.sleep(GRANTS_RETRY_S)

    def _granted(self, replica_id: str, grant: Grant) -> None:
        """A grant of the shared store; while this replica is on its own, its own ledger's word counts instead."""
        if self._settled is not None:
            self._early_grants.append((replica_id, grant))
        elif self._local is None:
            self._own.granted(grant, self._now_ms())
            self._feeds.deliver(replica_id, grant)

    # away and back ---------------------------------------------------------------------------------------
    async def _local_pool(self) -> MemoryPool | None:
        """The ledger to use instead of the store, if any; waits for a hand-over to end."""
        while self._settled is not None:
            await self._settled.wait()
        return self._local

    async def _of_the_fleet(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """What one replica's ledger cannot stand in for. Raises StoreUnavailableError, at once while this replica is on
        its own."""
        if await self._local_pool() is not None:
            raise StoreUnavailableError(f"pool {self.name}: the store is away, this replica is on its own")
        try:
            return await call()
        except StoreError as error:
            self._degrade(error)
            raise

    async def _under_way(self, call: Awaitable[Answer]) -> Answer:
        """A call that changes requests in the store: no hand-over begins before its end."""
        self._calls_under_way += 1
        try:
            return await call
        finally:
            self._calls_under_way -= 1
            if not self._calls_under_way:
                self._quiet.set()

    def _degrade(self, error: StoreError) -> MemoryPool:
        """Start deciding alone. Raises ``error`` if there is nothing known to decide on."""
        if self._local is not None:
            return self._local
        if self._known is None:
            raise error
        _log.warning("pool %s: on its own, without the store: %s", self.name, error)
        own = self._own.records()
        ledger = local_ledger(self._scheduling, self._known, self._last_seen.all(), own, self._now_ms(), self._sequence)
        self._local = MemoryPool(self.name, ledger, self._now_ms, feeds=self._feeds)
        self._local.deliver_grants()
        self._returning = asyncio.get_running_loop().create_task(self._return())
        return self._local

    def _reserved(self, reservation: Reservation, outcome: ReserveOutcome) -> None:
        """The store answered. Where another call found it away meanwhile, the ledger has to know the request too."""
        self._own.reserved(reservation, outcome, self._now_ms(), self._sequence)
        if self._local is not None:
            records = [record for record in self._own.records() if record.request_id == reservation.request_id]
            upkeep.adopt(self._local.ledger, records, self._now_ms())
            self._local.deliver_grants()

    async def _return(self) -> None:
        """Probe the store until a hand-over succeeds; meanwhile nobody leads, so grant who was held too long."""
        if self._clock.monotonic_s() - self._back_s >= STEADY_S:
            self._probes = 0
        while self._local is not None:
            self._probes += 1
            await self._clock.sleep(backoff_s(self._probes, first_s=FIRST_PROBE_S, longest_s=LONGEST_PROBE_S))
            upkeep.grant_overdue(self._local.ledger, self._now_ms())
            self._local.deliver_grants()
            try:
                found = await self._primary.membership()
                async with asyncio.timeout(HAND_OVER_TIMEOUT_S):
                    await self._hand_over(found)
            except (StoreError, TimeoutError) as error:
                if worth_logging(self._probes):
                    _log.info("pool %s: the store is still away, probes=%d: %s", self.name, self._probes, error)
            except Exception:
                _log.exception("pool %s: the hand-over to the store failed, trying again", self.name)

    async def _hand_over(self, found: Membership) -> None:
        local, known = self._local, self._known
        assert local is not None and known is not None
        settled = self._settled = asyncio.Event()
        try:
            while self._calls_under_way:
                self._quiet.clear()
                await self._quiet.wait()
            if self._beat is not None:
                await self._primary.heartbeat(*self._beat)
            await hand_back(local.ledger, self._replica_ids, self._primary, found, known, self._now_ms)
            self._known = await self._primary.membership()
            self._own.replace_all(request.record() for request in local.ledger.requests.values())
            self._local = None
            self._back_s = self._clock.monotonic_s()
            _log.warning("pool %s: the store is back; %d live requests were handed over", self.name, len(self._own))
        finally:
            self._settled = None
            early, self._early_grants = self._early_grants, []
            for replica_id, grant in early:
                self._granted(replica_id, grant)
            settled.set()
