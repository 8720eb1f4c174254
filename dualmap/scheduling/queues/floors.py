"""Floors of priority classes: waiting requests that are dispatched whatever waits before them, so that no class starves
under those above it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dualmap.scheduling.queues.queue_order import PlanStep, QueueOrder, QueuePlan
from dualmap.scheduling.queues.rebalance import HotQueue
from dualmap.scheduling.state.instance_lifecycle import SERVING
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.tenants.classes import class_band


class Floors:
    """The leader's memory of what each class is owed on each instance, in tokens of prefill."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._owed: dict[tuple[str, int], tuple[float, int]] = {}
        """The tokens that were owed, and the time of the store at which they were."""

    def __bool__(self) -> bool:
        """Whether any class but the first has a floor."""
        return any(each.floor > 0 for each in self._order.classes[1:])

    def keep(self, holding: Collection[str]) -> None:
        """Forget what is owed on all instances but these, which are those that hold requests: elsewhere none waits."""
        self._owed = {of: owed for of, owed in self._owed.items() if of[0] in holding}

    def plan(self, queue: HotQueue) -> QueuePlan:
        """The requests of the queue that are to be dispatched now, the oldest of each class first. Nothing is owed to
        a class of which nothing waits."""
        load, steps = queue.load, list[PlanStep]()
        room = load.max_running_requests - load.running_requests if load.state in SERVING else 0
        for rank, each in enumerate(self._order.classes):
            if rank == 0 or not each.floor:
                continue
            waiting = self._waiting(queue.held, rank)
            tokens = self._owed_by(load.instance_id, rank, each.floor * load.prefill_tokens_per_s, queue.now_ms)
            while waiting and len(steps) < room and tokens >= waiting[0].uncached_tokens:
                request = waiting.pop(0)
                tokens -= request.uncached_tokens
                steps.append(PlanStep(request.request_id))
            if waiting:
                self._owed[load.instance_id, rank] = tokens, queue.now_ms
            else:
                self._owed.pop((load.instance_id, rank), None)
        return QueuePlan(load.instance_id, load.version, tuple(steps), load.passed_over_tokens)

    def _owed_by(self, instance_id: str, rank: int, tokens_per_s: float, now_ms: int) -> float:
        left, since_ms = self._owed.get((instance_id, rank), (0.0, now_ms))
        return left + tokens_per_s * max(0, now_ms - since_ms) / 1000

    def _waiting(self, held: Sequence[StoredRequest], rank: int) -> list[StoredRequest]:
        lowest, above = class_band(rank), class_band(rank + 1)
        return sorted((each for each in held if lowest <= each.band < above), key=lambda each: each.enqueued_ms)
