"""Over rates: effective capacity, TTFT, end-to-end time, goodput, and where each policy stands in hits and balance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dualmap.research.evaluate.plan import (
    ABLATIONS,
    CONTENDERS,
    DEFAULT_POLICY,
    PAPER_INSTANCES,
    PAPER_SLO_S,
    Plan,
    Workload,
    policy_title,
    scenario_for,
)
from dualmap.research.evaluate.section import Cell, DataTable, Plot, Section, cell_of
from dualmap.research.evaluate.work import Worker
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation import plots
from dualmap.simulation.bounds import Bounds, bounds_of, short_trace_note
from dualmap.simulation.goodput import ON_TIME_SHARE, GoodputJob, run_goodput
from dualmap.simulation.results import RunResult
from dualmap.simulation.runs import RunJob, run_job

CAPACITY_COLUMNS: tuple[str, ...] = (
    "policy",
    "rate/s",
    "on time %",
    "TTFT P50 s",
    "TTFT P90 s",
    "TTFT P99 s",
    "E2E P50 s",
    "E2E P90 s",
)
CAPACITY_COLUMNS += ("E2E P99 s", "TPOT ms", "hit %", "hit of bound %", "CV", "migrations")


OTHERS: tuple[PolicyName, ...] = tuple(policy for policy in CONTENDERS if policy != "dualmap")
"""The policies of other projects."""


@dataclass(frozen=True, slots=True)
class RateRuns:
    """All policies over all rates of one workload, and the goodput of each."""

    workload: Workload
    runs: Sequence[RunResult]
    goodput_per_s: dict[PolicyName, float]
    bounds: Bounds

    def at(self, factor_index: int, policies: Sequence[str]) -> list[RunResult]:
        """The runs of the policies at one of the rates, in the policies' order."""
        rates = sorted({run.rate_per_s for run in self.runs})
        rate = rates[factor_index]
        by_policy = {run.policy: run for run in self.runs if run.rate_per_s == rate}
        return [by_policy[policy] for policy in policies if policy in by_policy]


def run_rates(plan: Plan, worker: Worker) -> list[RateRuns]:
    """Everything that the sections below show."""
    workloads = plan.workloads()
    jobs = [
        RunJob(workload.source, scenario_for(policy, workload), workload.rate(factor))
        for workload in workloads
        for factor in plan.load_factors
        for policy in plan.policies
    ]
    results = worker.map("policies over rates", run_job, jobs)
    searches = [
        GoodputJob(RunJob(workload.source, scenario_for(policy, workload), _start(workload, policy, results)),
                   tolerance=plan.goodput_tolerance)
        for workload in workloads
        for policy in plan.policies
    ]  # fmt: skip
    found = worker.map("goodput", run_goodput, searches)
    per_workload = len(plan.policies)
    return [
        RateRuns(
            workload,
            [result for result in results if result.labels["workload"] == workload.name],
            dict(
                zip(
                    plan.policies,
                    (goodput.rate_per_s for goodput in found[index * per_workload : (index + 1) * per_workload]),
                    strict=True,
                )
            ),
            bounds_of(workload.source.load(), workload.engine, PAPER_INSTANCES, PAPER_SLO_S,
                      skip=workload.skip_requests),
        )
        for index, workload in enumerate(workloads)
    ]  # fmt: skip


def _start(workload: Workload, policy: str, results: Sequence[RunResult]) -> float:
    """Where the goodput search starts: the last rate that was seen to hold."""
    own = [r for r in results if r.policy == policy and r.labels["workload"] == workload.name]
    holding = [r.rate_per_s for r in own if r.effective_capacity >= ON_TIME_SHARE]
    return max(holding, default=min(r.rate_per_s for r in own) / 1.5)


def capacity_section(measured: Sequence[RateRuns]) -> Section:
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
            DataTable(runs.workload.label, CAPACITY_COLUMNS, [_row(run) for run in runs.runs]) for runs in measured
        ],
        plots=[plot for runs in measured for plot in _rate_plots(runs)],
    )


def _row(run: RunResult) -> list[Cell]:
    return [
        run.policy,
        round(run.rate_per_s, 2),
        100 * run.effective_capacity,
        run.ttft_s.p50,
        run.ttft_s.p90,
        run.ttft_s.p99,
        run.e2e_s.p50,
        run.e2e_s.p90,
        run.e2e_s.p99,
        1000 * run.tpot_s.mean,
        100 * run.hit_rate,
        100 * run.hit_share_of_bound,
        cell_of(run.load_cv),
        run.migrations,
    ]


