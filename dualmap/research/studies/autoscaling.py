"""The fleet finds its size itself: the paper's two elasticity experiments with detection, and a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.report import Plot, Section
from dualmap.research.scalers import SCALERS
from dualmap.research.studies.clairvoyant import clairvoyant_changes, paid_hours
from dualmap.research.studies.plan import DEFAULT_POLICY, Plan, variant_of
from dualmap.research.studies.scaling import by_instance_plots
from dualmap.research.table import Cell, Table
from dualmap.research.variant import ScenarioOptions, Variant
from dualmap.research.workload import Workload
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.results import RunResult

WARM_START_S = 10.0
"""A warm standby instance in the paper's experiments."""
COLD_START_S = 30.0
SURGE_LOAD, SLACK_LOAD = 0.7, 0.35
"""Loads as in the experiments with scripted changes: parts of what 8 instances sustain."""
DAY_LEAST, DAY_MOST = 2, 16
SETTLING_S = 30.0
"""Time after the newcomers are ready until the fleet must serve."""


def autoscaling_section(plan: Plan, bench: Bench) -> Section:
    """Overload, slack, and a day with flash crowds."""
    eight = plan.like_generated()
    surge, slack = plan.generated("surge", plan.scaling_requests), eight
    day = day_of(plan)
    runs = [
        plan.run(started(surge, 4), elastic(4, 8, WARM_START_S), plan.rate(eight, SURGE_LOAD * SURGE_MEAN)),
        plan.run(started(slack, 8), elastic(4, 8, WARM_START_S), plan.rate(eight, SLACK_LOAD)),
        *(plan.run(day, elastic(DAY_LEAST, DAY_MOST, COLD_START_S, name)) for name in SCALERS),
    ]
    knowing = clairvoyant_changes(day, plan, bench, DAY_MOST)
    known_sizes = replace(day, instances=knowing[0].instances, changes=knowing[1:])
    runs.append(plan.run(known_sizes, variant_of(DEFAULT_POLICY)))
    grown, shrunk, *days = bench.results("autoscaling", runs)
    known_h = paid_hours(knowing, plan.day_s, COLD_START_S)
    rows: list[list[Cell]] = [
        [name, 100 * run.effective_capacity, hours, hours / known_h, len(run.changes) or len(knowing) - 1, run.refused]
        for name, run, hours in zip(
            [*SCALERS, "the future known"], days, [*(run.instance_hours for run in days[:-1]), known_h], strict=True
        )
    ]
    return Section(
        name="autoscaling",
        title="Scaling by detection",
        question=(
            "The paper's system detects overload, grows from 4 to 8 instances, and leaves 8 for 4 under slack. Here "
            "the autoscaler sees what a fleet sees. Then a day whose rate grows fourfold from night to noon, with two "
            "flash crowds that double it, beside the plans of HPA (queue length, KV memory in use), AIBrix and Dynamo "
            "on the same figures and actuators, and a planner that knows the rate of every minute in advance and what "
            "each size carries with 97 % on time."
        ),
        findings=[_surge_finding(grown), _slack_finding(shrunk), _day_finding(rows)],
        tables=[
            Table(
                f"A day of {plan.day_s / 3600:g} hours, {plan.day_requests:,} requests",
                ("plan", "on time %", "instance hours", "of the known future", "changes", "refused"),
                rows,
            ),
            Table("Decisions of the overload", ("at s", "from", "to", "reason"), _decisions(grown)),
            Table("Decisions of the slack", ("at s", "from", "to", "reason"), _decisions(shrunk)),
        ],
        plots=[
            *_course("overload", grown),
            *by_instance_plots("overload", grown),
            *_course("slack", shrunk),
            *by_instance_plots("slack", shrunk),
            Plot("a day: instances", plots.lines(_sizes(days), x="time, s", y="ready instances", markers=False)),
        ],
    )


SURGE_MEAN = 5 / 6
"""Mean rate of the surge, of its rate at the end."""


def day_of(plan: Plan) -> Workload:
    """The day from its first request on, which begins with a fleet of three."""
    return started(plan.generated(f"diurnal:day_s={plan.day_s}", plan.day_requests), 3)


def started(workload: Workload, instances: int) -> Workload:
    """The workload on ``instances`` at first, with no request left out."""
    return replace(workload, instances=instances, warm_up_requests=0)


def elastic(least: int, most: int, start_s: float, scaler: str = "dualmap") -> Variant:
    """The default policy over a fleet that sizes itself."""
    settings = AutoscaleSettings(min_instances=least, max_instances=most, start_s=start_s)
    options = ScenarioOptions(autoscale=settings, scaler=scaler)
    return replace(variant_of(DEFAULT_POLICY), name=scaler, options=options)


def _surge_finding(run: RunResult) -> str:
    onset_s = run.span_of_arrivals_s / 3
    ups = [change for change in run.changes if change.at_s >= onset_s and change.wanted > change.size]
    if not ups:
        return "Overload: not detected."
    settled_s = ups[0].at_s + WARM_START_S + SETTLING_S
    later = [share for at_s, share, _ in run.timeline if at_s >= settled_s]
    return (
        f"Overload: detected {ups[0].at_s - onset_s:.0f} s after its onset, {ups[0].size} to {ups[0].wanted}"
        f" instances; {100 * sum(later) / max(1, len(later)):.1f} % on time from {SETTLING_S:.0f} s after they were"
        " ready to the end."
    )


def _slack_finding(run: RunResult) -> str:
    sizes = [len(sample.pending_tokens) for sample in run.samples]
    return (
        f"Slack: from 8 to {min(sizes)} instances, {100 * run.effective_capacity:.1f} % on time throughout, "
        f"{run.refused} of {run.requests} requests not answered."
    )


def _day_finding(rows: Sequence[Sequence[Cell]]) -> str:
    ours, others = rows[0], rows[1:-1]
    as_good = [row for row in others if float(row[1]) >= float(ours[1])]
    best = min(as_good, key=lambda row: float(row[2])) if as_good else None
    compared = (
        f"the best of the others that is on time as often is {best[0]} with {float(best[2]):.2f}, so "
        f"{float(ours[2]) / float(best[2]):.2f} of its instance hours, where knowing the future takes "
        f"{float(rows[-1][2]) / float(best[2]):.2f}"
        if best is not None
        else "none of the others is on time as often"
    )
    return (
        f"Day: {float(ours[1]):.1f} % on time with {float(ours[2]):.2f} instance hours, {float(ours[3]):.2f} of those"
        f" of the known future; {compared}."
    )


def _decisions(run: RunResult) -> list[list[Cell]]:
    rows: list[list[Cell]] = [[round(one.at_s), one.size, one.wanted, one.reason] for one in run.changes]
    return rows or [["-", run.instances, run.instances, "none"]]


def _course(title: str, run: RunResult) -> list[Plot]:
    on_time = {"share on time": ([at_s for at_s, _, _ in run.timeline], [share for _, share, _ in run.timeline])}
    sizes = plots.lines(_sizes([run]), x="time, s", y="ready instances", markers=False)
    shares = plots.lines(on_time, x="time, s", y="share on time", markers=False)
    return [Plot(f"{title}: share on time", shares), Plot(f"{title}: instances", sizes)]


def _sizes(runs: Sequence[RunResult]) -> dict[str, plots.Series]:
    names = [*SCALERS, "the future known"] if len(runs) > 1 else ["instances"]
    return {
        name: ([sample.time_s for sample in run.samples], [float(len(sample.pending_tokens)) for sample in run.samples])
        for name, run in zip(names, runs, strict=True)
    }
