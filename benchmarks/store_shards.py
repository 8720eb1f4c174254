"""Measures the load that a cluster of shards carries: the CPU of each shard for a request of one of its pools.

    python benchmarks/store_shards.py [--shards 1 2 4] [--pools 8] [--requests 8000] [--callers 64]

Starts a cluster of so many nodes of the private Valkey, with the pools spread evenly, and sends whole requests of each
pool through ``PoolStore`` as ``store_cost.py`` does, all from one process, as a router that serves all pools would. The
CPU time of each node is divided by the requests of its pools. A pool lives on one shard and a request calls its pool's
shard alone, so a cluster carries what its shards carry together, as long as the pools are spread evenly. What grows
with the shards is the client's part: fewer calls share one write. CPU times of a busy machine are longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
import uvloop
from redis.crc import key_slot
from store_cost import Bench, Scenario, ServerCpu, chains, members

from dualmap.research.table import Cell, Table, markdown_rows
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.embedded import server_binary
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings

SLOTS = 16_384
PORTS = range(20_000, 30_000)
BUS_ABOVE = 10_000
"""A node's bus listens so many ports higher."""
START_TIMEOUT_S = 60.0


class Shard:
    """One node of the cluster, and the slots that it owns."""

    def __init__(self, folder: Path, slots: range) -> None:
        self.slots = slots
        self.port = _free_port()
        self._process = subprocess.Popen(
            (
                *(str(server_binary()), "--cluster-enabled", "yes", "--save", "", "--bind", "127.0.0.1"),
                *("--port", str(self.port), "--dir", str(folder)),
            ),
            stdout=subprocess.DEVNULL,
        )
        self.client: Any = redis.Redis(port=self.port)  # its commands for clusters have no types

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def wait_until(self, done: Callable[[Any], object]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(redis.ConnectionError):
                if done(self.client):
                    return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("a node of the cluster did not come up")
            time.sleep(0.02)

    def stop(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def cluster(count: int) -> Iterator[list[Shard]]:
    """A cluster of so many shards, each with its part of the slots."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        shards: list[Shard] = []
        for number in range(count):
            own = Path(folder) / str(number)
            own.mkdir()
            shard = Shard(own, range(SLOTS * number // count, SLOTS * (number + 1) // count))
            stack.callback(shard.stop)
            shard.wait_until(lambda client: client.ping())
            shard.client.execute_command("CLUSTER", "ADDSLOTSRANGE", shard.slots[0], shard.slots[-1])
            if shards:
                shard.client.execute_command("CLUSTER", "MEET", "127.0.0.1", shards[0].port)
            shards.append(shard)
        for shard in shards:
            shard.wait_until(
                lambda client: (
                    b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")
                    and len(client.execute_command("CLUSTER", "SLOTS")) == count
                )
            )
        yield shards


def spread_pools(shards: Sequence[Shard], count: int) -> dict[str, Shard]:
    """Names of so many pools, which lie on the shards in turn."""
    wanted = [shards[number % len(shards)] for number in range(count)]
    found: dict[str, Shard] = {}
    for number in range(SLOTS):
        name = f"pool-{number}"
        slot = key_slot(PoolKeys("dualmap", name).meta)
        owner = next((shard for shard in wanted if slot in shard.slots), None)
        if owner is not None:
            found[name] = owner
            wanted.remove(owner)
    return found


async def measure(shards: Sequence[Shard], options: argparse.Namespace) -> list[Cell]:
    """A row: shards, pools, microseconds of a shard for a request of its pools (the mean and the most of the shards),
    microseconds of the client, and the requests a second that the shards' CPU allows."""
    scheduling = SchedulingSettings()
    scenario = Scenario(options.instances, options.blocks, 0)
    count = options.requests // options.pools
    nodes = ",".join(f"127.0.0.1:{shard.port}" for shard in shards)
    store = RedisStore(
        StoreSettings(url=f"redis+cluster://{nodes}", command_timeout_s=120.0),
        scheduling=scheduling,
    )
    await store.open()
    benches: list[Bench] = []
    requests = dict.fromkeys(shards, 0)
    lives: list[Iterator[Awaitable[None]]] = []
    try:
        for number, (name, shard) in enumerate(spread_pools(shards, options.pools).items()):
            pool = store.pool(name)
            bench = Bench(pool, await members(pool, scheduling, scenario, count), scheduling)
            benches.append(bench)
            first, *prompts = chains(count + 1, options.blocks, random.Random(number))
            await live(bench, "first", first)
            requests[shard] += count
            lives.append(lives_of(bench, prompts))
        meters = {shard: ServerCpu(shard.url) for shard in shards}
        before, client_s = {shard: meters[shard].used_s() for shard in shards}, time.process_time()
        async with asyncio.TaskGroup() as callers:
            for of_pool in lives:
                for _ in range(max(1, options.callers // options.pools)):
                    callers.create_task(one_after_another(of_pool))
        client_us = (time.process_time() - client_s) * 1e6 / sum(requests.values())
        each = [(meters[shard].used_s() - before[shard]) * 1e6 / requests[shard] for shard in shards]
        return [len(shards), options.pools, sum(each) / len(each), max(each), client_us, len(shards) * 1e6 / max(each)]
    finally:
        for bench in benches:
            await bench.close()
        await store.close()


def lives_of(bench: Bench, prompts: Sequence[Chain]) -> Iterator[Awaitable[None]]:
    """The whole requests of a pool; each begins when it is awaited."""
    return (live(bench, f"request-{number}", chain) for number, chain in enumerate(prompts))


async def one_after_another(lives: Iterator[Awaitable[None]]) -> None:
    """One of the callers that share these."""
    for life in lives:
        await life


async def live(bench: Bench, request_id: str, chain: Chain) -> None:
    """A whole request; nothing is held, so it is dispatched at once."""
    await bench.place(request_id, chain)
    grant = bench.fleet.dispatched.popleft()
    await bench.first_token(grant)
    await bench.finish(grant)


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as node, socket.socket() as bus:
            node.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS_ABOVE))
            return port
    raise SystemExit("no free port")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pools", type=int, default=8, help="spread evenly over the shards")
    parser.add_argument("--instances", type=int, default=8, help="of each pool")
    parser.add_argument("--blocks", type=int, default=4, help="of a prompt")
    parser.add_argument("--requests", type=int, default=8000, help="of all pools together")
    parser.add_argument("--callers", type=int, default=64, help="that call at once")
    options = parser.parse_args()
    if not max(options.shards) <= options.pools <= options.requests:
        parser.error("there must be a pool for each shard, and a request for each pool")
    rows = []
    for count in options.shards:
        with cluster(count) as shards:
            rows.append(uvloop.run(measure(shards, options)))
    columns = ("shards", "pools", "µs of a shard a request", "the most", "µs of the client", "requests/s")
    print(*markdown_rows(Table("Shards", columns, rows)), sep="\n")


if __name__ == "__main__":
    main()
