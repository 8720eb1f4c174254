"""The pool's store as its leader's rounds use it: every write carries the fence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduling.hotness import HotnessTree
from scheduling.learned import Learned
from scheduling.queue_order import QueuePlan
from scheduling.request import Request
from statestore.base import PoolStore
from statestore.memory.state import PoolState


class LedPool:
    """The fleet of ``scheduling.leader_jobs``.

    Each call returns what the store's returns: an awaitable of a ``PoolStore``, the answer itself of a ``PoolState``.
    """

    def __init__(self, pool: PoolStore | PoolState, fence: int) -> None:
        self._pool = pool
        self._fence = fence

    def queue(self, instance_id: str) -> Any:
        return self._pool.queue(instance_id)

    def queue_head(self, instance_id: str) -> Any:
        return self._pool.queue_head(instance_id)

    def commit(self, plan: QueuePlan) -> Any:
        return self._pool.commit(plan)

    def migrate(self, request: Request, target_id: str, *, reason: str) -> Any:
        return self._pool.migrate(request, target_id, reason=reason, fence=self._fence)

    def arrivals(self, after: str, limit: int) -> Any:
        return self._pool.arrivals(after, limit)

    def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int]) -> Any:
        return self._pool.publish_tree(tree, counts, fence=self._fence)

    def samples(self, after: str, limit: int) -> Any:
        return self._pool.samples(after, limit)

    def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float]) -> Any:
        return self._pool.publish_learned(learned, tokens_per_s, fence=self._fence)
