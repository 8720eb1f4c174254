"""The cost of the shared store: CPU of the server and of the client for a whole request, and memory per KV block.

    python benchmarks/store_cost.py [--instances 8 500] [--blocks 4 64] [--held 0 500] [--tenants 0 1 10000]
        [--runs 0 200]

Starts a private Valkey, sends requests through ``PoolStore`` from 64 callers at once (``--callers``) as routers do (the
search for an instance, the first token and the end through an outbox, and the plans of the queues that these made room
in), and divides the CPU time of this process and of the server by the number of requests. Half of a prompt's blocks are
shared by many. With ``--held`` every instance has so many requests in its queue, and each request that ends lets one of
them go. Figures are medians over the repetitions; they are not tests, as a busy machine changes them. What it does not
change are the instructions of the server, which ``--instructions`` counts by callgrind (of Valgrind), in which the
server takes some fifty times as long. The scripts' clock stands still meanwhile: else instances that are so slow would
be taken for stalled ones, of which requests look for others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import redis
import uvloop

from dualmap.router.pool.outbox import Outbox
from dualmap.router.pool.queue_planner import QueuePlanner
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.decision import RouteQuery
from dualmap.scheduling.placing.placement import (
    Claim,
    Observation,
    Placement,
    PlaceReply,
    PlaceStatus,
    Search,
    SearchRules,
)
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, Grant, grant_queue
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.charge import Charge
from dualmap.scheduling.request.metering import Account, used_by
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn, TurnEnd, hashed_name
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import drive
from dualmap.scheduling.tenants.budgets import (
    BudgetGroup,
    Draws,
    Limit,
    Measure,
    Period,
    budgets_of,
    drawn_text,
    returned,
)
from dualmap.statestore.embedded import EmbeddedValkey, server_binary
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.codec import ALL_WORK, BUDGET, WORK
from dualmap.statestore.pool.usage import day_of
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.redis.wire import OwnClock
from dualmap.statestore.settings import StoreSettings

CALLERS = 64
ROOTS = 200
BLOCK_TOKENS = 128
LIMITS = (
    Limit(Measure.REQUESTS, Period.MINUTE, 10**9),
    Limit(Measure.TOKENS, Period.MINUTE, 10**12),
    Limit(Measure.TOKENS, Period.MONTH, 10**15),
    Limit(Measure.REQUESTS, Period.IN_FLIGHT, 10**9),
)
REPLICA = "replica"
START_TIMEOUT_S = 120.0
WHOLE = "whole request"


@dataclass(frozen=True, slots=True)
class Scenario:
    instances: int
    blocks: int
    held: int
    """In the queue of each instance."""
    tenants: int = 0
    """Tenants whose requests they are in turn, each with four limits, metered, and with a share; 0: none."""
    callers: int = CALLERS
    """That call at once."""
    runs: int = 0
    """Agents' runs that they are turns of, in turn, which all have memory; 0: runs do not wait for memory."""

    def __str__(self) -> str:
        whose = f", {self.tenants} tenants" if self.tenants else ""
        called = f", {self.callers} callers" if self.callers != CALLERS else ""
        turns = f", turns of {self.runs} runs" if self.runs else ""
        return f"{self.instances} instances, {self.blocks} blocks, {self.held} held on each{whose}{turns}{called}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per request, and thousands of instructions."""

    client_us: float
    server_us: float
    wall_us: float
    server_kinstr: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(*[mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)])


class ServerCpu:
    """CPU seconds and instructions that the server has used."""

    def __init__(self, url: str, callers: int = CALLERS) -> None:
        self.callers = callers
        """Callers that use it at once."""
        self._client = redis.Redis.from_url(url)

    def instructions(self) -> int:
        """Instructions of its main thread; 0 where it does not run in callgrind."""
        pid = str(self._client.info("server")["process_id"])
        if "callgrind" not in Path(f"/proc/{pid}/cmdline").read_text():
            return 0
        counted = subprocess.run(("callgrind_control", "-e", pid), capture_output=True, text=True, check=True).stdout
        found = re.search(r"Th 1\s+([\d,]+)", counted)
        return int(found[1].replace(",", "")) if found else 0

    def used_s(self) -> float:
        facts = self._client.info("cpu")
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])

    def memory_bytes(self, key: bytes) -> int:
        return int(self._client.memory_usage(key, samples=0) or 0)


