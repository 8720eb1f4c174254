"""Queue order and placement apart: the goodput of every contender with both orders, on two kinds of engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualmap.research.evaluate.plan import (
    ABLATIONS,
    CONTENDERS,
    DEFAULT_POLICY,
    Order,
    Plan,
    Workload,
    scenario_for,
    scheduling_for,
)
from dualmap.research.evaluate.rates import RateRuns
from dualmap.research.evaluate.section import Cell, DataTable, Section
from dualmap.research.evaluate.work import Worker
from dualmap.scheduling.placing.policies.registry import granting_order
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.goodput import GoodputJob, run_goodput
from dualmap.simulation.runs import RunJob

ORDERS: tuple[Order, ...] = ("fifo", "deadline")
START_LOAD = 0.6
"""Of the rate that is sustainable for all requests: where searches start."""
Found = Mapping[tuple[PolicyName, Order], float]


def orders_section(plan: Plan, measured: Sequence[RateRuns], worker: Worker) -> Section:
    """Adds to what was searched already the searches with each policy's other order."""
    policies = _policies(plan, (DEFAULT_POLICY, *CONTENDERS))
    missing: list[tuple[RateRuns, PolicyName, Order]] = [
        (runs, policy, orders_of(policy)[1]) for runs in measured for policy in policies
    ]
    jobs = [_search(plan, runs.workload, policy, order, runs.goodput_per_s[policy]) for runs, policy, order in missing]
    answers = dict(zip(missing_keys(missing), worker.map("queue orders", run_goodput, jobs), strict=True))
    rows, findings = [], []
    for runs in measured:
        found: dict[tuple[PolicyName, Order], float] = {}
        for policy in policies:
            own, other = orders_of(policy)
            found[policy, own] = runs.goodput_per_s[policy]
            found[policy, other] = answers[runs.workload.name, policy, other].rate_per_s
        rows += [_row(runs.workload.label, policy, found) for policy in policies]
        findings.append(f"{runs.workload.label}: {placement_finding(found)}")
    return Section(
        name="orders",
        title="Queue order and placement",
        question=(
            "A queue that serves by deadline gains under any policy. What a placement is worth shows only beside the "
            "others with the same order: goodput of every contender, first come, first served, and by deadline."
        ),
        findings=findings,
        tables=[DataTable("Goodput/s by order", ("workload", "policy", *ORDERS, "order %"), rows)],
    )


def orders_of(policy: PolicyName) -> tuple[Order, Order]:
    """The order that a policy is made for, in which its goodput was searched already, and the other one."""
    return ("fifo", "deadline") if granting_order(scheduling_for(policy)) == "fifo" else ("deadline", "fifo")


def missing_keys(missing: Sequence[tuple[RateRuns, PolicyName, Order]]) -> list[tuple[str, PolicyName, Order]]:
    return [(runs.workload.name, policy, order) for runs, policy, order in missing]


def placement_finding(found: Found) -> str:
    """The default policy against the best of the others, with each order."""
    parts = []
    for order in ORDERS:
        others = {policy: rate for (policy, own), rate in found.items() if own == order and policy != DEFAULT_POLICY}
        ours = found[DEFAULT_POLICY, order]
        best = max(others, key=others.__getitem__)
        lead = f" ({100 * (ours / others[best] - 1):+.1f}%)" if others[best] else ""
        parts.append(f"{order}: {DEFAULT_POLICY} {ours:.2f}/s, {best} {others[best]:.2f}/s{lead}")
    return "; ".join(parts) + "."


def _row(label: str, policy: PolicyName, found: Found) -> list[Cell]:
    fifo, deadline = found[policy, "fifo"], found[policy, "deadline"]
    return [label, policy, fifo, deadline, 100 * (deadline / fifo - 1) if fifo else "-"]


def prefill_first_section(plan: Plan, worker: Worker) -> Section:
    """The regime of the paper's evaluation: an engine whose running decodes wait while prompts wait."""
    policies = _policies(plan, (*ABLATIONS, *CONTENDERS, "cache-affinity", "least-loaded", DEFAULT_POLICY))
    workloads = [plan.workload(trace, "qwen2.5-7b-910b4") for trace in ("conversation", "toolagent")]
    changed = [replace(one, engine=replace(one.engine, prefill_first=True)) for one in workloads]
    jobs = [_search(plan, workload, policy, "fifo", 0.0) for workload in changed for policy in policies]
    found = worker.map("prefill first", run_goodput, jobs)
    rows: list[list[Cell]] = []
    findings = []
    for index, workload in enumerate(changed):
        own = dict(zip(policies, found[index * len(policies) : (index + 1) * len(policies)], strict=True))
        best = max(own.values(), key=lambda goodput: goodput.rate_per_s).rate_per_s
        rows += [
            [workload.label, policy, goodput.rate_per_s, 100 * goodput.rate_per_s / best if best else 0.0]
            for policy, goodput in own.items()
        ]
        ranking = sorted(own, key=lambda policy: own[policy].rate_per_s, reverse=True)
        told = ", ".join(f"{policy} {own[policy].rate_per_s:.2f}/s" for policy in ranking)
        findings.append(f"{workload.label}: {told}.")
    return Section(
        name="prefill_first",
        title="The paper's regime: engines that prefill first",
        question=(
            "The paper's testbed was an engine without chunked prefill: running decodes wait while prompts wait, so a "
            "prefill queue is all that a first token waits for, as the paper's estimate has it. Every policy first "
            "come, first served."
        ),
        findings=findings,
        tables=[DataTable("Goodput, prefill first", ("workload", "policy", "goodput/s", "of the best %"), rows)],
    )


def _policies(plan: Plan, wanted: Sequence[PolicyName]) -> tuple[PolicyName, ...]:
    return tuple(dict.fromkeys(policy for policy in wanted if policy in plan.policies))


def _search(plan: Plan, workload: Workload, policy: PolicyName, order: Order, start_per_s: float) -> GoodputJob:
    scenario = scenario_for(policy, workload, order=order)
    start = start_per_s or workload.rate(START_LOAD)
    return GoodputJob(RunJob(workload.source, scenario, start), tolerance=plan.goodput_tolerance)
