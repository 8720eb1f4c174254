"""The fleet changes size: under overload, under slack, and from 8 to 32 instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.figures import Figures
from dualmap.research.report import Plot, Section
from dualmap.research.run import Run
from dualmap.research.studies.plan import DEFAULT_POLICY, Plan, policy_title, variant_of
from dualmap.research.table import Cell, Column, Table, titles
from dualmap.research.workload import Workload
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import FleetChange

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
SCALABILITY_COLUMNS = (
    Column("rate/s", "rate_per_s"),
    Column("on time %", "on_time", 100),
    Column("TTFT P50 s", "ttft_p50_s"),
    Column("TTFT P90 s", "ttft_p90_s"),
    Column("hit %", "hit_rate", 100),
    Column("CV", "load_cv"),
)
_Changes = Callable[[float], tuple[FleetChange, ...]]


def elasticity_section(plan: Plan, bench: Bench) -> Section:
    """4 to 8 instances a third into an overload; 8 to 4, one at a time, a third into slack."""
    up = _changing(plan, SCALE_UP_LOAD, 4, lambda at_s: (FleetChange(at_s, 8),))
    down = _changing(
        plan, SCALE_DOWN_LOAD, 8,
        lambda at_s: tuple(FleetChange(at_s + step * DRAIN_GAP_S, 7 - step) for step in range(4)),
    )  # fmt: skip
    results = bench.results("scaling", up + down)
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
            Table(title, ("policy", "on time before %", "on time after %", "P90 TTFT after s", "hit %"), rows)
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


def _changing(plan: Plan, load: float, instances: int, changes: _Changes) -> list[Run]:
    """Runs at a part of what 8 instances sustain, on fleets that change after a third."""
    eight = plan.like_generated()
    rate_per_s = plan.rate(eight, load)
    span_s = len(plan.trace(eight).requests) / rate_per_s
    workload = replace(eight, instances=instances, changes=changes(span_s / 3), warm_up_requests=0)
    return [plan.run(workload, variant_of(policy), rate_per_s) for policy in POLICIES]


def _before_after(results: Sequence[RunResult]) -> list[list[Cell]]:
    """The shares on time in the first third, before the change, and in the last third."""
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
    """Plots of each instance's requests and hits while the fleet changed its size."""
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


def scalability_section(plan: Plan, bench: Bench) -> Section:
    """The section on scalability: the same load per instance on more instances."""
    workloads = _sizes(plan)
    runs = [
        plan.run(workload, variant_of(policy), plan.rate(workload, SCALABILITY_LOAD))
        for workload in workloads
        for policy in POLICIES
    ]
    results = bench.results("scalability", runs)
    goodputs = _goodput_by_size(plan, workloads, bench)
    rows: list[list[Cell]] = [
        [result.instances, result.policy, *(column.number(Figures.of(result)) for column in SCALABILITY_COLUMNS)]
        for result in results
    ]
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
            Table(
                "Tool&Agent, 7B, at 0.8 of the rate that is sustainable for all requests",
                ("instances", "policy", *titles(SCALABILITY_COLUMNS)),
                rows,
            ),
            Table("Goodput by number of instances", ("instances", "policy", "goodput/s", "per instance"), goodputs),
        ],
        plots=[*shown, _goodput_plot(goodputs)],
        data={
            "key_blocks": {
                str(result.instances): dict(result.key_blocks) for result in results if result.policy == "dualmap"
            }
        },
    )


def _sizes(plan: Plan) -> list[Workload]:
    """Workloads with as many requests an instance at every size."""
    return [
        replace(plan.workload("toolagent", requests=size * plan.requests_per_instance), instances=size)
        for size in plan.scalability
    ]


def _goodput_by_size(plan: Plan, workloads: Sequence[Workload], bench: Bench) -> list[list[Cell]]:
    """The goodputs of the plan's policies; the search starts where the table above is."""
    searches = [
        plan.search(workload, variant_of(policy), plan.rate(workload, SCALABILITY_LOAD))
        for workload in workloads
        for policy in GOODPUT_POLICIES
        if policy in plan.policies
    ]
    found = bench.goodputs("goodput by size", searches)
    return [
        [search.run.workload.instances, search.run.variant.name, goodput, goodput / search.run.workload.instances]
        for search, (goodput,) in zip(searches, found, strict=True)
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
