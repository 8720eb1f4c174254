"""Whole views of a pool: members for replicas, everything for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from scheduling.learned import Learned
from scheduling.request import Request
from statestore.base import Membership, PoolOverview, PoolSnapshot
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.leases import Leadership
from statestore.redis import codec
from statestore.redis.calls import Calls, Command
from statestore.redis.changes import Changes
from statestore.redis.codec import LoadReader, pairs_from

_MAX_CHANGES = 8
_RECORDS_PER_CALL = 500


class Views(Changes):
    """A share of ``RedisPool``: reads what is spread over the instances' keys, in one transaction except for the
    requests."""

    def __init__(self, keys: PoolKeys, calls: Calls) -> None:
        super().__init__(keys, calls)
        self._reader = LoadReader()
        self._members: frozenset[bytes] = frozenset()
        """The members of the last view: which keys to name before the answer is known."""

    async def membership(self) -> Membership:
        keys = self._keys
        common: list[Command] = [
            ("HGETALL", keys.meta),
            ("HGETALL", keys.hotness_tree),
            ("HGETALL", keys.learned),
            ("HGETALL", keys.settings),
        ]
        (flat_meta, flat_tree, learned, overrides), each = await self._read(common, "spec")
        meta = pairs_from(flat_meta)
        specs = {instance_id: codec.spec_from(instance_id, text) for instance_id, ((text,),) in each.items()}
        return Membership(
            int(meta.get(b"epoch", b"0")),
            int(meta.get(b"tree_version", b"0")),
            {instance_id: spec for instance_id, spec in specs.items() if spec is not None},
            codec.tree_from(pairs_from(flat_tree)),
            codec.record_from(Learned(), pairs_from(learned)),
            {name.decode(): orjson.loads(text) for name, text in pairs_from(overrides).items()},
        )

    async def snapshot(self) -> PoolSnapshot:
        overview, meta, each = await self._overview("record", "spec", lists=True)
        names: list[str] = []
        for _, queued, running in each.values():
            names += [entry.decode().rpartition(" ")[0] for entry in queued] + [entry.decode() for entry in running]
        specs = {instance_id: codec.spec_from(instance_id, texts[1]) for instance_id, (texts, *_) in each.items()}
        requests = (await self.records(names)).values()
        return PoolSnapshot(
            overview.now_ms,
            overview.loads,
            overview.replicas,
            overview.leader,
            overview.migrations,
            int(meta.get(b"epoch", b"0")),
            int(meta.get(b"tree_version", b"0")),
            {instance_id: spec for instance_id, spec in specs.items() if spec is not None},
            tuple(sorted(requests, key=lambda request: (request.enqueued_ms, request.request_id))),
        )

    async def overview(self) -> PoolOverview:
        return (await self._overview("record"))[0]

    async def _overview(
        self, *names: str, lists: bool = False
    ) -> tuple[PoolOverview, dict[bytes, bytes], dict[str, list[Any]]]:
        """And the counters of the pool, and what ``_read`` returns of each member."""
        keys, now_ms = self._keys, await self._calls.now_ms()
        common: list[Command] = [("HGETALL", key) for key in (keys.meta, keys.replicas, keys.leader, keys.migrations)]
        found, each = await self._read(common, *names, lists=lists)
        meta, replicas, leader, migrations = map(pairs_from, found)
        records = {instance_id: texts[0] for instance_id, (texts, *_) in each.items()}
        overview = PoolOverview(
            now_ms,
            {name: self._reader.load(name, record, now_ms) for name, record in records.items() if record is not None},
            codec.not_retired(codec.replicas_from(replicas)),
            codec.record_from(Leadership(), leader).lease(now_ms),
            {reason.decode(): int(count) for reason, count in migrations.items()},
        )
        return overview, meta, each

    async def records(self, request_ids: Sequence[str]) -> dict[str, Request]:
        found: dict[str, Request] = {}
        for first in range(0, len(request_ids), _RECORDS_PER_CALL):
            page = request_ids[first : first + _RECORDS_PER_CALL]
            commands = [("HMGET", self._keys.request(name), *codec.REQUEST_TEXTS) for name in page]
            for name, texts in zip(page, await self._calls.together(commands), strict=True):
                request = codec.request_from(name, texts)
                if request is not None:
                    found[name] = request
        return found

    async def _read(
        self, common: list[Command], *names: str, lists: bool = False
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The common replies, and each member's in id order: its fields of these names, then its lists. Reads again
        when members changed meanwhile."""
        for _ in range(_MAX_CHANGES):
            named, commands = self._members, [("SMEMBERS", self._keys.instances), *common]
            ids = sorted(member.decode() for member in named)
            for keys in map(self._keys.instance, ids):
                commands.append(("HMGET", keys.instance, *names))
                commands += [("ZRANGE", listed, 0, -1) for listed in (keys.queue, keys.running) if lists]
            members, *replies = await self._calls.together(commands)
            if frozenset(members) == named:
                first, width = len(common), 3 if lists else 1
                each = [replies[place : place + width] for place in range(first, len(replies), width)]
                return replies[:first], dict(zip(ids, each, strict=True))
            self._members = frozenset(members)
        raise StoreUnavailableError("the pool's members change faster than they can be read: try again")
