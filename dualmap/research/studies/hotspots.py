"""The load of each instance over time: how hot the hottest gets, and how even the rest is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from dualmap.research.bench import Bench
from dualmap.research.report import Plot, Section
from dualmap.research.studies.plan import DEFAULT_POLICY, Plan, policy_title, variant_of
from dualmap.research.table import Cell, Table
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.results import RunResult

POLICIES: tuple[PolicyName, ...] = ("cache-affinity", "least-loaded", "dualmap-no-rebalance", "dualmap", DEFAULT_POLICY)
LOAD = 0.75
"""Part of what the instances sustain: one ring has hot spots here, a balanced fleet has not."""
COLUMNS = 120
"""Moments of a heat map at most."""


def hotspot_section(plan: Plan, bench: Bench) -> Section:
    workload = plan.workload("toolagent")
    rate_per_s = plan.rate(workload, LOAD)
    runs = [plan.run(workload, variant_of(policy), rate_per_s) for policy in POLICIES]
    results = bench.results("hot spots", runs)
    highest = max((max(sample.pending_tokens) for run in results for sample in run.samples), default=1)
    return Section(
        name="hotspots",
        title="Pending tokens of the instances over time",
        question=(
            "One ring sends all requests of a popular prefix to one instance, which becomes hot; two choices and "
            "rebalancing are to keep its queue near the others'. Tool&Agent, 7B, at 0.75 of the rate that is "
            "sustainable for all requests."
        ),
        tables=[
            Table(
                "Pending tokens of an instance",
                ("policy", "mean", "of the hottest, mean", "of the hottest, most", "CV", "on time %", "hit %"),
                [_row(run) for run in results],
            )
        ],
        plots=[
            Plot("pending tokens of the fleet", _over_time(results, lambda pending: sum(pending), "pending tokens")),
            Plot("the hottest instance", _over_time(results, lambda pending: max(pending), "pending tokens")),
            Plot("CV of pending tokens", _cv_over_time(results)),
            *(Plot(f"heat map: {policy_title(run.policy)}", _heat_map(run, highest)) for run in results),
        ],
    )


def _row(run: RunResult) -> list[Cell]:
    hottest = [max(sample.pending_tokens) for sample in run.samples] or [0]
    mean = fmean([fmean(sample.pending_tokens) for sample in run.samples] or [0.0])
    on_time, hits = 100 * run.effective_capacity, 100 * run.hit_rate
    return [run.policy, mean, fmean(hottest), max(hottest), "-" if run.load_cv is None else run.load_cv, on_time, hits]


def _over_time(results: Sequence[RunResult], of: plots.OfPending, y: str) -> str:
    series = {
        run.policy: ([s.time_s for s in run.samples], [float(of(s.pending_tokens)) for s in run.samples])
        for run in results
    }
    return plots.lines(series, x="time, s", y=y, markers=False)


def _cv_over_time(results: Sequence[RunResult]) -> str:
    series = {run.policy: ([s.time_s for s in run.samples], [s.cv for s in run.samples]) for run in results}
    return plots.lines(series, x="time, s", y="CV of pending tokens", markers=False)


def _heat_map(run: RunResult, highest: int) -> str:
    """An instance a row, the mean of some seconds a column."""
    samples = run.samples
    step = max(1, len(samples) // COLUMNS)
    spans = [samples[at : at + step] for at in range(0, len(samples), step)]
    instances = len(samples[0].pending_tokens) if samples else 1
    rows = [[fmean(one.pending_tokens[index] for one in span) for span in spans] for index in range(instances)]
    return plots.heat(rows or [[0.0]], x="time, s", y="instance", label="pending tokens", highest=highest, width_s=step)
