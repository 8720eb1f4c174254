"""Queues of held requests: looked at, moved between, and filled again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import PLAN_LIMIT, QueueHead
from dualmap.scheduling.queues.rebalance import MOVE_LIMIT, HotQueue, MigrateStatus, Migration
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.request import Counts, RequestState, StoredRequest
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.leases import ReplicaInfo
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change
from dualmap.statestore.pool.members import Members
from dualmap.statestore.pool.readable import reads
from dualmap.statestore.records import (
    HASH_BYTES,
    REQUEST_TEXTS,
    InstanceRecord,
    listed_as,
    placed_of,
    reported_of,
    request_from,
)

_MAX_WANTED = 1024
_ADOPTED_TOGETHER = 100
_HELD = RequestState.HELD


class Queues(Members):
    """A share of ``PoolStore``."""

    def __init__(self, keys: PoolKeys, calls: Calls, scheduling: SchedulingSettings) -> None:
        super().__init__(keys, calls, scheduling)
        self._waiting = calls.another()
        """Connection for the one call that blocks."""

    @reads
    async def loads(self) -> Mapping[str, InstanceLoad]:
        """Loads of every known instance by id, without hits; for sweeps."""
        now_ms = await self._calls.now_ms()
        return self._loads_from(await self._calls.command("HGETALL", self._keys.instance_records), now_ms)

    async def _instance_ids(self) -> list[str]:
        return sorted(member.decode() for member in await self._calls.command("HKEYS", self._keys.instance_records))

    async def _loads_of(self, instance_ids: Sequence[str]) -> dict[str, InstanceLoad]:
        now_ms = await self._calls.now_ms()
        records = await self._calls.command("HMGET", self._keys.instance_records, *instance_ids)
        found = [each for each in zip(instance_ids, records, strict=True) if each[1] is not None]
        return {name: self._reader.load(name, record, now_ms) for name, record in found}

    @reads
    async def queue_head(self, instance_id: str) -> QueueHead | None:
        """The head of an instance's queue, to be planned; None if the instance is unknown."""
        head = ("ZRANGE", self._keys.queue(instance_id), 0, PLAN_LIMIT - 1, "WITHSCORES")
        record, listed = await self._calls.together([("HGET", self._keys.instance_records, instance_id), head])
        if record is None:
            return None
        return codec.queue_head_from((instance_id.encode(), await self._calls.now_ms(), record, listed))

    @reads
    async def queue(self, instance_id: str, limit: int = MOVE_LIMIT) -> HotQueue | None:
        """The head of the instance's queue, up to ``limit`` requests in order, and, read after it, the loads of their
        next best instances; None if unknown."""
        loads = await self._loads_of((instance_id,))
        if instance_id not in loads:
            return None
        listed = await self._calls.command("ZRANGE", self._keys.queue(instance_id), 0, limit - 1)
        found = await self.records([entry.decode().rpartition(" ")[0] for entry in listed])
        held = tuple(each for each in found.values() if each.instance_id == instance_id and each.state is _HELD)
        others = sorted({request.alternative_id for request in held if request.alternative_id is not None})
        alternatives = await self._loads_of(others) if others else {}
        return HotQueue(await self._calls.now_ms(), loads[instance_id], held, alternatives)

    @reads
    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
        """Instances that placements found overloaded since the last call, oldest first; waits up to
        ``timeout_s`` for one. Each is handed out once."""
        wanted = self._keys.rebalance_wanted
        taken: list[bytes] = []
        if timeout_s > 0:
            waits_s = max(0.001, timeout_s)  # 0 would be forever
            try:
                first = await self._waiting.command("BZPOPMIN", wanted, waits_s, timeout_s=timeout_s + 1.0)
            except asyncio.CancelledError:
                self._waiting.hang_up()  # or the server would hand the next one to a caller that has left
                raise
            if first is None:
                return ()
            taken.append(first[1])
        made = await self._make(Change((("ZPOPMIN", wanted, _MAX_WANTED),)))
        taken += made[1][::2] if made else ()
        return [member.decode() for member in taken]

    @reads
    async def migrate(self, request: StoredRequest, target_id: str, *, reason: str, fence: int) -> Migration:
        """Move a held request from its instance to another one's queue. It is counted by the hits there, where its
        chain is known, else with its full prompt. The source becomes its next best instance."""
        name, source_id, refused = request.request_id, request.instance_id, Change(fence=fence)
        keys, key = self._keys, self._keys.request(name)

        async def move() -> tuple[MigrateStatus, Change]:
            found: Command = ("HMGET", key, *REQUEST_TEXTS, "chain", "block_tokens")
            of_target = [("HGET", each, target_id) for each in (keys.instances, keys.instance_records)]
            (placed, told, chain, block_tokens), spec, record = await self._calls.together((found, *of_target))
            held = request_from(name, (placed, told))
            if held is None or (held.state, held.instance_id) != (_HELD, source_id):
                return MigrateStatus.NOT_HELD, refused
            there = None if record is None else InstanceRecord.parse(record)
            if there is None or not there.takes_requests(held.leg) or target_id == source_id:
                return MigrateStatus.NOT_READY, refused
            if there.queued_requests >= there.max_queued_requests:
                return MigrateStatus.QUEUE_FULL, refused
            hit = await self._hit_blocks(keys.kv(target_id), chain or b"")
            tokens = Chain((), int(block_tokens or 1), held.prompt_tokens).uncached_tokens(hit)
            moved = held.moved(target_id, tokens)
            commands: list[Command] = [
                ("ZREM", keys.queue(source_id), listed_as(held)),
                self._listed(moved),
                ("HSET", key, "placed", placed_of(moved)),
                ("HINCRBY", keys.migrations, reason, 1),
            ]
            grown = _growth(moved.counts) | {"assigned_tokens": tokens}
            counts = {source_id: _growth(held.counts, -1), target_id: grown}
            # Records are no condition: those of busy instances change many times while this is derived.
            read = ((key, "placed", placed), (keys.instances, target_id, spec))
            begun = there.begins(moved.counts)
            stamps = {target_id: dict.fromkeys(begun, await self._calls.now_ms())} if begun else {}
            change = Change(commands, read, fence, stamps, counts, counted=True, tells=target_id)
            return MigrateStatus.MIGRATED, change

        status, told = await self._derive_made(move)
        return Migration(status, codec.queue_head_from(told[-1]) if status is MigrateStatus.MIGRATED else None)

    async def _hit_blocks(self, kv: bytes, chain: bytes) -> int:
        """Blocks at the head of a packed chain that are listed; none of one that is unknown, and empty."""
        size = HASH_BYTES
        blocks = [chain[first : first + size] for first in range(0, len(chain), size)]
        stamps = await self._calls.command("ZMSCORE", kv, *blocks) if blocks else ()
        return next((place for place, stamp in enumerate(stamps) if stamp is None), len(stamps))

    @reads
    async def adopt(self, requests: Sequence[StoredRequest]) -> int:
        """Enter live requests that the store may have lost, as they are; known ones stay. Returns how many. Atomic for
        each request. Their chains are unknown, so they keep the tokens that they were placed with."""
        adopted, instance_of = 0, attrgetter("instance_id")
        for instance_id, group in groupby(sorted(requests, key=instance_of), instance_of):
            mine = list(group)
            for first in range(0, len(mine), _ADOPTED_TOGETHER):
                adopted += await self._adopt(instance_id, mine[first : first + _ADOPTED_TOGETHER])
        return adopted

    async def _adopt(self, instance_id: str, requests: Sequence[StoredRequest]) -> int:
        """Enter the requests of one instance."""
        keys, replicas = self._keys, self._keys.replicas
        owners = sorted({request.replica_id for request in requests})

        async def enter() -> tuple[int, Change]:
            common: list[Command] = [("HGET", each, instance_id) for each in (keys.instances, keys.instance_records)]
            common.append(("HMGET", replicas, *owners))
            known = [("HGET", keys.request(request.request_id), "placed") for request in requests]
            (spec, record, leases, *standing) = await self._calls.together([*common, *known])
            lost = [each for each, placed in zip(requests, standing, strict=True) if placed is None]
            if spec is None or record is None or not lost:
                return 0, Change()
            commands: list[Command] = []
            for request in lost:
                texts = ("placed", placed_of(request), "told", reported_of(request))
                commands += [("HSET", keys.request(request.request_id), *texts), self._listed(request)]
            read = [(keys.request(request.request_id), "placed", None) for request in lost]
            read += [(keys.instances, instance_id, spec), *zip([replicas] * len(owners), owners, leases, strict=True)]
            now_ms = await self._calls.now_ms()
            commands += self._first_leases(dict(zip(owners, leases, strict=True)), now_ms)
            counts = Counts.sum(lost)
            stamps = {instance_id: dict.fromkeys(InstanceRecord.parse(record).begins(counts), now_ms)}
            grown = _growth(counts) | {"version": len(lost) - 1}  # it grows with every change
            return len(lost), Change(commands, read, None, stamps, {instance_id: grown}, counted=True)

        return await self._derive(enter)

    def _listed(self, request: StoredRequest) -> Command:
        """The command that lists a request on its instance."""
        if request.state is _HELD:
            queue, rank_ms = self._keys.queue(request.instance_id), self.order.rank_of(request)
            return ("ZADD", queue, rank_ms, listed_as(request))
        return ("ZADD", self._keys.running(request.instance_id), request.dispatched_ms, request.request_id)

    def _first_leases(self, owners: Mapping[str, bytes | None], now_ms: int) -> Iterator[Command]:
        """No request is without a lease: what gives one to replicas that have none that runs."""
        for replica_id, text in owners.items():
            lease = codec.lease_of(replica_id, text)
            if lease is None or not lease.is_alive(now_ms):
                yield ("HSET", self._keys.replicas, replica_id, codec.text_of(ReplicaInfo.met(replica_id, now_ms)))


def _growth(counts: Counts, sign: int = 1) -> dict[str, int]:
    return {name: sign * each for name, each in counts._asdict().items()}
