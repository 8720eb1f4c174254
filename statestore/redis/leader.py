"""The leader's share of a pool's calls: leases, queues, migration, hotness, reaping, repair."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import orjson

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad
from statestore.base import Arrival, MigrateStatus, QueueSnapshot, RequestRecord
from statestore.batches import batches
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.leases import RETIRED, Lease
from statestore.reaping import latest_first
from statestore.redis import codec
from statestore.redis.calls import Calls, ClientCalls
from statestore.redis.codec import pairs_from
from statestore.redis.placed import MAX_MOVES

_SCAN_PAGE = 500
_LOADS_PER_CALL = 250
_MAX_WANTED = 1024


class LeaderCalls:
    """Half of ``RedisPool``; see ``statestore.base.PoolStore`` for the contract."""

    def __init__(self, keys: PoolKeys, calls: Calls, terms: bytes, waiting: ClientCalls) -> None:
        self._keys = keys
        self._calls = calls
        self._terms = terms
        """How held requests are granted, as ``shared/terms.lua`` reads it."""
        self._waiting = waiting
        """For the one call that blocks its connection; given up, it closes it."""

    # leadership ------------------------------------------------------------------------------------------
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        reply = await self._calls.script("acquire_lease", (self._keys.leader,), owner, lease_ms)
        return Lease(owner, reply[0], reply[1]) if reply else None

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        expires_ms = await self._calls.script("renew_lease", (self._keys.leader,), lease.fence, lease_ms)
        return Lease(lease.owner, lease.fence, expires_ms)

    async def release_lease(self, lease: Lease) -> None:
        await self._calls.script("release_lease", (self._keys.leader,), lease.fence)

    # queues ----------------------------------------------------------------------------------------------
    async def loads(self) -> Mapping[str, InstanceLoad]:
        return await self._loads_of(await self._instance_ids())

    async def _instance_ids(self) -> list[str]:
        return sorted(member.decode() for member in await self._calls.command("SMEMBERS", self._keys.instances))

    async def _loads_of(self, instance_ids: Sequence[str]) -> dict[str, InstanceLoad]:
        loads: dict[str, InstanceLoad] = {}
        for first in range(0, len(instance_ids), _LOADS_PER_CALL):
            page = instance_ids[first : first + _LOADS_PER_CALL]
            keys = [key for instance_id in page for key in self._keys.account(instance_id).of_load]
            now_ms, *replies = await self._calls.script("read_loads", keys)
            for instance_id, text in zip(page, replies, strict=True):
                if (figures := orjson.loads(text)) is not None:
                    loads[instance_id] = codec.load_from(instance_id, figures, now_ms)
        return loads

    async def queue(self, instance_id: str) -> QueueSnapshot | None:
        now_ms, load, requests = await self._calls.script(
            "read_queue", (self._keys.requests, *self._keys.account(instance_id))
        )
        if (figures := orjson.loads(load)) is None:
            return None
        held = tuple(codec.record_from(text) for text in requests)
        others = sorted({record.alternative_id for record in held if record.alternative_id is not None})
        alternatives = await self._loads_of(others) if others else {}
        return QueueSnapshot(now_ms, codec.load_from(instance_id, figures, now_ms), held, alternatives)

    async def migrate(
        self, request_id: str, source_id: str, target_id: str, *, reason: str, fence: int
    ) -> MigrateStatus:
        keys = self._keys
        reply = await self._calls.script(
            "migrate_request",
            (
                keys.leader,
                keys.requests,
                keys.migrations,
                *keys.account(source_id),
                *keys.account(target_id),
                *keys.granting,
            ),
            self._terms,
            request_id,
            source_id,
            target_id,
            reason,
            fence,
        )
        return MigrateStatus(reply.decode())

    async def grant_overdue(self, *, fence: int) -> int:
        granted = 0
        for batch in batches(await self._instance_ids()):
            granted += sum(await asyncio.gather(*(self._grant_overdue_on(instance_id, fence) for instance_id in batch)))
        return granted

    async def _grant_overdue_on(self, instance_id: str, fence: int) -> int:
        keys = self._keys
        granted = await self._calls.script(
            "grant_overdue",
            (keys.leader, keys.requests, *keys.account(instance_id), *keys.granting),
            self._terms,
            instance_id,
            fence,
        )
        return int(granted)

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        wanted = self._keys.wanted_rebalances
        taken: list[bytes] = []
        if timeout_s > 0:
            # At least a millisecond: 0 would wait for ever.
            first = await self._waiting.command("BZPOPMIN", wanted, max(0.001, timeout_s), timeout_s=timeout_s + 1.0)
            if first is None:
                return ()
            taken.append(first[1])
        taken += (await self._calls.command("ZPOPMIN", wanted, _MAX_WANTED))[::2]
        return [member.decode() for member in taken]

    # hotness ---------------------------------------------------------------------------------------------
    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        entries = await self._calls.command("XRANGE", self._keys.arrivals, f"({after}", "+", "COUNT", limit)
        arrivals = []
        for entry_id, flat in entries:
            fields = pairs_from(flat)
            arrivals.append(Arrival(entry_id.decode(), int(fields[b"at"]), codec.unpack_chain(fields[b"head"])))
        return arrivals

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        keys = (self._keys.meta, self._keys.leader, self._keys.hotness_tree)
        version = await self._calls.script("publish_tree", keys, fence, *codec.tree_arguments(tree, counts))
        return int(version)

    # reaping and repair ----------------------------------------------------------------------------------
    async def expired_replicas(self) -> Mapping[str, bool]:
        now_ms = await self._calls.now_ms()
        replicas = codec.replicas_from(pairs_from(await self._calls.command("HGETALL", self._keys.replicas)))
        return {each.replica_id: each.expires_ms == RETIRED for each in replicas if not each.is_alive(now_ms)}

    async def reap(self, replica_id: str, *, fence: int) -> int:
        reaped = 0
        for record in latest_first(await self.requests_of(replica_id)):
            reaped += await self._reap_request(record, fence)
        keys = (self._keys.leader, self._keys.replicas)
        await self._calls.script("forget_replica", keys, replica_id, fence)
        return reaped

    async def requests_of(self, replica_id: str) -> Sequence[RequestRecord]:
        found: dict[str, RequestRecord] = {}
        cursor = b"0"
        while True:
            cursor, flat = await self._calls.command("HSCAN", self._keys.requests, cursor, "COUNT", _SCAN_PAGE)
            page = codec.records_from(flat[1::2])
            found |= {name: record for name, record in page.items() if record.replica_id == replica_id}
            if int(cursor) == 0:
                return sorted(found.values(), key=lambda record: record.sequence)

    async def _reap_request(self, record: RequestRecord, fence: int) -> int:
        instance_id, keys = record.instance_id, self._keys
        for _ in range(MAX_MOVES):
            reply = await self._calls.script(
                "reap_request",
                (keys.leader, keys.replicas, keys.requests, *keys.account(instance_id), *keys.granting),
                self._terms,
                record.request_id,
                instance_id,
                record.replica_id,
                fence,
            )
            if isinstance(reply, int):
                return reply
            instance_id = reply.decode()
        # Its replica must not be forgotten before it.
        raise StoreUnavailableError(f"request {record.request_id} keeps moving: try again")

    async def repair(self, *, fence: int) -> int:
        keys, repaired = self._keys, 0
        for instance_id in await self._instance_ids():
            repaired += await self._calls.script(
                "repair_instance",
                (keys.leader, keys.requests, *keys.account(instance_id), *keys.granting),
                self._terms,
                instance_id,
                fence,
            )
        return repaired
