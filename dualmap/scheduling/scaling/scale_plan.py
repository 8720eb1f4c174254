"""The scale plan: from what the fleet knows of its load to a wanted number of instances, with the reason in words.

The load is counted in *instances' worth of work*: prefill work that arrives in a second, in seconds of prefill at the
learned rates. Rates are learned under load, so they contain what decoding takes. The work of N requests is noisy by √N;
a fleet that carries R instances' worth is therefore sized R + margin · √R (square-root staffing: Halfin and Whitt,
Operations Research 29, 1981). The room of running requests is a second demand, in instances' worth.

Up by one of four tests. *Crowd*, fast: a sum of requests times their usual work that arrived beyond a reference, never
below 0 (CUSUM: Page, Biometrika 41, 1954). It shows within seconds that more come; the work since it began tells the
new size. It is also more requests than chance brings at a constant rate, however long each is. *Overload*: more work
than the instances compute, much of it late for minutes, which shows a slow rise and longer prompts as well. The work of
a constant rate drifts up for minutes and back, and a fleet in deadline order serves most of such a drift on time;
minutes show no size either, so an overload takes one instance, and more only for what is late. What was late before
that one is ready is no reason for the next. *Level*: the work of the first ten minutes of a size is more than it is to
carry. Without this test a size at its limit stays until a drift of the work makes enough of it late, which can take
hours. *Room*: running requests fill the KV memory, or are nearly as many as the instances run at a time.

Down, slowly, one instance at a time: only when the highest rate of requests of the last minutes, times what a request
usually is, fits one instance less. The rate shows at once that fewer come; the work of a request is a mean of a quarter
of an hour, as prompts differ so much that minutes of a constant load look like a lower one. The work of the same
requests grows on fewer instances, whose caches are evicted and whose batches grow: it is taken to grow as the fleet
shrinks. So a constant load is not tried on a size that is too small for it. What a crowd was given is given back
sooner: once the load is far below the crowd's, down to the size before it, without that growth.

What is seen is of the whole fleet. One hot prefix that overloads one instance is no reason to scale: rebalancing and
longer keys spread it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from math import ceil, exp, sqrt

from dualmap.scheduling.scaling.cusum import Cusum
from dualmap.scheduling.scaling.scale_settings import MARGIN
from dualmap.scheduling.values import value

DOWN_MARGIN = 0.25
"""Instances beyond the pool's margin, per square root of the load, for one less: it keeps a load between two sizes from
flapping."""
SPARE = 0.15
"""Instances beyond that: arrivals in bursts are harder on small fleets than random ones."""
ROOM_TARGET = 0.85
"""Share of an instance's room that may be used: above it decoding slows, contexts stay longer, and demand grows by
itself."""
OVERLOAD_S = 5.0
"""Late work of each instance, in the mean of ``SLACK_S``, that is an overload: as much as the usual TTFT SLO."""
CROWD_EXCESS_S = 2.5
"""Work of a crowd beyond what is usual, for each instance and one more: the queue digests less."""
CROWD_REQUESTS = 22
"""Requests of a crowd beyond what is usual: random arrivals at a constant rate seldom are as many."""
CROWD_GROWTH = 1.25
"""A crowd is more than this multiple of the usual load, and more than ``CROWD_LOAD`` for each instance."""
CROWD_LOAD = 0.85
BASE_S = 15.0
"""The latest looks that are no part of the usual load."""
LEVEL_S = 240.0
"""Window of the mean load that is reported."""
PEAK_S = 60.0
"""Means over so long are what the highest load is taken from."""
ROOM_SLACK = 0.35
"""Largest share of its room that each remaining instance may use for one to leave."""
SPAN_S = 5.0
"""Looks are added up in spans of this length."""
SLACK_S = 180.0
"""Time for which the highest load must fit one instance less, and for which late work counts."""
DOWN_GAP_S = 30.0
"""Time between two steps down."""
CALM_S = 75.0
"""Time for which the load must be far below a crowd's before the crowd is over."""
CROWD_GAP_S = 10.0
"""Time between two steps down after a crowd."""
CROWD_OVER, CROWD_LASTED = 0.75, 0.8
"""Shares of a crowd's load: below the one it is over, if the mean of a minute was above the other."""
WARM_S = 120.0
"""Time of the first looks, which show no level: caches are cold and rates are not learned yet, so requests seem larger.
"""
SETTLED_S = 600.0
"""A size has served for so long: the mean of its work differs from the load by a few percent."""
USUAL_S = 900.0
"""Memory of what a request's work usually is: prompts differ far more than rates of requests do."""
LATE_S = 60.0
"""Late work is to be gone after so long."""
GROWTH = 1.5
"""Largest step up but for a crowd, as a multiple of the size."""
LONGEST_GAP_S = 15.0
"""Longest time without a look at the fleet. After a longer one, what was seen before says nothing about now."""


