"""The leader's jobs that learn for all replicas and publish: the tree of hot prefixes, and the model of the instances.

Each lives for one term of leadership. It starts from what is published and reads its log from the beginning, so a new
leader has the knowledge of the former one within one round.
"""

from __future__ import annotations

import logging

from dualmap.scheduling.estimates.learning import FleetLearner
from dualmap.scheduling.queues.leader_jobs import HotnessKeeper, LearningKeeper
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessRule, HotnessTree, HotnessWindow
from dualmap.scheduling.steps import drive
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)

_COUNTS_EVERY_S = 5.0
"""Counts of an unchanged tree are only for people, and published no more often."""


class Learner:
    """Learns prefill rates, TTFT weights and bytes per token from the log of first tokens and ends of requests, and
    publishes them."""

    name = "learner"
    interval_s = 1.0

    def __init__(self, context: LeaderContext) -> None:
        self._context = context
        self._keeper: LearningKeeper | None = None

    async def tick(self) -> None:
        """Learn what was logged since the last round. Raises StoreUnavailableError, LeaseLostError."""
        context = self._context
        if self._keeper is None:
            self._keeper = LearningKeeper(FleetLearner((await context.pool.membership()).learned))
        loads, instances = await context.reader.loads(), (await context.reader.membership()).instances
        samples = await drive(self._keeper.tick(loads, instances, await context.pool.now_ms()), context.led)
        context.metrics.samples.labels(context.pool.name).inc(samples)


class HotnessJob:
    """Reads the arrival log, keeps the sliding window, and publishes the tree of hot prefixes."""

    name = "hotness"
    interval_s = 1.0

    def __init__(self, context: LeaderContext, scheduling: SchedulingSettings) -> None:
        self._context = context
        self._clock = context.clock
        self._keeper = HotnessKeeper(HotnessWindow.of(scheduling), HotnessRule())
        self._published_s = self._clock.monotonic_s() - _COUNTS_EVERY_S

    @property
    def arrived(self) -> int:
        """Arrivals read in this term."""
        return self._keeper.arrived

    async def tick(self) -> None:
        """Read the arrivals, and publish the tree if it changed, or its counts if they changed and are due. Raises
        StoreUnavailableError, LeaseLostError."""
        led, membership = self._context.led, await self._context.pool.membership()
        tree, version = await drive(self._keeper.tick(membership.tree, membership.instances), led)
        if version is not None:
            self._report(tree, version)
        elif self._clock.monotonic_s() - self._published_s >= _COUNTS_EVERY_S:
            version = await drive(self._keeper.renew_counts(tree), led)
        if version is not None:
            self._published_s = self._clock.monotonic_s()
        self._context.metrics.hot_prefixes.labels(self._context.pool.name).set(len(tree.hot))

    def _report(self, tree: HotnessTree, version: int) -> None:
        self._context.metrics.trees_published.labels(self._context.pool.name).inc()
        log.info(
            "hotness tree published pool=%s version=%d hot_prefixes=%d deepest=%d window_requests=%d",
            self._context.pool.name,
            version,
            len(tree.hot),
            max(tree.hot.values(), default=0),
            len(self._keeper.window),
        )
