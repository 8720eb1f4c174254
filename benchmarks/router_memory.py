"""The memory of one router replica over many requests: it must not grow.

The router, its store and the mock instance are those of ``router_overhead.py``. Requests are the turns of conversations
of four, each with one of eight system prompts; a client's connection is closed after fifty. Printed is the resident
memory of the router process at the start and after so many requests of each load, with the peak between these:

short     chat completions of 2 KB, answers that do not stream
streamed  the same, streamed in 16 chunks
apis      chat completions and completions, half of them streamed, messages and responses, of 256 bytes to 32 KB
away      as short, and the store stops and comes back every thousand requests

    python benchmarks/router_memory.py [--loads short,streamed,apis,away] [--steps 1000,20000,50000,100000]
        [--mode full]                                    # of router_overhead.py; full@/tmp/older: of another checkout
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson
import uvloop
from router_overhead import CONNECTIONS, Client, Router, connect, running

from dualmap.statestore.embedded import EmbeddedValkey

INSTANCES = 8
TURNS = 4
SYSTEM_PROMPTS = 8
CONNECTION_REQUESTS = 50
AWAY_EVERY = 1000
AWAY_REQUESTS = 200
"""Requests that are sent while the store is away."""
BACK_S = 2.0
"""Longer than a replica takes to find the store again."""
SIZES = (256, 2048, 8192, 32_768)
STREAM = "mock:16,0 "


@dataclass(frozen=True, slots=True)
class Load:
    """The form of the requests of a load."""

    apis: Sequence[str] = ("/v1/chat/completions",)
    sizes: Sequence[int] = (2048,)
    streams: bool = False
    """Whether its requests stream; of several ``apis`` half of those that stream here."""
    goes_away: bool = False


LOADS = {
    "short": Load(),
    "streamed": Load(streams=True),
    "apis": Load(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"), SIZES, streams=True),
    "away": Load(goes_away=True),
}
STREAMED_APIS = ("/v1/chat/completions", "/v1/completions")


def wire(load: Load, number: int) -> bytes:
    """The request of this number: a turn of a conversation whose former turns are in front of it."""
    conversation, turn = divmod(number, TURNS)
    path = load.apis[conversation % len(load.apis)]
    streams = (
        load.streams and path in STREAMED_APIS and (len(load.apis) == 1 or conversation // len(load.apis) % 2 == 0)
    )
    size = random.Random(conversation).choice(load.sizes)
    system = random.Random(conversation % SYSTEM_PROMPTS).randbytes(size // 4).hex()
    texts = [random.Random(f"{conversation}/{each}").randbytes(size // 16).hex() for each in range(turn + 1)]
    order = STREAM if streams else ""
    body = {"model": "default", "stream": bool(streams), **_prompt(path, system, [order + texts[0], *texts[1:]], order)}
    packed = orjson.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(packed)}\r\n\r\n"
    return head.encode() + packed


def _prompt(path: str, system: str, texts: Sequence[str], order: str) -> dict[str, object]:
    if path == "/v1/completions":
        return {"prompt": " ".join((order + system, *texts)), "max_tokens": 64}
    if path == "/v1/responses":
        return {"instructions": system, "input": " ".join(texts), "max_output_tokens": 64}
    answered = {"role": "assistant", "content": "word " * 50}
    turns = [each for text in texts for each in ({"role": "user", "content": text}, answered)][:-1]
    if path == "/v1/messages":
        return {"system": system, "messages": turns, "max_tokens": 64}
    return {"messages": [{"role": "system", "content": system}, *turns], "max_tokens": 64}


async def send(port: int, wires: Iterator[bytes]) -> None:
    """Send all, each connection its next one when it has its answer."""

    async def work(client: Client) -> None:
        for sent in itertools.count(1):
            if (each := next(wires, None)) is None:
                break
            await client.ask(each)
            if sent % CONNECTION_REQUESTS == 0:
                client.close()
                (client,) = await connect(port, 1)
        client.close()

    await asyncio.gather(*[work(client) for client in await connect(port, CONNECTIONS)])


async def send_with_outages(router: Router, store: EmbeddedValkey, wires: Iterator[bytes]) -> float:
    """Send all, the store stopped for some of every ``AWAY_EVERY``; returns the largest memory while it was, in MB."""
    peak_mb = 0.0
    while first := next(wires, b""):
        await asyncio.to_thread(store.stop)
        await send(router.port, itertools.chain((first,), itertools.islice(wires, AWAY_REQUESTS - 1)))
        peak_mb = max(peak_mb, router.rss_mb())
        await asyncio.to_thread(store.start)
        await asyncio.sleep(BACK_S)
        await send(router.port, itertools.islice(wires, AWAY_EVERY - AWAY_REQUESTS))
    return peak_mb


async def measure(load: Load, steps: Sequence[int], mode: str, core: int) -> list[float]:
    """Resident memory in MB at the start and after each of these numbers of requests, and the largest seen."""
    async with running(mode, core, INSTANCES) as (router, _, store):
        found = [router.rss_mb()]
        peak_mb = 0.0
        for done, step in itertools.pairwise((0, *steps)):
            wires = (wire(load, number) for number in range(done, step))
            if load.goes_away:
                peak_mb = max(peak_mb, await send_with_outages(router, store, wires))
            else:
                await send(router.port, wires)
            found.append(router.rss_mb())
        return [*found, max(peak_mb, *found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--steps", default="1000,20000,50000,100000", help="requests after which memory is read")
    parser.add_argument("--mode", default="full")
    options = parser.parse_args()
    cores, steps = os.sched_getaffinity(0), [int(step) for step in options.steps.split(",")]
    core = max(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    print("| RSS in MB | at the start |", " | ".join(f"{step:,}" for step in steps), "| largest seen |")
    print("| --- |", "---: | " * (len(steps) + 2))
    for name in options.loads.split(","):
        found = uvloop.run(measure(LOADS[name], steps, options.mode, core))
        print(f"| {name} |", " | ".join(f"{each:.1f}" for each in found), "|", flush=True)


if __name__ == "__main__":
    main()
