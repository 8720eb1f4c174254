"""The fleet changes size: under overload, under slack, and from 8 to 32 instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dualmap.research.evaluate.plan import DEFAULT_POLICY, Plan, Workload, policy_title, scenario_for
from dualmap.research.evaluate.section import Cell, DataTable, Plot, Section, cell_of
from dualmap.research.evaluate.work import Worker
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation import plots
from dualmap.simulation.goodput import GoodputJob, run_goodput
from dualmap.simulation.results import RunResult
from dualmap.simulation.runs import RunJob, run_job
from dualmap.simulation.scenario import FleetChange

POLICIES: tuple[PolicyName, ...] = (
    "dualmap",
    DEFAULT_POLICY,
    "cache-affinity",
    "least-loaded",
    "min-ttft",
    "preble",
    "llm-d",
)
GOODPUT_POLICIES: tuple[PolicyName, ...] = ("dualmap", DEFAULT_POLICY, "least-loaded", "preble")
SCALE_UP_LOAD = 0.7
"""Part of what 8 instances sustain: too much for 4."""
SCALE_DOWN_LOAD = 0.35
"""Little enough for 4."""
SCALABILITY_LOAD = 0.8
DRAIN_GAP_S = 20.0
_Changes = Callable[[float], tuple[FleetChange, ...]]


def elasticity_section(plan: Plan, worker: Worker) -> Section:
    """4 to 8 instances a third into an overload; 8 to 4, one at a time, a third into slack."""
    workload = plan.workload("toolagent", "qwen2.5-7b-910b4", plan.scaling_requests)
    up = _change_jobs(workload, SCALE_UP_LOAD, 4, lambda at_s: (FleetChange(at_s, 8),))
    down = _change_jobs(
        workload, SCALE_DOWN_LOAD, 8,
        lambda at_s: tuple(FleetChange(at_s + step * DRAIN_GAP_S, 7 - step) for step in range(4)),
    )  # fmt: skip
    results = worker.map("scaling", run_job, up + down)
    grown, shrunk = results[: len(up)], results[len(up) :]
    return Section(
        name="elasticity",
        title="Scaling up and down",
        question=(
            "With dual hash rings only the keys next to the changed anchors move, so a fleet is to recover at once "
            "when instances join under overload, and to lose little when they leave under slack. Here 4 instances "
            "become 8 after a third of an overload, and 8 become 4, one every 20 s, after a third of a slack period; "
            "new instances start cold."
        ),
        findings=[_elastic_finding("Scale-up 4 to 8", grown), _elastic_finding("Scale-down 8 to 4", shrunk)],
        tables=[
            DataTable(title, ("policy", "on time before %", "on time after %", "P90 TTFT after s", "hit %"), rows)
            for title, rows in (("4 to 8", _before_after(grown)), ("8 to 4", _before_after(shrunk)))
        ],
        plots=[
            Plot("4 to 8: share on time", _over_time(grown, 1, "share on time")),
            Plot("4 to 8: P90 TTFT", _over_time(grown, 2, "P90 TTFT, s", log_y=True)),
            Plot("8 to 4: share on time", _over_time(shrunk, 1, "share on time")),
            Plot("8 to 4: P90 TTFT", _over_time(shrunk, 2, "P90 TTFT, s", log_y=True)),
            *(
                plot
                for run in grown
                if run.policy in ("dualmap", DEFAULT_POLICY)
                for plot in by_instance_plots(f"4 to 8, {policy_title(run.policy)}", run)
            ),
        ],
    )


def _change_jobs(workload: Workload, load: float, instances: int, changes: _Changes) -> list[RunJob]:
    rate = workload.rate(load)
    span_s = len(workload.source.load().requests) / rate
    return [
        RunJob(
            workload.source,
            replace(scenario_for(policy, workload, instances), changes=changes(span_s / 3), skip_requests=0),
            rate,
        )
        for policy in POLICIES
    ]


def _before_after(results: Sequence[RunResult]) -> list[list[Cell]]:
    """On time in the first third, before the change, and in the last third."""
    rows: list[list[Cell]] = []
    for result in results:
        third = len(result.timeline) // 3
        before, after = result.timeline[:third], result.timeline[-third:]
        rows.append(
            [
                result.policy,
                100 * _mean([share for _, share, _ in before]),
                100 * _mean([share for _, share, _ in after]),
                _mean([p90 for _, _, p90 in after]),
                100 * result.hit_rate,
            ]
        )
    return rows


def _elastic_finding(title: str, results: Sequence[RunResult]) -> str:
    rows = {str(row[0]): row for row in _before_after(results)}
    ours = " and ".join(
        f"{policy_title(policy)} {float(rows[policy][1]):.0f} % on time before and "
        f"{float(rows[policy][2]):.0f} % in the last third"
        for policy in ("dualmap", DEFAULT_POLICY)
    )
    best = max(rows.values(), key=lambda row: float(row[2]))
    return f"{title}: {ours}; best then: {best[0]} with {float(best[2]):.0f} %."


def _over_time(results: Sequence[RunResult], column: int, y: str, *, log_y: bool = False) -> str:
    series = {
        result.policy: ([point[0] for point in result.timeline], [point[column] for point in result.timeline])
        for result in results
    }
    return plots.lines(series, x="time, s", y=y, log_y=log_y, markers=False)


def by_instance_plots(title: str, run: RunResult) -> list[Plot]:
    """What each instance got while the fleet changed its size."""
    figures = ((1, "requests", "requests"), (2, "hit rate", "hit rate"))
    return [
        Plot(
            f"{title}: {name} per instance",
            plots.lines(
                {
                    instance_id: ([point[0] for point in own], [point[column] for point in own])
                    for instance_id, own in run.by_instance.items()
                },
                x="time, s", y=y, markers=False,
            ),
        )
        for column, name, y in figures
    ]  # fmt: skip


def scalability_section(plan: Plan, worker: Worker) -> Section:
    """The same load per instance on more instances."""
    jobs, sizes = [], []
    for instances in plan.scalability:
        workload = plan.workload("toolagent", "qwen2.5-7b-910b4", instances * plan.requests_per_instance)
        rate = workload.rate(SCALABILITY_LOAD, instances)
        for policy in POLICIES:
            jobs.append(RunJob(workload.source, scenario_for(policy, workload, instances), rate))
            sizes.append(instances)
    results = worker.map("scalability", run_job, jobs)
    goodputs = _goodput_by_size(plan, worker)
    rows: list[list[Cell]] = [
        [size, result.policy, result.rate_per_s, 100 * result.effective_capacity, result.ttft_s.p50, result.ttft_s.p90,
         100 * result.hit_rate, cell_of(result.load_cv)]
        for size, result in zip(sizes, results, strict=True)
    ]  # fmt: skip
    shown = []
    for title, column in (("share on time, %", 3), ("P90 TTFT, s", 5), ("hit rate, %", 6)):
        series: dict[str, plots.Series] = {
            policy: (
                [float(row[0]) for row in rows if row[1] == policy],
                [float(row[column]) for row in rows if row[1] == policy],
            )
            for policy in POLICIES
        }
        shown.append(Plot(title, plots.lines(series, x="instances", y=title)))
    return Section(
        name="scalability",
        title="Scalability",
        question=(
            "Requests and rate grow with the number of instances (the paper: 8K requests on 8 to 32K on 32); a method "
            "that scales keeps its figures. DualMap looks at two instances, the fleet-wide policies at all."
        ),
        tables=[
            DataTable(
                "Tool&Agent, 7B, at 0.8 of the rate that is sustainable for all requests",
                ("instances", "policy", "rate/s", "on time %", "TTFT P50 s", "TTFT P90 s", "hit %", "CV"),
                rows,
            ),
            DataTable("Goodput by number of instances", ("instances", "policy", "goodput/s", "per instance"), goodputs),
        ],
        plots=[*shown, _goodput_plot(goodputs)],
        data={
            "key_blocks": {
                str(size): dict(result.key_blocks)
                for size, result in zip(sizes, results, strict=True)
                if result.policy == "dualmap"
            }
        },
    )


def _goodput_by_size(plan: Plan, worker: Worker) -> list[list[Cell]]:
    """Of the policies in the plan; the search starts where the table above is."""
    searched, jobs = [], []
    for instances in plan.scalability:
        workload = plan.workload("toolagent", "qwen2.5-7b-910b4", instances * plan.requests_per_instance)
        start = workload.rate(SCALABILITY_LOAD, instances)
        for policy in GOODPUT_POLICIES:
            if policy in plan.policies:
                job = RunJob(workload.source, scenario_for(policy, workload, instances), start)
                jobs.append(GoodputJob(job, tolerance=plan.goodput_tolerance))
                searched.append((instances, policy))
    found = worker.map("goodput by size", run_goodput, jobs)
    return [
        [instances, policy, goodput.rate_per_s, goodput.rate_per_s / instances]
        for (instances, policy), goodput in zip(searched, found, strict=True)
    ]


def _goodput_plot(rows: Sequence[Sequence[Cell]]) -> Plot:
    series: dict[str, plots.Series] = {
        str(policy): (
            [float(row[0]) for row in rows if row[1] == policy],
            [float(row[2]) for row in rows if row[1] == policy],
        )
        for policy in dict.fromkeys(row[1] for row in rows)
    }
    return Plot("goodput", plots.lines(series, x="instances", y="goodput, requests/s"))


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if value != float("inf")]
    return sum(finite) / len(finite) if finite else 0.0
