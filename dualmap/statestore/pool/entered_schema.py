"""The versions that use a pool: each process states its own, and checks the others, before it writes
(``statestore.pool.schema``)."""

from __future__ import annotations

from dualmap.statestore.errors import StoreError, StoreUnavailableError
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.former_books import FormerBooks
from dualmap.statestore.pool.readable import checks_replies
from dualmap.statestore.pool.schema import OLDEST_FIELD, SCHEMA_FIELD, PoolSchema, refuse_older


class EnteredSchema(Changes):
    """The schema that a pool says of itself."""

    @checks_replies
    async def enter(self) -> None:
        """Say in the pool that a process of this version uses it, before anything else is written.

        Raises:
            StoreSchemaError: processes of another version use it, beside which this one must not run.
        """
        keys = self._keys

        async def enter() -> tuple[None, Change]:
            reads = [("HGETALL", key) for key in (keys.meta, keys.replicas, keys.leader)]
            meta, replicas, leader = map(pairs_from, await self._calls.together(reads))
            found, now_ms, led = PoolSchema.of(meta), await self._calls.now_ms(), codec.leadership_from(leader)
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
        await FormerBooks(keys, self._calls).pack()

    async def refuse_newer(self) -> None:
        """Raises StoreSchemaError where newer versions entered meanwhile, beside which this one must not run."""
        try:
            meta = pairs_from(await self._calls.command("HGETALL", self._keys.meta))
        except StoreUnavailableError:
            raise
        except StoreError:  # somebody made it a key of another type: the leader, once elected, deletes it
            return
        PoolSchema.of(meta).refuse_newer(self._keys.pool)