@dataclass(slots=True)
class BenchFleet:
    """The store as one replica's searches and plans see it."""

    pool: PoolStore
    view: ClusterView
    learned: Learned = field(default_factory=Learned)
    trips: int = 0
    placed: int = 0
    dispatched: deque[Grant] = field(default_factory=deque)
    """Requests whose instances work on them, the first dispatched first."""

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return frozenset()

    async def place(self, placement: Placement) -> PlaceReply:
        self.trips += 1
        return await self.pool.place(placement)

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        self.trips += 1
        return await self.pool.observe(instance_ids, chain)

    async def refresh(self) -> None:
        """Members stay as they are."""

    async def commit(self, plan: QueuePlan) -> CommitReply:
        reply = await self.pool.commit(plan, replica_id=REPLICA)
        self.dispatched.extend(reply.grants)
        return reply


class Bench:
    """Requests through the steps of their life, on one pool."""

    def __init__(
        self, pool: PoolStore, view: ClusterView, scheduling: SchedulingSettings, tenants: int = 0, runs: int = 0
    ) -> None:
        self.fleet = BenchFleet(pool, view)
        self._pool = pool
        self._order = queue_order_of(scheduling)
        self._rules = SearchRules(build_policy(scheduling), self._order, self.fleet, scheduling.decode_stall_s)
        self._planner = QueuePlanner(lambda queue: drive(grant_queue(queue, self._order), self.fleet))
        self._outbox = Outbox(pool.release, self._planner.plan, clock=RealClock())
        self._delivering = asyncio.create_task(self._outbox.run())
        self._tenants = tenants
        self._weight = 1.0 if tenants else None
        self._drawn: dict[str, Draws] = {}
        self._runs = runs

    async def close(self) -> None:
        """End the plans under way, and the outbox."""
        await self._planner.done()
        self._delivering.cancel()
        await asyncio.gather(self._delivering, return_exceptions=True)

    async def place(self, request_id: str, chain: Chain) -> None:
        request = StoredRequest(
            request_id,
            REPLICA,
            "",
            RequestState.HELD,
            1,
            uncached_tokens=0,
            prompt_tokens=chain.prompt_tokens,
            expected_output_tokens=256,
            slo_ms=3_600_000,
        )
        draws: Draws | None = None
        if self._tenants:
            tenant = f"tenant-{len(self._drawn) % self._tenants}"
            draws = self._drawn[request_id] = BudgetGroup(budgets_of(tenant, LIMITS)).draws(chain.prompt_tokens, 256)
            account = str(Account(tenant, "key", "", "model"))
            request = replace(request, tenant=tenant, drawn=drawn_text(draws), account=account, shares_as=tenant)
        query = RouteQuery(chain, 3600.0)
        claim = Claim(request.tenant, request.account, draws, self._weight)
        turn: Turn | None = None
        if self._runs:  # all of them have memory
            name = hashed_name("", f"run {self.fleet.placed % self._runs}")
            turn = Turn(request_id, REPLICA, name, chain, 3600.0)
        placed = (await drive(Search(self._rules, query, request, claim, turn=turn).run(), self.fleet)).placed
        self.fleet.placed += 1
        if placed.reply.status is PlaceStatus.DISPATCHED:
            grant = Grant(request_id, placed.decision.instance_id, REPLICA, 1, placed.reply.chosen.uncached_tokens)
            self.fleet.dispatched.append(grant)
        if placed.reply.queue is not None:
            self._planner.plan(placed.reply.queue)

    async def first_token(self, grant: Grant) -> None:
        note = '{"features":[1.0,0.1,0.2,0.3,0.4]}'
        await self._settle(Release(grant.request_id, grant.instance_id, note=note))

    async def finish(self, grant: Grant) -> None:
        gives_back: Draws | None = None
        used = ""
        if self._tenants:
            gives_back = returned(self._drawn[grant.request_id], 512, 100, answered=True)
            used = used_by(Outcome.COMPLETED, Charge(512, 100, 256, reported=True))
        note = '{"text_bytes":2048,"tokens":512}'
        await self._settle(
            Release(
                grant.request_id, "", REPLICA, 1, note=note, seen=False, returned=gives_back, used=used,
                turn=TurnEnd(grant.request_id, REPLICA, 100, 200, 2000) if self._runs else None,
            )
        )  # fmt: skip

    async def _settle(self, release: Release) -> None:
        """Once the store knows."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.post(release, lambda: settled.set_result(None))
        await settled


async def timed(cpu: ServerCpu, calls: Iterable[Callable[[], Awaitable[object]]], count: int) -> Cost:
    """The cost of one of ``count`` calls, sent by the scenario's callers that each wait for their answer."""
    waiting = iter(calls)

    async def caller() -> None:
        for call in waiting:
            await call()

    server_s, client_s, wall_s = cpu.used_s(), time.process_time(), time.perf_counter()
    instructions = cpu.instructions()
    async with asyncio.TaskGroup() as callers:
        for _ in range(cpu.callers):
            callers.create_task(caller())
    client_s, wall_s = time.process_time() - client_s, time.perf_counter() - wall_s
    instructions = cpu.instructions() - instructions
    server_s = cpu.used_s() - server_s
    per_call = 1e6 / count
    return Cost(client_s * per_call, server_s * per_call, wall_s * per_call, instructions / count / 1000)


