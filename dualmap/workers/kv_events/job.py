"""The job of every worker, leading or not: its share of the instances has a subscriber each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import zmq.asyncio

from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, cache_name
from dualmap.statestore.errors import StoreError
from dualmap.statestore.kv_views import KvViewStatus
from dualmap.workers.context import PoolContext
from dualmap.workers.kv_events.asked_sources import AskedSources, Asking
from dualmap.workers.kv_events.engine_names import root_hashes
from dualmap.workers.kv_events.share import share_of
from dualmap.workers.kv_events.source import EventSource, source_of
from dualmap.workers.kv_events.subscriber import Subscriber
from dualmap.workers.kv_events.view_writer import ViewWriter

LEASE_MS: Final = 2000
"""A dead worker's instances are taken over after this."""


class KvEventsJob:
    """A context manager: at its end every instance is given back."""

    name = "kv_events"
    interval_s = 0.5

    def __init__(self, context: PoolContext, prober: Asking) -> None:
        """``prober`` asks instances where they publish, where the pool does not say."""
        self._asked = AskedSources(prober, context.clock)
        self._pool = context.pool
        self._settings = context.settings
        self._roots = root_hashes(context.settings.hash_seed)
        self._worker_id = context.worker_id
        self._clock = context.clock
        self._metrics = context.metrics
        self._adapters: Mapping[str, RegisteredAdapter] = {}
        self._zmq: zmq.asyncio.Context | None = None
        self._running: dict[EventSource, tuple[asyncio.Task[None], ViewWriter]] = {}

    async def __aenter__(self) -> KvEventsJob:
        self._zmq = zmq.asyncio.Context()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop(tuple(self._running))
        await self._asked.close()
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
        try:
            await self._pool.kv_events.renew_subscriber(self._worker_id, 0)
        except StoreError:
            return  # the lease ends by itself

    async def tick(self) -> None:
        """Renew the lease, and follow the share that the living leave. Raises StoreUnavailableError."""
        living = await self._pool.kv_events.renew_subscriber(self._worker_id, LEASE_MS)
        sources = await self._sources(living)
        mine = share_of(self._worker_id, sources, living)
        wanted = {sources[name] for name in mine}
        ended = [source for source, (task, _) in self._running.items() if task.done()]
        await self._stop([*ended, *(self._running.keys() - wanted)])
        for source in wanted - self._running.keys():
            self._start(source)
        self._report()

    async def _sources(self, living: Sequence[str]) -> Mapping[str, EventSource]:
        membership = await self._pool.membership()
        members, self._adapters = membership.instances, membership.adapters
        found = {name: source_of(spec, self._settings) for name, spec in members.items()}
        sources = {name: source for name, source in found.items() if source is not None}
        if self._settings.kv_events == "instances":
            mine = share_of(self._worker_id, members.keys() - sources.keys(), living)
            sources |= self._asked.of([members[name] for name in sorted(mine)])
        return sources

    def _start(self, source: EventSource) -> None:
        assert self._zmq is not None, "used outside of its context"
        writer = ViewWriter(
            self._pool,
            source,
            tiers=self._settings.kv_tiers.sizes,
            clock=self._clock,
            metrics=self._metrics,
            wall_s=time.time,
            cached_as=lambda name: cache_name(name, self._adapters.get(name)),
            roots=self._roots,
        )
        subscriber = Subscriber(
            self._pool.name,
            source,
            self._worker_id,
            writer,
            context=self._zmq,
            clock=self._clock,
            metrics=self._metrics,
        )
        task = asyncio.create_task(subscriber.run(), name=f"{self._pool.name}/kv_events/{source.instance_id}")
        self._running[source] = (task, writer)

    async def _stop(self, sources: Iterable[EventSource]) -> None:
        tasks = [self._running.pop(source)[0] for source in set(sources) if source in self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self) -> None:
        for status in KvViewStatus:
            count = sum(writer.status is status for _, writer in self._running.values())
            self._metrics.kv_event_views.labels(self._pool.name, status.value).set(count)
