"""A pool in memory whose instances a discovery enters from a cluster, on a clock that a test moves."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.leases import Lease
from dualmap.statestore.memory import MemoryStore
from dualmap.workers.context import LeaderContext
from dualmap.workers.discovery.job import Discovery
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.discovery.sources import source_of
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.pool_reader import CachedPoolReader
from dualmap.workers.upkeep_jobs import Drainer
from tests.support.kubernetes_cluster import Cluster, ClusterTransport
from tests.support.manual_clock import ManualClock, settle
from tests.workers.contexts import context_of


class DiscoveredPool:
    """Use as an async context manager."""

    def __init__(self, models: frozenset[str] | None = None, members_age_s: float = 0.0, **settings: Any) -> None:
        """With ``members_age_s`` the members that discovery reads may be so old, as in a worker."""
        self.clock = ManualClock()
        self.cluster = Cluster(self.clock)
        self.metrics = WorkerMetrics()
        self._models = models
        self._members_age_s = members_age_s
        if not {"label_selector", "inference_pool", "service"} & settings.keys():
            settings["label_selector"] = "app=vllm"
        self._settings = KubernetesSettings(api_url="http://cluster", namespace="default", **settings)
        self._store = MemoryStore(SchedulingSettings(), now_ms=self.clock.now_ms)
        self.pool = self._store.pool("default")
        self.lease: Lease | None = None
        self._discovery: Discovery | None = None

    async def __aenter__(self) -> DiscoveredPool:
        await self.lead()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end_term()
        await self._store.close()

    async def lead(self) -> None:
        """Begin a term, with a discovery that knows nothing."""
        self.lease = await self.pool.leader_lease.acquire("worker", 10**9)
        api = KubernetesApi(self._settings, transport=ClusterTransport(self.cluster))
        source = source_of(self._settings, self._models, api, clock=self.clock, jitter=random.Random(3))
        context = replace(self.leading, reader=CachedPoolReader(self.pool, self.clock, self._members_age_s))
        self._discovery = Discovery(context, source, api, members_age_s=self._members_age_s)
        await self._discovery.__aenter__()
        await settle(200)

    @property
    def leading(self) -> LeaderContext:
        """The context of the term's jobs, which read the pool itself."""
        context = context_of(self.pool, worker_id="worker", clock=self.clock, metrics=self.metrics)
        return context.leading(self.fence, self.pool)

    @property
    def fence(self) -> int:
        assert self.lease is not None
        return self.lease.fence

    async def end_term(self) -> None:
        if self._discovery is not None:
            await self._discovery.__aexit__(None, None, None)
            self._discovery = None
        if self.lease is not None:
            await self.pool.leader_lease.release(self.lease)

    async def round(self, *, after_s: float = 0.25, drains: bool = True) -> None:
        """One round of discovery, and one of the drainer, some time later."""
        assert self._discovery is not None
        await self.clock.advance(after_s)
        await settle(100)
        await self._discovery.tick()
        if drains:
            await Drainer(self.leading).tick()

    async def rounds(self, number: int = 4, *, after_s: float = 0.25) -> None:
        for _ in range(number):
            await self.round(after_s=after_s)

    async def make_ready(self) -> None:
        """Do what health checks do with an instance that starts."""
        for name, spec in (await self.instances()).items():
            if spec.state is InstanceState.STARTING and spec.origin is not None:
                await self.pool.members.set_instance_state(name, InstanceState.READY)

    async def instances(self) -> dict[str, InstanceSpec]:
        return dict((await self.pool.membership()).instances)

    async def states(self) -> dict[str, str]:
        return {name: spec.state.value for name, spec in (await self.instances()).items()}

    async def status(self) -> DiscoveryStatus:
        return await self.pool.publications.discovery()
