"""What scheduling costs: CPU time of each step, and memory of the metadata, against the size of the fleet."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from scheduling.blocks import cache_seed, chain_of_trace
from scheduling.chain import Chain
from scheduling.decision import Horizon, RouteQuery
from scheduling.hotness import HotnessWindow
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.policies import build_policy
from scheduling.rebalance import plan_rebalance
from scheduling.settings import PolicyName
from scheduling.view import ClusterView
from simulation.choosing import choose
from simulation.evaluate.plan import DEFAULT_POLICY, PAPER_SLO_S, Plan, scheduling_for
from simulation.evaluate.section import Cell, DataTable, Section
from simulation.sources import TraceSource
from simulation.traces import Trace
from statestore.ledger import PoolLedger
from statestore.ledger.kv import KvMetadata
from statestore.queues import hot_queue
from statestore.reservation import Reservation

POLICIES: tuple[PolicyName, ...] = ("dualmap", DEFAULT_POLICY, "min-ttft", "preble", "llm-d")
QUEUE_LENGTHS = (16, 64, 256)
_SEED = cache_seed("overhead")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """CPU microseconds of one request's steps."""

    kv_access_us: float
    """Loads and hits of all candidates, of those of a second look too."""
    routing_us: float
    """Candidates and choice."""
    reserving_us: float
    """Queueing, counting, dispatching, stamping metadata, and what finishing takes back."""


def measure_steps(policy_name: PolicyName, instances: int, trace: Trace, repetitions: int) -> StepCosts:
    """On a ledger that has seen the trace's first requests; process CPU time, this machine."""
    settings = scheduling_for(policy_name).model_copy(update={"block_tokens": trace.block_tokens})
    ledger, policy = PoolLedger(settings), build_policy(settings)
    for number in range(instances):
        spec = InstanceSpec(f"i{number:03d}", f"http://i{number:03d}", state=InstanceState.READY)
        ledger.put_instance(spec, 0)
    members = ledger.membership()
    view = ClusterView.build(
        epoch=members.epoch, tree_version=0, instances=members.instances, tree=members.tree,
        virtual_nodes=settings.virtual_nodes,
    )  # fmt: skip
    chains = [chain_of_trace(r.hash_ids, r.input_tokens, _SEED, trace.block_tokens) for r in trace.requests]
    looking_s = deciding_s = reserving_s = 0.0

    def look(instance_ids: Iterable[str], horizon: bool) -> tuple[Mapping[str, InstanceLoad], Horizon | None]:
        nonlocal looking_s
        started = time.process_time()
        seen = ledger.observe(instance_ids, query.chain, now_ms, horizon=horizon)
        looking_s += time.process_time() - started
        return seen.loads, seen.horizon

    for turn in range(repetitions):
        query, now_ms = RouteQuery(chains[turn % len(chains)], PAPER_SLO_S, sequence=turn), turn * 100
        started = time.process_time()
        decision = choose(policy, query, view, look)
        decided = time.process_time()
        reservation = Reservation(
            str(turn), "r", decision.instance_id, query.chain, decision.uncached_tokens, 256, 5000,
            decision.alternative_id, decision.alternative_uncached_tokens, ttft_features=decision.ttft_features,
        )  # fmt: skip
        ledger.reserve(reservation, now_ms)
        ledger.first_token(str(turn), decision.instance_id, query.chain, now_ms)
        ledger.finish(str(turn), now_ms)
        deciding_s += decided - started
        reserving_s += time.process_time() - decided
    seconds = (looking_s, deciding_s - looking_s, reserving_s)
    return StepCosts(*(1e6 * spent_s / repetitions for spent_s in seconds))


def measure_rebalance_us(held: int, chain: Chain) -> float:
    """CPU microseconds to plan one round over a queue of ``held`` late requests."""
    settings = scheduling_for("dualmap")
    ledger = PoolLedger(settings)
    for instance_id in ("hot", "cool"):
        ledger.put_instance(InstanceSpec(instance_id, "http://x", state=InstanceState.READY), 0)
    for number in range(held + 4):
        ledger.reserve(Reservation(str(number), "r", "hot", chain, 9000, 256, 5000, "cool", 9000), 0)
    return 1e6 * _cpu_s(lambda: _plan(ledger), repetitions=20)


def _plan(ledger: PoolLedger) -> int:
    snapshot = ledger.queue("hot", 1000)
    return 0 if snapshot is None else len(plan_rebalance(hot_queue(snapshot)))


def _cpu_s(work: Callable[[], object], repetitions: int) -> float:
    started = time.process_time()
    for _ in range(repetitions):
        work()
    return (time.process_time() - started) / repetitions


def measure_kv_bytes(blocks: int) -> float:
    """Bytes of one instance's KV metadata with so many blocks, as allocated."""
    hashes = tuple(range(1 << 60, (1 << 60) + blocks))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    metadata = KvMetadata()
    metadata.give(tuple(value + 1 for value in hashes), blocks)
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


def overhead_section(plan: Plan) -> Section:
    """Measured here, in this process: figures differ between machines, their growth does not."""
    trace = TraceSource(plan.toolagent, 1000, seed=plan.seed).load()
    steps: list[list[Cell]] = []
    for policy in POLICIES:
        for instances in plan.overhead_sizes:
            costs = measure_steps(policy, instances, trace, plan.overhead_repetitions)
            total = costs.kv_access_us + costs.routing_us + costs.reserving_us
            steps.append([policy, instances, costs.kv_access_us, costs.routing_us, costs.reserving_us, total])
    chain = chain_of_trace(trace.requests[0].hash_ids, trace.requests[0].input_tokens, _SEED)
    rebalance: list[list[Cell]] = [[held, measure_rebalance_us(held, chain)] for held in QUEUE_LENGTHS]
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
            "KV access, routing and rebalancing against the size of the cluster: CPU microseconds a request on this "
            "machine, over the in-memory store. Over Redis each request adds its share of a round trip (see the "
            "benchmarks of the store); a pair needs two instances' figures, the fleet-wide policies need all."
        ),
        findings=[_growth_finding(steps, plan.overhead_sizes)],
        tables=[
            DataTable("CPU a request", ("policy", "instances", "KV access µs", "routing µs", "reserve to finish µs",
                                        "sum µs"), steps),
            DataTable("One rebalancing plan", ("held requests", "CPU µs"), rebalance),
            DataTable("KV metadata of one instance, as allocated in memory",
                      ("KV capacity, tokens", "tokens a block", "blocks", "KiB", "bytes a block", "MiB for 32"),
                      memory),
            DataTable("Hotness window", ("bytes a request",), [[window]]),
        ],
    )  # fmt: skip


def _growth_finding(steps: list[list[Cell]], sizes: tuple[int, ...]) -> str:
    def sum_us(policy: str, instances: int) -> float:
        return next(float(row[5]) for row in steps if row[0] == policy and row[1] == instances)

    small, large = sizes[0], sizes[-1]
    growths = (f"{policy} {sum_us(policy, large) / sum_us(policy, small):.1f}" for policy in POLICIES)
    return f"From {small} to {large} instances the cost of a request is multiplied by: " + ", ".join(growths) + "."