def chains(count: int, blocks: int, random_source: random.Random) -> list[Chain]:
    """Half of their blocks are those of one of ``ROOTS`` prefixes."""
    shared = blocks // 2
    roots = [tuple(random_source.getrandbits(64) for _ in range(shared)) for _ in range(ROOTS)]
    return [
        Chain(
            random_source.choice(roots) + tuple(random_source.getrandbits(64) for _ in range(blocks - shared)),
            BLOCK_TOKENS,
            blocks * BLOCK_TOKENS,
        )
        for _ in range(count)
    ]


async def measure(
    url: str, scheduling: SchedulingSettings, scenario: Scenario, requests: int, seed: int, own_clock: OwnClock | None
) -> tuple[dict[str, Cost], float]:
    """The cost of each step and of all; and round trips to place a request."""
    random_source = random.Random(seed)
    cpu = ServerCpu(url, scenario.callers)
    store = RedisStore(StoreSettings(url=url, command_timeout_s=120.0), scheduling=scheduling, own_clock=own_clock)
    await store.open()
    pool: PoolStore = store.pool("default")
    bench: Bench | None = None
    try:
        bench = Bench(
            pool, await members(pool, scheduling, scenario, requests), scheduling, scenario.tenants, scenario.runs
        )
        await fill_books(url, scenario.tenants)
        waiting = scenario.held * scenario.instances
        filling, *prompts = chains(waiting + requests + 1, scenario.blocks, random_source)
        for number, chain in enumerate([filling, *prompts[:waiting]]):
            await bench.place(f"filling-{number}", chain)
        bench.fleet.trips = bench.fleet.placed = 0
        ping = partial(store.calls("default").command, "PING")
        await timed(cpu, [ping] * 1000, 1000)  # warm up both sides
        costs = {"ping": await timed(cpu, [ping] * requests, requests)}
        if scenario.held:
            costs[WHOLE] = await whole_lives(cpu, bench, prompts[waiting:])
        else:
            costs |= await by_steps(cpu, bench, prompts)
        return costs, bench.fleet.trips / bench.fleet.placed
    finally:
        if bench is not None:
            await bench.close()
        await store.close()


