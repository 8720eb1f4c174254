"""The twin of a fleet: its recorded requests through a simulated fleet, as it is and as it would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log

from dualmap.runtime.collector import collected_seldom
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.figures.results import RequestOutcome, RunRecord
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.what_if.comparison import Difference, Figure, Unit, compare, tpot_p50
from dualmap.simulation.what_if.measured import measured_outcomes
from dualmap.simulation.workload.traces import Trace

FAR_POINTS = 0.02
"""Error of a share above which a twin is off."""
FAR_PART = 0.15
"""Error of a time, as a part of it, above which a twin is off. The slowest hundredth may err by twice that."""
LEAST_ERROR = 0.02
"""Error of the time per token, as a part of it, below which a pace is not changed."""
GOOD_ERROR = 0.04
"""Error of the time per token in the whole recording up to which a pace that a part of it showed is kept."""
LEAST_PACE_OF_PART = 0.1
"""Least difference from 1 of a pace that is believed to a part: its caches and queues begin empty."""
PART_REQUESTS = 1_500
"""Requests of that part; the first third warms its caches."""
MOST_STEPS = 3
"""Paces that are tried on the part."""
USUAL_GROWTH = 2.0
"""Power of the pace with which times per token grow, where it is not known yet: slower engines run more requests at
once, so times per token grow faster than those of steps."""
LOOSE = frozenset({"TTFT P99"})


@dataclass(frozen=True, slots=True)
class TwinRun:
    """What a run leaves, its warm-up left out."""

    outcomes: Sequence[RequestOutcome]
    instance_hours: float


@dataclass(frozen=True, slots=True)
class TwinJob:
    """One run of a twin, complete."""

    trace: Trace
    scenario: Scenario

    def run(self, on_progress: Callable[[int], None] | None = None) -> TwinRun:
        """Run it here and now; ``on_progress`` gets the number of requests that arrived."""
        with collected_seldom():
            record: RunRecord = Simulation(self.trace, self.scenario, on_progress).run()
        return TwinRun(record.outcomes[record.skip_requests :], record.instance_hours)


def check_forecast(
    trace: Trace, run: TwinRun, scheduling: SchedulingSettings, wanted: Sequence[Figure], skip_s: float
) -> tuple[Difference, ...]:
    """What was measured against the twin of the fleet as it is, of all requests after the warm-up; empty where the
    recording has no measurements. Refused requests are not recorded."""
    begins_s = trace.requests[0].arrival_s + skip_s
    measured = [one for one in measured_outcomes(trace, scheduling) if one.arrival_s >= begins_s]
    if not measured:
        return ()
    return compare(measured, run.outcomes, [figure for figure in wanted if figure.name != "refused"], groups=False)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The runs of the recorded fleet as it is, and as it would be."""

    as_is: TwinRun
    changed: TwinRun
    checked: tuple[Difference, ...]
    """The measured figures against those of the fleet as it is, see ``check_forecast``."""
    pace: float
    """How many times as long the recorded engines take for their steps as their model says; those of both runs do."""


