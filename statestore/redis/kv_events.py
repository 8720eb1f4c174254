"""KV events on Redis; see ``statestore.kv_events`` for the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import msgpack  # type: ignore[import-untyped]

from statestore.errors import LeaseLostError
from statestore.kv_events import BOOKING_MS, KvChange, KvEventRecord, KvViewStatus
from statestore.leases import ReplicaInfo
from statestore.redis import codec
from statestore.redis.calls import Argument, Command
from statestore.redis.changes import Change, Changes

_CHANGES_PER_CALL = 200
READ_SO_FAR = ("sequence", "published_s", "booked_since_ms", "booked_stamp")
"""Fields of an instance's record that another claim does not begin with where its cache is believed to be empty."""


class KvEventCalls(Changes):
    """A share of ``RedisPool``."""

    async def renew_subscriber(self, worker_id: str, lease_ms: int) -> Sequence[str]:
        key, now_ms = self._keys.subscribers, await self._calls.now_ms()
        if lease_ms > 0:
            lease = ReplicaInfo(worker_id, now_ms + lease_ms, lease_ms, {})
            await self._calls.command("HSET", key, worker_id, codec.lease_text(lease))
        else:
            await self._calls.command("HDEL", key, worker_id)
        known = codec.replicas_from(codec.pairs_from(await self._calls.command("HGETALL", key)))
        ended = [each.replica_id for each in known if not each.is_alive(now_ms)]
        if ended:
            await self._calls.command("HDEL", key, *ended)
        return sorted(each.replica_id for each in known if each.is_alive(now_ms))

    async def kv_event_records(self) -> Mapping[str, KvEventRecord]:
        names = sorted(member.decode() for member in await self._calls.command("SMEMBERS", self._keys.instances))
        if not names:
            return {}
        commands = [("HGETALL", self._keys.kv_events(name)[0]) for name in names]
        replies = await self._calls.together(commands)
        return {name: _record(name, reply) for name, reply in zip(names, replies, strict=True)}

    async def claim_kv_events(self, instance_id: str, worker_id: str) -> KvEventRecord | None:
        key, spec_key = self._keys.kv_events(instance_id)[0], self._keys.instance(instance_id).instance
        reads = [("HGETALL", key), ("HGETALL", self._keys.subscribers), ("HGET", spec_key, "spec")]
        flat, leases, spec = await self._calls.together(reads)
        known, now_ms = _record(instance_id, flat), await self._calls.now_ms()
        subscribers = codec.replicas_from(codec.pairs_from(leases))
        alive = {each.replica_id for each in subscribers if each.is_alive(now_ms)}
        if spec is None or (known.owner != worker_id and known.owner in alive):
            return None
        # It grows even where the instance was removed and added again, so that no fence is ever given twice.
        taken = replace(known, owner=worker_id, fence=max(known.fence + 1, now_ms))
        claim: Command = ("HSET", key, "owner", worker_id, "fence", taken.fence)
        read = ((spec_key, "spec", spec), (key, "fence", b"%d" % known.fence if known.fence else None))
        return taken if await self._make(Change((claim,), read)) else None  # None: another was faster

    async def release_kv_events(self, instance_id: str, fence: int) -> None:
        key = self._keys.kv_events(instance_id)[0]
        await self._make(Change((("HSET", key, "owner", ""),), ((key, "fence", b"%d" % fence),)))

    async def mark_kv_events(
        self, instance_id: str, fence: int, status: KvViewStatus, reason: str = "", *, drop: bool = False
    ) -> None:
        key, names = self._keys.kv_events(instance_id)
        commands: list[Command] = [("HSET", key, "status", status.value, "reason", reason)]
        if drop:
            commands += (("UNLINK", names, self._keys.instance(instance_id).kv), ("HDEL", key, *READ_SO_FAR))
        emptied = {instance_id: {"cached_blocks": 0}} if drop else {}
        if not await self._make(Change(commands, ((key, "fence", b"%d" % fence),), instances=emptied)):
            raise LeaseLostError(f"fence {fence} is no longer the claim of these KV events: claim them again")

    async def kv_names(self, instance_id: str) -> Mapping[bytes, bytes]:
        names: dict[bytes, bytes] = {}
        key, read = self._keys.kv_events(instance_id)[1], 0
        while changes := await self._calls.command("LRANGE", key, read, read + _CHANGES_PER_CALL - 1):
            read += len(changes)
            for packed in changes:
                _enter(names, msgpack.unpackb(packed))
        return names

    async def apply_kv_events(self, instance_id: str, fence: int, change: KvChange) -> int:
        told = (instance_id, fence, change.sequence, repr(change.published_s), BOOKING_MS)
        return int(await self._run("apply_kv_events", *told, *_change_arguments(change)))


def _change_arguments(change: KvChange) -> Iterator[Argument]:
    yield msgpack.packb([each for pair in change.names.items() for each in pair]) if change.names else b""
    yield "1" if change.all_names else ""
    yield len(change.stored)
    for block in change.stored:
        yield block.to_bytes(codec.HASH_BYTES, "big")
    for block in change.removed:
        yield block.to_bytes(codec.HASH_BYTES, "big")


def _enter(names: dict[bytes, bytes], flat: Sequence[bytes]) -> None:
    """One change of names: name, value, …; the value of one that is gone is empty."""
    for name, known in zip(flat[::2], flat[1::2], strict=True):
        if known:
            names[name] = known
        else:
            names.pop(name, None)


def _record(instance_id: str, flat: Sequence[bytes]) -> KvEventRecord:
    return codec.record_from(KvEventRecord(instance_id), codec.pairs_from(flat))
