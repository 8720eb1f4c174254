"""Results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from rich.table import Table

from dualmap.scheduling.scaling.role_plan import RoleChange
from dualmap.simulation.capacity.bounds import Bounds
from dualmap.simulation.capacity.fleet_size import FleetSize, FleetSizeJob
from dualmap.simulation.capacity.goodput import Goodput
from dualmap.simulation.figures.fitting_table import fitting_table
from dualmap.simulation.figures.results import RunResult, SizeChange

Show = Callable[[RunResult], str]

COLUMNS: dict[str, Show] = {
    "policy": lambda r: r.policy,
    "rate/s": lambda r: f"{r.rate_per_s:.2f}",
    "on time": lambda r: f"{r.effective_capacity:.1%}",
    "TTFT P50 s": lambda r: f"{r.ttft_s.p50:.2f}",
    "P90": lambda r: f"{r.ttft_s.p90:.2f}",
    "P99": lambda r: f"{r.ttft_s.p99:.2f}",
    "hit": lambda r: f"{r.hit_rate:.1%}",
    "instance h": lambda r: f"{r.instance_hours:.2f}",
    "resized": lambda r: str(len(r.changes)),
    "CV": lambda r: "-" if r.load_cv is None else f"{r.load_cv:.2f}",
    "of bound": lambda r: f"{r.hit_share_of_bound:.0%}",
    "E2E P50 s": lambda r: f"{r.e2e_s.p50:.1f}",
    "E2E P90": lambda r: f"{r.e2e_s.p90:.1f}",
    "E2E P99": lambda r: f"{r.e2e_s.p99:.1f}",
    "TPOT ms": lambda r: f"{r.tpot_s.mean * 1000:.0f}",
    "migrated": lambda r: str(r.migrations),
    "preempted": lambda r: str(r.preemptions),
    "refused": lambda r: str(r.refused),
    "TTFT error": lambda r: f"{r.ttft_error_p50:.0%}",
    "undisturbed": lambda r: f"{r.undisturbed_error_p50:.0%}",
}
"""The most important first."""
SPLIT_COLUMNS: dict[str, Show] = {
    "and 50 ms": lambda r: f"{r.on_time.both_tight:.1%}",
    "split": lambda r: f"{r.split_share:.0%}",
    "TPOT P90 ms": lambda r: f"{r.tpot_s.p90 * 1000:.0f}",
}
"""Behind the first three where requests were split: on time and at most 50 ms a token, and how."""
RUN_COLUMNS: dict[str, Show] = {
    "runs/s": lambda r: "-" if r.runs is None else f"{r.runs.ended_per_s:.2f}",
    "run mean s": lambda r: "-" if r.runs is None else f"{r.runs.mean_s:.0f}",
    "short runs P90 s": lambda r: "-" if r.runs is None else f"{r.runs.short_p90_s:.0f}",
}
"""Behind all others where the trace has sessions: the times of agents' runs."""
ADAPTER_COLUMNS: dict[str, Show] = {
    "adapter loads": lambda r: f"{r.adapter_loads / max(1, r.requests):.1%}",
    "from disk": lambda r: f"{r.adapter_disk_loads / max(1, r.requests):.1%}",
}
"""Behind those where adapters were loaded: requests for which one was."""


def results_table(results: Sequence[RunResult], width: int) -> Table:
    """One row a run; a narrow terminal gets the columns that matter most (the JSON has all)."""
    further: dict[str, Show] = {}
    if any(result.slo_tpot_s is not None for result in results):
        further = {"both SLOs": lambda r: f"{r.share_on_time:.1%}"}
    elif any(result.split_share for result in results):
        further = SPLIT_COLUMNS
    of_runs = RUN_COLUMNS if any(result.runs is not None for result in results) else {}
    of_adapters = ADAPTER_COLUMNS if any(result.adapter_loads for result in results) else {}
    shown = dict(islice(COLUMNS.items(), 3)) | of_adapters | further | COLUMNS | of_runs
    return fitting_table(tuple(shown), [[show(result) for show in shown.values()] for result in results], width)


def changes_table(changes: Sequence[SizeChange]) -> Table:
    """One row a decision of the autoscaler."""
    table = Table(box=None, header_style="bold")
    roles = ("role",) if any(change.role for change in changes) else ()
    for column in ("at s", *roles, "from", "to", "reason"):
        table.add_column(column, justify="left" if column in ("role", "reason") else "right")
    for change in changes:
        role = (change.role or "prefill",) if roles else ()
        table.add_row(f"{change.at_s:.0f}", *role, str(change.size), str(change.wanted), change.reason)
    return table


def roles_table(changes: Sequence[tuple[float, RoleChange]]) -> Table:
    """One row for each instance that the leader gave another role."""
    table = Table(box=None, header_style="bold")
    for column in ("at s", "instance", "role", "reason"):
        table.add_column(column, justify="right" if column == "at s" else "left")
    for at_s, change in changes:
        table.add_row(f"{at_s:.0f}", change.instance_id, change.role, change.reason)
    return table


def goodput_table(found: Sequence[tuple[str, Goodput]], bounds: Bounds) -> Table:
    """One row per policy, and the bounds, see ``simulation.capacity.bounds``."""
    table = Table(box=None, header_style="bold")
    for index, column in enumerate(("policy", "goodput/s", "fails at", "runs")):
        table.add_column(column, justify="right" if index else "left")
    for policy, goodput in found:
        rates = (goodput.rate_per_s, goodput.upper_rate_per_s)
        table.add_row(policy, *(f"{rate:.2f}" for rate in rates), str(len(goodput.tried)))
    table.add_row("(ideal goodput)", f"{bounds.ideal_goodput_per_s:.2f}", "", "")
    table.add_row("(sustainable rate)", f"{bounds.sustainable_per_s:.2f}", "", "")
    return table


def _numbers(search: FleetSizeJob, size: FleetSize) -> tuple[str, str]:
    tried = size.result.instances
    return str(tried) if size.instances else f"none; {tried}:", str(tried * search.cards)


def size_table(searches: Sequence[FleetSizeJob], found: Sequence[FleetSize]) -> Table:
    """One row for each engine and policy: the smallest fleet and how it did, or that none does and the last tried."""
    table = Table(box=None, header_style="bold")
    columns = ("engine", "policy", "instances", "cards", "on time", "one less", "TTFT P50 s", "P99", "TPOT ms", "hit")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index > 1 else "left")
    for search, size in zip(searches, found, strict=True):
        policy, result = search.policy, size.result
        less = "" if size.share_with_one_less is None else f"{size.share_with_one_less:.1%}"
        table.add_row(
            search.name, policy, *_numbers(search, size), f"{result.share_on_time:.1%}",
            less, f"{result.ttft_s.p50:.2f}", f"{result.ttft_s.p99:.2f}", f"{result.tpot_s.mean * 1000:.0f}",
            f"{result.hit_rate:.1%}",
        )  # fmt: skip
    return table
