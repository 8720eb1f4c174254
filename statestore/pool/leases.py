"""Leases: of the leader, and of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from dualmap.statestore.errors import LeaseLostError, StoreError, StoreUnavailableError
from dualmap.statestore.leases import RETIRED, Leadership, Lease, ReplicaInfo
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import reads
from dualmap.statestore.pool.schema import OLDEST_BESIDE, OLDEST_FIELD, SCHEMA, SCHEMA_FIELD, PoolSchema, refuse_older


class Leases(Changes):
    """A share of ``PoolStore``."""

    @reads
    async def enter_schema(self) -> None:
        """Say in the pool that a process of this version uses it, before anything else is written.

        Raises:
            StoreSchemaError: processes of another version use it, beside which this one must not run.
        """
        keys = self._keys

        async def enter() -> tuple[None, Change]:
            reads = [("HGETALL", key) for key in (keys.meta, keys.replicas, keys.leader)]
            meta, replicas, leader = map(pairs_from, await self._calls.together(reads))
            found, now_ms, led = PoolSchema.of(meta), await self._calls.now_ms(), _leadership_from(leader)
            alive = (each for each in codec.replicas_from(replicas) if each.beaten and each.is_alive(now_ms))
            found.refuse_newer(keys.pool)
            leads = {led.owner: led.schema} if led.lease(now_ms) is not None else {}
            refuse_older(keys.pool, {each.replica_id: each.schema for each in alive} | leads)
            entered = found.entered()
            wanted = {SCHEMA_FIELD: b"%d" % entered.newest, OLDEST_FIELD: b"%d" % entered.oldest}
            read = [(keys.meta, name, meta.get(name.encode())) for name in wanted]
            commands = [("HSET", keys.meta, *each) for each in wanted.items()] if entered != found else ()
            return None, Change(commands, read)

        await self._derive(enter)

    async def _refuse_newer(self) -> None:
        """Raises StoreSchemaError where newer versions entered meanwhile, beside which this one must not run."""
        try:
            meta = pairs_from(await self._calls.command("HGETALL", self._keys.meta))
        except StoreUnavailableError:
            raise
        except (
            StoreError
        ):  # somebody made it a key of another type: the leader deletes it, and must be elected for that
            return
        PoolSchema.of(meta).refuse_newer(self._keys.pool)

    @reads
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        """Become leader if no worker leads; renewing is ``renew_lease``. None if another worker leads.

        Raises:
            StoreSchemaError: newer versions use the pool, beside which this one must not run.
        """
        key = self._keys.leader
        await self._refuse_newer()

        async def take() -> tuple[Lease | None, Change]:
            if await self._calls.command("TYPE", key) not in (b"hash", b"none"):  # no worker could lead, and mend it
                await self._make(Change((("DEL", key),)))
            known, now_ms = pairs_from(await self._calls.command("HGETALL", key)), await self._calls.now_ms()
            taken = _leadership_from(known).taken(owner, lease_ms, now_ms, SCHEMA)
            if taken is None:
                return None, Change()
            fields = codec.fields_of(taken)
            read = [(key, name, known.get(name.encode())) for name in fields]
            return taken.lease(now_ms), Change([("HSET", key, *each) for each in fields.items()], read)

        return await self._derive(take)

    @reads
    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        """Extend. Raises LeaseLostError if lost, and StoreSchemaError as ``acquire_lease`` does."""
        await self._refuse_newer()
        expires_ms = await self._calls.now_ms() + lease_ms
        times: Command = (
            *("HSET", self._keys.leader, "owner", lease.owner),
            *("expires_ms", expires_ms, "lease_ms", lease_ms),
        )
        await self._make(Change([times], fence=lease.fence))
        return replace(lease, expires_ms=expires_ms)

    @reads
    async def release_lease(self, lease: Lease) -> None:
        """Step down; harmless if already lost. The fence stays, so that the next one is higher."""
        ended: Command = ("HDEL", self._keys.leader, "owner", "expires_ms", "lease_ms")
        with contextlib.suppress(LeaseLostError):
            await self._make(Change([ended], fence=lease.fence))

    @reads
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        """Renew the replica's lease; False if the store did not know it (first beat, expiry, empty store):
        the replica then enters its live requests again. Raises StoreSchemaError as ``acquire_lease`` does."""
        key, numbers = self._keys.replicas, {SCHEMA_FIELD: SCHEMA, OLDEST_FIELD: OLDEST_BESIDE}
        await self._refuse_newer()

        async def renew() -> tuple[bool, Change]:
            text, now_ms = await self._calls.command("HGET", key, replica_id), await self._calls.now_ms()
            known = codec.lease_of(replica_id, text)
            lease = codec.text_of(ReplicaInfo(replica_id, now_ms + lease_ms, lease_ms, info, schema=SCHEMA))
            renewed: Command = ("HSET", key, replica_id, lease)
            said = [("HSETNX", self._keys.meta, *each) for each in numbers.items()]  # where the store lost it
            is_known = known is not None and known.beaten and known.is_alive(now_ms)
            return is_known, Change((renewed, *said), ((key, replica_id, text),))

        return await self._derive(renew)

    @reads
    async def retire(self, replica_id: str) -> None:
        """End the replica's lease on a clean exit. The entry stays, expired, until a reaper has finished the replica's
        requests and removes it."""
        key, lease = self._keys.replicas, codec.text_of(ReplicaInfo.retired(replica_id))

        async def end() -> tuple[None, Change]:
            text = await self._calls.command("HGET", key, replica_id)
            ended: Command = ("HSET", key, replica_id, lease)
            return None, Change((ended,) if text else (), ((key, replica_id, text),))

        await self._derive(end)

    @reads
    async def expired_replicas(self) -> Mapping[str, bool]:
        """Replicas whose lease ran out; True for those that retired. A replica without a lease is given a first one
        when a request of it is entered, so no request is without."""
        now_ms = await self._calls.now_ms()
        replicas = codec.replicas_from(pairs_from(await self._calls.command("HGETALL", self._keys.replicas)))
        return {each.replica_id: each.expires_ms == RETIRED for each in replicas if not each.is_alive(now_ms)}


def _leadership_from(known: Mapping[bytes, bytes]) -> Leadership:
    """Parse the leadership. If it cannot be read, no worker leads: the fence grows all the same, as the clock does."""
    return Leadership() if codec.unreadable_fields(Leadership(), known) else codec.record_from(Leadership(), known)
