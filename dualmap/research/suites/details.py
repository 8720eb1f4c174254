"""Everything that a suite found: two tables or more for each workload, and all of it in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualmap.research.confidence import Comparison, Ranking
from dualmap.research.suites.orders import order_tables
from dualmap.research.suites.results import GoodputResult, RateResult, SuiteResult
from dualmap.research.suites.summary import SUMMARY, summary_tables
from dualmap.research.table import Column, Table, counted, markdown_table, shown, titles
from dualmap.research.targets import MAIN
from dualmap.research.variant import described
from dualmap.simulation.capacity.bounds import Bounds, short_trace_note
from dualmap.simulation.figures.mean import Mean


def first_tables(outcome: SuiteResult) -> list[Table]:
    """The tables that a report begins with: order and placement, then the summary."""
    return [*order_tables(outcome), *summary_tables(outcome)]


def detail_tables(outcome: SuiteResult) -> list[Table]:
    """Each workload's goodput, then its rates."""
    tables = []
    for workload, seeds in outcome.seeds.items():
        tables += [_goodput_table(result) for result in outcome.goodputs if result.workload == workload]
        tables += [_rate_table(result, len(seeds)) for result in outcome.rates if result.workload == workload]
    return tables


def _goodput_table(result: GoodputResult) -> Table:
    ideal = Mean.of([one.ideal_goodput_per_s for one in result.bounds])
    sustainable = Mean.of([one.sustainable_per_s for one in result.bounds])
    ranking = Ranking.of(result.goodput_per_s)
    seeds = len(result.bounds)
    further = [target for target in result.targets if target is not MAIN]
    gap = ("",) * (2 + len(further))
    rows: list[tuple[str, ...]] = [
        (
            name,
            shown(Mean.of(values), 2),
            f"{_ratio(values, result.bounds):.0%}",
            *(shown(Mean.of(result.of(target)[name]), 2) for target in further),
            f"{ranking.firsts[name]}/{seeds}",
        )
        for name, values in result.goodput_per_s.items()
    ]
    rows += [("(ideal goodput)", shown(ideal, 2), *gap), ("(sustainable rate)", shown(sustainable, 2), *gap)]
    above = [name for name, values in result.goodput_per_s.items() if Mean.of(values).value > sustainable.value]
    return Table(
        f"{result.workload.title}: goodput, 90 % on time, {counted(seeds)}",
        ("variant", "requests/s", "of ideal", *(target.title for target in further), "first"),
        tuple(rows),
        (
            _comparison(result.goodput_per_s, "goodput", relative=True),
            _ranking_note(ranking),
            short_trace_note(above),
        ),
    )


def _ratio(values: Sequence[float], bounds: Sequence[Bounds]) -> float:
    return Mean.of([value / one.ideal_goodput_per_s for value, one in zip(values, bounds, strict=True)]).value


RATE_COLUMNS = (
    Column("on time %", "on_time", 100, 1),
    Column("by tokens %", "on_time_tokens", 100, 1),
    Column("shortest quarter %", "on_time_q1", 100, 0),
    Column("second %", "on_time_q2", 100, 0),
    Column("third %", "on_time_q3", 100, 0),
    Column("longest quarter %", "on_time_q4", 100, 0),
    Column("both SLOs %", "both_slos", 100, 1),
    Column("answers/s", "answers_per_s", 1, 2),
    Column("runs/s", "runs_per_s", 1, 2),
    Column("run mean s", "run_mean_s", 1, 0),
    Column("short runs P90 s", "short_run_p90_s", 1, 0),
    Column("refused %", "refused", 100, 1),
    Column("of the longest %", "refused_q4", 100, 0),
    Column("TPOT P50 ms", "tpot_p50_s", 1000, 0),
    Column("TPOT P90 ms", "tpot_p90_s", 1000, 0),
    Column("TTFT P90 s", "ttft_p90_s", 1, 2),
    Column("E2E P99 s", "e2e_p99_s", 1, 0),
    Column("hit %", "hit_rate", 100, 1),
    Column("hold s", "longest_hold_s", 1, 1),
    Column("error P50 %", "error_p50", 100, 0),
    Column("P90 %", "error_p90", 100, 0),
    Column("P50 s", "error_p50_s", 1, 2),
    Column("P90 s", "error_p90_s", 1, 2),
    Column("undisturbed %", "undisturbed_share", 100, 0),
    Column("undisturbed P50 %", "undisturbed_error_p50", 100, 0),
    Column("undisturbed P90 %", "undisturbed_error_p90", 100, 0),
)
"""Columns, those that matter most first."""


def _rate_table(result: RateResult, wanted_seeds: int) -> Table:
    seeds = len(result.rates_per_s)
    ranking = Ranking.of(result.values("on_time"))
    rows = []
    for name, own in result.figures.items():
        cells = (column.spread(own) for column in RATE_COLUMNS)
        rows.append((name, *cells, f"{ranking.firsts[name]}/{seeds}"))
    notes = [
        _comparison(result.values("on_time"), "on time", relative=False),
        _comparison(result.values("ttft_p90_s"), "TTFT P90", relative=True, highest_best=False),
        _comparison(result.values("hit_rate"), "hit rate", relative=False),
        _ranking_note(ranking),
    ]
    if seeds < wanted_seeds:
        notes.append(f"{counted(wanted_seeds - seeds)} left out: there no FIFO policy has 90 % on time at any rate.")
    rate = f"{result.rate.label} ({shown(Mean.of(result.rates_per_s), 2)}/s)" if result.rate.of_saturation else None
    title = f"{result.workload.title}: at {rate or result.rate.label}, {counted(seeds)}"
    columns = ("variant", *titles(RATE_COLUMNS), "first")
    return Table(title, columns, tuple(rows), tuple(filter(None, notes)))


def _comparison(values: Mapping[str, Sequence[float]], what: str, *, relative: bool, highest_best: bool = True) -> str:
    if len(values) < 2:
        return ""
    found = Comparison.of(values, highest_best=highest_best)
    difference = found.percent if relative else found.points
    if difference is None:
        return f"{what}: {found.best_other} is at 0."
    lead = f"{shown(difference, 1, sign=True)} {'%' if relative else 'points'}"
    return f"{what}: {found.first} against the best other, {found.best_other}: {lead}."


def _ranking_note(ranking: Ranking) -> str:
    seeds = len(ranking.orders)
    if ranking.holds:
        order = " > ".join(" = ".join(place) for place in ranking.orders[0])
        return f"The ranking is the same in every seed: {order}."
    firsts = ", ".join(f"{name} in {count}/{seeds}" for name, count in ranking.firsts.items())
    return f"First: {firsts}; the order behind differs between seeds."


def render_markdown(outcome: SuiteResult) -> str:
    lines = ["# Policy laboratory", "", f"Suite `{outcome.suite.name}`. Means over seeds ± 95 % confidence.", ""]
    lines += ["| variant | settings that differ from the defaults |", "| --- | --- |"]
    lines += [
        f"| {variant.name} | {', '.join(f'`{key}={value}`' for key, value in described(variant).items())} |"
        for variant in outcome.variants
    ]
    if outcome.made is not None:
        lines[2:2] = [outcome.made.sentence, ""]
    summary = first_tables(outcome)
    if summary:
        lines += ["", f"## {SUMMARY}"]
    for table in summary:
        lines += markdown_table(table, "###", "---")
    for table in detail_tables(outcome):
        lines += markdown_table(table, "##", "---:")
    return "\n".join(lines) + "\n"
