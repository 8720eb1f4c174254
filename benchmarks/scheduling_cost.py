"""CPU cost of the scheduling core alone: no store, no HTTP.

Process CPU time, best of several repetitions of a loop: what else runs on the machine disturbs a minimum least.

    python -m benchmarks.scheduling_cost [--repetitions 7] [--policies dualmap,llm-d]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from scheduling.blocks import BlockRule, cache_seed
from scheduling.chain import Chain
from scheduling.decision import Decision, Policy, RouteQuery
from scheduling.hotness import HotnessRule, HotnessTree, HotnessWindow
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.policies import build_policy
from scheduling.prompt import chat_prompt
from scheduling.rebalance import HeldRequest, HotQueue, plan_rebalance
from scheduling.settings import SchedulingSettings
from scheduling.view import ClusterView

FLEET_SIZES = (8, 500)
PROMPT_BYTES = (2 * 1024, 32 * 1024)


def cpu_us(work: Callable[[], object], loops: int, repetitions: int) -> float:
    """Microseconds of CPU for one call."""
    best_s = float("inf")
    for _ in range(repetitions):
        started_s = time.process_time()
        for _ in range(loops):
            work()
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / loops * 1e6


def view_of(count: int, settings: SchedulingSettings) -> ClusterView:
    ids = [f"instance-{number:03}" for number in range(count)]
    instances = {name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY) for name in ids}
    return ClusterView.build(
        epoch=1,
        tree_version=1,
        instances=instances,
        tree=HotnessTree({1: 1}),
        virtual_nodes=settings.virtual_nodes,
    )


def decision_costs(policy_name: str, repetitions: int) -> Iterator[tuple[str, float]]:
    """Candidates and choice, as a replica does them around the store call."""
    settings = SchedulingSettings.model_validate({"policy": policy_name})
    policy = build_policy(settings)
    for count in FLEET_SIZES:
        view = view_of(count, settings)
        query = RouteQuery(Chain(tuple(range(1, 65)), 128, 64 * 128), settings.slo_ttft_s)
        loads = {
            name: InstanceLoad(name, InstanceState.READY, pending_tokens=100 * index, hit_blocks=index % 7)
            for index, name in enumerate(policy.candidates(query, view))
        }

        decide = partial(decide_once, policy, query, view, loads)
        yield f"decision, {policy_name}, {count} instances", cpu_us(decide, 4000 // count + 20, repetitions)


def decide_once(policy: Policy, query: RouteQuery, view: ClusterView, loads: Mapping[str, InstanceLoad]) -> Decision:
    policy.candidates(query, view)
    return policy.choose(query, loads)


def prompt_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """Rendering a chat of one system prompt and some turns, and cutting it into a chain."""
    rule, seed = BlockRule.of(SchedulingSettings()), cache_seed("model")
    for size in PROMPT_BYTES:
        turn = "word " * (size // 5 // 8)
        body = {"messages": [{"role": "user", "content": turn} for _ in range(8)]}
        prompt = chat_prompt(body)
        label = f"{size // 1024} KB prompt"
        yield f"render, {label}", cpu_us(partial(chat_prompt, body), 2000, repetitions)
        yield f"hash, {label}", cpu_us(partial(rule.chain, prompt, seed, 4.0), 2000, repetitions)


def ring_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """Both rings, for one instance more and less."""
    settings = SchedulingSettings()
    for count in FLEET_SIZES:
        full = view_of(count, settings).rings
        fewer = full.with_members(full.members[1:])
        label = f"{count} instances x {settings.virtual_nodes} anchors"
        yield f"build, {label}", cpu_us(partial(view_of, count, settings), 1, repetitions)
        yield f"add one, {label}", cpu_us(partial(fewer.with_members, full.members), 3, repetitions)
        yield f"remove one, {label}", cpu_us(partial(full.with_members, fewer.members), 3, repetitions)
        yield f"look a pair up, {label}", cpu_us(partial(full.pair, 7), 5000, repetitions)


def hotness_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """A full window of 4096 requests with long heads, a fifth of them on one popular prompt."""
    settings, rng = SchedulingSettings(), random.Random(1)
    window = HotnessWindow(10**9, settings.hotness_window_requests, settings.max_key_blocks)
    popular = tuple(range(1, 13))

    def head() -> tuple[int, ...]:
        return (*(popular if rng.random() < 0.2 else ()), *(rng.getrandbits(64) for _ in range(40)))

    heads = [head() for _ in range(settings.hotness_window_requests)]
    for at_ms, each in enumerate(heads):
        window.add(at_ms, each)
    for count in FLEET_SIZES:
        grow = partial(window.grow, HotnessTree(), count, HotnessRule())
        yield f"grow the tree, {count} instances", cpu_us(grow, 20, repetitions)
    yield "count one request", cpu_us(partial(window.add, 10**6, heads[0]), 2000, repetitions)


def rebalance_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """A queue so long that every second request must go."""
    rng = random.Random(2)
    for count in (50, 1000):
        held = tuple(HeldRequest(str(i), rng.randint(1, 4000), 4000, 5.0, 0.0, "b", 500) for i in range(count))
        pending = sum(request.uncached_tokens for request in held)
        queue = HotQueue(
            InstanceLoad("a", InstanceState.READY, pending_tokens=pending),
            held,
            {"b": InstanceLoad("b", InstanceState.READY, prefill_tokens_per_s=8000.0 * count / 50)},
        )
        yield f"plan a rebalance of {count} held requests", cpu_us(partial(plan_rebalance, queue), 3, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--policies", default="dualmap,min-ttft,llm-d")
    arguments = parser.parse_args()
    for name in arguments.policies.split(","):
        report(decision_costs(name, arguments.repetitions))
    for costs in (prompt_costs, ring_costs, hotness_costs, rebalance_costs):
        report(costs(arguments.repetitions))


def report(costs: Iterator[tuple[str, float]]) -> None:
    for label, cost_us in costs:
        print(f"{label:<55} {cost_us:12.1f} µs", flush=True)


if __name__ == "__main__":
    main()
