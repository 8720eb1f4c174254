"""Changes of the emulated engine's prefix cache, as KV events: blocks get their token ids back.

The engine knows hashes. The prompts of the requests under way say what is in them, and a block enters the cache while
its request is under way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.cache_groups import GroupKind
from dualmap.simulation.emulator.generation_request import Prompt
from dualmap.simulation.engine.hybrid_kv_pool import parts_of
from dualmap.simulation.engine.kv_pool import CacheChange, Journal
from dualmap.simulation.engine.kv_tiers import MEDIA
from dualmap.simulation.workload.tokenizer import TOKEN_BYTES

if TYPE_CHECKING:
    from dualmap.simulation.emulator.kv_publisher import KvEventPublisher
    from dualmap.simulation.engine.engine_types import EngineConfig

MEDIUM = "GPU"


class KvEventLog:
    """The journal of one engine's cache, published batch by batch."""

    def __init__(self, config: EngineConfig, publisher: KvEventPublisher) -> None:
        self.journal: Journal = []
        """Journal that the engine's pool writes into."""
        self.of_tiers: Mapping[Tier, Journal] = {tier: [] for tier in Tier}
        """Journals of the tiers behind it."""
        self._block_tokens = config.block_tokens
        self._groups = config.cache_groups
        self._publisher = publisher
        self._prompts: dict[str, Prompt] = {}
        self._known: dict[int, tuple[Prompt, int, int]] = {}
        """Known blocks: a prompt with the block, its place in there, and how many requests under way have it."""

    @property
    def source(self) -> dict[str, Any]:
        """The endpoints that publish this log, as vLLM's ``GET /kv_event_sources`` says."""
        ports = [
            None if endpoint is None else f"tcp://*:{endpoint.rpartition(':')[2]}"
            for endpoint in (self._publisher.endpoint, self._publisher.replay_endpoint)
        ]
        return {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": ports[0], "replay_endpoint": ports[1],
            "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": self._publisher.topic,
        }  # fmt: skip

    def enter(self, engine_id: str, prompt: Prompt) -> None:
        """A request is under way."""
        self._prompts[engine_id] = prompt
        for place, block in enumerate(prompt.block_hashes):
            count = self._known[block][2] if block in self._known else 0
            self._known[block] = (prompt, place, count + 1)

    def leave(self, engine_id: str) -> None:
        """The engine ended; what it stored was published before."""
        for block in self._prompts.pop(engine_id).block_hashes:
            prompt, place, count = self._known.pop(block)
            if count > 1:
                self._known[block] = (prompt, place, count - 1)

    def publish(self, published_s: float) -> None:
        """Publish all that happened since as one batch, if anything did. That the cache was emptied goes out with the
        next step that computes, as of vLLM."""
        waits = all(change is CacheChange.CLEARED for change, _ in self.journal)
        if waits and not any(self.of_tiers.values()):
            return
        events: list[dict[str, Any]] = []
        stored: list[dict[str, Any]] = []
        kept: list[tuple[int, int]] = []
        for change, block in self.journal:
            group, name = parts_of(block) if block < 0 else (len(self._groups), block)
            if change is not CacheChange.STORED:
                events += [*self._of_groups(stored, kept), *stored]
                stored, kept = [], []
            if change is CacheChange.REMOVED:
                events.append({"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIUM, "group_idx": group})
            elif change is CacheChange.CLEARED:
                events.append({"type": "AllBlocksCleared"})
            elif block < 0:
                kept.append((group, name))
            else:
                self._store(block, stored)
        events += [*self._of_groups(stored, kept), *stored]
        self.journal.clear()
        for tier, journal in self.of_tiers.items():
            self._publish_tier(tier, journal, events)
        self._publisher.publish(events, published_s)

    def _publish_tier(self, tier: Tier, journal: Journal, events: list[dict[str, Any]]) -> None:
        """Add what a tier keeps and forgets, as vLLM's offloading does with ``self_describing_kv_events``: an event for
        each block, with neither salt nor adapter; without a locality for host memory."""
        where: dict[str, Any] = {"medium": MEDIA[tier]}
        if tier is not Tier.HOST:
            where["locality"] = "REMOTE" if tier is Tier.POOL else "LOCAL"
        for change, block in journal:
            event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [block], "group_idx": 0}
            if change is CacheChange.STORED:
                own: list[dict[str, Any]] = []
                self._store(block, own)
                event = own[0] | {"lora_id": None, "lora_name": None, "extra_keys": None}
            events.append(event | where)
        journal.clear()

    def _of_groups(self, stored: Sequence[dict[str, Any]], kept: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """Events of the other groups, which vLLM publishes before those of full attention: for each run of its blocks
        one with all of their tokens and the names of the blocks that the group keeps, often none; and one for each
        further block that it keeps."""
        left = dict.fromkeys(kept)
        for number, group in enumerate(self._groups):
            stride = group.block_tokens // self._block_tokens
            for event in stored:
                prompt, first, _ = self._known[event["block_hashes"][0]]
                last = first + len(event["block_hashes"])
                ends = range((first // stride + 1) * stride, last + 1, stride)
                names = [name for end in ends if (number, name := prompt.block_hashes[end - 1]) in left]
                for name in names:
                    del left[number, name]
                if ends:
                    yield self._of_group(number, prompt, ends[0] - stride, ends[-1], names)
        for number, name in left:
            prompt, place, _ = self._known[name]
            stride = self._groups[number].block_tokens // self._block_tokens
            yield self._of_group(number, prompt, place + 1 - stride, place + 1, [name])

    def _of_group(self, number: int, prompt: Prompt, first: int, end: int, names: Sequence[int]) -> dict[str, Any]:
        """Blocks of a group, within these blocks of full attention."""
        group, size, adapter = self._groups[number], self._block_tokens * TOKEN_BYTES, prompt.scope.adapter
        kind = {GroupKind.WINDOW: "sliding_window", GroupKind.STATE: "mamba"}[group.kind]
        event: dict[str, Any] = {
            "type": "BlockStored", "block_hashes": names,
            "parent_block_hash": prompt.block_hashes[first - 1] if first else None,
            "token_ids": array("I", prompt.text[first * size : end * size]).tolist(),
            "block_size": group.block_tokens, "lora_id": None if adapter is None else adapter.number,
            "medium": MEDIUM, "lora_name": None if adapter is None else adapter.name, "group_idx": number,
            "kv_cache_spec_kind": kind,
        }  # fmt: skip
        if group.kind is GroupKind.WINDOW:
            event["kv_cache_spec_sliding_window"] = group.window_tokens
        return event

    def _store(self, block: int, events: list[dict[str, Any]]) -> None:
        """Add a stored block, as part of the event before where it follows the last block there."""
        prompt, place, _ = self._known[block]
        parent = prompt.block_hashes[place - 1] if place else None
        size = self._block_tokens * TOKEN_BYTES
        ids = array("I", prompt.text[place * size : (place + 1) * size]).tolist()
        extra_keys, adapter = prompt.extra_keys(place, self._block_tokens), prompt.scope.adapter
        last = events[-1] if events else {}
        if last.get("type") == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(block)
            last["token_ids"] += ids
            last["extra_keys"].append(extra_keys)
            return
        event = {
            "type": "BlockStored", "block_hashes": [block], "parent_block_hash": parent, "token_ids": ids,
            "block_size": self._block_tokens, "lora_id": None if adapter is None else adapter.number,
            "medium": MEDIUM, "lora_name": None if adapter is None else adapter.name,
            "extra_keys": [extra_keys], "group_idx": len(self._groups),
        }  # fmt: skip
        if self._groups:
            event["kv_cache_spec_kind"] = "full_attention"
        events.append(event)
