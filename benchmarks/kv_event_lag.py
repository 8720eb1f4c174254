"""The cost of following KV events: the lag from publishing to the store, and the CPU of worker and store for a block.

Publishers in a process of their own stand for the engines: each publishes so many stored blocks a second in steps, and
as many removed ones once its cache is full. One worker follows them all, in this process, over a private Valkey.

    python benchmarks/kv_event_lag.py --instances 8 --blocks-per-s 2000
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import time
from collections import deque
from typing import Any

from redis.asyncio import Redis

from dualmap.runtime.clock import RealClock
from dualmap.runtime.pool_settings import KvEventSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.simulation.emulator.kv_publisher import KvEventPublisher
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.context import PoolContext
from dualmap.workers.kv_events.job import KvEventsJob
from dualmap.workers.loop import run_job
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.probe import Prober
from dualmap.workers.settings import WorkerSettings

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 40


class Lags:
    """Takes the place of the worker's histogram, and keeps every sample."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def labels(self, *_: str) -> Lags:
        return self

    def observe(self, lag_s: float) -> None:
        self.samples.append(lag_s)


def publish(ports: list[int], options: argparse.Namespace) -> None:
    """The process of the engines."""
    asyncio.run(_publish(ports, options))


async def _publish(ports: list[int], options: argparse.Namespace) -> None:
    publishers = [KvEventPublisher(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1000}") for port in ports]
    await asyncio.gather(*(_engine(publisher, options) for publisher in publishers))


async def _engine(publisher: KvEventPublisher, options: argparse.Namespace) -> None:
    rng, held = random.Random(publisher.endpoint), deque[int]()
    per_step, next_s = round(options.blocks_per_s / options.steps_per_s), time.monotonic() + rng.random() / 10
    while True:
        events: list[dict[str, Any]] = []
        for first in range(0, per_step, PROMPT_BLOCKS):
            names = [rng.getrandbits(64) for _ in range(min(PROMPT_BLOCKS, per_step - first))]
            ids = rng.choices(range(100_000), k=len(names) * BLOCK_TOKENS)
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": names,
                    "parent_block_hash": None,
                    "token_ids": ids,
                    "block_size": BLOCK_TOKENS,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * len(names),
                    "group_idx": 0,
                }
            )
            held.extend(names)
        while len(held) > options.capacity_blocks:
            events.append({"type": "BlockRemoved", "block_hashes": [held.popleft()], "medium": "GPU", "group_idx": 0})
        next_s += 1 / options.steps_per_s
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        publisher.publish(events, time.time())


async def follow(ports: list[int], options: argparse.Namespace, server: EmbeddedValkey) -> None:
    store = RedisStore(StoreSettings(url=server.url), scheduling=SchedulingSettings())
    await store.open()
    client, pool = Redis.from_url(server.url), store.pool("default")
    for port in ports:
        await pool.members.put_instance(InstanceSpec(f"i{port}", f"http://127.0.0.1:{port}", state=InstanceState.READY))
    events = KvEventSettings(endpoint="tcp://{host}:{port}", replay_endpoint="tcp://{host}:{port+1000}")
    metrics, clock = WorkerMetrics(), RealClock()
    settings = PoolSettings(kv_events=events)
    context = PoolContext(
        pool=pool, settings=settings, worker=WorkerSettings(), worker_id="worker", clock=clock, metrics=metrics,
        jitter=random.Random(1),
    )  # fmt: skip
    async with Prober(timeout_s=1.0) as prober, KvEventsJob(context, prober) as job:
        running = asyncio.create_task(run_job(job, context))
        await asyncio.sleep(options.warm_up_s)
        lags = metrics.kv_event_lag_seconds = Lags()  # type: ignore[assignment]
        before, worker_s, store_s = _counted(metrics), _cpu_s(), await _store_cpu_s(client)
        await asyncio.sleep(options.seconds)
        stored, removed, batches = (now - then for now, then in zip(_counted(metrics), before, strict=True))
        worker_s, store_s = _cpu_s() - worker_s, await _store_cpu_s(client) - store_s
        statuses = {record.status.value for record in (await pool.kv_events.records()).values()}
        running.cancel()
    samples = sorted(lags.samples)
    print(
        f"{stored / options.seconds:,.0f} blocks/s stored, {removed / options.seconds:,.0f} removed, "
        f"{batches / options.seconds:,.0f} batches/s in {len(samples) / options.seconds:,.0f} writes/s; {statuses}"
    )
    print(
        f"lag from publishing to the store: P50 {_at(samples, 0.5):.1f} ms, P99 {_at(samples, 0.99):.1f} ms, "
        f"most {_at(samples, 1.0):.1f} ms"
    )
    print(
        f"CPU for a stored block (and its removal): worker {worker_s / stored * 1e6:.1f} µs, "
        f"store {store_s / stored * 1e6:.1f} µs"
    )
    await client.aclose()
    await store.close()


def _counted(metrics: WorkerMetrics) -> tuple[float, float, float]:
    def read(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, {"pool": "default", **labels}) or 0.0

    blocks = "dualmap_worker_kv_event_blocks_total"
    return read(blocks, kind="stored"), read(blocks, kind="removed"), read("dualmap_worker_kv_event_batches_total")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _store_cpu_s(client: Any) -> float:
    used = await client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _at(samples: list[float], share: float) -> float:
    return samples[min(len(samples) - 1, int(share * len(samples)))] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--blocks-per-s", type=int, default=2000, help="of each instance")
    parser.add_argument("--steps-per-s", type=int, default=40, help="engine steps, a batch each")
    parser.add_argument("--capacity-blocks", type=int, default=10_000, help="of each instance")
    parser.add_argument("--warm-up-s", type=float, default=7.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--first-port", type=int, default=28_100)
    options = parser.parse_args()
    ports = [options.first_port + number for number in range(options.instances)]
    engines = multiprocessing.get_context("spawn").Process(target=publish, args=(ports, options), daemon=True)
    engines.start()
    with EmbeddedValkey() as server:
        asyncio.run(follow(ports, options, server))
    engines.kill()


if __name__ == "__main__":
    main()
