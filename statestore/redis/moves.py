"""Held requests that move to another instance, and live ones that are entered again, as derived changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from scheduling.chain import Chain
from scheduling.instance import InstanceState, Role
from scheduling.legs import serves
from scheduling.queue_order import QueueOrder
from scheduling.request import Counts, Request, RequestState
from statestore.base import MigrateStatus, Migration
from statestore.leases import ReplicaInfo
from statestore.records import INSTANCE
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
            records: list[Command] = [("HGET", each.instance, "record") for each in (source, target)]
            found: Command = ("HMGET", key, *codec.REQUEST_TEXTS, "chain", "block_tokens")
            left, entered, (placed, told, chain, block_tokens) = await self._calls.together([*records, found])
            held = codec.request_from(name, (placed, told))
            if left is None or held is None or (held.state, held.instance_id) != (_HELD, source_id):
                return MigrateStatus.NOT_HELD, refused
            there: dict[str, Any] = {} if entered is None else INSTANCE.fields(entered)
            is_ready = there.get("state") == InstanceState.READY and serves(Role(there["role"]), held.leg)
            if not is_ready or target_id == source_id:
                return MigrateStatus.NOT_READY, refused
            if there["queued_requests"] >= there["max_queued_requests"]:
                return MigrateStatus.QUEUE_FULL, refused
            hit, now_ms = await asyncio.gather(self._hit_blocks(target.kv, chain or b""), self._calls.now_ms())
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
            counts = {
                source_id: _counted(INSTANCE.fields(left), held, -1),
                target_id: _counted(there, moved, 1, now_ms) | {"assigned_tokens": there["assigned_tokens"] + tokens},
            }
            read = (
                (key, "placed", placed),
                (source.instance, "record", left),
                (target.instance, "record", entered),
            )
            return MigrateStatus.MIGRATED, Change(commands, read, fence, counts, counted=True, tells=target_id)

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
            common: list[Command] = [("HGET", instance, "record"), ("HMGET", replicas, *owners)]
            known = [("HGET", keys.request(request.request_id), "placed") for request in requests]
            (record, leases, *standing) = await self._calls.together([*common, *known])
            lost = [each for each, placed in zip(requests, standing, strict=True) if placed is None]
            if record is None or not lost:
                return 0, Change()
            now_ms, counts = await self._calls.now_ms(), INSTANCE.fields(record)
            commands: list[Command] = []
            for request in lost:
                texts = ("placed", codec.placed_of(request), "told", codec.told_of(request))
                commands += [("HSET", keys.request(request.request_id), *texts), self._listed(request)]
                counts |= _counted(counts, request, 1, now_ms)
            read = [(keys.request(request.request_id), "placed", None) for request in lost]
            read += [(instance, "record", record), *zip([replicas] * len(owners), owners, leases, strict=True)]
            commands += self._first_leases(dict(zip(owners, leases, strict=True)), now_ms)
            counts["version"] += len(lost) - 1  # it grows with every change
            return len(lost), Change(commands, read, None, {instance_id: counts}, counted=True)

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


def _counted(kept: Mapping[str, Any], request: Request, sign: int, now_ms: int = 0) -> dict[str, Any]:
    """The counts in an instance's record with a request more, or less."""
    tokens = zip(Counts._fields, request.counts, strict=True)
    counts = {name: kept[name] + sign * each for name, each in tokens}
    listed = "queued_requests" if request.state is _HELD else "running_requests"
    counts[listed] = kept[listed] + sign
    if not _has_work(kept) and _has_work(counts):
        counts["work_since_ms"] = now_ms
    return counts


def _has_work(counts: Mapping[str, int]) -> bool:
    """On time."""
    return counts["pending_tokens"] > counts["deferred_tokens"]
