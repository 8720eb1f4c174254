"""An engine's cache and its events, for subscribers to follow."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.simulation.emulator.kv_publisher import KvEventPublisher
from dualmap.statestore.kv_views import KvEventRecord, KvViewStatus
from dualmap.statestore.pool import PoolStore

BLOCK_TOKENS = 4
_names = itertools.count(1)
_times = itertools.count(1)


def chain(ids: Sequence[int]) -> Chain:
    return engine_chain(ids, BLOCK_TOKENS)


class EngineCache:
    """Publishes what it stores and evicts, one batch a call."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.publisher = publisher
        self.names: dict[tuple[int, ...], int] = {}
        """By the prompt that a block ends."""

    def store(self, ids: Sequence[int], *, published: bool = True, **changes: Any) -> None:
        """The full blocks of a prompt that are not held."""
        parent: int | None = None
        new: list[Any] = []
        names: list[Any] = []
        for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
            prompt = tuple(ids[:end])
            if prompt in self.names:
                parent = self.names[prompt]
                continue
            self.names[prompt] = next(_names)
            names.append(self.names[prompt])
            new += ids[end - BLOCK_TOKENS : end]
        event = {
            "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": new,
            "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
        }  # fmt: skip
        self._publish([event | changes], published)

    def offload(self, ids: Sequence[int], kind: str = "BlockStored", medium: str = "CPU") -> None:
        """Announce the blocks of a prompt that a tier has stored or removed, by their names alone."""
        ends = range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)
        stored: dict[str, Any] = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None}
        events = [{"type": kind, "block_hashes": [self.names[tuple(ids[:end])]], "medium": medium} for end in ends]
        self._publish([event | stored if kind == "BlockStored" else event for event in events], True)

    def evict(self, ids: Sequence[int], *, published: bool = True) -> None:
        """The last block of a prompt."""
        name = self.names.pop(tuple(ids))
        self._publish([{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}], published)

    def clear(self) -> None:
        self.names.clear()
        self._publish([{"type": "AllBlocksCleared"}], True)

    def _publish(self, events: list[dict[str, Any]], published: bool) -> None:
        if published:
            self.publisher.publish(events, float(next(_times)))
        else:
            self.publisher.lose(events, float(next(_times)))

    def blocks(self) -> set[int]:
        """The fleet's hashes of all that it holds."""
        return {chain(prompt).hashes[-1] for prompt in self.names}


async def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait for a condition, by polling it; an awaitable one is awaited."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)


async def record_of(pool: PoolStore, instance_id: str = "a") -> KvEventRecord:
    return (await pool.kv_events.records())[instance_id]


async def is_exactly(pool: PoolStore, engine: EngineCache, status: KvViewStatus = KvViewStatus.EXACT) -> bool:
    """Whether the store lists what the engine holds, and no more."""
    listed = (await pool.publications.recent_blocks(("a",), 1000))["a"]
    return (await record_of(pool)).status is status and set(listed) == engine.blocks()
