"""Hotspot-aware rebalancing: which held requests leave an overloaded instance for their other candidate.

Source: DualMap (ICLR 2026). The migration benefit of a held request r on the hot instance i with other
candidate j is B = TTFT(r, i) - TTFT(r, j). Eligible: B > 0 and TTFT(r, j) < SLO. Largest benefit first, until
every request left on i is expected to meet its SLO. One round, never recursive, never outside the pair.

What makes one round cheap: a move only ever shortens the waits that are left on i and lengthens those on j.
So benefits only fall while the plan grows (a heap whose entries are refreshed when they surface stays exact),
a request that is on time stays on time, and the last late request in queue order only moves forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heapreplace

from dualmap.scheduling.estimates.ttft import expected_ttft_s, stall_s
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.settings import DECODE_STALL_S
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.values import value

MOVE_LIMIT = 1024
"""Requests at the head of a queue that one round looks at: the bound of its cost. Those behind have their turn when the
head has moved or was served."""


@dataclass(frozen=True, slots=True)
class HotQueue:
    """The head of one instance's queue at one moment."""

    now_ms: int
    load: InstanceLoad
    """``dispatched_tokens`` are prefilled before anything held; the rest of ``pending_tokens`` is held."""
    held: tuple[StoredRequest, ...]
    """Held requests, in the order in which they would be granted."""
    alternatives: Mapping[str, InstanceLoad]
    """Loads of the held requests' other candidates; nothing moves to those that are missing or not ready."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move this held request to that instance."""

    request_id: str
    target_id: str
    benefit_s: float
    """Seconds by which the expected TTFT falls."""


class MigrateStatus(StrEnum):
    """The outcome of one move of a held request."""

    MIGRATED = "migrated"
    NOT_HELD = "not_held"
    """The request was granted, finished or moved meanwhile: nothing changed."""
    NOT_READY = "not_ready"
    """The target is not ready, or does not take requests (role ``decode``): nothing changed."""
    QUEUE_FULL = "queue_full"


@value
class Migration:
    """The outcome of a move, and the target's queue where that has room."""

    status: MigrateStatus
    queue: QueueHead | None = None


def waited_s(request: StoredRequest, now_ms: int) -> float:
    """Time since the first reservation: the part of the SLO that is already spent."""
    return max(0, now_ms - request.enqueued_ms) / 1000


def plan_sweep(loads: Mapping[str, InstanceLoad]) -> tuple[str, ...]:
    """The instances to examine: ready, with requests that can still move; longest work first."""
    hot = [load for load in loads.values() if load.queued_requests and load.state is InstanceState.READY]
    hot.sort(key=lambda load: load.pending_tokens / load.prefill_tokens_per_s, reverse=True)
    return tuple(load.instance_id for load in hot)


def plan_rebalance(queue: HotQueue, decode_stall_s: float = DECODE_STALL_S) -> tuple[Move, ...]:
    """The moves of one round, largest benefit first; () when every request on the instance is on time.

    A request that is on time with no late request behind it stays: its move would help none.
    Costs O(n log n) in the length of the queue.
    """
    plan = _Plan(queue, decode_stall_s)
    heap = [(-benefit_s, index) for index in range(len(queue.held)) if (benefit_s := plan.benefit_s(index)) > 0]
    heapify(heap)
    moves: list[Move] = []
    while heap and plan.last_late() >= 0:
        stale_s, index = heap[0]
        benefit_s = plan.benefit_s(index)
        if benefit_s <= 0 or index > plan.last_late():
            heappop(heap)
        elif -benefit_s > stale_s:
            heapreplace(heap, (-benefit_s, index))
        else:
            heappop(heap)
            moves.append(plan.move(index, benefit_s))
    return tuple(moves)


class _Plan:
    """The queue as it would be after the moves planned so far. Lives for one call of the planner."""

    def __init__(self, queue: HotQueue, decode_stall_s: float) -> None:
        self._queue = queue
        self._decode_stall_s = decode_stall_s
        self._ahead = _PrefixSums([request.uncached_tokens for request in queue.held])
        self._stays = [True] * len(queue.held)
        self._arriving: dict[str, int] = {}
        self._last_late = len(queue.held) - 1

    def benefit_s(self, index: int) -> float:
        """B of the request now; 0 if it must not move."""
        request = self._queue.held[index]
        target = self._queue.alternatives.get(request.alternative_id or "")
        if target is None or target.state is not InstanceState.READY:
            return 0.0
        tokens = request.alternative_uncached_tokens + self._arriving.get(target.instance_id, 0)
        there_s = self._waited_s(request) + expected_ttft_s(target, tokens, self._decode_stall_s)
        return self._ttft_here_s(index) - there_s if there_s < request.slo_ms / 1000 else 0.0

    def move(self, index: int, benefit_s: float) -> Move:
        request = self._queue.held[index]
        assert request.alternative_id is not None  # benefit_s was positive
        self._ahead.add(index, -request.uncached_tokens)
        self._stays[index] = False
        arriving = self._arriving.get(request.alternative_id, 0)
        self._arriving[request.alternative_id] = arriving + request.alternative_uncached_tokens
        return Move(request.request_id, request.alternative_id, benefit_s)

    def last_late(self) -> int:
        """Position of the last request left that would miss its SLO; -1 when none would."""
        while self._last_late >= 0 and not self._late(self._last_late):
            self._last_late -= 1
        return self._last_late

    def _late(self, index: int) -> bool:
        return self._stays[index] and self._ttft_here_s(index) > self._queue.held[index].slo_ms / 1000

    def _ttft_here_s(self, index: int) -> float:
        load = self._queue.load
        tokens = load.dispatched_tokens + self._ahead.through(index)
        waiting_s = tokens / load.prefill_tokens_per_s + stall_s(load, self._decode_stall_s)
        return self._waited_s(self._queue.held[index]) + waiting_s

    def _waited_s(self, request: StoredRequest) -> float:
        return waited_s(request, self._queue.now_ms)


class _PrefixSums:
    """Sums over the first k values, with changes, in O(log n) each (a Fenwick tree)."""

    def __init__(self, values: list[int]) -> None:
        self._tree = [0, *values]
        for node in range(1, len(self._tree)):
            parent = node + (node & -node)
            if parent < len(self._tree):
                self._tree[parent] += self._tree[node]

    def add(self, index: int, delta: int) -> None:
        node = index + 1
        while node < len(self._tree):
            self._tree[node] += delta
            node += node & -node

    def through(self, index: int) -> int:
        """The sum of the values 0..index."""
        total, node = 0, index + 1
        while node:
            total += self._tree[node]
            node -= node & -node
        return total
