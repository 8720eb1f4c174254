"""A planner that knows the future: the rate of every minute, and what each size carries."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import replace

from dualmap.research.evaluate.plan import DEFAULT_POLICY, Plan, Workload, scenario_for
from dualmap.research.evaluate.work import Worker
from dualmap.simulation.goodput import GoodputJob, run_goodput
from dualmap.simulation.runs import RunJob
from dualmap.simulation.scenario import FleetChange
from dualmap.simulation.sources import TraceSource

ON_TIME_SHARE = 0.97
STEP_S = 60.0
_REQUESTS, _REQUESTS_EACH = 700, 500
"""Of the searches: some, and more for each instance."""


def clairvoyant_changes(day: Workload, plan: Plan, worker: Worker, most: int) -> tuple[FleetChange, ...]:
    """The least size for each minute; the first is where the day begins."""
    arrivals = [request.arrival_s for request in day.source.load().requests]
    steps = int(plan.day_s / STEP_S)
    cuts = [bisect_left(arrivals, step * STEP_S) for step in range(steps + 1)]
    rates = [(cuts[step + 1] - cuts[step]) / STEP_S for step in range(steps)]
    sizes = range(1, min(most, 2 + int(max(rates) / (day.reference_rate_per_s / 8))) + 1)
    found = worker.map("what each size carries", run_goodput, [_search(day, plan, size) for size in sizes])
    carried = [goodput.rate_per_s for goodput in found]
    changes: list[FleetChange] = []
    for step, rate in enumerate(rates):
        size = next((size for size, most_per_s in zip(sizes, carried, strict=True) if most_per_s >= rate), sizes[-1])
        if not changes or changes[-1].instances != size:
            changes.append(FleetChange(step * STEP_S, size))
    return tuple(changes)


def _search(day: Workload, plan: Plan, size: int) -> GoodputJob:
    """A steady rate of the same requests."""
    requests = min(plan.day_requests, _REQUESTS + _REQUESTS_EACH * size)
    source = TraceSource("flashcrowd:factor=1", requests, day.source.max_input_tokens, seed=plan.seed)
    scenario = replace(scenario_for(DEFAULT_POLICY, day, size), skip_requests=requests // 8)
    start_per_s = day.reference_rate_per_s / 8 * size
    return GoodputJob(RunJob(source, scenario, start_per_s), ON_TIME_SHARE, plan.goodput_tolerance)


def paid_hours(changes: tuple[FleetChange, ...], day_s: float, start_s: float) -> float:
    """Instance hours, the time to start included, which such a planner begins in advance."""
    ends_s = [change.at_s for change in changes[1:]] + [day_s]
    paid_s = sum(change.instances * (end_s - change.at_s) for change, end_s in zip(changes, ends_s, strict=True))
    started = sum(max(0, b.instances - a.instances) for a, b in itertools.pairwise(changes))
    return (paid_s + started * start_s) / 3600
