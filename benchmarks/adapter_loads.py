"""Loads of adapters, and first tokens, where placements know of adapters and where they do not.

    python -m benchmarks.adapter_loads [--requests 4000] [--rates 10 14] [--seeds 1 2 3] [--policies P …]

Simulates eight instances with 8 slots for adapters each and host memory for all 256, which are asked for by Zipf's law.
*unknown*: instances are described without slots, and the hash keys of requests are those of their prompts; each
adapter has a system prompt of its own, so its requests still share a prefix. *one home* is the rule of rendezvous
hashing: each adapter has one instance, whatever happens there; it is policy ``cache-affinity`` with adapters as keys.

Before that it prints what lists by last use would miss if every request ended before the next came: with one list
of all slots, with one home for each adapter, with two, at random, and with the best static placement, which keeps the
63 most popular adapters and gives the last slot to all others.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from statistics import mean

from dualmap.scheduling.prompts.blocks import cache_seed, chain_of_trace
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.generators import adapters
from dualmap.simulation.workload.traces import Trace

INSTANCES, SLOTS, ADAPTERS = 8, 8, 256
PRESET = f"qwen2.5-7b-910b4:adapter_slots={SLOTS}+adapter_host_slots={ADAPTERS}"
POLICIES = ("dualmap-least-cost", "dualmap", "least-loaded")
WAYS = {"known": POLICIES, "unknown": POLICIES, "one home": ("cache-affinity",)}


def result_of(trace: Trace, policy: str, way: str) -> RunResult:
    scenario = Scenario(
        SchedulingSettings(policy=policy), find_preset(PRESET).engine, INSTANCES, skip_requests=len(trace.requests) // 3
    )
    if way != "unknown":
        return simulate(trace, scenario)
    blind = [replace(scenario.spec(index), adapter_slots=0) for index in range(INSTANCES)]
    seed = cache_seed("simulated")
    chains = (chain_of_trace(each.hash_ids, each.input_tokens, seed, trace.block_tokens) for each in trace.requests)
    return simulate(trace, replace(scenario, fleet=tuple(blind)), chains=chains)


def missed(names: Iterable[str], slots: int, home_of: Callable[[str], int]) -> float:
    """The share of requests whose adapter is not among the last that its home was asked for, of the last two thirds."""
    lists = [OrderedDict[str, None]() for _ in range(INSTANCES)]
    misses = []
    for name in names:
        used = lists[home_of(name)]
        misses.append(name not in used)
        used[name] = None
        used.move_to_end(name)
        if len(used) > slots:
            used.popitem(last=False)
    counted = misses[len(misses) // 3 :]
    return sum(counted) / len(counted)


def bounds(trace: Trace, seed: int) -> dict[str, float]:
    rng, names = Random(seed), [each.adapter for each in trace.requests]
    by_rank = sorted(set(names), key=names.count, reverse=True)
    kept = set(by_rank[: INSTANCES * SLOTS - 1])
    homes = {name: rng.sample(range(INSTANCES), 2) for name in by_rank}
    counted = names[len(names) // 3 :]
    return {
        "best static": sum(name not in kept for name in counted) / len(counted),
        "one list": missed(names, INSTANCES * SLOTS, lambda _: 0),
        "one home": missed(names, SLOTS, lambda name: homes[name][0]),
        "two homes": missed(names, SLOTS, lambda name: rng.choice(homes[name])),
        "random": missed(names, SLOTS, lambda _: rng.randrange(INSTANCES)),
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=4000, help="(%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 14.0], help="(%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(%(default)s)")
    arguments = parser.parse_args()
    traces = {seed: adapters(arguments.requests, seed, count=ADAPTERS) for seed in arguments.seeds}
    found = [bounds(trace, seed) for seed, trace in traces.items()]
    print(", ".join(f"{name} {mean(each[name] for each in found):.1%}" for name in found[0]))
    print("| rate/s | policy | adapters | loads to the device | from disk | TTFT P50, P90 s | on time |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for rate in arguments.rates:
        for way, policies in WAYS.items():
            for policy in policies:
                results = [result_of(trace.at_rate(rate), policy, way) for trace in traces.values()]
                loads, disk = (
                    mean(getattr(each, name) / each.requests for each in results)
                    for name in ("adapter_loads", "adapter_disk_loads")
                )
                p50, p90 = mean(each.ttft_s.p50 for each in results), mean(each.ttft_s.p90 for each in results)
                on_time = mean(each.effective_capacity for each in results)
                figures = f"{loads:.1%} | {disk:.1%} | {p50:.2f}, {p90:.2f} | {on_time:.1%}"
                print(f"| {rate:g} | {policy} | {way} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
