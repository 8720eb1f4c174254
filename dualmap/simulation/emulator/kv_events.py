"""Changes of the emulated engine's prefix cache, as KV events: blocks get their token ids back.

The engine knows hashes. The prompts of the requests under way say what is in them, and a block enters the cache while
its request is under way.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.emulator.generation_request import Prompt
from dualmap.simulation.engine.kv_pool import CacheChange, Journal
from dualmap.simulation.engine.kv_tiers import MEDIA
from dualmap.simulation.workload.tokenizer import TOKEN_BYTES

if TYPE_CHECKING:
    from dualmap.simulation.emulator.kv_publisher import KvEventPublisher

MEDIUM = "GPU"


class KvEventLog:
    """The journal of one engine's cache, published batch by batch."""

    def __init__(self, block_tokens: int, publisher: KvEventPublisher) -> None:
        self.journal: Journal = []
        """Journal that the engine's pool writes into."""
        self.of_tiers: Mapping[Tier, Journal] = {tier: [] for tier in Tier}
        """Journals of the tiers behind it."""
        self._block_tokens = block_tokens
        self._publisher = publisher
        self._prompts: dict[str, Prompt] = {}
        self._known: dict[int, tuple[Prompt, int, int]] = {}
        """Known blocks: a prompt with the block, its place in there, and how many requests under way have it."""

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
        for change, block in self.journal:
            if change is CacheChange.STORED:
                self._store(block, events)
            elif change is CacheChange.REMOVED:
                events.append({"type": "BlockRemoved", "block_hashes": [block], "medium": MEDIUM, "group_idx": 0})
            else:
                events.append({"type": "AllBlocksCleared"})
        self.journal.clear()
        for tier, journal in self.of_tiers.items():
            self._publish_tier(tier, journal, events)
        self._publisher.publish(events, published_s)

    def _publish_tier(self, tier: Tier, journal: Journal, events: list[dict[str, Any]]) -> None:
        """Add what a tier keeps and forgets, as vLLM's offloading does with ``self_describing_kv_events``."""
        where = {"medium": MEDIA[tier], "locality": "REMOTE" if tier is Tier.POOL else "LOCAL"}
        told: list[dict[str, Any]] = []
        for change, block in journal:
            if change is CacheChange.STORED:
                self._store(block, told)
            else:
                told.append({"type": "BlockRemoved", "block_hashes": [block], "group_idx": 0})
        journal.clear()
        events += [event | where for event in told]

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
            "extra_keys": [extra_keys], "group_idx": 0,
        }  # fmt: skip
        events.append(event)
