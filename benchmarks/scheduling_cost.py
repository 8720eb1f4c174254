"""CPU cost of the scheduling core alone: no store, no HTTP.

Process CPU time, best of several repetitions of a loop: other work on the machine disturbs a minimum least.

    python -m benchmarks.scheduling_cost [--repetitions 7] [--policies dualmap,llm-d]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from dualmap.api_bodies.prompt import chat_prompt
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.decision import Decision, Policy, RouteQuery
from dualmap.scheduling.placing.placement import (
    Chosen,
    Observation,
    Placement,
    PlaceReply,
    PlaceStatus,
    Search,
    SearchRules,
)
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import BlockRule, cache_seed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead, QueueOrder, plan_queue
from dualmap.scheduling.queues.rebalance import HotQueue, plan_rebalance
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import WINDOW_REQUESTS, HotnessRule, HotnessTree, HotnessWindow
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.ring import VIRTUAL_NODES
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import drive_now

FLEET_SIZES = (8, 500)
PROMPT_BYTES = (2 * 1024, 32 * 1024)
CHAIN = Chain(tuple(range(1, 65)), 128, 64 * 128)


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
    )


@dataclass(frozen=True, slots=True)
class CannedFleet:
    """Answers every placement with the same loads: what a search costs without the store."""

    view: ClusterView
    loads: Mapping[str, InstanceLoad]
    learned: Learned

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return frozenset()

    async def place(self, placement: Placement) -> PlaceReply:
        first, last = placement.weighing.instances[0], placement.weighing.instances[-1]
        seen = {first: self.loads[first], last: self.loads[last]}
        hits = {name: load.hit_blocks for name, load in seen.items()}
        return PlaceReply(PlaceStatus.DISPATCHED, Observation(1, 1, seen, hits=hits), Chosen(first, last))

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        return Observation(1, 1, self.loads, sequence=1)

    async def refresh(self) -> None:
        """The view stays as it is."""


def search_costs(policy_name: str, repetitions: int) -> Iterator[tuple[str, float]]:
    """A search for an instance, as a replica makes it around the store call, and what its choice means."""
    settings = SchedulingSettings.model_validate({"policy": policy_name})
    for count in FLEET_SIZES:
        view = view_of(count, settings)
        loads = {
            name: InstanceLoad(name, InstanceState.READY, pending_tokens=100 * index, hit_blocks=index % 7)
            for index, name in enumerate(view.ready)
        }
        search = partial(
            search_once, build_policy(settings), queue_order_of(settings), CannedFleet(view, loads, Learned())
        )
        yield f"search, {policy_name}, {count} instances", cpu_us(search, 4000 // count + 20, repetitions)


def search_once(policy: Policy, order: QueueOrder, fleet: CannedFleet) -> Decision:
    request = StoredRequest(
        "r",
        "replica",
        "",
        RequestState.HELD,
        1,
        uncached_tokens=0,
        prompt_tokens=CHAIN.prompt_tokens,
        expected_output_tokens=256,
        slo_ms=5000,
    )
    search = Search(SearchRules(policy, order, fleet, 3.0), RouteQuery(CHAIN, 5.0), request)
    return drive_now(search.run(), fleet).placed.decision


def plan_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """The cost of planning a full view of a queue, half of which cannot be on time."""
    rng = random.Random(3)
    order = QueueOrder(by_deadline=True, max_deferred_s=30.0)
    for count in (4, 64):
        entries = tuple(QueueEntry(str(i), 2000 + 100 * i, rng.randint(1, 8000)) for i in range(count))
        pending = sum(entry.uncached_tokens for entry in entries)
        queue = QueueHead(1000, InstanceLoad("a", InstanceState.READY, pending_tokens=pending), entries)
        yield f"plan a queue of {count} held requests", cpu_us(partial(plan_queue, queue, order), 200, repetitions)


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
        label = f"{count} instances x {VIRTUAL_NODES} anchors"
        yield f"build, {label}", cpu_us(partial(view_of, count, settings), 1, repetitions)
        yield f"add one, {label}", cpu_us(partial(fewer.with_members, full.members), 3, repetitions)
        yield f"remove one, {label}", cpu_us(partial(full.with_members, fewer.members), 3, repetitions)
        yield f"look a pair up, {label}", cpu_us(partial(full.pair, 7), 5000, repetitions)


def hotness_costs(repetitions: int) -> Iterator[tuple[str, float]]:
    """A full window of 4096 requests with long heads, a fifth of them on one popular prompt."""
    rng = random.Random(1)
    window = HotnessWindow(10**9)
    popular = tuple(range(1, 13))

    def head() -> tuple[int, ...]:
        return (*(popular if rng.random() < 0.2 else ()), *(rng.getrandbits(64) for _ in range(40)))

    heads = [head() for _ in range(WINDOW_REQUESTS)]
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
        held = tuple(
            StoredRequest(
                str(i),
                "r",
                "a",
                RequestState.HELD,
                1,
                uncached_tokens=rng.randint(1, 4000),
                prompt_tokens=4000,
                expected_output_tokens=256,
                slo_ms=5000,
                enqueued_ms=0,
                dispatched_ms=0,
                prefilled_ms=0,
                alternative_id="b",
                alternative_uncached_tokens=500,
            )
            for i in range(count)
        )
        pending = sum(request.uncached_tokens for request in held)
        queue = HotQueue(
            0,
            InstanceLoad("a", InstanceState.READY, pending_tokens=pending),
            held,
            {"b": InstanceLoad("b", InstanceState.READY, prefill_tokens_per_s=8000.0 * count / 50)},
        )
        yield f"plan a rebalance of {count} held requests", cpu_us(partial(plan_rebalance, queue), 3, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--policies", default="dualmap-least-cost,dualmap,min-ttft,llm-d")
    arguments = parser.parse_args()
    for name in arguments.policies.split(","):
        report(search_costs(name, arguments.repetitions))
    for costs in (prompt_costs, ring_costs, hotness_costs, plan_costs, rebalance_costs):
        report(costs(arguments.repetitions))


def report(costs: Iterator[tuple[str, float]]) -> None:
    for label, cost_us in costs:
        print(f"{label:<55} {cost_us:12.1f} µs", flush=True)


if __name__ == "__main__":
    main()
