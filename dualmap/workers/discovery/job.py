"""Discovery of a pool's instances for one term of its leader; routers learn of them through the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType

from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.workers.context import LeaderContext
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.discovery.plan import Act, Action, Plan, described_after, plan_round
from dualmap.workers.discovery.sources import Sighting, Source, source_of

log = logging.getLogger(__name__)

_SHOWN_LEFT_OUT = 20
_CALLS_TOGETHER = 32
"""Calls under way at once: thousands of pods are entered at a first list, each in two round trips."""


class Discovery:
    """Compares what the source has found with the members, and enters, drains and removes those that discovery owns;
    where the pool has ``discovery``.

    ``async with`` starts and ends the source. A new leader lists everything again.
    """

    name = "discovery"
    interval_s = 0.1

    def __init__(
        self,
        context: LeaderContext,
        source: Source,
        api: KubernetesApi,
        *,
        members_age_s: float = 0.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Members are read again when they are so old; 0: in every round. What the reader returns is no older.
        ``on_change`` is called when a round has changed members."""
        self._pool = context.pool
        self._fence = context.fence
        self._reader = context.reader
        self._source = source
        self._api = api
        self._worker_id = context.worker_id
        self._metrics = context.metrics
        self._clock = context.clock
        self._members_age_s = members_age_s
        self._on_change = on_change
        self._read: Mapping[str, InstanceSpec] = {}
        self._read_s = float("-inf")
        self._running: asyncio.Task[None] | None = None
        self._planned: tuple[Sighting, Mapping[str, InstanceSpec], Plan] | None = None
        """The last plan, and what it was made from."""
        self._reported = DiscoveryStatus()
        self._left_out: tuple[str, ...] = ()
        self._changed: dict[str, tuple[float, InstanceSpec | None]] = {}
        """Descriptions as its own last changes found or left them, each with the time until which what was read may not
        have them. A pod that comes and goes at once would be drained late without them."""

    async def __aenter__(self) -> Discovery:
        self._running = asyncio.create_task(self._source.run(), name=f"{self._pool.name}/discovery source")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._metrics.end_term(self._pool.name)
        await self._api.close()

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        if self._running is not None and self._running.done():
            self._running.result()  # a defect: the log shows it at every round
        sighting = self._source.sighting()
        if sighting is None:
            await self._publish(None)
            return
        members = await self._members()
        plan = self._plan(sighting, members)
        self._log_left_out(plan, sighting)
        # Together, as each waits for the store: what is published in turn would put off the next round.
        calls: list[Callable[[], Awaitable[None]]] = [partial(self._publish, sighting)]
        calls += [partial(self._carry_out, action, members.get(action.instance_id)) for action in plan.actions]
        for first in range(0, len(calls), _CALLS_TOGETHER):
            await asyncio.gather(*(call() for call in calls[first : first + _CALLS_TOGETHER]))
        if plan.actions:
            self._on_change()  # a newcomer is to be checked at once

    def _plan(self, sighting: Sighting, members: Mapping[str, InstanceSpec]) -> Plan:
        """The plan of a round. Thousands of pods are not compared again while nothing has changed."""
        if self._planned is None or self._planned[0] is not sighting or self._planned[1] is not members:
            self._planned = sighting, members, plan_round(sighting.found, members)
        return self._planned[2]

    async def _carry_out(self, action: Action, member: InstanceSpec | None) -> None:
        after: InstanceSpec | None = None

        def described(known: InstanceSpec | None) -> InstanceSpec | None:
            nonlocal after
            changed = described_after(action, known)
            after = changed or known
            return changed

        if action.act is Act.REMOVE:
            done = await self._pool.members.remove_instance(action.instance_id, fence=self._fence)
        else:
            # An engine that was out of service is taken to have lost its cache, as where an operator resumes it.
            is_parked = member is not None and member.state is not InstanceState.DRAINING
            forgets = action.act is Act.REPLACE or (action.act is Act.RESUME and is_parked)
            done = await self._pool.members.describe_instance(
                action.instance_id, described, fence=self._fence, forgets_cache=forgets
            )
        self._changed[action.instance_id] = self._clock.monotonic_s() + 2 * self._members_age_s, after
        if done:
            self._metrics.discovered.labels(self._pool.name, action.act.value).inc()
            log.info(
                "discovery pool=%s instance=%s %s%s",
                self._pool.name,
                action.instance_id,
                action.act.value,
                f" url={action.found.url} uid={action.found.uid}" if action.found else f": {action.why}",
            )

    async def _members(self) -> Mapping[str, InstanceSpec]:
        """The members, which may be old: every change states what it expects. To read thousands costs more than to
        compare them."""
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s >= self._members_age_s:
            self._read, self._read_s = (await self._reader.membership()).instances, now_s
        self._changed = {name: kept for name, kept in self._changed.items() if kept[0] > now_s}
        if not self._changed:
            return self._read
        own = {name: spec for name, (_, spec) in self._changed.items()}
        return {name: spec for name, spec in {**self._read, **own}.items() if spec is not None}

    def _log_left_out(self, plan: Plan, sighting: Sighting) -> None:
        left_out = (*sighting.left_out, *plan.left_out)
        for text in left_out:
            if text not in self._left_out:
                log.warning("discovery left out pool=%s %s", self._pool.name, text)
        self._left_out = left_out

    async def _publish(self, sighting: Sighting | None) -> None:
        """Say how it goes, where that has changed."""
        trouble = self._source.trouble
        serving = 0 if sighting is None else sum(not each.not_serving for each in sighting.found.values())
        now = DiscoveryStatus(
            by=self._worker_id,
            source=self._source.name,
            state="failing" if trouble is not None else "starting" if sighting is None else "watching",
            detail=trouble or "",
            pods=0 if sighting is None else sighting.pods,
            serving=serving,
            left_out=self._left_out[:_SHOWN_LEFT_OUT],
        )
        self._metrics.discovery_failing.labels(self._pool.name).set(trouble is not None)
        if now != self._reported:
            written = replace(now, at_ms=await self._pool.now_ms())
            await self._pool.publications.record_discovery(written, fence=self._fence)
            self._reported = now


def discovery_of(
    context: LeaderContext,
    kubernetes: KubernetesSettings,
    *,
    members_age_s: float = 0.0,
    on_change: Callable[[], None] = lambda: None,
) -> Discovery:
    """The discovery of a pool in a cluster."""
    api, settings = KubernetesApi(kubernetes), context.settings
    is_named = settings.model != PoolSettings.model_fields["model"].default
    models = frozenset((settings.model, *settings.aliases, *settings.loras)) if is_named else None
    source = source_of(kubernetes, models, api, clock=context.clock, jitter=context.jitter)
    return Discovery(context, source, api, members_age_s=members_age_s, on_change=on_change)
