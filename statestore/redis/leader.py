"""The leader's share of a pool's calls: leases, queues, migration, publications, scaling, reaping, repair."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import orjson

from scheduling.chain import Chain
from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceLoad
from scheduling.learned import Learned
from scheduling.learning import Sample
from scheduling.queue_order import PLAN_LIMIT, QueueHead, QueueOrder
from scheduling.rebalance import HotQueue
from scheduling.request import Counts, Request, RequestState
from scheduling.scale_record import ScaleEntry, ScaleRecord
from statestore.base import Arrival, MigrateStatus, Migration, Release, Transition
from statestore.errors import LeaseLostError
from statestore.keys import PoolKeys
from statestore.leases import RETIRED, Leadership, Lease, ReplicaInfo
from statestore.memory.members import SCALING_LOG
from statestore.records import (
    HASH_BYTES,
    INSTANCE,
    REQUEST_TEXTS,
    InstanceRecord,
    listed_as,
    placed_of,
    request_from,
    told_of,
    unpack_chain,
)
from statestore.redis import codec
from statestore.redis.calls import Argument, Calls, Command
from statestore.redis.changes import Change
from statestore.redis.codec import pairs_from
from statestore.redis.views import Views

_MAX_WANTED = 1024
_MAX_REPAIRS = 5
MAX_RELEASES = 64
"""That share a script at most: it stops everything else."""
_ADOPTED_TOGETHER = 100
_HELD = RequestState.HELD

Entry = TypeVar("Entry")


class LeaderCalls(Views):
    """Half of ``RedisPool``; see ``statestore.base.PoolStore`` for the contract."""

    def __init__(self, keys: PoolKeys, calls: Calls, order: QueueOrder) -> None:
        super().__init__(keys, calls)
        self._order = order
        self._waiting = calls.another()
        """For the one call that blocks its connection."""

    # leadership ------------------------------------------------------------------------------------------
    async def acquire_lease(self, owner: str, lease_ms: int) -> Lease | None:
        key = self._keys.leader

        async def take() -> tuple[Lease | None, Change]:
            known, now_ms = pairs_from(await self._calls.command("HGETALL", key)), await self._calls.now_ms()
            taken = codec.record_from(Leadership(), known).taken(owner, lease_ms, now_ms)
            if taken is None:
                return None, Change()
            fields = codec.fields_of(taken)
            read = [(key, name, known.get(name.encode())) for name in fields]
            return taken.lease(now_ms), Change([("HSET", key, *each) for each in fields.items()], read)

        return await self._derive(take)

    async def renew_lease(self, lease: Lease, lease_ms: int) -> Lease:
        expires_ms = await self._calls.now_ms() + lease_ms
        times: Command = ("HSET", self._keys.leader, "expires_ms", expires_ms, "lease_ms", lease_ms)
        await self._make(Change([times], fence=lease.fence))
        return replace(lease, expires_ms=expires_ms)

    async def release_lease(self, lease: Lease) -> None:
        """The fence stays, so that the next one is higher."""
        ended: Command = ("HDEL", self._keys.leader, "owner", "expires_ms", "lease_ms")
        with contextlib.suppress(LeaseLostError):
            await self._make(Change([ended], fence=lease.fence))

    # queues ----------------------------------------------------------------------------------------------
    async def loads(self) -> Mapping[str, InstanceLoad]:
        return (await self.overview()).loads

    async def _instance_ids(self) -> list[str]:
        return sorted(member.decode() for member in await self._calls.command("HKEYS", self._keys.instance_records))

    async def _loads_of(self, instance_ids: Sequence[str]) -> dict[str, InstanceLoad]:
        now_ms = await self._calls.now_ms()
        records = await self._calls.command("HMGET", self._keys.instance_records, *instance_ids)
        found = [each for each in zip(instance_ids, records, strict=True) if each[1] is not None]
        return {name: self._reader.load(name, record, now_ms) for name, record in found}

    async def queue_head(self, instance_id: str) -> QueueHead | None:
        head = ("ZRANGE", self._keys.queue(instance_id), 0, PLAN_LIMIT - 1, "WITHSCORES")
        record, listed = await self._calls.together([("HGET", self._keys.instance_records, instance_id), head])
        if record is None:
            return None
        return codec.queue_head_from((instance_id.encode(), await self._calls.now_ms(), record, listed))

    async def queue(self, instance_id: str) -> HotQueue | None:
        loads = await self._loads_of((instance_id,))
        if instance_id not in loads:
            return None
        listed = await self._calls.command("ZRANGE", self._keys.queue(instance_id), 0, -1)
        found = await self.records([entry.decode().rpartition(" ")[0] for entry in listed])
        held = tuple(each for each in found.values() if each.instance_id == instance_id and each.state is _HELD)
        others = sorted({request.alternative_id for request in held if request.alternative_id is not None})
        alternatives = await self._loads_of(others) if others else {}
        return HotQueue(await self._calls.now_ms(), loads[instance_id], held, alternatives)

    async def wanted_rebalances(self, timeout_s: float) -> Sequence[str]:
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
        taken += (await self._calls.command("ZPOPMIN", wanted, _MAX_WANTED))[::2]
        return [member.decode() for member in taken]

    # moves ----------------------------------------------------------------------------------------------
    async def migrate(self, request: Request, target_id: str, *, reason: str, fence: int) -> Migration:
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
            # Not the records: those of busy instances change many times while this is derived.
            read = ((key, "placed", placed), (keys.instances, target_id, spec))
            begins = there.begins_work(moved.counts)
            stamps = {target_id: {"work_since_ms": await self._calls.now_ms()}} if begins else {}
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

    async def adopt(self, requests: Sequence[Request]) -> int:
        adopted, instance_of = 0, attrgetter("instance_id")
        for instance_id, group in groupby(sorted(requests, key=instance_of), instance_of):
            mine = list(group)
            for first in range(0, len(mine), _ADOPTED_TOGETHER):
                adopted += await self._adopt(instance_id, mine[first : first + _ADOPTED_TOGETHER])
        return adopted

    async def _adopt(self, instance_id: str, requests: Sequence[Request]) -> int:
        """Those of one instance."""
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
                texts = ("placed", placed_of(request), "told", told_of(request))
                commands += [("HSET", keys.request(request.request_id), *texts), self._listed(request)]
            read = [(keys.request(request.request_id), "placed", None) for request in lost]
            read += [(keys.instances, instance_id, spec), *zip([replicas] * len(owners), owners, leases, strict=True)]
            now_ms = await self._calls.now_ms()
            commands += self._first_leases(dict(zip(owners, leases, strict=True)), now_ms)
            counts = Counts.sum(lost)
            begins = InstanceRecord.parse(record).begins_work(counts)
            stamps = {instance_id: {"work_since_ms": now_ms}} if begins else {}
            grown = _growth(counts) | {"version": len(lost) - 1}  # it grows with every change
            return len(lost), Change(commands, read, None, stamps, {instance_id: grown}, counted=True)

        return await self._derive(enter)

    def _listed(self, request: Request) -> Command:
        """What lists a request on its instance."""
        if request.state is _HELD:
            queue, rank_ms = self._keys.queue(request.instance_id), self._order.rank_of(request)
            return ("ZADD", queue, rank_ms, listed_as(request))
        return ("ZADD", self._keys.running(request.instance_id), request.dispatched_ms, request.request_id)

    def _first_leases(self, owners: Mapping[str, bytes | None], now_ms: int) -> Iterator[Command]:
        """No request is without a lease: what gives one to replicas that have none that runs."""
        for replica_id, text in owners.items():
            lease = codec.lease_of(replica_id, text)
            if lease is None or not lease.is_alive(now_ms):
                yield ("HSET", self._keys.replicas, replica_id, codec.text_of(ReplicaInfo.met(replica_id, now_ms)))

    # logs and publications -------------------------------------------------------------------------------
    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        arrivals = []
        for entry_id, flat in await self._entries(self._keys.arrivals, after, limit):
            values = pairs_from(flat)
            arrivals.append(Arrival(entry_id.decode(), int(values[b"at"]), unpack_chain(values[b"head"])))
        return arrivals

    async def samples(self, after: str, limit: int) -> Sequence[Sample]:
        return [codec.sample_from(*entry) for entry in await self._entries(self._keys.samples, after, limit)]

    async def _entries(self, log: bytes, after: str, limit: int) -> Sequence[tuple[bytes, Sequence[bytes]]]:
        entries: Sequence[tuple[bytes, Sequence[bytes]]] = await self._calls.command(
            "XRANGE", log, f"({after}", "+", "COUNT", limit
        )
        return entries

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        keys = self._keys
        known = codec.tree_from(pairs_from(await self._calls.command("HGETALL", keys.hotness_tree)))
        grows: Command = ("HINCRBY", keys.meta, "tree_version", int(known.hot != tree.hot))
        await self._publish(keys.hotness_tree, codec.tree_fields(tree, counts), grows, fence=fence)
        return int(await self._calls.command("HGET", keys.meta, "tree_version"))

    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], *, fence: int) -> None:
        rates = {instance_id: {"tokens_per_s": rate} for instance_id, rate in tokens_per_s.items()}
        await self._publish(self._keys.learned, codec.fields_of(learned), fence=fence, instances=rates)

    async def _publish(self, key: bytes, fields: Mapping[str, str], *more: Command, **about: Any) -> None:
        """Replace the fields of a key."""
        commands: list[Command] = [("DEL", key), *(("HSET", key, *each) for each in fields.items()), *more]
        await self._make(Change(commands, **about))

    # scaling ---------------------------------------------------------------------------------------------
    async def now_ms(self) -> int:
        return await self._calls.now_ms()

    async def scaling(self) -> ScaleRecord:
        return codec.record_from(ScaleRecord(), pairs_from(await self._calls.command("HGETALL", self._keys.scaling)))

    async def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, *, fence: int) -> None:
        logged = self._logged(self._keys.scaling_log, entry, SCALING_LOG)
        await self._publish(self._keys.scaling, codec.fields_of(record), *logged, fence=fence)

    async def scaling_log(self, limit: int) -> Sequence[ScaleEntry]:
        return await self._last_logged(self._keys.scaling_log, ScaleEntry, limit)

    def _logged(self, log: bytes, entry: Any, most: int) -> tuple[Command, Command]:
        """What adds an entry to a log, a list of JSON by field, and keeps so many of it."""
        return ("LPUSH", log, orjson.dumps(entry)), ("LTRIM", log, 0, most - 1)

    async def _last_logged(self, log: bytes, kind: type[Entry], limit: int) -> list[Entry]:
        """The latest first."""
        lines = await self._calls.command("LRANGE", log, 0, limit - 1) if limit > 0 else ()
        return [kind(**orjson.loads(line)) for line in lines]

    async def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Mapping[str, Sequence[int]]:
        blocks: dict[str, Sequence[int]] = {}
        for name in instance_ids:  # one by one: the store serves requests in between
            newest = await self._calls.command("ZREVRANGE", self._keys.kv(name), 0, limit - 1)
            blocks[name] = unpack_chain(b"".join(newest))
        return blocks

    # the end of requests ---------------------------------------------------------------------------------
    async def expired_replicas(self) -> Mapping[str, bool]:
        now_ms = await self._calls.now_ms()
        replicas = codec.replicas_from(pairs_from(await self._calls.command("HGETALL", self._keys.replicas)))
        return {each.replica_id: each.expires_ms == RETIRED for each in replicas if not each.is_alive(now_ms)}

    async def requests_of(self, replica_id: str) -> Sequence[Request]:
        # From lists of one moment: a request that moves meanwhile is in one of them.
        return (await self.snapshot()).requests_of(replica_id)

    async def reap(self, replica_id: str, *, fence: int) -> int:
        await self._make(Change(fence=fence))
        key, now_ms = self._keys.replicas, await self._calls.now_ms()
        text = await self._calls.command("HGET", key, replica_id)
        lease = codec.lease_of(replica_id, text)
        if lease is None or lease.is_alive(now_ms):
            return 0
        left = [Release(request.request_id, replica_id=replica_id) for request in await self.requests_of(replica_id)]
        told = await self.release(left, lease=text)
        await self._make(Change([("HDEL", key, replica_id)], ((key, replica_id, text),), fence))
        return sum(each.done for each in told)

    async def release(self, releases: Sequence[Release], *, lease: bytes = b"") -> list[Transition]:
        """With a ``lease``, only as long as their replica has this one."""
        told: list[Transition] = []
        for first in range(0, len(releases), MAX_RELEASES):
            parts: list[Argument] = [lease]
            for each in releases[first : first + MAX_RELEASES]:
                attempt = "" if each.attempt is None else each.attempt
                parts += (each.request_id, each.instance_id, each.replica_id, attempt, each.note)
            told += [codec.transition_from(reply) for reply in await self._run("release_requests", *parts)]
        return told

    async def repair(self, *, fence: int) -> int:
        leader = pairs_from(await self._calls.command("HGETALL", self._keys.leader))
        codec.record_from(Leadership(), leader).check(fence, await self._calls.now_ms())
        repaired = 0
        for instance_id in await self._instance_ids():
            for _ in range(_MAX_REPAIRS):
                if (outcome := await self._repair(instance_id, fence)) is not None:
                    repaired += outcome
                    break
        return repaired

    async def _repair(self, instance_id: str, fence: int) -> bool | None:
        """Whether it was wrong; None where it changed while it was added up."""
        records, listed = self._keys.instance_records, (self._keys.queue(instance_id), self._keys.running(instance_id))
        reads = [("HGET", records, instance_id), *(("ZRANGE", key, 0, -1) for key in listed)]
        record, queue, running = await self._calls.together(reads)
        if record is None:
            return False
        queued, ran = {entry.decode() for entry in queue}, {entry.decode() for entry in running}
        found = await self.records([*(entry.rpartition(" ")[0] for entry in queued), *ran])
        mine = [each for each in found.values() if each.instance_id == instance_id]
        held = {entry: each for each in mine if each.state is _HELD and (entry := listed_as(each)) in queued}
        sent = {each.request_id: each for each in mine if each.state is not _HELD and each.request_id in ran}
        # Entries whose request is gone, elsewhere, or not as listed.
        strays: list[Command] = [("ZREM", listed[0], entry) for entry in queued - held.keys()]
        strays += [("ZREM", listed[1], entry) for entry in ran - sent.keys()]
        sums = Counts.sum([*held.values(), *sent.values()])._asdict()
        if not strays and sums.items() <= INSTANCE.fields(record).items():
            return False
        read = ((records, instance_id, record),)
        right = Change(strays, read, fence, instances={instance_id: sums}, counted=True)
        return True if await self._make(right) else None


def _growth(counts: Counts, sign: int = 1) -> dict[str, int]:
    return {name: sign * each for name, each in counts._asdict().items()}
