"""Tiers behind the devices of instances: how they are described for placements, and the blocks that they keep.

The blocks of a tier are followed by its size: every prompt that an instance is given enters its tiers, and what was
used longest ago leaves. What the engine reports as stored or gone is entered and removed (``KvClaims.apply``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.estimates.learning import DisprovedTier
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.kv_views import TierChange
from dualmap.statestore.pool.calls import Command, in_commands
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, is_readable
from dualmap.statestore.records import packed_hashes

STAMPS_PER_MS: Final = 1024
"""Stamps of a millisecond: a prompt's blocks are stamped one below the other (``statestore/lua/shared/tiers.lua``)."""


def named(tier: Tier, instance_id: str) -> str:
    """The name of an instance's tier in its key. A pool is one for all instances."""
    return tier.value if tier is Tier.POOL else f"{tier}:{instance_id}"


def tier_keys(keys: PoolKeys, instance_id: str) -> list[bytes]:
    """The keys of all tiers that an instance may have for itself."""
    return [keys.kv_tier(named(tier, instance_id)) for tier in Tier if tier is not Tier.POOL]


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
        if not tiers.tiers and tiers.pulls is None and not tiers.no_pulls:
            commands = [("HDEL", keys.instance_tiers, instance_id)]
        number = len(tiers.tiers) or int(tiers.pulls is not None)
        await self._make(Change(commands, fence=fence, instances={instance_id: {"tiers": number}}))
        return True

    @checks_replies
    async def correct(self, disproved: DisprovedTier, *, fence: int | None = None) -> None:
        """Forget what was used in a tier before what it turned out to lack: what was used longest ago leaves first.
        Nothing where the instance's engine reports what leaves its tiers: that is followed, and an answer shows no
        more than how late it comes."""
        keys, name = self._keys, disproved.instance_id
        if await self._calls.command("HGET", keys.kv_events(name), "reports_removals") is not None:
            return
        before = f"({disproved.used_ms * STAMPS_PER_MS}"
        key = keys.kv_tier(named(Tier(disproved.tier), name))
        await self._make(Change([("ZREMRANGEBYSCORE", key, "-inf", before)], fence=fence))

    @checks_replies
    async def described(self) -> Mapping[str, InstanceTiers]:
        """The tiers of each instance that has some."""
        pairs = pairs_from(await self._calls.command("HGETALL", self._keys.instance_tiers))
        return {
            name.decode(): tiers_from(text) for name, text in pairs.items() if is_readable(partial(tiers_from, text))
        }


def tier_commands(
    keys: PoolKeys, instance_id: str, changes: Mapping[Tier, TierChange], now_ms: int
) -> Sequence[Command]:
    """Enter the blocks that an engine reports as stored in its tiers, as used at this time, and remove those that it
    reports as gone, and those beyond a tier's size."""
    commands: list[Command] = []
    for tier, change in changes.items():
        key = keys.kv_tier(named(tier, instance_id))
        stamps = [now_ms * STAMPS_PER_MS - place for place in range(len(change.stored))]
        pairs = zip(stamps, packed_hashes(change.stored), strict=True)
        commands += in_commands(("ZADD", key, "GT"), [word for pair in pairs for word in pair])
        commands += in_commands(("ZREM", key), packed_hashes(change.removed))
        if change.stored:
            commands.append(("ZREMRANGEBYRANK", key, 0, -change.most_blocks - 1))
    return commands


def _text_of(instance_id: str, tiers: InstanceTiers) -> bytes:
    """The description as the scripts read it."""
    described = [
        {
            "tier": each.tier.value,
            "key": named(each.tier, instance_id),
            "tokens": each.tokens,
            "start_s": each.price.start_s,
            "token_s": each.price.token_s,
            "reason": each.reason,
        }
        for each in tiers.tiers
    ]
    text: dict[str, Any] = {"limits": tiers.takes_limits, "tiers": described}
    if (end := tiers.pulls) is not None:
        place = {"host": end.host, "port": end.port, "layout": end.layout}
        price = {"start_s": end.price.start_s, "token_s": end.price.token_s, "reason": end.reason}
        text["pull"] = place | price | {"fails": end.fails_requests}
    if tiers.no_pulls:
        text["no_pulls"] = tiers.no_pulls
    return orjson.dumps(text)


def tiers_from(text: bytes) -> InstanceTiers:
    """The reverse. Raises ValueError, or the like, where it is no description."""
    described = orjson.loads(text)
    tiers = [
        InstanceTier(
            Tier(each["tier"]),
            int(each["tokens"]),
            LoadPrice(each["start_s"], each["token_s"]),
            each.get("reason", ""),
        )
        for each in described["tiers"]
    ]
    pulls = None if (pull := described.get("pull")) is None else _pull_end_from(pull)
    return InstanceTiers(tuple(tiers), bool(described["limits"]), pulls, str(described.get("no_pulls", "")))


def _pull_end_from(pull: Mapping[str, Any]) -> PullEnd:
    price = LoadPrice(pull["start_s"], pull["token_s"])
    place = str(pull["host"]), int(pull["port"]), str(pull["layout"])
    return PullEnd(*place, price, pull.get("reason", ""), fails_requests=bool(pull.get("fails")))
