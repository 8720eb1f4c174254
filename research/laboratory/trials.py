"""The work of the processes: one variant on one fleet, one seed; at a rate, or in search of its goodput."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualmap.research.laboratory.figures import Figures
from dualmap.research.laboratory.run_cache import RunCache
from dualmap.research.laboratory.suite import Fleet
from dualmap.research.laboratory.targets import Target
from dualmap.research.laboratory.variants import Variant
from dualmap.simulation.bounds import Bounds, bounds_of, sustainable_rate
from dualmap.simulation.engine_types import EngineConfig
from dualmap.simulation.goodput import find_goodput
from dualmap.simulation.presets import find_preset
from dualmap.simulation.runs import RunJob

START_SHARE = 0.8
"""Of the sustainable rate of all requests: where searches start."""
GROWTH = 1.15


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant on one fleet with one seed."""

    variant: Variant
    fleet: Fleet
    seed: int
    cache: RunCache

    @property
    def engine(self) -> EngineConfig:
        return find_preset(self.fleet.preset).engine

    def job(self, rate_per_s: float) -> RunJob:
        fleet = self.fleet
        scenario = self.variant.scenario(self.engine, fleet.instances, fleet.skip_requests)
        if fleet.workload.slo_ttft_s is not None:
            scheduling = scenario.scheduling.model_copy(update={"slo_ttft_s": fleet.workload.slo_ttft_s})
            scenario = replace(scenario, scheduling=scheduling)
        return RunJob(fleet.source(self.seed), scenario, rate_per_s)


@dataclass(frozen=True, slots=True)
class RateTrial:
    trial: Trial
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class GoodputTrial:
    trial: Trial
    targets: tuple[Target, ...]
    tolerance: float


def run_rate(work: RateTrial) -> Figures:
    return work.trial.cache.figures(work.trial.job(work.rate_per_s))


def run_goodput(work: GoodputTrial) -> tuple[float, ...]:
    """The variant's goodput for each target, in requests per second.

    The search starts at the same rate for every variant, so that all of them are tried at the same rates. What one
    target's search has run, the next one knows.
    """
    trial = work.trial
    fleet = trial.fleet
    trace = fleet.source(trial.seed).load()
    sustainable = sustainable_rate(trace, trial.engine, fleet.instances, share=1.0, skip=fleet.skip_requests)
    runs: dict[float, Figures] = {}

    def run_at(rate_per_s: float) -> Figures:
        if rate_per_s not in runs:
            runs[rate_per_s] = trial.cache.figures(trial.job(rate_per_s))
        return runs[rate_per_s]

    return tuple(
        find_goodput(
            lambda rate_per_s, target=target: target.share_of(run_at(rate_per_s)),  # type: ignore[misc]
            START_SHARE * sustainable,
            wanted_share=target.share,
            tolerance=work.tolerance,
            growth=GROWTH,
            known=[(rate_per_s, target.share_of(figures)) for rate_per_s, figures in runs.items()],
        ).rate_per_s
        for target in work.targets
    )


@dataclass(frozen=True, slots=True)
class BoundsTrial:
    """What no variant can pass on this fleet with this seed."""

    fleet: Fleet
    seed: int
    slo_s: float


def run_bounds(work: BoundsTrial) -> Bounds:
    fleet = work.fleet
    trace, engine = fleet.source(work.seed).load(), find_preset(fleet.preset).engine
    return bounds_of(trace, engine, fleet.instances, work.slo_s, skip=fleet.skip_requests)
