"""A suite's runs: every variant under every workload with every seed, first in search of its goodput, then at each
rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.research.bench import Bench
from dualmap.research.figures import Figures
from dualmap.research.provenance import Provenance
from dualmap.research.run import Run, Search
from dualmap.research.suites.suite import Suite, peers, workloads_of
from dualmap.research.targets import MAIN, Target, targets_of
from dualmap.research.variant import Variant, VariantError, parse_variant
from dualmap.research.workload import Workload
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.capacity.bounds import Bounds
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.figures.mean import Mean

Place = tuple[Workload, int]
"""A workload and a seed."""
Seeds = Mapping[Workload, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rate:
    """A load as requested: requests per second, a multiple of the saturation rate, or a number of clients."""

    value: float
    of_saturation: bool
    clients: int | None = None
    """Number of clients that are always busy; None: a rate."""

    @property
    def label(self) -> str:
        if self.clients is not None:
            return f"{self.clients} clients"
        return f"{self.value:g} × saturation" if self.of_saturation else f"{self.value:g}/s"

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Raises SimulationError."""
        clients = text.removesuffix("c")
        if clients != text and clients.isdecimal() and int(clients) > 0:
            return cls(0.0, False, int(clients))
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise SimulationError(f"rate {text!r} must be requests per second, or like 1.5x or 64c (clients), above 0")
        return cls(value, text.endswith("x"))


@dataclass(frozen=True, slots=True)
class RateResult:
    """All variants under one workload at one rate; sequences are in the order of the seeds."""

    workload: Workload
    rate: Rate
    rates_per_s: tuple[float, ...]
    """Requests a second; of clients those of the first variant, as they came out."""
    figures: Mapping[str, tuple[Figures, ...]]

    def values(self, name: str) -> dict[str, tuple[float, ...]]:
        """One figure of every variant."""
        return {variant: tuple(getattr(one, name) for one in own) for variant, own in self.figures.items()}

    def means(self, name: str) -> dict[str, Mean]:
        return {variant: Mean.of(values) for variant, values in self.values(name).items()}


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """The goodput of all variants under one workload; sequences are in the order of the seeds."""

    workload: Workload
    goodput_per_s: Mapping[str, tuple[float, ...]]
    """Goodput with 90 % on time."""
    saturation_per_s: tuple[float, ...]
    bounds: tuple[Bounds, ...]
    further: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    """Goodputs for the suite's other targets, by their names."""

    def of(self, target: Target) -> Mapping[str, tuple[float, ...]]:
        return self.goodput_per_s if target is MAIN else self.further[target.name]

    @property
    def targets(self) -> tuple[Target, ...]:
        return targets_of(tuple(self.further))


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Everything that came out. The first variant is the one that the others are compared with."""

    suite: Suite
    variants: tuple[Variant, ...]
    seeds: Seeds
    goodputs: tuple[GoodputResult, ...]
    rates: tuple[RateResult, ...]
    made: Provenance | None = None


def variants_of(suite: Suite, base: SchedulingSettings) -> tuple[Variant, ...]:
    """The suite's variants over the settings of ``base``. Raises VariantError."""
    variants = tuple(parse_variant(text, base) for text in suite.variants)
    names = [variant.name for variant in variants]
    for name in names:
        if names.count(name) > 1:
            raise VariantError(f"two variants are named {name!r}")
    return variants


def run_suite(suite: Suite, base: SchedulingSettings, bench: Bench) -> SuiteResult:
    """Deterministic: the same suite and code give the same figures on any bench.

    Raises:
        SimulationError: a broken variant, trace or rate, before anything long runs.
    """
    variants = variants_of(suite, base)
    rates = tuple(Rate.parse(text) for text in suite.rates)
    seeds = {workload: workload.seeds(suite.seeds) for workload in workloads_of(suite)}
    places = [(workload, seed) for workload, own in seeds.items() for seed in own]
    relative = any(rate.of_saturation for rate in rates)
    references = [parse_variant(text, base) for text in peers(suite.saturation_of)] if relative else []
    targets = targets_of(suite.targets if suite.goodput else ())
    found = _searched([*(variants if suite.goodput else ()), *references], places, targets, suite.tolerance, bench)
    saturation = {place: max((found[one, place][0] for one in references), default=0.0) for place in places}
    goodputs: tuple[GoodputResult, ...] = ()
    if suite.goodput:
        bounds = _bounds(places, base.slo_ttft_s, bench)
        goodputs = tuple(
            _goodput_result(workload, own, variants, targets, found, saturation, bounds)
            for workload, own in seeds.items()
        )
    return SuiteResult(suite, variants, seeds, goodputs, _rate_results(seeds, variants, rates, saturation, bench))


