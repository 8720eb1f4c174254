"""Prefill and decode on different instances: eight mixed ones beside splits of eight, and what decides who is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dualmap.research.evaluate.plan import DEFAULT_POLICY, PAPER_SLO_S, Plan, Workload, policy_title, scenario_for
from dualmap.research.evaluate.section import Cell, DataTable, Plot, Section
from dualmap.research.evaluate.work import Worker
from dualmap.scheduling.settings import PolicyName, SplitSettings
from dualmap.simulation import plots
from dualmap.simulation.goodput import GoodputJob, run_goodput
from dualmap.simulation.on_time import TIGHT_TPOT_SLO_S
from dualmap.simulation.results import RunResult
from dualmap.simulation.runs import RunJob, run_job
from dualmap.simulation.scenario import Scenario

PRESET = "qwen2.5-7b-910b4"
MIXED = "8M"
SPLITS = ("4P4D", "5P3D", "6P2D")
FEW_PREFILL = "2P6D"
"""Where answers are so long that decoding needs most of the instances."""
LOAD = 0.9
LOADS = (0.6, 0.9, 1.1)
"""Parts of the saturation of a split."""
START_LOAD = 0.4
"""Of what 8 mixed instances sustain: where the search for the saturation starts."""
Mode = Literal["always", "never", "auto"]
MODES: tuple[Mode, ...] = ("always", "never", "auto")
POLICY_COLUMNS: tuple[str, ...] = (
    "workload",
    "fleet",
    "policy",
    "TTFT P50 s",
    "TTFT P90 s",
    "TPOT P50 ms",
    "TPOT P90 ms",
    "on time %",
)
POLICY_COLUMNS += ("both SLOs %", "hit %")
DECIDER_COLUMNS: tuple[str, ...] = (
    "workload",
    "fleet",
    "rate/s",
    "split",
    "split %",
    "TTFT P50 s",
    "TTFT P90 s",
    "TPOT P50 ms",
)
DECIDER_COLUMNS += ("TPOT P90 ms", "on time %", "both SLOs %")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the section."""

    workload: Workload
    fleet: str
    rate_per_s: float
    policy: PolicyName = DEFAULT_POLICY
    mode: Mode = "always"

    def job(self) -> RunJob:
        return RunJob(self.workload.source, self.scenario(), self.rate_per_s)

    def scenario(self) -> Scenario:
        scenario = scenario_for(self.policy, self.workload)
        scheduling = scenario.scheduling.model_copy(update={"split": SplitSettings(mode=self.mode)})
        return replace(scenario, scheduling=scheduling, roles="" if self.fleet == MIXED else self.fleet)


def disaggregation_section(plan: Plan, worker: Worker) -> Section:
    workloads = [plan.workload(trace, PRESET) for trace in ("conversation", "toolagent")]
    thinking = replace(plan.generated("thinking", plan.toolagent_requests), label="Tool&Agent, long answers")
    fleets = {one.name: "4P4D" for one in workloads} | {thinking.name: FEW_PREFILL}
    saturation = _saturations(plan, worker, [*workloads, thinking], fleets)
    policies = [
        Case(one, fleet, LOAD * saturation[one.name], policy)
        for one in workloads
        for fleet in (MIXED, *SPLITS)
        for policy in plan.policies
    ]
    ways = [
        Case(one, fleet, load * saturation[one.name], mode=mode)
        for one in (*workloads, thinking)
        for load in LOADS
        for fleet in (MIXED, *SPLITS, *((FEW_PREFILL,) if one is thinking else ()))
        for mode in (("never",) if fleet == MIXED else MODES)
    ]
    results = worker.map("prefill and decode apart", run_job, [case.job() for case in (*policies, *ways)])
    by_policy = list(zip(policies, results[: len(policies)], strict=True))
    by_way = list(zip(ways, results[len(policies) :], strict=True))
    return Section(
        name="disaggregation",
        title="Prefill and decode apart",
        question=(
            "The paper's appendix schedules the prefill instances of a fleet that decodes on others. Here eight mixed "
            f"instances stand beside splits of eight, every request split, at {LOAD:g} of the saturation of 4P4D: the "
            "highest goodput over it of the policies that serve first come, first served. TTFT ends with the first "
            "token of the decode instance, the move of KV included. Both SLOs: on time, and at most "
            f"{1000 * TIGHT_TPOT_SLO_S:.0f} ms a token. Then the choice between splitting a request and serving it "
            "whole on a decode instance, by its cost, beside always and never; last on answers four times as long, at "
            f"parts of the saturation of {FEW_PREFILL}."
        ),
        findings=[
            *(_policy_finding([run for run in by_policy if run[0].workload is one]) for one in workloads),
            *(_way_finding([run for run in by_way if run[0].workload is one]) for one in (*workloads, thinking)),
        ],
        tables=[
            DataTable("Every policy over every split", POLICY_COLUMNS, [_policy_row(*run) for run in by_policy]),
            DataTable(f"Who is split ({DEFAULT_POLICY})", DECIDER_COLUMNS, [_way_row(*run) for run in by_way]),
        ],
        plots=[
            *(_policy_plot([run for run in by_policy if run[0].workload is one]) for one in workloads),
            *(_way_plot([run for run in by_way if run[0].workload is one]) for one in (*workloads, thinking)),
        ],
    )


Run = tuple[Case, RunResult]


