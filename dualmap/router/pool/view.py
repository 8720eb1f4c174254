"""The keeper of a replica's copy of the cluster: members, rings and hotness tree of one pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dualmap.runtime.clock import Clock
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.revisions.weights import NO_WEIGHTS
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.model_names import merged_models
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import Membership
from dualmap.statestore.errors import StoreError
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Time without a reply that shows another epoch after which the copy is read again."""
LOOK_PAUSE_S = 0.2
"""Time between two looks for what a client names: it may name what is nowhere as often as it likes."""
LOOK_WITHIN_S = 1.0
"""Time that a request waits for such a look."""


@dataclass(frozen=True, slots=True)
class GivenNames:
    """Model names that the running fleet was given."""

    added: Mapping[str, str] = field(default_factory=dict)
    """Those that operators and pods added: "" for another name of the pool's model, anything else an adapter's."""
    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)


def empty_view() -> ClusterView:
    return ClusterView.build(epoch=-1, tree_version=-1, instances={}, tree=HotnessTree())


def next_view(view: ClusterView, membership: Membership) -> ClusterView:
    """The view of a membership; rings are kept, or changed only next to the anchors of who came and went. The same view
    where nothing was read that is otherwise."""
    loaded = loaded_anywhere(membership)
    if (
        membership.instances is view.instances
        and membership.tree is view.tree
        and (membership.epoch, membership.tree_version, loaded) == (view.epoch, view.tree_version, view.loaded_anywhere)
    ):
        return view
    return ClusterView.build(
        epoch=membership.epoch,
        tree_version=membership.tree_version,
        instances=membership.instances,
        tree=membership.tree,
        loaded_anywhere=loaded,
        previous=view,
    )


def loaded_anywhere(membership: Membership) -> frozenset[str]:
    """The adapters that any instance serves: the router has them loaded, or the engines find them by a resolver, which
    list them from their first request on."""
    resolved = [name for name, kind in membership.names.items() if kind]
    return frozenset([*resolved, *(name for name, each in membership.adapters.items() if each.is_registered)])


class ViewKeeper:
    """Replaces the view whole when the store shows another epoch or tree version.

    Reads of the store run one at a time, and one more waits at most: callers during a read, which may have started
    before the change that they want to see, share the next.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        *,
        clock: Clock,
        seen: Callable[[ClusterView], None] = lambda view: None,
    ) -> None:
        """``seen`` is called with the view after every refresh; it must not wait."""
        self._pool = pool
        self._seen = seen
        self._clock = clock
        self._wanted = asyncio.Event()
        self._last: asyncio.Task[None] | None = None
        """The refresh that was started last, perhaps done."""
        self._coming: asyncio.Task[None] | None = None
        """The last refresh until it reads the store: callers may share it."""
        self._looking: asyncio.Task[None] | None = None
        """The next look until it reads the store."""
        self._looked_s = -math.inf
        self.view = empty_view()
        self.learned = Learned()
        """Estimates that the leader learned; the prior until the store has others."""
        self.last_seen: Membership | None = None
        """The last membership that was not empty: what a store that came back empty is given again."""
        self.follow: Callable[[Mapping[str, Any]], None] = lambda overrides: None
        """Callback for the scheduling settings that were changed in the running fleet, after every refresh."""
        self.adapters: Mapping[str, RegisteredAdapter] = {}
        """Adapters that were registered in the running fleet, those that were unloaded among them."""
        self.revisions = NO_WEIGHTS
        """The weights of the pool's revisions."""
        self.on_names: Callable[[GivenNames, Mapping[str, str]], None] = lambda given, listed: None
        """Callback for the names that the running fleet was given, and those that instances list, after every
        refresh."""

    def renew(self) -> None:
        """The copy is out of date, as a reply shows: read it again soon. Never waits."""
        self._wanted.set()

    async def refresh(self) -> ClusterView:
        """The view as of now, or later: read after the call. Waits for two reads of the store at most.

        Raises:
            StoreUnavailableError: the store is out of reach; the copy stays as it is.
        """
        task = self._coming
        if task is None:
            task = self._last = self._coming = asyncio.create_task(self._load_after(self._last))
            task.add_done_callback(self._loaded)
        # The task is shielded: the read is shared, so a caller that is cancelled must not take it from the others.
        await asyncio.shield(task)
        return self.view

    async def look(self) -> None:
        """See what the store has now. Where it is out of reach, or slow, the copy stays as it is."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LOOK_WITHIN_S):
                await self.refresh()

    async def look_again(self) -> None:
        """Look as ``look`` does, for what a client names and is not known here. Callers share one look, which waits
        until ``LOOK_PAUSE_S`` after the last one."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_paced())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_WITHIN_S):
                await asyncio.shield(self._looking)

    async def _look_paced(self) -> None:
        try:
            pause_s = self._looked_s + LOOK_PAUSE_S - self._clock.monotonic_s()
            if pause_s > 0:
                await self._clock.sleep(pause_s)
        finally:
            self._looking = None
        self._looked_s = self._clock.monotonic_s()
        await self.look()

    async def _load_after(self, former: asyncio.Task[None] | None) -> None:
        if former is not None and not former.done():
            await asyncio.wait((former,))  # whichever way it ends
        # The store is read from here on: who comes now may want a later state, and starts the next read.
        self._coming = None
        await self._load()

    async def _load(self) -> None:
        # The note is cleared before the read: a change that is noted during it may be newer than what it finds.
        self._wanted.clear()
        membership = await self._pool.membership()
        self.view = next_view(self.view, membership)
        self.learned, self.revisions = membership.learned, membership.revisions
        self.follow(membership.overrides)
        listed = merged_models(spec.models for spec in membership.instances.values())
        discovered = {alias: "" for spec in membership.instances.values() for alias in spec.aliases}
        self.adapters = membership.adapters
        added = {**discovered, **membership.names} if discovered else membership.names
        self.on_names(GivenNames(added, membership.adapters), listed)
        if membership.instances:
            self.last_seen = membership
        self._seen(self.view)

    def _loaded(self, task: asyncio.Task[None]) -> None:
        if self._coming is task:  # cancelled before it could read
            self._coming = None
        if not task.cancelled():
            task.exception()  # retrieved here: every waiter has seen it, and there may be none

    async def run(self) -> None:
        """Refresh when noted, and when nothing was for a while. Runs until cancelled."""
        while True:
            try:
                await self.refresh()
            except StoreError as error:
                log.warning("pool %s: the view stays at epoch %d: %s", self._pool.name, self.view.epoch, error)
                await self._clock.sleep(POLL_S)
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        idle = asyncio.ensure_future(self._clock.sleep(POLL_S))
        noted = asyncio.ensure_future(self._wanted.wait())
        try:
            await asyncio.wait((idle, noted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
            noted.cancel()
