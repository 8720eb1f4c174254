"""How accurate can an expected TTFT be? Much of what decides it is unknown when a request is placed.

    python benchmarks/estimate_bound.py [--traces FOLDER] [--samples 150] CASE …      (a case: conversation:7b:5.4)

Runs a workload of the laboratory's suite at a rate (requests/s) with the default policy. Then, for a sample of its
requests, runs the same trace again up to that request and no further: in virtual time everything before is the same
to the last digit, so the TTFT of that run is what perfect knowledge of the engines, their queues and their caches would
predict, without knowledge of the future. Its error against the whole run's TTFT is printed beside the error of the
estimate that decides.

An engine also takes requests in only between two of its steps, a tenth to half a second each, and reports to no router
where in a step it is. Whenever in the same step the request comes, it gets its first token at the same time; so the
moments for which that holds are searched, and the TTFT from the middle of them is what would be predicted without
knowing the future or how far the step is. A sample costs fifteen runs, each of the trace up to its request.
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import NamedTuple

from dualmap.research.suites.suite import OURS
from dualmap.research.variant import parse_variant
from dualmap.research.workload import PRESET_SHORTHANDS, Workload, traffic_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.figures.results import Percentiles, RequestOutcome
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.traces import Trace

VARIANT = parse_variant(OURS, SchedulingSettings())
LONGEST_STEP_S = 1.0
HALVINGS = 7
"""Halvings of the longest step, to find where one ends: 8 ms."""


@dataclass(frozen=True, slots=True)
class Case:
    workload: Workload
    rate_per_s: float

    @classmethod
    def parse(cls, text: str, folder: Path | None, instances: int, requests: int) -> Case:
        name, preset, rate_per_s = text.rsplit(":", 2)
        workload = Workload(traffic_of(name, folder), PRESET_SHORTHANDS[preset], instances, requests)
        return cls(workload, float(rate_per_s))


class Sample(NamedTuple):
    """One request's TTFT in seconds."""

    actual_s: float
    expected_s: float
    """TTFT that the policy expected when it chose."""
    without_future_s: float
    """Had nothing come after it."""
    from_mid_step_s: float
    """TTFT of the request, had it come in the middle of the step under way."""


@lru_cache(maxsize=1)
def whole_run(case: Case) -> tuple[Trace, Sequence[RequestOutcome]]:
    trace = case.workload.source(1).load(case.rate_per_s)
    return trace, outcomes_of(trace, case)


def outcomes_of(trace: Trace, case: Case) -> Sequence[RequestOutcome]:
    return Simulation(trace, VARIANT.scenario(case.workload)).run().outcomes


def sample(case: Case, index: int) -> Sample | None:
    """None if the request was not answered."""
    trace, outcomes = whole_run(case)
    whole = outcomes[index]
    if whole.first_token_s is None:
        return None
    alone_s = ttft_alone_s(trace, index, 0.0, case)

    def waits_for_the_same_step(shift_s: float) -> bool:
        return isclose(shift_s + ttft_alone_s(trace, index, shift_s, case), alone_s, abs_tol=1e-6)

    earlier_s = reach_s(lambda shift_s: waits_for_the_same_step(-shift_s))
    later_s = reach_s(waits_for_the_same_step)
    return Sample(whole.ttft_s, whole.expected_ttft_s, alone_s, alone_s + (earlier_s - later_s) / 2)


def reach_s(holds: Callable[[float], bool]) -> float:
    """The longest time for which something holds that does not hold again once it has ceased to."""
    below_s, above_s = 0.0, LONGEST_STEP_S
    for _ in range(HALVINGS):
        middle_s = (below_s + above_s) / 2
        below_s, above_s = (middle_s, above_s) if holds(middle_s) else (below_s, middle_s)
    return below_s


def ttft_alone_s(trace: Trace, index: int, shift_s: float, case: Case) -> float:
    """TTFT of one request of the trace without those behind it, coming that much later (negative: earlier)."""
    last = trace.requests[index]
    moved = replace(last, arrival_s=max(0.0, last.arrival_s + shift_s))
    place = bisect_right(trace.requests, moved.arrival_s, hi=index, key=lambda request: request.arrival_s)
    until = replace(trace, requests=(*trace.requests[:place], moved, *trace.requests[place:index]))
    return outcomes_of(until, case)[place].ttft_s


def errors(samples: Sequence[Sample], field: str) -> Percentiles:
    return Percentiles.of([abs(getattr(one, field) - one.actual_s) / max(one.actual_s, 1e-9) for one in samples])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE", help="workload:7b|14b:requests per second")
    parser.add_argument("--traces", type=Path, help="folder with recordings to take instead of generators")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    print(f"{'error of the expected TTFT, P50 / P90':<46}{'the estimate':<16}{'all but the future':<22}", end="")
    print("and step progress unknown")
    with ProcessPoolExecutor(options.workers) as pool:
        for text in options.cases:
            case = Case.parse(text, options.traces, options.instances, options.requests)
            first = case.workload.skip_requests
            chosen = range(first, options.requests, max(1, (options.requests - first) // options.samples))
            # Jobs go in chunks, so that a process makes the whole run once.
            found = pool.map(sample, [case] * len(chosen), chosen, chunksize=-(-len(chosen) // options.workers))
            samples = [one for one in found if one is not None]
            title = f"{case.workload.title} at {case.rate_per_s:g}/s, {len(samples)} requests"
            found_errors = [errors(samples, field) for field in Sample._fields[1:]]
            cells = [f"{one.p50:.0%} / {one.p90:.0%}" for one in found_errors]
            print(f"{title:<46}{cells[0]:<16}{cells[1]:<22}{cells[2]}", flush=True)


if __name__ == "__main__":
    main()
