"""Which revision of its pool serves a request, on one replica."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dualmap.router.pool.failover import FailoverPool
from dualmap.router.pool.view import ViewKeeper
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.revisions.weights import (
    Assigned,
    Home,
    RevisionWeights,
    chosen,
    earlier_home,
    fixed,
    is_shadowed,
    stands,
)
from dualmap.scheduling.state.view import is_ready
from dualmap.scheduling.values import value
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)


@value
class Session:
    """The session of a request, which is computed only where it matters."""

    name: Callable[[], str]
    is_under_way: Callable[[], bool]
    """Whether the request shows that its session had earlier ones."""
    chain: Chain


class RevisionChoice:
    """Keeps sessions at their homes, and gives new ones a home by the weights. Without the store the weights alone
    decide: all replicas choose the same for a session, and those that began before a change may move."""

    def __init__(self, store: FailoverPool, view: ViewKeeper) -> None:
        self._store = store
        self._view = view

    def at_random(self, *, tenant: str, asked: str, request_id: str) -> Assigned:
        """The revision of a request that belongs to no session."""
        weights = self._view.revisions
        found = fixed(weights, tenant=tenant, asked=asked)
        return Assigned(found or chosen(weights, self._view.view.ready_revisions, request_id))

    async def of(self, *, tenant: str, asked: str, session: Session) -> Assigned:
        """The revision that serves a request of the session. ``asked``: the one that its client names, or ""."""
        weights = self._view.revisions
        if found := fixed(weights, tenant=tenant, asked=asked):
            return Assigned(found)
        name = session.name()
        home = await self._home_of(session, name, weights)
        # The shadow has none of the prompts of older sessions: their copies would only show that.
        is_copied = home.version == weights.version and is_shadowed(weights, name)
        return Assigned(home.revision, home.version, name, name if is_copied else "")

    async def _home_of(self, session: Session, name: str, weights: RevisionWeights) -> Home:
        """The home of a session; of version 0 where the weights did not choose it."""
        ready = self._view.view.ready_revisions
        first = Home(chosen(weights, ready, name), 0)
        if not first.revision or self._store.degraded:
            return first
        try:
            former = await self._store.revisions.home(name)
            if former is not None and stands(weights, former, ready):
                return former
            home = Home(first.revision, weights.version)
            if former is None and weights.are_first and session.is_under_way():
                home = earlier_home(weights, ready, await self._cached_blocks(session.chain, weights)) or home
            home = await self._store.revisions.settle(name, home, former)
        except StoreError as error:
            log.debug("the home of a session cannot be read: %s", error)
            return first
        return home if stands(weights, home, ready) else first

    async def _cached_blocks(self, chain: Chain, weights: RevisionWeights) -> dict[str, int]:
        """The blocks of a chain that one instance of each revision has, at most."""
        instances = self._view.view.instances
        asked = [name for name, spec in instances.items() if is_ready(spec) and spec.revision_name in weights.shares]
        found: dict[str, int] = {}
        for name, load in (await self._store.observe(asked, chain)).loads.items():
            revision = instances[name].revision_name
            found[revision] = max(found.get(revision, 0), load.hit_blocks)
        return found
