"""What the shared store costs: CPU per call on both sides, and memory per KV block.

    python benchmarks/store_cost.py [--instances 8 500] [--requests 4000] [--repeat 3] [--policy dualmap]

Starts a private Valkey, sends requests through ``RedisPool`` from 64 concurrent callers, and divides the CPU time of
this process and of the server by the number of calls. Chains have 64 blocks, the first 32 shared by many. Figures are
medians over the repetitions; they are not tests, as a busy machine changes them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import redis
import uvloop

from scheduling.chain import Chain
from scheduling.idle_holder import idle_holder_cost
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore
from statestore.embedded import EmbeddedValkey
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.reservation import Newcomer, Reservation
from statestore.settings import StoreSettings

CONCURRENT = 64
CHAIN_BLOCKS = 64
SHARED_BLOCKS = 32
ROOTS = 200
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per call."""

    client_us: float
    server_us: float
    wall_us: float


class ServerCpu:
    """CPU seconds that the server has used."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)

    def used_s(self) -> float:
        facts = self._client.info("cpu")
        return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])

    def memory_bytes(self, key: bytes) -> int:
        return int(self._client.memory_usage(key, samples=0) or 0)


async def timed(cpu: ServerCpu, calls: Sequence[Callable[[], Awaitable[object]]]) -> Cost:
    """The cost of one of ``calls``, sent by ``CONCURRENT`` callers that each wait for their answer."""
    waiting = iter(calls)

    async def caller() -> None:
        for call in waiting:
            await call()

    server_s, client_s, wall_s = cpu.used_s(), time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as callers:
        for _ in range(CONCURRENT):
            callers.create_task(caller())
    client_s, wall_s = time.process_time() - client_s, time.perf_counter() - wall_s
    server_s = cpu.used_s() - server_s
    per_call = 1e6 / len(calls)
    return Cost(client_s * per_call, server_s * per_call, wall_s * per_call)


def chains(count: int, random_source: random.Random) -> list[Chain]:
    roots = [tuple(random_source.getrandbits(64) for _ in range(SHARED_BLOCKS)) for _ in range(ROOTS)]
    own_blocks = CHAIN_BLOCKS - SHARED_BLOCKS
    return [
        Chain(
            random_source.choice(roots) + tuple(random_source.getrandbits(64) for _ in range(own_blocks)),
            BLOCK_TOKENS,
            CHAIN_BLOCKS * BLOCK_TOKENS,
        )
        for _ in range(count)
    ]


async def measure(
    url: str, scheduling: SchedulingSettings, instances: int, requests: int, seed: int
) -> dict[str, Cost]:
    """One pass of ``requests`` requests through every step of their life."""
    random_source = random.Random(seed)
    cpu = ServerCpu(url)
    store = RedisStore(StoreSettings(url=url, command_timeout_s=30.0), scheduling=scheduling, batched=True)
    await store.open()
    try:
        pool: PoolStore = store.pool("default")
        names = [f"instance-{number}" for number in range(instances)]
        for name in names:
            await pool.put_instance(
                InstanceSpec(name, "http://x", state=InstanceState.READY, max_running_requests=requests)
            )
        asked = [
            (f"r{number}", chain, random_source.sample(names, 2))
            for number, chain in enumerate(chains(requests, random_source))
        ]
        await timed(cpu, [lambda: store.ping()] * 1000)  # warm up both sides
        costs = {"ping": await timed(cpu, [lambda: store.ping()] * requests)}
        steps: dict[str, Callable[[str, Chain, list[str]], Awaitable[object]]] = {
            "observe a pair": lambda _, chain, pair: pool.observe(pair, chain),
            "reserve": lambda request_id, chain, pair: pool.reserve(
                Reservation(request_id, "replica", pair[0], chain, 4096, 256, 5000, pair[1], 8192)
            ),
            "observe again": lambda _, chain, pair: pool.observe(pair, chain),
            "with horizon": lambda _, chain, pair: pool.observe(pair, chain, horizon=True),
            "look or reserve": lambda request_id, chain, pair: pool.reserve_idle(
                pair, Newcomer(f"new-{request_id}", "replica", chain, 256, 5000)
            ),
            "first token": lambda request_id, chain, pair: pool.first_token(request_id, pair[0], chain),
            "finish": lambda request_id, chain, pair: pool.finish(request_id),
        }
        if idle_holder_cost(scheduling) is None:
            del steps["look or reserve"]
        for name, step in steps.items():
            costs[name] = await timed(
                cpu,
                [lambda step=step, one=one: step(*one) for one in asked],  # type: ignore[misc]
            )
        return costs
    finally:
        await store.close()


async def bytes_per_block(url: str, blocks: int) -> float:
    """Memory of one block in an instance's KV metadata."""
    store = RedisStore(StoreSettings(url=url), scheduling=SchedulingSettings(), batched=True)
    await store.open()
    try:
        pool = store.pool("memory")
        await pool.put_instance(
            InstanceSpec("a", "http://a", state=InstanceState.READY, kv_capacity_tokens=blocks * BLOCK_TOKENS)
        )
        random_source = random.Random(7)
        for number, chain in enumerate(chains(blocks // SHARED_BLOCKS + ROOTS, random_source)):
            await pool.reserve(Reservation(f"r{number}", "replica", "a", chain, 1, 1, 5000))
            await pool.finish(f"r{number}")
        cached = (await pool.loads())["a"].cached_blocks
        return ServerCpu(url).memory_bytes(PoolKeys("dualmap", "memory").account("a").kv) / cached
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, nargs="+", default=[8, 500])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--policy", default="dualmap-wide", help="dualmap: queues by arrival, no prefix holders")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    scheduling = SchedulingSettings(policy=options.policy)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for instances in options.instances:
        passes = []
        for seed in range(options.repeat):
            with EmbeddedValkey() as server:
                passes.append(uvloop.run(measure(server.url, scheduling, instances, options.requests, seed)))
        report[str(instances)] = {
            step: {
                field: round(statistics.median(getattr(one[step], field) for one in passes), 1)
                for field in ("client_us", "server_us", "wall_us")
            }
            for step in passes[0]
        }
    with EmbeddedValkey() as server:
        block_bytes = round(uvloop.run(bytes_per_block(server.url, 50_000)), 1)
    if options.json:
        print(json.dumps({"calls": report, "bytes_per_kv_block": block_bytes}, indent=2))
        return
    print(f"{'instances':>9}  {'call':<16}{'client µs':>10}{'server µs':>10}{'wall µs':>10}")
    for instances_text, steps in report.items():
        for step, cost in steps.items():
            print(f"{instances_text:>9}  {step:<16}{cost['client_us']:>10}{cost['server_us']:>10}{cost['wall_us']:>10}")
    print(f"KV metadata: {block_bytes} bytes per block")


if __name__ == "__main__":
    main()
