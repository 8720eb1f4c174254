"""The pool's store as its leader's rounds use it: every write carries the fence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduling.granting import CommitReply
from scheduling.hotness import HotnessTree
from scheduling.learned import Learned
from scheduling.learning import Sample
from scheduling.queue_order import QueueHead, QueuePlan
from scheduling.rebalance import HotQueue
from scheduling.request import Request
from statestore.base import Arrival, Migration, PoolStore


class LedPool:
    """The fleet of ``scheduling.leader_jobs``."""

    def __init__(self, pool: PoolStore, fence: int) -> None:
        self._pool = pool
        self._fence = fence

    async def queue(self, instance_id: str) -> HotQueue | None:
        return await self._pool.queue(instance_id)

    async def queue_head(self, instance_id: str) -> QueueHead | None:
        return await self._pool.queue_head(instance_id)

    async def commit(self, plan: QueuePlan) -> CommitReply:
        return await self._pool.commit(plan)

    async def migrate(self, request: Request, target_id: str, *, reason: str) -> Migration:
        return await self._pool.migrate(request, target_id, reason=reason, fence=self._fence)

    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        return await self._pool.arrivals(after, limit)

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int]) -> int:
        return await self._pool.publish_tree(tree, counts, fence=self._fence)

    async def samples(self, after: str, limit: int) -> Sequence[Sample]:
        return await self._pool.samples(after, limit)

    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float]) -> None:
        await self._pool.publish_learned(learned, tokens_per_s, fence=self._fence)
