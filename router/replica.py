"""A replica's standing in the fleet: its lease, and what it does when the store forgot or leaked something."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from router.context import ReplicaContext
from router.metrics import measured
from router.served_pool import ServedPool
from statestore.base import PoolSnapshot, RequestRecord
from statestore.batches import for_each
from statestore.errors import StoreError
from statestore.reaping import latest_first
from statestore.settings import PoolSettings

log = logging.getLogger(__name__)

BEATS_PER_LEASE = 3


class Replica:
    """Keeps the replica known in one pool."""

    def __init__(self, pool: ServedPool, context: ReplicaContext, info: Mapping[str, str]) -> None:
        self._pool = pool
        self._context = context
        self._info = {**info, "scheduling": pool.scheduling.fingerprint}
        self._suspects: frozenset[tuple[str, int]] = frozenset()
        self._reachable = True
        self._owes_restoring = False
        """The store did not know the lease, and has not been given back since what it may have lost. Remembered,
        because a beat enters the lease: the next one finds itself known."""

    @property
    def _settings(self) -> PoolSettings:
        return self._pool.settings

    async def join(self) -> None:
        """Load the view, release what a former process of this id left behind, and take the lease; enter the
        configured instances if the store knows none at all.

        A store with members is the workers' business: what was learned or removed there at run time stays.

        Raises:
            StoreUnavailableError: the store is out of reach.
        """
        await self._put_missing_members()
        await self._pool.view.refresh()
        stored = await self._snapshot()
        self._warn_of_others(stored)
        await self._release_former(stored)
        await self._beat()

    def _warn_of_others(self, snapshot: PoolSnapshot) -> None:
        """Who shares queues and learned rates must order and read them alike."""
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

    async def _release_former(self, stored: PoolSnapshot) -> None:
        """Nothing is live here yet: what the store has is of a process that was killed, and whose lease this one
        renews, so that no reaper will see to it."""
        left = self._over_here(stored.requests)
        finish = partial(self._pool.store.finish, replica_id=self._context.replica_id)
        await for_each(latest_first(left), lambda record: finish(record.request_id, attempt=record.attempt))
        if left:
            log.warning("pool %s: released %d requests of this replica's past", self._settings.name, len(left))

    async def _put_missing_members(self) -> None:
        """Fill a store that has no members: with those last seen there, else with the configured ones."""
        if (await self._pool.store.membership()).instances:
            return
        specs = tuple(self._pool.view.last_members.values())
        for spec in specs or (instance.spec() for instance in self._settings.instances):
            await self._pool.store.put_instance(spec)

    async def keep_lease(self) -> None:
        """Renew the lease a few times per lease, and give back what the store may have lost, as often as it takes.
        Runs until cancelled."""
        lease_s = self._context.settings.replica_lease_s
        while True:
            await self._context.clock.sleep(lease_s / BEATS_PER_LEASE)
            failing = "the lease could not be renewed"
            try:
                if not await self._beat():
                    self._owes_restoring = True
                failing = "what the store may have lost could not be given back, and is tried again"
                if self._owes_restoring:
                    await self.restore()
                    self._owes_restoring = False
            except StoreError as error:
                log.warning("pool %s: %s: %s", self._settings.name, failing, error)

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
        if self._pool.store.degraded:
            return "local"
        return "ok" if self._reachable else "unreachable"

    async def restore(self) -> None:
        """Members first, if the store has none at all; then the live requests of this replica, and no others.

        A store that has members was not emptied: an instance that is missing there was removed on purpose. One that
        came back from an older snapshot has requests that are over; others end while they are entered.
        """
        pool = self._pool
        await self._put_missing_members()
        await pool.view.refresh()
        snapshot = await self._snapshot()
        self._release(self._over_here(snapshot.requests))
        records = [
            record
            for live in self._context.live
            if live.pool_name == self._settings.name and (record := live.record(snapshot.now_ms)) is not None
        ]
        adopted = await pool.store.adopt(records) if records else 0
        if adopted:
            log.warning("pool %s: the store had lost %d live requests; they are back", self._settings.name, adopted)
        self._release([record for record in records if record.request_id not in self._context.live])

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
        leftover = {(record.request_id, record.sequence): record for record in self._over_here(await self._requests())}
        found = self._suspects.intersection(leftover)
        self._suspects = frozenset(leftover) - found
        self._release([leftover[each] for each in found])
        return len(found)

    def _over_here(self, stored: Sequence[RequestRecord]) -> list[RequestRecord]:
        """This replica's requests in the store that are over here, with no release on its way."""
        context = self._context
        return [
            record
            for record in stored
            if record.replica_id == context.replica_id and context.live.is_free(record.request_id)
        ]

    def _release(self, leftover: Sequence[RequestRecord]) -> None:
        context = self._context
        finish = partial(self._pool.store.finish, replica_id=context.replica_id)
        for record in leftover:
            context.outbox.post(partial(finish, record.request_id, attempt=record.attempt))
        if leftover:
            context.metrics.reconciled.inc(len(leftover))
            log.warning("pool %s: released %d leftover requests", self._settings.name, len(leftover))

    async def _snapshot(self) -> PoolSnapshot:
        return await measured(self._context.metrics.store_calls["snapshot"], self._pool.store.snapshot())

    async def _requests(self) -> Sequence[RequestRecord]:
        call = self._context.metrics.store_calls["requests_of"]
        return await measured(call, self._pool.store.requests_of(self._context.replica_id))

    async def retire(self) -> None:
        """Give the lease up, on a clean exit."""
        try:
            await self._pool.store.retire(self._context.replica_id)
        except StoreError as error:
            log.warning("pool %s: the lease stays until it runs out: %s", self._settings.name, error)
