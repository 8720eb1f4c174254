"""Two runs of the same arrivals against each other, with confidence: of all requests, of each tenant, of each class.

A run is one sample, and its requests depend on each other: queues last, caches last longer. So the time of arrivals is
cut into equal parts, each figure is taken in each part, and the differences part by part have a mean and a confidence
interval by Student's t: batch means (Law, Simulation Modeling and Analysis, section 9.5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from math import inf, isfinite, isnan

from dualmap.simulation.figures.mean import Mean
from dualmap.simulation.figures.on_time import meets_both
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.workload.trace_figures import quantile

PARTS = 12
"""Parts of the time of arrivals: few enough that what lasts from one into the next matters little."""
LEAST_REQUESTS = 5
"""Requests of a part below which its figures say nothing."""
ALL = "all requests"


class Unit(StrEnum):
    SHARE = "share"
    SECONDS = "s"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of some requests."""

    name: str
    unit: Unit
    of: Callable[[Sequence[RequestOutcome]], float | None]
    """None: they have none."""
    _: KW_ONLY
    more_is_better: bool
    matters: float
    """The least difference that anybody would act on: of shares by itself, of times as a part of the former."""


def ttft_quantile(share: float) -> Callable[[Sequence[RequestOutcome]], float | None]:
    """The quantile of the time to first token; infinite where so many requests got none."""

    def of(outcomes: Sequence[RequestOutcome]) -> float | None:
        if not outcomes:
            return None
        found = quantile(sorted(outcome.ttft_s for outcome in outcomes), share)
        return inf if isnan(found) else found  # between two requests without a first token

    return of


def _share(outcomes: Sequence[RequestOutcome], meets: Callable[[RequestOutcome], bool]) -> float | None:
    return sum(map(meets, outcomes)) / len(outcomes) if outcomes else None


def tpot_p50(outcomes: Sequence[RequestOutcome]) -> float | None:
    """The median time per output token; None: no answer has several."""
    times_s = sorted(tpot_s for outcome in outcomes if (tpot_s := outcome.tpot_s) is not None)
    return quantile(times_s, 0.5) if times_s else None


def _hits(outcomes: Sequence[RequestOutcome]) -> float | None:
    answered = [outcome for outcome in outcomes if outcome.answered]
    tokens = sum(outcome.input_tokens for outcome in answered)
    return sum(outcome.cached_tokens for outcome in answered) / tokens if tokens else None


def figures(slo_tpot_s: float | None = None) -> tuple[Figure, ...]:
    """The figures that are compared; with an SLO of the time per token the share that kept both as well."""
    both = Figure(
        "both SLOs", Unit.SHARE, lambda outcomes: _share(outcomes, lambda one: meets_both(one, slo_tpot_s or 0.0)),
        more_is_better=True, matters=0.005,
    )  # fmt: skip
    return (
        Figure(
            "on time", Unit.SHARE, lambda outcomes: _share(outcomes, lambda one: one.on_time), more_is_better=True,
            matters=0.005,
        ),
        *((both,) if slo_tpot_s is not None else ()),
        Figure("TTFT P50", Unit.SECONDS, ttft_quantile(0.5), more_is_better=False, matters=0.02),
        Figure("TTFT P90", Unit.SECONDS, ttft_quantile(0.9), more_is_better=False, matters=0.02),
        Figure("TTFT P99", Unit.SECONDS, ttft_quantile(0.99), more_is_better=False, matters=0.05),
        Figure("time a token", Unit.SECONDS, tpot_p50, more_is_better=False, matters=0.02),
        Figure("found in cache", Unit.SHARE, _hits, more_is_better=True, matters=0.005),
        Figure(
            "refused", Unit.SHARE, lambda outcomes: _share(outcomes, lambda one: not one.answered),
            more_is_better=False, matters=0.005,
        ),
    )  # fmt: skip


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    """The difference is too small to matter, or may be chance."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of one group of requests in two runs."""

    figure: Figure
    group: str
    now: float
    then: float
    half_width: float
    """Half the width of the 95 % confidence interval of ``then`` less ``now``; infinite where too few requests came."""

    @property
    def verdict(self) -> Verdict:
        change = self.then - self.now
        if self.now == self.then or isnan(change):
            return Verdict.SAME
        least = self.figure.matters * (1.0 if self.figure.unit is Unit.SHARE else self.now)
        if isfinite(change) and abs(change) <= max(least, self.half_width):
            return Verdict.SAME
        return Verdict.BETTER if (change > 0) is self.figure.more_is_better else Verdict.WORSE


def compare(
    now: Sequence[RequestOutcome], then: Sequence[RequestOutcome], wanted: Sequence[Figure], *, groups: bool = True
) -> tuple[Difference, ...]:
    """The differences of each group, figure by figure; without ``groups`` of all requests alone. A group that one of
    the two lacks is left out."""
    before, after = (_groups(one) if groups else {ALL: one} for one in (now, then))
    ends_s = max((outcome.arrival_s for outcome in (*now, *then)), default=0.0)
    return tuple(
        difference
        for group in before
        if group in after
        for figure in wanted
        if (difference := _difference(figure, group, before[group], after[group], ends_s)) is not None
    )


def _groups(outcomes: Sequence[RequestOutcome]) -> Mapping[str, Sequence[RequestOutcome]]:
    found: dict[str, list[RequestOutcome]] = {}
    for outcome in outcomes:
        for name in _names(outcome):
            found.setdefault(name, []).append(outcome)
    tenants = sorted(name for name in found if name.startswith("tenant "))
    classes = sorted(name for name in found if name.startswith("class "))
    kept = [names for names in (tenants, classes) if len(names) > 1]
    return {ALL: outcomes} | {name: found[name] for names in kept for name in names}


def _names(outcome: RequestOutcome) -> Iterator[str]:
    if outcome.tenant:
        yield f"tenant {outcome.tenant}"
    if outcome.priority:
        yield f"class {outcome.priority}"


def _difference(
    figure: Figure, group: str, now: Sequence[RequestOutcome], then: Sequence[RequestOutcome], ends_s: float
) -> Difference | None:
    before, after = figure.of(now), figure.of(then)
    if before is None or after is None:
        return None
    changes = [
        later - earlier
        for one, other in zip(_parts(now, ends_s), _parts(then, ends_s), strict=True)
        if min(len(one), len(other)) >= LEAST_REQUESTS
        and (earlier := figure.of(one)) is not None
        and (later := figure.of(other)) is not None
    ]
    known = list(filter(isfinite, changes))
    width = Mean.of(known).half_width if len(known) > 1 else inf
    return Difference(figure, group, before, after, width)


def _parts(outcomes: Sequence[RequestOutcome], ends_s: float) -> list[list[RequestOutcome]]:
    parts: list[list[RequestOutcome]] = [[] for _ in range(PARTS)]
    begins_s = outcomes[0].arrival_s
    width_s = max(ends_s - begins_s, 1e-9) / PARTS
    for outcome in outcomes:
        parts[max(0, min(PARTS - 1, int((outcome.arrival_s - begins_s) / width_s)))].append(outcome)
    return parts
