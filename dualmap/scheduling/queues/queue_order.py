"""A plan for the queue of one instance: which held request goes next.

``fifo`` is the order of first reservation, the paper's setting. ``deadline`` keeps the most requests on time: earliest
deadline first, and when one would be late, the longest so far is passed over (J. M. Moore, "An n job, one machine
sequencing algorithm for minimizing the number of late jobs", 1968, known as Moore-Hodgson; optimal for one machine and
known jobs). A new request does not wait for what a plan passed over. So the plan contains the sum of these tokens, and
they do not count as work ahead until the next plan.

Where tenants share the fleet each request has a *band*, and those of the highest band are passed over first
(``scheduling.tenants.shares``). Of those that are kept the lowest band goes first: what makes others late, an
estimate that was too short for example, then makes those late that sent more than their share. Within a band the
deadlines decide as without bands.

The outer part of a band is the priority class (``scheduling.tenants.classes``). What is of a higher class goes first,
late or on time: each class is planned as if nothing of lower ones waited, and what waits of these stays while anything
of a higher class does. What follows about requests on time and late ones holds within a class.

A request that could not meet its deadline even if it were next is *deferred*: it waits behind all that can (but see
below), and is dispatched when none of them is waiting, the engine has no prefill left, and running requests leave KV
memory. Others that are deferred go with it, up to a step of the engine: a burst is served as fast as in the engine's
own queue. (Where decoding fills the memory, prefill queues are empty most of the time. Late work that is dispatched
whenever they are empty would take the memory, and with it the steps, that requests on time need.) One that has no more
than a dispatch window to prefill, its prefix being cached, does not wait for memory: it takes next to nothing, and if
it were refused, its session would lose the cache that it lives on. It waits as long as its client does, unless the pool
refuses what is still deferred ``max_deferred_s`` after its deadline.

Deferred requests go in the order of bands, too. One that stays for lack of memory does not keep the others back, with
one exception: that of a tenant within its share does not see requests of its class go before it that are of tenants
above theirs, late or on time: it is dispatched before any of these, as one on time is, and while it finds no memory
none of these goes. Else it would wait for as long as others, whose requests are shorter, keep sending more than their
shares.

While no deadline is at stake, holding gains nothing: an engine is given ``CALM_WINDOWS`` dispatch windows, so that its
steps are full. None is at stake while all work is done before the next deadline, in whatever order (``is_calm``).

A long prompt, one that has more than ``LONG_SHARE`` of the KV memory to prefill, is held until it fits beside the
contexts that run (``finds_memory``). An engine serves in order of arrival: it would let all that came later wait with
it, whose prefixes are cached, and preempt and evict for it. Short ones go in any case: contexts are counted with the
prefixes that they share, so that their sum may exceed the memory while there is room.

An engine takes requests in only between two steps, so the next request waits for the rest of the step under way, half
of one on average (``step_rest_tokens``).

Replicas make plans from the queue head in the reply to the transition that made room, and commit them against the
version of the queue that they were made for.

A placement needs no plan where nothing waits before its request: the script that chooses the instance then dispatches
there at once (``statestore/lua/place_requests.lua``, ``goes_at_once``), which saves a further call. So it repeats the
rules for a queue of one entry, with the constants that are defined here: room, memory, calm, and idle room for classes
that fill it. It may hold a request that a plan would dispatch, as it does with one of such a class while any prefill is
left or waits: its reply then has the queue, and the replica plans it. It must not dispatch at once to idle room what a
plan would hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import NamedTuple

from dualmap.scheduling.settings import Order, PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad, Running, kv_demand
from dualmap.scheduling.state.instance_lifecycle import SERVING
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.tenants.classes import class_band, is_above, rank_of_band
from dualmap.scheduling.tenants.shares import keeps_back
from dualmap.scheduling.values import value

PLAN_LIMIT = 64
"""Requests at the head of a queue that one plan looks at: the bound of its cost."""
LATE_LIMIT = 8
"""Deferred requests that a plan looks at beside these, where a queue is longer: the first ones. None of a lower class
is among them while as many of higher ones wait."""
CALM_WINDOWS = 4
"""Dispatch windows that an instance may be given ahead while no deadline is at stake."""
LONG_SHARE = 0.1
"""Share of an instance's KV memory: a prompt with more to prefill waits until it fits beside what runs."""
BAND_MS = 5 * 10**12
"""Distance of two bands in a queue: more than any time of the store's clock."""
MANY_BANDS = 10**6
"""A number of bands above that of any pool."""
FILL_MEMORY = 0.5
"""Share of an instance's KV memory up to which running requests let classes that fill idle room in."""
DEFERRED_RANK_MS = 2 * 10**15
"""Offset that is added to the rank of a deferred request, so that it is behind every deadline, in whatever band. Twice
as much is still a whole number for a sorted set's scores, and is written as one."""