async def members(pool: PoolStore, scheduling: SchedulingSettings, scenario: Scenario, requests: int) -> ClusterView:
    """Instances that dispatch at once where nothing is to be held, else one request at a time."""
    room: dict[str, Any] = {"max_running_requests": 1, "max_queued_requests": 100 * scenario.held}
    if not scenario.held:
        room = {
            "dispatch_window_tokens": 10**9,
            "max_running_requests": requests,
            "kv_capacity_tokens": 10**8,
        }
    for number in range(scenario.instances):
        await pool.members.put_instance(
            InstanceSpec(f"instance-{number:03}", "http://x", state=InstanceState.READY, **room)
        )
    membership = await pool.membership()
    return ClusterView.build(
        epoch=membership.epoch,
        tree_version=membership.tree_version,
        instances=membership.instances,
        tree=membership.tree,
    )


async def fill_books(url: str, tenants: int) -> None:
    """Enter tenants in the books, as if each had sent requests before: then a request finds its tenant's entry among so
    many, as it does in a fleet that runs."""
    keys, client = PoolKeys("dualmap", "default"), redis.Redis.from_url(url, socket_timeout=START_TIMEOUT_S)
    if not tenants:
        return
    now_ms = int(1000 * float(client.time()[0]))
    later_ms = now_ms + 3_600_000  # no tenant is forgotten, however slow the server is
    client.hset(keys.books, "*", ALL_WORK.pack(0, now_ms, tenants, 0, 0))
    kinds = [each.entry[1] for each in budgets_of("tenant", LIMITS)]
    book = WORK.pack(0.5, 0.5, now_ms, 1, now_ms, 0, 0) + b"".join([BUDGET.pack(kind, 1, now_ms) for kind in kinds])
    for first in range(0, tenants, 1000):
        names = [f"tenant-{number}" for number in range(first, min(first + 1000, tenants))]
        client.hset(keys.books, mapping=dict.fromkeys(names, book))
        client.zadd(keys.shares_active, dict.fromkeys(names, later_ms))
        accounts = [str(Account(name, "key", "", "model")) for name in names]
        client.hset(keys.usage(day_of(now_ms).isoformat()), mapping=dict.fromkeys(accounts, "1 512 100 256 0 0 0"))


async def by_steps(cpu: ServerCpu, bench: Bench, prompts: Sequence[Chain]) -> dict[str, Cost]:
    """All requests through one step, then all through the next: nothing is held, so each goes by itself."""
    count, costs = len(prompts), dict[str, Cost]()
    placing = [
        lambda number=number, chain=chain: bench.place(f"r{number}", chain) for number, chain in enumerate(prompts)
    ]
    costs["place"] = await timed(cpu, placing, count)
    sent = list(bench.fleet.dispatched)
    steps = {"first token": bench.first_token, "finish": bench.finish}
    for name, step in steps.items():
        calls = [lambda step=step, grant=grant: step(grant) for grant in sent]
        costs[name] = await timed(cpu, calls, count)
    costs[WHOLE] = sum(costs.values(), Cost(0.0, 0.0, 0.0, 0.0))
    return costs


async def whole_lives(cpu: ServerCpu, bench: Bench, prompts: Sequence[Chain]) -> Cost:
    """Costs in a steady state: one request comes and waits, another has its first token and ends, and lets a third
    go."""
    dispatched = bench.fleet.dispatched

    async def live(number: int, chain: Chain) -> None:
        await bench.place(f"r{number}", chain)
        if dispatched:
            grant = dispatched.popleft()
            await bench.first_token(grant)
            await bench.finish(grant)

    calls = [lambda number=number, chain=chain: live(number, chain) for number, chain in enumerate(prompts)]
    return await timed(cpu, calls, len(prompts))


