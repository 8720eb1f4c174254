"""A replica's membership in the fleet: its lease, and recovery when the store lost or leaked requests."""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
from collections.abc import Mapping, Sequence
from operator import itemgetter

from dualmap.router.pool.recovery import left_over, recover_requests, restore_members
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.requests.context import ReplicaContext
from dualmap.router.telemetry.pressure import Pressure, RecentTraffic
from dualmap.router.telemetry.traffic import INFO_FIELD, PROCESS_FIELD, TrafficCounts
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.state.legs import request_id_of
from dualmap.scheduling.state.request import StoredRequest
from dualmap.statestore.call_values import PoolSnapshot
from dualmap.statestore.errors import StoreError
from dualmap.statestore.leases import (
    AVOIDED_FIELD,
    ENDED_FIELD,
    FAULTS_FIELD,
    LIMITED_FIELD,
    LIVE_FIELD,
    LOST_FIELD,
    OVERDUE_FIELD,
    REFUSALS_FIELD,
    REVISIONS_FIELD,
    SHADOWS_FIELD,
    WAITING_FIELD,
)

log = logging.getLogger(__name__)

BEATS_PER_LEASE = 3
REPORTED_COUNTS = 64
"""Refusals by code, and faults by instance and reason, that a heartbeat carries at most."""
RECONCILE_S = 30.0
"""How often leftovers of this replica are looked for."""