Goodputs = Mapping[tuple[Variant, Place], tuple[float, ...]]
"""Goodputs for each target; the main one is the first."""


def _searched(
    variants: Sequence[Variant], places: Sequence[Place], targets: tuple[Target, ...], tolerance: float, bench: Bench
) -> Goodputs:
    wanted = [(variant, place) for place in places for variant in variants]
    searches = [Search(Run(workload, variant, seed), targets, tolerance) for variant, (workload, seed) in wanted]
    return dict(zip(wanted, bench.goodputs("goodput", searches), strict=True))


def _bounds(places: Sequence[Place], slo_s: float, bench: Bench) -> Mapping[Place, Bounds]:
    jobs = [(workload, seed, workload.traffic.slo_ttft_s or slo_s) for workload, seed in places]
    return dict(zip(places, bench.map("bounds", _bounds_of, jobs), strict=True))


def _bounds_of(job: tuple[Workload, int, float]) -> Bounds:
    workload, seed, slo_s = job
    return workload.bounds(seed, slo_s)


def _goodput_result(
    workload: Workload,
    seeds: Sequence[int],
    variants: Sequence[Variant],
    targets: Sequence[Target],
    found: Goodputs,
    saturation: Mapping[Place, float],
    bounds: Mapping[Place, Bounds],
) -> GoodputResult:
    places = [(workload, seed) for seed in seeds]
    main, *further = (
        {one.name: tuple(found[one, place][index] for place in places) for one in variants}
        for index, _ in enumerate(targets)
    )
    return GoodputResult(
        workload,
        main,
        tuple(saturation[place] for place in places),
        tuple(bounds[place] for place in places),
        {target.name: own for target, own in zip(targets[1:], further, strict=True)},
    )


def _rate_results(
    seeds: Seeds,
    variants: Sequence[Variant],
    rates: Sequence[Rate],
    saturation: Mapping[Place, float],
    bench: Bench,
) -> tuple[RateResult, ...]:
    def rate_per_s(rate: Rate, place: Place) -> float:
        return rate.value * saturation[place] if rate.of_saturation else rate.value

    def run(workload: Workload, variant: Variant, seed: int, rate: Rate) -> Run:
        if rate.clients is not None:
            return Run(workload, variant, seed, concurrency=rate.clients)
        return Run(workload, variant, seed, rate_per_s(rate, (workload, seed)))

    def is_usable(rate: Rate, place: Place) -> bool:
        return rate.clients is not None or rate_per_s(rate, place) > 0

    runs = {
        (workload, rate, variant.name, seed): run(workload, variant, seed, rate)
        for workload, own in seeds.items()
        for seed in own
        for rate in rates
        for variant in variants
        if is_usable(rate, (workload, seed))
    }
    answers = dict(zip(runs, bench.figures("rates", list(runs.values())), strict=True))
    results = []
    for workload, own in seeds.items():
        for rate in rates:
            usable = [seed for seed in own if is_usable(rate, (workload, seed))]
            if usable:
                figures = {
                    one.name: tuple(answers[workload, rate, one.name, seed] for seed in usable) for one in variants
                }
                per_s = tuple(rate_per_s(rate, (workload, seed)) for seed in usable)
                if rate.clients is not None:
                    per_s = tuple(one.rate_per_s for one in figures[variants[0].name])
                results.append(RateResult(workload, rate, per_s, figures))
    return tuple(results)
