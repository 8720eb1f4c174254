"""Tiers behind the devices of instances: how they are described for placements, and the blocks that they keep.

The blocks of a tier are followed by its size: every prompt that an instance is given enters its tiers, and what was
used longest ago leaves. ``apply`` enters and removes what an engine reports; no subscriber calls it yet, so the blocks
are an estimate for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, Tier
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, is_readable
from dualmap.statestore.records import HASH_BYTES

STAMPS_PER_MS: Final = 1024
"""Stamps of a millisecond: a prompt's blocks are stamped one below the other (``statestore/lua/shared/tiers.lua``)."""
_WORDS_PER_COMMAND = 1000


def named(tier: Tier, instance_id: str) -> str:
    """The name of an instance's tier in its key."""
    return f"{tier}:{instance_id}"


def tier_keys(keys: PoolKeys, instance_id: str) -> list[bytes]:
    """The keys of all tiers that an instance may have."""
    return [keys.kv_tier(named(tier, instance_id)) for tier in Tier]


class InstanceTierBooks(Changes):
    """The tiers of a pool's instances."""

    @checks_replies
    async def describe(self, instance_id: str, tiers: InstanceTiers, *, fence: int | None = None) -> bool:
        """Describe the tiers of an instance in place of what was known, none to forget them; False if the instance is
        unknown."""
        keys, text = self._keys, _text_of(instance_id, tiers)
        record = await self._calls.command("HGET", keys.instance_records, instance_id)
        if record is None:
            return False
        commands: list[Command] = [("HSET", keys.instance_tiers, instance_id, text)]
        if not tiers.tiers:
            commands = [("HDEL", keys.instance_tiers, instance_id)]
        await self._make(Change(commands, fence=fence, instances={instance_id: {"tiers": len(tiers.tiers)}}))
        return True

    @checks_replies
    async def described(self) -> Mapping[str, InstanceTiers]:
        """The tiers of each instance that has some."""
        pairs = pairs_from(await self._calls.command("HGETALL", self._keys.instance_tiers))
        return {
            name.decode(): tiers_from(text) for name, text in pairs.items() if is_readable(partial(tiers_from, text))
        }

    @checks_replies
    async def apply(self, tier: Tier, instance_id: str, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Enter the blocks that the engine reports as stored in its tier, and remove those that it reports as gone."""
        key = self._keys.kv_tier(named(tier, instance_id))
        now_ms = await self._calls.now_ms()
        stamps = [(b"%d" % (now_ms * STAMPS_PER_MS - place), block) for place, block in enumerate(_packed(stored))]
        commands = [
            *_in_commands(("ZADD", key, "NX"), [word for pair in stamps for word in pair]),
            *_in_commands(("ZREM", key), _packed(removed)),
        ]
        if commands:
            await self._make(Change(commands))


def _packed(blocks: Sequence[int]) -> list[bytes]:
    return [block.to_bytes(HASH_BYTES, "big") for block in blocks]


def _in_commands(begins: Command, words: Sequence[Any]) -> list[Command]:
    firsts = range(0, len(words), _WORDS_PER_COMMAND)
    return [(*begins, *words[first : first + _WORDS_PER_COMMAND]) for first in firsts]


def _text_of(instance_id: str, tiers: InstanceTiers) -> bytes:
    """The description as the scripts read it."""
    described = [
        {
            "tier": each.tier.value,
            "key": named(each.tier, instance_id),
            "tokens": each.tokens,
            "start_s": each.price.start_s,
            "token_s": each.price.token_s,
        }
        for each in tiers.tiers
    ]
    return orjson.dumps({"limits": tiers.takes_limits, "tiers": described})


def tiers_from(text: bytes) -> InstanceTiers:
    """The reverse. Raises ValueError, or the like, where it is no description."""
    described = orjson.loads(text)
    tiers = [
        InstanceTier(Tier(each["tier"]), int(each["tokens"]), LoadPrice(each["start_s"], each["token_s"]))
        for each in described["tiers"]
    ]
    return InstanceTiers(tuple(tiers), bool(described["limits"]))
