"""Loads of adapters, and first tokens, where placements know of adapters and where they do not.

    python -m benchmarks.adapter_loads [--requests 4000] [--rates 10 14] [--seeds 1 2 3] [--adapter-weights 6 12]

Simulates eight instances with 8 slots for adapters each and host memory for all 256, which are asked for by Zipf's law.
*unknown*: instances are described without slots, and the hash keys of requests are those of their prompts; each
adapter has a system prompt of its own, so its requests still share a prefix. *one home* is the rule of rendezvous
hashing: each adapter has one instance, whatever happens there; it is policy ``cache-affinity`` with adapters as keys.
*affinity* is llm-d's rule with its scorer for adapters, which knows those with running requests, and knows these here
without the delay of a scrape. *excess* is what comes from disk beside the first load of each adapter in the fleet,
which no placement avoids. With ``--adapter-weights`` the rows are those of the default policy at these weights alone.

Before that it prints what lists by last use would miss if every request ended before the next came: with one list
of all slots, with one home for each adapter, with two, at random, and with the best static placement, which keeps the
63 most popular adapters and gives the last slot to all others. Requests last, though, and an adapter with running
requests keeps its slot, so one slot cannot serve all others. Behind the table of each rate stands what is left of that
bound then: one list of all slots of the fleet, by last use, in which the most popular adapters, by an oracle, have
slots of their own, as many as leave the others a slot for 19 of 20 requests; answers last as long as those of the
default policy did.

*slots alone* are the same answers on the instances' own lists, with no queue and no price but slots: a request goes to
the home that has its adapter on the device, else to that whose slot costs least: any free one, that which was used
longest ago, or that of the least popular adapter, by an oracle. *apart* has homes of the 48 most popular adapters on
other instances than those of the rest, by an oracle too. *without a slot* are requests that find all slots of their
homes in use: they would wait, or go elsewhere.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
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
WEIGHT = "weight "
OVERFULL = 0.05
"""Share of requests that may find all slots in use, in the bound."""
POPULAR = 48
"""The most popular adapters, where they have other homes than the rest."""
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
    options = {"adapter_weight": float(way.removeprefix(WEIGHT))} if way.startswith(WEIGHT) else {}
    settings = SchedulingSettings(policy=policy, policy_options=options)
    scenario = Scenario(settings, find_preset(PRESET).engine, INSTANCES, skip_requests=len(trace.requests) // 3)
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


def shared_list(trace: Trace, tpot_s: float, pinned: int) -> tuple[float, float]:
    """The share of requests, of the last two thirds, whose adapter is not in one list of all slots by last use, in
    which the ``pinned`` most popular ones stay and those with running requests do, and the share of requests that find
    every slot in use by others."""
    slots, counts = INSTANCES * SLOTS - pinned, Counter(each.adapter for each in trace.requests)
    stay = {name for name, _ in counts.most_common(pinned)}
    used, running, ends = OrderedDict[str, None](), Counter[str](), list[tuple[float, str]]()
    missed, overfull = [], 0
    for request in trace.requests:
        while ends and ends[0][0] <= request.arrival_s:
            name = heappop(ends)[1]
            running[name] -= 1
            used.move_to_end(name)
        name = request.adapter
        missed.append(name not in stay and name not in used)
        if name in stay:
            continue
        while name not in used and len(used) >= slots:
            idle = next((each for each in used if not running[each]), None)
            if idle is None:
                overfull += 1
                break
            del used[idle]
        used[name] = None
        used.move_to_end(name)
        running[name] += 1
        heappush(ends, (request.arrival_s + request.output_tokens * tpot_s, name))
    counted = missed[len(missed) // 3 :]
    return sum(counted) / len(counted), overfull / len(missed)


def separated(traces: Sequence[Trace], tpot_s: float) -> tuple[float, int]:
    """The least of ``shared_list``, and how many have slots of their own then."""
    found = []
    for pinned in range(0, INSTANCES * SLOTS, 4):
        shares = [shared_list(trace, tpot_s, pinned) for trace in traces]
        if mean(overfull for _, overfull in shares) <= OVERFULL:
            found.append((mean(share for share, _ in shares), pinned))
    return min(found)


@dataclass
class Slots:
    """The slots of an instance on the device."""

    used: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """The adapters there with the time of their last use, the one used longest ago first."""
    running: Counter[str] = field(default_factory=Counter)
    host: set[str] = field(default_factory=set)

    def next_to_leave(self) -> str | None:
        """The adapter whose slot is free next; "" where one is empty, None where all are in use."""
        return "" if len(self.used) < SLOTS else next((each for each in self.used if not self.running[each]), None)

    def begin(self, name: str, now_s: float) -> None:
        if name not in self.used:
            leaving = self.next_to_leave()
            if leaving != "":
                del self.used[next(iter(self.used)) if leaving is None else leaving]
        self.host.add(name)
        self.running[name] += 1
        self.use(name, now_s)

    def use(self, name: str, now_s: float) -> None:
        self.used[name] = now_s
        self.used.move_to_end(name)

    def end(self, name: str, now_s: float) -> None:
        self.running[name] -= 1
        if name in self.used:
            self.use(name, now_s)


SlotPrice = Callable[[str, float], float]
"""The price of the slot of an adapter that was last used at this time."""


def slots_alone(
    trace: Trace, tpot_s: float, homes_of: Mapping[str, Sequence[int]], price: SlotPrice
) -> tuple[float, float, float]:
    """Shares of requests, of the last two thirds: whose adapter is loaded onto the device, from disk, and that find all
    slots of their homes in use."""
    fleet, ends = [Slots() for _ in range(INSTANCES)], list[tuple[float, int, str]]()
    loads, disk, overfull = list[bool](), list[bool](), list[bool]()

    def cost(place: int, name: str) -> tuple[bool, float, int]:
        slots = fleet[place]
        requests, leaving = slots.running.total(), slots.next_to_leave()
        if name in slots.used or leaving == "":
            return False, -1.0 if name in slots.used else 0.0, requests
        return leaving is None, 0.0 if leaving is None else price(leaving, slots.used[leaving]), requests

    for request in trace.requests:
        name, now_s = request.adapter, request.arrival_s
        while ends and ends[0][0] <= now_s:
            end_s, place, ended = heappop(ends)
            fleet[place].end(ended, end_s)
        costs = {place: cost(place, name) for place in homes_of[name]}
        place = min(costs, key=costs.__getitem__)
        slots = fleet[place]
        loads.append(name not in slots.used)
        disk.append(name not in slots.host)
        overfull.append(costs[place][0])
        slots.begin(name, now_s)
        heappush(ends, (now_s + request.output_tokens * tpot_s, place, name))
    counted = len(loads) // 3
    return mean(loads[counted:]), mean(disk[counted:]), mean(overfull[counted:])


def rules_of_slots(trace: Trace, seed: int) -> dict[str, tuple[Mapping[str, Sequence[int]], SlotPrice]]:
    """Homes and prices of slots, by the name of their rule."""
    rng, counts = Random(seed), Counter(request.adapter for request in trace.requests)
    order = {name: rng.sample(range(INSTANCES), INSTANCES) for name in sorted(counts)}
    popular = {name for name, _ in counts.most_common(POPULAR)}

    def first(homes: int) -> Mapping[str, Sequence[int]]:
        return {name: places[:homes] for name, places in order.items()}

    def apart(rest: int) -> Mapping[str, Sequence[int]]:
        return {
            name: [each for each in places if (each < rest) != (name in popular)][:2] for name, places in order.items()
        }

    def any_slot(name: str, used_s: float) -> float:
        return 0.0

    def oldest(name: str, used_s: float) -> float:
        return used_s

    def rarest(name: str, used_s: float) -> float:
        return counts[name]

    return {
        "one home": (first(1), any_slot),
        "two homes, any slot": (first(2), any_slot),
        "two homes, the oldest slot": (first(2), oldest),
        "two homes, the least popular's slot": (first(2), rarest),
        "all homes, the least popular's slot": (first(INSTANCES), rarest),
        "two homes, apart on 6 and 2": (apart(2), any_slot),
        "two homes, apart on 5 and 3": (apart(3), any_slot),
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
    parser.add_argument("--adapter-weights", type=float, nargs="+", default=[], help="of the default policy alone")
    arguments = parser.parse_args()
    ways = {f"{WEIGHT}{weight:g}": POLICIES[:1] for weight in arguments.adapter_weights} or WAYS
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
        timed, tpot_s = [trace.at_rate(rate) for trace in traces.values()], 0.0
        for way, policies in ways.items():
            for policy in policies:
                results = [result_of(trace, policy, way, gauges) for trace in timed]
                loads, disk = (
                    mean(getattr(each, name) / each.requests for each in results)
                    for name in ("adapter_loads", "adapter_disk_loads")
                )
                p50, p90, p99 = (mean(getattr(each.ttft_s, name) for each in results) for name in ("p50", "p90", "p99"))
                tpot_s = tpot_s or mean(each.tpot_s.mean for each in results)
                on_time = mean(each.effective_capacity for each in results)
                figures = (
                    f"{loads:.1%} | {disk:.1%} | {disk - first:.1%} | {p50:.2f}, {p90:.2f}, {p99:.2f} | {on_time:.1%}"
                )
                print(f"| {rate:g} | {policy} | {way} | {figures} |", flush=True)
        least, pinned = separated(timed, tpot_s)
        print(f"| {rate:g} | one list, {pinned} adapters with slots of their own | | {least:.1%} | | | | |", flush=True)
        rules = [rules_of_slots(trace, seed) for trace, seed in zip(timed, arguments.seeds, strict=True)]
        for name in rules[0]:
            alone = [slots_alone(trace, tpot_s, *rule[name]) for trace, rule in zip(timed, rules, strict=True)]
            loads, disk, overfull = map(mean, zip(*alone, strict=True))
            figures = f"{loads:.1%} | {disk:.1%} | {disk - first:.1%} | {overfull:.1%} without a slot"
            print(f"| {rate:g} | slots alone: {name} | | {figures} | |", flush=True)


if __name__ == "__main__":
    main()
