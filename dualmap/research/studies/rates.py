"""Figures over rates: effective capacity, TTFT, end-to-end time, goodput, and where each policy stands in hits and
balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dualmap.research.bench import Bench
from dualmap.research.figures import Figures
from dualmap.research.report import Plot, Section
from dualmap.research.studies.plan import (
    ABLATIONS,
    CONTENDERS,
    DEFAULT_POLICY,
    PAPER_SLO_S,
    Plan,
    policy_title,
    variant_of,
)
from dualmap.research.table import Cell, Column, Table, titles
from dualmap.research.targets import BOTH, MAIN
from dualmap.research.workload import Workload
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.capacity.bounds import Bounds, short_trace_note
from dualmap.simulation.capacity.goodput import ON_TIME_SHARE
from dualmap.simulation.figures import plots

CAPACITY_COLUMNS = (
    Column("on time %", "on_time", 100),
    Column("both SLOs %", "both_slos", 100),
    Column("TTFT P50 s", "ttft_p50_s"),
    Column("TTFT P90 s", "ttft_p90_s"),
    Column("TTFT P99 s", "ttft_p99_s"),
    Column("E2E P50 s", "e2e_p50_s"),
    Column("E2E P90 s", "e2e_p90_s"),
    Column("E2E P99 s", "e2e_p99_s"),
    Column("TPOT ms", "tpot_mean_s", 1000),
    Column("hit %", "hit_rate", 100),
    Column("hit of bound %", "hit_share_of_bound", 100),
    Column("CV", "load_cv"),
    Column("migrations", "migrations"),
)
PARETO_COLUMNS = (Column("CV", "load_cv"), Column("hit %", "hit_rate", 100))
OTHERS: tuple[PolicyName, ...] = tuple(policy for policy in CONTENDERS if policy != "dualmap")
"""The policies of other projects."""


Done = tuple[str, Figures]
"""A policy, and what its run found."""


@dataclass(frozen=True, slots=True)
class RateRuns:
    """All policies over all rates of one workload, and the goodput of each."""

    workload: Workload
    runs: Sequence[Done]
    goodput_per_s: Mapping[PolicyName, float]
    both_per_s: Mapping[PolicyName, float]
    """Goodput with 90 % within both SLOs; empty: it was not searched."""
    bounds: Bounds

    @property
    def rates(self) -> list[float]:
        return sorted({figures.rate_per_s for _, figures in self.runs})

    def at(self, factor_index: int, policies: Sequence[str]) -> list[Done]:
        """The runs of the policies at one of the rates, in the policies' order."""
        rate = self.rates[factor_index]
        by_policy = {policy: figures for policy, figures in self.runs if figures.rate_per_s == rate}
        return [(policy, by_policy[policy]) for policy in policies if policy in by_policy]


@lru_cache(maxsize=1)
def run_rates(plan: Plan, bench: Bench) -> tuple[RateRuns, ...]:
    """The runs that the sections below show, made once for all that ask."""
    workloads = plan.workloads()
    runs = [
        plan.run(workload, variant_of(policy), plan.rate(workload, factor))
        for workload in workloads
        for factor in plan.load_factors
        for policy in plan.policies
    ]
    done: dict[Workload, list[Done]] = {workload: [] for workload in workloads}
    for run, figures in zip(runs, bench.figures("policies over rates", runs), strict=True):
        done[run.workload].append((run.variant.name, figures))
    targets = (MAIN,) if plan.slo_tpot_s is None else (MAIN, BOTH)
    searches = [
        plan.search(workload, variant_of(policy), _start_per_s(_of(policy, done[workload])), targets)
        for workload in workloads
        for policy in plan.policies
    ]
    goodputs: dict[Workload, dict[PolicyName, float]] = {workload: {} for workload in workloads}
    both: dict[Workload, dict[PolicyName, float]] = {workload: {} for workload in workloads}
    for search, (goodput, *further) in zip(searches, bench.goodputs("goodput", searches), strict=True):
        policy, workload = search.run.variant.scheduling.policy, search.run.workload
        goodputs[workload][policy] = goodput
        if further:
            both[workload][policy] = further[0]
    return tuple(
        RateRuns(workload, done[workload], goodputs[workload], both[workload], plan.bounds(workload, PAPER_SLO_S))
        for workload in workloads
    )


def _of(policy: str, done: Sequence[Done]) -> list[Figures]:
    return [figures for name, figures in done if name == policy]


def _start_per_s(own: Sequence[Figures]) -> float:
    """The rate at which the goodput search starts: the last one that was seen to hold."""
    holding = [one.rate_per_s for one in own if one.on_time >= ON_TIME_SHARE]
    return max(holding, default=min(one.rate_per_s for one in own) / 1.5)


