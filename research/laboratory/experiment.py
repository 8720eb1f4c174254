"""An experiment: every variant on every fleet with every seed, first in search of its goodput, then at each rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.research.evaluate.work import Worker
from dualmap.research.laboratory.confidence import Mean
from dualmap.research.laboratory.figures import Figures
from dualmap.research.laboratory.provenance import Provenance
from dualmap.research.laboratory.run_cache import RunCache
from dualmap.research.laboratory.suite import Fleet, Suite, fleets, peers
from dualmap.research.laboratory.targets import MAIN, Target, targets_of
from dualmap.research.laboratory.trials import (
    BoundsTrial,
    GoodputTrial,
    RateTrial,
    Trial,
    run_bounds,
    run_goodput,
    run_rate,
)
from dualmap.research.laboratory.variants import Variant, parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.bounds import Bounds
from dualmap.simulation.errors import SimulationError

Place = tuple[Fleet, int]
"""A fleet and a seed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate as asked for: requests per second, or a multiple of the saturation rate."""

    value: float
    of_saturation: bool

    @property
    def label(self) -> str:
        return f"{self.value:g} × saturation" if self.of_saturation else f"{self.value:g}/s"

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Raises SimulationError."""
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise SimulationError(f"rate {text!r} must be requests per second, or like 1.5x, above 0")
        return cls(value, text.endswith("x"))


@dataclass(frozen=True, slots=True)
class RateResult:
    """All variants on one fleet at one rate; sequences are in the order of the seeds."""

    fleet: Fleet
    rate: Rate
    rates_per_s: tuple[float, ...]
    figures: Mapping[str, tuple[Figures, ...]]

    def values(self, name: str) -> dict[str, tuple[float, ...]]:
        """One figure of every variant."""
        return {variant: tuple(getattr(one, name) for one in own) for variant, own in self.figures.items()}

    def means(self, name: str) -> dict[str, Mean]:
        return {variant: Mean.of(values) for variant, values in self.values(name).items()}


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """The goodput of all variants on one fleet; sequences are in the order of the seeds."""

    fleet: Fleet
    goodput_per_s: Mapping[str, tuple[float, ...]]
    """With 90 % on time."""
    saturation_per_s: tuple[float, ...]
    bounds: tuple[Bounds, ...]
    further: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    """The same for the suite's other targets, by their names."""

    def of(self, target: Target) -> Mapping[str, tuple[float, ...]]:
        return self.goodput_per_s if target is MAIN else self.further[target.name]

    @property
    def targets(self) -> tuple[Target, ...]:
        return targets_of(tuple(self.further))


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that came out. The first variant is the one that the others are compared with."""

    suite: Suite
    variants: tuple[Variant, ...]
    seeds: Mapping[Fleet, tuple[int, ...]]
    goodputs: tuple[GoodputResult, ...]
    rates: tuple[RateResult, ...]
    made: Provenance | None = None


def run_experiment(
    suite: Suite, variants: Sequence[Variant], base: SchedulingSettings, cache: RunCache, worker: Worker
) -> Experiment:
    """Deterministic: the same suite, variants and code give the same figures with any number of processes.

    Raises:
        SimulationError: a broken trace or rate, before anything long runs.
    """
    rates = tuple(Rate.parse(text) for text in suite.rates)
    seeds = {fleet: fleet.seeds(suite.seeds) for fleet in fleets(suite)}
    places = [(fleet, seed) for fleet, own in seeds.items() for seed in own]
    relative = any(rate.of_saturation for rate in rates)
    references = [parse_variant(text, base) for text in peers(suite.saturation_of)] if relative else []
    targets = targets_of(suite.targets if suite.goodput else ())
    searched = [*(variants if suite.goodput else ()), *references]
    found = _Goodputs(places, searched, targets, suite.tolerance, cache, worker)
    saturation = {place: max((found[one, place, MAIN] for one in references), default=0.0) for place in places}
    goodputs = _goodput_results(seeds, variants, targets, found, saturation, base, worker) if suite.goodput else ()
    return Experiment(
        suite, tuple(variants), seeds, goodputs, _rate_results(seeds, variants, rates, saturation, cache, worker)
    )


class _Goodputs:
    """Goodput by variant and place; variants that differ in name only are searched once."""

    def __init__(
        self,
        places: Sequence[Place],
        variants: Sequence[Variant],
        targets: tuple[Target, ...],
        tolerance: float,
        cache: RunCache,
        worker: Worker,
    ) -> None:
        self._targets = targets
        trials = {
            self._key(variant, place): GoodputTrial(Trial(variant, *place, cache), targets, tolerance)
            for place in places
            for variant in variants
        }
        answers = worker.map("goodput", run_goodput, list(trials.values())) if trials else []
        self._found = dict(zip(trials, answers, strict=True))

    def __getitem__(self, key: tuple[Variant, Place, Target]) -> float:
        variant, place, target = key
        return self._found[self._key(variant, place)][self._targets.index(target)]

    @staticmethod
    def _key(variant: Variant, place: Place) -> object:
        return variant.scheduling, variant.options, place


def _goodput_results(
    seeds: Mapping[Fleet, tuple[int, ...]],
    variants: Sequence[Variant],
    targets: Sequence[Target],
    found: _Goodputs,
    saturation: Mapping[Place, float],
    base: SchedulingSettings,
    worker: Worker,
) -> tuple[GoodputResult, ...]:
    places = [(fleet, seed) for fleet, own in seeds.items() for seed in own]
    trials = [BoundsTrial(fleet, seed, fleet.workload.slo_ttft_s or base.slo_ttft_s) for fleet, seed in places]
    bounds = dict(zip(places, worker.map("bounds", run_bounds, trials), strict=True))

    def of(target: Target, fleet: Fleet, own: Sequence[int]) -> dict[str, tuple[float, ...]]:
        return {one.name: tuple(found[one, (fleet, seed), target] for seed in own) for one in variants}

    return tuple(
        GoodputResult(
            fleet,
            of(MAIN, fleet, own),
            tuple(saturation[fleet, seed] for seed in own),
            tuple(bounds[fleet, seed] for seed in own),
            {target.name: of(target, fleet, own) for target in targets if target is not MAIN},
        )
        for fleet, own in seeds.items()
    )


def _rate_results(
    seeds: Mapping[Fleet, tuple[int, ...]],
    variants: Sequence[Variant],
    rates: Sequence[Rate],
    saturation: Mapping[Place, float],
    cache: RunCache,
    worker: Worker,
) -> tuple[RateResult, ...]:
    def rate_per_s(rate: Rate, place: Place) -> float:
        return rate.value * saturation[place] if rate.of_saturation else rate.value

    trials = {
        (fleet, rate, variant.name, seed): RateTrial(
            Trial(variant, fleet, seed, cache), rate_per_s(rate, (fleet, seed))
        )
        for fleet, own in seeds.items()
        for seed in own
        for rate in rates
        for variant in variants
        if rate_per_s(rate, (fleet, seed)) > 0
    }
    answers = dict(zip(trials, worker.map("rates", run_rate, list(trials.values())), strict=True))
    results = []
    for fleet, own in seeds.items():
        for rate in rates:
            usable = [seed for seed in own if rate_per_s(rate, (fleet, seed)) > 0]
            if usable:
                per_s = tuple(rate_per_s(rate, (fleet, seed)) for seed in usable)
                figures = {one.name: tuple(answers[fleet, rate, one.name, seed] for seed in usable) for one in variants}
                results.append(RateResult(fleet, rate, per_s, figures))
    return tuple(results)