async def bytes_per_block(url: str, blocks: int) -> float:
    """Memory of one block in an instance's KV metadata."""
    scheduling = SchedulingSettings()
    store = RedisStore(StoreSettings(url=url), scheduling=scheduling)
    await store.open()
    try:
        pool = store.pool("memory")
        await pool.members.put_instance(
            InstanceSpec("a", "http://a", state=InstanceState.READY, kv_capacity_tokens=blocks * BLOCK_TOKENS)
        )
        membership = await pool.membership()
        view = ClusterView.build(
            epoch=0, tree_version=0, instances=membership.instances, tree=membership.tree, virtual_nodes=16
        )
        bench = Bench(pool, view, scheduling)
        for number, chain in enumerate(chains(blocks // 32 + ROOTS, 64, random.Random(7))):
            await bench.place(f"r{number}", chain)
            await bench.finish(bench.fleet.dispatched.popleft())
        await bench.close()
        cached = (await pool.loads())["a"].cached_blocks
        return ServerCpu(url).memory_bytes(PoolKeys("dualmap", "memory").kv("a")) / cached
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[8, 500])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 64], help="of a prompt")
    parser.add_argument("--held", type=int, nargs="+", default=[0, 500], help="on each instance; of 8 instances only")
    parser.add_argument(
        "--tenants",
        type=int,
        nargs="+",
        default=[0],
        help="whose requests they are, with four limits each (0: none)",
    )
    parser.add_argument(
        "--runs", type=int, nargs="+", default=[0], help="agents' runs whose turns they are; of no held requests only"
    )
    parser.add_argument("--callers", type=int, default=CALLERS, help="that call at once")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--policy", default=SchedulingSettings().policy)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--instructions", action="store_true", help="count the server's instructions, with Valgrind")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    scheduling = SchedulingSettings(policy=options.policy)
    scenarios = [
        Scenario(instances, blocks, held, tenants, options.callers, runs)
        for held in options.held
        for instances in (options.instances if not held else [8])
        for blocks in options.blocks
        for tenants in options.tenants
        for runs in (options.runs if not held else [0])
    ]
    report = {str(scenario): medians(scheduling, scenario, options) for scenario in scenarios}
    with EmbeddedValkey() as server:
        block_bytes = round(uvloop.run(bytes_per_block(server.url, 50_000)), 1)
    if options.json:
        print(json.dumps({"requests": report, "bytes_per_kv_block": block_bytes}, indent=2))
        return
    for scenario, steps in report.items():
        print(f"{scenario}, {steps.pop('round trips to place')} round trips to place")
        for step, figures in steps.items():
            print(f"    {step:<15}" + "".join(f"{name} {figure:>7}   " for name, figure in figures.items()))
    print(f"KV metadata: {block_bytes} bytes per block")


@contextmanager
def private_server(in_callgrind: bool) -> Iterator[EmbeddedValkey]:
    """A server that ends with the context, in callgrind or not."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "valkey-server"
        script.write_text(
            f'#!/bin/sh\nexec valgrind -q --tool=callgrind --callgrind-out-file=/dev/null {server_binary()} "$@"\n'
        )
        script.chmod(0o755)
        server = EmbeddedValkey(binary=script if in_callgrind else None)
        server.start(START_TIMEOUT_S)
        try:
            yield server
        finally:
            server.stop()


def medians(scheduling: SchedulingSettings, scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    started_ms = int(1000 * time.time())
    own_clock = (lambda: started_ms) if options.instructions else None
    passes = []
    for seed in range(options.repeat):
        with private_server(options.instructions) as server:
            measured = measure(server.url, scheduling, scenario, options.requests, seed, own_clock)
            passes.append(uvloop.run(measured))
    figures: dict[str, Any] = {
        "round trips to place": round(statistics.median(trips for _, trips in passes), 2),
    }
    for step in passes[0][0]:
        figures[step] = {
            name: round(statistics.median(getattr(costs[step], name) for costs, _ in passes), 1)
            for name in ("server_us", "server_kinstr", "client_us", "wall_us")
        }
    return figures


if __name__ == "__main__":
    main()