@value
class FleetFigures:
    """The fleet at one moment, and the work that arrived since the last look."""

    at_s: float
    ready: int
    starting: int = 0
    """Instances that an earlier decision is making ready."""
    elapsed_s: float = 1.0
    """Time since the last look."""
    work_s: float = 0.0
    """Seconds of prefill that arrived since."""
    _: KW_ONLY
    late_s: float = 0.0
    """Held work that cannot be on time, over all instances."""
    late_instances: int = 0
    """Instances that hold such work."""
    kv_demand: float = 0.0
    """Context tokens of running requests, in instances' worth of KV memory."""
    sequences: float = 0.0
    """Running requests, as multiples of the most that one instance runs at a time."""
    answer_pace: float = 0.0
    """Mean time per output token of recent answers, in its SLO; 0 where none was seen."""

    arrived_requests: int = 0
    """Requests that arrived since the last look."""
    held_requests: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    """Requests that wait for the first instance."""
    is_used: bool = False
    """Replicas serve requests, or have served some since the last look, be they scheduled or passed on."""

    @property
    def size(self) -> int:
        return self.ready + self.starting

    @property
    def shows_use(self) -> bool:
        """Whether requests are there, or an instance starts for one."""
        return bool(
            self.is_used or self.starting or self.arrived_requests or self.waiting_requests or self.running_requests
        )

    @property
    def room(self) -> float:
        """Instances' worth of room that running requests take."""
        return max(self.kv_demand, self.sequences)


@value
class Plan:
    """The wanted size of the fleet, and why."""

    wanted: int
    reason: str
    load: float = 0.0
    """Instances' worth of work that it is based on."""


def staffing(load: float, margin: float) -> int:
    """Instances that carry a load with its noise."""
    return max(1, ceil(SPARE + load + margin * sqrt(load) - 1e-9)) if load > 0 else 1


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """Bounds of one pool, and its margin."""

    min_instances: int
    max_instances: int
    margin: float = MARGIN
    """Instances beyond the load, per square root of it."""
    idle_s: float = 300.0
    """Time without a request after which a pool that may have no instance has none."""

    def bounded(self, instances: int) -> int:
        return max(self.min_instances, min(self.max_instances, instances))


def plan_by_use(now: FleetFigures, idle_s: float, rule: ScaleRule) -> Plan | None:
    """The plan where there may be no instance: none without requests, one for the first of them. None where that
    decides nothing. A request that arrives while there is none is served by instances of the other role."""
    if rule.min_instances > 0:
        return None
    if now.size == 0 and now.waiting_requests:
        return Plan(1, f"requests wait for the first instance: {now.waiting_requests}")
    if now.size == 0 and now.arrived_requests:
        return Plan(1, f"requests are served by the other role: {now.arrived_requests}")
    if now.size == 0:
        return Plan(0, "no requests")
    if idle_s >= rule.idle_s:
        return Plan(0, f"no request for {idle_s:.0f} s")
    return None


