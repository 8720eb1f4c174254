"""The leader's rounds, as steps that a worker or the simulator drives.

The fleet of these steps is the pool's store with the leader's fence (``statestore.led.LedPool``), awaited or, in the
simulator, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from scheduling.evacuation import plan_evacuation
from scheduling.granting import grant_queue
from scheduling.hotness import HotnessRule, HotnessTree, HotnessWindow
from scheduling.idle_work import IdleWork
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.learning import FleetLearner, Sample
from scheduling.queue_order import QueueHead, QueueOrder
from scheduling.rebalance import HotQueue, Move, plan_rebalance
from scheduling.request import Request
from scheduling.steps import Steps
from scheduling.values import value

READ_LIMIT = 4096
"""Log entries of one read."""
_RESTARTS = frozenset({InstanceState.DOWN, InstanceState.STARTING})
"""States that an engine leaves as another one: what was learned of it alone is void."""


class _Arrival(Protocol):
    @property
    def entry_id(self) -> str: ...

    @property
    def at_ms(self) -> int: ...

    @property
    def head(self) -> tuple[int, ...]: ...


class _Migration(Protocol):
    @property
    def status(self) -> str: ...

    @property
    def queue(self) -> QueueHead | None: ...


@value
class Moved:
    """What became of one planned move."""

    move: Move
    status: str


def sweep_queue(instance_id: str, order: QueueOrder) -> Steps[int]:
    """Plan a queue, even if no transition made room there; returns how many requests were dispatched."""
    queue: QueueHead | None = yield lambda fleet: fleet.queue_head(instance_id)
    if queue is None or not queue.entries:
        return 0
    return (yield from grant_queue(queue, order))


def rebalance(
    instance_id: str, order: QueueOrder, *, reason: str, decode_stall_s: float, max_moves: int
) -> Steps[tuple[Moved, ...]]:
    """One round for one overloaded instance."""
    return _move_held(instance_id, lambda queue: plan_rebalance(queue, decode_stall_s)[:max_moves], reason, order)


def evacuate(
    instance_id: str,
    order: QueueOrder,
    loads: Mapping[str, InstanceLoad],
    instances: Mapping[str, InstanceSpec],
    *,
    reason: str,
    decode_stall_s: float,
) -> Steps[tuple[Moved, ...]]:
    """The held requests of an instance that left service move to instances that take requests."""

    def plan(queue: HotQueue) -> Sequence[Move]:
        return plan_evacuation(queue.held, instance_id, loads, instances, decode_stall_s)

    return _move_held(instance_id, plan, reason, order)


def give_idle_work(instance_id: str, order: QueueOrder, idle: IdleWork, *, reason: str) -> Steps[tuple[Moved, ...]]:
    """What its own queue would make late moves to instances that are idle in this round."""
    return _move_held(instance_id, idle.plan, reason, order)


def _move_held(
    instance_id: str, plan: Callable[[HotQueue], Sequence[Move]], reason: str, order: QueueOrder
) -> Steps[tuple[Moved, ...]]:
    """Move what the plan says of the requests held on one instance, and grant what that leaves room for."""
    queue: HotQueue | None = yield lambda fleet: fleet.queue(instance_id)
    if queue is None or not queue.held:
        return ()
    requests = {request.request_id: request for request in queue.held}
    done: list[Moved] = []
    for move in plan(queue):
        moved: _Migration = yield partial(_migrate, requests[move.request_id], move.target_id, reason)
        done.append(Moved(move, moved.status))
        yield from grant_queue(moved.queue, order)
    return tuple(done)


def _migrate(request: Request, target_id: str, reason: str, fleet: Any) -> Any:
    return fleet.migrate(request, target_id, reason=reason)


class HotnessKeeper:
    """The leader's memory of the arrival log, from which the hotness tree grows."""

    def __init__(self, window: HotnessWindow, rule: HotnessRule) -> None:
        self.window = window
        self._rule = rule
        self._last_entry = "0"
        self.arrived = 0
        """Arrivals read so far."""

    def tick(self, tree: HotnessTree, ready_instances: int) -> Steps[HotnessTree]:
        """Read what arrived since the last round; the tree as it is now. The caller publishes it."""
        while True:
            arrivals: Sequence[_Arrival] = yield lambda fleet: fleet.arrivals(self._last_entry, READ_LIMIT)
            self.arrived += len(arrivals)
            for arrival in arrivals:
                self.window.add(arrival.at_ms, arrival.head)
                self.window.expire(arrival.at_ms)
                self._last_entry = arrival.entry_id
            if len(arrivals) < READ_LIMIT:
                return self.window.grow(tree, ready_instances, self._rule)

    def counts(self, tree: HotnessTree) -> dict[int, int]:
        """How often each hot prefix was seen in the window."""
        return {prefix: self.window.count(prefix) for prefix in tree.hot}


class LearningKeeper:
    """The leader's memory of the sample log."""

    def __init__(self, learner: FleetLearner) -> None:
        self._learner = learner
        self._last_entry = "0"

    def tick(self, loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec], now_ms: int) -> Steps[int]:
        """Learn what was logged since the last round, and publish what changed by it or with time; returns how many
        samples there were."""
        serving = {name for name, load in loads.items() if load.state not in _RESTARTS}
        self._learner.forget_all_but(serving)
        samples: Sequence[Sample] = yield lambda fleet: fleet.samples(self._last_entry, READ_LIMIT)
        if samples:
            self._last_entry = samples[-1].entry_id
        rates = self._learner.learn(samples, loads, instances, now_ms)
        learned = self._learner.learned
        if samples or rates:
            yield lambda fleet: fleet.publish_learned(learned, rates)
        return len(samples)
