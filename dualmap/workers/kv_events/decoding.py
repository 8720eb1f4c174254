"""Batches of KV events as vLLM publishes them.

A batch is msgpack: ``[time, [event, …], rank]``. Its events are maps with their ``type``, or, from releases before
mid-2026, arrays with the type first and the fields in the order of ``_STORED`` and ``_REMOVED``.

Fields at the end may be missing; unknown ones and unknown events are ignored. Hashes are unsigned 64-bit numbers, or
bytes of which the last eight count. What identifies a block is described in ``scheduling.prompts.engine_blocks``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from types import MappingProxyType
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.engine_blocks import encode_extra_keys, renamed_adapter
from dualmap.scheduling.values import value

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
MEDIA: Final = MappingProxyType(
    dict.fromkeys(("", "gpu", "npu", "hbm", "device"))
    | dict.fromkeys(("cpu", "host", "dram"), Tier.HOST)
    | dict.fromkeys(("storage", "disk", "file", "fs", "ssd"), Tier.DISK)
    | dict.fromkeys(("shared_storage", "obj", "object", "pool"), Tier.POOL)
)
"""Tiers by the names of media, in lower case; None is the device's own memory."""
_MOST: Final = (1 << 24) - 1
"""The largest count of tokens in a block or a window, and the highest number of a group, that is believed."""


class UnreadableEventsError(ValueError):
    """A payload is no batch of events."""


@value
class Adapter:
    """The adapter of a block. Its name may be pointed at other weights, by which the engine gives it a higher number;
    the path of the weights is a part of the engine's names of blocks, and no event has it."""

    name: str
    number: int
    """The engine's ``lora_id``; 0: not reported."""


@value
class Stored:
    """Blocks that were stored, one after the other in a prompt. Of a group of windows or states: some of the blocks
    that the tokens fill, or none."""

    names: Sequence[int]
    """The engine's own hashes."""
    parent: int | None
    token_bytes: bytes
    """Token ids of all of them, unsigned 32 bit each."""
    _: KW_ONLY
    block_tokens: int
    extras: Sequence[bytes]
    """Encoded extra keys of each block, or none at all."""
    tier: Tier | None
    """None: on the device."""
    group: int | None
    translatable: bool
    """Everything that identifies them was reported."""
    adapter: Adapter | None = None
    kind: str = ""
    """The kind of the cache group, by vLLM's name; empty where the engine reports none."""
    window_tokens: int = 0
    looks_ahead: bool = False
    """The engine's names cover tokens after each block too, for a speculative model's draft layers: blocks with equal
    contents have several names."""


@value
class Removed:
    names: Sequence[int]
    tier: Tier | None
    """None: on the device."""
    group: int | None = None


@value
class Cleared:
    """The device's cache is empty now."""


Event = Stored | Removed | Cleared


@value
class Batch:
    sequence: int
    published_s: float
    events: Sequence[Event]
    rank: int | None
    """Rank of data parallelism."""


def as_cached(batch: Batch, cached_as: Callable[[str], str]) -> Batch:
    """The batch with adapters by the names that their KV has in the fleet: an engine's events have a name alone, and
    not the generation of its weights."""
    named = {each.adapter.name for each in batch.events if isinstance(each, Stored) and each.adapter is not None}
    other = {name: cached for name in named if (cached := cached_as(name)) != name}
    if not other:
        return batch
    events = [
        replace(
            each, extras=[renamed_adapter(keys, each.adapter.name, other[each.adapter.name]) for keys in each.extras]
        )
        if isinstance(each, Stored) and each.adapter is not None and each.adapter.name in other
        else each
        for each in batch.events
    ]
    return replace(batch, events=events)


def read_batch(sequence: int, payload: bytes) -> Batch:
    """Raises UnreadableEventsError."""
    try:
        published_s, events, *rest = msgpack.unpackb(payload, strict_map_key=False)
        read = [event for each in events if (event := _event(each)) is not None]
        rank = rest[0] if rest else None
        if not math.isfinite(published_s):  # no later batch would come after it
            raise ValueError(f"it was published at {published_s}")
        return Batch(sequence, float(published_s), read, rank if isinstance(rank, int) else None)
    except (ValueError, TypeError, LookupError, OverflowError, msgpack.UnpackException) as error:
        raise UnreadableEventsError(f"batch {sequence} cannot be read: {error}") from error


def _event(event: Any) -> Event | None:
    if isinstance(event, Mapping):
        kind, fields = event.get("type"), event
    else:
        kind, *values = event
        fields = dict(zip(_REMOVED if kind == "BlockRemoved" else _STORED, values, strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return None
    tier, is_remote = _tier_of(fields), fields.get("locality") == "REMOTE"
    if is_remote and tier is None:
        return None  # on another instance's device
    tier = Tier.POOL if is_remote else tier
    if kind == "BlockStored":
        return _stored(fields, tier)
    return Removed([_name(each) for each in fields["block_hashes"]], tier, _group(fields))


def _stored(fields: Mapping[str, Any], tier: Tier | None) -> Stored:
    names = [_name(each) for each in fields["block_hashes"]]
    parent, keys, lora = fields.get("parent_block_hash"), fields.get("extra_keys"), fields.get("lora_name")
    if not isinstance(lora, str | None):
        raise ValueError(f"it names the adapter {str(lora)[:40]!r}")
    looks_ahead, size = fields.get("lookahead_token_ids") is not None, _count(fields, "block_size")
    if keys and looks_ahead:
        keys = [_of_block(each, size) for each in keys]
    extras = [encode_extra_keys(each) for each in keys] if keys else []
    if lora and not extras:
        extras = [encode_extra_keys([lora])] * len(names)
    return Stored(
        names,
        None if parent is None else _name(parent),
        array("I", fields.get("token_ids") or ()).tobytes(),
        block_tokens=size,
        extras=extras,
        tier=tier,
        group=_group(fields),
        # An adapter by number alone has no name that a request would have.
        translatable=bool(extras or lora or fields.get("lora_id") is None),
        adapter=Adapter(lora, int(fields.get("lora_id") or 0)) if lora else None,
        kind=str(fields.get("kv_cache_spec_kind") or ""),
        window_tokens=_count(fields, "kv_cache_spec_sliding_window"),
        looks_ahead=looks_ahead,
    )


def _of_block(keys: Sequence[Any] | None, block_tokens: int) -> list[Any]:
    """The extra keys of a block, without those of the tokens after it: media that begin there."""
    return [key for key in keys or () if not (isinstance(key, list | tuple) and key[1] >= block_tokens)]


def _group(fields: Mapping[str, Any]) -> int | None:
    return None if fields.get("group_idx") is None else _count(fields, "group_idx")


def _count(fields: Mapping[str, Any], name: str) -> int:
    count = fields.get(name) or 0
    if isinstance(count, int) and 0 <= count <= _MOST:
        return count
    raise ValueError(f"its {name} is {str(count)[:40]!r}")


def _tier_of(fields: Mapping[str, Any]) -> Tier | None:
    medium = str(fields.get("medium") or "")
    try:
        return MEDIA[medium.lower()]
    except KeyError:
        raise ValueError(f"it names a memory that is not known, {medium[:40]!r}") from None


def _name(block_hash: int | bytes) -> int:
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & 0xFFFFFFFFFFFFFFFF