@dataclass(slots=True)
class Span:
    """Some seconds of looks, added up."""

    begin_s: float
    _: KW_ONLY
    at_s: float = 0.0
    """Time of the last look."""
    looks: int = 0
    elapsed_s: float = 0.0
    work_s: float = 0.0
    requests: int = 0
    room: float = 0.0
    """Sum over the looks, as is ``late_s``."""
    late_s: float = 0.0
    least_ready: int = 1 << 30

    def add(self, now: FleetFigures) -> None:
        self.at_s, self.looks = now.at_s, self.looks + 1
        self.elapsed_s, self.work_s = self.elapsed_s + now.elapsed_s, self.work_s + now.work_s
        self.requests += now.arrived_requests
        self.room += now.room
        self.late_s += now.late_s
        self.least_ready = min(self.least_ready, now.ready)


@value
class Crowd:
    """The fleet's size before a crowd, and the crowd's load."""

    size: int
    """Instances before the crowd came."""
    load: float


@dataclass(slots=True)
class UsualRequest:
    """The work of one request, over about ``USUAL_S``."""

    _work_s: float = 0.0
    _requests: float = 0.0

    def add(self, now: FleetFigures) -> None:
        kept = exp(-now.elapsed_s / USUAL_S)
        self._work_s = kept * self._work_s + now.work_s
        self._requests = kept * self._requests + now.arrived_requests

    @property
    def work_s(self) -> float:
        """Seconds of prefill; 0 before the first request."""
        return self._work_s / self._requests if self._requests else 0.0


