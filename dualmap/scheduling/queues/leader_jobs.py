"""The leader's rounds, as steps that a worker or the simulator drives.

The port of these steps is the pool's store with the leader's fence (``statestore.led.LedPool``). A driver adds the
pauses between rounds, and what it counts and logs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.learning import DisprovedTier, EndSample, FleetLearner, Sample
from dualmap.scheduling.queues.evacuation import plan_evacuation
from dualmap.scheduling.queues.floors import Floors
from dualmap.scheduling.queues.granting import Commit, GrantingPort, grant_queue
from dualmap.scheduling.queues.idle_work import QUEUES, IdleWork
from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder
from dualmap.scheduling.queues.rebalance import HotQueue, MigrateStatus, Migration, Move, plan_rebalance
from dualmap.scheduling.state.hotness import Arrival, HotnessRule, HotnessTree, HotnessWindow
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent, next_state
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.view import is_ready, takers
from dualmap.scheduling.steps import Step, Steps
from dualmap.scheduling.values import value

MAX_STALE_PLANS = 8
"""Commits of one plan for floors, on an instance that changes all the time."""
READ_LIMIT = 4096
"""Log entries of one read."""
REBALANCE: Final = "rebalance"
IDLE: Final = "idle"
"""Reasons of migrations, which metrics and the store count them by; ``reason_to_leave`` has the others."""
PARKED: Final = next_state(InstanceState.DRAINING, InstanceEvent.DRAINED)
"""The state of an instance that has drained."""
_RESTARTS = frozenset({InstanceState.DOWN, InstanceState.STARTING})
"""States that an engine leaves as another one: what was learned of it alone is void."""


class SweepingPort(GrantingPort, Protocol):
    """Calls that a sweep makes."""

    def queue_head(self, instance_id: str, /) -> Awaitable[QueueHead | None]: ...


class MovingPort(GrantingPort, Protocol):
    """Calls that moves of held requests make."""

    def queue(self, instance_id: str, /) -> Awaitable[HotQueue | None]: ...

    def migrate(self, request: StoredRequest, target_id: str, /, *, reason: str) -> Awaitable[Migration]: ...


class RoundPort(SweepingPort, MovingPort, Protocol):
    """Calls that a sweep over all queues makes, with the floors of classes."""


class HotnessPort(Protocol):
    """Calls that the hotness job makes."""

    def arrivals(self, after: str, limit: int, /) -> Awaitable[Sequence[Arrival]]: ...

    def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], /) -> Awaitable[int]: ...


class LearningPort(Protocol):
    """Calls that the learner makes."""

    def samples(self, after: str, limit: int, /) -> Awaitable[Sequence[Sample]]: ...

    def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], /) -> Awaitable[None]: ...

    def correct_tier(self, disproved: DisprovedTier, /) -> Awaitable[None]: ...


@value
class ReadQueueHead(Step[SweepingPort, QueueHead | None]):
    """Read the head of an instance's queue, to plan it; None for an unknown instance."""

    instance_id: str

    def on(self, port: SweepingPort) -> Awaitable[QueueHead | None]:
        return port.queue_head(self.instance_id)


@value
class ReadQueue(Step[MovingPort, HotQueue | None]):
    """Read the requests that are held on an instance, and where else they could go; None for an unknown instance."""

    instance_id: str

    def on(self, port: MovingPort) -> Awaitable[HotQueue | None]:
        return port.queue(self.instance_id)


@value
class Migrate(Step[MovingPort, Migration]):
    """Move a held request to another instance's queue."""

    request: StoredRequest
    target_id: str
    reason: str

    def on(self, port: MovingPort) -> Awaitable[Migration]:
        return port.migrate(self.request, self.target_id, reason=self.reason)


@value
class ReadArrivals(Step[HotnessPort, Sequence[Arrival]]):
    """Read the arrival log behind one entry."""

    after: str
    limit: int

    def on(self, port: HotnessPort) -> Awaitable[Sequence[Arrival]]:
        return port.arrivals(self.after, self.limit)


@value
class PublishTree(Step[HotnessPort, int]):
    """Publish the hotness tree, and how often each hot prefix was seen; its version, which grows only if the tree
    changed."""

    tree: HotnessTree
    counts: Mapping[int, int]

    def on(self, port: HotnessPort) -> Awaitable[int]:
        return port.publish_tree(self.tree, self.counts)


@value
class ReadSamples(Step[LearningPort, Sequence[Sample]]):
    """Read the sample log behind one entry."""

    after: str
    limit: int

    def on(self, port: LearningPort) -> Awaitable[Sequence[Sample]]:
        return port.samples(self.after, self.limit)


