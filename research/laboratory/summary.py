"""An experiment in a few tables: a row a fleet, the first variant against the best of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualmap.research.laboratory.confidence import Comparison, Mean, Ranking
from dualmap.research.laboratory.experiment import Experiment, GoodputResult, Rate, RateResult
from dualmap.research.laboratory.suite import Fleet
from dualmap.research.laboratory.tables import ReportTable, shown

SUMMARY = "Summary"
"""Their heading."""
_ABSENT = "–"
_TOO_FEW_SEEDS = 2
"""With so few seeds an interval says next to nothing; both values replace it."""

Cell = Callable[[RateResult], str]
Column = tuple[str, Rate, Cell]
"""Title, the load that it is about, and what it says of a fleet at that load."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """One of ``Figures``, as the summary writes it."""

    title: str
    name: str
    factor: float
    digits: int
    unit: str = ""
    highest_best: bool = True

    def versus(self, result: RateResult) -> str:
        """The first variant's mean and the best other's for this figure alone."""
        found = Comparison.of(result.values(self.name), highest_best=self.highest_best)
        return f"{self._told(found.own)} / {self._told(found.other)} {found.best_other}"

    def _told(self, mean: Mean) -> str:
        return f"{self.factor * mean.value:.{self.digits}f}{self.unit}"


_ON_TIME = _Figure("on time", "on_time", 100, 1)
_TTFT_P90 = _Figure("TTFT P90", "ttft_p90_s", 1, 2, " s", highest_best=False)
_E2E_P99 = _Figure("E2E P99", "e2e_p99_s", 1, 0, " s", highest_best=False)
_HIT_RATE = _Figure("hit rate", "hit_rate", 100, 1)


def summary_tables(experiment: Experiment) -> list[ReportTable]:
    """None for a single variant, which there is nothing to compare with."""
    if len(experiment.variants) < 2:
        return []
    rates = list(dict.fromkeys(result.rate for result in experiment.rates))
    bearable = [rate for rate in rates if not _overloads(rate)]
    tables = [_goodput_table(experiment)] if experiment.goodputs else []
    if bearable:
        tables.append(_loads_table(experiment, bearable))
    tables += [_overload_table(experiment, rate) for rate in rates if _overloads(rate)]
    if bearable:
        tables.append(_estimate_table(experiment, bearable))
    return tables


def _overloads(rate: Rate) -> bool:
    """Whether it is at or above saturation; unknown for requests per second."""
    return rate.of_saturation and rate.value >= 1


def _goodput_table(experiment: Experiment) -> ReportTable:
    first = experiment.variants[0].name
    return ReportTable(
        "Goodput",
        ("fleet", first, "best other", "difference", "first in", "sustainable rate", "length"),
        tuple(_goodput_row(result) for result in experiment.goodputs),
        (
            "Requests/s with at least 90 % on time, and the rate that no scheduler can sustain for 90 % of such "
            f"traffic. Length: the trace at the goodput of {first}.",
            _both_note(len(result.bounds) for result in experiment.goodputs),
        ),
    )


def _goodput_row(result: GoodputResult) -> tuple[str, ...]:
    found = Comparison.of(result.goodput_per_s)
    firsts, seeds = Ranking.of(result.goodput_per_s).firsts[found.first], len(result.bounds)
    sustainable = Mean.of([one.sustainable_per_s for one in result.bounds])
    return (
        result.fleet.title,
        f"{found.own.value:.2f}",
        f"{found.best_other} {found.other.value:.2f}",
        _ABSENT if found.percent is None else f"{_spread(found.percent, sign=True)} %",
        f"{firsts}/{seeds}",
        f"{sustainable.value:.1f}",
        _length(result.fleet.requests, found.own.value),
    )


def _length(requests: int, rate_per_s: float) -> str:
    if rate_per_s <= 0:
        return _ABSENT
    minutes = requests / rate_per_s / 60
    return f"{minutes:.{0 if minutes >= 10 else 1}f} min"


def _loads_table(experiment: Experiment, rates: Sequence[Rate]) -> ReportTable:
    """On time at every load, the rest at the last, which is the highest where they stand in order."""
    columns: list[Column] = [(f"{_short(rate)}: on time", rate, _ON_TIME.versus) for rate in rates]
    last = rates[-1]
    columns += [(f"{_short(last)}: {one.title}", last, one.versus) for one in (_TTFT_P90, _HIT_RATE, _E2E_P99)]
    note = "After the slash the best other variant for that figure alone. Shares in percent, means over the seeds."
    return _table("At fixed loads", columns, experiment, (note,))


def _overload_table(experiment: Experiment, rate: Rate) -> ReportTable:
    load = _short(rate)
    columns: list[Column] = [
        (f"{load}: on time", rate, _on_time),
        ("others", rate, _others_on_time),
        ("refused", rate, _refused),
        ("hit rate", rate, _HIT_RATE.versus),
        ("longest hold", rate, _longest_hold),
        ("E2E P99", rate, _E2E_P99.versus),
    ]
    first = experiment.variants[0].name
    notes = (
        f"On time, refused and longest hold (of all seeds) are those of {first}; others: their least to most on time.",
        _both_note(len(result.rates_per_s) for result in experiment.rates if result.rate == rate),
    )
    return _table(f"At {rate.label}", columns, experiment, notes)


def _estimate_table(experiment: Experiment, rates: Sequence[Rate]) -> ReportTable:
    columns: list[Column] = [
        (f"error P50, P90 at {_short(rate)}", rate, lambda result: _quantiles(result, "error_p50", "error_p90"))
        for rate in rates
    ]
    low = rates[0]
    columns += [
        (f"undisturbed at {_short(low)}: share", low, lambda result: f"{_percent(result, 'undisturbed_share')} %"),
        ("P50, P90", low, lambda result: _quantiles(result, "undisturbed_error_p50", "undisturbed_error_p90")),
    ]
    note = (
        f"Expected TTFT of {experiment.variants[0].name}: error relative to the one that came. Undisturbed: requests "
        "whose instance was given no other one before their first token."
    )
    return _table("The estimate", columns, experiment, (note,))


def _table(title: str, columns: Sequence[Column], experiment: Experiment, notes: tuple[str, ...]) -> ReportTable:
    results: Mapping[tuple[Fleet, Rate], RateResult] = {(one.fleet, one.rate): one for one in experiment.rates}
    rows = []
    for fleet in experiment.seeds:
        own = [(results.get((fleet, rate)), cell) for _, rate, cell in columns]
        if any(result is not None for result, _ in own):
            rows.append((fleet.title, *(_ABSENT if result is None else cell(result) for result, cell in own)))
    return ReportTable(title, ("fleet", *(column[0] for column in columns)), tuple(rows), notes)


def _short(rate: Rate) -> str:
    return rate.label.removesuffix(" saturation")


def _first(result: RateResult, figure: str) -> tuple[float, ...]:
    return next(iter(result.values(figure).values()))


def _percent(result: RateResult, figure: str) -> str:
    return f"{100 * Mean.of(_first(result, figure)).value:.0f}"


def _quantiles(result: RateResult, p50: str, p90: str) -> str:
    return f"{_percent(result, p50)}, {_percent(result, p90)} %"


def _on_time(result: RateResult) -> str:
    return _spread(Mean.of([100 * share for share in _first(result, "on_time")]))


def _others_on_time(result: RateResult) -> str:
    _, *others = result.means("on_time").values()
    least, most = (f"{100 * of(mean.value for mean in others):.1f}" for of in (min, max))
    return least if least == most else f"{least} to {most}"


def _refused(result: RateResult) -> str:
    return f"{_percent(result, 'refused')} %"


def _longest_hold(result: RateResult) -> str:
    return f"{max(_first(result, 'longest_hold_s')):.0f} s"


def _spread(mean: Mean, *, sign: bool = False) -> str:
    if len(mean.values) == _TOO_FEW_SEEDS:
        return " and ".join(shown(Mean.of([value]), 1, sign=sign) for value in mean.values)
    return shown(mean, 1, sign=sign)


def _both_note(seeds: Iterable[int]) -> str:
    return "Of two seeds both values stand in place of an interval." if _TOO_FEW_SEEDS in seeds else ""