@dataclass(slots=True)
class ScalePlanner:
    """The memory of one leader. A new one begins without: it scales up within seconds, and down after minutes."""

    rule: ScaleRule
    _: KW_ONLY
    _now: FleetFigures = field(default_factory=lambda: FleetFigures(float("-inf"), 0))
    _level_from_s: float = 0.0
    """Time from which looks show the level: before it caches were cold, or a crowd was there."""
    _spans: deque[Span] = field(default_factory=deque)
    """Looks of the last minutes."""
    _same: Span = field(default_factory=lambda: Span(0.0))
    """Looks since as many instances are ready as now."""
    _crowd: Cusum = field(default_factory=Cusum)
    _request: UsualRequest = field(default_factory=UsualRequest)
    _last_down_s: float = float("-inf")
    _used_s: float = float("-inf")
    """When the pool was last seen to serve a request, or to start an instance for one."""
    _crowd_served: Crowd | None = None
    """The last one, until what it was given is given back."""

    def observe(self, now: FleetFigures) -> None:
        """Take in one look at the fleet; looks come about once a second."""
        if now.at_s - self._now.at_s > LONGEST_GAP_S:
            self._level_from_s = now.at_s + WARM_S
            self._used_s = now.at_s
            self._spans.clear()
            self._crowd = Cusum()
        if now.ready != self._now.ready or now.at_s < self._level_from_s:
            self._same = Span(now.at_s)
        self._same.add(now)
        self._now = now
        if now.shows_use:
            self._used_s = now.at_s
        if not self._spans or now.at_s - self._spans[-1].begin_s >= SPAN_S:
            self._spans.append(Span(now.at_s))
        self._spans[-1].add(now)
        while now.at_s - self._spans[0].begin_s > SLACK_S + PEAK_S:
            self._spans.popleft()
        self._request.add(now)
        usual_per_s = self._usual_rate(now.at_s)
        request_s = self._request.work_s if usual_per_s else 0.0
        crowd_from = max(CROWD_GROWTH * usual_per_s * request_s, CROWD_LOAD * now.size)
        self._crowd.add(now.at_s, now.elapsed_s, request_s * now.arrived_requests, crowd_from)

    def _usual_rate(self, at_s: float) -> float:
        """Requests a second in the last minutes, without the latest looks; 0 while too little is known."""
        usual = [each for each in self._spans if at_s - each.at_s > BASE_S]
        elapsed_s = sum(each.elapsed_s for each in usual)
        return sum(each.requests for each in usual) / elapsed_s if elapsed_s >= BASE_S else 0.0

    def plan(self) -> Plan:
        """The wanted number as of the last look."""
        now = self._now
        if now.size < self.rule.min_instances:
            return Plan(self.rule.min_instances, f"{now.size} of at least {self.rule.min_instances} instances")
        if (plan := plan_by_use(now, now.at_s - self._used_s, self.rule)) is not None:
            return plan
        if self._crowd_served is not None and now.size <= self._crowd_served.size:
            self._crowd_served = None
        crowd, *others = self._plans_up(now)
        more = max((crowd, *others), key=lambda plan: plan.wanted)
        if more.wanted > now.size:
            return self._up(now, more, crowd=more is crowd)
        if now.size > self.rule.max_instances:
            return Plan(self.rule.max_instances, f"{now.size} of at most {self.rule.max_instances} instances")
        return self._down(now)

    # up ----------------------------------------------------------------------------------------------------------
    def _up(self, now: FleetFigures, more: Plan, *, crowd: bool) -> Plan:
        wanted = self.rule.bounded(more.wanted)
        if wanted <= now.size:
            return Plan(now.size, f"{more.reason}; at the maximum", more.load)
        load = max(more.load, self.mean_load(LEVEL_S))
        if self._crowd_served is not None:
            self._crowd_served = Crowd(self._crowd_served.size, load)  # it grows still
        elif crowd:
            self._crowd_served = Crowd(now.size, load)
        return Plan(wanted, more.reason, more.load)

    def _plans_up(self, now: FleetFigures) -> tuple[Plan, ...]:
        if sum(each.elapsed_s for each in self._since(PEAK_S)) < PEAK_S / 2:
            return (self._by_crowd(now),)
        return self._by_crowd(now), self._by_overload(now), self._by_level(now), self._by_room(now)

    def _by_crowd(self, now: FleetFigures) -> Plan:
        crowd = self._crowd
        if crowd.trough_s(now.at_s) < max(CROWD_EXCESS_S * (now.size + 1), CROWD_REQUESTS * self._request.work_s):
            return Plan(0, "")
        reason = f"crowd: work for {crowd.load:.1f} instances arrives since {crowd.elapsed_s:.0f} s, {now.size} serve"
        wanted = staffing(crowd.load + self._late_load(now), self.rule.margin)
        return Plan(wanted, reason + self._late_reason(now), crowd.load)

    def _by_overload(self, now: FleetFigures) -> Plan:
        load = self.mean_load(PEAK_S)
        if now.starting or load < now.ready or self._late_mean_s(now) < OVERLOAD_S * now.ready:
            return Plan(0, "")
        late_s = self._mean_look(PEAK_S, lambda each: each.late_s)
        reason = (
            f"overload: work for {load:.1f} instances in the last minute, {now.ready} serve; {late_s:.0f} s are late"
        )
        return Plan(min(now.size + max(1, int(late_s / LATE_S)), ceil(GROWTH * now.size)), reason, load)

    def _late_mean_s(self, now: FleetFigures) -> float:
        """Late work in the mean of the last minutes; what was before the last newcomer was ready counts as none."""
        same = [each for each in self._since(SLACK_S) if each.least_ready >= now.ready]
        return sum(each.late_s / each.looks * each.elapsed_s for each in same) / SLACK_S

    def _by_level(self, now: FleetFigures) -> Plan:
        """The plan by the level of the load, made once for each size: a condition that is tested every second holds at
        last, by chance."""
        served_s = self._same.elapsed_s
        if now.starting or not SETTLED_S <= served_s < SETTLED_S + LONGEST_GAP_S:
            return Plan(0, "")
        load = self._same.work_s / served_s
        reason = f"level: work for {load:.1f} instances in the last {served_s / 60:.0f} minutes, {now.ready} serve"
        # Spread over more instances the same requests are less work, so one more is enough.
        return Plan(min(now.size + 1, staffing(load, self.rule.margin)), reason, load)

    def _by_room(self, now: FleetFigures) -> Plan:
        room = self._mean_look(PEAK_S, lambda each: each.room)
        wanted = min(ceil(room / ROOM_TARGET), ceil(GROWTH * now.size))
        return Plan(wanted, f"running requests take the room of {room:.1f} instances, {now.size} serve", room)

    def _late_reason(self, now: FleetFigures) -> str:
        return f"; {now.late_s:.0f} s of work is late" if self._late_load(now) else ""

    def _late_load(self, now: FleetFigures) -> float:
        """Instances' worth of work if what is late is to be done soon; late work of a few instances is the
        rebalancer's."""
        return now.late_s / LATE_S if 2 * now.late_instances > now.ready else 0.0

    # down --------------------------------------------------------------------------------------------------------
    def _down(self, now: FleetFigures) -> Plan:
        load = self.mean_load(LEVEL_S)
        stay = Plan(now.size, f"work for {load:.1f} instances", load)
        if now.starting or now.ready <= max(1, self.rule.min_instances) or now.late_s > 0:
            return stay
        if self._crowd_is_over(now):
            self._level_from_s = max(self._level_from_s, now.at_s - CALM_S)
            return self._smaller(now, CALM_S, CROWD_GAP_S, "the crowd is over", 1.0) or stay
        if self._known_s() < SLACK_S or self._grew_since(now, SLACK_S):
            return stay
        # Fewer instances run larger batches, so the same requests are more work to them, and run for longer.
        more = now.ready / (now.ready - 1)
        return self._smaller(now, SLACK_S + PEAK_S, DOWN_GAP_S, "slack", more) or stay

    def _smaller(self, now: FleetFigures, window_s: float, gap_s: float, why: str, more: float) -> Plan | None:
        """One instance less, if ``more`` times the highest load of the window fits it."""
        if now.at_s - self._last_down_s < gap_s:
            return None
        peak = self.peak_load(window_s)
        room = max(each.room / each.looks for each in self._since(window_s))
        if staffing(more * peak, self.rule.margin + DOWN_MARGIN) >= now.ready:
            return None
        if more * room > ROOM_SLACK * (now.ready - 1):
            return None
        self._last_down_s = now.at_s
        reason = f"{why}: at most work for {peak:.1f} instances in the last {window_s:.0f} s, {now.ready} serve"
        return Plan(now.ready - 1, reason, peak)

    def _crowd_is_over(self, now: FleetFigures) -> bool:
        """Whether the load is far below the crowd's that the fleet is still larger for."""
        served = self._crowd_served
        if served is None or self._grew_since(now, CALM_S):
            return False
        lasted = self.peak_load(SLACK_S + PEAK_S) > CROWD_LASTED * served.load
        return lasted and self.peak_load(CALM_S) < CROWD_OVER * served.load

    def _grew_since(self, now: FleetFigures, window_s: float) -> bool:
        """Whether the fleet grew within the window: newcomers first show what they do."""
        return any(each.least_ready < now.ready for each in self._since(window_s))

    # what was seen -----------------------------------------------------------------------------------------------
    def _known_s(self) -> float:
        """How long the level has been seen."""
        return self._now.at_s - max(self._spans[0].begin_s, self._level_from_s)

    def _since(self, window_s: float) -> list[Span]:
        return [each for each in self._spans if self._now.at_s - each.at_s < window_s]

    def _mean_look(self, window_s: float, figure: Callable[[Span], float]) -> float:
        """The mean, over the recent looks, of a figure that spans add up."""
        recent = self._since(window_s)
        return sum(map(figure, recent)) / sum(each.looks for each in recent)

    def mean_load(self, window_s: float) -> float:
        """Instances' worth of work that arrived in the window."""
        recent = self._since(window_s)
        return sum(each.work_s for each in recent) / max(1e-9, sum(each.elapsed_s for each in recent))

    def peak_load(self, window_s: float) -> float:
        """The highest rate of a minute in the window, times the usual work of a request."""
        peak = elapsed_s = 0.0
        requests = 0
        window: deque[Span] = deque()
        for each in self._since(window_s):
            window.append(each)
            requests, elapsed_s = requests + each.requests, elapsed_s + each.elapsed_s
            while each.at_s - window[0].begin_s > PEAK_S + SPAN_S:
                gone = window.popleft()
                requests, elapsed_s = requests - gone.requests, elapsed_s - gone.elapsed_s
            if each.at_s - window[0].begin_s >= PEAK_S - SPAN_S:
                peak = max(peak, requests / max(1e-9, elapsed_s))
        return peak * self._request.work_s
