"""Loads of adapters, and first tokens, where placements know of adapters and where they do not.

    python -m benchmarks.adapter_loads [--requests 4000] [--rates 10 14] [--seeds 1 2 3] [--policies P …]

Simulates eight instances with 8 slots for adapters each and host memory for all 256, which are asked for by Zipf's law.
*unknown*: instances are described without slots, and the hash keys of requests are those of their prompts; each
adapter has a system prompt of its own, so its requests still share a prefix. *one home* is the rule of rendezvous
hashing: each adapter has one instance, whatever happens there; it is policy ``cache-affinity`` with adapters as keys.
*affinity* is llm-d's rule with its scorer for adapters, which knows those with running requests, and knows these here
without the delay of a scrape. *excess* is what comes from disk beside the first load of each adapter in the fleet,
which no placement avoids.

Before that it prints what lists by last use would miss if every request ended before the next came: with one list
of all slots, with one home for each adapter, with two, at random, and with the best static placement, which keeps the
63 most popular adapters and gives the last slot to all others.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

from dualmap.scheduling.placing.decision import Decision, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost
from dualmap.scheduling.placing.policies.llm_d import LlmD
from dualmap.scheduling.placing.policies.registry import add_policy
from dualmap.scheduling.prompts.blocks import cache_seed, chain_of_trace
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult, summarize
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation, simulate
from dualmap.simulation.workload.generators import adapters
from dualmap.simulation.workload.traces import Trace

INSTANCES, SLOTS, ADAPTERS = 8, 8, 256
PRESET = f"qwen2.5-7b-910b4:adapter_slots={SLOTS}+adapter_host_slots={ADAPTERS}"
POLICIES = ("dualmap-least-cost", "dualmap", "least-loaded")
AFFINITY = "llm-d-adapters"
WAYS = {"known": POLICIES, "unknown": POLICIES, "one home": ("cache-affinity",), "affinity": (AFFINITY,)}
AFFINITY_WEIGHT = 3.0
"""Weight of the scorer for adapters: that of the prefix match, the largest of the default profile."""


@dataclass
class Gauges:
    """What engines report of the adapters with running requests."""

    engines: Mapping[str, Engine] = field(default_factory=dict)
    names: Mapping[int | None, str] = field(default_factory=dict)
    """Adapters by the root of a request's chain."""

    def score(self, root: int | None, instance_id: str) -> float:
        """1 where the adapter runs, 0.8 where one more may run, else 0."""
        running = self.engines[instance_id].statistics().adapters
        if self.names.get(root) in running:
            return 1.0
        return 0.8 if len(running) < SLOTS else 0.0


@dataclass(frozen=True)
class AdapterAffinity(LlmD):
    """llm-d's weighted scorers with ``lora-affinity-scorer``. Source: llm-d router."""

    gauges: Gauges = field(default_factory=Gauges)

    def cheapest(self, query: RouteQuery, loads: list[InstanceLoad], costs: list[Cost], reason: Reason) -> Decision:
        scores = [self.gauges.score(query.chain.root, load.instance_id) for load in loads]
        weighed: list[Cost] = [(cost[0] - AFFINITY_WEIGHT * score,) for cost, score in zip(costs, scores, strict=True)]
        return super().cheapest(query, loads, weighed, reason)


def result_of(trace: Trace, policy: str, way: str, gauges: Gauges) -> RunResult:
    scenario = Scenario(
        SchedulingSettings(policy=policy), find_preset(PRESET).engine, INSTANCES, skip_requests=len(trace.requests) // 3
    )
    if way != "unknown":
        simulation = Simulation(trace, scenario)
        gauges.engines = simulation.engines
        return summarize(simulation.run())
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


def first_loads(trace: Trace) -> float:
    """The share of requests, of the last two thirds, that are the first for their adapter."""
    names = [each.adapter for each in trace.requests]
    skipped = len(names) // 3
    return len(set(names) - set(names[:skipped])) / (len(names) - skipped)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=4000, help="(%(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 14.0], help="(%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(%(default)s)")
    arguments = parser.parse_args()
    traces = {seed: adapters(arguments.requests, seed, count=ADAPTERS) for seed in arguments.seeds}
    found = [bounds(trace, seed) for seed, trace in traces.items()]
    print(", ".join(f"{name} {mean(each[name] for each in found):.1%}" for name in found[0]))
    print("| rate/s | policy | adapters | loads to the device | from disk | excess | TTFT P50, P90, P99 s | on time |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    named = {each.adapter for trace in traces.values() for each in trace.requests}
    gauges = Gauges(names={cache_seed("", adapter): adapter for adapter in named})
    add_policy(AFFINITY, lambda name, settings: AdapterAffinity(name, settings.decode_stall_s, gauges=gauges))
    first = mean(first_loads(trace) for trace in traces.values())
    for rate in arguments.rates:
        for way, policies in WAYS.items():
            for policy in policies:
                results = [result_of(trace.at_rate(rate), policy, way, gauges) for trace in traces.values()]
                loads, disk = (
                    mean(getattr(each, name) / each.requests for each in results)
                    for name in ("adapter_loads", "adapter_disk_loads")
                )
                p50, p90, p99 = (mean(getattr(each.ttft_s, name) for each in results) for name in ("p50", "p90", "p99"))
                on_time = mean(each.effective_capacity for each in results)
                figures = (
                    f"{loads:.1%} | {disk:.1%} | {disk - first:.1%} | {p50:.2f}, {p90:.2f}, {p99:.2f} | {on_time:.1%}"
                )
                print(f"| {rate:g} | {policy} | {way} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
