"""Whole views of a pool: members for replicas, everything for people."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.state.request import StoredRequest
from dualmap.statestore.call_values import Membership, Note, PoolOverview, PoolSnapshot
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import KvEventRecord
from dualmap.statestore.leases import RETIRED, Leadership, Lease, ReplicaInfo
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.pool.codec import LoadReader, pairs_from
from dualmap.statestore.pool.readable import checks_replies, count_from, each_readable, readable_texts
from dualmap.statestore.pool.revisions import ROLLOUT, WEIGHTS, rollout_from, weights_from
from dualmap.statestore.pool.running_settings import RunningSettings
from dualmap.statestore.pool.runs import run_memory_from
from dualmap.statestore.pool.schema import PoolSchema
from dualmap.statestore.pool.tiers import tiers_from
from dualmap.statestore.records import REQUEST_TEXTS, request_from

Said = TypeVar("Said")
Meaning = TypeVar("Meaning")
_MAX_CHANGES = 8
_RECORDS_PER_CALL = 500
_Overview = tuple[
    int, Mapping[str, InstanceLoad], tuple[ReplicaInfo, ...], Lease | None, Mapping[str, int], Mapping[str, Note]
]
"""The fields of a ``PoolOverview``."""


def _members_from(said: tuple[Sequence[bytes], Sequence[bytes]]) -> Mapping[str, InstanceSpec]:
    """The instances that have a record."""
    specs, records = pairs_from(said[0]), said[1]
    return codec.specs_from({name: specs[name] for name in specs.keys() & records})


class Views(Changes):
    """Reads in one transaction each, except for the requests. Reading changes nothing in the store, and here only what
    is known of texts that were read."""

    def __init__(self, keys: PoolKeys, calls: Calls, reader: LoadReader, settings: RunningSettings) -> None:
        super().__init__(keys, calls)
        self._reader = reader
        self._settings = settings
        self._last_loads: tuple[Sequence[bytes], int, Mapping[str, InstanceLoad]] = (), 0, {}
        """The records that were read last, when, and the loads made of them: the rounds of one moment read the same."""
        self._read: dict[str, tuple[Any, Any]] = {}
        """The texts of each part of a membership as they were read last, and their meaning."""

    @checks_replies
    async def membership(self) -> Membership:
        """The whole rarely-changing part."""
        keys = self._keys
        given = keys.settings, keys.names, keys.adapter_records
        hashes = (keys.meta, keys.hotness_tree, keys.learned, *given, keys.instances)
        counted: Command = ("HKEYS", keys.instance_records)
        revisions: Command = ("HMGET", keys.revisions, WEIGHTS, ROLLOUT)
        *found, records, (weights, rollout) = await self._calls.together(
            [*(("HGETALL", key) for key in hashes), counted, revisions]
        )
        of_pool, tree, learned, overrides, names, adapters, specs = found
        meta, meaning = pairs_from(of_pool), self._meaning_of
        PoolSchema.of(meta).refuse_newer(keys.pool)
        return Membership(
            count_from(meta.get(b"epoch", b"0")),
            count_from(meta.get(b"tree_version", b"0")),
            meaning("specs", (specs, records), _members_from),
            meaning("tree", tree, lambda flat: codec.tree_from(pairs_from(flat))),
            meaning("learned", learned, lambda flat: codec.record_from(Learned(), pairs_from(flat))),
            meaning("overrides", overrides, lambda flat: self._settings.overrides_from(pairs_from(flat))),
            meaning("names", names, lambda flat: codec.names_from(pairs_from(flat))),
            adapters=meaning("adapters", adapters, lambda flat: codec.adapters_from(pairs_from(flat))),
            revisions=meaning("weights", weights, weights_from),
            rollout=meaning("rollout", rollout, rollout_from),
        )

    def _meaning_of(self, part: str, said: Said, read: Callable[[Said], Meaning]) -> Meaning:
        """Return the meaning of a part of a membership. Members are read every second, and hardly change: the same
        texts mean the same value."""
        known = self._read.get(part)
        if known is None or known[0] != said:
            known = self._read[part] = said, read(said)
        meaning: Meaning = known[1]
        return meaning

    @checks_replies
    async def snapshot(self) -> PoolSnapshot:
        """Everything, for admin and inspect. Its cost grows with the number of live requests."""
        keys = self._keys
        for _ in range(_MAX_CHANGES):
            members = await self._calls.command("HKEYS", keys.instances)
            of_each = [key(name.decode()) for name in members for key in (keys.queue, keys.running)]
            lists = [("ZRANGE", key, 0, -1) for key in of_each]
            more = [("HGETALL", keys.instances), ("HGETALL", keys.instance_tiers), *lists]
            overview, meta, (flat, tiers, *listed) = await self._overview(more)
            specs = pairs_from(flat)
            if specs.keys() == {*members}:
                break
        else:
            raise StoreUnavailableError("the pool's members change faster than they can be read: try again")
        held, sent = (itertools.chain.from_iterable(listed[first::2]) for first in (0, 1))
        names = [*readable_texts(sent), *(entry.rpartition(" ")[0] for entry in readable_texts(held))]
        requests = (await self.records(names)).values()
        followed = await self._calls.together([("HGETALL", keys.kv_events(name.decode())) for name in members])
        return PoolSnapshot(
            *overview,
            epoch=count_from(meta.get(b"epoch", b"0")),
            tree_version=count_from(meta.get(b"tree_version", b"0")),
            instances=codec.specs_from(specs),
            requests=tuple(sorted(requests, key=lambda request: (request.enqueued_ms, request.request_id))),
            kv_views={
                name.decode(): codec.record_from(KvEventRecord(name.decode()), pairs_from(flat))
                for name, flat in zip(members, followed, strict=True)
            },
            tiers=each_readable(pairs_from(tiers), lambda _, text: tiers_from(text)),
        )

    @checks_replies
    async def overview(self) -> PoolOverview:
        """Loads, replicas and leader, and what is known of caches, for metrics and live displays."""
        keys = self._keys
        found, _, (tiers, subscribers, runs) = await self._overview(
            [("HGETALL", keys.instance_tiers), ("HLEN", keys.subscribers), ("HGETALL", keys.runs)]
        )
        overview = PoolOverview(
            *found,
            tiers=each_readable(pairs_from(tiers), lambda _, text: tiers_from(text)),
            runs=run_memory_from(pairs_from(runs)),
        )
        return replace(overview, doubts=await self._doubts([*overview.loads])) if subscribers else overview

    async def _doubts(self, instance_ids: Sequence[str]) -> Mapping[str, str]:
        """Why the KV metadata of an instance is not exact, where a subscriber says so."""
        reasons = await self._calls.together([("HGET", self._keys.kv_events(name), "reason") for name in instance_ids])
        return {
            name: reason.decode(errors="replace") for name, reason in zip(instance_ids, reasons, strict=True) if reason
        }

    async def _overview(self, more: Sequence[Command] = ()) -> tuple[_Overview, dict[bytes, bytes], list[Any]]:
        """The overview with the counters of the pool, and what ``more`` replied."""
        keys, now_ms = self._keys, await self._calls.now_ms()
        hashes = (
            *(keys.meta, keys.replicas, keys.leader, keys.migrations),
            *(keys.instance_notes, keys.instance_records),
        )
        replies = await self._calls.together([*(("HGETALL", key) for key in hashes), *more])
        meta, replicas, leader, migrations, notes = map(pairs_from, replies[: len(hashes) - 1])
        records = replies[len(hashes) - 1]
        overview = (
            now_ms,
            self._loads_from(records, now_ms),
            tuple(each for each in codec.replicas_from(replicas) if each.expires_ms != RETIRED),
            codec.record_from(Leadership(), leader).lease(now_ms),
            each_readable(migrations, lambda _, count: count_from(count)),
            codec.notes_from(notes),
        )
        return overview, meta, replies[len(hashes) :]

    @checks_replies
    async def loads(self) -> Mapping[str, InstanceLoad]:
        """Loads of every known instance by id, without hits; for sweeps."""
        now_ms = await self._calls.now_ms()
        return self._loads_from(await self._calls.command("HGETALL", self._keys.instance_records), now_ms)

    @checks_replies
    async def loads_of(self, instance_ids: Sequence[str]) -> dict[str, InstanceLoad]:
        """Loads of those of the named instances that are known."""
        now_ms = await self._calls.now_ms()
        records = await self._calls.command("HMGET", self._keys.instance_records, *instance_ids)
        found = [each for each in zip(instance_ids, records, strict=True) if each[1] is not None]
        return {name: self._reader.load(name, record, now_ms) for name, record in found}

    async def instance_ids(self) -> list[str]:
        return sorted(member.decode() for member in await self._calls.command("HKEYS", self._keys.instance_records))

    def _loads_from(self, records: Sequence[bytes], now_ms: int) -> Mapping[str, InstanceLoad]:
        """The loads by id, in id order."""
        former, at_ms, loads = self._last_loads
        if at_ms != now_ms or former != records:
            load = self._reader.load
            loads = each_readable(pairs_from(records), lambda name, record: load(name, record, now_ms))
            self._last_loads = records, now_ms, loads
        return loads

    @checks_replies
    async def records(self, request_ids: Sequence[str]) -> dict[str, StoredRequest]:
        """Records of the named requests that still exist, and can be read."""
        found: dict[str, StoredRequest] = {}
        for first in range(0, len(request_ids), _RECORDS_PER_CALL):
            page = request_ids[first : first + _RECORDS_PER_CALL]
            commands = [("HMGET", self._keys.request(name), *REQUEST_TEXTS) for name in page]
            for name, texts in zip(page, await self._calls.together(commands), strict=True):
                request = request_from(name, texts)
                if request is not None:
                    found[name] = request
        return found

    @checks_replies
    async def requests_of(self, replica_id: str) -> Sequence[StoredRequest]:
        """The replica's live requests, those first reserved first; not for the hot path."""
        # The lists are of one moment: a request that moves meanwhile is in one of them.
        placed = (await self.snapshot()).requests_of(replica_id)
        names = readable_texts(await self._calls.command("ZRANGE", self._keys.passed_on, 0, -1))
        passed_on = (await self.records(names)).values() if names else ()
        return [*placed, *(each for each in passed_on if each.replica_id == replica_id and not each.instance_id)]
