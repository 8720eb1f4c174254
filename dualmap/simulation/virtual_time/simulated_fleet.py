"""The pool in virtual time, as searches and plans see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Self

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.state.view import ClusterView
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool


class SimulatedFleet:
    """The fleet of a search, and the port of its steps and of granting.

    There is one replica, and its copy of the membership is never old.
    """

    def __init__(
        self,
        pool: SimulatedPool,
        engine_queues: Mapping[str, int] | None,
        kv_used_tokens: Callable[[str], int] | None = None,
        *,
        breakers: CircuitBreakers | None = None,
        now_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``engine_queues`` are the requests that wait in each engine, where they wait there and not in the fleet;
        ``kv_used_tokens`` is an engine's gauge of KV use. Policies that observe see both without delay."""
        self.pool = pool
        self._engine_queues = engine_queues
        self._kv_used_tokens = kv_used_tokens
        self._view: ClusterView | None = None
        self._breakers = breakers
        self._now_s = now_s

    # what a search looks at --------------------------------------------------------------------------------------
    @property
    def view(self) -> ClusterView:
        members, view = self.pool.members, self._view
        if view is None or view.epoch != members.epoch or view.tree_version != members.tree_version:
            view = self._view = ClusterView.build(
                epoch=members.epoch,
                tree_version=members.tree_version,
                instances=members.instances,
                tree=members.tree,
                previous=view,
            )
        return view

    @property
    def learned(self) -> Learned:
        return self.pool.members.learned

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return frozenset() if self._breakers is None else self._breakers.blocked(self._now_s())

    def window_delay_s(self, spec: InstanceSpec, uncached_tokens: int) -> float:
        rate = self.pool.loads()[spec.instance_id].prefill_tokens_per_s
        return (spec.dispatch_window_tokens + uncached_tokens) / max(1.0, rate)

    # what it has done --------------------------------------------------------------------------------------------
    async def place(self, placement: Placement) -> PlaceReply:
        return await self.pool.store.place(placement)

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        seen = await self.pool.store.observe(instance_ids, chain)
        return replace(seen, loads={name: self._as_reported(load) for name, load in seen.loads.items()})

    def _as_reported(self, load: InstanceLoad) -> InstanceLoad:
        """The engine's own queue, where there is none in the fleet, and its KV use."""
        used_tokens = None if self._kv_used_tokens is None else self._kv_used_tokens(load.instance_id)
        if self._engine_queues is None:
            return replace(load, kv_used_tokens=used_tokens)
        waiting = self._engine_queues[load.instance_id]
        running = load.running_requests - waiting
        return replace(load, queued_requests=waiting, running_requests=running, kv_used_tokens=used_tokens)

    async def refresh(self) -> None:
        """Nothing to do: the view is always current."""

    async def commit(self, plan: QueuePlan) -> CommitReply:
        return await self.pool.commit(plan)