@value
class PublishLearned(Step[LearningPort, None]):
    """Publish what was learned of the pool, and prefill rates of instances."""

    learned: Learned
    tokens_per_s: Mapping[str, float]

    def on(self, port: LearningPort) -> Awaitable[None]:
        return port.publish_learned(self.learned, self.tokens_per_s)


@value
class CorrectTier(Step[LearningPort, None]):
    """Forget what a tier of an instance was taken to have, from what was used longest ago to what it lacks."""

    disproved: DisprovedTier

    def on(self, port: LearningPort) -> Awaitable[None]:
        return port.correct_tier(self.disproved)


@value
class Moved:
    """The outcome of one planned move."""

    source_id: str
    """The instance that held it."""
    reason: str
    move: Move
    status: MigrateStatus


def sweep(
    loads: Mapping[str, InstanceLoad], order: QueueOrder, floors: Floors
) -> Iterator[tuple[str, Steps[RoundPort, int]]]:
    """The sweep over all queues that hold requests, also where no transition made room: for each of these instances the
    steps, which return how many requests were dispatched by the plan of its queue. Before that, classes get what their
    floors give them."""
    holding = [instance_id for instance_id, load in loads.items() if load.queued_requests]
    floors.keep(holding)
    for instance_id in holding:
        yield instance_id, _sweep(instance_id, order, floors)


def _sweep(instance_id: str, order: QueueOrder, floors: Floors) -> Steps[RoundPort, int]:
    if floors:
        yield from serve_floors(instance_id, floors)
    return (yield from sweep_queue(instance_id, order))


def sweep_queue(instance_id: str, order: QueueOrder) -> Steps[SweepingPort, int]:
    """Plan a queue, even if no transition made room there; returns how many requests were dispatched."""
    queue = yield from ReadQueueHead(instance_id)
    if queue is None or not queue.entries:
        return 0
    return (yield from grant_queue(queue, order))


def serve_floors(instance_id: str, floors: Floors) -> Steps[MovingPort, int]:
    """Dispatch what classes are owed on one instance; returns how many requests were dispatched."""
    queue = yield from ReadQueue(instance_id)
    plan = None if queue is None else floors.plan(queue)
    if plan is None or not plan.steps:
        return 0
    for _ in range(MAX_STALE_PLANS):
        reply = yield from Commit(plan)
        if reply.grants or reply.queue is None:
            return len(reply.grants)
        # The plan does not depend on what changed meanwhile, and what is not held any more is left out.
        plan = replace(plan, version=reply.queue.load.version)
    return 0


def rebalance(
    instance_id: str, order: QueueOrder, *, decode_stall_s: float, max_moves: int
) -> Steps[MovingPort, tuple[Moved, ...]]:
    """One round for one overloaded instance."""
    return _move_held(instance_id, lambda queue: plan_rebalance(queue, decode_stall_s)[:max_moves], REBALANCE, order)


def reason_to_leave(state: InstanceState) -> str:
    """The reason for which requests leave an instance in this state; a label in metrics."""
    return "drain" if state is InstanceState.DRAINING else "instance_down"


def instances_to_evacuate(loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec]) -> tuple[str, ...]:
    """The instances to evacuate: out of service and with held requests, unless no instance could take them.

    A draining instance would serve its held requests, and does where no other takes requests. Moved, they are served
    sooner, and the drain ends sooner.
    """
    if not any(map(is_ready, instances.values())):
        return ()
    return tuple(
        instance_id
        for instance_id, load in loads.items()
        if load.queued_requests and load.state is not InstanceState.READY
    )