class QueueEntry(NamedTuple):
    """A held request as its queue lists it."""

    request_id: str
    rank_ms: int
    """Place in its band of the queue, on the store's clock: the deadline (order ``deadline``), or the time of first
    reservation plus a constant."""
    uncached_tokens: int
    band: int = 0
    """The higher, the sooner it is passed over. Queues are in order of bands, so that a plan finds the lowest ones
    however many wait."""

    @classmethod
    def at(cls, request_id: str, place: int, uncached_tokens: int) -> QueueEntry:
        """The entry at this place of its queue (``place``)."""
        if place < BAND_MS:
            return cls(request_id, place, uncached_tokens)
        deferred_ms = DEFERRED_RANK_MS if place >= DEFERRED_RANK_MS else 0
        band, rank_ms = divmod(place - deferred_ms, BAND_MS)
        return cls(request_id, rank_ms + deferred_ms, uncached_tokens, band)

    @property
    def place(self) -> int:
        """The score of the request in the queue."""
        return self.rank_ms + self.band * BAND_MS

    @property
    def deferred(self) -> bool:
        return self.rank_ms >= DEFERRED_RANK_MS


@value
class QueueHead:
    """An instance's queue at a moment: its first ``PLAN_LIMIT`` entries and its first ``LATE_LIMIT`` deferred ones."""

    now_ms: int
    load: InstanceLoad
    entries: tuple[QueueEntry, ...]


class PlanStep(NamedTuple):
    """One step of a plan: a held request is dispatched, or deferred."""

    request_id: str
    deferred_to_ms: int | None = None
    """The new place of the request in the queue; None: it is dispatched."""


@value
class QueuePlan:
    """The steps to commit, in their order."""

    instance_id: str
    version: int
    steps: tuple[PlanStep, ...]
    passed_over_tokens: int = 0
    """Tokens of the requests that stay held: a new request overtakes them as long as nothing else changes."""


@value
class QueueOrder:
    """The pool's order, as its settings have it."""

    by_deadline: bool
    max_deferred_s: float
    """Infinite: nothing is refused for being late."""
    fifo_rank_ms: int = 0
    """First come, first served: added to the time of first reservation. The pool's SLO: should the order change while
    requests are held, their ranks are deadlines."""
    classes: tuple[PriorityClassSettings, ...] = ()
    """Priority classes, the highest first; none where requests go in the order in which they came."""
    fills_from: int = MANY_BANDS
    """The lowest band of classes that fill idle room."""

    @classmethod
    def of(cls, settings: SchedulingSettings, order: Order) -> QueueOrder:
        """The settings' queue order is not read: with ``auto`` the policy has it, see ``queue_order_of``."""
        pool_slo_ms = round(settings.slo_ttft_s * 1000)
        max_deferred_s = inf if settings.max_deferred_s is None else settings.max_deferred_s
        if order != "deadline":
            return cls(False, max_deferred_s, pool_slo_ms)
        first = next((rank for rank, each in enumerate(settings.classes) if each.fills_idle), None)
        fills_from = MANY_BANDS if first is None else class_band(first)
        return cls(True, max_deferred_s, pool_slo_ms, settings.classes, fills_from)

    def fills(self, waiting: StoredRequest | QueueEntry) -> bool:
        """Whether it only fills idle room: it is deferred from the start, and never late."""
        return waiting.band >= self.fills_from

    def rank_ms(self, slo_ms: int) -> int:
        """A request's place in its queue, counted from its first reservation."""
        return slo_ms if self.by_deadline else self.fifo_rank_ms

    def gives_up(self, request: StoredRequest, waited_s: float) -> bool:
        """Whether a held request that has waited so long since its first reservation was deferred for too long."""
        is_late = request.deferred and not self.fills(request)
        return is_late and waited_s >= request.slo_ms / 1000 + self.max_deferred_s

    def rank_of(self, request: StoredRequest) -> int:
        """The place at which a held request is listed."""
        rank_ms = request.enqueued_ms + self.rank_ms(request.slo_ms) + request.band * BAND_MS
        return rank_ms + DEFERRED_RANK_MS if request.deferred else rank_ms


