"""Relief: held requests that move to instances that have just joined, from wherever they wait longest.

New requests find a newcomer by themselves: it is the least loaded instance. Those that are held elsewhere would not, as
they wait in the queue that they were put into. A newcomer has none of their prefixes, so each is counted with its
whole prompt there; only what would have its first token sooner moves, and no newcomer is filled beyond half of an SLO,
so that the prefixes that are its own by now find room as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from scheduling.instance import InstanceLoad
from scheduling.rebalance import HotQueue, Move, waited_s
from scheduling.ttft import compute_s, queueing_s

FILL_SHARE = 0.5
"""Of the SLO: queueing time that moves may cause on a newcomer."""


def plan_relief(queues: Sequence[HotQueue], newcomers: Mapping[str, InstanceLoad]) -> tuple[Move, ...]:
    """The moves, those with the largest benefit first. A request that would be late on the newcomer moves only if it
    is late anyway."""
    waiting_s = {name: queueing_s(load) for name, load in newcomers.items()}
    moves: list[Move] = []
    candidates = [each for queue in queues for each in _waiting(queue)]
    for here_s, late_at_s, index, queue in sorted(candidates, key=lambda each: -each[0]):
        request = queue.held[index]
        target_id = min(waiting_s, key=lambda name: (waiting_s[name], name), default=None)
        if target_id is None:
            break
        own_s = compute_s(newcomers[target_id], request.prompt_tokens)
        there_s = waiting_s[target_id] + own_s
        fits = waiting_s[target_id] < FILL_SHARE * request.slo_ms / 1000
        if fits and there_s < here_s and (there_s < late_at_s or here_s > late_at_s):
            waiting_s[target_id] += own_s
            moves.append(Move(request.request_id, target_id, here_s - there_s))
    return tuple(moves)


def _waiting(queue: HotQueue) -> list[tuple[float, float, int, HotQueue]]:
    """(time to its first token here, time until its SLO is missed, position, queue) of each held request."""
    load = queue.load
    ahead = accumulate((request.uncached_tokens for request in queue.held), initial=load.dispatched_tokens)
    return [
        (
            (tokens + request.uncached_tokens) / load.prefill_tokens_per_s,
            request.slo_ms / 1000 - waited_s(request, queue.now_ms),
            index,
            queue,
        )
        for index, (request, tokens) in enumerate(zip(queue.held, ahead, strict=False))
    ]
