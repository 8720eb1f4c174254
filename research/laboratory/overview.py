"""Tables with every variant: its goodputs on every fleet, and who is on time at one rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualmap.research.laboratory.confidence import Comparison, Mean
from dualmap.research.laboratory.experiment import Experiment, Rate, RateResult
from dualmap.research.laboratory.orders import by_order
from dualmap.research.laboratory.suite import MIXED
from dualmap.research.laboratory.tables import ReportTable, shown
from dualmap.research.laboratory.targets import Target

LENGTH_COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "on time": ("on_time", 100, 0),
    "by tokens": ("on_time_tokens", 100, 0),
    "shortest quarter": ("on_time_q1", 100, 0),
    "second": ("on_time_q2", 100, 0),
    "third": ("on_time_q3", 100, 0),
    "longest": ("on_time_q4", 100, 0),
    "both SLOs": ("both_slos", 100, 0),
    "refused": ("refused", 100, 0),
    "of the longest": ("refused_q4", 100, 0),
    "hit rate": ("hit_rate", 100, 0),
    "TPOT P50 ms": ("tpot_p50_s", 1000, 0),
    "P90 ms": ("tpot_p90_s", 1000, 0),
}


SPLIT_COLUMNS: Mapping[str, tuple[str, float, int]] = {
    "TTFT P50 s": ("ttft_p50_s", 1, 2),
    "TTFT P90 s": ("ttft_p90_s", 1, 2),
    "TPOT P50 ms": ("tpot_p50_s", 1000, 0),
    "TPOT P90 ms": ("tpot_p90_s", 1000, 0),
    "on time": ("on_time", 100, 1),
    "both SLOs": ("both_tight", 100, 1),
    "split": ("split_share", 100, 0),
    "hit rate": ("hit_rate", 100, 0),
}

BEHIND_PERCENT = 1
"""What counts as behind."""
_LEADS_NOTE = (
    "Percent of the requests on time; the lead over the best other with the same order in percent of its share, seed "
    "by seed, ± its 95 % confidence interval."
)
_ABSENT = "–"


def overview_tables(experiment: Experiment) -> list[ReportTable]:
    """All targets, then all rates; where a fleet has prefill and decode instances, one more for each rate."""
    targets = dict.fromkeys(target for result in experiment.goodputs for target in result.targets)
    rates = dict.fromkeys(result.rate for result in experiment.rates)
    tables = [*(_goodputs(experiment, target) for target in targets), *(_lengths(experiment, rate) for rate in rates)]
    if rates and len(by_order(experiment.variants)) > 1:
        tables.insert(0, _leads(experiment, tuple(rates)))
    if any(variant.options.roles for variant in experiment.variants):
        tables += [table(experiment, rate) for rate in rates for table in (_split, _by_fleet, _seed_by_seed)]
    return tables


def _goodputs(experiment: Experiment, target: Target) -> ReportTable:
    results = [result for result in experiment.goodputs if target in result.targets]
    rows = [
        (variant.name, *(shown(Mean.of(result.of(target)[variant.name]), 2) for result in results))
        for variant in experiment.variants
    ]
    columns = ("variant", *(result.fleet.title for result in results))
    return ReportTable(f"Every policy: goodput with {target.title}", columns, tuple(rows), ("Requests/s.",))


def _leads(experiment: Experiment, rates: Sequence[Rate]) -> ReportTable:
    """On time, ours beside the best other with the same order, at every rate: a row a workload and engine."""
    results = {(result.fleet, result.rate): result for result in experiment.rates}
    columns, notes = ["workload", "instances"], [_LEADS_NOTE]
    rows = {fleet: [fleet.workload_title, fleet.instances_title] for fleet in experiment.seeds}
    for order, names in by_order(experiment.variants).items():
        for rate in rates:
            label = f"{order}, {rate.label.removesuffix(' saturation')}"
            columns += [f"{label}: ours", "best other", "lead"]
            found = {fleet: _comparison(results.get((fleet, rate)), names) for fleet in rows}
            for fleet, row in rows.items():
                row += _lead_cells(found[fleet])
            percents = [one.percent for one in found.values() if one is not None]
            notes.append(_behind(label, [percent for percent in percents if percent is not None]))
    title = "On time beside the best other with the same order"
    return ReportTable(title, tuple(columns), tuple(map(tuple, rows.values())), (" ".join(notes),))


def _comparison(result: RateResult | None, names: Sequence[str]) -> Comparison | None:
    return None if result is None else Comparison.of({name: result.values("on_time")[name] for name in names})


def _lead_cells(found: Comparison | None) -> list[str]:
    if found is None:
        return [_ABSENT] * 3
    other = f"{100 * found.other.value:.1f} {found.best_other.rsplit(' ', 1)[0]}"
    return [f"{100 * found.own.value:.1f}", other, _ABSENT if found.percent is None else _signed(found.percent)]


def _behind(label: str, leads: Sequence[Mean]) -> str:
    behind = [lead for lead in leads if lead.value < -BEHIND_PERCENT]
    certain = sum(lead.value + lead.half_width < 0 for lead in behind)
    mean = f"{Mean.of([lead.value for lead in leads]).value:+.1f} %" if leads else _ABSENT
    return (
        f"{label.capitalize()}: behind by more than {BEHIND_PERCENT} % in {len(behind)} of {len(leads)} rows, "
        f"in {certain} of them beyond the spread of the seeds; mean lead {mean}."
    )


def _lengths(experiment: Experiment, rate: Rate) -> ReportTable:
    """A fleet has a row for the first policy with each order, and for the best other with it; where there is one order,
    for every variant."""
    rows = []
    for result in experiment.rates:
        if result.rate == rate:
            compared = _compared(experiment, result)
            rows += [(result.fleet.title, name, *_cells(result, name, LENGTH_COLUMNS)) for name in compared]
    columns = ("fleet", "variant", *LENGTH_COLUMNS)
    note = (
        "Shares in percent of all requests, or of that quarter of them by prompt length. TPOT: time per output token."
    )
    return ReportTable(f"By length of prompts at {rate.label}", columns, tuple(rows), (note,))


def _split(experiment: Experiment, rate: Rate) -> ReportTable:
    rows = [
        (result.fleet.title, f"{Mean.of(result.rates_per_s).value:.2f}", name, *_cells(result, name, SPLIT_COLUMNS))
        for result in experiment.rates
        if result.rate == rate
        for name in result.figures
    ]
    note = (
        "Both SLOs: on time, and at most 50 ms a token, in percent of all requests, as what follows. Split: had a "
        "decode leg of their own. TTFT of these ends with the first token of the decode instance."
    )
    columns = ("fleet", "requests/s", "variant", *SPLIT_COLUMNS)
    return ReportTable(f"Prefill and decode apart at {rate.label}", columns, tuple(rows), (note,))


def _by_fleet(experiment: Experiment, rate: Rate) -> ReportTable:
    """A row for variants of one name, the roles left out; a column for each fleet."""
    fleets = dict.fromkeys(variant.options.roles or MIXED for variant in experiment.variants)
    variants = {
        (variant.name.replace(roles, "").strip(), roles): variant.name
        for variant in experiment.variants
        for roles in [variant.options.roles or MIXED]
    }
    rows = [
        (result.fleet.title, row, *(_three(result, variants.get((row, fleet))) for fleet in fleets))
        for result in experiment.rates
        if result.rate == rate
        for row in dict.fromkeys(row for row, _ in variants)
    ]
    note = "P90 TTFT in s / P90 TPOT in ms / percent of all requests on time and within 50 ms a token."
    return ReportTable(f"Fleets at {rate.label}", ("fleet", "variant", *fleets), tuple(rows), (note,))


def _seed_by_seed(experiment: Experiment, rate: Rate) -> ReportTable:
    """Of every split that several variants share: the first of them against the best other, in both figures."""
    sharing: dict[str, list[str]] = {}
    for variant in experiment.variants:
        sharing.setdefault(variant.options.roles or MIXED, []).append(variant.name)
    rows = []
    for result in experiment.rates:
        for names in sharing.values() if result.rate == rate else ():
            if len(names) > 1:
                both, ttft = (result.values(figure) for figure in ("both_tight", "ttft_p90_s"))
                most = Comparison.of({name: both[name] for name in names})
                least = Comparison.of({name: ttft[name] for name in names}, highest_best=False)
                points, percent = _signed(most.points), "" if least.percent is None else _signed(least.percent)
                rows.append((result.fleet.title, names[0], points, most.best_other, percent, least.best_other))
    columns = ("fleet", "variant", "both SLOs, points", "against", "P90 TTFT, %", "against")
    note = "Differences seed by seed from the best other over the same instances, ± their 95 % confidence interval."
    return ReportTable(f"Seed by seed at {rate.label}", columns, tuple(rows), (note,))


def _signed(mean: Mean) -> str:
    return f"{mean.value:+.1f} ± {mean.half_width:.1f}"


def _three(result: RateResult, name: str | None) -> str:
    if name is None:
        return ""
    figures = (("ttft_p90_s", 1, 2), ("tpot_p90_s", 1000, 0), ("both_tight", 100, 1))
    return " / ".join(_cells(result, name, {figure: (figure, by, digits) for figure, by, digits in figures}))


def _compared(experiment: Experiment, result: RateResult) -> list[str]:
    names: list[str] = []
    values = result.values("on_time")
    orders = by_order(experiment.variants)
    if len(orders) < 2:
        return list(values)
    for own in orders.values():
        found = Comparison.of({name: values[name] for name in own})
        names += [found.first, found.best_other]
    return names


def _cells(result: RateResult, name: str, columns: Mapping[str, tuple[str, float, int]]) -> list[str]:
    own = result.figures[name]
    return [
        f"{Mean.of([factor * getattr(one, figure) for one in own]).value:.{digits}f}"
        for figure, factor, digits in columns.values()
    ]
