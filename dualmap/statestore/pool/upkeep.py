"""Upkeep of the store: requests of dead replicas, counts that drifted, and entries that cannot be read, as somebody
changed them by hand.

An entry that cannot be read is taken out, so that the process that knows it enters it again: a worker or a replica a
member, the leader what it learned and its tree. What would not come again is written: counters of the pool, the record
of an instance that is described, and a lease, until it is known whether its replica lives.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Final, Protocol

import orjson

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.request.metering import used_by_lost
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import TurnEnd
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.scheduling.state.instance import Counts, InstanceSpec, Role
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.call_values import DiscoveryStatus, Transition
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvEventRecord
from dualmap.statestore.leases import RETIRED, Leadership, ReplicaInfo
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.adapters import mended_uses
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, count_from, is_readable, readable_texts
from dualmap.statestore.pool.running_settings import RunningSettings
from dualmap.statestore.pool.runs import Runs
from dualmap.statestore.pool.schema import OLDEST_FIELD, SCHEMA_FIELD, PoolSchema
from dualmap.statestore.pool.tiers import tiers_from
from dualmap.statestore.pool.usage import day_of
from dualmap.statestore.pool.views import Views
from dualmap.statestore.records import (
    INSTANCE,
    REQUEST_TEXTS,
    InstanceRecord,
    described,
    listed_as,
    request_from,
)

log = logging.getLogger(__name__)

_MAX_REPAIRS: Final = 5
_SHOWN_BYTES: Final = 80
_HELD = RequestState.HELD
_RECORDS: Final[Mapping[str, Learned | ScaleRecord | DiscoveryStatus | Leadership]] = {
    "learned": Learned(),
    "scaling": ScaleRecord(),
    "scaling_decode": ScaleRecord(),
    "discovery": DiscoveryStatus(),
    "leader": Leadership(),
}
"""Keys whose fields are those of a record."""
_COUNTERS: Final = (b"epoch", b"tree_version", b"observations")
_NUMBERS: Final = (SCHEMA_FIELD.encode(), OLDEST_FIELD.encode())
_BOOKINGS: Final = (b"booked_since_ms", b"booked_stamp")
_TYPES: Final = {
    **dict.fromkeys(("meta", "instances", "instance_records", "instance_notes", "replicas", "subscribers"), b"hash"),
    **dict.fromkeys(("instance_tiers", "instance_links"), b"hash"),
    **dict.fromkeys(("leader", "learned", "names", "settings", "hotness_tree", "migrations"), b"hash"),
    **dict.fromkeys(("scaling", "scaling_decode", "adapter_records", "adapter_failures"), b"hash"),
    **dict.fromkeys(("prefixes_new", "prefixes_old", "responses_new", "responses_old"), b"hash"),
    "discovery": b"hash",
    **dict.fromkeys(("books", "budgets_allotted", "budgets_wanted", "former_budgets", "former_shares"), b"hash"),
    "usage_lost": b"hash",
    "shares_active": b"zset",
    **dict.fromkeys(("settings_history", "scaling_log"), b"list"),
    **dict.fromkeys(("arrivals", "samples", "usage_log"), b"stream"),
    "rebalance_wanted": b"zset",
    **dict.fromkeys(("runs", "run_turns", "contexts_new", "contexts_old"), b"hash"),
    **dict.fromkeys(("runs_seen", "runs_silent", "runs_waiting", "runs_on_time", "runs_latest", "runs_late"), b"zset"),
    "passed_on": b"zset",
}
_TYPES_OF_INSTANCES: Final = {
    **dict.fromkeys(("queue", "running", "kv", "adapters"), b"zset"),
    "queue_log": b"stream",
    "kv_events": b"hash",
    "kv_names": b"list",
}


class Releases(Protocol):
    """``PoolStore.release``."""

    def __call__(self, releases: Sequence[Release], *, lease: bytes) -> Awaitable[list[Transition]]: ...


class Upkeep(Changes):
    """Repairs that a leader makes."""

    def __init__(
        self, keys: PoolKeys, calls: Calls, views: Views, settings: RunningSettings, release: Releases, runs: Runs
    ) -> None:
        super().__init__(keys, calls)
        self._runs = runs
        self._views = views
        self._settings = settings
        self._release = release

    # replicas that are gone
    @checks_replies
    async def expired_replicas(self) -> Mapping[str, bool]:
        """Replicas whose lease ran out; True for those that retired. A replica without a lease is given a first one
        when a request of it is entered, so no request is without."""
        now_ms = await self._calls.now_ms()
        replicas = codec.replicas_from(pairs_from(await self._calls.command("HGETALL", self._keys.replicas)))
        return {each.replica_id: each.expires_ms == RETIRED for each in replicas if not each.is_alive(now_ms)}

    @checks_replies
    async def reap(self, replica_id: str, *, fence: int) -> int:
        """Finish every request and every turn of an expired replica, and forget it; returns how many. Atomic for
        each request: a replica that comes back halfway keeps the rest, and one that is alive is left alone."""
        await self._make(Change(fence=fence))
        key, now_ms = self._keys.replicas, await self._calls.now_ms()
        text = await self._calls.command("HGET", key, replica_id)
        lease = codec.lease_of(replica_id, text)
        if lease is None or lease.is_alive(now_ms):
            return 0
        requests = await self._views.requests_of(replica_id)
        known = {request.request_id for request in requests}
        left = [Release(each.request_id, replica_id=replica_id, used=used_by_lost(each, known)) for each in requests]
        # Releases are bound to the lease as it was read: a replica that renews it meanwhile keeps the rest.
        transitions = await self._release(left, lease=text)
        turns = [TurnEnd(each, replica_id) for each in await self._runs.turns_of(replica_id)]
        await self._release([Release("", replica_id=replica_id, turn=each) for each in turns], lease=text)
        await self._make(Change([("HDEL", key, replica_id)], ((key, replica_id, text),), fence))
        return sum(each.done for each in transitions)

    # what cannot be read, and what does not add up
    @checks_replies
    async def mend(self, *, fence: int) -> int:
        """Mend what cannot be read, except requests and entries of queues, which ``repair`` looks at; returns how much
        that was."""
        mended = await self._mend_types(fence)
        keys = self._keys
        entries: Mapping[str, Callable[[str, bytes], object]] = {
            "names": codec.name_from,
            "adapter_records": codec.adapter_from,
            "adapter_failures": codec.note_from,
            "instance_notes": codec.note_from,
            "instance_tiers": lambda _, text: tiers_from(text),
            "instance_links": lambda _, text: count_from(text),
            "hotness_tree": codec.hot_prefix_from,
            "migrations": lambda _, text: count_from(text),
            "subscribers": codec.replica_from,
            "settings": self._settings.override_from,
            "instances": codec.spec_from,
        }
        for name, parse in entries.items():
            found = await self._all_of(getattr(keys, name))
            wrong = {each: text for each, text in found.items() if not is_readable(partial(_entry, each, text, parse))}
            mended += await self._replace(getattr(keys, name), wrong, None, fence)
        for name, usual in _RECORDS.items():
            found = await self._all_of(getattr(keys, name))
            wrong = {each: found[each] for each in codec.unreadable_fields(usual, found)}
            mended += await self._replace(getattr(keys, name), wrong, None, fence)
        mended += await self._mend_counters(fence) + await self._mend_leases(fence)
        return mended + await self._mend_instances(fence)

    async def _all_of(self, key: bytes) -> dict[bytes, bytes]:
        return pairs_from(await self._calls.command("HGETALL", key))

    async def _replace(self, key: bytes, wrong: Mapping[bytes, bytes], right: bytes | None, fence: int) -> int:
        """Write this in the place of each field, or take it out, if it still stands as it was read; an empty one may
        not be there."""
        for name, text in wrong.items():
            log.error(
                "unreadable state mended key=%s field=%s text=%r now=%s",
                key.decode(),
                name.decode(errors="backslashreplace"),
                text[:_SHOWN_BYTES],
                None if right is None else right.decode(),
            )
            command = ("HDEL", key, name) if right is None else ("HSET", key, name, right)
            stands = ((key, name.decode(), text),) if text and is_readable(name.decode) else ()
            await self._make(Change((command,), stands, fence))
        return len(wrong)

    async def _mend_types(self, fence: int) -> int:
        """Delete keys of another type than this fleet writes: nothing in them is the fleet's."""
        keys, mended = self._keys, 0
        wanted: dict[bytes, bytes] = {getattr(keys, name): kind for name, kind in _TYPES.items()}
        wanted |= {keys.least_loaded(role): b"zset" for role in Role}
        wanted[keys.usage(day_of(await self._calls.now_ms()).isoformat())] = b"hash"
        kinds = await self._calls.together([("TYPE", key) for key in wanted])
        listed = dict(zip(wanted, kinds, strict=True))[keys.instances] == b"hash"
        members = await self._calls.command("HKEYS", keys.instances) if listed else ()
        of_members = {
            getattr(keys, name)(member.decode(errors="replace")): kind
            for member in members
            for name, kind in _TYPES_OF_INSTANCES.items()
        }
        if of_members:
            kinds += await self._calls.together([("TYPE", key) for key in of_members])
        for (key, right), kind in zip((wanted | of_members).items(), kinds, strict=True):
            if kind not in (b"none", right):
                log.error("unreadable state mended key=%s: it was a %s, and is deleted", key.decode(), kind.decode())
                await self._make(Change(mistyped={key: right}, fence=fence))
                mended += 1
        return mended

    async def _mend_counters(self, fence: int) -> int:
        """A counter continues from the clock: ahead of all that was counted to before. The numbers of the schema are
        written again with the next heartbeat."""
        key = self._keys.meta
        found, now = await self._all_of(key), b"%d" % await self._calls.now_ms()
        kept = {name: text for name, text in found.items() if name in _COUNTERS}
        wrong = {name: text for name, text in kept.items() if not is_readable(partial(count_from, text))}
        numbers = {} if PoolSchema.of(found).is_known else {name: found[name] for name in _NUMBERS if name in found}
        return await self._replace(key, wrong, now, fence) + await self._replace(key, numbers, None, fence)

    async def _mend_leases(self, fence: int) -> int:
        """A replica that lives renews its lease; the requests of a dead one are finished once this one has run out."""
        key, mended = self._keys.replicas, 0
        found, now_ms = await self._all_of(key), await self._calls.now_ms()
        for name, text in found.items():
            if not is_readable(partial(_entry, name, text, codec.replica_from)):
                met = codec.text_of(ReplicaInfo.first_seen("", now_ms)) if is_readable(name.decode) else None
                mended += await self._replace(key, {name: text}, met, fence)
        return mended

    async def _mend_instances(self, fence: int) -> int:
        """Records of described instances, whose counts are added up again, and how far KV events were read."""
        keys, mended = self._keys, 0
        specs, records = await self._calls.together([("HGETALL", keys.instances), ("HGETALL", keys.instance_records)])
        known, found = codec.specs_from(pairs_from(specs)), pairs_from(records)
        for instance_id, spec in known.items():
            # Both are entered and removed together: a description without a record has lost it.
            text = found.get(instance_id.encode(), b"")
            right = _mended_record(spec, text)
            if right is not None:
                mended += await self._replace(keys.instance_records, {instance_id.encode(): text}, right, fence)
                await self._repair(instance_id, fence)
                if not text:  # members are those that have both
                    await self._make(Change((("HINCRBY", keys.meta, "epoch", 1),), fence=fence))
            key = keys.kv_events(instance_id)
            events = await self._all_of(key)
            wrong = {name: events[name] for name in codec.unreadable_fields(KvEventRecord(instance_id), events)}
            for name in _BOOKINGS:
                if name in events and not is_readable(partial(count_from, events[name])):
                    wrong[name] = events[name]
            mended += await self._replace(key, wrong, None, fence)
        return mended

    @checks_replies
    async def repair(self, *, fence: int) -> int:
        """Recompute each instance's counts from its requests, atomically for each; returns how many of them were
        wrong. Correct ones are not written."""
        await self._make(Change(fence=fence))
        repaired = 0
        for instance_id in await self._views.instance_ids():
            for _ in range(_MAX_REPAIRS):
                if (outcome := await self._repair(instance_id, fence)) is not None:
                    repaired += outcome
                    break
        return repaired

    async def _repair(self, instance_id: str, fence: int) -> bool | None:
        """Whether it was wrong; None where it changed while it was added up."""
        records, listed = self._keys.instance_records, (self._keys.queue(instance_id), self._keys.running(instance_id))
        used = self._keys.adapters(instance_id)
        reads = [("HGET", records, instance_id), *(("ZRANGE", key, 0, -1) for key in listed)]
        reads.append(("ZRANGE", used, 0, -1, "WITHSCORES"))
        record, queue, running, adapters = await self._calls.together(reads)
        if record is None:
            return False
        queued, ran = readable_texts(queue), readable_texts(running)
        names = [*(entry.rpartition(" ")[0] for entry in queued), *ran]
        found = await self._views.records(names)
        mine = [each for each in found.values() if each.instance_id == instance_id]
        held = {entry: each for each in mine if each.state is _HELD and (entry := listed_as(each)) in queued}
        sent = {each.request_id: each for each in mine if each.state is not _HELD and each.request_id in ran}
        # Entries whose request is gone, elsewhere, unreadable, or not as listed.
        strays: list[Command] = [("ZREM", listed[0], entry) for entry in {*queue} - {*map(str.encode, held)}]
        strays += [("ZREM", listed[1], entry) for entry in {*running} - {*map(str.encode, sent)}]
        damaged = await self._unreadable_requests([name for name in names if name not in found])
        strays += [("DEL", key) for key in damaged]
        if adapters:
            uses = mended_uses(pairs_from(adapters), sent.values(), await self._calls.now_ms())
            strays += [("ZADD", used, score, adapter) for adapter, score in uses.items()]
        sums = asdict(Counts.sum([each.counts for each in (*held.values(), *sent.values())]))
        if not strays and sums.items() <= INSTANCE.fields(record).items():
            return False
        read = [(records, instance_id, record), *((key, "placed", placed) for key, placed in damaged.items())]
        right = Change(strays, read, fence, instances={instance_id: sums}, counted=True)
        return True if await self._make(right) else None

    async def _unreadable_requests(self, names: Sequence[str]) -> dict[bytes, bytes | None]:
        """Keys of requests whose record stands and cannot be read, and what it is."""
        keys = [self._keys.request(name) for name in names]
        texts = await self._calls.together([("HMGET", key, *REQUEST_TEXTS) for key in keys]) if keys else ()
        found = zip(keys, names, texts, strict=True)
        return {key: each[0] for key, name, each in found if any(each) and request_from(name, each) is None}


def _entry(name: bytes, text: bytes, parse: Callable[[str, bytes], object]) -> object:
    return parse(name.decode(), text)


def _mended_record(spec: InstanceSpec, text: bytes) -> bytes | None:
    """The record as it should be, where it is wrong: as the instance is described, and with what can be read of it."""
    usual = InstanceRecord(**described(spec), tokens_per_s=spec.prefill_tokens_per_s)
    try:
        stored = orjson.loads(text)
    except orjson.JSONDecodeError:
        stored = None
    stored = {**INSTANCE.added, **stored} if isinstance(stored, dict) else {}
    fixed, readable = described(spec), dict[str, Any]()
    for each in fields(InstanceRecord):
        given, right = stored.get(each.name), fixed.get(each.name)
        if given == right if each.name in fixed else codec.is_count(given, positive=each.name == "tokens_per_s"):
            readable[each.name] = given
    return replace(usual, **readable).text if len(readable) < len(fields(InstanceRecord)) else None
