"""Queue order and placement apart: the goodput of every contender with both orders, on two kinds of engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from dualmap.research.bench import Bench
from dualmap.research.report import Section
from dualmap.research.studies.plan import ABLATIONS, CONTENDERS, DEFAULT_POLICY, PRESET, Plan, variant_of
from dualmap.research.studies.rates import RateRuns, run_rates
from dualmap.research.table import Cell, Table
from dualmap.scheduling.placing.policies.registry import granting_order
from dualmap.scheduling.settings import PolicyName

Order = Literal["fifo", "deadline"]
ORDERS: tuple[Order, ...] = ("fifo", "deadline")
START_LOAD = 0.6
"""Share of the rate that is sustainable for all requests at which searches start."""
Found = Mapping[tuple[PolicyName, Order], float]


def orders_section(plan: Plan, bench: Bench) -> Section:
    """Adds to what was searched already the searches with each policy's other order."""
    policies, measured = _policies(plan, (DEFAULT_POLICY, *CONTENDERS)), run_rates(plan, bench)
    missing: list[tuple[RateRuns, PolicyName, Order]] = [
        (runs, policy, orders_of(policy)[1]) for runs in measured for policy in policies
    ]
    searches = [
        plan.search(
            runs.workload,
            variant_of(policy, f"queue_order={order}"),
            runs.goodput_per_s[policy] or plan.rate(runs.workload, START_LOAD),
        )
        for runs, policy, order in missing
    ]
    answers = {
        (runs.workload, policy, order): goodput
        for (runs, policy, order), (goodput,) in zip(missing, bench.goodputs("queue orders", searches), strict=True)
    }
    rows, findings = [], []
    for runs in measured:
        found: dict[tuple[PolicyName, Order], float] = {}
        for policy in policies:
            own, other = orders_of(policy)
            found[policy, own] = runs.goodput_per_s[policy]
            found[policy, other] = answers[runs.workload, policy, other]
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
        tables=[Table("Goodput/s by order", ("workload", "policy", *ORDERS, "order %"), rows)],
    )


def orders_of(policy: PolicyName) -> tuple[Order, Order]:
    """The order that a policy is made for, in which its goodput was searched already, and the other one."""
    return ("fifo", "deadline") if granting_order(variant_of(policy).scheduling) == "fifo" else ("deadline", "fifo")


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


def prefill_first_section(plan: Plan, bench: Bench) -> Section:
    """The regime of the paper's evaluation: an engine whose running decodes wait while prompts wait."""
    policies = _policies(plan, (*ABLATIONS, *CONTENDERS, "cache-affinity", "least-loaded", DEFAULT_POLICY))
    changes = "+".join(filter(None, (plan.engine_changes, "prefill_first")))
    workloads = [replace(plan.workload(trace), preset=f"{PRESET}:{changes}") for trace in ("conversation", "toolagent")]
    searches = [
        plan.search(workload, variant_of(policy, "queue_order=fifo"), plan.rate(workload, START_LOAD))
        for workload in workloads
        for policy in policies
    ]
    found = [goodput for (goodput,) in bench.goodputs("prefill first", searches)]
    rows: list[list[Cell]] = []
    findings = []
    for index, workload in enumerate(workloads):
        own = dict(zip(policies, found[index * len(policies) : (index + 1) * len(policies)], strict=True))
        best = max(own.values())
        rows += [
            [workload.label, policy, goodput, 100 * goodput / best if best else 0.0] for policy, goodput in own.items()
        ]
        ranking = sorted(own, key=own.__getitem__, reverse=True)
        ranked = ", ".join(f"{policy} {own[policy]:.2f}/s" for policy in ranking)
        findings.append(f"{workload.label}: {ranked}.")
    return Section(
        name="prefill_first",
        title="The paper's regime: engines that prefill first",
        question=(
            "The paper's testbed was an engine without chunked prefill: running decodes wait while prompts wait, so a "
            "prefill queue is all that a first token waits for, as the paper's estimate has it. Every policy first "
            "come, first served."
        ),
        findings=findings,
        tables=[Table("Goodput, prefill first", ("workload", "policy", "goodput/s", "of the best %"), rows)],
    )


def _policies(plan: Plan, wanted: Sequence[PolicyName]) -> tuple[PolicyName, ...]:
    return tuple(dict.fromkeys(policy for policy in wanted if policy in plan.policies))
