"""One pool as a replica's searches and plans see it: the store, the view, the breakers, and the last replies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from dualmap.router.pool.grant_waiters import GrantWaiters
from dualmap.router.pool.queue_planner import QueuePlanner
from dualmap.router.pool.view import ViewKeeper
from dualmap.router.telemetry.metrics import StoreCall, measured
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, grant_queue
from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder, QueuePlan
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.steps import drive
from dualmap.statestore.errors import StoreError, UnreadableStateError
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

LEARNING_GAP_S = 0.01
"""Shortest time between two first tokens of a replica that the TTFT is learned from: thousands a second would teach no
more, and for each a load has to be made."""

_NONE: frozenset[str] = frozenset()


class PoolFleet:
    """The fleet of ``scheduling.placing.placement`` and ``scheduling.queues.granting``."""

    def __init__(
        self,
        store: ReplicaPool,
        keeper: ViewKeeper,
        breakers: CircuitBreakers,
        waiters: GrantWaiters,
        *,
        order: QueueOrder,
        replica_id: str,
        calls: Mapping[str, StoreCall],
        now_s: Callable[[], float],
    ) -> None:
        self.order = order
        self._store = store
        self.sight: Final = keeper
        self._breakers = breakers
        self._waiters = waiters
        self._replica_id = replica_id
        self._placing, self._observing, self._committing = calls["place"], calls["observe"], calls["commit"]
        self._releasing = calls["release"]
        self._now_s = now_s
        self._next_learning_s = -math.inf
        self.planner = QueuePlanner(self._grant)
        self._seen: dict[str, Mapping[str, InstanceLoad]] = {}
        """Loads, for each instance, of the last reply that had its own: for estimates, never for decisions."""

    # what a search looks at ---------------------------------------------------------------------------------
    def blocked(self) -> frozenset[str]:
        return self._breakers.blocked(self._now_s()) if self._breakers.troubled else _NONE

    # what it has done ---------------------------------------------------------------------------------------
    async def place(self, placement: Placement) -> PlaceReply:
        call, started_s = self._placing, time.perf_counter()
        try:  # ``measured`` without a coroutine of its own: every request comes this way
            reply = await self._store.place(placement)
        except StoreError:
            call.errors.inc()
            raise
        finally:
            call.latency_s.observe(time.perf_counter() - started_s)
        self._note(reply, reply.hits)
        return reply

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        seen = await measured(self._observing, self._store.observe(instance_ids, chain))
        self._note(seen, seen.loads)
        return seen

    async def refresh(self) -> None:
        await self.sight.refresh()

    async def commit(self, plan: QueuePlan) -> CommitReply:
        reply = await measured(self._committing, self._store.commit(plan, replica_id=self._replica_id))
        for grant in reply.grants:
            if grant.replica_id == self._replica_id:
                self._waiters.deliver(grant)
        return reply

    async def release(self, releases: Sequence[Release]) -> None:
        """Queues that have room then are planned in the background: the next releases do not wait for that."""
        call, started_s = self._releasing, time.perf_counter()
        try:  # as in ``place``
            transitions = await self._store.release(releases)
        except StoreError:
            call.errors.inc()
            raise
        finally:
            call.latency_s.observe(time.perf_counter() - started_s)
        for transition in transitions:
            if transition.queue is not None:
                self.planner.plan(transition.queue)

    async def _grant(self, queue: QueueHead) -> None:
        """A failure must not fail the request, or repeat the transition, whose reply had the queue: the leader's sweep
        grants instead."""
        try:
            await drive(grant_queue(queue, self.order), self)
        except StoreError as error:
            log.debug("pool %s: a queue could not be planned: %s", self._store.name, error)

    def _note(self, reply: PlaceReply | Observation, instance_ids: Iterable[str]) -> None:
        view = self.sight.view
        # The test is not "newer than": a store that came back empty counts from the start again.
        if reply.epoch != view.epoch or reply.tree_version != view.tree_version:
            self.sight.renew()
        self._seen.update(dict.fromkeys(instance_ids, reply.loads))

    def teaches(self) -> bool:
        """Whether the next first token is one that the TTFT is learned from."""
        now_s = self._now_s()
        if now_s < self._next_learning_s:
            return False
        self._next_learning_s = now_s + LEARNING_GAP_S
        return True

    # estimates ----------------------------------------------------------------------------------------------
    def forget_departed(self) -> None:
        """Drop what is kept about instances that left the fleet."""
        for instance_id in self._seen.keys() - self.sight.view.instances.keys():
            del self._seen[instance_id]

    def _load(self, instance_id: str) -> InstanceLoad | None:
        seen = self._seen.get(instance_id)
        try:
            return None if seen is None else seen[instance_id]
        except UnreadableStateError:
            return None

    def rates(self) -> dict[str, float]:
        """Prefill rates of the instances that were seen, tokens per second."""
        loads = ((instance_id, self._load(instance_id)) for instance_id in self._seen)
        return {instance_id: load.prefill_tokens_per_s for instance_id, load in loads if load is not None}

    def expected_wait_s(self, instance_id: str) -> float:
        """Time until the instance has prefilled what is pending on it."""
        load = self._load(instance_id)
        return load.pending_tokens / max(1.0, load.prefill_tokens_per_s) if load is not None else 1.0

    def window_delay_s(self, spec: InstanceSpec, uncached_tokens: int) -> float:
        """Time until the instance has prefilled a full dispatch window, and so many tokens behind it."""
        load = self._load(spec.instance_id)
        rate = spec.prefill_tokens_per_s if load is None else load.prefill_tokens_per_s
        return (spec.dispatch_window_tokens + uncached_tokens) / max(1.0, rate)