def capacity_section(plan: Plan, bench: Bench) -> Section:
    measured = run_rates(plan, bench)
    return Section(
        name="capacity",
        title="Effective request capacity, TTFT and end-to-end time over rates",
        question=(
            "The paper reports up to 2.25 times the effective request capacity of the best other work at the same TTFT "
            "SLO. Effective capacity is the share of requests whose first token came within 5 s of arrival. Rates are "
            "arrivals per second over 8 instances."
        ),
        findings=[*map(_capacity_finding, measured)],
        tables=[
            Table(
                runs.workload.label,
                ("policy", "rate/s", *titles(CAPACITY_COLUMNS)),
                [_row(*run) for run in runs.runs],
            )
            for runs in measured
        ],
        plots=[plot for runs in measured for plot in _rate_plots(runs)],
    )


def _row(policy: str, figures: Figures) -> list[Cell]:
    numbers = (column.number(figures) for column in CAPACITY_COLUMNS)
    return [policy, round(figures.rate_per_s, 2), *numbers]


def _capacity_finding(runs: RateRuns) -> str:
    """DualMap and the default policy beside the best other project at each rate where one of them is late."""
    parts = []
    for index, rate_per_s in enumerate(runs.rates):
        compared = runs.at(index, ["dualmap", DEFAULT_POLICY])
        if others := runs.at(index, OTHERS):
            compared.append(max(others, key=lambda run: run[1].on_time))
        if min(own.on_time for _, own in compared) < 0.99:
            shares = ", ".join(f"{policy_title(policy)} {own.on_time:.0%}" for policy, own in compared)
            parts.append(f"{rate_per_s:.1f}/s: {shares}")
    return f"{runs.workload.label}: " + ("; ".join(parts) if parts else "all requests are on time at every rate") + "."


def _rate_plots(runs: RateRuns) -> list[Plot]:
    label, done = runs.workload.label, runs.runs
    return [
        Plot(f"{label}: on time", _over_rates(done, "on_time", "share on time")),
        Plot(f"{label}: TTFT, P50", _over_rates(done, "ttft_p50_s", "P50 TTFT, s", log_y=True)),
        Plot(f"{label}: TTFT", _over_rates(done, "ttft_p90_s", "P90 TTFT, s", log_y=True)),
        Plot(f"{label}: end to end, P50", _over_rates(done, "e2e_p50_s", "P50 E2E, s", log_y=True)),
        Plot(f"{label}: end to end", _over_rates(done, "e2e_p90_s", "P90 E2E, s", log_y=True)),
        Plot(f"{label}: hit rate", _over_rates(done, "hit_rate", "hit rate")),
    ]


def _over_rates(done: Sequence[Done], figure: str, y: str, *, log_y: bool = False) -> str:
    """One line a policy over the arrival rate."""
    series: dict[str, plots.Series] = {}
    for policy in dict.fromkeys(policy for policy, _ in done):
        own = sorted((figures.rate_per_s, getattr(figures, figure)) for name, figures in done if name == policy)
        series[policy] = ([rate for rate, _ in own], [value for _, value in own])
    return plots.lines(series, x="requests/s", y=y, log_y=log_y)


def goodput_section(plan: Plan, bench: Bench) -> Section:
    measured = run_rates(plan, bench)
    rows: list[list[Cell]] = []
    findings = []
    for runs in measured:
        goodput = runs.goodput_per_s
        for policy, rate in goodput.items():
            relative = 100 * rate / goodput["dualmap"] if goodput["dualmap"] else 0
            rows.append([runs.workload.label, policy, rate, relative, runs.both_per_s.get(policy, "")])
        findings.append(f"{runs.workload.label}: {goodput_finding(goodput, plan.goodput_tolerance)}")
        above = [policy for policy, rate in goodput.items() if rate > runs.bounds.sustainable_per_s]
        if note := short_trace_note(above):
            findings.append(f"{runs.workload.label}: {note}")
        rows.append([runs.workload.label, "(ideal goodput)", runs.bounds.ideal_goodput_per_s, "", ""])
        rows.append([runs.workload.label, "(sustainable rate)", runs.bounds.sustainable_per_s, "", ""])
    return Section(
        name="goodput",
        title="Goodput",
        question=(
            "The highest rate with at least 90 % of TTFTs within the SLO, by bisection; with --slo-tpot-ms also that "
            "with 90 % of the requests within both SLOs. None can pass the ideal "
            "goodput, with ideal hits and perfect balance on the same trace; the sustainable rate is the highest at "
            "which 90 % of such traffic could be on time permanently."
        ),
        findings=findings,
        tables=[Table("Goodput", ("workload", "policy", "goodput/s", "of DualMap's %", "both SLOs/s"), rows)],
        plots=[
            Plot(
                runs.workload.label,
                plots.bars(
                    {str(policy): rate for policy, rate in runs.goodput_per_s.items()}, y="requests/s",
                    levels={"sustainable rate": runs.bounds.sustainable_per_s},
                ),
            )
            for runs in measured
        ],
    )  # fmt: skip


