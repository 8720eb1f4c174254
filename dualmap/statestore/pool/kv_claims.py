"""Claims of the KV events of instances, and changes under a claim; ``statestore.kv_views`` has the words."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.kv_views import BOOKING_MS, KvChange, KvEventRecord, KvViewStatus
from dualmap.statestore.leases import ReplicaInfo
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Command, in_commands
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies
from dualmap.statestore.pool.tiers import named, tier_commands
from dualmap.statestore.records import InstanceRecord, packed_hashes

_CHANGES_PER_CALL = 200
_EXACT = KvViewStatus.EXACT.value.encode()
BOOKED = ("booked_since_ms", "booked_stamp")
"""Fields of an instance's record about what was booked: nothing is, where its cache is believed to be empty."""
READ_SO_FAR = ("sequence", "published_s", "reports_removals", *BOOKED)
"""Fields of an instance's record that another claim does not begin with where its cache is believed to be empty."""


class KvClaims(Changes):
    """Claims of KV events, and what they change. A ``fence`` that is not the current claim's raises LeaseLostError."""

    @checks_replies
    async def renew_subscriber(self, worker_id: str, lease_ms: int) -> Sequence[str]:
        """Renew a subscriber's lease, or end it with 0; returns all whose lease runs, sorted."""
        key, now_ms = self._keys.subscribers, await self._calls.now_ms()
        if lease_ms > 0:
            lease = ReplicaInfo(worker_id, now_ms + lease_ms, lease_ms, {})
            renewed: Command = ("HSET", key, worker_id, codec.text_of(lease))
        else:
            renewed = ("HDEL", key, worker_id)
        await self._make(Change((renewed,)))
        known = codec.replicas_from(codec.pairs_from(await self._calls.command("HGETALL", key)))
        ended = [each.replica_id for each in known if not each.is_alive(now_ms)]
        if ended:
            await self._make(Change((("HDEL", key, *ended),)))
        return sorted(each.replica_id for each in known if each.is_alive(now_ms))

    @checks_replies
    async def records(self) -> Mapping[str, KvEventRecord]:
        """The KV event record of every known instance."""
        names = sorted(member.decode() for member in await self._calls.command("HKEYS", self._keys.instances))
        commands = [("HGETALL", self._keys.kv_events(name)) for name in names]
        replies = await self._calls.together(commands)
        return {name: _record(name, reply) for name, reply in zip(names, replies, strict=True)}

    @checks_replies
    async def claim(self, instance_id: str, worker_id: str) -> KvEventRecord | None:
        """Take the instance over, under a new fence; None if another subscriber whose lease runs has it, or the
        instance is unknown."""
        key, instances = self._keys.kv_events(instance_id), self._keys.instances
        reads = [("HGETALL", key), ("HGETALL", self._keys.subscribers), ("HGET", instances, instance_id)]
        flat, leases, spec = await self._calls.together(reads)
        known, now_ms = _record(instance_id, flat), await self._calls.now_ms()
        subscribers = codec.replicas_from(codec.pairs_from(leases))
        alive = {each.replica_id for each in subscribers if each.is_alive(now_ms)}
        if spec is None or (known.owner != worker_id and known.owner in alive):
            return None
        # It grows even where the instance was removed and added again, so that no fence is ever given twice.
        taken = replace(known, owner=worker_id, fence=max(known.fence + 1, now_ms))
        claim: Command = ("HSET", key, "owner", worker_id, "fence", taken.fence)
        read = ((instances, instance_id, spec), (key, "fence", b"%d" % known.fence if known.fence else None))
        return taken if await self._make(Change((claim,), read)) else None  # None: another was faster

    @checks_replies
    async def release(self, instance_id: str, fence: int) -> None:
        """Give it back: another one continues from the same state. Harmless if already lost."""
        key = self._keys.kv_events(instance_id)
        await self._make(Change((("HSET", key, "owner", ""),), ((key, "fence", b"%d" % fence),)))

    @checks_replies
    async def mark(
        self,
        instance_id: str,
        fence: int,
        status: KvViewStatus,
        reason: str = "",
        *,
        drop: bool = False,
        emptied: Sequence[Tier] = (),
    ) -> None:
        """Change the status; with ``drop``, forget the KV metadata, the names and the sequence as well, and what the
        ``emptied`` tiers had."""
        keys, key = self._keys, self._keys.kv_events(instance_id)
        commands: list[Command] = [("HSET", key, "status", status.value, "reason", reason)]
        if drop:
            dropped = [keys.kv_tier(named(tier, instance_id)) for tier in emptied]
            dropped += (keys.kv_names(instance_id), keys.kv(instance_id))
            commands += (("UNLINK", *dropped), ("HDEL", key, *READ_SO_FAR))
        await self._make_claimed(instance_id, fence, commands)

    async def _make_claimed(
        self, instance_id: str, fence: int, commands: Sequence[Command], changed: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Make a change under the claim of a subscriber, and return what ``_make`` returns. Refuses what a former
        subscriber writes, and what follows from before the instance's cache was forgotten."""
        read = ((self._keys.kv_events(instance_id), "fence", b"%d" % fence),)
        made = await self._make(Change(commands, read, instances={instance_id: changed or {}}))
        if made is None:
            raise LeaseLostError(f"fence {fence} is no longer the claim of these KV events: claim them again")
        return made

    @checks_replies
    async def names(self, instance_id: str) -> Mapping[bytes, bytes]:
        """All names; for a subscriber that continues. Not atomic, and not for the hot path."""
        names: dict[bytes, bytes] = {}
        key, read = self._keys.kv_names(instance_id), 0
        while changes := await self._calls.command("LRANGE", key, read, read + _CHANGES_PER_CALL - 1):
            read += len(changes)
            for packed in changes:
                with contextlib.suppress(*UNREADABLE):  # left out: what it names are unknown blocks
                    _enter(names, msgpack.unpackb(packed))
        return names

    @checks_replies
    async def apply(self, instance_id: str, fence: int, change: KvChange) -> int:
        """Apply a change as a whole, and take overdue bookings back if the view is exact. Returns how
        many of the stored blocks had been booked. Does not change the instance's version."""
        key, names, kv = (of(instance_id) for of in (self._keys.kv_events, self._keys.kv_names, self._keys.kv))
        stamped: list[Command] = []
        for since, blocks in ((codec.CONFIRMED_STAMP, change.stored), (codec.INNER_STAMP, change.inner)):
            stamp = b"%d" % (since + change.sequence % codec.CONFIRMED_STAMP)
            stamped += in_commands(("ZADD", kv), [word for block in packed_hashes(blocks) for word in (stamp, block)])
        commands = stamped + in_commands(("ZREM", kv), packed_hashes(change.removed))
        if change.tiers:
            commands += tier_commands(self._keys, instance_id, change.tiers, await self._calls.now_ms())
            if any(each.removed for each in change.tiers.values()):
                commands.append(("HSET", key, "reports_removals", 1))
        if change.all_names:
            commands.append(("UNLINK", names))
        if change.names:
            pairs = [each for pair in change.names.items() for each in pair]
            commands.append(("RPUSH", names, msgpack.packb(pairs)))
        # The position is written in one transaction with the blocks: a subscriber that continues must find that of
        # exactly these blocks.
        commands.append(("HSET", key, "sequence", change.sequence, "published_s", repr(change.published_s)))
        commands.append(("HMGET", key, "status", "booked_since_ms", "booked_stamp"))
        step = {"hit_step_tokens": change.hit_step_tokens}
        now_ms, *made, bookings = await self._make_claimed(instance_id, fence, commands, step)
        await self._end_bookings(instance_id, fence, bookings, now_ms)
        return len(change.stored) + len(change.inner) - change.turned - int(sum(made[: len(stamped)]))

    async def _end_bookings(self, instance_id: str, fence: int, bookings: Sequence[bytes], now_ms: int) -> None:
        """Take back, where the view is exact, what was booked one to two terms ago and never confirmed."""
        status, since_ms, stamp = bookings
        if status != _EXACT or (since_ms is not None and now_ms - int(since_ms) < BOOKING_MS):
            return
        keys = self._keys
        record = await self._calls.command("HGET", keys.instance_records, instance_id)
        if record is not None:
            begins = ("booked_since_ms", now_ms, "booked_stamp", InstanceRecord.parse(record).kv_stamp)
            commands: list[Command] = [("HSET", keys.kv_events(instance_id), *begins)]
            if stamp is not None:
                commands.append(("ZREMRANGEBYSCORE", keys.kv(instance_id), "-inf", stamp))
            await self._make_claimed(instance_id, fence, commands)


def _enter(names: dict[bytes, bytes], flat: Sequence[bytes]) -> None:
    """One change of names: name, value, …; the value of one that is gone is empty."""
    for name, known in zip(flat[::2], flat[1::2], strict=True):
        if known:
            names[name] = known
        else:
            names.pop(name, None)


def _record(instance_id: str, flat: Sequence[bytes]) -> KvEventRecord:
    return codec.record_from(KvEventRecord(instance_id), codec.pairs_from(flat))
