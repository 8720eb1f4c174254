"""Moving the held requests of a lost instance: to their next best one, else to the least loaded one with room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from dualmap.scheduling.estimates.ttft import queueing_s
from dualmap.scheduling.queues.rebalance import Move
from dualmap.scheduling.settings import DECODE_STALL_S
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.view import takers


def plan_evacuation(
    held: Sequence[StoredRequest],
    lost_id: str,
    loads: Mapping[str, InstanceLoad],
    instances: Mapping[str, InstanceSpec],
    decode_stall_s: float = DECODE_STALL_S,
) -> tuple[Move, ...]:
    """A move for every held request, in queue order, for which one of the other ``instances`` has a place in its queue
    and serves its leg, model name and revision; the others stay for another round.

    Away from its next best instance a request counts with its whole prompt. Requests moved earlier in the plan count as
    load of their target, so a long queue spreads instead of overloading the one that was idle or overfilling a queue.
    ``benefit_s`` is 0: there is no expected TTFT on a lost instance to compare with.
    """
    ready = {name: load for name, load in loads.items() if name != lost_id and load.state is InstanceState.READY}
    by_need: dict[tuple[Leg, str, str], _Targets] = {}
    moves: list[Move] = []
    for request in held:
        need = request.leg, request.model, request.revision
        targets = by_need.get(need)
        if targets is None:
            serving = takers(instances, *need)
            among = {name: load for name, load in ready.items() if name in serving}
            targets = by_need[need] = _Targets(among, decode_stall_s)
        target_id, tokens = request.alternative_id, request.alternative_uncached_tokens
        if target_id is None or not targets.has_place(target_id):
            target_id, tokens = targets.least_loaded(), request.prompt_tokens
        if target_id is not None:
            for each in by_need.values():
                each.add(target_id, tokens)
            moves.append(Move(request.request_id, target_id, 0.0))
    return tuple(moves)


class _Targets:
    """Instances by queueing time, as it would be after the moves planned so far."""

    def __init__(self, loads: dict[str, InstanceLoad], decode_stall_s: float) -> None:
        self._decode_stall_s = decode_stall_s
        self._loads = loads
        self._heap = [(queueing_s(load, decode_stall_s), name) for name, load in loads.items()]
        heapify(self._heap)

    def has_place(self, instance_id: str) -> bool:
        load = self._loads.get(instance_id)
        return load is not None and load.queued_requests < load.max_queued_requests

    def least_loaded(self) -> str | None:
        """The one with the shortest queueing time among those with a place."""
        while self._heap:
            waiting_s, instance_id = self._heap[0]
            if waiting_s == queueing_s(self._loads[instance_id], self._decode_stall_s) and self.has_place(instance_id):
                return instance_id
            heappop(self._heap)
        return None

    def add(self, instance_id: str, tokens: int) -> None:
        """Count a request that moves there."""
        if instance_id not in self._loads:
            return
        load = self._loads[instance_id]
        load = replace(load, queued_requests=load.queued_requests + 1, pending_tokens=load.pending_tokens + tokens)
        self._loads[instance_id] = load
        heappush(self._heap, (queueing_s(load, self._decode_stall_s), instance_id))
