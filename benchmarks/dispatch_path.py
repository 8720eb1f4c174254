"""The router's CPU and wall time from prompt rendered to request dispatched, by size of the fleet.

An embedded Valkey, one replica, no HTTP: ``Intake.place`` alone, one request at a time, then first token and finish, so
that the fleet stays unloaded. CPU is that of this process (all threads) during the loop, measured once for the placing
alone and once with the transitions that follow in the background.

The floor is the cost of an empty round trip, without packing, parsing or accounting: a placement by the default policy
makes one, so that much of its CPU belongs to the kernel and the event loop.

    python benchmarks/dispatch_path.py [--requests 2000] [--instances 8,500] [--policy NAME]
    python benchmarks/dispatch_path.py --floor
    python benchmarks/dispatch_path.py --alone      # the store is away: the replica decides on one in its process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from dualmap.router.http.admission import mint_request_id
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.replica.runtime import Runtime
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.settings import StoreSettings

BATCH = 100
WARM_UP = 200


def inference_requests(count: int, prompt_bytes: int, seed: int) -> list[InferenceRequest]:
    """Chat requests that share a system prompt in groups of ten, each with its own question."""
    rng = random.Random(seed)
    systems = [rng.randbytes(prompt_bytes // 4).hex() for _ in range(max(1, count // 10))]
    return [
        InferenceRequest(
            request_id=mint_request_id(),
            model="default",
            path="/v1/chat/completions",
            prompt=sent_prompt(
                "/v1/chat/completions",
                {
                    "messages": [
                        {"role": "system", "content": rng.choice(systems)},
                        {"role": "user", "content": rng.randbytes(prompt_bytes // 4).hex()},
                    ]
                },
            ),
            slo_s=None,
            stream=True,
        )
        for _ in range(count)
    ]


async def place_one_by_one(runtime: Runtime, requests: Sequence[InferenceRequest]) -> dict[str, float]:
    """Medians over batches: microseconds of CPU and of wall time per request; and the best batch, which a busy
    machine disturbed least."""
    wall_us: list[float] = []
    placing_cpu_us: list[float] = []
    whole_cpu_us: list[float] = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        cpu_before_s, placing_s = time.process_time(), 0.0
        for request in batch:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            placed = await runtime.intake.place(request)
            wall_us.append((time.perf_counter() - wall_s) * 1e6)
            placing_s += time.process_time() - cpu_s
            placed.first_token()
            placed.finish(Outcome.COMPLETED, Usage(prompt_tokens=600, cached_tokens=0))
            await runtime.pools.pools["default"].outbox.flush()
        placing_cpu_us.append(placing_s / len(batch) * 1e6)
        whole_cpu_us.append((time.process_time() - cpu_before_s) / len(batch) * 1e6)
    ordered = sorted(wall_us)
    return {
        "wall_us_p50": round(statistics.median(ordered), 1),
        "wall_us_p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "place_cpu_us": round(statistics.median(placing_cpu_us), 1),
        "place_cpu_us_best": round(min(placing_cpu_us), 1),
        "whole_life_cpu_us": round(statistics.median(whole_cpu_us), 1),
    }


async def measure(instances: int, requests: int, prompt_bytes: int, policy: str, *, alone: bool) -> dict[str, float]:
    scheduling = SchedulingSettings.model_validate({"policy": policy})
    server = EmbeddedValkey(unix_socket=Path(tempfile.mkdtemp(prefix="dualmap-")) / "valkey.sock")
    await asyncio.to_thread(server.start)
    store = await open_store(StoreSettings(url=server.url), scheduling=scheduling)
    try:
        pool = store.pool("default")
        for number in range(instances):
            await pool.members.put_instance(
                InstanceSpec(f"instance-{number:03}", f"http://127.0.0.1:{20000 + number}", state=InstanceState.READY)
            )
        runtime = Runtime(RouterSettings(), scheduling, store, [PoolSettings()])
        await runtime.start()
        try:
            await place_one_by_one(runtime, inference_requests(WARM_UP, prompt_bytes, seed=1))
            if alone:
                await asyncio.to_thread(server.stop)
                await place_one_by_one(runtime, inference_requests(WARM_UP, prompt_bytes, seed=3))
                assert runtime.pools.pools["default"].store.degraded
            return await place_one_by_one(runtime, inference_requests(requests, prompt_bytes, seed=2))
        finally:
            await runtime.stop()
    finally:
        await store.close()
        await asyncio.to_thread(server.stop)


class BareConnection(asyncio.Protocol):
    """One command at a time, its reply unread."""

    def __init__(self) -> None:
        self.replied: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.replied.set_result(None)


async def measure_floor(requests: int) -> dict[str, float]:
    """A bare round trip to the same server over the same kind of socket, batch by batch like placements."""
    loop = asyncio.get_running_loop()
    socket_path = Path(tempfile.mkdtemp(prefix="dualmap-")) / "valkey.sock"
    store = await open_store(StoreSettings(url=f"embedded://{socket_path}"), scheduling=SchedulingSettings())
    try:
        transport, bare = await loop.create_unix_connection(BareConnection, str(socket_path))
        cpu_us: list[float] = []
        wall_us: list[float] = []
        for _ in range(requests // BATCH):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for _ in range(BATCH):
                bare.replied = loop.create_future()
                transport.write(b"*1\r\n$4\r\nPING\r\n")
                await bare.replied
            wall_us.append((time.perf_counter() - wall_s) / BATCH * 1e6)
            cpu_us.append((time.process_time() - cpu_s) / BATCH * 1e6)
        transport.close()
        return {"wall_us_p50": round(statistics.median(wall_us), 1), "cpu_us": round(statistics.median(cpu_us), 1)}
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--instances", default="8,500", help="sizes of the fleet")
    parser.add_argument("--prompt-bytes", default="2048,32768", help="sizes of the prompt")
    parser.add_argument("--policy", default=SchedulingSettings().policy)
    parser.add_argument("--floor", action="store_true", help="measure a bare round trip instead")
    parser.add_argument("--alone", action="store_true", help="stop the store before it is measured")
    options = parser.parse_args()
    if options.floor:
        print(json.dumps({"a_bare_round_trip": uvloop.run(measure_floor(options.requests))}))
        return
    for prompt_bytes in map(int, options.prompt_bytes.split(",")):
        for instances in map(int, options.instances.split(",")):
            made = measure(instances, options.requests, prompt_bytes, options.policy, alone=options.alone)
            figures = uvloop.run(made)
            print(json.dumps({"instances": instances, "prompt_bytes": prompt_bytes, **figures}))


if __name__ == "__main__":
    main()
