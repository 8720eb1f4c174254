"""Whole views of a pool, each read in one transaction: members for replicas, everything for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scheduling.instance import InstanceLoad, InstanceSpec
from statestore.base import Membership, PoolSnapshot
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis import codec
from statestore.redis.calls import Calls, Command
from statestore.redis.codec import pairs_from

_MAX_CHANGES = 8


class Views:
    """Reads what is spread over the instances' keys, in one piece."""

    def __init__(self, keys: PoolKeys, calls: Calls, prior_bytes_per_token: float) -> None:
        self._keys = keys
        self._calls = calls
        self._prior_bytes_per_token = prior_bytes_per_token
        self._members: frozenset[bytes] = frozenset()
        """The members of the last view: which keys to name before the answer is known."""

    async def membership(self) -> Membership:
        keys = self._keys
        common: list[Command] = [("HGETALL", keys.meta), ("HGETALL", keys.hotness_tree)]
        (flat_meta, flat_tree), each = await self._read(common, self._spec_commands)
        meta = pairs_from(flat_meta)
        specs = {instance_id: codec.spec_from(instance_id, values) for instance_id, (values,) in each.items()}
        return Membership(
            int(meta.get(b"epoch", b"0")),
            int(meta.get(b"tree_version", b"0")),
            {instance_id: spec for instance_id, spec in specs.items() if spec is not None},
            codec.tree_from(pairs_from(flat_tree)),
            float(meta.get(b"bytes_per_token", self._prior_bytes_per_token)),
        )

    async def snapshot(self) -> PoolSnapshot:
        keys = self._keys
        now_ms = await self._calls.now_ms()
        common: list[Command] = [
            ("HGETALL", keys.meta),
            ("HVALS", keys.requests),
            ("HGETALL", keys.replicas),
            ("HGETALL", keys.leader),
            ("HGETALL", keys.migrations),
        ]
        (meta, requests, replicas, leader, migrations), each = await self._read(common, self._all_commands)
        specs: dict[str, InstanceSpec] = {}
        loads: dict[str, InstanceLoad] = {}
        for instance_id, (values, load, *counts) in each.items():
            spec = codec.spec_from(instance_id, values)
            if spec is not None:
                specs[instance_id] = spec
                loads[instance_id] = codec.load_from(instance_id, [*codec.load_figures(load), *counts, 0], now_ms)
        versions = pairs_from(meta)
        records = codec.records_from(requests).values()
        return PoolSnapshot(
            now_ms,
            int(versions.get(b"epoch", b"0")),
            int(versions.get(b"tree_version", b"0")),
            specs,
            loads,
            tuple(sorted(records, key=lambda record: (record.sequence, record.request_id))),
            codec.not_retired(codec.replicas_from(pairs_from(replicas))),
            codec.lease_from(pairs_from(leader), now_ms),
            {reason.decode(): int(count) for reason, count in pairs_from(migrations).items()},
        )

    def _spec_commands(self, instance_id: str) -> list[Command]:
        return [("HMGET", self._keys.account(instance_id).account, *codec.SPEC_FIELDS)]

    def _all_commands(self, instance_id: str) -> list[Command]:
        keys = self._keys.account(instance_id)
        return [
            *self._spec_commands(instance_id),
            ("HMGET", keys.account, *codec.LOAD_FIELDS),
            ("ZCARD", keys.queue),
            ("ZCARD", keys.running),
            ("ZCARD", keys.kv),
        ]

    async def _read(
        self, common: list[Command], per_instance: Callable[[str], list[Command]]
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """The common replies, and each member's, by id in id order. Reads again when members changed meanwhile."""
        for _ in range(_MAX_CHANGES):
            named = self._members
            ids = sorted(member.decode() for member in named)
            commands = [("SMEMBERS", self._keys.instances), *common]
            commands += [command for instance_id in ids for command in per_instance(instance_id)]
            members, *replies = await self._calls.together(commands)
            if frozenset(members) != named:
                self._members = frozenset(members)
                continue
            each, width = replies[len(common) :], len(per_instance(""))
            return replies[: len(common)], {
                instance_id: each[width * index : width * (index + 1)] for index, instance_id in enumerate(ids)
            }
        raise StoreUnavailableError("the pool's members change faster than they can be read: try again")
