"""How right can an expected TTFT be? What comes later changes it, and nobody knows that when a request is placed.

    python benchmarks/estimate_bound.py [--traces FOLDER] [--samples 150] CASE …      (a case: conversation:7b:5.4)

Runs a workload of the laboratory's suite at a rate (requests/s) with the default policy. Then, for a sample of its
requests, runs the same trace again up to that request and no further: in virtual time everything before is the same
to the last digit, so the TTFT of that run is what one would expect who knew the engines, their queues and their caches
perfectly, but nothing of the future. Its error against the whole run's TTFT is printed beside the error of the estimate
that decides. A sample costs about half a run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from scheduling.settings import SchedulingSettings
from simulation.laboratory.suite import PRESET_SHORTHANDS, Fleet, workload_of
from simulation.presets import find_preset
from simulation.results import Percentiles, RequestOutcome
from simulation.scenario import Scenario
from simulation.simulate import Simulation
from simulation.traces import Trace


@dataclass(frozen=True, slots=True)
class Case:
    fleet: Fleet
    rate_per_s: float

    @classmethod
    def parse(cls, text: str, folder: Path | None, instances: int, requests: int) -> Case:
        name, preset, rate_per_s = text.rsplit(":", 2)
        fleet = Fleet(workload_of(name, folder), PRESET_SHORTHANDS[preset], instances, requests)
        return cls(fleet, float(rate_per_s))


class Sample(NamedTuple):
    """One request's TTFT in seconds: as the policy expected it, as it came, and without anything later."""

    expected_s: float
    actual_s: float
    without_future_s: float


@lru_cache(maxsize=1)
def whole_run(case: Case) -> tuple[Trace, Sequence[RequestOutcome]]:
    trace = case.fleet.source(1).load(case.rate_per_s)
    return trace, outcomes_of(trace, case)


def outcomes_of(trace: Trace, case: Case) -> Sequence[RequestOutcome]:
    engine = find_preset(case.fleet.preset).engine
    scenario = Scenario(scheduling=SchedulingSettings(), engine=engine, instances=case.fleet.instances)
    return Simulation(trace, scenario).run().outcomes


def sample(case: Case, index: int) -> Sample | None:
    """None if the request was not answered."""
    trace, outcomes = whole_run(case)
    whole = outcomes[index]
    if whole.first_token_s is None:
        return None
    alone = outcomes_of(trace.first(index + 1), case)[index]
    return Sample(whole.expected_ttft_s, whole.ttft_s, alone.ttft_s)


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
    print("error of the expected TTFT, P50 / P90       the estimate        all known but the future")
    with ProcessPoolExecutor(options.workers) as pool:
        for text in options.cases:
            case = Case.parse(text, options.traces, options.instances, options.requests)
            first = case.fleet.skip_requests
            chosen = range(first, options.requests, max(1, (options.requests - first) // options.samples))
            # In chunks, so that a process makes the whole run once.
            found = pool.map(sample, [case] * len(chosen), chosen, chunksize=-(-len(chosen) // options.workers))
            samples = [one for one in found if one is not None]
            ours, bound = errors(samples, "expected_s"), errors(samples, "without_future_s")
            title = f"{case.fleet.title} at {case.rate_per_s:g}/s, {len(samples)} requests"
            print(f"{title:<44}{ours.p50:>7.0%} / {ours.p90:<9.0%}{bound.p50:>9.0%} / {bound.p90:.0%}", flush=True)


if __name__ == "__main__":
    main()
