"""The smallest fleet that keeps enough requests of a trace on time at its rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from dualmap.simulation.bounds import bounds_of
from dualmap.simulation.results import RunResult
from dualmap.simulation.runs import RunJob
from dualmap.simulation.simulate import simulate

MOST_INSTANCES = 1024
LEAST_GAIN = 0.005
"""Share on time that twice as many instances must add, once half of the wanted share is reached: where they do not,
prompts are too long for the SLO, or decoding alone is too slow, on any number."""


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The result of the search."""

    instances: int
    """The smallest number that was seen to hold; 0: none does."""
    result: RunResult
    """The run with so many; if none holds, the last that was tried."""
    share_with_one_less: float | None
    """Share on time with one instance less; None: one is enough, or none was."""
    runs: int


def fewest_instances(share_with: Callable[[int], float], wanted_share: float, start: int = 1) -> int:
    """The smallest number of instances with which ``share_with`` reaches ``wanted_share``; 0: none up to
    ``MOST_INSTANCES`` does, or twice as many help no more. The share must rise with the number, as far as noise lets
    it; the search doubles from ``start`` outwards, then bisects."""
    low, high, tried, best = 0, 0, max(1, min(MOST_INSTANCES, start)), 0.0
    while not high or high - low > 1:
        share = share_with(tried)
        if share >= wanted_share:
            high = tried
        elif not high and (tried == MOST_INSTANCES or wanted_share / 2 < share < best + LEAST_GAIN):
            return 0
        else:
            low, best = tried, max(best, share)
        tried = min(2 * low, MOST_INSTANCES) if not high else (low + high) // 2
    return high


@dataclass(frozen=True, slots=True)
class FleetSizeJob:
    """The size of fleet of one scenario on one trace; the scenario's own number of instances is left out."""

    name: str
    """The name in the table: the preset."""
    cards: int
    """Cards of one instance."""
    job: RunJob
    wanted_share: float

    @property
    def policy(self) -> str:
        return self.job.scenario.scheduling.policy


def run_fleet_size(search: FleetSizeJob) -> FleetSize:
    """Search in this process, from what the bounds say an instance sustains. Raises SimulationError."""
    job = search.job
    trace, slo_s = job.source.load(job.rate_per_s), job.scenario.scheduling.slo_ttft_s
    sustained_per_s = bounds_of(trace, job.scenario.engine, 1, slo_s, share=search.wanted_share).sustainable_per_s
    results: dict[int, RunResult] = {}

    def share_with(instances: int) -> float:
        results[instances] = simulate(trace, replace(job.scenario, instances=instances, fleet=()))
        return results[instances].share_on_time

    instances = fewest_instances(share_with, search.wanted_share, ceil(trace.rate_per_s / sustained_per_s))
    less = results.get(instances - 1)
    result = results.get(instances) or list(results.values())[-1]
    return FleetSize(instances, result, less.share_on_time if less else None, len(results))