def _saturations(plan: Plan, worker: Worker, workloads: Sequence[Workload], fleets: dict[str, str]) -> dict[str, float]:
    """The highest goodput over the split of those policies that serve first come, first served."""
    searched = [
        Case(one, fleets[one.name], START_LOAD * one.reference_rate_per_s, policy)
        for one in workloads
        for policy in plan.policies
        if policy != DEFAULT_POLICY
    ]
    jobs = [GoodputJob(case.job(), tolerance=plan.goodput_tolerance) for case in searched]
    found: dict[str, float] = {one.name: 0.0 for one in workloads}
    for case, goodput in zip(searched, worker.map("saturation of splits", run_goodput, jobs), strict=True):
        found[case.workload.name] = max(found[case.workload.name], goodput.rate_per_s)
    # Without a policy that holds at any rate there is no saturation: the start of the search stands in.
    return {one.name: found[one.name] or START_LOAD * one.reference_rate_per_s for one in workloads}


def _policy_row(case: Case, run: RunResult) -> list[Cell]:
    return [case.workload.label, case.fleet, run.policy, *_times(run), 100 * run.hit_rate]


def _way_row(case: Case, run: RunResult) -> list[Cell]:
    mode = "-" if case.fleet == MIXED else case.mode
    return [case.workload.label, case.fleet, round(case.rate_per_s, 2), mode, 100 * run.split_share, *_times(run)]


def _times(run: RunResult) -> list[Cell]:
    return [
        run.ttft_s.p50,
        run.ttft_s.p90,
        1000 * run.tpot_s.p50,
        1000 * run.tpot_s.p90,
        100 * run.effective_capacity,
        100 * run.on_time.both_tight,
    ]


def _policy_finding(runs: Sequence[Run]) -> str:
    """P90 TTFT over 4P4D, and what the split does for both SLOs."""
    workload, rate = runs[0][0].workload, runs[0][0].rate_per_s
    over = {run.policy: run for case, run in runs if case.fleet == "4P4D"}
    mixed = {run.policy: run for case, run in runs if case.fleet == MIXED}
    ours: list[PolicyName] = [policy for policy in (DEFAULT_POLICY, "dualmap") if policy in over]
    others = {policy: run for policy, run in over.items() if not policy.startswith("dualmap")}
    told = ", ".join(f"{policy_title(policy)} {over[policy].ttft_s.p90:.2f} s" for policy in ours)
    if others:
        best = min(others, key=lambda policy: others[policy].ttft_s.p90)
        told += f", best other {best} {others[best].ttft_s.p90:.2f} s"
    told = f"{workload.label}, {rate:.2f}/s: P90 TTFT over 4P4D {told}"
    if DEFAULT_POLICY in over:
        split, whole = (100 * runs_of[DEFAULT_POLICY].on_time.both_tight for runs_of in (over, mixed))
        told += f"; within {PAPER_SLO_S:g} s and {1000 * TIGHT_TPOT_SLO_S:.0f} ms a token {split:.1f} %"
        told += f" of the requests, on 8 mixed {whole:.1f} %"
    return f"{told}."


def _way_finding(runs: Sequence[Run]) -> str:
    """How far the decider is from the better of the two ways, at worst."""
    shares = {(case.fleet, case.rate_per_s, case.mode): 100 * run.on_time.both_tight for case, run in runs}
    behind = {
        (fleet, rate): max(shares[fleet, rate, "always"], shares[fleet, rate, "never"]) - shares[fleet, rate, mode]
        for fleet, rate, mode in shares
        if mode == "auto"
    }
    (fleet, rate), points = max(behind.items(), key=lambda one: one[1])
    best = {rate: max(share for (_, own, mode), share in shares.items() if own == rate) for _, rate, _ in shares}
    mixed = ", ".join(
        f"{share:.1f} % and {best[rate]:.1f} % at {rate:.2f}/s"
        for (fleet, rate, _), share in shares.items()
        if fleet == MIXED
    )
    side = "behind" if points > 0 else "ahead of"
    return (
        f"{runs[0][0].workload.label}: within both SLOs the decider is at worst {abs(points):.1f} points {side} the "
        f"better of always and never (over {fleet} at {rate:.2f}/s). 8 mixed, and the best split: {mixed}."
    )


def _policy_plot(runs: Sequence[Run]) -> Plot:
    points = {case.fleet: (1000 * run.tpot_s.p90, run.ttft_s.p90) for case, run in runs if run.policy == DEFAULT_POLICY}
    title = f"{runs[0][0].workload.label}: {DEFAULT_POLICY} by fleet"
    return Plot(title, plots.points(points, x="P90 TPOT, ms", y="P90 TTFT, s", title="down and left is better"))


def _way_plot(runs: Sequence[Run]) -> Plot:
    """Over rates, the share within both SLOs: 8 mixed, and the split of the most, by the way."""
    fleets = dict.fromkeys(case.fleet for case, _ in runs if case.fleet != MIXED)
    widest = max(fleets, key=lambda name: sum(run.on_time.both_tight for case, run in runs if case.fleet == name))
    series: dict[str, plots.Series] = {}
    for fleet, mode in ((MIXED, "never"), *((widest, mode) for mode in MODES)):
        own = [
            (case.rate_per_s, run.on_time.both_tight) for case, run in runs if (case.fleet, case.mode) == (fleet, mode)
        ]
        name = fleet if fleet == MIXED else f"{fleet} {mode}"
        series[name] = ([rate for rate, _ in own], [share for _, share in own])
    title = f"{runs[0][0].workload.label}: share within both SLOs"
    return Plot(title, plots.lines(series, x="requests/s", y="share within both SLOs"))
