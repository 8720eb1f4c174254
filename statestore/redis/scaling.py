"""The leader's scaling calls of a pool on Redis."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from scheduling.scale_record import DecisionStatus, ScaleEntry, ScaleRecord
from statestore.keys import PoolKeys
from statestore.redis.calls import Calls
from statestore.redis.codec import pairs_from

_NAME_LISTS = ("starting", "leaving", "spares")
_HASH = struct.Struct(">Q")


class ScalingCalls:
    """A part of ``RedisPool``; see ``statestore.base.PoolStore`` for the contract."""

    _keys: PoolKeys
    _calls: Calls

    async def now_ms(self) -> int:
        return await self._calls.now_ms()

    async def scaling(self) -> ScaleRecord:
        return record_from(pairs_from(await self._calls.command("HGETALL", self._keys.scaling)))

    async def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, *, fence: int) -> None:
        fields, line = orjson.dumps(record_fields(record)), orjson.dumps(asdict(entry))
        await self._calls.script("publish_fields", self._keys.base, fence, 0, "scaling", fields, "{}", line)

    async def scaling_log(self, limit: int) -> Sequence[ScaleEntry]:
        if limit <= 0:
            return []
        lines = await self._calls.command("LRANGE", self._keys.scaling_log, 0, limit - 1)
        return [ScaleEntry(**orjson.loads(line)) for line in lines]

    async def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Mapping[str, Sequence[int]]:
        blocks: dict[str, Sequence[int]] = {}
        for name in instance_ids:  # one by one: the store serves requests in between
            packed = await self._calls.command("ZREVRANGE", self._keys.instance(name).kv, 0, limit - 1)
            blocks[name] = [_HASH.unpack(block)[0] for block in packed]
        return blocks


def record_fields(record: ScaleRecord) -> dict[str, str]:
    """As text; lists of instances are separated by commas."""
    return {name: ",".join(given) if name in _NAME_LISTS else str(given) for name, given in asdict(record).items()}


def record_from(fields: Mapping[bytes, bytes]) -> ScaleRecord:
    """The record of a pool that never scaled, where there are no fields."""
    values: dict[str, Any] = {}
    for name, default in asdict(ScaleRecord()).items():
        text = fields.get(name.encode())
        if text is not None:
            given = text.decode()
            values[name] = tuple(filter(None, given.split(","))) if name in _NAME_LISTS else type(default)(given)
    if "status" in values:
        values["status"] = DecisionStatus(values["status"])
    return ScaleRecord(**values)
