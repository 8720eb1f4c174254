"""The pool in virtual time, as searches and plans see it: its state, which answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduling.chain import Chain
from scheduling.granting import CommitReply
from scheduling.instance import InstanceLoad
from scheduling.learned import Learned
from scheduling.placement import Observation, Placement, PlaceReply
from scheduling.queue_order import QueuePlan
from scheduling.settings import SchedulingSettings
from scheduling.view import ClusterView
from statestore.memory.placing import Placing
from statestore.memory.state import PoolState


class SimulatedFleet:
    """The fleet of ``scheduling.placement`` and ``scheduling.granting``.

    There is one replica, its copy of the membership is never old, and no breaker opens.
    """

    def __init__(
        self, state: PoolState, scheduling: SchedulingSettings, engine_queues: Mapping[str, int] | None
    ) -> None:
        """``engine_queues`` are the requests that wait in each engine, where they wait there and not in the fleet."""
        self.state = state
        self._scheduling = scheduling
        self._engine_queues = engine_queues
        self._view: ClusterView | None = None
        self._least_loaded: tuple[str, ...] = ()

    # what a search looks at --------------------------------------------------------------------------------------
    @property
    def view(self) -> ClusterView:
        state, view = self.state, self._view
        if view is None or view.epoch != state.epoch or view.tree_version != state.tree_version:
            members = state.membership()
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
        return self.state.learned

    def blocked(self) -> frozenset[str]:
        return frozenset()

    def least_loaded(self) -> tuple[str, ...]:
        return self._least_loaded

    # what it has done --------------------------------------------------------------------------------------------
    def place(self, placement: Placement) -> PlaceReply:
        reply = Placing(self.state, placement).run()
        self._least_loaded = tuple([instance_id for instance_id, _ in reply.least_loaded])
        return reply

    def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        seen = self.state.observe(instance_ids, chain)
        if self._engine_queues is None:
            return seen
        return replace(seen, loads={name: self._with_engine_queue(load) for name, load in seen.loads.items()})

    def _with_engine_queue(self, load: InstanceLoad) -> InstanceLoad:
        """Without a queue in the fleet, the engine's own queue counts, as its metrics would show without delay."""
        assert self._engine_queues is not None
        waiting = self._engine_queues[load.instance_id]
        return replace(load, queued_requests=waiting, running_requests=load.running_requests - waiting)

    def refresh(self) -> None:
        """Nothing to do: the view is always current."""

    def commit(self, plan: QueuePlan) -> CommitReply:
        return self.state.commit(plan)