def goodput_finding(goodput: Mapping[PolicyName, float], resolution: float) -> str:
    """DualMap, and the default policy, against the best of the other projects' policies.

    ``resolution`` is the search's: what differs by less, relatively, is level.
    """
    ours = [policy for policy in ("dualmap", DEFAULT_POLICY) if policy in goodput]
    others = [policy for policy in OTHERS if policy in goodput]
    if not others:
        figures = ", ".join(f"{policy_title(policy)} {goodput[policy]:.2f}/s" for policy in ours)
        return f"{figures}; no other project's policy was run."
    best = max(others, key=lambda policy: goodput[policy])
    verdicts = "; ".join(_verdict(policy_title(policy), goodput[policy], goodput[best], resolution) for policy in ours)
    return f"The best other project's policy is {best} with {goodput[best]:.2f}/s. {verdicts}."


def _verdict(name: str, ours: float, theirs: float, resolution: float) -> str:
    if _level(ours, theirs, resolution):
        verb = "is level with it"
    else:
        verb = "wins over it" if ours > theirs else "loses to it"
    ratio = f" ({ours / theirs - 1:+.1%})" if theirs else ""
    return f"{name} {verb}: {ours:.2f}/s{ratio}"


def _level(one: float, other: float, resolution: float) -> bool:
    return abs(one - other) <= resolution * max(one, other)


def pareto_section(plan: Plan, bench: Bench) -> Section:
    """Hit rate against balance, at the rate nearest 0.85 of what is sustainable."""
    measured = run_rates(plan, bench)
    index = min(range(len(plan.load_factors)), key=lambda i: abs(plan.load_factors[i] - 0.85))
    shown: list[Plot] = []
    rows: list[list[Cell]] = []
    for runs in measured:
        at_rate = runs.at(index, plan.policies)
        values = {policy: (own.load_cv, own.hit_rate) for policy, own in at_rate if own.load_cv is not None}
        shown.append(
            Plot(runs.workload.label, plots.points(values, x="CV of pending tokens", y="hit rate",
                                                   title=f"{runs.rates[index]:.1f} requests/s"))
        )  # fmt: skip
        rows += [
            [runs.workload.label, policy, *(column.number(own) for column in PARETO_COLUMNS)] for policy, own in at_rate
        ]
    return Section(
        name="pareto",
        title="Hit rate against load balance",
        question=(
            "The paper's picture of the trade-off: cache affinity has the hits, least-loaded has the balance (a small "
            "coefficient of variation, CV, of pending tokens over the instances), DualMap is to have both. Up and left "
            "is better. A CV says little while queues are short: moments with less than a step's work an instance are "
            "left out."
        ),
        tables=[Table("Hit rate and CV", ("workload", "policy", *titles(PARETO_COLUMNS)), rows)],
        plots=shown,
    )


def ablation_section(plan: Plan, bench: Bench) -> Section:
    measured = run_rates(plan, bench)
    rows: list[list[Cell]] = []
    findings = []
    for runs in measured:
        goodput = {policy: runs.goodput_per_s[policy] for policy in ABLATIONS if policy in runs.goodput_per_s}
        rows += [[runs.workload.label, policy, rate] for policy, rate in goodput.items()]
        highest = max(goodput.values())
        best = [policy for policy, rate in goodput.items() if _level(rate, highest, plan.goodput_tolerance)]
        findings.append(f"{runs.workload.label}: highest goodput of the variants: {', '.join(best)}.")
    return Section(
        name="ablation",
        title="Ablation",
        question=(
            "Within the candidate pair: the larger hit at any load, the smaller load at any hit, the "
            "smaller TTFT, the SLO-aware choice without rebalancing, and all of DualMap."
        ),
        findings=findings,
        tables=[Table("Goodput of the variants", ("workload", "variant", "goodput/s"), rows)],
        plots=[
            Plot(
                runs.workload.label,
                _over_rates([run for run in runs.runs if run[0] in ABLATIONS], "on_time", "share on time"),
            )
            for runs in measured
        ],
    )