def plan_queue(queue: QueueHead, order: QueueOrder) -> QueuePlan:
    """The requests that may be dispatched now, in order, and those that are deferred."""
    room = _Room(queue.load)
    steps, passed_over_tokens = _plan_deadlines(queue, order, room) if order.by_deadline else _plan_fifo(queue, room)
    return QueuePlan(queue.load.instance_id, queue.load.version, tuple(steps), passed_over_tokens)


class _Room:
    """The room that an instance has left while a plan fills it, and what runs there by then (``Running``)."""

    def __init__(self, load: InstanceLoad) -> None:
        self._load = load
        self._serves = load.state in SERVING
        self.running_requests = load.running_requests
        self.context_tokens = load.context_tokens
        self.dispatched_tokens = load.dispatched_tokens
        self._late_tokens = 0
        """Dispatched tokens that the plan gave to late requests."""

    def __bool__(self) -> bool:
        return self.has(1)

    def has(self, windows: int) -> bool:
        """Whether fewer tokens are dispatched than ``windows`` dispatch windows hold."""
        load = self._load
        return (
            self._serves
            and self.dispatched_tokens < windows * load.dispatch_window_tokens
            and self.running_requests < load.max_running_requests
        )

    def spares(self, late: QueueEntry, *, fills: bool = False) -> bool:
        """Whether a late request would take nothing, or next to nothing, from requests on time: the engine has no other
        prefill than that of late ones which share a step with it."""
        if not self or self.dispatched_tokens > self._late_tokens:
            return False
        window_tokens, together_tokens = self._load.dispatch_window_tokens, self._late_tokens + late.uncached_tokens
        if self._late_tokens and (self._late_tokens >= window_tokens // 2 or together_tokens > window_tokens):
            return False
        if fills:
            capacity = FILL_MEMORY * self._load.kv_capacity_tokens
            return self.context_tokens + late.uncached_tokens <= capacity or self.running_requests == 0
        takes_little = late.uncached_tokens <= window_tokens
        return takes_little or kv_demand(self.context_tokens, self._load.kv_capacity_tokens) < 1.0

    def fits(self, entry: QueueEntry) -> bool:
        """Whether KV memory does not keep it from being dispatched."""
        return finds_memory(entry.uncached_tokens, self, self._load.kv_capacity_tokens)

    def take(self, entry: QueueEntry) -> PlanStep:
        self.dispatched_tokens += entry.uncached_tokens
        self.context_tokens += entry.uncached_tokens
        self.running_requests += 1
        self._late_tokens += entry.uncached_tokens if entry.deferred else 0
        return PlanStep(entry.request_id)


def _plan_fifo(queue: QueueHead, room: _Room) -> tuple[list[PlanStep], int]:
    steps = []
    for entry in queue.entries:
        if not room:
            break
        steps.append(room.take(entry))
    return steps, 0


def _plan_deadlines(queue: QueueHead, order: QueueOrder, room: _Room) -> tuple[list[PlanStep], int]:
    load, now_ms = queue.load, queue.now_ms
    rate, on_time_tokens = load.prefill_tokens_per_s, load.pending_tokens - load.deferred_tokens
    deferred_tokens = load.deferred_tokens
    steps: list[PlanStep] = []
    waiting: list[QueueEntry] = []
    deferred: list[QueueEntry] = []
    for entry in queue.entries:
        if entry.deferred:
            continue
        step_tokens = step_rest_tokens(load.dispatch_window_tokens, on_time_tokens - entry.uncached_tokens)
        if not order.fills(entry) and not misses_deadline(entry, now_ms, step_tokens, rate):
            waiting.append(entry)
            continue
        steps.append(PlanStep(entry.request_id, entry.place + DEFERRED_RANK_MS))
        deferred.append(entry)
        deferred_tokens += entry.uncached_tokens
    if waiting and waiting[-1].band:
        waiting.sort(key=_rank_ms)
    late = [entry for entry in queue.entries if entry.deferred]
    on_time, highest_late = queue.entries[: len(queue.entries) - len(late)], _highest([*late, *deferred])
    # Each class is planned as if lower ones did not wait. A request that this plan defers is late in the next one,
    # which follows at once.
    behind_late = [entry for entry in waiting if rank_of_band(entry.band) > highest_late]
    waiting = [entry for entry in waiting if rank_of_band(entry.band) <= highest_late] if behind_late else waiting
    step_tokens = step_rest_tokens(load.dispatch_window_tokens, on_time_tokens)
    plan = plan_by_class(waiting, now_ms, room.dispatched_tokens + step_tokens, rate)
    while waiting and room:
        first = waiting[plan.first]
        before = [entry for entry in late if keeps_back(entry.band, first.band)]
        fitting = next(filter(room.fits, before), None)
        if fitting is not None:
            late.remove(fitting)
            steps.append(room.take(fitting))
        elif before:
            waiting = [entry for entry in waiting if not keeps_back(before[0].band, entry.band)]
        elif room.fits(first):
            waiting.remove(first)
            steps.append(room.take(first))
        else:
            break
        plan = plan_by_class(waiting, now_ms, room.dispatched_tokens + step_tokens, rate)
    if deferred_tokens == 0 or order.fills_from < MANY_BANDS:
        while waiting and room.has(CALM_WINDOWS):
            first = min(waiting, key=lambda entry: rank_of_band(entry.band))
            is_kept_back = not room.fits(first) or any(keeps_back(entry.band, first.band) for entry in late)
            if is_kept_back or not is_calm(on_time_tokens, rate, now_ms, waiting[0].rank_ms):
                break
            waiting.remove(first)
            steps.append(room.take(first))
    unseen = on_time[-1:] if len(on_time) >= PLAN_LIMIT else ()
    highest_on_time = _highest([*waiting, *behind_late, *unseen])
    late = [entry for entry in late if rank_of_band(entry.band) < highest_on_time]
    steps += _plan_late(late, order, room, deferred)
    return steps, plan.passed_over_tokens


def _highest(entries: Sequence[QueueEntry]) -> int:
    """The place of the highest class among these; below all of them where there are none."""
    return min((rank_of_band(entry.band) for entry in entries), default=MANY_BANDS)


def _plan_late(
    late: Sequence[QueueEntry], order: QueueOrder, room: _Room, deferred: Sequence[QueueEntry]
) -> list[PlanStep]:
    """The deferred requests that go. ``deferred``: those that this plan defers, which stay."""
    steps, staying = list[PlanStep](), {entry.band for entry in deferred}
    for entry in late:
        if any(is_above(band, entry.band) or keeps_back(band, entry.band) for band in staying):
            continue
        if room.fits(entry) and room.spares(entry, fills=order.fills(entry)):
            steps.append(room.take(entry))
        else:
            staying.add(entry.band)
    return steps


def is_calm(tokens: int, tokens_per_s: float, now_ms: int, deadline_ms: int) -> bool:
    """Whether no deadline is at stake: all work of an instance, with nothing deferred, is done before the next one."""
    return now_ms + tokens * 1000 / tokens_per_s <= deadline_ms


def finds_memory(tokens: int, running: Running, kv_capacity_tokens: int) -> bool:
    """Whether a request with ``tokens`` to prefill may join what runs on an instance: it is not long, or fits."""
    if running.running_requests == 0 or tokens <= LONG_SHARE * kv_capacity_tokens:
        return True
    return running.context_tokens + tokens <= kv_capacity_tokens


def step_rest_tokens(dispatch_window_tokens: int, other_tokens: int) -> int:
    """The average rest of the engine step that is under way when a request arrives, in tokens of prefill: half a step,
    and a dispatch window holds two steps. A step is no fuller than the other on-time work."""
    return min(dispatch_window_tokens // 4, other_tokens)


def misses_deadline(entry: QueueEntry, now_ms: int, step_tokens: int, tokens_per_s: float) -> bool:
    """Whether the deadline passes before the first token even if the request is next, after the rest of a step."""
    return now_ms + (step_tokens + entry.uncached_tokens) * 1000 / tokens_per_s > entry.rank_ms


class OnTimePlan(NamedTuple):
    """The result of Moore-Hodgson for a queue."""

    first: int
    """Position of the entry to dispatch next; 0 in an empty queue."""
    passed_over_tokens: int
    passed_over: frozenset[str] = frozenset()
    """Ids of the requests that are passed over."""


_rank_ms = attrgetter("rank_ms")


def in_class_order(listed: Iterable[StoredRequest]) -> tuple[StoredRequest, ...]:
    """Requests of a queue in the order in which they are granted, of those in the order in which it lists them: on time
    before late ones within each class alone."""
    return tuple(sorted(listed, key=lambda request: rank_of_band(request.band)))


def plan_by_class(
    queue: Sequence[QueueEntry],
    now_ms: int,
    ahead_tokens: int,
    tokens_per_s: float,
    late: Sequence[QueueEntry] = (),
) -> OnTimePlan:
    """The plan for a queue by deadline, of which each class is planned behind all of higher classes, those that are
    ``late`` already among them. Next is the first one of the highest class."""
    ranks = sorted({rank_of_band(entry.band) for entry in queue})
    if not late and len(ranks) < 2:
        return plan_on_time(queue, now_ms, ahead_tokens, tokens_per_s)
    plans: list[tuple[list[int], OnTimePlan]] = []
    for rank in ranks:
        places = [place for place, entry in enumerate(queue) if rank_of_band(entry.band) == rank]
        own = [queue[place] for place in places]
        late_tokens = sum(entry.uncached_tokens for entry in late if rank_of_band(entry.band) < rank)
        plans.append((places, plan_on_time(own, now_ms, ahead_tokens + late_tokens, tokens_per_s)))
        ahead_tokens += sum(entry.uncached_tokens for entry in own)
    if not plans:
        return OnTimePlan(0, 0)
    places, highest = plans[0]
    passed_over_tokens = sum(plan.passed_over_tokens for _, plan in plans)
    return OnTimePlan(
        places[highest.first], passed_over_tokens, frozenset().union(*(plan.passed_over for _, plan in plans))
    )


def plan_on_time(queue: Sequence[QueueEntry], now_ms: int, ahead_tokens: int, tokens_per_s: float) -> OnTimePlan:
    """The plan for requests of one class by deadline, behind the tokens ahead of them all.

    What is passed over is of the highest band, and the longest in that; where it is shorter than what makes the queue
    late, more are. Next is the first of those that it keeps on time. If it keeps none, of the lowest band the one with
    the fewest tokens, which is the most likely to meet its deadline. O(n log n).
    """
    if not queue:
        return OnTimePlan(0, 0)
    end_ms = now_ms + ahead_tokens * 1000 / tokens_per_s
    kept: list[tuple[int, int, int]] = []
    passed_over: set[int] = set()
    passed_over_tokens = 0
    for position, entry in enumerate(queue):
        heappush(kept, (-entry.band, -entry.uncached_tokens, -position))
        end_ms += entry.uncached_tokens * 1000 / tokens_per_s
        while end_ms > entry.rank_ms:
            _, longest_tokens, longest = heappop(kept)
            end_ms += longest_tokens * 1000 / tokens_per_s
            passed_over.add(-longest)
            passed_over_tokens -= longest_tokens
            if -longest_tokens >= entry.uncached_tokens:
                break  # all before it were on time
    if kept:
        on_time = [position for position in range(len(queue)) if position not in passed_over]
        first = min(on_time, key=lambda position: queue[position].band)
    else:
        first = min(range(len(queue)), key=lambda position: (queue[position].band, queue[position].uncached_tokens))
    return OnTimePlan(first, passed_over_tokens, frozenset(queue[position].request_id for position in passed_over))
