"""Where the held requests of a lost instance go: to their other candidate, else to the least loaded one."""

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
    """A move for every held request, in queue order; () when no other of the ``instances`` is ready and scheduled.

    Outside its pair a request counts with its whole prompt. Tokens moved earlier in the plan count as load of
    their target, so a long queue spreads instead of burying the one that was idle. ``benefit_s`` is 0: there
    is no expected TTFT on a lost instance to compare with.
    """
    targets = _Targets(
        (load for load in loads.values() if load.instance_id != lost_id and _takes_requests(load, instances)),
        decode_stall_s,
    )
    moves: list[Move] = []
    for request in held:
        if request.alternative_id in targets:
            target_id, tokens = request.alternative_id, request.alternative_uncached_tokens
        else:
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

    def __init__(self, loads: Iterable[InstanceLoad], decode_stall_s: float) -> None:
        self._decode_stall_s = decode_stall_s
        self._loads = {load.instance_id: load for load in loads}
        self._heap = [(queueing_s(load, decode_stall_s), name) for name, load in self._loads.items()]
        heapify(self._heap)

    def __contains__(self, instance_id: str | None) -> bool:
        return instance_id in self._loads

    def least_loaded(self) -> str | None:
        while self._heap:
            waiting_s, instance_id = self._heap[0]
            if waiting_s == queueing_s(self._loads[instance_id], self._decode_stall_s):
                return instance_id
            heappop(self._heap)
        return None

    def add(self, instance_id: str, tokens: int) -> None:
        load = self._loads[instance_id]
        load = replace(load, pending_tokens=load.pending_tokens + tokens)
        self._loads[instance_id] = load
        heappush(self._heap, (queueing_s(load, self._decode_stall_s), instance_id))
