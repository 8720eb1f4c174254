"""A planner that knows the future: the rate of every minute, and what each size carries."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.run import Search
from dualmap.research.studies.plan import DEFAULT_POLICY, PAPER_INSTANCES, Plan, variant_of
from dualmap.research.targets import Target
from dualmap.research.workload import Traffic, Workload
from dualmap.simulation.virtual_time.scenario import FleetChange

TARGET = Target("97", "on_time", 0.97, "97 % on time")
STEP_S = 60.0
_REQUESTS, _REQUESTS_EACH = 700, 500
"""Requests of the searches: some, and more for each instance."""


def clairvoyant_changes(day: Workload, plan: Plan, bench: Bench, most: int) -> tuple[FleetChange, ...]:
    """The least size for each minute; the first is where the day begins."""
    arrivals = [request.arrival_s for request in plan.trace(day).requests]
    per_instance = plan.rate(plan.like_generated(), 1) / PAPER_INSTANCES
    steps = int(plan.day_s / STEP_S)
    cuts = [bisect_left(arrivals, step * STEP_S) for step in range(steps + 1)]
    rates = [(cuts[step + 1] - cuts[step]) / STEP_S for step in range(steps)]
    sizes = range(1, min(most, 2 + int(max(rates) / (per_instance))) + 1)
    searches = [_search(day, plan, size, per_instance * size) for size in sizes]
    carried = [goodput for (goodput,) in bench.goodputs("what each size carries", searches)]
    changes: list[FleetChange] = []
    for step, rate in enumerate(rates):
        size = next((size for size, most_per_s in zip(sizes, carried, strict=True) if most_per_s >= rate), sizes[-1])
        if not changes or changes[-1].instances != size:
            changes.append(FleetChange(step * STEP_S, size))
    return tuple(changes)


def _search(day: Workload, plan: Plan, size: int, start_per_s: float) -> Search:
    requests = min(plan.day_requests, _REQUESTS + _REQUESTS_EACH * size)
    found = plan.search(steady(day, size, requests), variant_of(DEFAULT_POLICY), start_per_s)
    return replace(found, targets=(TARGET,))


def steady(day: Workload, instances: int, requests: int) -> Workload:
    """A steady rate of the day's requests."""
    traffic = Traffic("flashcrowd:factor=1", "flashcrowd:factor=1", capped=True)
    return replace(day, traffic=traffic, instances=instances, requests=requests, warm_up_requests=requests // 8)


def paid_hours(changes: tuple[FleetChange, ...], day_s: float, start_s: float) -> float:
    """Instance hours, the time to start included, which such a planner begins in advance."""
    ends_s = [change.at_s for change in changes[1:]] + [day_s]
    paid_s = sum(change.instances * (end_s - change.at_s) for change, end_s in zip(changes, ends_s, strict=True))
    started = sum(max(0, b.instances - a.instances) for a, b in itertools.pairwise(changes))
    return (paid_s + started * start_s) / 3600
