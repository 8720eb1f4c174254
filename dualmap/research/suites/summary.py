"""A suite's outcome in a few tables: a row a workload, the first variant against the best of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dualmap.research.confidence import Comparison, Ranking
from dualmap.research.suites.results import GoodputResult, Rate, RateResult, SuiteResult
from dualmap.research.table import ABSENT, Column, Table, shown
from dualmap.research.workload import Workload
from dualmap.simulation.figures.mean import Mean

SUMMARY = "Summary"
"""Heading of the summary tables."""
_TOO_FEW_SEEDS = 2
"""Number of seeds with which an interval says next to nothing; both values replace it."""

Cell = Callable[[RateResult], str]
AtLoad = tuple[str, Rate, Cell]
"""A column: its title, the load that it is about, and what it says of a workload at that load."""


_ON_TIME = Column("on time", "on_time", 100, 1)
_TTFT_P90 = Column("TTFT P90", "ttft_p90_s", 1, 2, " s", highest_best=False)
_E2E_P99 = Column("E2E P99", "e2e_p99_s", 1, 0, " s", highest_best=False)
_HIT_RATE = Column("hit rate", "hit_rate", 100, 1)


def _versus(column: Column) -> Cell:
    """The first variant's mean and the best other's for this figure alone."""

    def shown_mean(mean: Mean) -> str:
        return f"{column.factor * mean.value:.{column.digits}f}{column.unit}"

    def cell(result: RateResult) -> str:
        found = Comparison.of(result.values(column.figure), highest_best=column.highest_best)
        return f"{shown_mean(found.own)} / {shown_mean(found.other)} {found.best_other}"

    return cell


def summary_tables(outcome: SuiteResult) -> list[Table]:
    """None for a single variant, which there is nothing to compare with."""
    if len(outcome.variants) < 2:
        return []
    rates = list(dict.fromkeys(result.rate for result in outcome.rates))
    bearable = [rate for rate in rates if not _overloads(rate)]
    tables = [_goodput_table(outcome)] if outcome.goodputs else []
    if bearable:
        tables.append(_loads_table(outcome, bearable))
    tables += [_overload_table(outcome, rate) for rate in rates if _overloads(rate)]
    if bearable:
        tables.append(_estimate_table(outcome, bearable))
    return tables


def _overloads(rate: Rate) -> bool:
    """Whether it is at or above saturation; unknown for requests per second."""
    return rate.of_saturation and rate.value >= 1


def _goodput_table(outcome: SuiteResult) -> Table:
    first = outcome.variants[0].name
    return Table(
        "Goodput",
        ("fleet", first, "best other", "difference", "first in", "sustainable rate", "length"),
        tuple(_goodput_row(result) for result in outcome.goodputs),
        (
            "Requests/s with at least 90 % on time, and the rate that no scheduler can sustain for 90 % of such "
            f"traffic. Length: the trace at the goodput of {first}.",
            _both_note(len(result.bounds) for result in outcome.goodputs),
        ),
    )


def _goodput_row(result: GoodputResult) -> tuple[str, ...]:
    found = Comparison.of(result.goodput_per_s)
    firsts, seeds = Ranking.of(result.goodput_per_s).firsts[found.first], len(result.bounds)
    sustainable = Mean.of([one.sustainable_per_s for one in result.bounds])
    return (
        result.workload.title,
        f"{found.own.value:.2f}",
        f"{found.best_other} {found.other.value:.2f}",
        ABSENT if found.percent is None else f"{_spread(found.percent, sign=True)} %",
        f"{firsts}/{seeds}",
        f"{sustainable.value:.1f}",
        _length(result.workload.requests, found.own.value),
    )


def _length(requests: int, rate_per_s: float) -> str:
    if rate_per_s <= 0:
        return ABSENT
    minutes = requests / rate_per_s / 60
    return f"{minutes:.{0 if minutes >= 10 else 1}f} min"


def _loads_table(outcome: SuiteResult, rates: Sequence[Rate]) -> Table:
    """The share on time at every load, the rest at the last, which is the highest where they stand in order."""
    columns: list[AtLoad] = [(f"{_short(rate)}: on time", rate, _versus(_ON_TIME)) for rate in rates]
    last = rates[-1]
    columns += [(f"{_short(last)}: {one.title}", last, _versus(one)) for one in (_TTFT_P90, _HIT_RATE, _E2E_P99)]
    note = "After the slash the best other variant for that figure alone. Shares in percent, means over the seeds."
    return _table("At fixed loads", columns, outcome, (note,))


def _overload_table(outcome: SuiteResult, rate: Rate) -> Table:
    load = _short(rate)
    columns: list[AtLoad] = [
        (f"{load}: on time", rate, _on_time),
        ("others", rate, _others_on_time),
        ("refused", rate, _refused),
        ("hit rate", rate, _versus(_HIT_RATE)),
        ("longest hold", rate, _longest_hold),
        ("E2E P99", rate, _versus(_E2E_P99)),
    ]
    first = outcome.variants[0].name
    notes = (
        f"On time, refused and longest hold (of all seeds) are those of {first}; others: their least to most on time.",
        _both_note(len(result.rates_per_s) for result in outcome.rates if result.rate == rate),
    )
    return _table(f"At {rate.label}", columns, outcome, notes)


def _estimate_table(outcome: SuiteResult, rates: Sequence[Rate]) -> Table:
    columns: list[AtLoad] = [
        (f"error P50, P90 at {_short(rate)}", rate, lambda result: _quantiles(result, "error_p50", "error_p90"))
        for rate in rates
    ]
    low = rates[0]
    columns += [
        (f"undisturbed at {_short(low)}: share", low, lambda result: f"{_percent(result, 'undisturbed_share')} %"),
        ("P50, P90", low, lambda result: _quantiles(result, "undisturbed_error_p50", "undisturbed_error_p90")),
    ]
    note = (
        f"Expected TTFT of {outcome.variants[0].name}: error relative to the one that came. Undisturbed: requests "
        "whose instance was given no other one before their first token."
    )
    return _table("The estimate", columns, outcome, (note,))


def _table(title: str, columns: Sequence[AtLoad], outcome: SuiteResult, notes: tuple[str, ...]) -> Table:
    results: Mapping[tuple[Workload, Rate], RateResult] = {(one.workload, one.rate): one for one in outcome.rates}
    rows = []
    for workload in outcome.seeds:
        own = [(results.get((workload, rate)), cell) for _, rate, cell in columns]
        if any(result is not None for result, _ in own):
            rows.append((workload.title, *(ABSENT if result is None else cell(result) for result, cell in own)))
    return Table(title, ("fleet", *(column[0] for column in columns)), tuple(rows), notes)


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
