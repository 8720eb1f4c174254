"""Where the held requests of a lost instance go: to their other candidate, else to the least loaded one with room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.rebalance import HeldRequest, Move
from scheduling.ttft import DECODE_STALL_S, queueing_s
from scheduling.view import is_scheduled


def plan_evacuation(
    held: Sequence[HeldRequest],
    lost_id: str,
    loads: Mapping[str, InstanceLoad],
    instances: Mapping[str, InstanceSpec],
    decode_stall_s: float = DECODE_STALL_S,
) -> tuple[Move, ...]:
    """A move for every held request, in queue order, for as long as one of the other ``instances`` that is ready and
    scheduled has room; those behind stay for another round.

    Outside its pair a request counts with its whole prompt. Requests moved earlier in the plan count as load of
    their target, so a long queue spreads instead of burying the one that was idle or overfilling a queue.
    ``benefit_s`` is 0: there is no expected TTFT on a lost instance to compare with.
    """
    targets = _Targets(
        (load for load in loads.values() if load.instance_id != lost_id and _takes_requests(load, instances)),
        instances,
        decode_stall_s,
    )
    moves: list[Move] = []
    for request in held:
        target_id, tokens = request.alternative_id, request.alternative_uncached_tokens
        if target_id is None or not targets.has_room(target_id):
            target_id, tokens = targets.least_loaded(), request.prompt_tokens
        if target_id is None:
            break
        targets.add(target_id, tokens)
        moves.append(Move(request.request_id, target_id, 0.0))
    return tuple(moves)


def _takes_requests(load: InstanceLoad, instances: Mapping[str, InstanceSpec]) -> bool:
    spec = instances.get(load.instance_id)
    return load.state is InstanceState.READY and spec is not None and is_scheduled(spec)


class _Targets:
    """The ready, scheduled instances by queueing time, as it would be after the moves planned so far."""

    def __init__(
        self, loads: Iterable[InstanceLoad], instances: Mapping[str, InstanceSpec], decode_stall_s: float
    ) -> None:
        self._instances = instances
        self._decode_stall_s = decode_stall_s
        self._loads = {load.instance_id: load for load in loads}
        self._heap = [(queueing_s(load, decode_stall_s), name) for name, load in self._loads.items()]
        heapify(self._heap)

    def has_room(self, instance_id: str) -> bool:
        """Whether it would take one more request, held or at once; what would be refused would be planned again and
        again, and never move."""
        load = self._loads.get(instance_id)
        if load is None:
            return False
        return load.queued_requests < self._instances[instance_id].max_queued_requests or self._dispatches(load)

    def _dispatches(self, load: InstanceLoad) -> bool:
        spec = self._instances[load.instance_id]
        return (
            not load.queued_requests
            and load.dispatched_tokens < spec.dispatch_window_tokens
            and load.running_requests < spec.max_running_requests
        )

    def least_loaded(self) -> str | None:
        """The one with the shortest queueing time among those with room."""
        while self._heap:
            waiting_s, instance_id = self._heap[0]
            is_current = waiting_s == queueing_s(self._loads[instance_id], self._decode_stall_s)
            if is_current and self.has_room(instance_id):
                return instance_id
            heappop(self._heap)
        return None

    def add(self, instance_id: str, tokens: int) -> None:
        """Count a request that moves there."""
        load = self._loads[instance_id]
        if self._dispatches(load):
            dispatched_tokens, running = load.dispatched_tokens + tokens, load.running_requests + 1
            load = replace(load, dispatched_tokens=dispatched_tokens, running_requests=running)
        else:
            load = replace(load, queued_requests=load.queued_requests + 1)
        load = replace(load, pending_tokens=load.pending_tokens + tokens)
        self._loads[instance_id] = load
        heappush(self._heap, (queueing_s(load, self._decode_stall_s), instance_id))
