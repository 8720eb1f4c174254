"""The cost of the live page to a replica: share of a core with viewers, over a pool of many instances.

    python benchmarks/live_page.py [--instances 500] [--viewers 5] [--seconds 30]

One replica over an embedded Valkey, in turns without viewers and with them. Figures are CPU time of the replica's
process, read from the kernel; the difference is the page's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import uvloop

from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.settings import StoreSettings

TURNS = 3


def run_replica(store_url: str, ready: Connection) -> None:
    settings = RouterSettings(port=0, settle_s=0.0)
    store = StoreSettings(url=store_url)
    on_ready = lambda port, _: ready.send(port)  # noqa: E731
    uvloop.run(serve(settings, SchedulingSettings(), store, [PoolSettings()], on_ready=on_ready))


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def view(url: str, frames: list[int]) -> None:
    async with httpx.AsyncClient(timeout=30) as client, client.stream("GET", url) as answer:
        async for chunk in answer.aiter_bytes():
            frames.append(len(chunk))


async def share(pid: int, url: str, viewers: int, seconds: float) -> tuple[float, int]:
    """The replica's share of a core while so many look, and the bytes that each got a second."""
    frames: list[int] = []
    tasks = [asyncio.create_task(view(url, frames)) for _ in range(viewers)]
    await asyncio.sleep(3)  # the first frames are larger
    frames.clear()
    before_s, began_s = cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    used = (cpu_s(pid) - before_s) / (time.monotonic() - began_s)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return used, round(sum(frames) / seconds / max(1, viewers))


async def measure(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(unix_socket=Path(folder) / "store.sock")
        await asyncio.to_thread(server.start)
        process = None
        try:
            store = await open_store(StoreSettings(url=server.url), scheduling=SchedulingSettings())
            for number in range(options.instances):
                url = f"http://10.0.{number // 250}.{number % 250}:8000"
                await store.pool("default").members.put_instance(
                    InstanceSpec(f"instance-{number}", url=url, state=InstanceState.READY)
                )
            await store.close()
            ready, child = context.Pipe()
            process = context.Process(target=run_replica, args=(server.url, child), daemon=True)
            process.start()
            port = await asyncio.to_thread(ready.recv)
            stream = f"http://127.0.0.1:{port}/ui/stream"
            for _ in range(TURNS):
                idle, _ = await share(process.pid or 0, stream, 0, options.seconds)
                looking, size = await share(process.pid or 0, stream, options.viewers, options.seconds)
                print(
                    json.dumps(
                        {
                            "instances": options.instances, "viewers": options.viewers,
                            "idle %": round(100 * idle, 2), "with viewers %": round(100 * looking, 2),
                            "page %": round(100 * (looking - idle), 2), "bytes/s and viewer": size,
                        }
                    ), flush=True
                )  # fmt: skip
        finally:
            if process is not None:
                process.terminate()
                process.join(10)
            await asyncio.to_thread(server.stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
