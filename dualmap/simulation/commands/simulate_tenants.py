"""``dualmap simulate --tenant``: what each tenant gets of a fleet, under the rules that there are to share it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import orjson
from rich.table import Table

from dualmap.scheduling.tenants.tenant import Tenant
from dualmap.simulation.commands.options import FleetOptions, OptionError, write_whole
from dualmap.simulation.commands.progress import over_runs, progress_bars
from dualmap.simulation.commands.tenant_options import tenant_mix
from dualmap.simulation.figures.fitting_table import fitting_table
from dualmap.simulation.figures.results import RunResult, TenantResult
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.virtual_time.runs import RunJob, run_all

NO_SHARES = "none"
SHARES = "shares"
TENANTS_SEND_S = 120.0
"""Time for which tenants send, unless an option names another."""


@dataclass(kw_only=True, frozen=True, slots=True)
class TenantRow:
    """The figures of one tenant under one rule."""

    rule: str
    tenant: str
    weight_share: float
    """The part of its weight in those of all."""
    requests: int
    on_time: float
    on_time_alone: float
    """Share of its requests on time without the others."""
    refused: int
    ttft_p99_s: float
    work_s: float
    work_share: float


def run_tenants(arguments: argparse.Namespace, options: FleetOptions) -> int:
    """Raises OptionError."""
    if len(options.policies) > 1 or arguments.rate is not None:
        raise OptionError("--tenant takes one --policy, and each tenant's rate with it: no --rate")
    if options.loop.concurrency is not None:
        raise OptionError("--tenant names rates: it takes no --concurrency")
    seconds = TENANTS_SEND_S if arguments.seconds is None else arguments.seconds
    mix = tenant_mix(arguments.tenants, seconds, options.engine, options.instances, arguments.seed)
    scenario = options.scenario(options.policies[0])
    jobs = [RunJob(mix.alone(tenant.name), scenario) for tenant in mix.tenants]
    jobs += [RunJob(mix, scenario), RunJob(mix, replace(scenario, tenants=mix.tenants))]
    with progress_bars(arguments.quiet) as progress:
        *alone, unshared, shared = run_all(jobs, arguments.workers, over_runs(progress, len(jobs), None))
    rows = tenant_rows(mix.tenants, {NO_SHARES: unshared, SHARES: shared}, alone)
    console = terminal()
    console.print(tenant_table(rows, console.width))
    for rule in (NO_SHARES, SHARES):
        work_s = sum(row.work_s for row in rows if row.rule == rule)
        console.print(f"{rule}: {work_s:.1f} s of work in all", highlight=False)
    if arguments.json is not None:
        write_whole(arguments.json, orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2).decode())
    return 0


def tenant_rows(
    tenants: Sequence[Tenant], by_rule: Mapping[str, RunResult], alone: Sequence[RunResult]
) -> list[TenantRow]:
    """A row for each rule and tenant. ``alone`` has the result of each tenant without the others, in their order."""
    weights = sum(tenant.weight for tenant in tenants)
    return [
        _row(rule, tenant, tenant.weight / weights, result.by_tenant[tenant.name], own.by_tenant[tenant.name])
        for rule, result in by_rule.items()
        for tenant, own in zip(tenants, alone, strict=True)
    ]


def _row(rule: str, tenant: Tenant, weight_share: float, got: TenantResult, alone: TenantResult) -> TenantRow:
    return TenantRow(
        rule=rule,
        tenant=tenant.name,
        weight_share=weight_share,
        requests=got.requests,
        on_time=got.on_time,
        on_time_alone=alone.on_time,
        refused=got.refused,
        ttft_p99_s=got.ttft_p99_s,
        work_s=got.work_s,
        work_share=got.work_share,
    )


def tenant_table(rows: Sequence[TenantRow], width: int) -> Table:
    """One row a rule and tenant."""
    columns = ("rule", "tenant", "of weights", "of work", "on time", "alone", "requests", "refused", "TTFT P99 s")
    cells = [
        [
            row.rule,
            row.tenant,
            f"{row.weight_share:.1%}",
            f"{row.work_share:.1%}",
            f"{row.on_time:.1%}",
            f"{row.on_time_alone:.1%}",
            str(row.requests),
            str(row.refused),
            f"{row.ttft_p99_s:.2f}",
        ]
        for row in rows
    ]
    return fitting_table(columns, cells, width)
