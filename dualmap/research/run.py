"""Runs: one variant under one workload with one seed, at a rate, or in search of its goodput."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dualmap.research.figures import Figures
from dualmap.research.run_cache import RunCache
from dualmap.research.targets import MAIN, Target
from dualmap.research.variant import Variant
from dualmap.research.workload import Workload
from dualmap.simulation.capacity.goodput import find_goodput
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.arrivals import Loop

START_SHARE = 0.8
"""Part of the sustainable rate of all requests where searches start."""
GROWTH = 1.15


@dataclass(frozen=True, slots=True)
class Run:
    """One variant under one workload with one seed."""

    workload: Workload
    variant: Variant
    seed: int = 1
    rate_per_s: float | None = None
    """None: the trace's own times."""
    concurrency: int | None = None
    """Number of clients that are always busy, in the place of a rate."""

    def scenario(self) -> Scenario:
        return replace(self.variant.scenario(self.workload), loop=Loop(self.concurrency))

    @property
    def job(self) -> RunJob:
        return RunJob(self.workload.source(self.seed), self.scenario(), self.rate_per_s)

    def at(self, rate_per_s: float) -> Run:
        return replace(self, rate_per_s=rate_per_s)


@dataclass(frozen=True, slots=True)
class Search:
    """The goodputs of a run's variant: for each target the highest rate that meets it."""

    run: Run
    """The rate at which the search starts; None: at ``START_SHARE``, where all variants are tried at the same rates."""
    targets: tuple[Target, ...] = (MAIN,)
    tolerance: float = 0.01
    """Relative width of the bracket at the end."""
    growth: float = GROWTH

    def goodputs(self, cache: RunCache) -> tuple[float, ...]:
        """Requests per second, for each target. What one target's search has run, the next one knows."""
        run = self.run
        start_per_s = run.rate_per_s or START_SHARE * run.workload.sustainable_per_s(run.seed)
        known: dict[float, Figures] = {}

        def at(rate_per_s: float) -> Figures:
            if rate_per_s not in known:
                known[rate_per_s] = cache.figures(run.at(rate_per_s).job)
            return known[rate_per_s]

        return tuple(
            find_goodput(
                lambda rate_per_s, target=target: target.share_of(at(rate_per_s)),  # type: ignore[misc]
                start_per_s,
                wanted_share=target.share,
                tolerance=self.tolerance,
                growth=self.growth,
                known=[(rate_per_s, target.share_of(figures)) for rate_per_s, figures in known.items()],
            ).rate_per_s
            for target in self.targets
        )

    @property
    def without_name(self) -> Search:
        """Equal for variants that differ in name only."""
        return replace(self, run=replace(self.run, variant=replace(self.run.variant, name="")))
