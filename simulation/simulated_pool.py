"""The pool's store in virtual time: the books and scripts of production, whose calls have their answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from scheduling.granting import CommitReply, Grant
from scheduling.instance import MANY_REQUESTS
from scheduling.queue_order import QueueHead, QueuePlan
from scheduling.request import Request, RequestState
from scheduling.settings import SchedulingSettings
from statestore.answers import Membership, Release, Transition
from statestore.memory import AtOnce, MemoryStore

REPLICA = "simulator"
"""The one replica, of all requests."""

_CHANGES_MEMBERS = frozenset(
    {"put_instance", "update_instance", "set_instance_state", "remove_instance", "publish_tree", "publish_learned"}
)


class SimulatedPool:
    """A ``PoolStore`` of a run, with what its one replica keeps of it: a copy of the members that is never old, and
    what became of its held requests. Calls that are not defined here are the store's."""

    def __init__(self, scheduling: SchedulingSettings, now_ms: Callable[[], int]) -> None:
        self.scheduling = scheduling
        self.now_ms = now_ms
        self._store = AtOnce(MemoryStore(scheduling, now_ms=now_ms).pool("simulated"))
        self._members: Membership | None = None
        self.granted: list[Grant] = []
        """Not yet taken."""
        self._deferred: dict[str, None] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._store, name)
        if name not in _CHANGES_MEMBERS:
            return call

        def change(*arguments: Any, **named: Any) -> Any:
            self._members = None
            return call(*arguments, **named)

        return change

    @property
    def members(self) -> Membership:
        if self._members is None:
            self._members = self._store.membership()
        return self._members

    def commit(self, plan: QueuePlan) -> CommitReply:
        reply: CommitReply = self._store.commit(plan, replica_id=REPLICA)
        self.granted += reply.grants
        self._deferred |= {step.request_id: None for step in plan.steps if step.deferred_to_ms is not None}
        return reply

    def take_grants(self) -> Sequence[Grant]:
        """Those since the last call, in order."""
        taken, self.granted = self.granted, []
        return taken

    def take_deferred(self) -> Sequence[str]:
        """Requests that were deferred since the last call and still wait."""
        if not self._deferred:
            return ()
        taken, self._deferred = self._deferred, {}
        known = self._store.records([*taken])
        return [name for name, request in known.items() if request.state is RequestState.HELD and request.deferred]

    def held(self) -> list[Request]:
        """Of each instance those in its queue, in order."""
        waiting = [name for name, load in self._store.loads().items() if load.queued_requests]
        return [request for name in waiting for request in self._store.queue(name, MANY_REQUESTS).held]

    def first_token(self, request_id: str, instance_id: str, note: str) -> QueueHead | None:
        """The instance's queue, where that has room now."""
        return self._release(Release(request_id, instance_id, note=note, seen=True))

    def finish(self, request_id: str, note: str = "") -> QueueHead | None:
        """The same."""
        return self._release(Release(request_id, note=note))

    def _release(self, release: Release) -> QueueHead | None:
        (told,) = self._store.release((release,))
        transition: Transition = told
        return transition.queue
