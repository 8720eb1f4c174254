"""Gauges of the whole fleet, read from an overview that is fetched at a scrape, and not too often.

A scrape never waits for a store that is slow: it has the last overview, and its age.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.runtime.clock import Clock
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.call_values import PoolOverview
from dualmap.statestore.errors import StoreError
from dualmap.statestore.port import ReplicaPool

MAX_AGE_S = 1.0
FRESH_WITHIN_S = 0.05
"""A scrape waits so long for fresh figures; then it gets the last ones, and their age."""
KEPT_S = 60.0
"""Largest age of reported figures: older ones would say of instances what was true long ago."""
_LOAD_GAUGES = {
    "pending_tokens": "Uncached prompt tokens sent or queued, prefill not finished",
    "dispatched_tokens": "The dispatched part of the pending tokens",
    "queued_requests": "Requests held for the instance",
    "running_requests": "Requests dispatched and unfinished",
    "context_tokens": "Prompt and expected output tokens of the running requests",
    "cached_blocks": "Blocks the KV metadata lists for the instance",
    "prefill_tokens_per_s": "Learned prefill rate",
    "stalled_s": "Time since a prefill was last seen to finish while on-time work is pending",
    "silent_s": "Time since a prefill was last seen to finish while requests run",
}
_METRIC_NAMES = {
    "prefill_tokens_per_s": "prefill_tokens_per_second",
    "stalled_s": "stalled_seconds",
    "silent_s": "silent_seconds",
}
"""Names for figures whose unit Prometheus wants spelt out."""


class FleetOverviews:
    """The last overview of every pool; refetched when older than ``MAX_AGE_S``."""

    def __init__(self, pools: Mapping[str, ReplicaPool], *, clock: Clock) -> None:
        self._pools = pools
        self._clock = clock
        self._fetched_s: dict[str, float] = {}
        self._locks = {name: asyncio.Lock() for name in pools}
        self.overviews: dict[str, PoolOverview] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    @property
    def ages_s(self) -> Mapping[str, float]:
        """How old each is."""
        now_s = self._clock.monotonic_s()
        return {pool: now_s - fetched_s for pool, fetched_s in self._fetched_s.items()}

    async def get(self, pool: str, max_age_s: float = MAX_AGE_S) -> PoolOverview:
        """An overview no older than ``max_age_s``; callers at the same time share one store call.

        Raises:
            StoreUnavailableError: the store is out of reach and there is no fresh one.
        """
        async with self._locks[pool]:
            fetched_s = self._fetched_s.get(pool)
            now_s = self._clock.monotonic_s()
            if fetched_s is None or now_s - fetched_s >= max_age_s:
                self.overviews[pool] = await self._pools[pool].overview()
                self._fetched_s[pool] = now_s
            return self.overviews[pool]

    async def refresh(self) -> None:
        """Have all refreshed, and wait for that no longer than a store takes which is well: one that is slow, or away,
        must not keep a scrape waiting, which would lose the figures of this replica with those of the fleet."""
        for pool in self._pools:
            if pool not in self._under_way:
                task = self._under_way[pool] = asyncio.create_task(self._fetch(pool))
                task.add_done_callback(partial(self._fetched, pool))
        if self._under_way:
            await asyncio.wait([*self._under_way.values()], timeout=FRESH_WITHIN_S)
        for pool, age_s in self.ages_s.items():
            if age_s > KEPT_S:
                self.overviews.pop(pool, None)

    def _fetched(self, pool: str, _: asyncio.Task[None]) -> None:
        del self._under_way[pool]

    async def _fetch(self, pool: str) -> None:
        with contextlib.suppress(StoreError):  # the last figures stay, and grow older
            await self.get(pool)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Overviews(Protocol):
    """Overviews by pool, and how old they are."""

    @property
    def overviews(self) -> Mapping[str, PoolOverview]: ...

    @property
    def ages_s(self) -> Mapping[str, float]: ...


class FleetGauges(Collector):
    """Writes the overviews down as gauges. Every replica reports the same fleet."""

    def __init__(self, fleet: Overviews, registry: CollectorRegistry) -> None:
        self._fleet = fleet
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        overviews = self._fleet.overviews
        age = GaugeMetricFamily(
            "dualmap_fleet_figures_age_seconds",
            "Time since the store told the figures of the fleet that this page has",
            labels=["pool"],
        )
        for pool, age_s in self._fleet.ages_s.items():
            age.add_metric([pool], age_s)
        yield age
        yield from _loads(overviews)
        yield from _states(overviews)
        yield _migrations(overviews)
        yield _leaders(overviews)
        replicas = GaugeMetricFamily("dualmap_replicas", "Router replicas with a lease", labels=["pool"])
        for pool, overview in overviews.items():
            live = [replica for replica in overview.replicas if replica.is_alive(overview.now_ms)]
            replicas.add_metric([pool], len(live))
        yield replicas


def _loads(overviews: Mapping[str, PoolOverview]) -> Iterator[Metric]:
    for name, text in _LOAD_GAUGES.items():
        gauge = GaugeMetricFamily(
            f"dualmap_instance_{_METRIC_NAMES.get(name, name)}", text, labels=["pool", "instance"]
        )
        for pool, overview in overviews.items():
            for instance_id, load in overview.loads.items():
                gauge.add_metric([pool, instance_id], getattr(load, name))
        yield gauge


def _states(overviews: Mapping[str, PoolOverview]) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "dualmap_instance_state", "1 for the state the instance is in", labels=["pool", "instance", "state"]
    )
    members = GaugeMetricFamily("dualmap_instances", "Instances by state", labels=["pool", "state"])
    for pool, overview in overviews.items():
        for instance_id, load in overview.loads.items():
            state.add_metric([pool, instance_id, load.state.value], 1)
        for each in InstanceState:
            members.add_metric([pool, each.value], sum(load.state is each for load in overview.loads.values()))
    yield state
    yield members


def _migrations(overviews: Mapping[str, PoolOverview]) -> Metric:
    family = CounterMetricFamily(
        "dualmap_migrations", "Held requests moved to another instance", labels=["pool", "reason"]
    )
    for pool, overview in overviews.items():
        for reason, count in overview.migrations.items():
            family.add_metric([pool, reason], count)
    return family


def _leaders(overviews: Mapping[str, PoolOverview]) -> Metric:
    family = GaugeMetricFamily("dualmap_leader", "Fencing token of the leading worker", labels=["pool", "owner"])
    for pool, overview in overviews.items():
        if overview.leader is not None:
            family.add_metric([pool, overview.leader.owner], overview.leader.fence)
    return family
