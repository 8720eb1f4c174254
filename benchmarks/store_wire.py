"""CPU of this process per call of the store: the fleet's own connection against redis-py with hiredis.

    python benchmarks/store_wire.py [--calls 4000] [--repeat 5] [--tcp]

A script with ten keys and 600 bytes of arguments, about what a reservation sends, that answers one count: by the
fleet's connection (``WireCalls``) and by redis-py's client, whose pool has a connection for each caller, from 1 and
from 64 callers at once. They take turns; the figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from redis.asyncio import Redis

from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.scripts import NO_SCRIPTS
from dualmap.statestore.redis.servers import Servers
from dualmap.statestore.redis.wire import WireCalls

SCRIPT = "return redis.call('EXISTS', unpack(KEYS))"
KEYS = [b"dualmap:{default}:instance:llama-%d:account" % number for number in range(10)]
ARGUMENTS = ("r" * 36, b"\x00" * 512, 4096, 256, 5000, 1)
CONCURRENT = (1, 64)

Call = Callable[..., Awaitable[Any]]


async def cpu_us(call: Call, calls: int, concurrent: int) -> float:
    """Microseconds of CPU for one of ``calls``, sent by that many callers that each wait for their answer."""

    async def caller() -> None:
        for _ in range(calls // concurrent):
            await call(*command)

    command = ("EVALSHA", await call("SCRIPT", "LOAD", SCRIPT), len(KEYS), *KEYS, *ARGUMENTS)
    started_s = 0.0
    for measured in (False, True):
        started_s = time.process_time()
        await asyncio.gather(*(caller() for _ in range(concurrent if measured else 1)))
    return (time.process_time() - started_s) * 1e6 / (calls // concurrent * concurrent)


async def compare(url: str, calls: int, repeat: int) -> dict[str, dict[int, Sequence[float]]]:
    """Figures by client and number of callers."""
    keys, servers = PoolKeys("dualmap", "default"), Servers(url, 5.0)
    shared = WireCalls(servers.connections(keys), NO_SCRIPTS, 30.0)
    redis_py = Redis.from_url(url, protocol=2)
    ways: dict[str, Call] = {
        "the fleet's connection": shared.command,
        "redis-py": redis_py.execute_command,
    }
    figures: dict[str, dict[int, list[float]]] = {name: {number: [] for number in CONCURRENT} for name in ways}
    for _ in range(repeat):
        for name, call in ways.items():
            for number in CONCURRENT:
                figures[name][number].append(await cpu_us(call, calls, number))
    await asyncio.gather(shared.close(), redis_py.aclose())
    return figures  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tcp", action="store_true", help="by the loopback address; by a Unix socket without")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dualmap-") as folder:
        socket = None if options.tcp else Path(folder) / "store.sock"
        with EmbeddedValkey(unix_socket=socket) as server:
            figures = uvloop.run(compare(server.url, options.calls, options.repeat))
    print(f"{'client CPU per script call, us':<32}" + "".join(f"{number:>4} at once" for number in CONCURRENT))
    for name, by_number in figures.items():
        medians = "".join(f"{statistics.median(by_number[number]):>12.1f}" for number in CONCURRENT)
        print(f"{name:<32}{medians}")


if __name__ == "__main__":
    main()
