"""The lease of the worker that leads a pool."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.entered_schema import EnteredSchema
from dualmap.statestore.pool.readable import checks_replies
from dualmap.statestore.pool.schema import SCHEMA


class LeaderLease(Changes):
    """The leader's lease: taken, renewed and given back by workers."""

    def __init__(self, keys: PoolKeys, calls: Calls, schema: EnteredSchema) -> None:
        super().__init__(keys, calls)
        self._schema = schema

    @checks_replies
    async def acquire(self, owner: str, lease_ms: int) -> Lease | None:
        """Become leader if no worker leads; renewing is ``renew``. None if another worker leads.

        Raises:
            StoreSchemaError: newer versions use the pool, beside which this one must not run.
        """
        key = self._keys.leader
        await self._schema.refuse_newer()

        async def take() -> tuple[Lease | None, Change]:
            if await self._calls.command("TYPE", key) not in (b"hash", b"none"):  # no worker could lead, and mend it
                await self._make(Change((("DEL", key),)))
            known, now_ms = pairs_from(await self._calls.command("HGETALL", key)), await self._calls.now_ms()
            taken = codec.leadership_from(known).taken(owner, lease_ms, now_ms, SCHEMA)
            if taken is None:
                return None, Change()
            fields = codec.fields_of(taken)
            # Every field is a condition: of two workers that saw no leader, only one may take the lease.
            read = [(key, name, known.get(name.encode())) for name in fields]
            return taken.lease(now_ms), Change([("HSET", key, *each) for each in fields.items()], read)

        return await self._derive(take)

    @checks_replies
    async def renew(self, lease: Lease, lease_ms: int) -> Lease:
        """Extend. Raises LeaseLostError if lost, and StoreSchemaError as ``acquire`` does."""
        await self._schema.refuse_newer()
        expires_ms = await self._calls.now_ms() + lease_ms
        times: Command = (
            *("HSET", self._keys.leader, "owner", lease.owner),
            *("expires_ms", expires_ms, "lease_ms", lease_ms),
        )
        await self._make(Change([times], fence=lease.fence))
        return replace(lease, expires_ms=expires_ms)

    @checks_replies
    async def release(self, lease: Lease) -> None:
        """Step down; harmless if already lost. The fence stays, so that the next one is higher."""
        ended: Command = ("HDEL", self._keys.leader, "owner", "expires_ms", "lease_ms")
        with contextlib.suppress(LeaseLostError):
            await self._make(Change([ended], fence=lease.fence))
