"""The pool's store in virtual time: the books and scripts of production, whose calls have their answers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_order import QueueHead, QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import MANY_REQUESTS, InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once
from dualmap.statestore.call_values import Membership
from dualmap.statestore.led import LedPool
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.runs import TurnStatus

PREFIX, NAME = "dualmap", "simulated"
REPLICA = "simulator"
"""The replica of all requests of a pool."""


class SimulatedPool:
    """The store of a run, with what its one replica keeps of it: a copy of the members that is never old, and what
    became of its held requests."""

    def __init__(self, scheduling: SchedulingSettings, now_ms: Callable[[], int]) -> None:
        self.scheduling = scheduling
        self.now_ms = now_ms
        self.memory = MemoryStore(scheduling, now_ms=now_ms, prefix=PREFIX)
        self.store = self.memory.pool(NAME)
        """Members are changed by this class and by ``SimulatedLed`` alone, so that the copy of them is renewed."""
        self._members: Membership | None = None
        self.granted: list[Grant] = []
        """Grants that are not yet taken."""
        self._deferred: dict[str, None] = {}
        self.gone: list[str] = []
        """Turns that need not wait for memory any more, and were not taken yet."""
        self.store.runs.on_turn(REPLICA, self.gone.append)

    # members -----------------------------------------------------------------------------------------------------
    @property
    def members(self) -> Membership:
        if self._members is None:
            self._members = at_once(self.store.membership())
        return self._members

    def renew_members(self) -> None:
        """The copy is out of date: read the members again when they are next looked at."""
        self._members = None

    def put_instance(self, spec: InstanceSpec) -> None:
        self.renew_members()
        at_once(self.store.members.put_instance(spec))

    def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        self.renew_members()
        return at_once(self.store.members.update_instance(instance_id, changes, fence=fence))

    def set_instance_state(
        self, instance_id: str, state: InstanceState, *, expected: InstanceState | None = None
    ) -> bool:
        self.renew_members()
        return at_once(self.store.members.set_instance_state(instance_id, state, expected=expected))

    # queues ------------------------------------------------------------------------------------------------------
    def loads(self) -> Mapping[str, InstanceLoad]:
        return at_once(self.store.loads())

    async def commit(self, plan: QueuePlan) -> CommitReply:
        reply = await self.store.commit(plan, replica_id=REPLICA)
        self.granted += reply.grants
        self._deferred |= {step.request_id: None for step in plan.steps if step.deferred_to_ms is not None}
        return reply

    def take_grants(self) -> Sequence[Grant]:
        """The grants since the last call, in order."""
        taken, self.granted = self.granted, []
        return taken

    def take_deferred(self) -> Sequence[StoredRequest]:
        """Requests that were deferred since the last call and still wait."""
        if not self._deferred:
            return ()
        taken, self._deferred = self._deferred, {}
        known = at_once(self.store.records([*taken]))
        return [request for request in known.values() if request.state is RequestState.HELD and request.deferred]

    def held(self) -> list[StoredRequest]:
        """The requests in each instance's queue, in order."""
        waiting = [name for name, load in self.loads().items() if load.queued_requests]
        queues = [at_once(self.store.queues.queue(name, MANY_REQUESTS)) for name in waiting]
        return [request for queue in queues if queue is not None for request in queue.held]

    def admit(self, turns: Sequence[Turn], capacity_tokens: int) -> Sequence[TurnStatus]:
        """Enter turns in the ledger of runs, or look them up there."""
        return at_once(self.store.runs.admit(turns, capacity_tokens))

    def release(self, release: Release) -> QueueHead | None:
        """The instance's queue, where that has room now."""
        (transition,) = at_once(self.store.release((release,)))
        return transition.queue


class SimulatedLed(LedPool):
    """The leader's port of a run: the replica hears of grants and of changed members at once."""

    def __init__(self, pool: SimulatedPool, fence: int, *, learns_rates: bool = True) -> None:
        super().__init__(pool.store, fence)
        self._simulated = pool
        self._learns_rates = learns_rates

    async def commit(self, plan: QueuePlan) -> CommitReply:
        return await self._simulated.commit(plan)

    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int]) -> int:
        self._simulated.renew_members()
        return await super().publish_tree(tree, counts)

    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float]) -> None:
        self._simulated.renew_members()
        await super().publish_learned(learned, tokens_per_s if self._learns_rates else {})

    async def set_instance_state(
        self, instance_id: str, state: InstanceState, *, expected: InstanceState | None = None
    ) -> bool:
        self._simulated.renew_members()
        return await super().set_instance_state(instance_id, state, expected=expected)
