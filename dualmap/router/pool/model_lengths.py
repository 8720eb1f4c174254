"""The longest context of each pool's model, as one of its instances reports it."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any, Final

from dualmap.router.pool.model_lists import InstanceQueries
from dualmap.router.pool.served_pool import ServedPool
from dualmap.runtime.clock import Clock

KEPT_S: Final = 60.0
"""An answer is kept this long: an instance that is replaced may have another limit."""
RETRY_S: Final = 5.0
"""Time before the next query after one without an answer. The former length, if any, is kept meanwhile."""


class ModelLengths:
    """Asks an instance's ``/v1/models``, and remembers."""

    def __init__(self, clock: Clock, queries: InstanceQueries) -> None:
        self._clock = clock
        self._queries = queries
        self._lengths: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, pool: ServedPool) -> int | None:
        """``max_model_len`` of the pool's model; None while no instance reported it. Waits for ``QUERY_TIMEOUT_S`` at
        most; callers at the same time share one request."""
        name = pool.settings.name
        async with self._locks[name]:
            now_s = self._clock.monotonic_s()
            if now_s >= self._due_s.get(name, now_s):
                length = await self._query(pool)
                self._due_s[name] = now_s + (RETRY_S if length is None else KEPT_S)
                if length is not None:
                    self._lengths[name] = length
        return self._lengths.get(name)

    async def _query(self, pool: ServedPool) -> int | None:
        view, model = pool.view.view, pool.settings.model
        ready = view.serving(model).ready
        if not ready:
            return None
        _, answer = await self._queries.models(view.instances[random.choice(ready)].url)
        return _length_in(answer, model)


def _length_in(answer: Any, model: str) -> int | None:
    """The model's own length, else that of the first card which has one: adapters share their model's."""
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list):
        return None
    lengths = {card.get("id"): card.get("max_model_len") for card in cards if isinstance(card, dict)}
    known = [length for length in (lengths.get(model), *lengths.values()) if isinstance(length, int) and length > 0]
    return known[0] if known else None
