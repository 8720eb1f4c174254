"""Tables with every variant: its goodputs under every workload, and who is on time at one rate."""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.research.confidence import Comparison
from dualmap.research.suites.orders import by_order
from dualmap.research.suites.results import Rate, RateResult, SuiteResult
from dualmap.research.suites.suite import MIXED
from dualmap.research.table import ABSENT, Column, Table, shown, titles
from dualmap.research.targets import Target
from dualmap.simulation.figures.mean import Mean

LENGTH_COLUMNS = (
    Column("on time", "on_time", 100, 0),
    Column("by tokens", "on_time_tokens", 100, 0),
    Column("shortest quarter", "on_time_q1", 100, 0),
    Column("second", "on_time_q2", 100, 0),
    Column("third", "on_time_q3", 100, 0),
    Column("longest", "on_time_q4", 100, 0),
    Column("both SLOs", "both_slos", 100, 0),
    Column("refused", "refused", 100, 0),
    Column("of the longest", "refused_q4", 100, 0),
    Column("hit rate", "hit_rate", 100, 0),
    Column("TPOT P50 ms", "tpot_p50_s", 1000, 0),
    Column("P90 ms", "tpot_p90_s", 1000, 0),
)
SPLIT_COLUMNS = (
    Column("TTFT P50 s", "ttft_p50_s", 1, 2),
    Column("TTFT P90 s", "ttft_p90_s", 1, 2),
    Column("TPOT P50 ms", "tpot_p50_s", 1000, 0),
    Column("TPOT P90 ms", "tpot_p90_s", 1000, 0),
    Column("on time", "on_time", 100, 1),
    Column("both SLOs", "both_tight", 100, 1),
    Column("split", "split_share", 100, 0),
    Column("hit rate", "hit_rate", 100, 0),
)
_BY_FLEET = (
    Column("", "ttft_p90_s", 1, 2),
    Column("", "tpot_p90_s", 1000, 0),
    Column("", "both_tight", 100, 1),
)
BEHIND_PERCENT = 1
"""Percent from which a variant counts as behind."""
_LEADS_NOTE = (
    "Percent of the requests on time; the lead over the best other with the same order in percent of its share, seed "
    "by seed, ± its 95 % confidence interval."
)


def overview_tables(outcome: SuiteResult) -> list[Table]:
    """All targets, then all rates; where a fleet has prefill and decode instances, one more for each rate."""
    targets = dict.fromkeys(target for result in outcome.goodputs for target in result.targets)
    rates = dict.fromkeys(result.rate for result in outcome.rates)
    tables = [*(_goodputs(outcome, target) for target in targets), *(_lengths(outcome, rate) for rate in rates)]
    if rates and len(by_order(outcome.variants)) > 1:
        tables.insert(0, _leads(outcome, tuple(rates)))
    if any(variant.options.roles for variant in outcome.variants):
        tables += [table(outcome, rate) for rate in rates for table in (_split, _by_fleet, _seed_by_seed)]
    return tables


def _goodputs(outcome: SuiteResult, target: Target) -> Table:
    results = [result for result in outcome.goodputs if target in result.targets]
    rows = [
        (variant.name, *(shown(Mean.of(result.of(target)[variant.name]), 2) for result in results))
        for variant in outcome.variants
    ]
    columns = ("variant", *(result.workload.title for result in results))
    return Table(f"Every policy: goodput with {target.title}", columns, tuple(rows), ("Requests/s.",))


def _leads(outcome: SuiteResult, rates: Sequence[Rate]) -> Table:
    """The share on time, ours beside the best other with the same order, at every rate: a row a workload and engine."""
    results = {(result.workload, result.rate): result for result in outcome.rates}
    columns, notes = ["workload", "instances"], [_LEADS_NOTE]
    rows = {one: [one.traffic_title, one.instances_title] for one in outcome.seeds}
    for order, names in by_order(outcome.variants).items():
        for rate in rates:
            label = f"{order}, {rate.label.removesuffix(' saturation')}"
            columns += [f"{label}: ours", "best other", "lead"]
            found = {one: _comparison(results.get((one, rate)), names) for one in rows}
            for one, row in rows.items():
                row += _lead_cells(found[one])
            percents = [one.percent for one in found.values() if one is not None]
            notes.append(_behind(label, [percent for percent in percents if percent is not None]))
    title = "On time beside the best other with the same order"
    return Table(title, tuple(columns), tuple(map(tuple, rows.values())), (" ".join(notes),))


def _comparison(result: RateResult | None, names: Sequence[str]) -> Comparison | None:
    return None if result is None else Comparison.of({name: result.values("on_time")[name] for name in names})


def _lead_cells(found: Comparison | None) -> list[str]:
    if found is None:
        return [ABSENT] * 3
    other = f"{100 * found.other.value:.1f} {found.best_other.rsplit(' ', 1)[0]}"
    return [f"{100 * found.own.value:.1f}", other, ABSENT if found.percent is None else _signed(found.percent)]


