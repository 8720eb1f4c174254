"""KV events on Redis; see ``statestore.kv_events`` for the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]

from statestore.errors import LeaseLostError
from statestore.kv_events import BOOKING_MS, KvChange, KvEventRecord, KvViewStatus
from statestore.redis import codec
from statestore.redis.calls import Argument
from statestore.redis.leader import LeaderCalls

_CHANGES_PER_CALL = 200


class KvEventCalls(LeaderCalls):
    """A share of ``RedisPool``."""

    async def renew_subscriber(self, worker_id: str, lease_ms: int) -> Sequence[str]:
        keys = self._keys
        await self._run("lease_replica", worker_id, lease_ms, "{}", "", "1")
        now_ms = await self._calls.now_ms()
        known = codec.replicas_from(codec.pairs_from(await self._calls.command("HGETALL", keys.subscribers)))
        ended = [each.replica_id for each in known if not each.is_alive(now_ms)]
        if ended:
            await self._calls.command("HDEL", keys.subscribers, *ended)
        return sorted(each.replica_id for each in known if each.is_alive(now_ms))

    async def kv_event_records(self) -> Mapping[str, KvEventRecord]:
        names = sorted(member.decode() for member in await self._calls.command("SMEMBERS", self._keys.instances))
        if not names:
            return {}
        commands = [("HGETALL", self._keys.kv_events(name)[0]) for name in names]
        replies = await self._calls.together(commands)
        return {name: _record(name, reply) for name, reply in zip(names, replies, strict=True)}

    async def claim_kv_events(self, instance_id: str, worker_id: str) -> KvEventRecord | None:
        key = self._keys.kv_events(instance_id)[0]
        flat, leases = await self._calls.together([("HGETALL", key), ("HGETALL", self._keys.subscribers)])
        known, now_ms = _record(instance_id, flat), await self._calls.now_ms()
        subscribers = codec.replicas_from(codec.pairs_from(leases))
        alive = {each.replica_id for each in subscribers if each.is_alive(now_ms)}
        if known.owner != worker_id and known.owner in alive:
            return None
        # It grows even where the instance was removed and added again, so that no fence is ever given twice.
        taken = replace(known, owner=worker_id, fence=max(known.fence + 1, now_ms))
        try:
            fields = ("owner", worker_id, "fence", taken.fence)
            return taken if await self._run("mark_kv_events", instance_id, known.fence or "", "", *fields) else None
        except LeaseLostError:  # another was faster
            return None

    async def release_kv_events(self, instance_id: str, fence: int) -> None:
        try:
            await self._run("mark_kv_events", instance_id, fence, "", "owner", "")
        except LeaseLostError:
            return

    async def mark_kv_events(
        self, instance_id: str, fence: int, status: KvViewStatus, reason: str = "", *, drop: bool = False
    ) -> None:
        fields = ("status", status.value, "reason", reason)
        await self._run("mark_kv_events", instance_id, fence, "1" if drop else "", *fields)

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


def _record(instance_id: str, flat: Any) -> KvEventRecord:
    found = {name.decode(): text.decode() for name, text in codec.pairs_from(flat).items()}
    return KvEventRecord(
        instance_id,
        found.get("owner", ""),
        int(found.get("fence", 0)),
        KvViewStatus(found.get("status", KvViewStatus.ESTIMATE)),
        found.get("reason", ""),
        int(found["sequence"]) if "sequence" in found else None,
        float(found.get("published_s", 0.0)),
    )
