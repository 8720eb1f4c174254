"""Results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from simulation.goodput import Goodput
from simulation.results import RunResult

COLUMNS = ("policy", "rate/s", "on time", "TTFT P50 s", "P90", "P99", "E2E P50 s", "P90", "P99", "TPOT ms", "hit")
MORE_COLUMNS = ("of bound", "CV", "migrated", "preempted", "refused", "TTFT error")


def results_table(results: Sequence[RunResult]) -> Table:
    """One row a run."""
    table = Table(box=None, header_style="bold")
    for index, column in enumerate(COLUMNS + MORE_COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for result in results:
        table.add_row(*_row(result))
    return table


def _row(result: RunResult) -> list[str]:
    ttft, e2e = result.ttft_s, result.e2e_s
    return [
        result.policy,
        f"{result.rate_per_s:.2f}",
        f"{result.effective_capacity:.1%}",
        *(f"{value:.2f}" for value in (ttft.p50, ttft.p90, ttft.p99)),
        *(f"{value:.1f}" for value in (e2e.p50, e2e.p90, e2e.p99)),
        f"{result.tpot_s.mean * 1000:.0f}",
        f"{result.hit_rate:.1%}",
        f"{result.hit_share_of_bound:.0%}",
        f"{result.load_cv:.2f}",
        str(result.migrations),
        str(result.preemptions),
        str(result.refused),
        f"{result.ttft_error_p50:.0%}",
    ]


def goodput_table(found: Sequence[tuple[str, Goodput]], bound_per_s: float) -> Table:
    """One row a policy, and the bound that none can pass."""
    table = Table(box=None, header_style="bold")
    for index, column in enumerate(("policy", "goodput/s", "fails at", "runs")):
        table.add_column(column, justify="right" if index else "left")
    for policy, goodput in found:
        rates = (goodput.rate_per_s, goodput.upper_rate_per_s)
        table.add_row(policy, *(f"{rate:.2f}" for rate in rates), str(len(goodput.tried)))
    table.add_row("(bound: ideal hits, perfect balance)", f"{bound_per_s:.2f}", "", "")
    return table
