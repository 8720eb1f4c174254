"""The CPU of an agent's turn where the pool has a tokenizer, beside other versions and beside blocks of bytes.

The routers run at the same time, pinned to one core, in front of the same mock, whose answers have no usage; only one
is loaded at a time, and each turn of the measurement gives all of them the same conversations (``agent_turns.py``). The
tokenizer is trained here, on the standard library, with a chat template like ChatML's. ``first`` is the first request
of each conversation, ``later`` is each one after it. A ratio compares with the first router, within the same turn.

    python benchmarks/tokenized_turns.py --routers tokens@/tmp/older,tokens,bytes [--kilobytes 550] [--turns 6]
    python benchmarks/tokenized_turns.py --responses    # over the responses API, as Codex sends it

``tokens@/tmp/older`` is the router of another version, checked out there; ``bytes`` has no tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import router_overhead
import uvloop
from agent_turns import as_response, turns, wire
from router_overhead import MockInstance, Router, closed_loop, modules_of
from tokenized_prompts import library_text, write_model

from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.settings import StoreSettings

INSTANCES = 8
BLOCK_TOKENS = 16
CONVERSATIONS = 3
READY_WITHIN_S = 60.0


def run_router(tokenizer: Path | None, store_url: str, core: int, ready: Connection) -> None:
    """The child process: one replica, until SIGTERM."""
    os.sched_setaffinity(0, {core})
    settings = RouterSettings(port=0, settle_s=0.0, tokenize_timeout_s=10.0)
    pool, store = PoolSettings(name="default", tokenizer=tokenizer), StoreSettings(url=store_url)
    uvloop.run(serve(settings, SchedulingSettings(), store, [pool], on_ready=lambda port, _: ready.send(port)))


async def started(name: str, folder: Path, url: str, core: int, stack: AsyncExitStack) -> Router:
    """A router of this name, with a store of its own."""
    kind, _, checkout = name.partition("@")
    server = EmbeddedValkey(unix_socket=Path(tempfile.mkdtemp(prefix="dualmap-")) / "valkey.sock")
    await asyncio.to_thread(server.start)
    stack.callback(server.stop)
    store = await open_store(StoreSettings(url=server.url), scheduling=SchedulingSettings())
    for number in range(INSTANCES):
        spec = InstanceSpec(
            f"i{number}", url, state=InstanceState.READY, block_tokens=BLOCK_TOKENS, prefill_tokens_per_s=1e7
        )
        await store.pool("default").members.put_instance(spec)
    await store.close()
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    tokenizer = folder if kind == "tokens" else None
    process = context.Process(target=run_router, args=(tokenizer, server.url, core, child))
    with modules_of(checkout):
        process.start()
    stack.callback(process.terminate)
    if not await asyncio.to_thread(parent.poll, READY_WITHIN_S):
        raise TimeoutError("the router did not start")
    return Router(process.pid or 0, parent.recv(), process)


def wire_of_response(body: bytes) -> bytes:
    return wire(as_response(body), "/v1/responses")


async def measure(options: argparse.Namespace, core: int) -> None:
    answer = orjson.loads(router_overhead.ANSWER)
    del answer["usage"]  # of other tokens than these prompts have: they would be counted otherwise from then on
    router_overhead.ANSWER = orjson.dumps(answer)
    wire_of = wire_of_response if options.responses else wire
    folder, names = Path(tempfile.mkdtemp(prefix="dualmap-")), options.routers.split(",")
    write_model(folder, library_text())
    async with AsyncExitStack() as stack:
        mock = await asyncio.get_running_loop().create_server(MockInstance, "127.0.0.1", 0)
        stack.callback(mock.close)
        url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
        routers = [await started(name, folder, url, core, stack) for name in names]
        for size in [1000 * int(each) for each in options.kilobytes.split(",")]:
            found: list[dict[str, list[float]]] = [{"first": [], "later": []} for _ in names]
            for turn in range(options.turns):
                bodies = [[*turns(1000 * turn + n, size)] for n in range(CONVERSATIONS)]
                wires = [[wire_of(body) for body in each] for each in bodies]
                first = [each[0] for each in wires]
                later = [each[place] for place in range(1, len(wires[0])) for each in wires]
                for router, values in zip(routers, found, strict=True):
                    for kind, sent in (("first", first), ("later", later)):
                        cpu_s = await router.cpu_of(closed_loop(router.port, sent, CONVERSATIONS))
                        values[kind].append(cpu_s / len(sent) * 1e6)
            for name, values in zip(names, found, strict=True):
                row: dict[str, object] = {"router": name, "KB": size // 1000}
                for kind, figures in values.items():
                    ratios = [each / base for each, base in zip(figures, found[0][kind], strict=True)]
                    row[f"us {kind}"] = round(statistics.median(figures))
                    row[f"{kind}: of {names[0]}"] = round(statistics.median(ratios), 3)
                print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default="tokens,bytes", help="the first is the base")
    parser.add_argument("--kilobytes", default="550", help="sizes of the first requests")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--responses", action="store_true", help="over the responses API, with reasoning")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    uvloop.run(measure(options, core))


if __name__ == "__main__":
    main()