def instances_to_park(loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """Draining instances with neither held nor running requests."""
    return tuple(
        instance_id
        for instance_id, load in loads.items()
        if load.state is InstanceState.DRAINING and not load.in_flight
    )


def evacuate(
    instance_id: str,
    order: QueueOrder,
    loads: Mapping[str, InstanceLoad],
    instances: Mapping[str, InstanceSpec],
    *,
    decode_stall_s: float,
) -> Steps[MovingPort, tuple[Moved, ...]]:
    """The held requests of an instance that left service move to instances that take requests; none where it has come
    back, by these loads."""
    left = loads.get(instance_id)
    if left is None or left.state is InstanceState.READY:
        return ()

    def plan(queue: HotQueue) -> Sequence[Move]:
        return plan_evacuation(queue.held, instance_id, loads, instances, decode_stall_s)

    return (yield from _move_held(instance_id, plan, reason_to_leave(left.state), order))


def give_idle_work(
    instance_ids: Sequence[str], order: QueueOrder, idle: IdleWork
) -> Steps[MovingPort, tuple[Moved, ...]]:
    """Move requests that would be late in these queues to instances that are idle in this round."""
    queues: list[HotQueue] = []
    for instance_id in instance_ids[:QUEUES] if idle else ():
        queue = yield from ReadQueue(instance_id)
        if queue is not None and queue.held:
            queues.append(queue)
    held = [request for queue in queues for request in queue.held]
    return (yield from _carry_out(idle.plan(queues), held, IDLE, order))


def _move_held(
    instance_id: str, plan: Callable[[HotQueue], Sequence[Move]], reason: str, order: QueueOrder
) -> Steps[MovingPort, tuple[Moved, ...]]:
    """Move what the plan says of the requests held on one instance, and grant what that leaves room for."""
    queue = yield from ReadQueue(instance_id)
    if queue is None or not queue.held:
        return ()
    return (yield from _carry_out(plan(queue), queue.held, reason, order))


def _carry_out(
    moves: Sequence[Move], held: Sequence[StoredRequest], reason: str, order: QueueOrder
) -> Steps[MovingPort, tuple[Moved, ...]]:
    requests = {request.request_id: request for request in held}
    done: list[Moved] = []
    for move in moves:
        request = requests[move.request_id]
        moved = yield from Migrate(request, move.target_id, reason)
        done.append(Moved(request.instance_id, reason, move, moved.status))
        yield from grant_queue(moved.queue, order)
    return tuple(done)


def scheduled_ready(instances: Mapping[str, InstanceSpec]) -> int:
    """The n of the hotness rule: ready instances on the rings that requests are placed by first."""
    return len(takers(instances, Leg.PREFILL)) or len(takers(instances, Leg.WHOLE))


class HotnessKeeper:
    """The leader's memory of the arrival log, from which the hotness tree grows."""

    def __init__(self, window: HotnessWindow, rule: HotnessRule) -> None:
        self.window = window
        self._rule = rule
        self._last_entry = "0"
        self.arrived = 0
        """Arrivals read so far."""
        self._published: Mapping[int, int] = {}
        """Counts as they were published last."""

    def tick(
        self, tree: HotnessTree, instances: Mapping[str, InstanceSpec]
    ) -> Steps[HotnessPort, tuple[HotnessTree, int | None]]:
        """Read what arrived since the last round, and publish the tree if it changed; the tree as it is now, and its
        version where it was published.

        Time moves with the arrivals: without traffic nothing heats up and nothing cools down.
        """
        while True:
            arrivals = yield from ReadArrivals(self._last_entry, READ_LIMIT)
            self.arrived += len(arrivals)
            for arrival in arrivals:
                self.window.add(arrival.at_ms, arrival.head)
                self.window.expire(arrival.at_ms)
                self._last_entry = arrival.entry_id
            if len(arrivals) < READ_LIMIT:
                break
        grown = self.window.grow(tree, scheduled_ready(instances), self._rule)
        return grown, None if grown is tree else (yield from self._publish(grown))

    def renew_counts(self, tree: HotnessTree) -> Steps[HotnessPort, int | None]:
        """Publish the counts of an unchanged tree, which people read, if they changed; the version of the tree, None
        where nothing was published."""
        return None if self._counts(tree) == self._published else (yield from self._publish(tree))

    def _publish(self, tree: HotnessTree) -> Steps[HotnessPort, int]:
        counts = self._counts(tree)
        version = yield from PublishTree(tree, counts)
        self._published = counts
        return version

    def _counts(self, tree: HotnessTree) -> dict[int, int]:
        """How often each hot prefix was seen in the window."""
        return {prefix: self.window.count(prefix) for prefix in tree.hot}


class LearningKeeper:
    """The leader's memory of the sample log."""

    def __init__(self, learner: FleetLearner) -> None:
        self._learner = learner
        self._last_entry = "0"

    def tick(
        self, loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec], now_ms: int
    ) -> Steps[LearningPort, int]:
        """Learn what was logged since the last round, and publish what changed by it or with time; returns how many
        samples there were."""
        serving = {name for name, load in loads.items() if load.state not in _RESTARTS}
        self._learner.forget_all_but(serving)
        samples = yield from ReadSamples(self._last_entry, READ_LIMIT)
        if samples:
            self._last_entry = samples[-1].entry_id
        rates = self._learner.learn(samples, loads, instances, now_ms)
        learned = self._learner.learned
        if samples or rates:
            yield from PublishLearned(learned, rates)
        ends = [each.content for each in samples if isinstance(each.content, EndSample)]
        for disproved in dict.fromkeys(end.disproved for end in ends if end.disproved is not None):
            if disproved.instance_id in instances:
                yield from CorrectTier(disproved)
        return len(samples)
