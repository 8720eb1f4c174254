"""Prefill and decode on different instances: eight mixed ones beside splits of eight, and what decides who is split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dualmap.research.bench import Bench
from dualmap.research.figures import Figures
from dualmap.research.report import Plot, Section
from dualmap.research.studies.plan import DEFAULT_POLICY, PAPER_SLO_S, Plan, policy_title, variant_of
from dualmap.research.table import Cell, Column, Table, titles
from dualmap.research.variant import Variant
from dualmap.research.workload import Workload
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.on_time import TIGHT_TPOT_SLO_S

MIXED = "8M"
SPLITS = ("4P4D", "5P3D", "6P2D")
FEW_PREFILL = "2P6D"
"""Roles for answers so long that decoding needs most of the instances."""
LOAD = 0.9
START_LOAD = 0.4
"""Share of what 8 mixed instances sustain at which the search for the saturation starts."""
Mode = Literal["always", "never", "auto"]
MODES: tuple[Mode, ...] = ("always", "never", "auto")
_TIMES = (
    Column("TTFT P50 s", "ttft_p50_s"),
    Column("TTFT P90 s", "ttft_p90_s"),
    Column("TPOT P50 ms", "tpot_p50_s", 1000),
    Column("TPOT P90 ms", "tpot_p90_s", 1000),
    Column("on time %", "on_time", 100),
    Column("both SLOs %", "both_tight", 100),
)
POLICY_COLUMNS = (*_TIMES, Column("hit %", "hit_rate", 100))
DECIDER_COLUMNS = (Column("split %", "split_share", 100), *_TIMES)


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the section."""

    label: str
    workload: Workload
    fleet: str
    rate_per_s: float
    policy: PolicyName = DEFAULT_POLICY
    mode: Mode = "always"

    @property
    def variant(self) -> Variant:
        roles = () if self.fleet == MIXED else (f"roles={self.fleet}",)
        return variant_of(self.policy, f"split.mode={self.mode}", *roles)


def disaggregation_section(plan: Plan, bench: Bench) -> Section:
    workloads = [plan.workload(trace) for trace in ("conversation", "toolagent")]
    thinking = plan.generated("thinking", plan.toolagent_requests)
    labels = {one: one.label for one in workloads} | {thinking: "Tool&Agent, long answers"}
    starts = [
        *(Case(one.label, one, "4P4D", plan.rate(one, START_LOAD)) for one in workloads),
        Case(labels[thinking], thinking, FEW_PREFILL, plan.rate(plan.like_generated(), START_LOAD)),
    ]
    saturation = {start.workload: _saturation(plan, bench, start) for start in starts}
    policies = [
        Case(labels[one], one, fleet, LOAD * saturation[one], policy)
        for one in workloads
        for fleet in (MIXED, *SPLITS)
        for policy in plan.policies
    ]
    ways = [
        Case(labels[one], one, fleet, load * saturation[one], mode=mode)
        for one in (*workloads, thinking)
        for load in plan.split_loads
        for fleet in (MIXED, *SPLITS, *((FEW_PREFILL,) if one is thinking else ()))
        for mode in (("never",) if fleet == MIXED else MODES)
    ]
    runs = [plan.run(case.workload, case.variant, case.rate_per_s) for case in (*policies, *ways)]
    figures = bench.figures("prefill and decode apart", runs)
    by_policy = list(zip(policies, figures[: len(policies)], strict=True))
    by_way = list(zip(ways, figures[len(policies) :], strict=True))
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
            Table(
                "Every policy over every split",
                ("workload", "fleet", "policy", *titles(POLICY_COLUMNS)),
                [_policy_row(*run) for run in by_policy],
            ),
            Table(
                f"Who is split ({DEFAULT_POLICY})",
                ("workload", "fleet", "rate/s", "split", *titles(DECIDER_COLUMNS)),
                [_way_row(*run) for run in by_way],
            ),
        ],
        plots=[
            *(_policy_plot([run for run in by_policy if run[0].workload is one]) for one in workloads),
            *(_way_plot([run for run in by_way if run[0].workload is one]) for one in (*workloads, thinking)),
        ],
    )


Done = tuple[Case, Figures]


