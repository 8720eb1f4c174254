"""A replica's standing in the fleet: its lease, and what it does when the store forgot or leaked something."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from router.context import ReplicaContext
from router.metrics import measured
from router.served_pool import ServedPool
from statestore.base import PoolSnapshot
from statestore.errors import StoreError
from statestore.failover import FailoverPool
from statestore.settings import PoolSettings

log = logging.getLogger(__name__)

BEATS_PER_LEASE = 3


class Replica:
    """Keeps the replica known in one pool."""

    def __init__(self, pool: ServedPool, context: ReplicaContext, info: Mapping[str, str]) -> None:
        self._pool = pool
        self._context = context
        self._info = info
        self._suspects: frozenset[tuple[str, int]] = frozenset()
        self._reachable = True

    @property
    def _settings(self) -> PoolSettings:
        return self._pool.settings

    async def join(self) -> None:
        """Load the view and take the lease; enter the configured instances if the store knows none at all.

        A store with members is the workers' business: what was learned or removed there at run time stays.

        Raises:
            StoreUnavailableError: the store is out of reach.
        """
        await self._put_missing_members()
        await self._pool.view.refresh()
        await self._beat()

    async def _put_missing_members(self) -> None:
        """Fill a store that has no members: with those last seen there, else with the configured ones."""
        if (await self._pool.store.membership()).instances:
            return
        specs = tuple(self._pool.view.last_members.values())
        for spec in specs or (instance.spec() for instance in self._settings.instances):
            await self._pool.store.put_instance(spec)

    async def keep_lease(self) -> None:
        """Renew the lease a few times per lease. Runs until cancelled."""
        lease_s = self._context.settings.replica_lease_s
        while True:
            await self._context.clock.sleep(lease_s / BEATS_PER_LEASE)
            try:
                await self.beat()
            except StoreError as error:
                log.warning("pool %s: the lease could not be renewed: %s", self._settings.name, error)

    async def beat(self) -> None:
        """Renew the lease; if the store did not know it, give back what the store may have lost."""
        if not await self._beat():
            await self.restore()

    async def _beat(self) -> bool:
        context = self._context
        lease_ms = round(context.settings.replica_lease_s * 1000)
        info = {**self._info, "requests": str(len(context.live))}
        call = context.metrics.store_calls["heartbeat"]
        self._reachable = False
        known = await measured(call, self._pool.store.heartbeat(context.replica_id, lease_ms, info))
        self._reachable = True
        return known

    @property
    def store_state(self) -> str:
        """``ok``; ``unreachable`` since the last heartbeat failed; ``local`` while this replica decides alone."""
        store = self._pool.store
        if isinstance(store, FailoverPool) and store.degraded:
            return "local"
        return "ok" if self._reachable else "unreachable"

    async def restore(self) -> None:
        """Members first, if the store has none at all; then the live requests of this replica.

        A store that has members was not emptied: an instance that is missing there was removed on purpose.
        """
        pool = self._pool
        await self._put_missing_members()
        await pool.view.refresh()
        snapshot = await self._snapshot()
        records = [
            record
            for live in self._context.live
            if live.pool_name == self._settings.name and (record := live.record(snapshot.now_ms)) is not None
        ]
        adopted = await pool.store.adopt(records) if records else 0
        if adopted:
            log.warning("pool %s: the store had lost %d live requests; they are back", self._settings.name, adopted)

    async def reconcile_all(self) -> None:
        """Look for leftovers now and then. Runs until cancelled."""
        while True:
            await self._context.clock.sleep(self._context.settings.reconcile_s)
            self._pool.forget_departed()
            try:
                await self.reconcile()
            except StoreError as error:
                log.warning("pool %s: leftovers could not be looked for: %s", self._settings.name, error)

    async def reconcile(self) -> int:
        """Release what the store still keeps of this replica although it is over here; returns how many.

        A release can be lost: the outbox was full, or a reservation took effect after its caller had given up.
        Only what was left over at two looks in a row goes, because a release may just be on its way.
        """
        context = self._context
        snapshot = await self._snapshot()
        leftover = {
            (record.request_id, record.sequence): record
            for record in snapshot.requests
            if record.replica_id == context.replica_id and record.request_id not in context.live
        }
        found = self._suspects.intersection(leftover)
        self._suspects = frozenset(leftover) - found
        finish = partial(self._pool.store.finish, replica_id=context.replica_id)
        for record in (leftover[each] for each in found):
            context.outbox.post(partial(finish, record.request_id, attempt=record.attempt))
        if found:
            context.metrics.reconciled.inc(len(found))
            log.warning("pool %s: released %d leftover requests", self._settings.name, len(found))
        return len(found)

    async def _snapshot(self) -> PoolSnapshot:
        return await measured(self._context.metrics.store_calls["snapshot"], self._pool.store.snapshot())

    async def retire(self) -> None:
        """Give the lease up, on a clean exit."""
        try:
            await self._pool.store.retire(self._context.replica_id)
        except StoreError as error:
            log.warning("pool %s: the lease stays until it runs out: %s", self._settings.name, error)
