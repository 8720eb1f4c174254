"""Held requests that move to another instance, and live ones that are entered again, as derived changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from scheduling.chain import Chain
from scheduling.queue_order import QueueOrder
from scheduling.request import Counts, Request, RequestState
from statestore.base import MigrateStatus, Migration
from statestore.leases import ReplicaInfo
from statestore.records import InstanceRecord
from statestore.redis import codec
from statestore.redis.calls import Command
from statestore.redis.changes import Change, Changes

_ADOPTED_TOGETHER = 100
_HELD = RequestState.HELD


class Moves(Changes):
    """A share of ``RedisPool``."""

    _order: QueueOrder

    async def migrate(self, request: Request, target_id: str, *, reason: str, fence: int) -> Migration:
        name, source_id, refused = request.request_id, request.instance_id, Change(fence=fence)
        key, source, target = self._keys.request(name), *map(self._keys.instance, (source_id, target_id))

        async def move() -> tuple[MigrateStatus, Change]:
            found: Command = ("HMGET", key, *codec.REQUEST_TEXTS, "chain", "block_tokens")
            instance: Command = ("HMGET", target.instance, "spec", "record")
            (placed, told, chain, block_tokens), (spec, record) = await self._calls.together((found, instance))
            held = codec.request_from(name, (placed, told))
            if held is None or (held.state, held.instance_id) != (_HELD, source_id):
                return MigrateStatus.NOT_HELD, refused
            there = None if record is None else InstanceRecord.parse(record)
            if there is None or not there.takes_requests(held.leg) or target_id == source_id:
                return MigrateStatus.NOT_READY, refused
            if there.queued_requests >= there.max_queued_requests:
                return MigrateStatus.QUEUE_FULL, refused
            hit = await self._hit_blocks(target.kv, chain or b"")
            tokens = Chain((), int(block_tokens or 1), held.prompt_tokens).uncached_tokens(hit)
            moved = replace(
                held,
                instance_id=target_id,
                uncached_tokens=tokens,
                alternative_id=source_id,
                alternative_uncached_tokens=held.uncached_tokens,
                deferred=False,
            )
            commands: list[Command] = [
                ("ZREM", source.queue, codec.listed_as(held)),
                self._listed(moved),
                ("HSET", key, "placed", codec.placed_of(moved)),
                ("HINCRBY", self._keys.migrations, reason, 1),
            ]
            grown = _growth(moved.counts) | {"assigned_tokens": tokens}
            counts = {source_id: _growth(held.counts, -1), target_id: grown}
            # Not the records: those of busy instances change many times while this is derived.
            read = ((key, "placed", placed), (target.instance, "spec", spec))
            begins = there.begins_work(moved.counts)
            stamps = {target_id: {"work_since_ms": await self._calls.now_ms()}} if begins else {}
            change = Change(commands, read, fence, stamps, counts, counted=True, tells=target_id)
            return MigrateStatus.MIGRATED, change

        status, told = await self._derive_made(move)
        return Migration(status, codec.queue_head_from(told[-1]) if status is MigrateStatus.MIGRATED else None)

    async def _hit_blocks(self, kv: bytes, chain: bytes) -> int:
        """Blocks at the head of a packed chain that are listed; none of one that is unknown, and empty."""
        size = codec.HASH_BYTES
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
        instance, keys, replicas = self._keys.instance(instance_id).instance, self._keys, self._keys.replicas
        owners = sorted({request.replica_id for request in requests})

        async def enter() -> tuple[int, Change]:
            common: list[Command] = [("HMGET", instance, "spec", "record"), ("HMGET", replicas, *owners)]
            known = [("HGET", keys.request(request.request_id), "placed") for request in requests]
            ((spec, record), leases, *standing) = await self._calls.together([*common, *known])
            lost = [each for each, placed in zip(requests, standing, strict=True) if placed is None]
            if spec is None or not lost:
                return 0, Change()
            commands: list[Command] = []
            for request in lost:
                texts = ("placed", codec.placed_of(request), "told", codec.told_of(request))
                commands += [("HSET", keys.request(request.request_id), *texts), self._listed(request)]
            read = [(keys.request(request.request_id), "placed", None) for request in lost]
            read += [(instance, "spec", spec), *zip([replicas] * len(owners), owners, leases, strict=True)]
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
        keys = self._keys.instance(request.instance_id)
        if request.state is _HELD:
            return ("ZADD", keys.queue, self._order.rank_of(request), codec.listed_as(request))
        return ("ZADD", keys.running, request.dispatched_ms, request.request_id)

    def _first_leases(self, owners: Mapping[str, bytes | None], now_ms: int) -> Iterator[Command]:
        """No request is without a lease: what gives one to replicas that have none that runs."""
        for replica_id, text in owners.items():
            lease = codec.lease_of(replica_id, text)
            if lease is None or not lease.is_alive(now_ms):
                yield ("HSET", self._keys.replicas, replica_id, codec.lease_text(ReplicaInfo.met(replica_id, now_ms)))


def _growth(counts: Counts, sign: int = 1) -> dict[str, int]:
    return {name: sign * each for name, each in counts._asdict().items()}
