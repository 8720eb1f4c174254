"""The smallest fleet that keeps enough requests of a trace on time at its rate, and lets none of the others wait long.

A share on time says nothing of the rest: the default policy keeps 90 % of an overload on time and has the others wait
for minutes. So the P99 of the first token has a bound too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

from dualmap.simulation.capacity.bounds import bounds_of, ideal_requests
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.figures.first_tokens import p99_of_all_s
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.trace_figures import quantile
from dualmap.simulation.workload.traces import Trace

P99_IN_SLOS = 3.0
"""Bound of the P99 of the first token, in SLOs, unless one is given."""
P99_OF_ALONE = 2.0
"""The limit in P99s of prompts that are prefilled alone: where prompts are longer than the SLO allows, no number of
instances would do."""
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
    p99_limit_s: float = inf
    """The limit of the P99 of the first token."""

    @property
    def why_not(self) -> str:
        """Why no number of instances holds; empty if one does."""
        if self.instances:
            return ""
        if p99_of_all_s(self.result) > self.p99_limit_s:
            return f"P99 of the first token above {self.p99_limit_s:.1f} s"
        return "too few on time"


def fewest_instances(
    share_with: Callable[[int], float], wanted_share: float, start: int = 1, hopeless_from: float | None = None
) -> int:
    """The smallest number of instances with which ``share_with`` reaches ``wanted_share``; 0: none up to
    ``MOST_INSTANCES`` does, or twice as many help no more. The share must rise with the number, as far as noise lets
    it; the search doubles from ``start`` outwards, then bisects. ``hopeless_from`` is the share from which on numbers
    that help no more end the search, by default half of the wanted one."""
    half = wanted_share / 2 if hopeless_from is None else hopeless_from
    low, high, tried, best = 0, 0, max(1, min(MOST_INSTANCES, start)), 0.0
    while not high or high - low > 1:
        share = share_with(tried)
        if share >= wanted_share:
            high = tried
        elif not high and (tried == MOST_INSTANCES or half < share < best + LEAST_GAIN):
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
    p99_s: float | None = None
    """The limit of the P99 of the first token; None: see ``p99_limit_s``."""

    @property
    def policy(self) -> str:
        return self.job.scenario.scheduling.policy


def p99_limit_s(trace: Trace, engine: EngineConfig, slo_s: float) -> float:
    """The bound of the P99 of the first token where none is given."""
    alone_s = sorted(request.prefill_s for request in ideal_requests(trace, engine))
    return max(P99_IN_SLOS * slo_s, P99_OF_ALONE * quantile(alone_s, 0.99))


ENOUGH = 2.0
"""The score of a run that holds."""


def score(result: RunResult, wanted_share: float, limit_s: float) -> float:
    """How near a run is to what is wanted: up to 1 by its share on time, then up to ``ENOUGH`` by its P99."""
    p99_s, share = p99_of_all_s(result), result.share_on_time
    return share / wanted_share if share < wanted_share else 1.0 + min(1.0, limit_s / p99_s)


def run_fleet_size(
    search: FleetSizeJob,
    on_progress: Callable[[int, int], None] = lambda instances, arrived: None,
    on_tried: Callable[[RunResult], None] = lambda result: None,
) -> FleetSize:
    """Search in this process, from what the bounds say an instance sustains. ``on_progress`` gets the instances of a
    run and how many of its requests have arrived, ``on_tried`` each run. Raises SimulationError."""
    job = search.job
    trace, slo_s = job.source.load(job.rate_per_s), job.scenario.scheduling.slo_ttft_s
    sustained_per_s = bounds_of(trace, job.scenario.engine, 1, slo_s, share=search.wanted_share).sustainable_per_s
    limit_s = search.p99_s or p99_limit_s(trace, job.scenario.engine, slo_s)
    results: dict[int, RunResult] = {}

    def score_with(instances: int) -> float:
        scenario = replace(job.scenario, instances=instances, fleet=())
        results[instances] = simulate(trace, scenario, lambda arrived: on_progress(instances, arrived))
        on_tried(results[instances])
        return score(results[instances], search.wanted_share, limit_s)

    start = ceil(trace.rate_per_s / sustained_per_s)
    instances = fewest_instances(score_with, ENOUGH, start, hopeless_from=0.5)
    less = results.get(instances - 1)
    result = results.get(instances) or list(results.values())[-1]
    return FleetSize(instances, result, less.share_on_time if less else None, len(results), limit_s)