def _saturation(plan: Plan, bench: Bench, start: Case) -> float:
    """The highest goodput over the split of those policies that serve first come, first served."""
    cases = [replace(start, policy=policy) for policy in plan.policies if policy != DEFAULT_POLICY]
    searches = [plan.search(case.workload, case.variant, case.rate_per_s) for case in cases]
    found = bench.goodputs(f"saturation, {start.label}", searches)
    # The start of the search stands in where no policy holds at any rate, so that there is no saturation.
    return max((goodput for (goodput,) in found), default=0.0) or start.rate_per_s


def _policy_row(case: Case, figures: Figures) -> list[Cell]:
    return [case.label, case.fleet, case.policy, *(column.number(figures) for column in POLICY_COLUMNS)]


def _way_row(case: Case, figures: Figures) -> list[Cell]:
    mode = "-" if case.fleet == MIXED else case.mode
    numbers = (column.number(figures) for column in DECIDER_COLUMNS)
    return [case.label, case.fleet, round(case.rate_per_s, 2), mode, *numbers]


def _policy_finding(runs: Sequence[Done]) -> str:
    """P90 TTFT over 4P4D, and what the split does for both SLOs."""
    label, rate = runs[0][0].label, runs[0][0].rate_per_s
    over = {case.policy: run for case, run in runs if case.fleet == "4P4D"}
    mixed = {case.policy: run for case, run in runs if case.fleet == MIXED}
    ours: list[PolicyName] = [policy for policy in (DEFAULT_POLICY, "dualmap") if policy in over]
    others = {policy: run for policy, run in over.items() if not policy.startswith("dualmap")}
    sentence = ", ".join(f"{policy_title(policy)} {over[policy].ttft_p90_s:.2f} s" for policy in ours)
    if others:
        best = min(others, key=lambda policy: others[policy].ttft_p90_s)
        sentence += f", best other {best} {others[best].ttft_p90_s:.2f} s"
    sentence = f"{label}, {rate:.2f}/s: P90 TTFT over 4P4D {sentence}"
    if DEFAULT_POLICY in over:
        split, whole = (100 * runs_of[DEFAULT_POLICY].both_tight for runs_of in (over, mixed))
        sentence += f"; within {PAPER_SLO_S:g} s and {1000 * TIGHT_TPOT_SLO_S:.0f} ms a token {split:.1f} %"
        sentence += f" of the requests, on 8 mixed {whole:.1f} %"
    return f"{sentence}."


def _way_finding(runs: Sequence[Done]) -> str:
    """How far the decider is from the better of the two ways, at worst."""
    shares = {(case.fleet, case.rate_per_s, case.mode): 100 * run.both_tight for case, run in runs}
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
        f"{runs[0][0].label}: within both SLOs the decider is at worst {abs(points):.1f} points {side} the "
        f"better of always and never (over {fleet} at {rate:.2f}/s). 8 mixed, and the best split: {mixed}."
    )


def _policy_plot(runs: Sequence[Done]) -> Plot:
    own = [(case, run) for case, run in runs if case.policy == DEFAULT_POLICY]
    points = {case.fleet: (1000 * run.tpot_p90_s, run.ttft_p90_s) for case, run in own}
    title = f"{runs[0][0].label}: {DEFAULT_POLICY} by fleet"
    return Plot(title, plots.points(points, x="P90 TPOT, ms", y="P90 TTFT, s", title="down and left is better"))


def _way_plot(runs: Sequence[Done]) -> Plot:
    """A plot of the share within both SLOs over rates: 8 mixed instances, and the split of the most, by option."""
    fleets = dict.fromkeys(case.fleet for case, _ in runs if case.fleet != MIXED)
    widest = max(fleets, key=lambda name: sum(run.both_tight for case, run in runs if case.fleet == name))
    series: dict[str, plots.Series] = {}
    for fleet, mode in ((MIXED, "never"), *((widest, mode) for mode in MODES)):
        own = [(case.rate_per_s, run.both_tight) for case, run in runs if (case.fleet, case.mode) == (fleet, mode)]
        name = fleet if fleet == MIXED else f"{fleet} {mode}"
        series[name] = ([rate for rate, _ in own], [share for _, share in own])
    title = f"{runs[0][0].label}: share within both SLOs"
    return Plot(title, plots.lines(series, x="requests/s", y="share within both SLOs"))