def _capacity_finding(runs: RateRuns) -> str:
    """DualMap and the default policy beside the best other project at each rate where one of them is late."""
    parts = []
    for index in range(len({run.rate_per_s for run in runs.runs})):
        compared = runs.at(index, ["dualmap", DEFAULT_POLICY])
        if others := runs.at(index, OTHERS):
            compared.append(max(others, key=lambda run: run.effective_capacity))
        if min(run.effective_capacity for run in compared) < 0.99:
            shares = ", ".join(f"{policy_title(run.policy)} {run.effective_capacity:.0%}" for run in compared)
            parts.append(f"{compared[0].rate_per_s:.1f}/s: {shares}")
    return f"{runs.workload.label}: " + ("; ".join(parts) if parts else "all requests are on time at every rate") + "."


def _rate_plots(runs: RateRuns) -> list[Plot]:
    label, results = runs.workload.label, list(runs.runs)
    return [
        Plot(f"{label}: on time", plots.over_rates(results, lambda r: r.effective_capacity, "share on time")),
        Plot(f"{label}: TTFT, P50", plots.over_rates(results, lambda r: r.ttft_s.p50, "P50 TTFT, s", log_y=True)),
        Plot(f"{label}: TTFT", plots.over_rates(results, lambda r: r.ttft_s.p90, "P90 TTFT, s", log_y=True)),
        Plot(f"{label}: end to end, P50", plots.over_rates(results, lambda r: r.e2e_s.p50, "P50 E2E, s", log_y=True)),
        Plot(f"{label}: end to end", plots.over_rates(results, lambda r: r.e2e_s.p90, "P90 E2E, s", log_y=True)),
        Plot(f"{label}: hit rate", plots.over_rates(results, lambda r: r.hit_rate, "hit rate")),
    ]


def goodput_section(plan: Plan, measured: Sequence[RateRuns]) -> Section:
    rows: list[list[Cell]] = []
    findings = []
    for runs in measured:
        goodput = runs.goodput_per_s
        for policy, rate in goodput.items():
            rows.append(
                [runs.workload.label, policy, rate, 100 * rate / goodput["dualmap"] if goodput["dualmap"] else 0]
            )
        findings.append(f"{runs.workload.label}: {goodput_finding(goodput, plan.goodput_tolerance)}")
        above = [policy for policy, rate in goodput.items() if rate > runs.bounds.sustainable_per_s]
        if note := short_trace_note(above):
            findings.append(f"{runs.workload.label}: {note}")
        rows.append([runs.workload.label, "(ideal goodput)", runs.bounds.ideal_goodput_per_s, ""])
        rows.append([runs.workload.label, "(sustainable rate)", runs.bounds.sustainable_per_s, ""])
    return Section(
        name="goodput",
        title="Goodput",
        question=(
            "The highest rate with at least 90 % of TTFTs within the SLO, by bisection. None can pass the ideal "
            "goodput, with ideal hits and perfect balance on the same trace; the sustainable rate is the highest at "
            "which 90 % of such traffic could be on time permanently."
        ),
        findings=findings,
        tables=[DataTable("Goodput", ("workload", "policy", "goodput/s", "of DualMap's %"), rows)],
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


def pareto_section(plan: Plan, measured: Sequence[RateRuns]) -> Section:
    """Hit rate against balance, at the rate nearest 0.85 of what is sustainable."""
    index = min(range(len(plan.load_factors)), key=lambda i: abs(plan.load_factors[i] - 0.85))
    shown: list[Plot] = []
    rows: list[list[Cell]] = []
    for runs in measured:
        at_rate = runs.at(index, plan.policies)
        values = {run.policy: (run.load_cv, run.hit_rate) for run in at_rate if run.load_cv is not None}
        shown.append(
            Plot(runs.workload.label, plots.points(values, x="CV of pending tokens", y="hit rate",
                                                   title=f"{at_rate[0].rate_per_s:.1f} requests/s"))
        )  # fmt: skip
        rows += [[runs.workload.label, run.policy, cell_of(run.load_cv), 100 * run.hit_rate] for run in at_rate]
    return Section(
        name="pareto",
        title="Hit rate against load balance",
        question=(
            "The paper's picture of the trade-off: cache affinity has the hits, least-loaded has the balance (a small "
            "coefficient of variation, CV, of pending tokens over the instances), DualMap is to have both. Up and left "
            "is better. A CV says little while queues are short: moments with less than a step's work an instance are "
            "left out."
        ),
        tables=[DataTable("Hit rate and CV", ("workload", "policy", "CV", "hit %"), rows)],
        plots=shown,
    )


def ablation_section(plan: Plan, measured: Sequence[RateRuns]) -> Section:
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
        tables=[DataTable("Goodput of the variants", ("workload", "variant", "goodput/s"), rows)],
        plots=[
            Plot(
                runs.workload.label,
                plots.over_rates(
                    [run for run in runs.runs if run.policy in ABLATIONS],
                    lambda r: r.effective_capacity,
                    "share on time",
                ),
            )
            for runs in measured
        ],
    )
