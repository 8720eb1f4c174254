"""The store for one process alone: the ledger behind the asynchronous contract, with grants delivered.

Product code, not a test double: ``memory://`` is a store of one process, without any server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scheduling.chain import Chain
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import (
    Arrival,
    FinishFacts,
    Grant,
    Membership,
    MigrateStatus,
    Observation,
    PoolSnapshot,
    QueueSnapshot,
    RequestRecord,
)
from statestore.feed import GrantFeeds
from statestore.leases import Lease
from statestore.ledger import PoolLedger, upkeep
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveOutcome
from statestore.stream import Stream


def wall_clock_ms() -> int:
    """What Redis ``TIME`` would say on this machine."""
    return time.time_ns() // 1_000_000


class MemoryPool:
    """``PoolStore`` over one ``PoolLedger``. No method gives control away between reading and changing it."""

    degraded = False

    def __init__(
        self,
        name: str,
        ledger: PoolLedger,
        now_ms: Callable[[], int] = wall_clock_ms,
        *,
        feeds: GrantFeeds | None = None,
    ) -> None:
        """Grants go to ``feeds``: the pool's own, or those of whoever else reads them."""
        self.name = name
        self.ledger = ledger
        self._now_ms = now_ms
        self._feeds = feeds if feeds is not None else GrantFeeds()
        self._wanted = asyncio.Event()

    def deliver_grants(self) -> None:
        """Pass on the grants of the last transition; also for those who drive ``ledger`` directly."""
        for replica_id, grant in self.ledger.take_grants():
            self._feeds.deliver(replica_id, grant)

    async def close(self) -> None:
        """End every grants iterator."""
        await self._feeds.close_all()

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        return self.ledger.membership()

    async def put_instance(self, spec: InstanceSpec) -> None:
        self.ledger.put_instance(spec, self._now_ms())
        self.deliver_grants()

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        now_ms = self._now_ms()
        if fence is not None:
            self.ledger.leadership.check(fence, now_ms)
        known = self.ledger.update_instance(instance_id, changes, now_ms)
        self.deliver_grants()
        return known

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
    ) -> bool:
        now_ms = self._now_ms()
        if fence is not None:
            self.ledger.leadership.check(fence, now_ms)
        changed = self.ledger.set_instance_state(instance_id, state, now_ms, expected=expected)
        self.deliver_grants()
        return changed

    async def remove_instance(self, instance_id: str) -> bool:
        return self.ledger.remove_instance(instance_id)

    # the life of a request -------------------------------------------------------------------------------
    async def observe(self, instance_ids: Sequence[str], chain: Chain, *, horizon: bool = False) -> Observation:
        return self.ledger.observe(instance_ids, chain, self._now_ms(), horizon=horizon)

    async def reserve_idle(
        self, instance_ids: Sequence[str], newcomer: Newcomer
    ) -> tuple[Observation, IdlePlacement | None]:
        return self.ledger.reserve_idle(instance_ids, newcomer, self._now_ms())

    async def reserve(self, reservation: Reservation) -> ReserveOutcome:
        outcome = self.ledger.reserve(reservation, self._now_ms())
        if len(self.ledger.wanted):
            self._wanted.set()
        self.deliver_grants()
        return outcome

    async def first_token(self, request_id: str, instance_id: str, chain: Chain, *, seen: bool = True) -> bool:
        released = self.ledger.first_token(request_id, instance_id, chain, self._now_ms(), seen=seen)
        self.deliver_grants()
        return released

    async def finish(
        self,
        request_id: str,
        *,
        replica_id: str | None = None,
        attempt: int | None = None,
        facts: FinishFacts | None = None,
    ) -> bool:
        now_ms = self._now_ms()
        released = self.ledger.finish(request_id, now_ms, replica_id=replica_id, attempt=attempt, facts=facts)
        self.deliver_grants()
        return released

    def grants(self, replica_id: str) -> Stream[Grant]:
        return self._feeds.open(replica_id)

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, RequestRecord]:
        return self.ledger.records(request_ids)

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        return self.ledger.replicas.beat(replica_id, lease_ms, info, self._now_ms())

    async def adopt(self, records: Sequence[RequestRecord]) -> int:
        adopted = upkeep.adopt(self.ledger, records, self._now_ms())
        self.deliver_grants()
        return adopted

    async def requests_of(self, replica_id: str) -> Sequence[RequestRecord]:
        return [record for record in (await self.snapshot()).requests if record.replica_id == replica_id]

    async def retire(self, replica_id: str) -> None:
        self.ledger.replicas.retire(replica_id)

    # the leader's work -----------------------------------------------------------------------------------
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        return self.ledger.leadership.acquire(owner, lease_ms, self._now_ms())

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        return self.ledger.leadership.renew(lease, lease_ms, self._now_ms())

    async def release_lease(self, lease: Lease) -> None:
        self.ledger.leadership.release(lease)

    async def loads(self) -> Mapping[str, InstanceLoad]:
        return self.ledger.loads(self._now_ms())

    async def queue(self, instance_id: str) -> QueueSnapshot | None:
        return self.ledger.queue(instance_id, self._now_ms())

    async def migrate(
        self, request_id: str, source_id: str, target_id: str, *, reason: str, fence: int
    ) -> MigrateStatus:
        now_ms = self._now_ms()
        self.ledger.leadership.check(fence, now_ms)
        status = self.ledger.migrate(request_id, source_id, target_id, reason, now_ms)
        self.deliver_grants()
        return status

    async def grant_overdue(self, *, fence: int) -> int:
        now_ms = self._now_ms()
        self.ledger.leadership.check(fence, now_ms)
        granted = upkeep.grant_overdue(self.ledger, now_ms)
        self.deliver_grants()
        return granted

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        if not len(self.ledger.wanted):
            self._wanted.clear()
            try:
                await asyncio.wait_for(self._wanted.wait(), timeout_s)
            except TimeoutError:
                return ()
        return self.ledger.wanted.take()

    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        return self.ledger.arrivals.after(after, limit)

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        self.ledger.leadership.check(fence, self._now_ms())
        return upkeep.publish_tree(self.ledger, tree, counts)

    async def expired_replicas(self) -> Mapping[str, bool]:
        return self.ledger.replicas.expired(self._now_ms())

    async def reap(self, replica_id: str, *, fence: int) -> int:
        now_ms = self._now_ms()
        self.ledger.leadership.check(fence, now_ms)
        reaped = upkeep.reap(self.ledger, replica_id, now_ms)
        self.deliver_grants()
        return reaped

    async def repair(self, *, fence: int) -> int:
        now_ms = self._now_ms()
        self.ledger.leadership.check(fence, now_ms)
        repaired = upkeep.repair(self.ledger, now_ms)
        self.deliver_grants()
        return repaired

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        return upkeep.snapshot(self.ledger, self._now_ms())


class MemoryStore:
    """Pools by name, made when first asked for; gone with the process."""

    def __init__(self, scheduling: SchedulingSettings, *, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._scheduling = scheduling
        self._now_ms = now_ms
        self._pools: dict[str, MemoryPool] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """End every grants iterator."""
        for pool in self._pools.values():
            await pool.close()

    async def ping(self) -> float:
        return 0.0

    def pool(self, name: str) -> MemoryPool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = MemoryPool(name, PoolLedger(self._scheduling), self._now_ms)
        return pool