class Replica:
    """Keeps the replica known in one pool."""

    def __init__(self, pool: ServedPool, context: ReplicaContext, info: Mapping[str, str]) -> None:
        self._pool = pool
        self._context = context
        self._info = {**info, "scheduling": pool.scheduling.fingerprint, PROCESS_FIELD: secrets.token_hex(4)}
        pool.store.recover_from(self._live, pool.fleet.rates, context.live.is_releasing)
        self._reachable = True
        self._recent = RecentTraffic()
        self._beat_soon = asyncio.Event()
        pool.instance_waiters.on_first = self._beat_soon.set
        self._owes_restoring = False
        """The store did not know the lease, and what it may have lost has not been restored since. Remembered, because
        a heartbeat enters the lease: the next one finds it known."""

    @property
    def _settings(self) -> PoolSettings:
        return self._pool.settings

    async def join(self) -> None:
        """Load the view, release what a former process of this id left behind, and take the lease; enter the
        configured instances if the store knows none at all.

        A store with members is left to the workers: what was learned or removed there at run time stays.

        Raises:
            StoreUnavailableError: the store is out of reach.
            StoreSchemaError: another version uses the pool, beside which this one must not run.
        """
        await self._pool.store.schema.enter()
        await self._put_missing_members()
        await self._pool.view.refresh()
        self._warn_of_others(await self._snapshot())
        await self._recover(0)
        await self._beat()

    def _warn_of_others(self, snapshot: PoolSnapshot) -> None:
        """Replicas that share queues and learned rates must order and read them alike."""
        mine = self._info["scheduling"]
        others = [
            replica.replica_id
            for replica in snapshot.replicas
            if replica.is_alive(snapshot.now_ms) and replica.info.get("scheduling", mine) != mine
        ]
        if others:
            log.warning(
                "pool %s: other scheduling settings than here are in use by %s: give all routers and workers of this"
                " store the same file, or another fleet another store.prefix",
                self._settings.name,
                ", ".join(others),
            )

    async def _recover(self, now_ms: int) -> None:
        """Enter live requests that the store lost again, and finish those that are over. The latter are of a process
        that was killed, whose lease this one renews, so that no reaper finishes them, or of an older snapshot. A
        request that is just being placed, or released, is neither."""
        # The store's list is read before the live ones: a request that is placed in between must not be taken for one
        # that is over.
        stored = await self._requests()
        live = self._live(now_ms)
        known = {record.request_id for record in (*live, *self._over_here(stored))}
        settled = [record for record in stored if record.request_id in known]
        recovered = await recover_requests(self._pool.store, settled, live)
        if recovered.released:
            self._context.metrics.reconciled.inc(recovered.released)
            log.warning("pool %s: released %d requests of the past", self._settings.name, recovered.released)
        if recovered.adopted:
            log.warning("pool %s: entered %d live requests again", self._settings.name, recovered.adopted)
        # These ended while they were entered: their own release may have come before, and found nothing.
        self._release([record for record in live if request_id_of(record.request_id) not in self._context.live])

    def _live(self, now_ms: int) -> list[StoredRequest]:
        """The live requests of this replica in this pool, as the store should know them."""
        ours = (live for live in self._context.live if live.pool is self._pool)
        return [record for live in ours for record in live.records(now_ms)]

    async def _put_missing_members(self) -> None:
        """Fill a store that has no members with those last seen there, else with the configured ones."""
        if (await self._pool.store.membership()).instances:
            return
        last_seen = self._pool.view.last_seen
        configured = [instance.spec() for instance in self._settings.instances]
        members = last_seen.instances.values() if last_seen is not None else configured
        await restore_members(self._pool.store, members, last_seen)

    async def keep_lease(self) -> None:
        """Renew the lease a few times per lease, and restore what the store may have lost, until that succeeds.
        Runs until cancelled."""
        lease_s = self._context.settings.replica_lease_s
        while True:
            await self._pause(lease_s / BEATS_PER_LEASE)
            failing = "the lease could not be renewed"
            try:
                if not await self._beat():
                    self._owes_restoring = True
                failing = "what the store may have lost could not be restored, and is tried again"
                if self._owes_restoring:
                    await self.restore()
                    self._owes_restoring = False
            except StoreError as error:
                log.warning("pool %s: %s: %s", self._settings.name, failing, error)

    async def _pause(self, for_s: float) -> None:
        """Wait for the next beat, or until a request waits for the first instance, of which the leader must know."""
        if self._pool.waiting_room is None:
            await self._context.clock.sleep(for_s)
            return
        waits = (asyncio.ensure_future(self._context.clock.sleep(for_s)), asyncio.ensure_future(self._beat_soon.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()
        self._beat_soon.clear()

    async def _beat(self) -> bool:
        context = self._context
        lease_ms = round(context.settings.replica_lease_s * 1000)
        context.metrics.instruments.fold()
        context.deadlines.report()
        traffic = TrafficCounts.of(self._pool.metrics)
        self._recent.add(context.clock.monotonic_s(), traffic)
        pool, now_s = self._pool, context.clock.monotonic_s()
        lost = pool.evidence.quarantine.lost(now_s) | pool.evidence.breakers.failing()
        avoided = pool.evidence.breakers.avoided(now_s)
        info = {
            **self._info,
            "requests": str(len(context.live)),
            INFO_FIELD: traffic.to_text(),
            OVERDUE_FIELD: str(int(self._pool.metrics.overdue.value)),
            REFUSALS_FIELD: _pairs(
                {code: each.value for (code,), each in context.metrics.refusals.instruments.items()}
            ),
            LIMITED_FIELD: _pairs(context.limit_hits.counts),
            FAULTS_FIELD: _pairs(
                {
                    f"{instance_id}/{reason}": each.value
                    for (name, instance_id, reason), each in context.metrics.faults.instruments.items()
                    if name == self._settings.name
                }
            ),
            LOST_FIELD: " ".join(sorted(lost)),
            AVOIDED_FIELD: ", ".join(f"{name} ({each.state}: {each.reason})" for name, each in sorted(avoided.items())),
        }
        if pool.waiting_room is not None:
            info[WAITING_FIELD] = str(pool.waiting_room.waiting)
            info[LIVE_FIELD] = str(int(pool.metrics.in_flight.value))
            info[ENDED_FIELD] = str(traffic.ended)
        if counted := pool.revision_counts.text:
            info[REVISIONS_FIELD] = counted
        if copied := pool.shadow_counts.text:
            info[SHADOWS_FIELD] = copied
        if pool.tokenizer is not None:
            info["tokens"] = pool.tokenizer.status
        try:
            known = await self._pool.store.heartbeat(context.replica_id, lease_ms, info)
        except StoreError:
            self._reachable = False
            raise
        self._reachable = True
        return known

    @property
    def store_state(self) -> str:
        """``ok``; ``unreachable`` since the last heartbeat failed; ``local`` while this replica decides alone."""
        if self._pool.store.degraded:
            return "local"
        return "ok" if self._reachable else "unreachable"

    def pressure(self) -> Pressure:
        """How the pool copes with the requests of this replica; by its own counts, and without the network."""
        self._context.deadlines.report()
        metrics, slo_s = self._pool.metrics, self._pool.scheduling.slo_ttft_s
        recent, over_s = self._recent.since(self._context.clock.monotonic_s(), TrafficCounts.of(metrics))
        held = self._pool.grant_waiters.held_requests
        return Pressure(recent, over_s, int(metrics.overdue.value), slo_s, held)

    async def restore(self) -> None:
        """Members first, if the store has none at all; then the live requests of this replica, and no others.

        A store that has members was not emptied: an instance that is missing there was removed on purpose. One that
        came back from an older snapshot has requests that are over; others end while they are entered.
        """
        await self._put_missing_members()
        await self._pool.view.refresh()
        await self._recover((await self._snapshot()).now_ms)

    async def reconcile_all(self) -> None:
        """Look for leftovers at intervals. Runs until cancelled."""
        while True:
            await self._context.clock.sleep(RECONCILE_S)
            self._pool.forget_departed()
            try:
                await self.reconcile()
            except StoreError as error:
                log.warning("pool %s: leftovers could not be looked for: %s", self._settings.name, error)

    async def reconcile(self) -> int:
        """Release what the store still keeps of this replica although it is over here; returns how many.

        A release can be lost: the outbox was full. A request that is over here, with no release being sent, and stands
        at a second reading is left over: no call takes effect after it was given up, so none that ends it is to come.
        """
        over = self._over_here(await self._requests())
        if not over:
            return 0
        standing = await self._pool.store.records([record.request_id for record in over])
        leftover = [record for record in self._over_here(over) if _is_same(record, standing.get(record.request_id))]
        self._release(leftover)
        return len(leftover)

    def _over_here(self, stored: Sequence[StoredRequest]) -> list[StoredRequest]:
        """This replica's requests in the store that are over here, with no release being sent."""
        context = self._context
        return [
            record
            for record in stored
            if record.replica_id == context.replica_id and context.live.is_free(request_id_of(record.request_id))
        ]

    def _release(self, leftover: Sequence[StoredRequest]) -> None:
        context = self._context
        for release in left_over(leftover):
            self._pool.outbox.post(release)
        if leftover:
            context.metrics.reconciled.inc(len(leftover))
            log.warning("pool %s: released %d leftover requests", self._settings.name, len(leftover))

    async def _snapshot(self) -> PoolSnapshot:
        return await self._pool.store.snapshot()

    async def _requests(self) -> Sequence[StoredRequest]:
        return await self._pool.store.requests_of(self._context.replica_id)

    async def retire(self) -> None:
        """Give the lease up, on a clean exit."""
        try:
            await self._pool.store.retire(self._context.replica_id)
        except StoreError as error:
            log.warning("pool %s: the lease stays until it runs out: %s", self._settings.name, error)


def _pairs(counts: Mapping[str, float]) -> str:
    """Counts as one text, the largest first."""
    most = heapq.nlargest(REPORTED_COUNTS, counts.items(), key=itemgetter(1))
    return " ".join(f"{name}={value:.0f}" for name, value in most)


def _is_same(record: StoredRequest, standing: StoredRequest | None) -> bool:
    """Whether the second reading found the request of the first one, and not another of its id."""
    return standing is not None and standing.enqueued_ms == record.enqueued_ms
