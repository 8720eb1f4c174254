"""A router and a worker as processes beside an emulated API server, and a workload whose pods are emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.workers.ops import serve_ops
from tests.support.fork_servers import ForkedCommand, start_command
from tests.support.kubernetes_cluster import PODS, Cluster, Scaled, asgi
from tests.support.ports import free_port

READY_S = 60.0


@dataclass(frozen=True)
class KubernetesFleet:
    host: str
    port: int
    store_url: str
    config: str


async def until(probe: Callable[[], Awaitable[Any]], what: str, within_s: float = READY_S) -> None:
    """Wait until the probe is true; fails with ``what`` if it never is."""
    end_s = time.monotonic() + within_s
    while not await probe():
        assert time.monotonic() < end_s, f"never within {within_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _stop(processes: list[ForkedCommand]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


@contextlib.asynccontextmanager
async def kubernetes_fleet(cluster: Cluster, **pool: Any) -> AsyncIterator[KubernetesFleet]:
    """A fleet of one pool, with further settings of it, that discovers the cluster's pods with ``app=vllm``."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey() as valkey:
        async with serve_ops(cast(Any, asgi(cluster)), "127.0.0.1", 0) as api_port:
            port = free_port()
            kubernetes = {"label_selector": "app=vllm", "namespace": "default"}
            discovery = {"kubernetes": {**kubernetes, "api_url": f"http://127.0.0.1:{api_port}"}}
            settings = {
                "store": {"url": valkey.url},
                "router": {"port": port},
                "pools": [{"name": "default", "model": "m", "discovery": discovery, **pool}],
            }
            path, log_path = Path(folder) / "fleet.yaml", Path(folder) / "log"
            path.write_text(yaml.safe_dump(settings))
            commands = ("worker", "router")
            processes = [start_command(command, "--config", str(path), out=log_path) for command in commands]
            try:
                await until(lambda: listens(port), "the router listens")
                yield KubernetesFleet("127.0.0.1", port, valkey.url, str(path))
                ended = [
                    command for command, process in zip(commands, processes, strict=True) if process.poll() is not None
                ]
                assert not ended, f"{ended} ended:\n{log_path.read_text()[-3000:]}"
            finally:
                _stop(processes)
                cluster.close()


class EngineWorkload(Scaled):
    """A workload whose pods are emulated engines, each a process, that become ready a while after they are made."""

    def __init__(self, cluster: Cluster, workload: str, *, start_s: float, model: str = "m", role: str = "") -> None:
        self._start_s = start_s
        self._model = model
        self._engines: dict[str, ForkedCommand] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self.ready_s: list[float] = []
        """When pods became ready, on the monotonic clock."""
        super().__init__(cluster, workload, is_ready=False, role=role)

    def add(self) -> str:
        name = super().add()
        port = free_port()
        options = ("--port", str(port), "--instances", "1", "--emulator.model", self._model)
        self._engines[name] = start_command("emulate", *options, out=Path(os.devnull))
        notes = {"dualmap/port": str(port)}
        self._cluster.put_pod(name, ip="127.0.0.1", ready=False, labels=self.labels, annotations=notes)
        task = asyncio.create_task(self._become_ready(name, port))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return name

    async def _become_ready(self, name: str, port: int) -> None:
        begun_s = time.monotonic()
        await until(lambda: listens(port), "the engine listens")
        await asyncio.sleep(max(0.0, self._start_s - (time.monotonic() - begun_s)))
        if name in self.pods():
            self.ready_s.append(time.monotonic())
            notes = {"dualmap/port": str(port)}
            self._cluster.put_pod(name, ip="127.0.0.1", labels=self.labels, annotations=notes)

    def terminate(self, name: str) -> None:
        super().terminate(name)
        self._cluster.delete(PODS, name)
        _stop([self._engines.pop(name)])

    def close(self) -> None:
        for task in self._starting:
            task.cancel()
        _stop(list(self._engines.values()))
