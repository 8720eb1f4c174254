"""Loads of registered adapters that requests need: an instance is made to have an adapter before the request is sent.

An adapter is loaded on its homes when it is registered, and there by the leader where they lose it. Wherever else a
request for it is placed, as it is hot or its homes are full or gone, the replica that has the request loads it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable
from typing import Final

from dualmap.router.errors import UnknownModelError
from dualmap.router.pool.view import ViewKeeper
from dualmap.router.telemetry.metrics import PoolMetrics
from dualmap.runtime.clock import Clock
from dualmap.runtime.engine_adapters import EngineAdapters, Made
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.instance_lifecycle import SERVING
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, Step, step_for
from dualmap.statestore.errors import StoreError
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

WAITS_S: Final = 60.0
"""Time that a request waits for a load at most. The load continues, for requests that come later."""
LOOKS_EVERY_S: Final = 0.5
"""Time after which a request that waits sees whether its instance is still in service."""
AGAIN_S: Final = 2.0
"""Time after a load that failed until the next one of the same adapter on the same server."""


class AdapterLoads:
    """The loads of one replica, for one pool."""

    def __init__(
        self, store: ReplicaPool, view: ViewKeeper, engines: EngineAdapters, clock: Clock, metrics: PoolMetrics
    ) -> None:
        self._store = store
        self._view = view
        self._engines = engines
        self._clock = clock
        self._metrics = metrics
        self._under_way: dict[tuple[str, str], asyncio.Task[Made]] = {}
        self._failed: dict[tuple[str, str], tuple[float, Made]] = {}
        """The last failures, and until when they stand, by URL and name."""
        self._unlisted: set[tuple[str, str, int]] = set()
        """What was loaded, by instance, name and generation, on servers that have no list of their names."""

    def lacks(self, instance_id: str, name: str) -> bool:
        """Whether a load comes before a request for the adapter. Never for a name that was not registered: the engine
        has it, or finds it."""
        adapter = self._view.adapters.get(name)
        spec = self._view.view.instances.get(instance_id)
        if adapter is None or spec is None:
            return False
        if not adapter.is_registered:
            return True
        if spec.models is None:
            return (instance_id, name, adapter.generation) not in self._unlisted
        return step_for(spec, name, adapter) is not None

    async def ensure(self, instance_id: str, name: str) -> Made:
        """Have the instance load the adapter, if it lacks that by what the store knows now, and say what came of it.

        Raises:
            UnknownModelError: it was unloaded meanwhile.
        """
        with contextlib.suppress(StoreError):  # it may have been replaced, or loaded by somebody else
            await self._view.refresh()
        if not self.lacks(instance_id, name):
            return Made()
        adapter, spec = self._view.adapters[name], self._view.view.instances[instance_id]
        if not adapter.is_registered:
            raise UnknownModelError(f"the adapter {name!r} was unloaded while this request waited", param="model")
        key = spec.url, name
        until_s, failed = self._failed.get(key, (-math.inf, None))
        if failed is not None and self._clock.monotonic_s() < until_s:
            return failed
        return await self._wait(instance_id, self._loading(spec, name, adapter))

    async def _wait(self, instance_id: str, loading: asyncio.Task[Made]) -> Made:
        """Wait for a load as long as a request does; others may wait for it too."""
        ends_s = self._clock.monotonic_s() + WAITS_S
        while not loading.done():
            await asyncio.wait((loading,), timeout=LOOKS_EVERY_S)
            spec = self._view.view.instances.get(instance_id)
            if spec is None or spec.state not in SERVING:
                return Made("it left service while it loaded")
            if self._clock.monotonic_s() >= ends_s and not loading.done():
                return Made(f"the load has taken {WAITS_S:g} s, and goes on: try again later")
        return Made("this replica stops") if loading.cancelled() else loading.result()

    def _loading(self, spec: InstanceSpec, name: str, adapter: RegisteredAdapter) -> asyncio.Task[Made]:
        key = spec.url, name
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._load(spec, name, adapter), name=f"adapter/{spec.instance_id}/{name}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task

    async def _load(self, spec: InstanceSpec, name: str, adapter: RegisteredAdapter) -> Made:
        return await self.make(spec, name, adapter, step_for(spec, name, adapter) or Step.LOAD)

    async def make(self, spec: InstanceSpec, name: str, adapter: RegisteredAdapter, step: Step) -> Made:
        """Have an instance make a step, and let all replicas know what it lists since."""
        began_s = self._clock.monotonic_s()
        made = await self._engines.make(spec.url, name, adapter, step)
        took_s = self._clock.monotonic_s() - began_s
        log.info(
            "adapter %s pool=%s instance=%s name=%s path=%s seconds=%.3f error=%s",
            step, self._store.name, spec.instance_id, name, adapter.engine_path, took_s, made.complaint or None,
        )  # fmt: skip
        self._metrics.adapter_steps[step, not made.complaint].inc()
        if step is not Step.UNLOAD:
            self._remember(spec, name, adapter, made)
            if not made.complaint:
                self._metrics.adapter_load_s.observe(took_s)
        with contextlib.suppress(StoreError):  # the leader's checks read the list, too
            await self._report(spec, made)
        return made

    def _remember(self, spec: InstanceSpec, name: str, adapter: RegisteredAdapter, made: Made) -> None:
        if made.complaint:
            self._failed[spec.url, name] = self._clock.monotonic_s() + AGAIN_S, made
            return
        self._failed.pop((spec.url, name), None)
        if made.listed.models is None:
            self._unlisted.add((spec.instance_id, name, adapter.generation))

    async def _report(self, spec: InstanceSpec, made: Made) -> None:
        same = [each for each in self._view.view.instances.values() if each.url == spec.url]
        changed = [(each.instance_id, made.listed.changes(each)) for each in same]
        for instance_id, changes in changed:
            if changes:
                await self._store.members.update_instance(instance_id, changes)
        await self._view.refresh()

    def doubt(self, instance_id: str) -> None:
        """The instance did not find the model of a request."""
        self._unlisted = {each for each in self._unlisted if each[0] != instance_id}

    def forget_all_but(self, instances: Iterable[str]) -> None:
        known, now_s = frozenset(instances), self._clock.monotonic_s()
        self._unlisted = {each for each in self._unlisted if each[0] in known}
        self._failed = {key: each for key, each in self._failed.items() if now_s < each[0]}

    async def close(self) -> None:
        """End the loads under way."""
        loads = [*self._under_way.values()]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
