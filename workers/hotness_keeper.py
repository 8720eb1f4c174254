"""Hotness keeper: reads the arrival log, keeps the sliding window, publishes the tree of hot prefixes.

One keeper lives for one term of leadership. It starts from the published tree and reads the log from its
beginning, so a new leader knows within one round what the former one knew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from scheduling.hotness import HotnessTree, HotnessWindow, hotness_rule
from scheduling.instance import InstanceSpec
from scheduling.settings import SchedulingSettings
from scheduling.view import is_scheduled
from statestore.base import PoolStore
from statestore.clock import Clock
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_READ_LIMIT = 512
_READS_PER_TICK = 32
"""Together a bound on one round; a log longer than that is read over several rounds."""
_COUNTS_EVERY_S = 5.0
"""Counts of an unchanged tree are for people alone: this often is often enough."""


def scheduled_ready(instances: Mapping[str, InstanceSpec]) -> int:
    """The n of the hotness rule: ready instances that take part in scheduling."""
    return sum(is_scheduled(spec) for spec in instances.values())


class HotnessKeeper:
    """Owns the hotness window of one pool for one term."""

    name = "hotness"

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        settings: SchedulingSettings,
        *,
        interval_s: float,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self.interval_s = interval_s
        self._pool = pool
        self._fence = fence
        self._clock = clock
        self._metrics = metrics
        self._rule = hotness_rule(settings)
        self._window = HotnessWindow(
            int(settings.hotness_window_s * 1000), settings.hotness_window_requests, settings.max_key_blocks
        )
        self._last_entry = "0"
        self._published: Mapping[int, int] = {}
        """Counts as this keeper published them last."""
        self._published_s = clock.monotonic_s() - _COUNTS_EVERY_S

    async def tick(self) -> None:
        """Read what arrived; once caught up, publish the tree if it changed, or its counts if they did and it is time.

        Time moves with the arrivals: without traffic nothing heats up and nothing cools down.
        Raises StoreUnavailableError, LeaseLostError.
        """
        if not await self._catch_up():
            return
        membership = await self._pool.membership()
        tree = self._window.grow(membership.tree, scheduled_ready(membership.instances), self._rule)
        if tree is not membership.tree:
            self._tell(tree, await self._publish(tree))
        elif self._clock.monotonic_s() - self._published_s >= _COUNTS_EVERY_S:
            await self._renew_counts(tree)
        self._metrics.hot_prefixes.labels(self._pool.name).set(len(tree.hot))

    async def _catch_up(self) -> bool:
        for _ in range(_READS_PER_TICK):
            arrivals = await self._pool.arrivals(self._last_entry, _READ_LIMIT)
            for arrival in arrivals:
                self._window.add(arrival.at_ms, arrival.head)
                self._window.expire(arrival.at_ms)
                self._last_entry = arrival.entry_id
            if len(arrivals) < _READ_LIMIT:
                return True
        return False

    async def _publish(self, tree: HotnessTree) -> int:
        """The version of the tree, which grows only if the tree is another one."""
        counts = self._counts(tree)
        version = await self._pool.publish_tree(tree, counts, fence=self._fence)
        self._published, self._published_s = counts, self._clock.monotonic_s()
        return version

    async def _renew_counts(self, tree: HotnessTree) -> None:
        if self._counts(tree) != self._published:
            await self._publish(tree)

    def _counts(self, tree: HotnessTree) -> dict[int, int]:
        return {prefix: self._window.count(prefix) for prefix in tree.hot}

    def _tell(self, tree: HotnessTree, version: int) -> None:
        self._metrics.trees_published.labels(self._pool.name).inc()
        log.info(
            "hotness tree published pool=%s version=%d hot_prefixes=%d deepest=%d window_requests=%d",
            self._pool.name,
            version,
            len(tree.hot),
            max(tree.hot.values(), default=0),
            len(self._window),
        )
