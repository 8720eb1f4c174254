"""Where the held requests of a lost instance go: to their other candidate, else to the least loaded one with room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.queue_order import Waiting, goes_at_once, step_rest_tokens, steps_behind
from scheduling.rebalance import HeldRequest, Move
from scheduling.ttft import DECODE_STALL_S, queueing_s
from scheduling.view import is_scheduled


def plan_evacuation(
    held: Sequence[HeldRequest],
    lost_id: str,
    loads: Mapping[str, InstanceLoad],
    instances: Mapping[str, InstanceSpec],
    decode_stall_s: float = DECODE_STALL_S,
    *,
    by_deadline: bool = False,
) -> tuple[Move, ...]:
    """A move for every held request, in queue order, for which one of the other ``instances`` that is ready and
    scheduled has room; the others stay for another round.

    ``by_deadline`` is the order in which instances grant: one with room may not dispatch who is late at once. Outside
    its pair a request counts with its whole prompt. Requests moved earlier in the plan count as load of their target,
    so a long queue spreads instead of burying the one that was idle or overfilling a queue.
    ``benefit_s`` is 0: there is no expected TTFT on a lost instance to compare with.
    """
    targets = _Targets(
        (load for load in loads.values() if load.instance_id != lost_id and _takes_requests(load, instances)),
        instances,
        decode_stall_s,
        by_deadline,
    )
    moves: list[Move] = []
    for request in held:
        target_id, newcomer = request.alternative_id, _newcomer(request, request.alternative_uncached_tokens)
        if target_id is None or not targets.has_room(target_id, newcomer):
            newcomer = _newcomer(request, request.prompt_tokens)
            target_id = targets.least_loaded(newcomer)
        if target_id is not None:
            targets.add(target_id, newcomer)
            moves.append(Move(request.request_id, target_id, 0.0))
    return tuple(moves)


def _takes_requests(load: InstanceLoad, instances: Mapping[str, InstanceSpec]) -> bool:
    spec = instances.get(load.instance_id)
    return load.state is InstanceState.READY and spec is not None and is_scheduled(spec)


def _newcomer(request: HeldRequest, uncached_tokens: int) -> Waiting:
    """The request as it would come to an instance now; its deadline counts from this moment."""
    return Waiting(round((request.slo_s - request.waited_s) * 1000), uncached_tokens)


class _Targets:
    """The ready, scheduled instances by queueing time, as it would be after the moves planned so far."""

    def __init__(
        self,
        loads: Iterable[InstanceLoad],
        instances: Mapping[str, InstanceSpec],
        decode_stall_s: float,
        by_deadline: bool,
    ) -> None:
        self._instances = instances
        self._decode_stall_s = decode_stall_s
        self._by_deadline = by_deadline
        self._loads = {load.instance_id: load for load in loads}
        self._heap = [(queueing_s(load, decode_stall_s), name) for name, load in self._loads.items()]
        heapify(self._heap)

    def has_room(self, instance_id: str, newcomer: Waiting) -> bool:
        """Whether it would take the request, held or at once; what would be refused would be planned again and again,
        and never move."""
        load = self._loads.get(instance_id)
        return load is not None and (self._holds(load) or self._dispatches(load, self._is_behind(load, newcomer)))

    def _holds(self, load: InstanceLoad) -> bool:
        return load.queued_requests < self._instances[load.instance_id].max_queued_requests

    def _dispatches(self, load: InstanceLoad, is_behind: bool) -> bool:
        """Whether it dispatches one more request at once, the further windows of a calm instance left aside."""
        spec = self._instances[load.instance_id]
        has_room = (
            load.dispatched_tokens < spec.dispatch_window_tokens and load.running_requests < spec.max_running_requests
        )
        return goes_at_once(
            load.queued_requests, load.dispatched_tokens, load.kv_demand, has_room=has_room, is_behind=is_behind
        )

    def _is_behind(self, load: InstanceLoad, newcomer: Waiting) -> bool:
        # Late work counts as well here, if there is any: whom the instance then takes at once was not promised to it.
        window_tokens = self._instances[load.instance_id].dispatch_window_tokens
        step_tokens = step_rest_tokens(window_tokens, load.pending_tokens)
        return self._by_deadline and steps_behind(newcomer, 0, step_tokens, load.prefill_tokens_per_s)

    def least_loaded(self, newcomer: Waiting) -> str | None:
        """The one with the shortest queueing time among those with room for the request."""
        passed_over: list[tuple[float, str]] = []
        found: str | None = None
        while self._heap:
            waiting_s, instance_id = self._heap[0]
            load = self._loads[instance_id]
            is_current = waiting_s == queueing_s(load, self._decode_stall_s)
            if is_current and self.has_room(instance_id, newcomer):
                found = instance_id
                break
            heappop(self._heap)
            if is_current and self._dispatches(load, is_behind=False):  # the next one may be on time
                passed_over.append((waiting_s, instance_id))
        for entry in passed_over:
            heappush(self._heap, entry)
        return found

    def add(self, instance_id: str, newcomer: Waiting) -> None:
        """Count a request that moves there."""
        load, tokens = self._loads[instance_id], newcomer.uncached_tokens
        if self._dispatches(load, self._is_behind(load, newcomer)):
            dispatched_tokens, running = load.dispatched_tokens + tokens, load.running_requests + 1
            load = replace(load, dispatched_tokens=dispatched_tokens, running_requests=running)
        else:
            load = replace(load, queued_requests=load.queued_requests + 1)
        load = replace(load, pending_tokens=load.pending_tokens + tokens)
        self._loads[instance_id] = load
        heappush(self._heap, (queueing_s(load, self._decode_stall_s), instance_id))
