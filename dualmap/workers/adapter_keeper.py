"""The leader's job that makes instances have the adapters that were registered: what a home lacks is loaded, what was
replaced while an instance was away is replaced there too, and what was unloaded goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final

from dualmap.runtime.engine_adapters import EngineAdapters, Made
from dualmap.scheduling.backoff import worth_logging
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.registered_adapters import (
    DueStep,
    RegisteredAdapter,
    Step,
    due_steps,
    homes_of,
    step_for,
)
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import Membership
from dualmap.statestore.pool.adapters import AdapterUse
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)

PREPARES_S: Final = 30.0
"""Time for which an instance that could serve stays out of service to load adapters, at most."""
LEFT_MS: Final = 3000
"""Time since its last change for which an adapter is left to the replica that made it."""
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 120.0
"""Pauses between attempts that fail: each is twice the one before."""


@dataclass(frozen=True, slots=True)
class _Failure:
    made: Made
    times: int
    due_s: float


class AdapterKeeper:
    """Has registered adapters loaded on their homes, replaced and unloaded where instances lack that.

    One call at a time for each server, as its engine computes nothing while it loads; those of several servers run side
    by side. ``async with`` ends them.
    """

    name = "adapters"
    interval_s = 1.0

    def __init__(self, context: LeaderContext, engines: EngineAdapters) -> None:
        self._context = context
        self._engines = engines
        self._view: ClusterView | None = None
        self._homes: dict[str, frozenset[str]] = {}
        self._announced: dict[str, float] = {}
        """Instances that could serve, and since when."""
        self._arriving: set[str] = set()
        """Those of them whose lists were read since."""
        self._arrived: set[str] = set()
        """Those of them that have what they should have."""
        self._seen_arriving: frozenset[str] = frozenset()
        """Those that the homes were found with."""
        self._others_serve = False
        """There are adapters, and an instance that serves."""
        self._under_way: dict[str, asyncio.Task[None]] = {}
        """The calls under way, by URL."""
        self._failures: dict[tuple[str, str], _Failure] = {}
        self._noted: frozenset[tuple[str, str]] | None = None
        """Failures that the store knows; None until they were read."""

    async def __aenter__(self) -> AdapterKeeper:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        calls = [*self._under_way.values()]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def is_prepared(self, spec: InstanceSpec) -> bool:
        """Whether an instance that is about to serve has what it should have, as far as it can be had: called at each
        check of one that could be ready. No longer than ``PREPARES_S``, and only where others serve meanwhile."""
        name, now_s = spec.instance_id, self._context.clock.monotonic_s()
        if not self._others_serve:
            return True
        if name not in self._announced:
            self._announced[name] = now_s
            return False  # what it lists is read until the next call
        self._arriving.add(name)
        if name in self._arrived or now_s - self._announced[name] >= PREPARES_S:
            del self._announced[name]
            return True
        return False

    async def tick(self) -> None:
        """Start what is due. Raises the errors of earlier calls: StoreUnavailableError, LeaseLostError."""
        self._collect()
        membership = await self._context.reader.membership()
        self._others_serve = any(_is_ready(spec.state) for spec in membership.instances.values()) and any(
            each.is_registered for each in membership.adapters.values()
        )
        if not membership.adapters:
            self._homes.clear()
            return
        membership = self._with_arriving(membership)
        await self._forget(membership)
        self._find_homes(membership)
        due = [*due_steps(membership.instances, membership.adapters, self._homes, {})]
        self._note_arrived({each.instance_id for each in due if (each.instance_id, each.name) not in self._failures})
        if any(each.step is Step.LOAD for each in due):
            order = await self._order(membership)
            due = [*due_steps(membership.instances, membership.adapters, self._homes, order)]
        now_s = self._context.clock.monotonic_s()
        now_ms = await self._context.pool.now_ms() if due else 0
        for each in due:
            if now_ms - membership.adapters[each.name].since_ms < LEFT_MS:
                continue
            failure = self._failures.get((each.instance_id, each.name))
            if failure is None or failure.due_s <= now_s:
                url = membership.instances[each.instance_id].url
                if url not in self._under_way:
                    call = asyncio.create_task(self._make(each), name=f"adapters/{each.instance_id}")
                    self._under_way[url] = call

    def _collect(self) -> None:
        done = [url for url, call in self._under_way.items() if call.done()]
        errors = [self._under_way.pop(url).exception() for url in done]
        for error in errors:
            if error is not None:
                raise error

    def _with_arriving(self, membership: Membership) -> Membership:
        """The members as they are once those that could serve do."""
        waiting = {name: spec for name, spec in membership.instances.items() if not _is_ready(spec.state)}
        self._announced = {name: began_s for name, began_s in self._announced.items() if name in waiting}
        self._arriving = {name for name in self._arriving if name in self._announced}
        ready = {name: replace(waiting[name], state=InstanceState.READY) for name in self._arriving}
        return replace(membership, instances={**membership.instances, **ready}) if ready else membership

    def _note_arrived(self, lacking: set[str]) -> None:
        self._arrived = {name for name in self._arriving if name not in lacking}

    def _find_homes(self, membership: Membership) -> None:
        view, arriving = self._view, frozenset(self._arriving)
        if view is None or view.epoch != membership.epoch or arriving != self._seen_arriving:
            self._seen_arriving = arriving
            view = self._view = ClusterView.build(
                epoch=membership.epoch,
                tree_version=membership.tree_version,
                instances=membership.instances,
                tree=membership.tree,
                previous=view,
            )
            model = self._context.settings.model
            self._homes = {
                name: homes_of(view, model, name)
                for name, adapter in membership.adapters.items()
                if adapter.is_registered
            }

    async def _order(self, membership: Membership) -> Mapping[str, int]:
        """Names by use, those with running requests first, then the last used: an instance that has little room gets
        these."""
        ready = [name for name, spec in membership.instances.items() if spec.adapter_slots and _is_ready(spec.state)]
        uses, _ = await self._context.pool.members.adapters(ready)
        return _ranks([use for each in uses.values() for use in each])

    async def _make(self, due: DueStep) -> None:
        """Make a step, if it is still due by what the store knows now."""
        pool, clock = self._context.pool, self._context.clock
        now = await pool.membership()
        spec, adapter = now.instances.get(due.instance_id), now.adapters.get(due.name)
        if spec is None or adapter is None or step_for(spec, due.name, adapter) is not due.step:
            return
        began_s = clock.monotonic_s()
        made = await self._engines.make(spec.url, due.name, adapter, due.step)
        self._context.metrics.adapter_steps.labels(
            pool.name, due.step.value, "failed" if made.complaint else "done"
        ).inc()
        self._log(due, adapter, made, clock.monotonic_s() - began_s)
        for each in now.instances.values():
            if each.url == spec.url and (changes := made.listed.changes(each)):
                await pool.members.update_instance(each.instance_id, changes, fence=self._context.fence)
        await self._note(due, made)

    def _log(self, due: DueStep, adapter: RegisteredAdapter, made: Made, took_s: float) -> None:
        former = self._failures.get((due.instance_id, due.name))
        if made.complaint and former is not None and not worth_logging(former.times + 1):
            return
        log.log(
            logging.WARNING if made.complaint else logging.INFO,
            "adapter %s pool=%s instance=%s name=%s path=%s seconds=%.3f error=%s",
            due.step, self._context.pool.name, due.instance_id, due.name, adapter.engine_path, took_s,
            made.complaint or None,
        )  # fmt: skip

    async def _note(self, due: DueStep, made: Made) -> None:
        key = due.instance_id, due.name
        former = self._failures.pop(key, None)
        if made.complaint:
            times = 1 if former is None else former.times + 1
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(times - 1, 16))
            self._failures[key] = _Failure(made, times, self._context.clock.monotonic_s() + pause_s)
            if former is None or former.made.complaint != made.complaint:
                await self._context.pool.adapters.note_failure(*key, made.complaint)
                self._noted = (self._noted or frozenset()) | {key}
        elif self._noted and key in self._noted:
            await self._context.pool.adapters.note_failure(*key, None)
            self._noted -= {key}

    async def _forget(self, membership: Membership) -> None:
        """Nothing is said of what is not to be loaded any more."""
        if self._noted is None:
            self._noted = frozenset(await self._context.pool.adapters.failures())
        gone = [each for each in self._noted if not _is_wanted(membership, *each)]
        for each in gone:
            await self._context.pool.adapters.note_failure(*each, None)
            self._noted -= {each}
        self._failures = {key: each for key, each in self._failures.items() if _is_wanted(membership, *key)}


def _is_ready(state: InstanceState) -> bool:
    return state is InstanceState.READY


def _is_wanted(membership: Membership, instance_id: str, name: str) -> bool:
    spec, adapter = membership.instances.get(instance_id), membership.adapters.get(name)
    return spec is not None and adapter is not None and step_for(spec, name, adapter) is not None


def _ranks(uses: Sequence[AdapterUse]) -> dict[str, int]:
    running: dict[str, int] = {}
    used_ms: dict[str, int] = {}
    for use in uses:
        running[use.adapter] = running.get(use.adapter, 0) + use.running
        used_ms[use.adapter] = max(used_ms.get(use.adapter, 0), use.used_ms)
    order = sorted(running, key=lambda name: (-running[name], -used_ms[name], name))
    return {name: rank for rank, name in enumerate(order)}
