"""Who goes next: the order in which held requests of one instance are granted.

``fifo`` is the order of first reservation, the paper's setting. ``deadline`` keeps the most requests on time: earliest
deadline first, and when one would be late, the longest so far steps aside (J. M. Moore, "An n job, one machine
sequencing algorithm for minimizing the number of late jobs", 1968, known as Moore-Hodgson; optimal for one machine
and known jobs). A request that could not make its deadline even if it were next has *stepped behind*: it is served,
oldest first, while nobody on time is waiting and the engine has room to spare, and goes before everybody once it has
been held for ``max_hold_ms``. An engine has room to spare if it has no prefill left, and if the running requests leave
some of its KV memory: where decoding fills that, prefill queues are empty for most of the time, and late work that is
served whenever they are takes the memory, and with it the steps, that those on time would have had.
As whoever is late goes first in the end, late work takes a share of the instance that requests on time have to do
without, and under lasting overload it would take all of it. Therefore an instance takes on a limited amount, what it
holds and what it has done for overdue requests lately (``scheduling.overdue_work``) together: a burst of
``max_late_work_ms``, and ``late_work_share`` of its time in the long run. Whoever steps behind beyond that is
*surplus*, and refused. What is served late while nobody on time waits costs nobody anything, and counts no longer.

An engine takes requests in only between two steps. Whoever is next waits for the rest of the step under way, half of
one on average, and a plan that leaves that out sends many a request just too late (``step_rest_tokens``).

While no deadline is at stake the order decides nothing, and the engine is given more than one dispatch window: with
the next prompts at hand it fills the last step of a long prefill, which would otherwise run half empty.

The state store keeps a Lua twin of these functions; the property tests drive both in lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

PLANNED_REQUESTS = 256
"""Requests that one pick looks at, in order of deadline: the bound of its cost."""

CALM_WINDOWS = 4
"""Dispatch windows that an instance may be given while no deadline is at stake."""


class Waiting(NamedTuple):
    """A held request that may still be on time."""

    deadline_ms: int
    uncached_tokens: int


class Plan(NamedTuple):
    """Whom to grant next, and whom for now not at all."""

    first: int
    """Position in the queue."""
    aside_tokens: int
    """Uncached tokens of those set aside: they will not be ahead of anybody on time."""


NOBODY_WAITS = Plan(0, 0)


def step_rest_tokens(dispatch_window_tokens: int, other_tokens: int) -> int:
    """What is left, on average, of the engine step that a request finds under way, in tokens of prefill: half a step,
    of which a dispatch window holds two. A step is no fuller than others on time have work for."""
    return min(dispatch_window_tokens // 4, other_tokens)


def steps_behind(request: Waiting, now_ms: int, step_tokens: int, tokens_per_s: float) -> bool:
    """Whether the deadline would pass before the first token even if the request were next, behind the rest of a step
    (``step_rest_tokens``)."""
    return now_ms + (step_tokens + request.uncached_tokens) * 1000 / tokens_per_s > request.deadline_ms


def has_room_to_spare(dispatched_tokens: int, kv_demand: float) -> bool:
    """Whether late work would take nothing from who is on time: no prefill is left, and running contexts, shared
    prefixes counted for each, do not fill KV memory (``InstanceLoad.kv_demand``)."""
    return dispatched_tokens == 0 and kv_demand < 1.0


def goes_at_once(
    queued_requests: int, dispatched_tokens: int, kv_demand: float, *, has_room: bool, is_behind: bool
) -> bool:
    """Whether a request that comes to an instance with so many queued is dispatched without a wait.

    One that has stepped behind waits for room to spare, but in ``fifo``, where nobody steps behind.
    """
    return not queued_requests and has_room and (not is_behind or has_room_to_spare(dispatched_tokens, kv_demand))


def plan_on_time(queue: Sequence[Waiting], now_ms: int, ahead_tokens: int, tokens_per_s: float) -> Plan:
    """The plan for a queue in order of deadline.

    Moore-Hodgson over the first ``PLANNED_REQUESTS``, behind the tokens ahead of them: those dispatched, and the rest
    of a step (``step_rest_tokens``). Next is the first of those that the plan keeps on time; if it keeps none, the one
    with the fewest tokens, which is the likeliest to make it after all. O(n log n).
    """
    if not queue:
        return NOBODY_WAITS
    end_ms = now_ms + ahead_tokens * 1000 / tokens_per_s
    kept: list[tuple[int, int]] = []
    aside: set[int] = set()
    aside_tokens = 0
    planned = queue[:PLANNED_REQUESTS]
    for position, request in enumerate(planned):
        heappush(kept, (-request.uncached_tokens, -position))
        end_ms += request.uncached_tokens * 1000 / tokens_per_s
        if end_ms > request.deadline_ms:
            longest_tokens, longest = heappop(kept)
            end_ms += longest_tokens * 1000 / tokens_per_s
            aside.add(-longest)
            aside_tokens -= longest_tokens
    if kept:
        return Plan(next(position for position in range(len(planned)) if position not in aside), aside_tokens)
    return Plan(min(range(len(planned)), key=lambda position: planned[position].uncached_tokens), aside_tokens)


def behind_tokens(pending_tokens: int, dispatched_tokens: int, late_tokens: int, aside_tokens: int) -> int:
    """The part of an instance's pending tokens that a new request on time need not wait for.

    That is what stepped behind and, as far as it still waits, what the last plan set aside.
    """
    return late_tokens + min(aside_tokens, pending_tokens - dispatched_tokens - late_tokens)


def is_calm(earliest_deadline_ms: int, now_ms: int, on_time_tokens: int, tokens_per_s: float) -> bool:
    """Whether all on-time work of an instance, dispatched and waiting, would end before the earliest deadline waiting.

    Then nobody is late in any order. O(1).
    """
    return now_ms + on_time_tokens * 1000 / tokens_per_s <= earliest_deadline_ms


def is_surplus(late_tokens: int, tokens_per_s: float, overdue_work_ms: float, max_late_work_ms: int) -> bool:
    """Whether one more request that steps behind is too many, given the tokens of those that did before and are held,
    and what is left of the work of those that became overdue."""
    return late_tokens * 1000 / tokens_per_s + overdue_work_ms >= max_late_work_ms


def is_overdue(enqueued_ms: int, now_ms: int, max_hold_ms: int) -> bool:
    """Whether a held request has waited for as long as any may: it goes next, room or not."""
    return now_ms - enqueued_ms >= max_hold_ms