def forecast(
    trace: Trace, now: Scenario, then: Scenario, wanted: Sequence[Figure], run: Callable[[list[TwinJob]], list[TwinRun]]
) -> Forecast:
    """Run the twin as it is and as it would be, both at the pace of the recorded engines where their model is off.

    A part of the recording shows a pace at little cost. It is kept if the whole is as it was measured, at that pace.
    Otherwise the twin is run as its model says, and if it is off like that, its error gives the pace.
    """
    part = middle_part(trace)
    part_skip_s = part.requests[len(part.requests) // 3].arrival_s
    measured_s = _measured_tpot_s(trace, now.scheduling, now.skip_s)

    @cache
    def of_part(pace: float) -> TwinRun:
        (found,) = run([TwinJob(part, replace(now.slowed(pace), skip_s=part_skip_s))])
        return found

    def of_whole(pace: float, *scenarios: Scenario) -> list[TwinRun]:
        return run([TwinJob(trace, scenario.slowed(pace)) for scenario in scenarios])

    def tpot_s(pace: float) -> float | None:
        return tpot_p50(of_part(pace).outcomes)

    def shown_by_part() -> float:
        part_s = _measured_tpot_s(part, now.scheduling, part_skip_s)
        if part_s is None:
            return 1.0
        checked = check_forecast(part, of_part(1.0), now.scheduling, wanted, part_skip_s)
        found = pace_for(part_s, tpot_s, 1.0) if any(map(is_off, checked)) else 1.0
        return found if abs(found - 1.0) >= LEAST_PACE_OF_PART else 1.0

    def check(as_is: TwinRun) -> tuple[tuple[Difference, ...], float]:
        checked = check_forecast(trace, as_is, now.scheduling, wanted, now.skip_s)
        return checked, _ratio(measured_s, tpot_p50(as_is.outcomes))

    shown = shown_by_part()
    before: TwinRun | None = None
    if shown != 1.0:
        (before,) = of_whole(shown, now)
        checked, error = check(before)
        if abs(error - 1) < GOOD_ERROR and not any(map(is_off, checked)):
            (changed,) = of_whole(shown, then)
            return Forecast(before, changed, checked, shown)
    as_is, *others = of_whole(1.0, now, then) if before is None else of_whole(1.0, now)
    checked, error = check(as_is)
    if not any(map(is_off, checked)) or abs(error - 1) < LEAST_ERROR:
        (changed,) = others or of_whole(1.0, then)
        return Forecast(as_is, changed, checked, 1.0)
    if before is None:
        pace = pace_for(error * (tpot_s(1.0) or 0.0), tpot_s, 1.0)
    else:
        pace = error ** (1 / _growth(tpot_p50(before.outcomes), tpot_p50(as_is.outcomes), shown))
    as_is, changed = of_whole(pace, now, then)
    return Forecast(as_is, changed, check(as_is)[0], pace)


def middle_part(trace: Trace) -> Trace:
    """``PART_REQUESTS`` requests from the middle of the trace; all, of one that has no more."""
    return trace.window(max(0, len(trace.requests) - PART_REQUESTS) // 2, PART_REQUESTS)


def pace_for(target_s: float, tpot_s: Callable[[float], float | None], pace: float) -> float:
    """The pace at which the median time per output token is ``target_s``, from ``pace`` on by secant steps in
    logarithms; ``pace`` itself where the time is as good as that. ``tpot_s`` runs a twin at a pace."""
    growth = USUAL_GROWTH
    before_s = tpot_s(pace)
    for _ in range(MOST_STEPS):
        error = _ratio(target_s, before_s)
        if abs(error - 1) < LEAST_ERROR:
            break
        step = error ** (1 / growth)
        after_s = tpot_s(pace * step)
        growth = _growth(after_s, before_s, step)
        pace, before_s = pace * step, after_s
    return pace


def _growth(after_s: float | None, before_s: float | None, step: float) -> float:
    """The power of the pace with which times per token grow, by those before and after a step of it."""
    return max(1.0, log(_ratio(after_s, before_s)) / log(step))


def _ratio(one: float | None, other: float | None) -> float:
    """One time through another; 1 where either is not known."""
    return one / other if one and other else 1.0


def _measured_tpot_s(trace: Trace, scheduling: SchedulingSettings, skip_s: float) -> float | None:
    begins_s = trace.requests[0].arrival_s + skip_s
    return tpot_p50([one for one in measured_outcomes(trace, scheduling) if one.arrival_s >= begins_s])


def is_off(difference: Difference) -> bool:
    """Whether the forecast (``then``) errs by more than one would decide on."""
    error = abs(difference.then - difference.now)
    loose = 2.0 if difference.figure.name in LOOSE else 1.0
    if difference.figure.unit is Unit.SHARE:
        return error > loose * FAR_POINTS
    return not error <= loose * FAR_PART * difference.now
