"""Hotness keeper: reads the arrival log, keeps the sliding window, publishes the tree of hot prefixes.

One keeper lives for one term of leadership. It starts from the published tree and reads the log from its beginning, so
a new leader has the knowledge of the former one within one round.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dualmap.runtime.clock import Clock
from dualmap.scheduling.queues.leader_jobs import HotnessKeeper
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessRule, HotnessTree, HotnessWindow
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.view import takers
from dualmap.scheduling.steps import drive
from dualmap.statestore.led import LedPool
from dualmap.statestore.pool import PoolStore
from dualmap.workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_COUNTS_EVERY_S = 5.0
"""Counts of an unchanged tree are only for people, and published no more often."""


def scheduled_ready(instances: Mapping[str, InstanceSpec]) -> int:
    """The n of the hotness rule: ready instances on the rings that requests are placed by first."""
    return len(takers(instances, Leg.PREFILL)) or len(takers(instances, Leg.WHOLE))


class HotnessJob:
    """Owns the hotness keeper of one pool for one term."""

    name = "hotness"
    interval_s = 1.0

    def __init__(
        self,
        pool: PoolStore,
        fence: int,
        settings: SchedulingSettings,
        *,
        clock: Clock,
        metrics: WorkerMetrics,
    ) -> None:
        self._pool = pool
        self._fence = fence
        self._clock = clock
        self._metrics = metrics
        self._keeper = HotnessKeeper(HotnessWindow.of(settings), HotnessRule())
        self._published: Mapping[int, int] = {}
        """Counts as this keeper published them last."""
        self._published_s = clock.monotonic_s() - _COUNTS_EVERY_S

    @property
    def arrived(self) -> int:
        """Arrivals read in this term."""
        return self._keeper.arrived

    async def tick(self) -> None:
        """Read the arrivals, and publish the tree if it changed, or its counts if they changed and are due.

        Time moves with the arrivals: without traffic nothing heats up and nothing cools down.
        Raises StoreUnavailableError, LeaseLostError.
        """
        membership = await self._pool.membership()
        ready = scheduled_ready(membership.instances)
        tree = await drive(self._keeper.tick(membership.tree, ready), LedPool(self._pool, self._fence))
        if tree is not membership.tree:
            self._report(tree, await self._publish(tree))
        elif self._clock.monotonic_s() - self._published_s >= _COUNTS_EVERY_S:
            await self._renew_counts(tree)
        self._metrics.hot_prefixes.labels(self._pool.name).set(len(tree.hot))

    async def _publish(self, tree: HotnessTree) -> int:
        """The version of the tree, which grows only if the tree changed."""
        counts = self._keeper.counts(tree)
        version = await self._pool.publications.publish_tree(tree, counts, fence=self._fence)
        self._published, self._published_s = counts, self._clock.monotonic_s()
        return version

    async def _renew_counts(self, tree: HotnessTree) -> None:
        if self._keeper.counts(tree) != self._published:
            await self._publish(tree)

    def _report(self, tree: HotnessTree, version: int) -> None:
        self._metrics.trees_published.labels(self._pool.name).inc()
        log.info(
            "hotness tree published pool=%s version=%d hot_prefixes=%d deepest=%d window_requests=%d",
            self._pool.name,
            version,
            len(tree.hot),
            max(tree.hot.values(), default=0),
            len(self._keeper.window),
        )
