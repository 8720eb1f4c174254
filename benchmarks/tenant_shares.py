"""Shows what tenants and classes get of a fleet under overload, in virtual time.

    python benchmarks/tenant_shares.py [--seconds 120] [--only light lost served equal peers batch evicted]

Prints Markdown tables. 8 × 7B, policy ``dualmap-least-cost``; late requests are refused, except in tables *served* and
*evicted*. *None* is the fleet without shares; *alone* is the light tenant without the heavy one. Work is in seconds of
an instance, as ``scheduling.tenants.shares`` counts it. What peers have:

- limits per replica: each tenant may send its half of the prefill of the fleet, a quarter of it through each of four
  replicas, which clients meet at random; what is beyond is refused, whatever room there is;
- strict priorities: one tenant goes before the other at all times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.commands.tenant_options import tenant_mix
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome, RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.tenant_mix import TenantMix
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE = find_preset("qwen2.5-7b-910b4").engine
INSTANCES = 8
LONG, SHORT = "uncached:tokens=16000,answer=50", "uncached:tokens=1000,answer=50"
PAIRS = (
    ("long prompts", f"{LONG}@0.5", "short prompts", SHORT),
    ("short prompts", f"{SHORT}@4", "long prompts", LONG),
    ("toolagent", "toolagent@1", "conversation", "conversation"),
    ("conversation", "conversation@0.5", "toolagent", "toolagent"),
    ("uniform", "uniform@1.5", "agents", "agents"),
)
MULTIPLES = ("1.3x", "2x", "5x", "20x")
SLOWEST = {("short prompts", "20x")}
"""Left out: a hundred thousand requests a minute."""
EQUAL = (
    ("conversation@1.4x", "toolagent@1.4x", f"{SHORT}@0.67x"),
    (f"{LONG}@0.67x", "uncached:tokens=8000,answer=50@0.67x", f"{SHORT}@0.67x"),
)
"""Each tenant offers more than its share, as the table shows. Of conversation and toolagent that is more than two
thirds of the rate which the fleet sustains on time: at that rate each has a third of its work to do."""
REPLICAS = 4
LOST = ((3, "20x"),)
"""Pairs and multiples in which the light tenant has less than 97 % of what it has alone."""
SERVED = ((0, "1.3x"), (0, "2x"), (1, "2x"), (2, "2x"), (3, "2x"))
"""Pairs and multiples where late requests are served."""
TABLES = ("light", "lost", "served", "equal", "peers", "batch", "evicted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES)
    arguments = parser.parse_args()
    for name, show in zip(
        TABLES,
        (show_light, show_lost, show_served, show_equal, show_peers, show_batch, show_evicted),
        strict=True,
    ):
        if name in arguments.only:
            show(arguments.seconds)


def fleet(*classes: PriorityClassSettings) -> Scenario:
    return Scenario(SchedulingSettings(classes=classes), ENGINE, instances=INSTANCES, late_requests="refuse")


def mix_of(seconds: float, *tenants: str) -> TenantMix:
    return tenant_mix(tenants, seconds, ENGINE, INSTANCES)


def show_light(seconds: float) -> None:
    head("light tenant", "heavy tenant", "offers", "light on time: alone", "none", "shares", "work: none", "shares")
    for name, light, heavy_name, heavy in PAIRS:
        for multiple in MULTIPLES:
            if (heavy_name, multiple) in SLOWEST:
                continue
            mix = mix_of(seconds, f"light={light}", f"heavy={heavy}@{multiple}")
            alone = simulate(mix.alone("light").load(), fleet())
            results = [simulate(mix.load(), replace(fleet(), tenants=tenants)) for tenants in ((), mix.tenants)]
            on_time = [f"{each.by_tenant['light'].on_time:.1%}" for each in (alone, *results)]
            row(name, heavy_name, multiple, *on_time, *(f"{work_s(each):.0f}" for each in results))


def show_lost(seconds: float) -> None:
    head(
        "light tenant",
        "heavy tenant",
        "offers",
        "requests on time alone",
        "longest prefill of the heavy one, s",
        "TTFT alone of those that shares lose, s",
    )
    for pair, multiple in LOST:
        name, light, heavy_name, heavy = PAIRS[pair]
        mix = mix_of(seconds, f"light={light}", f"heavy={heavy}@{multiple}")
        alone = Simulation(mix.alone("light").load(), fleet()).run().outcomes
        shared = Simulation(mix.load(), replace(fleet(), tenants=mix.tenants)).run().outcomes
        own, others = of_tenant(shared, "light"), of_tenant(shared, "heavy")
        lost = [one.ttft_s for one, other in zip(alone, own, strict=True) if one.on_time and not other.on_time]
        longest_s = max(each.prefill_work_s for each in others)
        on_time = sum(each.on_time for each in alone)
        row(name, heavy_name, multiple, f"{on_time}", f"{longest_s:.2f}", ", ".join(f"{each:.2f}" for each in lost))


def show_served(seconds: float) -> None:
    head(
        "light tenant",
        "heavy tenant",
        "offers",
        "light on time: none",
        "shares",
        "its longest TTFT, s: none",
        "shares",
        "heavy on time: none",
        "shares",
    )
    for pair, multiple in SERVED:
        name, light, heavy_name, heavy = PAIRS[pair]
        mix = mix_of(seconds, f"light={light}", f"heavy={heavy}@{multiple}")
        results = [
            Simulation(mix.load(), replace(fleet(), tenants=tenants, late_requests="serve")).run()
            for tenants in ((), mix.tenants)
        ]
        own, others = [[of_tenant(result.outcomes, each) for result in results] for each in ("light", "heavy")]
        longest_s = [f"{max(each.ttft_s for each in outcomes):.1f}" for outcomes in own]
        row(name, heavy_name, multiple, *map(part_on_time, own), *longest_s, *map(part_on_time, others))


def show_equal(seconds: float) -> None:
    head("three tenants", "part of the fleet's time that each takes alone", "part of the work: none", "shares")
    for traces in EQUAL:
        mix = mix_of(seconds, *(f"t{number}={trace}" for number, trace in enumerate(traces)))
        alone = [work_s(simulate(mix.alone(each.name).load(), fleet())) for each in mix.tenants]
        results = [simulate(mix.load(), replace(fleet(), tenants=tenants)) for tenants in ((), mix.tenants)]
        parts = [" / ".join(f"{each.work_share:.1%}" for each in result.by_tenant.values()) for result in results]
        row(", ".join(traces), " / ".join(f"{each / seconds / INSTANCES:.0%}" for each in alone), *parts)


def show_peers(seconds: float) -> None:
    head("rule", "light on time", "heavy on time", "work in all")
    for multiple in ("0.7x", "2x"):
        mix = mix_of(seconds, f"light={LONG}@0.5", f"heavy={SHORT}@{multiple}")
        trace = mix.load()
        light, heavy = (replace(trace, requests=tuple(in_class(trace, name))) for name in ("light", "heavy"))
        first, second = PriorityClassSettings(name="first"), PriorityClassSettings(name="second")
        limited = replace(trace, requests=tuple(within_limits(trace)))
        runs = {
            "none": simulate(trace, fleet()),
            "limits per replica": simulate(limited, fleet()),
            "strict, the light one first": simulate(light, fleet(first, second)),
            "strict, the heavy one first": simulate(heavy, fleet(first, second)),
            "shares": simulate(trace, replace(fleet(), tenants=mix.tenants)),
        }
        sent = {tenant.name: sum(each.tenant == tenant.name for each in trace.requests) for tenant in mix.tenants}
        for rule, result in runs.items():
            of_sent = [
                each.on_time * each.requests / sent[name]
                for name, each in sorted(result.by_tenant.items(), reverse=True)
            ]
            row(f"{rule}, heavy offers {multiple}", *(f"{each:.1%}" for each in of_sent), f"{work_s(result):.0f}")


def show_batch(seconds: float) -> None:
    head(
        "interactive at 0.7 ×",
        "batch offers",
        "interactive TTFT P99 s: alone",
        "equal",
        "classes",
        "work: equal",
        "classes",
    )
    for trace in ("uniform", SHORT):
        batch = "batch=uncached:tokens=2000,answer=100@0.6x@class=batch"
        mix = mix_of(seconds, f"chat={trace}@0.7x@class=chat", batch)
        classes = (PriorityClassSettings(name="chat"), PriorityClassSettings(name="batch", fills_idle=True))
        alone = simulate(mix.alone("chat").load(), fleet())
        results = [simulate(mix.load(), each) for each in (fleet(), fleet(*classes))]
        p99_s = [f"{each.by_tenant['chat'].ttft_p99_s:.2f}" for each in (alone, *results)]
        row(trace, "0.6 ×", *p99_s, *(f"{work_s(each):.0f}" for each in results))


def show_evicted(seconds: float) -> None:
    head(
        "interactive at 0.7 ×, SLO",
        "batch at 0.6 ×, prompts of",
        "interactive TTFT P99 s: alone",
        "classes",
        "evictable",
        "on time: classes",
        "evictable",
        "batch TTFT P99 s: classes",
        "evictable",
    )
    for trace, slo_s, tokens in (
        (SHORT, 1.0, 2000),
        (SHORT, 1.0, 20_000),
        (SHORT, 1.0, 40_000),
        ("uniform", 2.5, 20_000),
    ):
        batch = f"batch=uncached:tokens={tokens},answer=400@0.6x@class=batch"
        mix = mix_of(seconds, f"chat={trace}@0.7x@class=chat", batch)
        chat, kept = PriorityClassSettings(name="chat", slo_ttft_s=slo_s), PriorityClassSettings(name="batch")
        idle = kept.model_copy(update={"fills_idle": True})
        served = [
            replace(fleet(chat, each), late_requests="serve")
            for each in (idle, idle.model_copy(update={"evictable": True}))
        ]
        alone = simulate(mix.alone("chat").load(), served[0])
        results = [simulate(mix.load(), each) for each in served]
        row(
            f"{trace}, {slo_s:g} s",
            f"{tokens:,}",
            *(f"{each.by_tenant['chat'].ttft_p99_s:.2f}" for each in (alone, *results)),
            *(f"{each.by_tenant['chat'].on_time:.1%}" for each in results),
            *(f"{each.by_tenant['batch'].ttft_p99_s:.0f}" for each in results),
        )


def in_class(trace: Trace, first: str) -> list[TraceRequest]:
    """The requests with the class of their tenant, of which one is the first."""
    return [replace(each, priority="first" if each.tenant == first else "second") for each in trace.requests]


def within_limits(trace: Trace) -> list[TraceRequest]:
    """The requests that the limits of their replica let in, buckets of ten seconds."""
    rate = INSTANCES * ENGINE.instance_spec("i").prefill_tokens_per_s / 2 / REPLICAS
    chance, used, admitted = Random(1), dict[tuple[str, int], tuple[float, float]](), []
    for each in trace.requests:
        bucket = each.tenant, chance.randrange(REPLICAS)
        tokens, since_s = used.get(bucket, (0.0, 0.0))
        tokens = max(0.0, tokens - rate * (each.arrival_s - since_s))
        if tokens + each.input_tokens <= 10 * rate:
            tokens += each.input_tokens
            admitted.append(each)
        used[bucket] = tokens, each.arrival_s
    return admitted


def of_tenant(outcomes: Sequence[RequestOutcome], tenant: str) -> list[RequestOutcome]:
    return [each for each in outcomes if each.tenant == tenant]


def part_on_time(outcomes: Sequence[RequestOutcome]) -> str:
    return f"{sum(each.on_time for each in outcomes) / len(outcomes):.1%}"


def work_s(result: RunResult) -> float:
    return sum(each.work_s for each in result.by_tenant.values())


def head(*columns: str) -> None:
    print()
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
