"""The traces' prefixes: how much is shared, and how long the hash keys become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dualmap.research.bench import Bench
from dualmap.research.report import Plot, Section
from dualmap.research.studies.plan import Plan, variant_of
from dualmap.research.table import Cell, Table
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.workload.trace_figures import cached_tokens_if_infinite, quantile, trace_figures
from dualmap.simulation.workload.traces import Trace

KEY_SIZES = (8, 16, 32)
LOAD = 0.75
CDF_POINTS = tuple(index / 50 for index in range(51))


def shared_prefix_section(plan: Plan, bench: Bench) -> Section:
    """The section on shared prefixes: the share of each prompt that an endless cache would have held."""
    workloads = [plan.workload(trace) for trace in ("conversation", "toolagent")]
    traces = {one.traffic.title: plan.trace(one) for one in workloads}
    shares = {name: _shared_shares(trace) for name, trace in traces.items()}
    tokens = {name: sorted(cached_tokens_if_infinite(trace)) for name, trace in traces.items()}
    return Section(
        name="prefixes",
        title="Shared prefixes",
        question="How much of each prompt was sent before: the share and the length of its longest known prefix.",
        tables=[_traces_table(traces)],
        plots=[
            Plot(
                "Share of the prompt",
                plots.lines(
                    {name: ([quantile(s, p) for p in CDF_POINTS], CDF_POINTS) for name, s in shares.items()},
                    x="shared part of the prompt", y="share of requests", markers=False,
                ),
            ),
            Plot(
                "Tokens",
                plots.lines(
                    {name: ([quantile(t, p) for p in CDF_POINTS], CDF_POINTS) for name, t in tokens.items()},
                    x="shared prefix, tokens", y="share of requests", markers=False,
                ),
            ),
        ],
    )  # fmt: skip


def _traces_table(traces: Mapping[str, Trace]) -> Table:
    figures = {name: trace_figures(trace) for name, trace in traces.items()}
    rows: list[list[Cell]] = [
        [
            name,
            figure.requests,
            figure.mean_input_tokens,
            figure.mean_output_tokens,
            100 * figure.infinite_cache_hit,
            *(100 * share for share in (*figure.root_shares, 0.0, 0.0)[:3]),
            figure.burst_mean,
        ]
        for name, figure in figures.items()
    ]
    columns = (
        "trace", "requests", "mean input", "mean output", "endless-cache hit %", "root 1 %", "root 2 %", "root 3 %",
        "arrivals per 3 s",
    )  # fmt: skip
    return Table("The traces as run (prompts capped)", columns, rows)


def _shared_shares(trace: Trace) -> list[float]:
    cached = cached_tokens_if_infinite(trace)
    return sorted(hit / request.input_tokens for request, hit in zip(trace.requests, cached, strict=True))


def key_length_section(plan: Plan, bench: Bench) -> Section:
    """Adaptive key lengths at several sizes: the more instances, the sooner a prefix counts as hot."""
    workloads = [
        replace(plan.workload(trace, requests=plan.conversation_requests), instances=instances)
        for trace in ("conversation", "toolagent")
        for instances in KEY_SIZES
    ]
    runs = [plan.run(workload, variant_of("dualmap"), plan.rate(workload, LOAD)) for workload in workloads]
    results = bench.results("hash keys", runs)
    names = [(workload.label, workload.instances) for workload in workloads]
    rows: list[list[Cell]] = [
        [label, instances, blocks, 100 * count / result.requests]
        for (label, instances), result in zip(names, results, strict=True)
        for blocks, count in result.key_blocks.items()
        if count / result.requests >= 0.005
    ]
    return Section(
        name="key_lengths",
        title="Length of the hash key",
        question=(
            "The paper reports keys of 2 blocks for most traffic and of 13 and 6 blocks behind the two tool prompts of "
            "Tool&Agent (12 and 5 blocks, 39 % and 15 % of requests). A prefix is hot above 2/n of the traffic: with 8 "
            "instances that is 25 %, so the second tool prompt is found from 14 instances on."
        ),
        tables=[
            Table("Lengths of at least 0.5 % of requests", ("workload", "instances", "blocks", "requests %"), rows)
        ],
        plots=[
            Plot(f"{label}, {instances} instances", _length_bars(result))
            for (label, instances), result in zip(names, results, strict=True)
            if instances in (KEY_SIZES[0], KEY_SIZES[-1])
        ],
    )


def _length_bars(result: RunResult) -> str:
    lengths: Sequence[int] = [blocks for blocks, count in result.key_blocks.items() if count / result.requests >= 0.005]
    return plots.bars(
        {str(blocks): result.key_blocks[blocks] / result.requests for blocks in lengths}, y="share of requests"
    )