def _behind(label: str, leads: Sequence[Mean]) -> str:
    behind = [lead for lead in leads if lead.value < -BEHIND_PERCENT]
    certain = sum(lead.value + lead.half_width < 0 for lead in behind)
    mean = f"{Mean.of([lead.value for lead in leads]).value:+.1f} %" if leads else ABSENT
    return (
        f"{label.capitalize()}: behind by more than {BEHIND_PERCENT} % in {len(behind)} of {len(leads)} rows, "
        f"in {certain} of them beyond the spread of the seeds; mean lead {mean}."
    )


def _lengths(outcome: SuiteResult, rate: Rate) -> Table:
    """A workload has a row for the first policy with each order, and for the best other with it; where there is one
    order, for every variant."""
    rows = []
    for result in outcome.rates:
        if result.rate == rate:
            compared = _compared(outcome, result)
            rows += [(result.workload.title, name, *_cells(result, name, LENGTH_COLUMNS)) for name in compared]
    columns = ("fleet", "variant", *titles(LENGTH_COLUMNS))
    note = (
        "Shares in percent of all requests, or of that quarter of them by prompt length. TPOT: time per output token."
    )
    return Table(f"By length of prompts at {rate.label}", columns, tuple(rows), (note,))


def _split(outcome: SuiteResult, rate: Rate) -> Table:
    rows = [
        (result.workload.title, f"{Mean.of(result.rates_per_s).value:.2f}", name, *_cells(result, name, SPLIT_COLUMNS))
        for result in outcome.rates
        if result.rate == rate
        for name in result.figures
    ]
    note = (
        "Both SLOs: on time, and at most 50 ms a token, in percent of all requests, as what follows. Split: had a "
        "decode leg of their own. TTFT of these ends with the first token of the decode instance."
    )
    columns = ("fleet", "requests/s", "variant", *titles(SPLIT_COLUMNS))
    return Table(f"Prefill and decode apart at {rate.label}", columns, tuple(rows), (note,))


def _by_fleet(outcome: SuiteResult, rate: Rate) -> Table:
    """A row for variants of one name, the roles left out; a column for each fleet."""
    fleets = dict.fromkeys(variant.options.roles or MIXED for variant in outcome.variants)
    variants = {
        (variant.name.replace(roles, "").strip(), roles): variant.name
        for variant in outcome.variants
        for roles in [variant.options.roles or MIXED]
    }
    rows = [
        (result.workload.title, row, *(_three(result, variants.get((row, fleet))) for fleet in fleets))
        for result in outcome.rates
        if result.rate == rate
        for row in dict.fromkeys(row for row, _ in variants)
    ]
    note = "P90 TTFT in s / P90 TPOT in ms / percent of all requests on time and within 50 ms a token."
    return Table(f"Fleets at {rate.label}", ("fleet", "variant", *fleets), tuple(rows), (note,))


def _seed_by_seed(outcome: SuiteResult, rate: Rate) -> Table:
    """The first variant of every split that several variants share against the best other, in both figures."""
    sharing: dict[str, list[str]] = {}
    for variant in outcome.variants:
        sharing.setdefault(variant.options.roles or MIXED, []).append(variant.name)
    rows = []
    for result in outcome.rates:
        for names in sharing.values() if result.rate == rate else ():
            if len(names) > 1:
                both, ttft = (result.values(figure) for figure in ("both_tight", "ttft_p90_s"))
                most = Comparison.of({name: both[name] for name in names})
                least = Comparison.of({name: ttft[name] for name in names}, highest_best=False)
                points, percent = _signed(most.points), "" if least.percent is None else _signed(least.percent)
                rows.append((result.workload.title, names[0], points, most.best_other, percent, least.best_other))
    columns = ("fleet", "variant", "both SLOs, points", "against", "P90 TTFT, %", "against")
    note = "Differences seed by seed from the best other over the same instances, ± their 95 % confidence interval."
    return Table(f"Seed by seed at {rate.label}", columns, tuple(rows), (note,))


def _signed(mean: Mean) -> str:
    return f"{mean.value:+.1f} ± {mean.half_width:.1f}"


def _three(result: RateResult, name: str | None) -> str:
    if name is None:
        return ""
    return " / ".join(_cells(result, name, _BY_FLEET))


def _compared(outcome: SuiteResult, result: RateResult) -> list[str]:
    names: list[str] = []
    values = result.values("on_time")
    orders = by_order(outcome.variants)
    if len(orders) < 2:
        return list(values)
    for own in orders.values():
        found = Comparison.of({name: values[name] for name in own})
        names += [found.first, found.best_other]
    return names


def _cells(result: RateResult, name: str, columns: Sequence[Column]) -> list[str]:
    return [column.mean(result.figures[name]) for column in columns]
