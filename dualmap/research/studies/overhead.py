"""The cost of scheduling: CPU time of each step, and memory of the metadata, against the size of the fleet."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dualmap.research.bench import Bench
from dualmap.research.report import Section
from dualmap.research.studies.plan import DEFAULT_POLICY, PAPER_SLO_S, Plan, variant_of
from dualmap.research.table import Cell, Table
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply, Search, SearchRules
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import cache_seed, chain_of_trace
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.rebalance import plan_rebalance
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import PolicyName
from dualmap.scheduling.state.hotness import HotnessWindow
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import at_once, drive_now
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace
from dualmap.statestore.memory.sorted_set import SortedSet

POLICIES: tuple[PolicyName, ...] = ("dualmap", DEFAULT_POLICY, "min-ttft", "preble", "llm-d")
QUEUE_LENGTHS = (16, 64, 256)
_SEED = cache_seed("overhead")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """CPU microseconds of one request's steps."""

    searching_us: float
    """Work of a replica around the store calls: candidates, weights or choice, and the decision."""
    placing_us: float
    """Work of the store: loads and hits, weighing, queueing, dispatching, stamping metadata."""
    releasing_us: float
    """First token and finish."""


class _TimedFleet(SimulatedFleet):
    """Counts the time of its store calls."""

    spent_s = 0.0

    async def place(self, placement: Placement) -> PlaceReply:
        started_s = time.process_time()
        try:
            return await super().place(placement)
        finally:
            self.spent_s += time.process_time() - started_s

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        started_s = time.process_time()
        try:
            return await super().observe(instance_ids, chain)
        finally:
            self.spent_s += time.process_time() - started_s


def measure_steps(policy_name: PolicyName, instances: int, trace: Trace, repetitions: int) -> StepCosts:
    """Measure the steps on a pool that has seen the trace's first requests; process CPU time, this machine."""
    settings = variant_of(policy_name).scheduling.model_copy(update={"block_tokens": trace.block_tokens})
    policy, order, turn = build_policy(settings), queue_order_of(settings), 0
    pool = SimulatedPool(settings, lambda: turn * 100)
    for number in range(instances):
        pool.put_instance(InstanceSpec(f"i{number:03d}", f"http://i{number:03d}", state=InstanceState.READY))
    fleet = _TimedFleet(pool, None)
    chains = [chain_of_trace(r.hash_ids, r.input_tokens, _SEED, trace.block_tokens) for r in trace.requests]
    rules = SearchRules(policy, order, fleet, settings.decode_stall_s)
    placing_s = releasing_s = 0.0
    for turn in range(repetitions):
        chain = chains[turn % len(chains)]
        request = StoredRequest(
            str(turn),
            "r",
            "",
            RequestState.HELD,
            1,
            uncached_tokens=0,
            prompt_tokens=chain.prompt_tokens,
            expected_output_tokens=256,
            slo_ms=5000,
        )
        started_s = time.process_time()
        search = Search(rules, RouteQuery(chain, PAPER_SLO_S), request)
        placed = drive_now(search.run(), fleet).placed
        placed_s = time.process_time()
        pool.release(Release(request.request_id, placed.decision.instance_id, seen=True))
        pool.release(Release(request.request_id))
        placing_s += placed_s - started_s
        releasing_s += time.process_time() - placed_s
    seconds = (placing_s - fleet.spent_s, fleet.spent_s, releasing_s)
    return StepCosts(*(1e6 * spent_s / repetitions for spent_s in seconds))


def measure_rebalance_us(held: int) -> float:
    """CPU microseconds to plan one round over a queue of ``held`` late requests."""
    pool = SimulatedPool(variant_of("dualmap").scheduling, lambda: 1000)
    for instance_id in ("hot", "cool"):
        pool.put_instance(InstanceSpec(instance_id, "http://x", state=InstanceState.READY))
    late = StoredRequest(
        "",
        "r",
        "hot",
        RequestState.HELD,
        1,
        uncached_tokens=9000,
        prompt_tokens=9000,
        expected_output_tokens=256,
        slo_ms=5000,
        enqueued_ms=1,
        dispatched_ms=0,
        prefilled_ms=0,
        alternative_id="cool",
        alternative_uncached_tokens=9000,
    )
    at_once(pool.store.adopt([replace(late, request_id=str(number)) for number in range(held)]))
    return 1e6 * _cpu_s(lambda: _plan(pool), repetitions=20)


