"""The leader's share of a pool's calls: leases, queues, migration, publications, reaping, repair."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import orjson

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad
from scheduling.learned import Learned
from scheduling.learning import Sample
from scheduling.queue_order import PLAN_LIMIT, QueueHead, QueueOrder
from scheduling.rebalance import HotQueue
from scheduling.request import Request, RequestState
from statestore.base import Arrival, MigrateStatus, Migration
from statestore.batches import batches
from statestore.errors import LeaseLostError
from statestore.keys import PoolKeys
from statestore.leases import RETIRED, Lease, check_fence
from statestore.records import INSTANCE
from statestore.redis import codec
from statestore.redis.calls import Argument, Calls, ClientCalls
from statestore.redis.codec import LoadReader, pairs_from
from statestore.redis.sums import add_up
from statestore.redis.views import Views

_LOADS_PER_CALL = 250
_MAX_WANTED = 1024
_MAX_REPAIRS = 5
_HELD = RequestState.HELD


class LeaderCalls:
    """Half of ``RedisPool``; see ``statestore.base.PoolStore`` for the contract."""

    def __init__(
        self,
        keys: PoolKeys,
        calls: Calls,
        order: QueueOrder,
        waiting: ClientCalls,
    ) -> None:
        self._keys = keys
        self._calls = calls
        self._order = order
        self._waiting = waiting
        """For the one call that blocks its connection; given up, it closes it."""
        self._reader = LoadReader()
        self._views = Views(keys, calls, self._reader)

    def _run(self, script: str, *arguments: Argument) -> Awaitable[Any]:
        return self._calls.script(script, self._keys.base, *arguments)

    # leadership ------------------------------------------------------------------------------------------
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        reply = await self._run("take_lease", owner, lease_ms, "")
        return Lease(owner, reply[0], reply[1]) if reply else None

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        _, expires_ms = await self._run("take_lease", lease.owner, lease_ms, lease.fence)
        return Lease(lease.owner, lease.fence, expires_ms)

    async def release_lease(self, lease: Lease) -> None:
        try:
            await self._run("take_lease", lease.owner, 0, lease.fence)
        except LeaseLostError:
            return

    # queues ----------------------------------------------------------------------------------------------
    async def loads(self) -> Mapping[str, InstanceLoad]:
        return await self._loads_of(await self._instance_ids())

    async def _instance_ids(self) -> list[str]:
        return sorted(member.decode() for member in await self._calls.command("SMEMBERS", self._keys.instances))

    async def _loads_of(self, instance_ids: Sequence[str]) -> dict[str, InstanceLoad]:
        loads: dict[str, InstanceLoad] = {}
        for first in range(0, len(instance_ids), _LOADS_PER_CALL):
            page = instance_ids[first : first + _LOADS_PER_CALL]
            commands = [("HGET", self._keys.instance(name).instance, "record") for name in page]
            now_ms, replies = await self._calls.now_ms(), await self._calls.together(commands)
            for name, record in zip(page, replies, strict=True):
                if record is not None:
                    loads[name] = self._reader.load(name, record, now_ms)
        return loads

    async def queue_head(self, instance_id: str) -> QueueHead | None:
        keys = self._keys.instance(instance_id)
        head = ("ZRANGE", keys.queue, 0, PLAN_LIMIT - 1, "WITHSCORES")
        record, listed = await self._calls.together([("HGET", keys.instance, "record"), head])
        if record is None:
            return None
        return codec.queue_head_from((instance_id.encode(), await self._calls.now_ms(), record, listed))

    async def queue(self, instance_id: str) -> HotQueue | None:
        keys = self._keys.instance(instance_id)
        loads = await self._loads_of((instance_id,))
        if instance_id not in loads:
            return None
        listed = await self._calls.command("ZRANGE", keys.queue, 0, -1)
        found = await self.records([entry.decode().rpartition(" ")[0] for entry in listed])
        held = tuple(each for each in found.values() if each.instance_id == instance_id and each.state is _HELD)
        others = sorted({request.alternative_id for request in held if request.alternative_id is not None})
        alternatives = await self._loads_of(others) if others else {}
        return HotQueue(await self._calls.now_ms(), loads[instance_id], held, alternatives)

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, Request]:
        return await self._views.records(request_ids)

    async def migrate(self, request: Request, target_id: str, *, reason: str, fence: int) -> Migration:
        move = (request.request_id, request.instance_id, target_id, reason, fence, self._order.rank_ms(request.slo_ms))
        status, *queue = await self._run("migrate_request", *move)
        return Migration(MigrateStatus(status.decode()), codec.queue_head_from(queue[0]) if queue else None)

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        wanted = self._keys.rebalance_wanted
        taken: list[bytes] = []
        if timeout_s > 0:
            # At least a millisecond: 0 would wait forever.
            first = await self._waiting.command("BZPOPMIN", wanted, max(0.001, timeout_s), timeout_s=timeout_s + 1.0)
            if first is None:
                return ()
            taken.append(first[1])
        taken += (await self._calls.command("ZPOPMIN", wanted, _MAX_WANTED))[::2]
        return [member.decode() for member in taken]

    # logs and publications -------------------------------------------------------------------------------
    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        arrivals = []
        for entry_id, flat in await self._entries(self._keys.arrivals, after, limit):
            values = pairs_from(flat)
            arrivals.append(Arrival(entry_id.decode(), int(values[b"at"]), codec.unpack_chain(values[b"head"])))
        return arrivals

    async def samples(self, after: str, limit: int) -> Sequence[Sample]:
        return [codec.sample_from(*entry) for entry in await self._entries(self._keys.samples, after, limit)]

    async def _entries(self, log: bytes, after: str, limit: int) -> Sequence[tuple[bytes, Sequence[bytes]]]:
        entries: Sequence[tuple[bytes, Sequence[bytes]]] = await self._calls.command(
            "XRANGE", log, f"({after}", "+", "COUNT", limit
        )
        return entries

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        known = codec.tree_from(pairs_from(await self._calls.command("HGETALL", self._keys.hotness_tree)))
        fields, grows = orjson.dumps(codec.tree_fields(tree, counts)), int(known.hot != tree.hot)
        return int(await self._run("publish_fields", fence, grows, "tree", fields, "{}"))

    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], *, fence: int) -> None:
        fields, rates = orjson.dumps(codec.learned_fields(learned)), orjson.dumps(dict(tokens_per_s))
        await self._run("publish_fields", fence, 0, "learned", fields, rates)

    # the end of requests ---------------------------------------------------------------------------------
    async def expired_replicas(self) -> Mapping[str, bool]:
        now_ms = await self._calls.now_ms()
        replicas = codec.replicas_from(pairs_from(await self._calls.command("HGETALL", self._keys.replicas)))
        return {each.replica_id: each.expires_ms == RETIRED for each in replicas if not each.is_alive(now_ms)}

    async def requests_of(self, replica_id: str) -> Sequence[Request]:
        # From lists of one moment: a request that moves meanwhile is in one of them.
        return (await self._views.snapshot()).requests_of(replica_id)

    async def reap(self, replica_id: str, *, fence: int) -> int:
        reaped = 0
        for batch in batches(await self.requests_of(replica_id)):
            releases = [part for request in batch for part in (request.request_id, "", replica_id, "", "")]
            reaped += sum(reply != 0 for reply in await self._run("release_requests", fence, *releases))
        await self._lease(replica_id, 0, {}, fence=fence)
        return reaped

    async def _lease(
        self, replica_id: str, lease_ms: int, info: Mapping[str, str], *, fence: int | None = None
    ) -> bool:
        told = (lease_ms, orjson.dumps(dict(info)), "" if fence is None else fence, "")
        return bool(await self._run("lease_replica", replica_id, *told))

    async def repair(self, *, fence: int) -> int:
        leader = pairs_from(await self._calls.command("HGETALL", self._keys.leader))
        check_fence(fence, codec.lease_from(leader, await self._calls.now_ms()))
        repaired = 0
        for instance_id in await self._instance_ids():
            for _ in range(_MAX_REPAIRS):
                if (outcome := await self._repair(instance_id, fence)) is not None:
                    repaired += outcome
                    break
        return repaired

    async def _repair(self, instance_id: str, fence: int) -> bool | None:
        """Whether it was wrong; None where it changed while it was added up."""
        keys = self._keys.instance(instance_id)
        record, queue, running = await self._calls.together(
            [
                ("HGET", keys.instance, "record"),
                ("ZRANGE", keys.queue, 0, -1),
                ("ZRANGE", keys.running, 0, -1),
            ]
        )
        if record is None:
            return False
        queued, ran = [entry.decode() for entry in queue], [entry.decode() for entry in running]
        names = [entry.rpartition(" ")[0] for entry in queued] + ran
        found = add_up(instance_id, queued, ran, await self.records(names))
        kept = INSTANCE.fields(record)
        if found.is_right(kept):
            return False
        strays = orjson.dumps(found.stray_queued), orjson.dumps(found.stray_running)
        sums = (instance_id, fence, kept["version"], orjson.dumps(found.sums), *strays)
        return True if await self._run("correct_instance", *sums) else None
