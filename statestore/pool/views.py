"""Whole views of a pool: members for replicas, everything for people."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from scheduling.instance import InstanceLoad
from scheduling.learned import Learned
from scheduling.request import Request
from statestore.answers import Membership, Note, PoolOverview, PoolSnapshot
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.leases import RETIRED, Leadership, Lease, ReplicaInfo
from statestore.pool import codec
from statestore.pool.calls import Calls, Command
from statestore.pool.changes import Changes
from statestore.pool.codec import LoadReader, pairs_from
from statestore.records import REQUEST_TEXTS, request_from

_MAX_CHANGES = 8
_RECORDS_PER_CALL = 500
_Overview = tuple[
    int, Mapping[str, InstanceLoad], tuple[ReplicaInfo, ...], Lease | None, Mapping[str, int], Mapping[str, Note]
]
"""The fields of a ``PoolOverview``."""


class Views(Changes):
    """A share of ``PoolStore``: what is read in one transaction, except for the requests."""

    def __init__(self, keys: PoolKeys, calls: Calls) -> None:
        super().__init__(keys, calls)
        self._reader = LoadReader()

    async def now_ms(self) -> int:
        """The store's time."""
        return await self._calls.now_ms()

    async def membership(self) -> Membership:
        """The whole rarely-changing part; read when a reply shows another epoch or tree version, and at intervals."""
        keys = self._keys
        hashes = (keys.meta, keys.hotness_tree, keys.learned, keys.settings, keys.names, keys.instances)
        counted: Command = ("HKEYS", keys.instance_records)
        *found, records = await self._calls.together([*(("HGETALL", key) for key in hashes), counted])
        meta, tree, learned, overrides, names, specs = map(pairs_from, found)
        return Membership(
            int(meta.get(b"epoch", b"0")),
            int(meta.get(b"tree_version", b"0")),
            codec.specs_from({name: specs[name] for name in specs.keys() & records}),
            codec.tree_from(tree),
            codec.record_from(Learned(), learned),
            {name.decode(): orjson.loads(text) for name, text in overrides.items()},
            codec.names_from(names),
        )

    async def snapshot(self) -> PoolSnapshot:
        """Everything, for admin and inspect. Its cost grows with the number of live requests."""
        keys = self._keys
        for _ in range(_MAX_CHANGES):
            members = await self._calls.command("HKEYS", keys.instances)
            of_each = [key(name.decode()) for name in members for key in (keys.queue, keys.running)]
            lists = [("ZRANGE", key, 0, -1) for key in of_each]
            overview, meta, (flat, *listed) = await self._overview([("HGETALL", keys.instances), *lists])
            specs = pairs_from(flat)
            if specs.keys() == {*members}:
                break
        else:
            raise StoreUnavailableError("the pool's members change faster than they can be read: try again")
        held, sent = (itertools.chain.from_iterable(listed[first::2]) for first in (0, 1))
        names = [entry.decode() for entry in sent] + [entry.decode().rpartition(" ")[0] for entry in held]
        requests = (await self.records(names)).values()
        return PoolSnapshot(
            *overview,
            int(meta.get(b"epoch", b"0")),
            int(meta.get(b"tree_version", b"0")),
            codec.specs_from(specs),
            tuple(sorted(requests, key=lambda request: (request.enqueued_ms, request.request_id))),
        )

    async def overview(self) -> PoolOverview:
        """Loads, replicas and leader, for metrics and live displays."""
        return PoolOverview(*(await self._overview())[0])

    async def _overview(self, more: Sequence[Command] = ()) -> tuple[_Overview, dict[bytes, bytes], list[Any]]:
        """With the counters of the pool, and what ``more`` replied."""
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
            {reason.decode(): int(count) for reason, count in migrations.items()},
            codec.notes_from(notes),
        )
        return overview, meta, replies[len(hashes) :]

    def _loads_from(self, records: Sequence[bytes], now_ms: int) -> dict[str, InstanceLoad]:
        """By id in id order."""
        known, load = pairs_from(records), self._reader.load
        return {name.decode(): load(name.decode(), known[name], now_ms) for name in sorted(known)}

    async def records(self, request_ids: Sequence[str]) -> dict[str, Request]:
        """Records of the named requests that still exist."""
        found: dict[str, Request] = {}
        for first in range(0, len(request_ids), _RECORDS_PER_CALL):
            page = request_ids[first : first + _RECORDS_PER_CALL]
            commands = [("HMGET", self._keys.request(name), *REQUEST_TEXTS) for name in page]
            for name, texts in zip(page, await self._calls.together(commands), strict=True):
                request = request_from(name, texts)
                if request is not None:
                    found[name] = request
        return found
