"""The CPU that a request costs routers of several modes, or versions, loaded in turns: what request lines and tracing
add to it, what a change takes away.

All routers run at the same time, pinned to one core; only one is loaded at a time. Each turn gives every router the
same requests, in an order that rotates, so that the machine's noise meets all modes alike. A turn's ratio compares a
mode with the first one within that turn; +- is the 95 % interval of their median. The first mode stands twice by
default: the second shows what the machine alone makes of it. What a router costs while idle, and what it cost to start,
is measured apart: neither belongs to a request.

    python benchmarks/overhead_in_turns.py [--modes full,full,logged,traced] [--turns 100] [--requests 1000]
        [--prompt-bytes 2048] [--chunks 0]
    python benchmarks/overhead_in_turns.py --modes full,full,tenants
    python benchmarks/overhead_in_turns.py --modes full,full,sessions,turns,runs
    python benchmarks/overhead_in_turns.py --modes full@/tmp/older,full,full@/tmp/older --chunks 8

``full@/tmp/older`` is the router of another version, checked out there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import router_overhead as routers_of  # of another version where a router of that one starts, with other names
import uvloop
from router_overhead import CONNECTIONS, Router, closed_loop, running

IDLE_S = 10.0


async def measure(options: argparse.Namespace, core: int) -> list[dict[str, object]]:
    modes = options.modes.split(",")
    async with AsyncExitStack() as stack:
        routers = [(await stack.enter_async_context(running(mode, core, options.instances)))[0] for mode in modes]
        start_s = [router.cpu_s() for router in routers]
        for router, mode in zip(routers, modes, strict=True):
            await closed_loop(router.port, _requests(options, mode, 10**9, 500), CONNECTIONS)
        await asyncio.sleep(6)  # the first export connects
        idle_s = await _idle(routers)
        us = await _turns(routers, modes, options, idle_s)
    rows = []
    for number, mode in enumerate(modes):
        ratios = [each / base for each, base in zip(us[number], us[0], strict=True)]
        middle, spread = statistics.median(ratios), statistics.stdev(ratios)
        rows.append(
            {
                "mode": mode,
                "us/request": round(statistics.median(us[number]), 1),
                f"of {modes[0]}": round(middle, 3),
                "+-": round(1.96 * 1.25 * spread / len(ratios) ** 0.5, 3),
                "idle us/s": round(idle_s[number] * 1e6),
                "start CPU s": round(start_s[number], 2),
            }
        )
    return rows


def _requests(options: argparse.Namespace, mode: str, seed: int, count: int) -> list[bytes]:
    mock = f"{options.chunks},0" if options.chunks else None
    return [
        routers_of.request(
            options.prompt_bytes, seed + n, mock, routers_of.key_of(mode, n), routers_of.session_of(mode, n)
        )
        for n in range(count)
    ]


async def _idle(routers: list[Router]) -> list[float]:
    """CPU seconds a second without load."""
    before_s = [router.cpu_s() for router in routers]
    await asyncio.sleep(IDLE_S)
    return [(router.cpu_s() - each) / IDLE_S for router, each in zip(routers, before_s, strict=True)]


async def _turns(
    routers: list[Router], modes: list[str], options: argparse.Namespace, idle_s: list[float]
) -> list[list[float]]:
    """CPU per request of each router, in each turn, in us: from the start of its turn to the start of its next one,
    less what it costs while idle. So what is written or exported later counts."""
    order = list(range(len(routers)))
    began: list[list[tuple[float, float]]] = [[] for _ in routers]
    for turn in range(options.turns + 1):
        for number in order:
            wires = _requests(options, modes[number], turn * options.requests, options.requests)
            began[number].append((routers[number].cpu_s(), time.monotonic()))
            if turn < options.turns:
                await closed_loop(routers[number].port, wires, CONNECTIONS)
        order = order[1:] + order[:1]
    return [
        [
            (cpu_s - from_s - idle_s[number] * (now_s - then_s)) / options.requests * 1e6
            for (from_s, then_s), (cpu_s, now_s) in pairwise(began[number])
        ]
        for number in range(len(routers))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", default="full,full,logged,traced", help="of router_overhead.py; the first is the base"
    )
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000, help="of each mode and turn")
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=0, help="of a streamed answer; 0: it does not stream")
    parser.add_argument("--instances", type=int, default=8, help="all of them the one mock")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    for row in uvloop.run(measure(options, core)):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
