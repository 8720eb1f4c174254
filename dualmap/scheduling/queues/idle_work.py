"""Work for the idle: an instance that could serve at once takes held requests that their own queue would make late.

Placement looks at each request once. What is held when an instance joins, comes back or slows down was placed for the
fleet as it was. So the leader looks at the queues once a second while an instance is idle. A request is moved if its
own queue defers or passes it over and the idle one is expected to serve it within its SLO. One that is late wherever
it goes is moved to an instance with hardly any work, if that serves it sooner, and after all of its class that can be
on time.
Who goes first is decided across the queues: the highest class, wherever it waits, and within a class the lowest band. A
round looks at the ``QUEUES`` longest ones.

Only its next best instance is known to hold a part of its prefix. Anywhere else it counts with its whole prompt. A
pinned request stays: only its instance has what it continues. So does a retry: which instance failed it its record does
not say, and one that died a moment ago looks idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from dualmap.scheduling.estimates.ttft import stall_s
from dualmap.scheduling.queues.queue_order import QueueEntry, plan_by_class, step_rest_tokens
from dualmap.scheduling.queues.rebalance import HotQueue, Move
from dualmap.scheduling.settings import DECODE_STALL_S
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.view import takers
from dualmap.scheduling.tenants.classes import rank_of_band

QUEUES = 16
"""Queues that a round reads: the bound of its cost, as each may hold a thousand requests."""
LITTLE_WORK = 0.05
"""Share of an instance's KV memory. An instance that has no more running, and nothing to prefill, also takes requests
that are late anyway. Where all are busy, an engine is without prefill only for moments, which belong to requests on
time."""


def is_idle(load: InstanceLoad) -> bool:
    """Whether it could serve a request at once: it has no prefill but deferred ones, and memory is left."""
    return (
        load.state is InstanceState.READY
        and load.pending_tokens == load.deferred_tokens
        and load.running_requests < load.max_running_requests
        and load.kv_demand < 1.0
    )


def late_requests(queue: HotQueue, decode_stall_s: float = DECODE_STALL_S) -> tuple[StoredRequest, ...]:
    """The held requests that a queue by deadline would make late: deferred ones, and what its plan passes over."""
    load = queue.load
    entries, deferred = list[QueueEntry](), list[QueueEntry]()
    for each in queue.held:
        entry = QueueEntry(each.request_id, each.enqueued_ms + each.slo_ms, each.uncached_tokens, each.band)
        (deferred if each.deferred else entries).append(entry)
    if entries and entries[-1].band:
        entries.sort(key=attrgetter("rank_ms"))
    stall_tokens = round(stall_s(load, decode_stall_s) * load.prefill_tokens_per_s)
    step_tokens = step_rest_tokens(load.dispatch_window_tokens, load.pending_tokens - load.deferred_tokens)
    ahead_tokens = load.dispatched_tokens + step_tokens + stall_tokens
    late = plan_by_class(entries, queue.now_ms, ahead_tokens, load.prefill_tokens_per_s, deferred).passed_over
    return tuple(request for request in queue.held if request.deferred or request.request_id in late)


class IdleWork:
    """One round over the queues of a pool. What it moves counts on the idle instances for the rest of the round."""

    def __init__(
        self,
        loads: Mapping[str, InstanceLoad],
        decode_stall_s: float = DECODE_STALL_S,
        instances: Mapping[str, InstanceSpec] | None = None,
    ) -> None:
        """``loads`` are those of instances that requests may be placed on; every one takes any request where
        ``instances`` do not give their roles."""
        self._instances = instances
        self._takers: dict[tuple[Leg, str, str], frozenset[str]] = {}
        self._idle = {load.instance_id: load for load in loads.values() if is_idle(load)}
        self._taken_tokens = dict.fromkeys(self._idle, 0)
        self._decode_stall_s = decode_stall_s

    def __bool__(self) -> bool:
        """Whether any instance is idle still."""
        return bool(self._idle)

    def plan(self, queues: Sequence[HotQueue]) -> tuple[Move, ...]:
        """The moves out of these queues to idle instances: class by class, those of the lowest band first, and within a
        band the least prefill."""
        late = [
            (queue, request)
            for queue in queues
            if queue.load.instance_id not in self._idle
            for request in late_requests(queue, self._decode_stall_s)
            if not request.pinned and request.attempt == 1
        ]
        late.sort(key=lambda each: (each[1].band, min(each[1].prompt_tokens, self._alternative_tokens(each[1]))))
        moves: list[Move] = []
        for _, of_class in groupby(late, key=lambda each: rank_of_band(each[1].band)):
            missed: list[tuple[HotQueue, StoredRequest]] = []
            for queue, request in of_class:
                move = self._move(request, queue, on_time=True)
                if move is None:
                    missed.append((queue, request))
                else:
                    moves.append(move)
            moves += filter(None, (self._move(request, queue, on_time=False) for queue, request in missed))
        return tuple(moves)

    def _takes(self, instance_id: str, request: StoredRequest) -> bool:
        if self._instances is None:
            return True
        need = request.leg, request.model, request.revision
        if need not in self._takers:
            self._takers[need] = takers(self._instances, *need)
        return instance_id in self._takers[need]

    def _alternative_tokens(self, request: StoredRequest) -> int:
        return request.alternative_uncached_tokens if request.alternative_id in self._idle else request.prompt_tokens

    def _move(self, request: StoredRequest, queue: HotQueue, *, on_time: bool) -> Move | None:
        """The move to the idle instance where the request ends first, if that is in time. A late request moves if it
        ends sooner there, and only to instances with hardly any work."""
        ends: list[tuple[float, str, int]] = []
        for name, load in self._idle.items():
            if not self._takes(name, request):
                continue
            if not on_time and (load.pending_tokens or load.kv_demand > LITTLE_WORK):
                continue
            tokens = self._alternative_tokens(request) if name == request.alternative_id else request.prompt_tokens
            ends.append(((self._taken_tokens[name] + tokens) * 1000 / load.prefill_tokens_per_s, name, tokens))
        if not ends:
            return None
        takes_ms, name, tokens = min(ends)
        here_ms = queue.load.pending_tokens * 1000 / queue.load.prefill_tokens_per_s
        gains = queue.now_ms + takes_ms <= request.enqueued_ms + request.slo_ms if on_time else takes_ms < here_ms
        if not gains or tokens > 2 * request.uncached_tokens:
            return None
        self._taken_tokens[name] += tokens
        if self._taken_tokens[name] >= self._idle[name].dispatch_window_tokens:
            del self._idle[name]
        return Move(request.request_id, name, (here_ms - takes_ms) / 1000)