def _plan(pool: SimulatedPool) -> int:
    queue = at_once(pool.store.queues.queue("hot"))
    return 0 if queue is None else len(plan_rebalance(queue))


def _cpu_s(work: Callable[[], object], repetitions: int) -> float:
    started = time.process_time()
    for _ in range(repetitions):
        work()
    return (time.process_time() - started) / repetitions


def measure_kv_bytes(blocks: int) -> float:
    """Bytes of one instance's KV metadata with so many blocks, as allocated."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    metadata = SortedSet()
    for block in range(blocks):
        metadata.put(((1 << 60) + block).to_bytes(8, "big"), float(blocks - block))
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(metadata) == blocks
    return size


def measure_window_bytes(trace: Trace, head_blocks: int) -> float:
    """Bytes of the hotness window holding the trace's requests."""
    heads = [chain_of_trace(r.hash_ids, r.input_tokens, _SEED).hashes for r in trace.requests]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    window = HotnessWindow(1 << 40, len(heads), head_blocks)
    for head in heads:
        window.add(0, head)
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return size


def overhead_section(plan: Plan, bench: Bench) -> Section:
    """The section on overhead, measured here in this process: figures differ between machines, their growth
    does not."""
    trace = TraceSource(plan.toolagent, 1000, seed=plan.seed).load()
    steps: list[list[Cell]] = []
    for policy in POLICIES:
        for instances in plan.overhead_sizes:
            costs = measure_steps(policy, instances, trace, plan.overhead_repetitions)
            total = costs.searching_us + costs.placing_us + costs.releasing_us
            steps.append([policy, instances, costs.searching_us, costs.placing_us, costs.releasing_us, total])
    rebalance: list[list[Cell]] = [[held, measure_rebalance_us(held)] for held in QUEUE_LENGTHS]
    memory: list[list[Cell]] = []
    for tokens, block_tokens in ((1_000_000, 512), (1_000_000, 128), (500_000, 512), (500_000, 128)):
        blocks = tokens // block_tokens
        size = measure_kv_bytes(blocks)
        memory.append([f"{tokens:,}", block_tokens, f"{blocks:,}", size / 1024, size / blocks, 32 * size / 2**20])
    window = measure_window_bytes(trace, 64) / len(trace.requests)
    return Section(
        name="overhead",
        title="Scheduler overhead and metadata footprint",
        question=(
            "Search, placement and rebalancing against the size of the cluster: CPU microseconds a request on this "
            "machine, over the in-memory store. Over Redis each request adds its share of a round trip (see the "
            "benchmarks of the store); a pair needs two instances' figures, the fleet-wide policies need all."
        ),
        findings=[_growth_finding(steps, plan.overhead_sizes)],
        tables=[
            Table("CPU a request", ("policy", "instances", "search µs", "store: place µs",
                                        "first token, finish µs", "sum µs"), steps),
            Table("One rebalancing plan", ("held requests", "CPU µs"), rebalance),
            Table("KV metadata of one instance, as allocated in memory",
                      ("KV capacity, tokens", "tokens a block", "blocks", "KiB", "bytes a block", "MiB for 32"),
                      memory),
            Table("Hotness window", ("bytes a request",), [[window]]),
        ],
    )  # fmt: skip


def _growth_finding(steps: list[list[Cell]], sizes: tuple[int, ...]) -> str:
    def sum_us(policy: str, instances: int) -> float:
        return next(float(row[5]) for row in steps if row[0] == policy and row[1] == instances)

    small, large = sizes[0], sizes[-1]
    growths = (f"{policy} {sum_us(policy, large) / sum_us(policy, small):.1f}" for policy in POLICIES)
    return f"From {small} to {large} instances the cost of a request is multiplied by: " + ", ".join(growths) + "."
